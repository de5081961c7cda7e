//! The logs of one shard: found by key and window, ordered by last use, packed without holes, and counted in bytes.
//! What the logs hold is none of this room's business.
//!
//! Slots lie in chunks, so that growing copies nothing, and without holes: the last slot moves into the place of
//! one that goes. So memory is given back when keys go, whatever their order. A table maps hashes to places; a list
//! runs through the slots from the most to the least recently used.

use std::mem;

use hashbrown::HashTable;

use super::log::Log;
use crate::limit::Window;

/// Slots per chunk, a power of two: 64 of them are 5.5 KB.
const CHUNK: usize = 64;

/// No slot: the end of the list.
const NONE: u32 = u32::MAX;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Slots {
    table: HashTable<Place>,
    /// All full but the last.
    chunks: Vec<Vec<Slot>>,
    /// Bytes of keys and of rings.
    owned: usize,
    newest: Option<u32>,
    oldest: Option<u32>,
    /// Slots that the sweep has still to visit: those below.
    unswept: u32,
}

/// A slot's index; good until a slot is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotId(u32);

/// What the table holds. The hash is here so that growing the table need not visit the slots.
#[derive(Debug)]
struct Place {
    hash: u32,
    slot: u32,
}

#[derive(Debug)]
struct Slot {
    key: Box<[u8]>,
    window: Window,
    hash: u32,
    /// When it was last used, in ticks.
    used: u32,
    newer: u32,
    older: u32,
    log: Log,
}

// === impl Slots ===

impl Slots {
    /// How many logs there are.
    pub(super) fn len(&self) -> usize {
        match self.chunks.split_last() {
            Some((last, full)) => full.len() * CHUNK + last.len(),
            None => 0,
        }
    }

    /// Bytes of memory behind this value: keys, rings, slots and table, as an allocator rounds them.
    pub(super) fn bytes(&self) -> usize {
        self.owned
            + self.table.allocation_size()
            + allocated(self.chunks.capacity() * mem::size_of::<Vec<Slot>>())
            + self.chunks.len() * allocated(CHUNK * mem::size_of::<Slot>())
    }

    /// The log of that key and window. `hash` is the key's; every bit of it counts.
    pub(super) fn find(&self, hash: u64, key: &[u8], window: Window) -> Option<SlotId> {
        let hash = with_window(hash, window);
        let place = self.table.find(spread(hash), |place| {
            place.hash == hash && {
                let slot = self.slot(place.slot);
                slot.window.seconds() == window.seconds() && *slot.key == *key
            }
        })?;
        Some(SlotId(place.slot))
    }

    /// Adds a log, as the most recently used. There is none yet of that key and window.
    pub(super) fn insert(
        &mut self,
        hash: u64,
        key: &[u8],
        window: Window,
        log: Log,
        tick: u32,
    ) -> SlotId {
        let hash = with_window(hash, window);
        // 2^32 slots of 88 bytes would be 378 GB in one shard.
        let id = u32::try_from(self.len()).unwrap_or(NONE);
        assert!(id != NONE, "fewer than 2^32 logs in a shard");
        self.owned += allocated(key.len()) + allocated(log.heap_bytes());
        if self.chunks.last().is_none_or(|last| last.len() == CHUNK) {
            self.chunks.push(Vec::with_capacity(CHUNK));
        }
        if let Some(last) = self.chunks.last_mut() {
            last.push(Slot {
                key: key.into(),
                window,
                hash,
                used: tick,
                newer: NONE,
                older: NONE,
                log,
            });
        }
        self.table
            .insert_unique(spread(hash), Place { hash, slot: id }, |place| {
                spread(place.hash)
            });
        self.link(id);
        SlotId(id)
    }

    /// A log, to read.
    pub(super) fn log(&self, id: SlotId) -> &Log {
        &self.slot(id.0).log
    }

    /// A log, to change.
    pub(super) fn change<R>(&mut self, id: SlotId, change: impl FnOnce(&mut Log) -> R) -> R {
        let log = &mut self.slot_mut(id.0).log;
        let before = log.heap_bytes();
        let result = change(log);
        let after = log.heap_bytes();
        if after != before {
            self.owned = self.owned + allocated(after) - allocated(before);
        }
        result
    }

    /// Makes a slot the most recently used. Among slots used within one tick the order may stay as it was.
    pub(super) fn touch(&mut self, id: SlotId, tick: u32) {
        let slot = self.slot_mut(id.0);
        if slot.used != tick {
            slot.used = tick;
            if self.newest != Some(id.0) {
                self.unlink(id.0);
                self.link(id.0);
            }
        }
    }

    /// When the least recently used slot was last used.
    pub(super) fn oldest_use(&self) -> Option<u32> {
        self.oldest.map(|oldest| self.slot(oldest).used)
    }

    /// Drops the least recently used slot. False if there is none.
    pub(super) fn drop_oldest(&mut self) -> bool {
        let Some(oldest) = self.oldest else {
            return false;
        };
        self.remove(oldest);
        true
    }

    /// Visits the next slots, up to `most`, and drops those whose log is empty after `visit`; the others give up
    /// room they do not need. Every slot that is there from the start of a round to its end is visited in it. Returns
    /// how many were visited, how many dropped, and whether the round is over.
    pub(super) fn sweep(
        &mut self,
        most: usize,
        mut visit: impl FnMut(&mut Log, Window),
    ) -> (usize, usize, bool) {
        if self.unswept == 0 {
            self.unswept = self.len() as u32;
        }
        let (mut visited, mut dropped) = (0, 0);
        // Downwards, since the slot that fills a hole comes from above and was visited.
        while visited < most && self.unswept > 0 {
            self.unswept = (self.unswept - 1).min(self.len() as u32);
            let id = self.unswept;
            if id as usize >= self.len() {
                continue;
            }
            visited += 1;
            let window = self.slot(id).window;
            let empty = self.change(SlotId(id), |log| {
                visit(log, window);
                log.shrink();
                log.entries() == 0
            });
            if empty {
                self.remove(id);
                dropped += 1;
            }
        }
        (visited, dropped, self.unswept == 0)
    }

    fn remove(&mut self, id: u32) {
        self.unlink(id);
        let slot = self.slot(id);
        let (hash, owned) = (
            slot.hash,
            allocated(slot.key.len()) + allocated(slot.log.heap_bytes()),
        );
        self.owned -= owned;
        if let Ok(place) = self
            .table
            .find_entry(spread(hash), |place| place.slot == id)
        {
            place.remove();
        }
        let last = self.len() as u32 - 1;
        let moved = self.chunks.last_mut().and_then(Vec::pop);
        if let Some(slot) = moved
            && last != id
        {
            if let Some(place) = self
                .table
                .find_mut(spread(slot.hash), |place| place.slot == last)
            {
                place.slot = id;
            }
            match slot.newer {
                NONE => self.newest = Some(id),
                newer => self.slot_mut(newer).older = id,
            }
            match slot.older {
                NONE => self.oldest = Some(id),
                older => self.slot_mut(older).newer = id,
            }
            *self.slot_mut(id) = slot;
        }
        if self.chunks.last().is_some_and(Vec::is_empty) {
            self.chunks.pop();
            if self.chunks.capacity() > 4 * self.chunks.len().max(4) {
                self.chunks.shrink_to(2 * self.chunks.len());
            }
        }
        if self.table.capacity() > 8 * self.table.len().max(4) {
            self.table
                .shrink_to(2 * self.table.len(), |place| spread(place.hash));
        }
    }

    fn link(&mut self, id: u32) {
        let second = self.newest.replace(id);
        let slot = self.slot_mut(id);
        slot.newer = NONE;
        slot.older = second.unwrap_or(NONE);
        match second {
            Some(second) => self.slot_mut(second).newer = id,
            None => self.oldest = Some(id),
        }
    }

    fn unlink(&mut self, id: u32) {
        let Slot { newer, older, .. } = *self.slot(id);
        match newer {
            NONE => self.newest = (older != NONE).then_some(older),
            newer => self.slot_mut(newer).older = older,
        }
        match older {
            NONE => self.oldest = (newer != NONE).then_some(newer),
            older => self.slot_mut(older).newer = newer,
        }
    }

    fn slot(&self, id: u32) -> &Slot {
        &self.chunks[id as usize / CHUNK][id as usize % CHUNK]
    }

    fn slot_mut(&mut self, id: u32) -> &mut Slot {
        &mut self.chunks[id as usize / CHUNK][id as usize % CHUNK]
    }
}

/// What an allocator takes for that many bytes: the size classes of jemalloc, which are coarse enough to cover
/// others' headers too.
pub(super) fn allocated(bytes: usize) -> usize {
    match bytes {
        0..=128 => bytes.next_multiple_of(16),
        // Four classes between two powers of two.
        _ => bytes.next_multiple_of(bytes.next_power_of_two() / 8),
    }
}

/// The hash of key and window. The shard was chosen by other bits of the key's hash than those that end up on top.
fn with_window(hash: u64, window: Window) -> u32 {
    let mixed = (hash ^ window.seconds()).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 32) as u32
}

/// The table takes its bucket from the low bits and a tag from the high ones.
fn spread(hash: u32) -> u64 {
    u64::from(hash) << 32 | u64::from(hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Everything that the shortcuts keep count of, counted.
    fn check(slots: &Slots) {
        let all: Vec<&Slot> = slots.chunks.iter().flatten().collect();
        assert_eq!(all.len(), slots.len());
        assert_eq!(all.len(), slots.table.len());
        let owned = |slot: &&Slot| allocated(slot.key.len()) + allocated(slot.log.heap_bytes());
        assert_eq!(all.iter().map(owned).sum::<usize>(), slots.owned);
        let mut linked = 0;
        let (mut next, mut newer) = (slots.newest, NONE);
        while let Some(id) = next {
            let slot = slots.slot(id);
            assert_eq!(slot.newer, newer);
            linked += 1;
            newer = id;
            next = (slot.older != NONE).then_some(slot.older);
        }
        assert_eq!(slots.oldest.unwrap_or(NONE), newer);
        assert_eq!(linked, all.len());
        for (id, slot) in all.iter().enumerate() {
            let by_id = |place: &Place| place.slot == id as u32;
            assert!(slots.table.find(spread(slot.hash), by_id).is_some());
        }
    }

    fn window(seconds: u64) -> Window {
        Window::from_seconds(seconds).unwrap()
    }

    fn add(slots: &mut Slots, name: u32, tick: u32) -> SlotId {
        let key = name.to_be_bytes();
        let mut log = Log::new(1_000);
        log.push(i64::from(name), 1, 1, 10);
        slots.insert(
            u64::from(name).wrapping_mul(0x5851_f42d_4c95_7f2d),
            &key,
            window(1),
            log,
            tick,
        )
    }

    fn find(slots: &Slots, name: u32) -> Option<SlotId> {
        let hash = u64::from(name).wrapping_mul(0x5851_f42d_4c95_7f2d);
        slots.find(hash, &name.to_be_bytes(), window(1))
    }

    #[test]
    fn a_slot_is_small() {
        assert!(mem::size_of::<Slot>() <= 88);
    }

    #[test]
    fn windows_of_one_key_are_apart_and_one_length_has_one_log() {
        let mut slots = Slots::default();
        let minute = slots.insert(7, b"k", window(60), Log::new(60_000), 0);
        assert_eq!(slots.find(7, b"k", window(61)), None);
        let other = slots.insert(7, b"k", window(61), Log::new(61_000), 0);
        assert_ne!(minute, other);
        let sixty = Window::new(crate::limit::Unit::Second, 60.try_into().unwrap());
        assert_eq!(slots.find(7, b"k", sixty), Some(minute));
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let mut slots = Slots::default();
        for name in 0..1_000 {
            add(&mut slots, name, name);
        }
        for name in (0..1_000).filter(|name| name % 3 == 0) {
            let id = find(&slots, name).unwrap();
            slots.touch(id, 1_000 + name);
        }
        check(&slots);
        let in_order = (0..1_000)
            .filter(|name| name % 3 != 0)
            .chain((0..1_000).filter(|name| name % 3 == 0));
        for name in in_order {
            assert!(find(&slots, name).is_some());
            assert!(slots.drop_oldest());
            assert!(find(&slots, name).is_none());
            if name % 50 == 0 {
                check(&slots);
            }
        }
        assert!(!slots.drop_oldest());
        assert!(slots.bytes() < 1_000, "{} bytes left", slots.bytes());
    }

    #[test]
    fn a_round_of_the_sweep_meets_every_slot_in_spite_of_removals() {
        let mut slots = Slots::default();
        for name in 0..500 {
            add(&mut slots, name, 0);
        }
        let mut met = vec![0; 500];
        let mut calls = 0;
        loop {
            let (_, dropped, over) = slots.sweep(7, |log, _| {
                let name = log.newest().unwrap();
                met[name as usize] += 1;
                if name % 5 < 2 {
                    log.evict(name);
                }
            });
            // Something else removes slots meanwhile, and adds them.
            if calls == 10 {
                for _ in 0..20 {
                    slots.drop_oldest();
                }
            }
            calls += 1;
            assert!(dropped <= 7);
            check(&slots);
            if over {
                break;
            }
        }
        // The oldest 20 were gone before their turn; of the rest, two in five left when they were met.
        assert!(met[20..].iter().all(|&times| times >= 1));
        assert_eq!(slots.len(), 480 * 3 / 5);
    }

    #[test]
    fn rounding_is_that_of_size_classes() {
        let classes = [
            (0, 0),
            (1, 16),
            (80, 80),
            (129, 160),
            (160, 160),
            (161, 192),
            (257, 320),
        ];
        for (bytes, class) in classes {
            assert_eq!(allocated(bytes), class, "{bytes}");
        }
    }
}

//! The hits of one key in one window, and the arithmetic of a sliding window over them. Time is passed in, in
//! milliseconds; what is allowed to happen to a log, and when, is decided in [`memory`](super).
//!
//! An entry is a run of hits: how many, and the millisecond of its newest one, its *time*. Entries lie in a ring,
//! oldest first, and no two have the same time. A log knows the sum of its entries, so that asking how many hits
//! are in the window costs nothing but dropping what has left it.
//!
//! # Size
//!
//! An entry takes 8 bytes: 32 bits of milliseconds after the log's `base` and 32 bits of hits. When the
//! milliseconds run out the base moves up to the oldest entry, which always suffices for windows of up to
//! [`NARROW_WINDOW`]. Logs of longer windows, and the rare log in which charges of one moment come to more than
//! 2^32, use 16 bytes.

use std::mem;

/// Longest window, in milliseconds, whose entries fit 32 bits after moving the base: everything that is in the
/// window lies less than a window apart, and the other half is room so that the base seldom moves. 24.8 days.
const NARROW_WINDOW: i64 = 1 << 31;

/// Entries that need no allocation: most keys are met once or twice in a window.
const INLINE: usize = 2;

/// See the module.
#[derive(Debug)]
pub(super) struct Log {
    /// The time that offsets of entries count from: at most the time of the oldest.
    base: i64,
    /// Hits of all entries together.
    used: u64,
    /// Where in the ring the oldest entry lies.
    head: u32,
    /// How many entries there are.
    len: u32,
    ring: Ring,
}

/// Room for entries. A word of a narrow entry is `offset << 32 | hits`; a wide entry is offset and hits, a word
/// each.
#[derive(Debug)]
enum Ring {
    Inline([u64; INLINE]),
    Narrow(Box<[u64]>),
    Wide(Box<[u64]>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    /// Milliseconds after the base.
    offset: u64,
    hits: u64,
}

// === impl Log ===

impl Log {
    /// An empty log of a window of that many milliseconds.
    pub(super) fn new(window: i64) -> Self {
        Self {
            base: 0,
            used: 0,
            head: 0,
            len: 0,
            ring: if window <= NARROW_WINDOW {
                Ring::Inline([0; INLINE])
            } else {
                Ring::Wide(Box::default())
            },
        }
    }

    /// Hits in the log.
    pub(super) fn used(&self) -> u64 {
        self.used
    }

    /// Entries in the log.
    pub(super) fn entries(&self) -> usize {
        self.len as usize
    }

    /// Time of the newest entry.
    pub(super) fn newest(&self) -> Option<i64> {
        let last = self.entries().checked_sub(1)?;
        Some(self.time(last))
    }

    /// Time of the oldest entry.
    pub(super) fn oldest(&self) -> Option<i64> {
        (self.len > 0).then(|| self.time(0))
    }

    /// Time of the entry with which the oldest `hits` hits (at least one) are complete: when it leaves, they are
    /// all gone. The newest, if there are fewer.
    pub(super) fn time_of_oldest(&self, hits: u64) -> Option<i64> {
        let mut sum = 0;
        for at in 0..self.entries() {
            let entry = self.entry(at);
            sum += entry.hits;
            if sum >= hits {
                return Some(self.base + entry.offset as i64);
            }
        }
        self.newest()
    }

    /// Moves every entry in time; all ages relative to each other stay.
    pub(super) fn shift(&mut self, by: i64) {
        self.base += by;
    }

    /// Drops every entry of that time or earlier.
    pub(super) fn evict(&mut self, until: i64) {
        if self.newest().is_none_or(|newest| newest <= until) {
            self.clear();
            return;
        }
        while self.oldest().is_some_and(|oldest| oldest <= until) {
            self.used -= self.entry(0).hits;
            self.pop();
        }
    }

    /// Logs hits at `now`, which is no earlier than the newest entry. They join the newest entry if both fall in
    /// one grain, and move its time up to now. A log of `most` entries is first made coarser: see
    /// [`coarsen`](Self::coarsen). Returns whether it was.
    pub(super) fn push(&mut self, now: i64, hits: u64, grain: i64, most: usize) -> bool {
        // Sums stay true even past what 64 bits hold, by not counting what would not fit.
        let hits = hits.min(u64::MAX - self.used);
        if hits == 0 {
            return false;
        }
        self.used += hits;
        let Some(last) = self.entries().checked_sub(1) else {
            self.base = now;
            self.head = 0;
            self.append(Entry { offset: 0, hits });
            return false;
        };
        let newest = self.time(last);
        debug_assert!(newest <= now, "hits are logged in order");
        if now - self.base > i64::from(u32::MAX) && !self.is_wide() {
            self.move_base();
        }
        let offset = (now - self.base) as u64;
        if newest.div_euclid(grain) == now.div_euclid(grain) {
            let hits = self.entry(last).hits + hits;
            self.put(last, Entry { offset, hits });
            return false;
        }
        let coarser = self.entries() >= most.max(INLINE);
        if coarser {
            self.coarsen();
        }
        self.append(Entry { offset, hits });
        coarser
    }

    /// Removes that many hits, the oldest first, as far as there are any.
    pub(super) fn refund(&mut self, hits: u64) {
        if hits >= self.used {
            self.clear();
            return;
        }
        self.used -= hits;
        let mut left = hits;
        while left > 0 {
            let mut oldest = self.entry(0);
            if oldest.hits <= left {
                left -= oldest.hits;
                self.pop();
            } else {
                oldest.hits -= left;
                left = 0;
                self.put(0, oldest);
            }
        }
    }

    /// Removes hits that were logged at `at`: from the entry of that millisecond, or of its grain. Does nothing if
    /// that entry is gone, or never was.
    pub(super) fn give_back(&mut self, at: i64, hits: u64, grain: i64) {
        // The first entry of that time or later is the only one that can hold them. It is sought from the newest
        // on, as hits are given back at once or never.
        let later = (0..self.entries())
            .rev()
            .take_while(|&index| self.time(index) >= at)
            .last();
        let Some(index) = later else { return };
        if self.time(index).div_euclid(grain) != at.div_euclid(grain) {
            return;
        }
        let mut entry = self.entry(index);
        let taken = entry.hits.min(hits);
        entry.hits -= taken;
        self.used -= taken;
        if entry.hits > 0 {
            self.put(index, entry);
        } else {
            for index in index + 1..self.entries() {
                self.put(index - 1, self.entry(index));
            }
            self.len -= 1;
        }
    }

    /// Gives up room that the entries have no use for, keeping some to grow.
    pub(super) fn shrink(&mut self) {
        let enough = capacity_for(self.entries() + self.entries() / 4);
        if enough * 2 <= self.capacity() {
            self.resize(enough);
        }
    }

    /// Bytes of the allocation behind this log, before the allocator's rounding.
    pub(super) fn heap_bytes(&self) -> usize {
        match &self.ring {
            Ring::Inline(_) => 0,
            Ring::Narrow(words) | Ring::Wide(words) => mem::size_of_val::<[u64]>(words),
        }
    }

    /// Halves the number of entries: each two neighbours become one of the newer one's time. So hits are remembered
    /// too long, up to the time between two entries, and never too short.
    fn coarsen(&mut self) {
        let len = self.entries();
        for index in 0..len / 2 {
            let (older, newer) = (self.entry(2 * index), self.entry(2 * index + 1));
            let hits = older.hits + newer.hits;
            self.put(index, Entry { hits, ..newer });
        }
        if len % 2 == 1 {
            self.put(len / 2, self.entry(len - 1));
        }
        self.len = len.div_ceil(2) as u32;
    }

    fn clear(&mut self) {
        self.used = 0;
        self.head = 0;
        self.len = 0;
    }

    /// Removes the oldest entry, without its hits.
    fn pop(&mut self) {
        self.head = self.place(1) as u32;
        self.len -= 1;
    }

    fn append(&mut self, entry: Entry) {
        if self.entries() == self.capacity() {
            self.resize(capacity_for(self.entries() + 1));
        }
        self.len += 1;
        self.put(self.entries() - 1, entry);
    }

    /// Lets offsets count from the oldest entry.
    fn move_base(&mut self) {
        let oldest = self.entry(0).offset;
        for index in 0..self.entries() {
            let entry = self.entry(index);
            let offset = entry.offset - oldest;
            self.put(index, Entry { offset, ..entry });
        }
        self.base += oldest as i64;
    }

    fn time(&self, index: usize) -> i64 {
        self.base + self.entry(index).offset as i64
    }

    /// The entry that many places after the oldest.
    fn entry(&self, index: usize) -> Entry {
        let place = self.place(index);
        let narrow = |word: u64| Entry {
            offset: word >> 32,
            hits: word & u64::from(u32::MAX),
        };
        match &self.ring {
            Ring::Inline(words) => narrow(words[place]),
            Ring::Narrow(words) => narrow(words[place]),
            Ring::Wide(words) => Entry {
                offset: words[2 * place],
                hits: words[2 * place + 1],
            },
        }
    }

    fn put(&mut self, index: usize, entry: Entry) {
        let most = u64::from(u32::MAX);
        if !self.is_wide() && (entry.offset > most || entry.hits > most) {
            self.widen();
        }
        let place = self.place(index);
        let word = entry.offset << 32 | entry.hits;
        match &mut self.ring {
            Ring::Inline(words) => words[place] = word,
            Ring::Narrow(words) => words[place] = word,
            Ring::Wide(words) => {
                words[2 * place] = entry.offset;
                words[2 * place + 1] = entry.hits;
            }
        }
    }

    fn place(&self, index: usize) -> usize {
        let place = self.head as usize + index;
        let capacity = self.capacity();
        if place < capacity {
            place
        } else {
            place - capacity
        }
    }

    fn is_wide(&self) -> bool {
        matches!(self.ring, Ring::Wide(_))
    }

    fn capacity(&self) -> usize {
        match &self.ring {
            Ring::Inline(words) => words.len(),
            Ring::Narrow(words) => words.len(),
            Ring::Wide(words) => words.len() / 2,
        }
    }

    fn resize(&mut self, capacity: usize) {
        let ring = match &self.ring {
            Ring::Wide(_) => Ring::Wide(vec![0; 2 * capacity].into_boxed_slice()),
            _ if capacity <= INLINE => Ring::Inline([0; INLINE]),
            _ => Ring::Narrow(vec![0; capacity].into_boxed_slice()),
        };
        self.refill(ring);
    }

    fn widen(&mut self) {
        let words = 2 * self.capacity();
        self.refill(Ring::Wide(vec![0; words].into_boxed_slice()));
    }

    /// Puts every entry into another ring that has room for them.
    fn refill(&mut self, ring: Ring) {
        let mut next = Self {
            head: 0,
            ring,
            ..*self
        };
        for index in 0..self.entries() {
            next.put(index, self.entry(index));
        }
        *self = next;
    }
}

/// Room for that many entries or a few more: 2, 4, 6, 8, 12, 16, 24, 32, 48 and so on, sizes which allocators have.
fn capacity_for(entries: usize) -> usize {
    if entries <= 8 {
        return entries.next_multiple_of(2).max(INLINE);
    }
    let power = entries.next_power_of_two();
    if entries <= power / 4 * 3 {
        power / 4 * 3
    } else {
        power
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HUNDRED_YEARS: i64 = 100 * 365 * 86_400_000;

    fn entries(log: &Log) -> Vec<(i64, u64)> {
        (0..log.entries())
            .map(|index| (log.time(index), log.entry(index).hits))
            .collect()
    }

    #[test]
    fn is_small() {
        assert!(mem::size_of::<Log>() <= 48);
        let mut log = Log::new(60_000);
        for at in 0..10 {
            log.push(at, 1, 1, 1_000);
        }
        assert_eq!(log.heap_bytes(), 96);
        log.evict(8);
        log.shrink();
        assert_eq!((log.heap_bytes(), entries(&log)), (0, vec![(9, 1)]));
    }

    #[test]
    fn the_ring_turns_grows_and_shrinks_without_losing_hits() {
        for window in [100, HUNDRED_YEARS] {
            let mut log = Log::new(window);
            let mut all = Vec::new();
            for now in 0..5_000_i64 {
                let hits = now as u64 % 3 + 1;
                log.push(now, hits, 1, 1_000);
                all.push((now, hits));
                // Windows of changing length, so that the ring fills and empties.
                let until = now - 1 - (now / 7) % 90;
                log.evict(until);
                all.retain(|&(at, _)| at > until);
                if now % 11 == 0 {
                    log.shrink();
                }
                assert_eq!(entries(&log), all);
                assert_eq!(log.used(), all.iter().map(|&(_, hits)| hits).sum::<u64>());
            }
        }
    }

    #[test]
    fn the_base_moves_when_offsets_run_out() {
        let month = NARROW_WINDOW;
        let mut log = Log::new(month);
        let mut now = 0;
        for _ in 0..20 {
            log.evict(now - month);
            log.push(now, 7, 1, 1_000);
            assert_eq!(log.newest(), Some(now));
            assert_eq!(log.used(), 14.min(log.entries() as u64 * 7));
            assert!(!log.is_wide());
            now += month / 2 + 1_000;
        }
    }

    #[test]
    fn a_hundred_years_are_exact_to_the_millisecond() {
        let mut log = Log::new(HUNDRED_YEARS);
        log.push(0, 1, 1, 1_000);
        log.push(HUNDRED_YEARS - 1, 1, 1, 1_000);
        log.evict(-1);
        assert_eq!(entries(&log), [(0, 1), (HUNDRED_YEARS - 1, 1)]);
        log.evict(0);
        assert_eq!(entries(&log), [(HUNDRED_YEARS - 1, 1)]);
    }

    #[test]
    fn charges_may_exceed_what_one_narrow_entry_counts() {
        let most = u64::from(u32::MAX);
        let mut log = Log::new(1_000);
        log.push(5, 1, 1, 1_000);
        for _ in 0..3 {
            log.push(6, most, 1, 1_000);
        }
        assert_eq!(entries(&log), [(5, 1), (6, 3 * most)]);
        log.give_back(6, most, 1);
        log.refund(2);
        assert_eq!(entries(&log), [(6, 2 * most - 1)]);
        log.push(7, u64::MAX, 1, 1_000);
        log.push(8, most, 1, 1_000);
        assert_eq!(log.used(), u64::MAX);
        log.evict(6);
        assert_eq!(entries(&log), [(7, u64::MAX - 2 * most + 1)]);
    }

    #[test]
    fn a_full_log_gets_coarser_and_remembers_too_long() {
        let mut log = Log::new(1_000);
        for now in 0..7 {
            assert!(!log.push(now, 1, 1, 7));
        }
        assert!(log.push(7, 1, 1, 7));
        assert_eq!(entries(&log), [(1, 2), (3, 2), (5, 2), (6, 1), (7, 1)]);
        assert_eq!(log.used(), 8);
    }

    #[test]
    fn give_back_finds_its_grain_and_nothing_else() {
        let mut log = Log::new(1_000);
        for now in [10, 12, 20, 35] {
            log.push(now, 2, 10, 1_000);
        }
        assert_eq!(entries(&log), [(12, 4), (20, 2), (35, 2)]);
        log.give_back(10, 2, 10); // joined the entry of 12
        log.give_back(9, 1, 10); // the grain before
        log.give_back(13, 1, 10); // later than the entry of its grain
        log.give_back(36, 1, 10); // later than all
        assert_eq!(entries(&log), [(12, 2), (20, 2), (35, 2)]);
        log.give_back(20, 5, 10); // never below zero
        assert_eq!(entries(&log), [(12, 2), (35, 2)]);
        assert_eq!(log.used(), 4);
    }

    #[test]
    fn capacities_hold_what_they_are_for() {
        for entries in 0..10_000 {
            let capacity = capacity_for(entries);
            assert!(capacity >= entries && capacity <= (entries + entries / 2).max(INLINE + 1));
        }
    }
}

//! The embedded log: every hit of every key in this process's memory, exact to the millisecond, bounded in bytes.
//!
//! `log` is the log of one key in one window; `slots` keeps many of them. Here is what happens to them: how a
//! check is judged over all windows of its key, which clock counts, and who goes when memory runs out.
//!
//! # What is promised
//!
//! Time is the clock's whole milliseconds. A hit logged at millisecond `t` counts in a window of `w` milliseconds
//! until `t + w - 1` and has left it at `t + w`: the window that ends now holds the hits of the `w` milliseconds
//! `now - w + 1` to `now`. **No `w` milliseconds in a row, wherever they start, hold more hits than the limit**,
//! among the hits that were admitted and neither given back nor refunded. Two exceptions are meant: charges are
//! logged whether or not they fit, so that a key that is charged promises instead that nothing is admitted while
//! it is over its limit; and a limit that is lowered does not undo what was admitted before.
//!
//! Hits of limits above [`MAX_ENTRIES`] that are not `exact` may be remembered up to one [`grain`] too long, less a
//! millisecond; nothing is ever forgotten too early, except by the memory bound below.
//!
//! # The clock
//!
//! The clock is read under the lock of the key's shard, so the hits of a key are logged in the order of their
//! times. [`Clock::system`] never steps; for the clocks that do (Redis keeps the same rules): if the newest entry
//! of a log is ahead by up to [`CLOCK_SLACK`], its time is now. If it is ahead by more, the clock was set back, and
//! every entry of the log is moved back by the gap. So ages never grow by a step back: no window is overrun even in
//! true time, and hits are remembered too long by the step at most. All logs of one check are judged at one time,
//! the latest of theirs; the others' ages are kept in the same way. A clock that jumps ahead can't be told from
//! time passing: hits leave early by the jump. A give-back that is under way while the clock is set back names a
//! millisecond the log does not know any more; it is then lost, or taken from hits of its new neighbourhood. Hits
//! that a refund has taken before their give-back arrives count twice, as the refund would have taken others; the
//! give-back takes those of the same millisecond or grain, if there are any. A give-back whose limits have another
//! grain than the log was last written with, after a reload, may find nothing.
//!
//! # The memory bound
//!
//! All memory is counted as an allocator would round it. When it exceeds `max_bytes`, the least recently used logs
//! are dropped until it does not: in the order of their last use to a tenth of a second, whichever shard they are
//! in. What was dropped is forgotten, so its key may overrun its limit once; each drop is counted. A request
//! exceeds the bound only until it returns, by the growth of its own logs. One log takes no more than 1/64 of all
//! memory (at least 256 entries): a log that would, an `exact` one of a great limit, is made coarser instead, and
//! remembers hits too long rather than too short. That is counted too. Bounds below what [`Config`] recommends are
//! kept as well, at the price of dropping keys in use.

mod log;
mod slots;

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;

use self::{
    log::Log,
    slots::{SlotId, Slots},
};
use super::{
    AnsweredBy, Ask, CLOCK_SLACK, Check, MAX_ENTRIES, Store, Taken, Verdict, Verdicts, grain,
};
use crate::{
    clock::{Clock, Millis},
    descriptor::Hits,
    limit::{Limit, Window},
    metrics::Page,
};

/// How much memory the logs may take, and how finely they are locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Bytes that all logs, keys and tables may take together. A key in a window takes about 150 bytes and 8 more
    /// per entry; with less than a megabyte, keys are dropped while they are in use.
    pub max_bytes: usize,
    /// Parts with a lock each, at most 65,536; rounded up to a power of two. More of them keep threads out of each
    /// other's way and cost 6 KB each.
    pub shards: usize,
}

/// See the module.
#[derive(Debug)]
pub struct MemoryLog {
    clock: Clock,
    /// Of the first tick.
    started: Millis,
    hasher: foldhash::fast::RandomState,
    shards: Box<[Shard]>,
    /// The shard that is swept.
    sweeping: AtomicUsize,
    max_bytes: usize,
    /// Entries a log may have before it is made coarser.
    most_entries: usize,
    counts: Counts,
}

/// The numbers of a [`MemoryLog`]. A key counts once per window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryStats {
    /// Keys that have a log.
    pub keys: u64,
    /// Bytes of memory.
    pub bytes: u64,
    /// Bytes that are allowed.
    pub max_bytes: u64,
    /// Keys dropped for want of memory, since the start.
    pub evicted: u64,
    /// Keys dropped since nothing was left in their window, since the start.
    pub expired: u64,
    /// Times that a log was made coarser for want of memory, since the start.
    pub coarsened: u64,
}

/// What one call of [`MemoryLog::reclaim`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reclaimed {
    /// Logs looked at.
    pub visited: usize,
    /// Logs dropped, since nothing was left in them.
    pub dropped: usize,
}

/// On cache lines of its own, so that locking one shard does not disturb its neighbours.
#[derive(Debug)]
#[repr(align(128))]
struct Shard(Mutex<Slots>);

#[derive(Debug, Default)]
struct Counts {
    keys: AtomicUsize,
    bytes: AtomicUsize,
    evicted: AtomicU64,
    expired: AtomicU64,
    coarsened: AtomicU64,
}

/// A locked shard. Whatever changes in its size is counted when it is let go.
struct Locked<'a> {
    slots: MutexGuard<'a, Slots>,
    counts: &'a Counts,
    keys: usize,
    bytes: usize,
}

/// One limit of a check, and its log.
struct Seat<'a> {
    limit: &'a Limit,
    /// Milliseconds.
    window: i64,
    slot: Option<SlotId>,
    used: u64,
}

/// What it takes to judge one check.
struct Judge<'a> {
    slots: &'a mut Slots,
    key: &'a [u8],
    hash: u64,
    tick: u32,
    most_entries: usize,
    /// Whether a log had to be made coarser.
    coarsened: bool,
}

/// One limit's numbers, of which the tightest are the verdict.
#[derive(Default)]
struct Numbers {
    index: usize,
    before: u64,
    after: u64,
    remaining: u64,
    limit: u64,
    /// Milliseconds.
    reset: i64,
}

/// Most logs that one lock is held for while sweeping or making room.
const AT_A_TIME: usize = 128;

/// Part of all memory that one log may take.
const SHARE_OF_ONE_LOG: usize = 64;

/// Milliseconds of a tick, the resolution of "least recently used".
const TICK: u64 = 100;

/// How often the expired are sought, and in how many steps all logs are visited: every 5 s.
const RECLAIM_EVERY: Duration = Duration::from_millis(100);
const RECLAIM_STEPS: usize = 50;

// === impl Config ===

impl Config {
    /// That many bytes, in as many shards as suit the machine: 8 per CPU.
    pub fn new(max_bytes: usize) -> Self {
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        Self {
            max_bytes,
            shards: (8 * cpus).next_power_of_two(),
        }
    }
}

// === impl MemoryLog ===

impl MemoryLog {
    /// An empty log that goes by `clock`.
    pub fn new(config: Config, clock: Clock) -> Self {
        let shards = config.shards.clamp(1, 1 << 16).next_power_of_two();
        let shards: Box<[Shard]> = (0..shards)
            .map(|_| Shard(Mutex::new(Slots::default())))
            .collect();
        let counts = Counts::default();
        counts.bytes.store(size_of_val::<[Shard]>(&shards), Relaxed);
        Self {
            started: clock.now(),
            clock,
            hasher: foldhash::fast::RandomState::default(),
            shards,
            sweeping: AtomicUsize::new(0),
            max_bytes: config.max_bytes,
            most_entries: (config.max_bytes / SHARE_OF_ONE_LOG / size_of::<u64>())
                .max(2 * MAX_ENTRIES as usize),
            counts,
        }
    }

    /// How full it is, and what was dropped.
    pub fn stats(&self) -> MemoryStats {
        let counts = &self.counts;
        MemoryStats {
            keys: counts.keys.load(Relaxed) as u64,
            bytes: counts.bytes.load(Relaxed) as u64,
            max_bytes: self.max_bytes as u64,
            evicted: counts.evicted.load(Relaxed),
            expired: counts.expired.load(Relaxed),
            coarsened: counts.coarsened.load(Relaxed),
        }
    }

    /// Visits the next `budget` logs, or all if there are fewer: what has left their window is dropped, a log in
    /// which nothing is left is given up, and one that has become much smaller gives up room. No lock is held for
    /// more than 128 logs.
    pub fn reclaim(&self, budget: usize) -> Reclaimed {
        let mut done = Reclaimed::default();
        // The first shard may be in the middle of its round, hence one more.
        let mut rounds = self.shards.len() + 1;
        while done.visited < budget && rounds > 0 {
            let shard = self.sweeping.load(Relaxed);
            let most = (budget - done.visited).min(AT_A_TIME);
            let mut locked = self.lock(shard % self.shards.len());
            let now = self.now();
            let (visited, dropped, over) = locked.slots.sweep(most, expire(now));
            drop(locked);
            done.visited += visited;
            done.dropped += dropped;
            if over {
                rounds -= 1;
                let _ =
                    self.sweeping
                        .compare_exchange(shard, shard.wrapping_add(1), Relaxed, Relaxed);
            }
        }
        self.counts.expired.fetch_add(done.dropped as u64, Relaxed);
        done
    }

    /// Reclaims what has expired for as long as it is polled, a little at a time: every log is visited about every
    /// 5 s.
    pub async fn reclaim_forever(self: Arc<Self>) {
        let mut every = tokio::time::interval(RECLAIM_EVERY);
        every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            every.tick().await;
            let keys = self.counts.keys.load(Relaxed);
            let mut left = keys / RECLAIM_STEPS + AT_A_TIME;
            while left > 0 {
                let step = left.min(8 * AT_A_TIME);
                if self.reclaim(step).visited < step {
                    break;
                }
                left -= step;
                tokio::task::yield_now().await;
            }
        }
    }

    fn judge_one(&self, check: &Check<'_>) -> Verdict {
        let hash = self.hash(check.key);
        let mut locked = self.lock(self.shard_of(hash));
        let now = self.now();
        let mut judge = Judge {
            slots: &mut locked.slots,
            key: check.key,
            hash,
            tick: self.tick(now),
            most_entries: self.most_entries,
            coarsened: false,
        };
        let verdict = judge.verdict(check.ask, check.limits, now);
        let coarsened = judge.coarsened;
        drop(locked);
        if coarsened {
            self.counts.coarsened.fetch_add(1, Relaxed);
        }
        if self.counts.bytes.load(Relaxed) > self.max_bytes {
            self.make_room();
        }
        verdict
    }

    /// Drops logs, the least recently used first, until memory is within its bound and a little below it, so that
    /// the shards need not be compared for each key.
    #[cold]
    fn make_room(&self) {
        let goal = self.max_bytes - (self.max_bytes / 128).min(256 << 10);
        let above = || self.counts.bytes.load(Relaxed) > goal;
        while above() {
            let sizes_by_age = self.shards.iter().enumerate().filter_map(|(index, shard)| {
                let slots = shard.0.lock();
                let used = slots.oldest_use()?;
                Some((used, usize::MAX - slots.bytes(), index))
            });
            // The shard with the oldest log; of equals, the largest.
            let Some((oldest, _, shard)) = sizes_by_age.min() else {
                return;
            };
            let mut locked = self.lock(shard);
            // Whoever has nothing left in the window goes before anyone is forgotten.
            let now = self.now();
            let (_, mut expired, over) = locked.slots.sweep(AT_A_TIME, expire(now));
            if expired == 0 && over {
                // The end of a round is short, and holds the logs that were there first.
                expired = locked.slots.sweep(AT_A_TIME, expire(now)).1;
            }
            self.counts.expired.fetch_add(expired as u64, Relaxed);
            if expired > 0 {
                continue;
            }
            for _ in 0..AT_A_TIME {
                if locked.slots.oldest_use() != Some(oldest) {
                    break;
                }
                locked.slots.drop_oldest();
                self.counts.evicted.fetch_add(1, Relaxed);
                locked.settle();
                if !above() {
                    return;
                }
            }
        }
    }

    fn give_back_one(&self, taken: &Taken<'_>) {
        let hash = self.hash(taken.key);
        let mut locked = self.lock(self.shard_of(hash));
        let at = signed(taken.at.0);
        for limit in taken.limits {
            if let Some(slot) = locked.slots.find(hash, taken.key, limit.window) {
                let grain = signed(grain(limit));
                let hits = u64::from(taken.hits.0);
                locked
                    .slots
                    .change(slot, |log| log.give_back(at, hits, grain));
            }
        }
    }

    fn lock(&self, shard: usize) -> Locked<'_> {
        let slots = self.shards[shard].0.lock();
        Locked {
            keys: slots.len(),
            bytes: slots.bytes(),
            slots,
            counts: &self.counts,
        }
    }

    fn hash(&self, key: &[u8]) -> u64 {
        use std::hash::BuildHasher;
        self.hasher.hash_one(key)
    }

    fn shard_of(&self, hash: u64) -> usize {
        (hash >> 48) as usize & (self.shards.len() - 1)
    }

    fn now(&self) -> i64 {
        signed(self.clock.now().0)
    }

    fn tick(&self, now: i64) -> u32 {
        let since = (now as u64).saturating_sub(self.started.0);
        u32::try_from(since / TICK).unwrap_or(u32::MAX)
    }
}

impl MemoryStats {
    /// Puts the numbers on the metrics page.
    pub fn export(&self, page: &mut Page<'_>) -> fmt::Result {
        page.gauge(
            "slidegate_memory_keys",
            "Keys that have a log in memory, once per window.",
            self.keys as f64,
        )?;
        page.gauge(
            "slidegate_memory_bytes",
            "Bytes that the logs in memory take.",
            self.bytes as f64,
        )?;
        page.gauge(
            "slidegate_memory_max_bytes",
            "Bytes that they may take.",
            self.max_bytes as f64,
        )?;
        page.counter(
            "slidegate_memory_evicted_keys",
            "Keys dropped for want of memory, the longest unused first; their hits are forgotten.",
            self.evicted,
        )?;
        page.counter(
            "slidegate_memory_expired_keys",
            "Keys dropped since nothing was left in their window.",
            self.expired,
        )?;
        page.counter(
            "slidegate_memory_coarsened_logs",
            "Logs made coarser for want of memory: late by more than a grain, never lax.",
            self.coarsened,
        )
    }
}

impl Store for MemoryLog {
    async fn judge(&self, _arrived: Instant, checks: &[Check<'_>]) -> Verdicts {
        checks
            .iter()
            .map(|check| Ok(self.judge_one(check)))
            .collect()
    }

    fn give_back(&self, taken: &[Taken<'_>]) {
        for taken in taken {
            self.give_back_one(taken);
        }
    }
}

// === impl Locked ===

impl Locked<'_> {
    /// Counts what has changed in size since the last time.
    fn settle(&mut self) {
        let bytes = self.slots.bytes();
        if bytes != self.bytes {
            let more = bytes.wrapping_sub(self.bytes);
            self.counts.bytes.fetch_add(more, Relaxed);
            self.bytes = bytes;
        }
        let keys = self.slots.len();
        if keys != self.keys {
            let more = keys.wrapping_sub(self.keys);
            self.counts.keys.fetch_add(more, Relaxed);
            self.keys = keys;
        }
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.settle();
    }
}

// === impl Judge ===

impl Judge<'_> {
    /// Judges the check at the time `clock`, over the logs of all its windows at once.
    fn verdict(&mut self, ask: Ask, limits: &[Limit], clock: i64) -> Verdict {
        let mut seats: SmallVec<[Seat<'_>; 2]> = limits
            .iter()
            .map(|limit| Seat {
                limit,
                window: millis(limit.window),
                slot: self.slots.find(self.hash, self.key, limit.window),
                used: 0,
            })
            .collect();
        let now = self.settle(&mut seats, clock);

        let admitted = seats.iter().all(|seat| seat.admits(ask));
        let mut taken_at = None;
        match ask {
            Ask::Take(hits) if admitted && hits.0 > 0 => {
                self.write(&mut seats, hits, now);
                taken_at = Some(Millis(now as u64));
            }
            Ask::Charge(hits) if hits.0 > 0 => self.write(&mut seats, hits, now),
            Ask::Refund(hits) => {
                for slot in seats.iter().filter_map(|seat| seat.slot) {
                    self.slots.change(slot, |log| log.refund(u64::from(hits.0)));
                }
            }
            Ask::Take(_) | Ask::Charge(_) | Ask::Look => {}
        }
        for slot in seats.iter().filter_map(|seat| seat.slot) {
            self.slots.touch(slot, self.tick);
        }

        let tightest = seats
            .iter()
            .enumerate()
            .filter(|(_, seat)| admitted || !seat.admits(ask))
            .map(|(index, seat)| seat.numbers(index, self.slots, ask, now))
            .reduce(|one, other| {
                if other.is_tighter(&one, admitted) {
                    other
                } else {
                    one
                }
            })
            .unwrap_or_default();
        Verdict {
            admitted,
            tightest: tightest.index,
            before: tightest.before,
            after: tightest.after,
            reset: Duration::from_millis(tightest.reset as u64),
            taken_at,
            by: AnsweredBy::Log,
        }
    }

    /// Brings the logs to one time, which is returned, and drops what has left their windows by then.
    fn settle(&mut self, seats: &mut [Seat<'_>], clock: i64) -> i64 {
        let slack = clock + signed(CLOCK_SLACK);
        let mut now = clock;
        for slot in seats.iter().filter_map(|seat| seat.slot) {
            if let Some(newest) = self.slots.log(slot).newest()
                && newest <= slack
            {
                now = now.max(newest);
            }
        }
        for seat in seats {
            let Some(slot) = seat.slot else { continue };
            seat.used = self.slots.change(slot, |log| {
                if let Some(newest) = log.newest() {
                    // Where this log's time stands: no earlier than its newest entry. Hits keep their age.
                    let own = newest.max(clock);
                    if own != now {
                        log.shift(now - own);
                    }
                    log.evict(now - seat.window);
                }
                log.used()
            });
        }
        now
    }

    /// Logs hits in every window.
    fn write(&mut self, seats: &mut [Seat<'_>], hits: Hits, now: i64) {
        for seat in seats {
            let slot = *seat.slot.get_or_insert_with(|| {
                let log = Log::new(seat.window);
                self.slots
                    .insert(self.hash, self.key, seat.limit.window, log, self.tick)
            });
            let grain = signed(grain(seat.limit));
            self.coarsened |= self.slots.change(slot, |log| {
                log.push(now, u64::from(hits.0), grain, self.most_entries)
            });
        }
    }
}

// === impl Seat ===

impl Seat<'_> {
    fn admits(&self, ask: Ask) -> bool {
        let limit = u64::from(self.limit.requests);
        match ask {
            Ask::Take(hits) => self.used.saturating_add(u64::from(hits.0)) <= limit,
            Ask::Look | Ask::Charge(_) => self.used <= limit,
            Ask::Refund(_) => true,
        }
    }

    fn numbers(&self, index: usize, slots: &Slots, ask: Ask, now: i64) -> Numbers {
        let log = self.slot.map(|slot| slots.log(slot));
        let after = log.map_or(0, Log::used);
        let limit = u64::from(self.limit.requests);
        let until = |time: Option<i64>| time.map_or(0, |time| time + self.window - now);
        let reset = match ask {
            _ if self.admits(ask) => until(log.and_then(Log::oldest)),
            Ask::Take(hits) if u64::from(hits.0) > limit => self.window,
            // What must leave for the hits to fit.
            _ => {
                let wanted = match ask {
                    Ask::Take(hits) => u64::from(hits.0),
                    _ => 0,
                };
                let excess = after.saturating_add(wanted) - limit;
                until(log.and_then(|log| log.time_of_oldest(excess)))
            }
        };
        Numbers {
            index,
            before: self.used,
            after,
            remaining: limit.saturating_sub(after),
            limit: limit.max(1),
            reset,
        }
    }
}

// === impl Numbers ===

impl Numbers {
    fn is_tighter(&self, other: &Self, admitted: bool) -> bool {
        let share = self.remaining * other.limit;
        let others = other.remaining * self.limit;
        if admitted && share != others {
            share < others
        } else {
            self.reset > other.reset
        }
    }
}

// === time ===

/// Time as a number that ages can be taken from. The cut at half the range keeps every sum in range; it is 146
/// million years away.
fn signed(millis: u64) -> i64 {
    millis.min(1 << 62) as i64
}

fn millis(window: Window) -> i64 {
    signed(window.millis())
}

/// Drops what has left the window.
fn expire(now: i64) -> impl Fn(&mut Log, Window) {
    move |log, window| log.evict(now - millis(window))
}

#[cfg(test)]
mod tests {
    use std::{future::Future, pin::pin, task};

    use super::*;
    use crate::{clock::Hand, limit::Unit};

    const START: u64 = 1_700_000_000_000;

    fn log(max_bytes: usize, shards: usize) -> (MemoryLog, Hand) {
        let (clock, hand) = Clock::manual(Millis(START));
        (MemoryLog::new(Config { max_bytes, shards }, clock), hand)
    }

    fn limit(requests: u32, seconds: u64) -> Limit {
        Limit {
            requests,
            window: Window::from_seconds(seconds).unwrap(),
            exact: false,
        }
    }

    fn ask(log: &MemoryLog, key: &[u8], limits: &[Limit], ask: Ask) -> Verdict {
        let check = Check {
            key,
            limits,
            ask,
            decisive: true,
        };
        let checks = [check];
        let future = pin!(log.judge(Instant::now(), &checks));
        let mut context = task::Context::from_waker(task::Waker::noop());
        match future.poll(&mut context) {
            task::Poll::Ready(verdicts) => verdicts[0].clone().unwrap(),
            task::Poll::Pending => panic!("the future is ready at once"),
        }
    }

    fn take(log: &MemoryLog, key: &[u8], limits: &[Limit], hits: u32) -> Verdict {
        ask(log, key, limits, Ask::Take(Hits(hits)))
    }

    /// Counts all memory from scratch and compares.
    fn audit(log: &MemoryLog) {
        let (mut bytes, mut keys) = (size_of_val::<[Shard]>(&log.shards), 0);
        for shard in &log.shards {
            let slots = shard.0.lock();
            bytes += slots.bytes();
            keys += slots.len();
        }
        let stats = log.stats();
        assert_eq!((stats.bytes, stats.keys), (bytes as u64, keys as u64));
    }

    #[test]
    fn a_hit_leaves_when_its_window_is_over_and_not_a_millisecond_earlier() {
        let (log, hand) = log(1 << 20, 1);
        let limits = [limit(1, 60)];
        assert!(take(&log, b"k", &limits, 1).admitted);
        hand.advance(Duration::from_millis(59_999));
        let denied = take(&log, b"k", &limits, 1);
        assert_eq!(
            (denied.admitted, denied.reset),
            (false, Duration::from_millis(1))
        );
        hand.advance(denied.reset);
        assert!(take(&log, b"k", &limits, 1).admitted);
    }

    #[test]
    fn of_two_windows_both_take_or_none_and_the_tightest_speaks() {
        let (log, hand) = log(1 << 20, 4);
        let limits = [limit(2, 1), limit(3, 60)];
        let first = take(&log, b"k", &limits, 1);
        assert_eq!((first.tightest, first.after), (0, 1));
        assert!(take(&log, b"k", &limits, 1).admitted);
        let denied = take(&log, b"k", &limits, 1);
        assert_eq!(
            (denied.admitted, denied.tightest, denied.reset),
            (false, 0, Duration::from_secs(1))
        );
        hand.advance(Duration::from_secs(1));
        let third = take(&log, b"k", &limits, 1);
        assert_eq!((third.admitted, third.tightest, third.after), (true, 1, 3));
        let denied = take(&log, b"k", &limits, 1);
        assert_eq!(
            (denied.tightest, denied.before, denied.reset),
            (1, 3, Duration::from_secs(59))
        );
        // The short window did not keep what the long one refused.
        let short = ask(&log, b"k", &limits[..1], Ask::Look);
        assert_eq!(short.before, 1);
    }

    #[test]
    fn nothing_is_kept_of_keys_that_were_never_admitted() {
        let (log, _) = log(1 << 20, 4);
        let none = [limit(0, 60)];
        let denied = take(&log, b"k", &none, 1);
        assert_eq!(
            (denied.admitted, denied.reset),
            (false, Duration::from_secs(60))
        );
        assert!(ask(&log, b"k", &none, Ask::Look).admitted);
        assert!(ask(&log, b"k", &none, Ask::Refund(Hits(9))).admitted);
        assert!(!take(&log, b"j", &[limit(5, 60)], 6).admitted);
        assert_eq!(log.stats().keys, 0);
    }

    #[test]
    fn a_charge_is_logged_over_the_limit_and_gates_looks_until_it_leaves() {
        let (log, hand) = log(1 << 20, 4);
        let limits = [limit(100, 60)];
        let charge = |hits| ask(&log, b"k", &limits, Ask::Charge(Hits(hits)));
        let look = || ask(&log, b"k", &limits, Ask::Look);
        let first = charge(60);
        assert_eq!((first.admitted, first.before, first.after), (true, 0, 60));
        assert_eq!(first.taken_at, None);
        hand.advance(Duration::from_secs(10));
        let second = charge(60);
        assert_eq!(
            (second.admitted, second.before, second.after),
            (true, 60, 120)
        );
        let denied = look();
        assert_eq!(
            (denied.admitted, denied.reset),
            (false, Duration::from_secs(50))
        );
        let third = charge(u32::MAX);
        assert_eq!(
            (third.admitted, third.reset),
            (false, Duration::from_secs(60))
        );
        hand.advance(Duration::from_secs(59));
        assert!(!look().admitted);
        hand.advance(Duration::from_secs(1));
        assert_eq!((look().admitted, look().before), (true, 0));
    }

    #[test]
    fn a_clock_set_back_forgets_nothing_early_and_nobody_waits_for_it() {
        for back in [5, 1_000, 3_600_000] {
            let (log, hand) = log(1 << 20, 1);
            let limits = [limit(2, 60)];
            assert!(take(&log, b"k", &limits, 1).admitted);
            hand.advance(Duration::from_secs(30));
            assert!(take(&log, b"k", &limits, 1).admitted);
            hand.set(Millis(START + 30_000 - back));
            let denied = take(&log, b"k", &limits, 1);
            assert_eq!(denied.reset, Duration::from_secs(30), "ages are kept");
            // A small step is waited out, a large one is not.
            let slip = Duration::from_millis(if back == 5 { 5 } else { 0 });
            hand.advance(denied.reset + slip - Duration::from_millis(1));
            assert!(!take(&log, b"k", &limits, 1).admitted);
            hand.advance(Duration::from_millis(1));
            assert!(take(&log, b"k", &limits, 1).admitted);
        }
    }

    #[test]
    fn a_log_that_is_ahead_of_the_clock_does_not_age_the_others_of_its_key() {
        let (log, hand) = log(1 << 20, 1);
        let (hour, second) = (limit(5, 3_600), limit(1, 1));
        assert!(take(&log, b"k", &[hour], 1).admitted);
        hand.set(Millis(START - 1_000));
        assert!(take(&log, b"k", &[second], 1).admitted);
        hand.advance(Duration::from_millis(995));
        // By the hour's log it is START already, and by that the second would be over.
        let denied = take(&log, b"k", &[hour, second], 1);
        assert_eq!(
            (denied.admitted, denied.reset),
            (false, Duration::from_millis(5))
        );
    }

    #[test]
    fn windows_beyond_all_measure_do_not_overflow() {
        let (log, hand) = log(1 << 20, 1);
        let most = u32::MAX.try_into().unwrap();
        let limits = [Limit {
            requests: u32::MAX,
            window: Window::new(Unit::Year, most),
            exact: false,
        }];
        assert!(take(&log, b"k", &limits, u32::MAX).admitted);
        hand.set(Millis(u64::MAX));
        assert!(!take(&log, b"k", &limits, 1).admitted);
        ask(&log, b"k", &limits, Ask::Charge(Hits(1)));
        hand.set(Millis(0));
        assert!(!ask(&log, b"k", &limits, Ask::Look).admitted);
    }

    #[test]
    fn expired_keys_are_reclaimed_within_the_budget() {
        let (log, hand) = log(16 << 20, 4);
        for key in 0..1_000_u32 {
            take(&log, &key.to_be_bytes(), &[limit(1, 10)], 1);
            take(&log, &key.to_be_bytes(), &[limit(1, 60)], 1);
        }
        hand.advance(Duration::from_secs(10));
        let mut visited = 0;
        while visited < 2_000 {
            let done = log.reclaim(50);
            assert!(done.visited <= 50);
            visited += done.visited;
            audit(&log);
        }
        assert_eq!((log.stats().keys, log.stats().expired), (1_000, 1_000));
        assert!(!take(&log, &7_u32.to_be_bytes(), &[limit(1, 60)], 1).admitted);
        hand.advance(Duration::from_secs(50));
        log.reclaim(usize::MAX);
        let stats = log.stats();
        assert_eq!((stats.keys, stats.expired, stats.evicted), (0, 2_000, 0));
        assert!(stats.bytes < 8_192, "{stats:?}");
    }

    #[test]
    fn over_the_bound_the_least_recently_used_go_first_across_shards() {
        let (log, hand) = log(256 << 10, 8);
        let limits = [limit(1, 86_400)];
        let key = |key: u32| key.to_be_bytes();
        let mut added = 0;
        while log.stats().evicted == 0 {
            assert!(take(&log, &key(added), &limits, 1).admitted);
            // Key 0 stays in use.
            assert!(!take(&log, &key(0), &limits, 1).admitted);
            assert!(log.stats().bytes <= 256 << 10);
            added += 1;
            hand.advance(Duration::from_millis(100));
        }
        assert!(added > 900, "only {added} keys in 256 KB");
        let evicted = log.stats().evicted as u32;
        // Several shards' tables may have grown at the same time.
        assert!(evicted < added / 4, "{evicted} of {added} dropped at once");
        // Who is there is denied. Looks change the order, so each is asked but once.
        let kept: Vec<u32> = (0..added)
            .filter(|&name| ask(&log, &key(name), &limits, Ask::Look).before == 1)
            .collect();
        let expected: Vec<u32> = [0].into_iter().chain(evicted + 1..added).collect();
        assert_eq!(kept, expected);
        audit(&log);
    }

    #[test]
    fn expired_keys_go_before_idle_ones_are_forgotten() {
        let (log, hand) = log(256 << 10, 2);
        let day = [limit(1, 86_400)];
        for key in 0..100_u32 {
            take(&log, &key.to_be_bytes(), &day, 1);
        }
        hand.advance(Duration::from_secs(1));
        for key in 0..20_000_u32 {
            hand.advance(Duration::from_millis(10));
            take(&log, format!("flood {key}").as_bytes(), &[limit(1, 1)], 1);
            assert!(log.stats().bytes <= 256 << 10);
        }
        let kept = (0..100_u32)
            .filter(|key| !take(&log, &key.to_be_bytes(), &day, 1).admitted)
            .count();
        assert!(
            kept >= 90,
            "{kept} of 100 idle keys survived a flood of short ones"
        );
    }

    #[test]
    fn one_huge_log_stays_in_its_share_and_is_too_strict_rather_than_too_lax() {
        let max_bytes = 1 << 20;
        let (log, hand) = log(max_bytes, 8);
        let huge = [Limit {
            exact: true,
            ..limit(30_000, 100)
        }];
        for key in 0..50_u32 {
            take(&log, &key.to_be_bytes(), &[limit(1, 86_400)], 1);
        }
        let mut admitted = Vec::new();
        for now in 0..150_000_u64 {
            hand.set(Millis(START + now));
            if take(&log, b"huge", &huge, 1).admitted {
                admitted.push(now);
            }
            assert!(log.stats().bytes <= max_bytes as u64 / 2);
        }
        assert!(log.stats().coarsened > 0);
        assert_eq!(log.stats().evicted, 0);
        let overrun = admitted
            .windows(30_001)
            .any(|run| run[30_000] - run[0] < 100_000);
        assert!(!overrun);
        assert!(admitted.len() >= 58_000, "{} of 60,000", admitted.len());
        audit(&log);
    }

    #[test]
    fn keys_that_all_fall_into_one_shard_still_share_all_memory() {
        let max_bytes = 512 << 10;
        let (log, hand) = log(max_bytes, 16);
        let limits = [limit(100, 86_400)];
        // Idle keys everywhere, then busy ones in one shard alone.
        for key in 0..1_000_u32 {
            take(&log, &key.to_be_bytes(), &limits, 1);
        }
        hand.advance(Duration::from_secs(1));
        let mut in_one_shard = 0_u64;
        for key in 1_000_u64..120_000 {
            if log.shard_of(log.hash(&key.to_be_bytes())) == 3 {
                hand.advance(Duration::from_millis(1));
                take(&log, &key.to_be_bytes(), &limits, 1);
                in_one_shard += 1;
                assert!(log.stats().bytes <= max_bytes as u64);
            }
        }
        assert!(in_one_shard > 6_000);
        // The idle ones made way, whatever their shard, and the busy shard had all the memory.
        let sizes: Vec<usize> = log
            .shards
            .iter()
            .map(|shard| shard.0.lock().len())
            .collect();
        assert_eq!(sizes.iter().sum::<usize>(), sizes[3], "{sizes:?}");
        assert!(sizes[3] > 2_000, "{sizes:?}");
        audit(&log);
    }

    #[test]
    fn a_bound_too_small_for_anything_is_kept_all_the_same() {
        let (log, _) = log(0, 4);
        for key in 0..100_u32 {
            assert!(take(&log, &key.to_be_bytes(), &[limit(1, 60)], 1).admitted);
        }
        let stats = log.stats();
        assert_eq!((stats.keys, stats.evicted), (0, 100));
        assert!(stats.bytes < 2_048, "{stats:?}");
        audit(&log);
    }

    #[test]
    fn ten_hits_of_a_key_take_less_than_350_bytes() {
        let (log, hand) = log(1 << 30, 16);
        let limits = [limit(100, 60)];
        for _ in 0..10 {
            hand.advance(Duration::from_millis(3));
            for key in 0..10_000_u32 {
                let key = format!("edge|tenant_id=customer-{key:08}");
                take(&log, key.as_bytes(), &limits, 1);
            }
        }
        let per_key = log.stats().bytes / 10_000;
        assert!(per_key < 300, "{per_key} bytes per key");
        audit(&log);
    }

    #[test]
    fn a_limit_of_a_million_takes_no_more_than_a_few_grains() {
        let (log, hand) = log(1 << 20, 1);
        let limits = [limit(1_000_000, 60)];
        for _ in 0..200_000 {
            hand.advance(Duration::from_millis(1));
            assert!(take(&log, b"k", &limits, 3).admitted);
        }
        let used = ask(&log, b"k", &limits, Ask::Look).before;
        assert!((180_000..=180_000 + 3 * 477).contains(&used), "{used}");
        let entries = log.shards[0].0.lock().bytes();
        assert!(entries < 8_192, "{entries} bytes");
        assert_eq!(log.stats().coarsened, 0);
    }

    #[test]
    fn memory_is_bounded_under_threads_too() {
        let max_bytes = 512 << 10;
        let (log, hand) = log(max_bytes, 8);
        let limits = [limit(50, 86_400), limit(5, 60)];
        thread::scope(|scope| {
            for thread in 0..4_u32 {
                let (log, hand, limits) = (&log, &hand, &limits);
                scope.spawn(move || {
                    for round in 0..8_000_u32 {
                        let key = (thread * 1_000_000 + round % 3_000).to_be_bytes();
                        take(log, &key, limits, 1);
                        if round % 16 == 0 {
                            hand.advance(Duration::from_millis(7));
                            log.reclaim(20);
                        }
                        // Others may be in the middle of growing by a chunk and a ring each.
                        assert!(log.stats().bytes <= max_bytes as u64 + 4 * 16_384);
                    }
                });
            }
        });
        assert!(log.stats().bytes <= max_bytes as u64);
        assert!(log.stats().evicted > 0);
        audit(&log);
    }

    #[tokio::test(start_paused = true)]
    async fn the_background_task_reclaims_what_expired() {
        let (log, hand) = log(16 << 20, 4);
        let log = Arc::new(log);
        for key in 0..5_000_u32 {
            take(&log, &key.to_be_bytes(), &[limit(1, 10)], 1);
        }
        let task = tokio::spawn(log.clone().reclaim_forever());
        tokio::time::sleep(Duration::from_secs(6)).await;
        assert_eq!(log.stats().keys, 5_000);
        hand.advance(Duration::from_secs(10));
        tokio::time::sleep(Duration::from_secs(6)).await;
        assert_eq!(log.stats().keys, 0);
        task.abort();
    }
}

//! The denial cache: a store in front of a store, which answers what an earlier denial still settles.
//!
//! A denial says for how long its hits will not fit. Until then every request for as many hits or more, under the
//! same limits or lower ones, would be denied as well, since hits do not leave a log early. So a client that floods
//! costs one call per key and second, and none of it reaches the log.
//!
//! # Exactness
//!
//! An answer from memory denies only what the log would deny, and never admits what it would not:
//! - The deadline runs from the moment the question was *sent*, before the log judged it, less the millisecond that
//!   two clocks may cut off, and is at most 1 s away.
//! - Hits leave a log early only by refunds and give-backs. Those of this instance drop what is remembered of the
//!   key, and keep answers that are still under way from being remembered. Those of other instances are noticed up
//!   to 1 s late: too strict for so long, never too lax.
//! - A look is a request for no hits: only a denied look, made over the limit, settles it. Charges and refunds are
//!   always sent.
//! - Hits that are logged later, fewer than those that were denied, or a charge, leave the denial true, but not the
//!   moment it names for coming back. They drop it. What other instances log meanwhile, and what is logged at the
//!   same time as the denial, may make that moment too early.
//!
//! The store behind must apply a give-back before it judges what is sent later, as the embedded log does; where it
//! does not, the give-back counts as another instance's.
//!
//! # Requests
//!
//! When a [decisive](Check::decisive) check is denied from memory, the request is, and nothing it took would stay
//! taken. Its other checks are then not sent: they are [`AnsweredBy::NotAsked`]. Its charges and refunds are.

use std::{
    fmt,
    hash::BuildHasher,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use quick_cache::{Weighter, sync::Cache};
use smallvec::SmallVec;

use super::{AnsweredBy, Ask, Check, Store, Taken, Verdict, Verdicts};
use crate::{
    clock::{Clock, Millis},
    limit::Limit,
    metrics::Page,
};

/// Longest time that a denial is remembered, and so the longest time that a refund or give-back of another instance
/// goes unnoticed.
pub const LONGEST: Duration = Duration::from_secs(1);

/// See the module.
#[derive(Debug)]
pub struct Denials<S> {
    inner: S,
    clock: Clock,
    /// `None` when there is no room for anything.
    cache: Option<Memory>,
}

/// The numbers of a [`Denials`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DenialStats {
    /// Checks answered from memory, since the start.
    pub hits: u64,
    /// Keys that are remembered, some of them past their time.
    pub keys: u64,
    /// Bytes of memory.
    pub bytes: u64,
    /// Bytes that are allowed.
    pub max_bytes: u64,
}

#[derive(Debug)]
struct Memory {
    cache: Cache<Box<[u8]>, Arc<Denial>, Bytes>,
    hasher: foldhash::fast::RandomState,
    /// How often keys were forgotten, in stripes of keys: an answer is remembered only if its key's number is still
    /// what it was when the question was sent.
    removals: Box<[AtomicU64]>,
    hits: AtomicU64,
}

/// What is remembered of a key.
#[derive(Debug)]
struct Denial {
    limits: SmallVec<[Limit; 2]>,
    /// The hits that were denied; 0 for a look.
    hits: u32,
    /// When the question was sent.
    sent: Millis,
    /// When the answer stops being one.
    until: Millis,
    /// When the log, asked again, would admit these hits at the earliest. Counted from the arrival of the answer,
    /// so that a client told of it never comes too early.
    fits: Millis,
    verdict: Verdict,
}

/// Weighs what is remembered in bytes.
#[derive(Clone, Copy, Debug)]
struct Bytes;

/// Keys whose logs lose hits early by this request; forgets them when the store has answered, or was given up.
struct Removals<'a> {
    memory: &'a Memory,
    checks: &'a [Check<'a>],
}

/// Enough stripes that two keys seldom share one; a shared one costs a call.
const STRIPES: usize = 256;

/// The table of the cache, per key.
const OVERHEAD: usize = 64;

// === impl Denials ===

impl<S: Store> Denials<S> {
    /// Remembers denials of `inner` in at most `max_bytes` bytes; with less than a denial needs, none at all.
    /// `clock` measures how long ago things were.
    pub fn new(inner: S, max_bytes: usize, clock: Clock) -> Self {
        let one = size_of::<Denial>() + OVERHEAD + 40;
        Self {
            inner,
            clock,
            cache: (max_bytes >= one).then(|| Memory::new(max_bytes, max_bytes / one)),
        }
    }

    /// The store behind.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    /// How much is remembered, and how much it was worth.
    pub fn stats(&self) -> DenialStats {
        self.cache
            .as_ref()
            .map_or_else(DenialStats::default, |memory| DenialStats {
                hits: memory.hits.load(Ordering::Relaxed),
                keys: memory.cache.len() as u64,
                bytes: memory.cache.weight(),
                max_bytes: memory.cache.capacity(),
            })
    }
}

impl DenialStats {
    /// Puts the numbers on the metrics page.
    pub fn export(&self, page: &mut Page<'_>) -> fmt::Result {
        page.counter(
            "slidegate_denials_hits",
            "Checks answered by a remembered denial.",
            self.hits,
        )?;
        page.gauge(
            "slidegate_denials_keys",
            "Keys with a remembered denial.",
            self.keys as f64,
        )?;
        page.gauge(
            "slidegate_denials_bytes",
            "Bytes that remembered denials take.",
            self.bytes as f64,
        )?;
        page.gauge(
            "slidegate_denials_max_bytes",
            "Bytes that they may take.",
            self.max_bytes as f64,
        )
    }
}

impl<S: Store> Store for Denials<S> {
    async fn judge(&self, arrived: Instant, checks: &[Check<'_>]) -> Verdicts {
        let Some(memory) = &self.cache else {
            return self.inner.judge(arrived, checks).await;
        };
        let sent = self.clock.now();
        let mut answers: SmallVec<[Option<Verdict>; 4]> = SmallVec::with_capacity(checks.len());
        let mut known: SmallVec<[bool; 4]> = SmallVec::with_capacity(checks.len());
        for check in checks {
            let denial = memory.recall(check.key, sent);
            known.push(denial.is_some());
            // What the same request does to the key before, the denial does not know.
            let changed = checks.iter().zip(&answers).any(|(earlier, answer)| {
                answer.is_none() && earlier.ask != Ask::Look && earlier.key == check.key
            });
            answers.push(if changed {
                None
            } else {
                denial.and_then(|denial| memory.settle(check, &denial, sent))
            });
        }
        let denied = answers
            .iter()
            .zip(checks)
            .any(|(answer, check)| answer.is_some() && check.decisive);
        if denied {
            for (answer, check) in answers.iter_mut().zip(checks) {
                if matches!(check.ask, Ask::Take(_) | Ask::Look) {
                    answer.get_or_insert(NOT_ASKED);
                }
            }
        }
        if answers.iter().all(Option::is_none) {
            return self.ask(memory, arrived, checks, &known, sent).await;
        }

        let (left, known): (SmallVec<[Check<'_>; 4]>, SmallVec<[bool; 4]>) = checks
            .iter()
            .zip(known)
            .zip(&answers)
            .filter_map(|(asked, answer)| answer.is_none().then_some((*asked.0, asked.1)))
            .unzip();
        let mut asked = if left.is_empty() {
            Verdicts::new()
        } else {
            self.ask(memory, arrived, &left, &known, sent).await
        }
        .into_iter();
        answers
            .into_iter()
            .filter_map(|answer| answer.map(Ok).or_else(|| asked.next()))
            .collect()
    }

    fn give_back(&self, taken: &[Taken<'_>]) {
        self.inner.give_back(taken);
        if let Some(memory) = &self.cache {
            for taken in taken {
                memory.forget(taken.key);
            }
        }
    }

    fn flush(&self) {
        if let Some(memory) = &self.cache {
            memory.cache.clear();
        }
        self.inner.flush();
    }
}

impl<S: Store> Denials<S> {
    /// Asks the store, and remembers its denials. `known` says of which checks' keys one is remembered already.
    async fn ask(
        &self,
        memory: &Memory,
        arrived: Instant,
        checks: &[Check<'_>],
        known: &[bool],
        sent: Millis,
    ) -> Verdicts {
        let before: SmallVec<[u64; 4]> = checks
            .iter()
            .map(|check| memory.removals(check.key))
            .collect();
        let removals = Removals { memory, checks };
        let verdicts = self.inner.judge(arrived, checks).await;
        for (index, (check, verdict)) in checks.iter().zip(&verdicts).enumerate() {
            let Ok(verdict) = verdict else { continue };
            let same_key = |earlier: &Check<'_>| earlier.key == check.key;
            if !verdict.admitted && wanted(check.ask).is_some() {
                memory.remember(check, verdict, sent, self.clock.now(), before[index]);
            } else if known[index] || checks[..index].iter().any(same_key) {
                memory.grown(check);
            }
        }
        drop(removals);
        verdicts
    }
}

/// See [`AnsweredBy::NotAsked`].
const NOT_ASKED: Verdict = Verdict {
    admitted: true,
    tightest: 0,
    before: 0,
    after: 0,
    reset: Duration::ZERO,
    taken_at: None,
    by: AnsweredBy::NotAsked,
};

// === impl Memory ===

impl Memory {
    fn new(max_bytes: usize, keys: usize) -> Self {
        Self {
            cache: Cache::with_weighter(keys, max_bytes as u64, Bytes),
            hasher: foldhash::fast::RandomState::default(),
            removals: (0..STRIPES).map(|_| AtomicU64::new(0)).collect(),
            hits: AtomicU64::new(0),
        }
    }

    /// What is remembered of a key and still holds.
    fn recall(&self, key: &[u8], now: Millis) -> Option<Arc<Denial>> {
        let denial = self.cache.get(key)?;
        (denial.sent <= now && now < denial.until).then_some(denial)
    }

    /// The answer to a check, if a denial of its key settles it.
    fn settle(&self, check: &Check<'_>, denial: &Denial, now: Millis) -> Option<Verdict> {
        let hits = wanted(check.ask)?;
        if hits < denial.hits || !is_no_higher(check.limits, &denial.limits) {
            return None;
        }
        self.hits.fetch_add(1, Ordering::Relaxed);
        Some(denial.answer(hits, check.limits, now))
    }

    /// A key's log has more hits than when it was denied. The denial holds, but the reset it names may now be too
    /// early, so the next one is to be asked for.
    fn grown(&self, check: &Check<'_>) {
        if matches!(check.ask, Ask::Take(_) | Ask::Charge(_)) {
            self.forget(check.key);
        }
    }

    /// Remembers a denial, unless hits left the key's logs early since it was asked for.
    fn remember(
        &self,
        check: &Check<'_>,
        verdict: &Verdict,
        sent: Millis,
        now: Millis,
        removals: u64,
    ) {
        let Some(hits) = wanted(check.ask) else {
            return;
        };
        if verdict.by != AnsweredBy::Log || verdict.reset.is_zero() {
            return;
        }
        let millis = |duration: Duration| duration.as_millis() as u64;
        // The log's milliseconds begin at other moments than ours, and cut off up to one.
        let settled = millis(verdict.reset).saturating_sub(1);
        let denial = Denial {
            limits: check.limits.into(),
            hits,
            sent,
            until: Millis(sent.0.saturating_add(settled.min(millis(LONGEST)))),
            fits: Millis(now.0.saturating_add(millis(verdict.reset))),
            verdict: *verdict,
        };
        self.cache.insert(check.key.into(), Arc::new(denial));
        // Whoever forgets a key counts first and then drops what it finds: one of the two sees the other.
        if self.removals(check.key) != removals {
            self.cache.remove(check.key);
        }
    }

    /// Drops what is known of a key, and keeps answers under way from being remembered.
    fn forget(&self, key: &[u8]) {
        self.stripe(key).fetch_add(1, Ordering::SeqCst);
        self.cache.remove(key);
    }

    fn removals(&self, key: &[u8]) -> u64 {
        self.stripe(key).load(Ordering::SeqCst)
    }

    fn stripe(&self, key: &[u8]) -> &AtomicU64 {
        &self.removals[self.hasher.hash_one(key) as usize % STRIPES]
    }
}

// === impl Denial ===

impl Denial {
    /// What the log would say. The numbers are those of the denial; the reset is the denial's for the same hits and
    /// limits, and the whole window, which is never too early, for others.
    fn answer(&self, hits: u32, limits: &[Limit], now: Millis) -> Verdict {
        let windows = |counts: fn(&Limit, u32) -> bool| {
            let windows = limits.iter().filter(|limit| counts(limit, hits));
            let longest = windows.map(|limit| limit.window.duration()).max();
            longest.unwrap_or_default()
        };
        let reset = if hits == self.hits && limits == &*self.limits {
            // What is above a limit never fits, so its whole window stays the answer while the others run down.
            let above = windows(|limit, hits| hits > limit.requests);
            above.max(Duration::from_millis(self.fits.0.saturating_sub(now.0)))
        } else {
            windows(|_, _| true)
        };
        Verdict {
            reset,
            after: self.verdict.before,
            by: AnsweredBy::DenialCache,
            ..self.verdict
        }
    }
}

// === impl Bytes ===

impl Weighter<Box<[u8]>, Arc<Denial>> for Bytes {
    fn weight(&self, key: &Box<[u8]>, denial: &Arc<Denial>) -> u64 {
        let limits = if denial.limits.spilled() {
            size_of_val::<[Limit]>(&denial.limits)
        } else {
            0
        };
        (size_of::<Denial>() + OVERHEAD + key.len() + limits) as u64
    }
}

// === impl Removals ===

impl Drop for Removals<'_> {
    fn drop(&mut self) {
        for check in self.checks {
            if matches!(check.ask, Ask::Refund(_)) {
                self.memory.forget(check.key);
            }
        }
    }
}

/// The hits that must fit for a check to be admitted; `None` for what is always sent.
fn wanted(ask: Ask) -> Option<u32> {
    match ask {
        Ask::Take(hits) => Some(hits.0),
        Ask::Look => Some(0),
        Ask::Charge(_) | Ask::Refund(_) => None,
    }
}

/// Whether the same windows are limited, and none to more than before.
fn is_no_higher(limits: &[Limit], before: &[Limit]) -> bool {
    limits.len() == before.len()
        && limits.iter().zip(before).all(|(limit, before)| {
            limit.window.seconds() == before.window.seconds() && limit.requests <= before.requests
        })
}

#[cfg(test)]
mod tests {
    use std::{
        future::Future,
        pin::pin,
        task::{Context, Poll, Waker},
    };

    use parking_lot::Mutex;

    use super::*;
    use crate::{
        clock::Hand,
        descriptor::Hits,
        limit::Window,
        store::memory::{Config, MemoryLog},
    };

    /// The embedded log, which notes what it is asked, and can be made to wait before or after it judges.
    struct Noting {
        log: MemoryLog,
        asked: Mutex<Vec<(Vec<u8>, Ask)>>,
        wait: Mutex<Wait>,
    }

    #[derive(Clone, Copy, Default, PartialEq)]
    enum Wait {
        #[default]
        No,
        After,
    }

    impl Store for Noting {
        async fn judge(&self, arrived: Instant, checks: &[Check<'_>]) -> Verdicts {
            self.asked
                .lock()
                .extend(checks.iter().map(|check| (check.key.to_vec(), check.ask)));
            let verdicts = self.log.judge(arrived, checks).await;
            if *self.wait.lock() == Wait::After {
                tokio::task::yield_now().await;
            }
            verdicts
        }

        fn give_back(&self, taken: &[Taken<'_>]) {
            self.log.give_back(taken);
        }
    }

    fn denials(max_bytes: usize) -> (Denials<Noting>, Hand) {
        let (clock, hand) = Clock::manual(Millis(1_700_000_000_000));
        let config = Config {
            max_bytes: 1 << 20,
            shards: 4,
        };
        let noting = Noting {
            log: MemoryLog::new(config, clock.clone()),
            asked: Mutex::default(),
            wait: Mutex::default(),
        };
        (Denials::new(noting, max_bytes, clock), hand)
    }

    fn limit(requests: u32, seconds: u64) -> Limit {
        Limit {
            requests,
            window: Window::from_seconds(seconds).unwrap(),
            exact: false,
        }
    }

    fn check<'a>(key: &'a [u8], limits: &'a [Limit], ask: Ask) -> Check<'a> {
        Check {
            key,
            limits,
            ask,
            decisive: true,
        }
    }

    fn poll<F: Future>(future: F) -> Option<F::Output> {
        match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        }
    }

    fn judge(store: &impl Store, checks: &[Check<'_>]) -> Vec<Verdict> {
        let verdicts = poll(store.judge(Instant::now(), checks)).unwrap();
        verdicts.into_iter().map(Result::unwrap).collect()
    }

    fn one(store: &impl Store, key: &[u8], limits: &[Limit], ask: Ask) -> Verdict {
        judge(store, &[check(key, limits, ask)])[0]
    }

    fn take(hits: u32) -> Ask {
        Ask::Take(Hits(hits))
    }

    const ROOM: usize = 1 << 16;

    #[test]
    fn a_flood_costs_one_call_per_second_and_is_let_in_on_time() {
        let (store, hand) = denials(ROOM);
        let limits = [limit(3, 10)];
        for _ in 0..3 {
            assert!(one(&store, b"k", &limits, take(1)).admitted);
        }
        store.inner().asked.lock().clear();
        for millis in 0..10_000_u64 {
            let verdict = one(&store, b"k", &limits, take(1));
            assert!(!verdict.admitted, "at {millis}");
            assert_eq!(verdict.reset, Duration::from_millis(10_000 - millis));
            assert_eq!((verdict.before, verdict.after), (3, 3));
            hand.advance(Duration::from_millis(1));
        }
        assert!(one(&store, b"k", &limits, take(1)).admitted);
        // The tenth second has two calls: its last millisecond is left to the log.
        assert_eq!(store.inner().asked.lock().len(), 12);
        assert_eq!(store.stats().hits, 9_989);
    }

    #[test]
    fn only_as_many_hits_or_more_and_limits_as_low_or_lower_are_settled() {
        let (store, _) = denials(ROOM);
        let limits = [limit(10, 60), limit(100, 3_600)];
        one(&store, b"k", &limits, take(8));
        let denied = one(&store, b"k", &limits, take(4));
        assert_eq!((denied.admitted, denied.by), (false, AnsweredBy::Log));
        let by = |limits: &[Limit], ask| {
            let verdict = one(&store, b"k", limits, ask);
            (verdict.admitted, verdict.by)
        };
        use AnsweredBy::{DenialCache, Log};
        assert_eq!(by(&limits, take(4)), (false, DenialCache));
        assert_eq!(by(&limits, take(9)), (false, DenialCache));
        assert_eq!(
            by(&[limit(9, 60), limit(100, 3_600)], take(4)),
            (false, DenialCache)
        );
        assert_eq!(by(&limits, Ask::Look), (true, Log));
        assert_eq!(by(&[limit(10, 60)], take(4)), (false, Log));
        assert_eq!(
            by(&[limit(10, 61), limit(100, 3_600)], take(4)),
            (true, Log)
        );
        assert_eq!(by(&limits, take(4)), (false, Log));
        // Two fit, and change when four will.
        assert_eq!(by(&limits, take(2)), (true, Log));
        assert_eq!(by(&limits, take(4)), (false, Log));
        assert_eq!(by(&limits, take(4)), (false, DenialCache));
        assert_eq!(
            by(&[limit(20, 60), limit(100, 3_600)], take(4)),
            (true, Log)
        );
    }

    #[test]
    fn resets_from_memory_are_never_too_early() {
        let (store, hand) = denials(ROOM);
        let limits = [limit(10, 60)];
        one(&store, b"k", &limits, take(5));
        hand.advance(Duration::from_secs(30));
        one(&store, b"k", &limits, take(5));
        let denied = one(&store, b"k", &limits, take(4));
        assert_eq!(denied.reset, Duration::from_secs(30));
        // Six need both to leave, which the denial of four does not know.
        let more = one(&store, b"k", &limits, take(6));
        assert_eq!(
            (more.by, more.reset),
            (AnsweredBy::DenialCache, Duration::from_secs(60))
        );
        // More than the limit never fit: the whole window, from memory as from the log.
        let (store, hand) = denials(ROOM);
        for _ in 0..3 {
            let above = one(&store, b"k", &limits, take(11));
            assert_eq!(above.reset, Duration::from_secs(60));
            hand.advance(Duration::from_millis(300));
        }
        assert_eq!(store.stats().hits, 2);
    }

    #[test]
    fn looks_are_settled_by_looks_until_the_log_is_within_its_limit() {
        let (store, hand) = denials(ROOM);
        let limits = [limit(10, 60)];
        one(&store, b"k", &limits, Ask::Charge(Hits(15)));
        let look = || one(&store, b"k", &limits, Ask::Look);
        hand.advance(Duration::from_millis(59_400));
        // A denied request does not say when a look is admitted.
        assert!(!one(&store, b"k", &limits, take(1)).admitted);
        assert_eq!((look().admitted, store.stats().hits), (false, 0));
        assert_eq!((look().admitted, store.stats().hits), (false, 1));
        assert_eq!(
            (
                one(&store, b"k", &limits, take(1)).admitted,
                store.stats().hits
            ),
            (false, 2)
        );
        hand.advance(Duration::from_millis(598));
        assert_eq!(
            (look().by, look().reset),
            (AnsweredBy::DenialCache, Duration::from_millis(2))
        );
        hand.advance(Duration::from_millis(1));
        assert_eq!((look().admitted, look().by), (false, AnsweredBy::Log));
        // A charge is always sent, and answered by the log.
        let charge = one(&store, b"k", &limits, Ask::Charge(Hits(1)));
        assert_eq!((charge.by, charge.after), (AnsweredBy::Log, 16));
        hand.advance(Duration::from_millis(1));
        assert_eq!((look().admitted, look().before), (true, 1));
    }

    #[test]
    fn give_backs_and_refunds_drop_what_is_remembered() {
        let (store, _) = denials(ROOM);
        let limits = [limit(2, 60)];
        let first = one(&store, b"k", &limits, take(2));
        assert!(!one(&store, b"k", &limits, take(1)).admitted);
        store.give_back(&[Taken {
            key: b"k",
            limits: &limits,
            hits: Hits(2),
            at: first.taken_at.unwrap(),
        }]);
        assert!(one(&store, b"k", &limits, take(2)).admitted);
        assert!(!one(&store, b"k", &limits, take(1)).admitted);
        assert!(one(&store, b"k", &limits, Ask::Refund(Hits(1))).admitted);
        assert!(one(&store, b"k", &limits, take(1)).admitted);
        // Within one request, in its order.
        assert!(!one(&store, b"k", &limits, take(1)).admitted);
        let verdicts = judge(
            &store,
            &[
                check(b"k", &limits, Ask::Refund(Hits(1))),
                check(b"k", &limits, take(1)),
            ],
        );
        assert!(verdicts[1].admitted);
        // A denial that a refund of the same request followed is not remembered.
        let verdicts = judge(
            &store,
            &[
                check(b"k", &limits, take(1)),
                check(b"k", &limits, Ask::Refund(Hits(1))),
            ],
        );
        assert!(!verdicts[0].admitted);
        assert!(one(&store, b"k", &limits, take(1)).admitted);
    }

    #[test]
    fn a_denial_that_a_give_back_or_refund_overtook_is_not_remembered() {
        for refund in [false, true] {
            let (store, _) = denials(ROOM);
            let limits = [limit(2, 60)];
            let first = one(&store, b"k", &limits, take(2));
            *store.inner().wait.lock() = Wait::After;
            let checks = [check(b"k", &limits, take(1))];
            let mut under_way = pin!(store.judge(Instant::now(), &checks));
            let mut context = Context::from_waker(Waker::noop());
            assert!(under_way.as_mut().poll(&mut context).is_pending());
            if refund {
                // Applied, and then given up.
                let checks = [check(b"k", &limits, Ask::Refund(Hits(2)))];
                assert!(poll(store.judge(Instant::now(), &checks)).is_none());
            } else {
                store.give_back(&[Taken {
                    key: b"k",
                    limits: &limits,
                    hits: Hits(2),
                    at: first.taken_at.unwrap(),
                }]);
            }
            *store.inner().wait.lock() = Wait::No;
            let Poll::Ready(verdicts) = under_way.as_mut().poll(&mut context) else {
                panic!("nothing left to wait for");
            };
            assert!(!verdicts[0].as_ref().unwrap().admitted);
            assert!(one(&store, b"k", &limits, take(1)).admitted);
        }
    }

    #[test]
    fn a_request_denied_from_memory_sends_nothing_but_charges_and_refunds() {
        let (store, _) = denials(ROOM);
        let (none, some) = ([limit(0, 60)], [limit(5, 60)]);
        one(&store, b"denied", &none, take(1));
        one(&store, b"refunded", &some, take(3));
        store.inner().asked.lock().clear();
        let request = |decisive| {
            [
                check(b"taken", &some, take(1)),
                Check {
                    decisive,
                    ..check(b"denied", &none, take(1))
                },
                check(b"charged", &some, Ask::Charge(Hits(2))),
                check(b"looked at", &some, Ask::Look),
                check(b"refunded", &some, Ask::Refund(Hits(1))),
            ]
        };
        let verdicts = judge(&store, &request(true));
        let by: Vec<_> = verdicts.iter().map(|verdict| verdict.by).collect();
        use AnsweredBy::{DenialCache, Log, NotAsked};
        assert_eq!(by, [NotAsked, DenialCache, Log, NotAsked, Log]);
        let admitted: Vec<_> = verdicts.iter().map(|verdict| verdict.admitted).collect();
        assert_eq!(admitted, [true, false, true, true, true]);
        assert_eq!(verdicts[0].taken_at, None);
        assert_eq!((verdicts[2].after, verdicts[4].after), (2, 2));
        let asked = std::mem::take(&mut *store.inner().asked.lock());
        assert_eq!(
            asked,
            [
                (b"charged".to_vec(), Ask::Charge(Hits(2))),
                (b"refunded".to_vec(), Ask::Refund(Hits(1)))
            ]
        );
        // Where the denial does not decide, everything else is asked for.
        let verdicts = judge(&store, &request(false));
        let by: Vec<_> = verdicts.iter().map(|verdict| verdict.by).collect();
        assert_eq!(by, [Log, DenialCache, Log, Log, Log]);
        assert!(verdicts[0].taken_at.is_some());
    }

    #[test]
    fn memory_is_bounded_flushed_and_optional() {
        let (store, _) = denials(ROOM);
        let none = [limit(0, 60)];
        for key in 0..5_000_u32 {
            one(&store, &key.to_be_bytes(), &none, take(1));
        }
        let stats = store.stats();
        assert!(stats.keys > 100, "{stats:?}");
        assert!(
            stats.bytes <= stats.max_bytes && stats.max_bytes <= ROOM as u64,
            "{stats:?}"
        );
        store.flush();
        assert_eq!(store.stats().keys, 0);

        let (store, _) = denials(0);
        for _ in 0..2 {
            assert_eq!(one(&store, b"k", &none, take(1)).by, AnsweredBy::Log);
        }
        assert_eq!(store.stats(), DenialStats::default());
    }
}

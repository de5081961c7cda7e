//! The embedded log and the denial cache, held against the brute-force model over random histories.

#![allow(clippy::unwrap_used, reason = "a panic here is the report")]

#[path = "support/model.rs"]
mod model;

use std::{
    future::Future,
    pin::pin,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    task::{Context, Poll, Waker},
    thread,
    time::{Duration, Instant},
};

use model::{Bounds, Model, Promise};
use proptest::{
    collection::vec,
    prelude::*,
    sample::select,
    test_runner::{Config as Runs, FileFailurePersistence},
};
use slidegate::{
    clock::{Clock, Hand, Millis},
    descriptor::Hits,
    limit::{Limit, Window},
    store::{
        AnsweredBy, Ask, Check, Store, Taken, Verdict,
        denials::Denials,
        memory::{Config, MemoryLog},
    },
};

const KEYS: [&[u8]; 3] = [b"edge|a", b"edge|b", b"edge|c"];
const START: u64 = 1_700_000_000_000;

// === histories ===

/// What happens to a store, from its first request on.
#[derive(Clone, Debug)]
struct History {
    /// Each load has limits for each key.
    loads: Vec<Vec<Vec<Limit>>>,
    steps: Vec<Step>,
}

#[derive(Clone, Debug)]
enum Step {
    /// One request.
    Judge(Vec<Asked>),
    /// Time passes, or the clock is set ahead: milliseconds.
    Advance(u64),
    /// The clock is set back by milliseconds; give-backs that are outstanding arrive before, or never.
    SetBack { by: u64, arrive: bool },
    /// One of the outstanding give-backs arrives.
    GiveBack(usize),
    /// The next load takes effect.
    Load,
    /// What has expired is forgotten everywhere.
    Reclaim,
}

#[derive(Clone, Copy, Debug)]
struct Asked {
    key: usize,
    ask: Ask,
    decisive: bool,
}

/// A take that is still to be given back.
#[derive(Clone, Debug)]
struct Outstanding {
    key: usize,
    limits: Vec<Limit>,
    hits: Hits,
    at: Millis,
    promise: u64,
}

impl Outstanding {
    fn taken(&self) -> Taken<'_> {
        Taken {
            key: KEYS[self.key],
            limits: &self.limits,
            hits: self.hits,
            at: self.at,
        }
    }
}

/// One or two limits of a key. `coarse` ones may have grains of more than a millisecond.
fn limits(coarse: bool) -> impl Strategy<Value = Vec<Limit>> {
    let requests = if coarse {
        prop_oneof![
            1 => 0..=8_u32,
            1 => 100..=128_u32,
            5 => 129..=700_u32,
        ]
        .boxed()
    } else {
        prop_oneof![
            1 => Just(0).boxed(),
            2 => 1..=2_u32,
            6 => 3..=9_u32,
            3 => 10..=128_u32,
            2 => 129..=400_u32,
        ]
        .boxed()
    };
    let windows = select(vec![
        vec![1_u64],
        vec![2],
        vec![10],
        vec![60],
        vec![1, 2],
        vec![1, 10],
        vec![10, 3],
        vec![2, 60],
    ]);
    (windows, vec((requests, any::<bool>()), 2)).prop_map(move |(windows, requests)| {
        windows
            .into_iter()
            .zip(requests)
            .map(|(seconds, (requests, exact))| Limit {
                requests,
                window: Window::from_seconds(seconds).unwrap(),
                exact: if coarse {
                    exact && requests % 8 == 0
                } else {
                    exact || requests > 128
                },
            })
            .collect()
    })
}

fn asked() -> impl Strategy<Value = Asked> {
    let hits = prop_oneof![
        6 => Just(1_u32),
        4 => 2..=4_u32,
        3 => 5..=60_u32,
        1 => 61..=420_u32,
    ]
    .prop_map(Hits);
    let ask = (0..20, hits).prop_map(|(kind, hits)| match kind {
        0..=13 => Ask::Take(hits),
        14..=15 => Ask::Look,
        16..=17 => Ask::Charge(hits),
        _ => Ask::Refund(hits),
    });
    (
        prop_oneof![3 => Just(0), 2 => Just(1), 1 => Just(2)],
        ask,
        any::<bool>(),
    )
        .prop_map(|(key, ask, decisive)| Asked { key, ask, decisive })
}

fn history(coarse: bool, set_back: bool) -> impl Strategy<Value = History> {
    let time = prop_oneof![
        3 => 0..=3_u64,
        4 => 1..=60_u64,
        4 => 1..=600_u64,
        2 => select(vec![500, 999, 1_000, 1_001, 1_999, 2_000, 2_001, 9_999, 10_000, 59_999, 60_000]),
        1 => 1..=30_000_u64,
    ];
    let back = prop_oneof![
        3 => 1..=15_u64,
        1 => Just(5_u64),
        1 => Just(1_000_u64),
        1 => Just(3_600_000_u64),
        1 => 1..=3_000_u64,
    ];
    let ahead = select(vec![5, 1_000, 3_600_000]);
    let step = prop_oneof![
        20 => vec(asked(), 1..=4).prop_map(Step::Judge),
        12 => time.prop_map(Step::Advance),
        3 => (back, any::<bool>()).prop_map(move |(by, arrive)| if set_back {
            Step::SetBack { by, arrive }
        } else {
            Step::Advance(by.min(1_000))
        }),
        1 => ahead.prop_map(Step::Advance),
        5 => any::<usize>().prop_map(Step::GiveBack),
        1 => Just(Step::Load),
        1 => Just(Step::Reclaim),
    ];
    let loads = vec(vec(limits(coarse), KEYS.len()), 1..=3);
    (loads, vec(step, 20..=140)).prop_map(|(loads, steps)| History { loads, steps })
}

/// As many cases as `PROPTEST_CASES` says.
fn runs() -> Runs {
    Runs {
        failure_persistence: Some(Box::new(FileFailurePersistence::Off)),
        max_shrink_iters: 20_000,
        ..Runs::default()
    }
}

// === running them ===

fn now<F: Future>(future: F) -> F::Output {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("the embedded log answers at once"),
    }
}

fn judge(store: &impl Store, checks: &[Check<'_>]) -> Vec<Verdict> {
    let verdicts = now(store.judge(Instant::now(), checks));
    assert_eq!(verdicts.len(), checks.len());
    verdicts.into_iter().map(Result::unwrap).collect()
}

fn memory_log() -> (MemoryLog, Clock, Hand) {
    let (clock, hand) = Clock::manual(Millis(START));
    let config = Config {
        max_bytes: 64 << 20,
        shards: 2,
    };
    (MemoryLog::new(config, clock.clone()), clock, hand)
}

fn checks<'a>(asked: &[Asked], limits: &'a [Vec<Limit>]) -> Vec<Check<'a>> {
    asked
        .iter()
        .map(|asked| Check {
            key: KEYS[asked.key],
            limits: &limits[asked.key],
            ask: asked.ask,
            decisive: asked.decisive,
        })
        .collect()
}

/// Plays a history on the embedded log, before a witness. The promise must be kept in any history.
fn play(history: &History, witness: &mut impl Witness) {
    let (log, _, hand) = memory_log();
    let mut promise = Promise::default();
    let mut outstanding: Vec<Outstanding> = Vec::new();
    let mut loads = history.loads.iter().cycle();
    let mut limits = loads.next().unwrap();
    for step in &history.steps {
        match step {
            Step::Judge(asked) => {
                let checks = checks(asked, limits);
                let verdicts = judge(&log, &checks);
                for ((asked, check), verdict) in asked.iter().zip(&checks).zip(verdicts) {
                    witness.verdict(hand.now(), check, &verdict);
                    let number = promise.record(check, &verdict);
                    if let (Some(at), Ask::Take(hits)) = (verdict.taken_at, asked.ask) {
                        outstanding.push(Outstanding {
                            key: asked.key,
                            limits: check.limits.to_vec(),
                            hits,
                            at,
                            promise: number,
                        });
                    }
                }
            }
            Step::Advance(by) => {
                hand.advance(Duration::from_millis(*by));
                promise.advance(*by);
            }
            Step::SetBack { by, arrive } => {
                for outstanding in outstanding.drain(..) {
                    if *arrive {
                        return_one(&log, &outstanding, &mut promise, witness);
                    }
                }
                hand.set(Millis(hand.now().0 - by));
            }
            Step::GiveBack(which) => {
                if !outstanding.is_empty() {
                    let one = outstanding.swap_remove(which % outstanding.len());
                    return_one(&log, &one, &mut promise, witness);
                }
            }
            Step::Load => limits = loads.next().unwrap(),
            Step::Reclaim => {
                log.reclaim(usize::MAX);
                witness.expire(hand.now());
            }
        }
    }
    assert_eq!(log.stats().evicted + log.stats().coarsened, 0);
}

fn return_one(
    log: &MemoryLog,
    one: &Outstanding,
    promise: &mut Promise,
    witness: &mut impl Witness,
) {
    log.give_back(&[one.taken()]);
    witness.give_back(&one.taken());
    promise.give_back(one.promise, &one.taken());
}

/// Who looks on while a history is played.
trait Witness {
    fn verdict(&mut self, now: Millis, check: &Check<'_>, verdict: &Verdict);
    fn give_back(&mut self, taken: &Taken<'_>);
    fn expire(&mut self, now: Millis);
}

impl Witness for Model {
    fn verdict(&mut self, now: Millis, check: &Check<'_>, verdict: &Verdict) {
        let expected = self.judge(now, check);
        assert_eq!(*verdict, expected, "at {now:?}, of {check:?}");
    }

    fn give_back(&mut self, taken: &Taken<'_>) {
        self.give_back(taken);
    }

    fn expire(&mut self, now: Millis) {
        self.expire(now);
    }
}

impl Witness for Bounds {
    fn verdict(&mut self, now: Millis, check: &Check<'_>, verdict: &Verdict) {
        self.follow(now, check, verdict);
    }

    fn give_back(&mut self, taken: &Taken<'_>) {
        self.give_back(taken);
    }

    fn expire(&mut self, _: Millis) {}
}

/// Sees only to the promise, which every history keeps.
struct Nobody;

impl Witness for Nobody {
    fn verdict(&mut self, _: Millis, _: &Check<'_>, _: &Verdict) {}
    fn give_back(&mut self, _: &Taken<'_>) {}
    fn expire(&mut self, _: Millis) {}
}

proptest! {
    #![proptest_config(runs())]

    #[test]
    fn with_grains_of_a_millisecond_the_log_is_the_model(history in history(false, true)) {
        play(&history, &mut Model::default());
    }

    #[test]
    fn with_coarse_grains_it_is_late_by_a_grain_at_most(history in history(true, false)) {
        play(&history, &mut Bounds::default());
    }

    #[test]
    fn with_coarse_grains_no_step_of_the_clock_overruns_a_window(history in history(true, true)) {
        play(&history, &mut Nobody);
    }

    #[test]
    fn a_denial_cache_in_front_changes_nothing_but_the_work(history in history(false, false)) {
        compare_with_denials(&history);
    }
}

// === the denial cache ===

/// Plays a history on a bare log and on one behind a denial cache, each with a limiter that gives back what a denied
/// request took, and holds the decisions against each other.
fn compare_with_denials(history: &History) {
    let (bare, clock, hand) = memory_log();
    let config = Config {
        max_bytes: 64 << 20,
        shards: 2,
    };
    let cached = Denials::new(MemoryLog::new(config, clock.clone()), 1 << 20, clock);
    let mut outstanding: Vec<Outstanding> = Vec::new();
    let mut loads = history.loads.iter().cycle();
    let mut limits = loads.next().unwrap();
    for step in &history.steps {
        match step {
            Step::Judge(asked) => {
                // A request that takes and refunds the same hits, and gives them back, depends on whether it was
                // asked for at all.
                let takes = |key| {
                    asked
                        .iter()
                        .any(|asked| asked.key == key && matches!(asked.ask, Ask::Take(_)))
                };
                let mut asked = asked.clone();
                asked.retain(|asked| !(matches!(asked.ask, Ask::Refund(_)) && takes(asked.key)));
                let checks = checks(&asked, limits);
                let expected = judge(&bare, &checks);
                let actual = judge(&cached, &checks);
                compare(&checks, &expected, &actual);
                let denied = checks
                    .iter()
                    .zip(&expected)
                    .any(|(check, verdict)| check.decisive && !verdict.admitted);
                for (index, asked) in asked.iter().enumerate() {
                    let Ask::Take(hits) = asked.ask else { continue };
                    let take = |at| Outstanding {
                        key: asked.key,
                        limits: limits[asked.key].clone(),
                        hits,
                        at,
                        promise: 0,
                    };
                    match (expected[index].taken_at, actual[index].taken_at) {
                        (Some(at), other) if denied => {
                            bare.give_back(&[take(at).taken()]);
                            if let Some(other) = other {
                                cached.give_back(&[take(other).taken()]);
                            }
                        }
                        (Some(at), other) => {
                            assert_eq!(other, Some(at));
                            outstanding.push(take(at));
                        }
                        (None, other) => assert_eq!(other, None),
                    }
                }
            }
            Step::Advance(by) => hand.advance(Duration::from_millis(*by)),
            Step::SetBack { .. } => unreachable!("not in these histories"),
            Step::GiveBack(which) => {
                if !outstanding.is_empty() {
                    let one = outstanding.swap_remove(which % outstanding.len());
                    bare.give_back(&[one.taken()]);
                    cached.give_back(&[one.taken()]);
                }
            }
            Step::Load => {
                limits = loads.next().unwrap();
                cached.flush();
            }
            Step::Reclaim => {
                bare.reclaim(usize::MAX);
            }
        }
    }
}

fn compare(checks: &[Check<'_>], expected: &[Verdict], actual: &[Verdict]) {
    // What a request charges after it took depends on whether it took at all.
    let denied_from_memory = checks
        .iter()
        .zip(actual)
        .any(|(check, verdict)| check.decisive && verdict.by == AnsweredBy::DenialCache);
    for ((check, expected), actual) in checks.iter().zip(expected).zip(actual) {
        match actual.by {
            AnsweredBy::NotAsked => {
                assert!(denied_from_memory);
                assert!(matches!(check.ask, Ask::Take(_) | Ask::Look));
            }
            AnsweredBy::DenialCache => {
                assert!(!expected.admitted, "{check:?} was denied from memory alone");
                assert!(
                    actual.reset >= expected.reset,
                    "{check:?} is told to come too early"
                );
            }
            AnsweredBy::Log if denied_from_memory => {}
            AnsweredBy::Log => assert_eq!(actual, expected, "{check:?}"),
        }
    }
}

/// One limit that never admits, and one that runs down to less than the first one's window.
#[test]
fn a_remembered_denial_names_the_whole_window_of_a_limit_that_is_too_low() {
    let (log, clock, hand) = memory_log();
    let cached = Denials::new(log, 1 << 20, clock);
    let limits = [limit(0, 1), limit(1, 2)];
    let ask = |ask| {
        let check = Check {
            key: b"k",
            limits: &limits,
            ask,
            decisive: true,
        };
        judge(&cached, &[check])[0]
    };
    ask(Ask::Charge(Hits(1)));
    hand.advance(Duration::from_millis(10));
    assert_eq!(ask(Ask::Take(Hits(1))).reset, Duration::from_millis(1_990));
    hand.advance(Duration::from_millis(998));
    let remembered = ask(Ask::Take(Hits(1)));
    assert_eq!(remembered.by, AnsweredBy::DenialCache);
    assert_eq!(remembered.reset, Duration::from_millis(1_000));
}

// === threads ===

fn limit(requests: u32, seconds: u64) -> Limit {
    Limit {
        requests,
        window: Window::from_seconds(seconds).unwrap(),
        exact: false,
    }
}

#[test]
fn threads_that_hammer_a_few_keys_get_exactly_the_limit_in_each_window() {
    let (log, _, hand) = memory_log();
    let limits = [
        vec![limit(100, 10)],
        vec![limit(37, 10), limit(60, 20)],
        vec![limit(500, 10)],
    ];
    for round in 0..4 {
        let admitted: [AtomicU64; 3] = Default::default();
        thread::scope(|scope| {
            for thread in 0..4 {
                let (log, limits, admitted) = (&log, &limits, &admitted);
                scope.spawn(move || {
                    for turn in 0..900_usize {
                        let key = (turn + thread) % KEYS.len();
                        let asked = Asked {
                            key,
                            ask: Ask::Take(Hits(1 + turn as u32 % 2)),
                            decisive: true,
                        };
                        let Ask::Take(hits) = asked.ask else {
                            unreachable!()
                        };
                        let verdict = judge(log, &checks(&[asked], limits))[0];
                        if verdict.admitted {
                            admitted[key].fetch_add(u64::from(hits.0), Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        let total = admitted.map(|admitted| admitted.into_inner());
        // The second key's long window leaves 60 - 37 to every other round.
        let second = if round % 2 == 0 { 37 } else { 23 };
        assert_eq!(total, [100, second, 500], "round {round}");
        hand.advance(Duration::from_secs(10));
    }
}

#[test]
fn no_window_of_any_offset_is_overrun_while_threads_and_the_clock_run() {
    let (log, _, hand) = memory_log();
    let limits = [
        vec![limit(50, 1)],
        vec![limit(7, 1), limit(20, 3)],
        vec![limit(300, 1)],
    ];
    let running = AtomicBool::new(true);
    let mut admitted = thread::scope(|scope| {
        let threads: Vec<_> = (0..3)
            .map(|thread| {
                let (log, limits, running) = (&log, &limits, &running);
                scope.spawn(move || {
                    let mut admitted = Vec::new();
                    for turn in thread.. {
                        if !running.load(Ordering::Relaxed) {
                            break;
                        }
                        let key = turn % KEYS.len();
                        let asked = Asked {
                            key,
                            ask: Ask::Take(Hits(1)),
                            decisive: true,
                        };
                        if let Some(at) = judge(log, &checks(&[asked], limits))[0].taken_at {
                            admitted.push((key, at.0));
                        }
                    }
                    admitted
                })
            })
            .collect();
        for _ in 0..6_000 {
            hand.advance(Duration::from_millis(1));
            for _ in 0..200 {
                std::hint::spin_loop();
            }
        }
        running.store(false, Ordering::Relaxed);
        threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap())
            .collect::<Vec<_>>()
    });
    admitted.sort_unstable();
    for (key, limits) in limits.iter().enumerate() {
        let times: Vec<u64> = admitted
            .iter()
            .filter_map(|&(of, at)| (of == key).then_some(at))
            .collect();
        assert!(
            times.len() > limits[0].requests as usize,
            "the windows moved on"
        );
        for limit in limits {
            let requests = limit.requests as usize;
            for run in times.windows(requests + 1) {
                assert!(
                    run[requests] - run[0] >= limit.window.millis(),
                    "{limit:?} at {run:?}"
                );
            }
        }
    }
}

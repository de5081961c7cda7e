//! What a log of hits must answer, by definition and by brute force. Knows nothing of how a store keeps its logs:
//! the embedded log and the log in Redis are held against the same model.
//!
//! - [`Model`] stores every single hit with its millisecond and answers like a log with a grain of one millisecond.
//! - [`Bounds`] follows what a log with coarser grains decided and says within what such a log may err.
//! - [`Promise`] knows only what was admitted when, in time that never runs backwards, and holds it against the
//!   limit: the strict property, for rolling windows of any offset.

#![allow(dead_code, reason = "each test uses its part")]

use std::{collections::HashMap, time::Duration};

use slidegate::{
    clock::Millis,
    limit::Limit,
    store::{AnsweredBy, Ask, Check, Taken, Verdict},
};

/// A key and the length of a window in seconds: one log.
type Name = (Vec<u8>, u64);

/// The newest entry may be this many milliseconds ahead of the clock and still be now.
const SLACK: i64 = 10;

/// Entries that a log keeps before it grows coarser, unless it is exact.
const MOST_ENTRIES: u32 = 128;

fn name(key: &[u8], limit: &Limit) -> Name {
    (key.to_vec(), limit.window.seconds())
}

fn length(limit: &Limit) -> i64 {
    limit.window.seconds() as i64 * 1_000
}

fn millis(length: i64) -> Duration {
    Duration::from_millis(u64::try_from(length).expect("time goes forward"))
}

fn hits(ask: Ask) -> usize {
    match ask {
        Ask::Look => 0,
        Ask::Take(hits) | Ask::Charge(hits) | Ask::Refund(hits) => hits.0 as usize,
    }
}

/// How much too long, in milliseconds, a log of this limit may remember a hit.
pub fn lateness(limit: &Limit) -> i64 {
    if limit.exact || limit.requests <= MOST_ENTRIES {
        0
    } else {
        // 126 grains cover a window; hits of one grain leave together.
        (length(limit) + 125) / 126 - 1
    }
}

// === Model ===

/// Every hit of every log, by its millisecond, oldest first.
#[derive(Debug, Default)]
pub struct Model {
    logs: HashMap<Name, Vec<i64>>,
}

impl Model {
    /// The answer to a check at that time.
    pub fn judge(&mut self, clock: Millis, check: &Check<'_>) -> Verdict {
        let now = self.settle(clock.0 as i64, check);
        let count = hits(check.ask);
        let before: Vec<usize> = self.logs(check).map(|log| log.len()).collect();
        let fits = |index: usize| {
            let limit = check.limits[index].requests as usize;
            match check.ask {
                Ask::Take(_) => before[index] + count <= limit,
                Ask::Look | Ask::Charge(_) => before[index] <= limit,
                Ask::Refund(_) => true,
            }
        };
        let all: Vec<usize> = (0..check.limits.len()).collect();
        let admitted = all.iter().all(|&index| fits(index));
        let mut taken_at = None;
        for limit in check.limits {
            let log = self.logs.entry(name(check.key, limit)).or_default();
            match check.ask {
                Ask::Take(_) if admitted => {
                    log.extend(vec![now; count]);
                    taken_at = Some(Millis(now as u64));
                }
                Ask::Charge(_) => log.extend(vec![now; count]),
                Ask::Refund(_) => drop(log.drain(..count.min(log.len()))),
                Ask::Take(_) | Ask::Look => {}
            }
        }

        let reset = |index: usize| {
            let limit = &check.limits[index];
            let log = &self.logs[&name(check.key, limit)];
            let requests = limit.requests as usize;
            if fits(index) {
                log.first().map_or(0, |oldest| oldest + length(limit) - now)
            } else {
                let wanted = if matches!(check.ask, Ask::Take(_)) {
                    count
                } else {
                    0
                };
                if wanted > requests {
                    return length(limit);
                }
                // The first moment at which enough has left.
                let mut moments: Vec<i64> = log.iter().map(|at| at + length(limit)).collect();
                moments.dedup();
                let fits_at = |moment: i64| {
                    let left = log.iter().filter(|&at| at + length(limit) > moment);
                    left.count() + wanted <= requests
                };
                let first = moments.into_iter().find(|&moment| fits_at(moment));
                first.expect("an empty log has room") - now
            }
        };
        let after = |index: usize| self.logs[&name(check.key, &check.limits[index])].len();
        let share = |index: usize| {
            let limit = check.limits[index].requests;
            let remaining = (limit as usize).saturating_sub(after(index));
            remaining as f64 / f64::from(limit.max(1))
        };
        let mut candidates = all;
        if admitted {
            let least = candidates
                .iter()
                .map(|&index| share(index))
                .fold(f64::INFINITY, f64::min);
            candidates.retain(|&index| share(index) == least);
        } else {
            candidates.retain(|&index| !fits(index));
        }
        let longest = candidates.iter().map(|&index| reset(index)).max();
        let tightest = candidates
            .into_iter()
            .find(|&index| Some(reset(index)) == longest)
            .expect("a check has limits");
        Verdict {
            admitted,
            tightest,
            before: before[tightest] as u64,
            after: after(tightest) as u64,
            reset: millis(reset(tightest)),
            taken_at,
            by: AnsweredBy::Log,
        }
    }

    /// Removes hits of one millisecond, as many as there are.
    pub fn give_back(&mut self, taken: &Taken<'_>) {
        for limit in taken.limits {
            let log = self.logs.entry(name(taken.key, limit)).or_default();
            for _ in 0..taken.hits.0 {
                if let Some(index) = log.iter().rposition(|&at| at == taken.at.0 as i64) {
                    log.remove(index);
                }
            }
        }
    }

    /// Forgets everywhere what has left its window. Logs do so by themselves when they are asked; only a clock that
    /// is set back later can tell the difference.
    pub fn expire(&mut self, clock: Millis) {
        for ((_, seconds), log) in &mut self.logs {
            log.retain(|at| at + *seconds as i64 * 1_000 > clock.0 as i64);
        }
    }

    /// Brings all logs of a check to one time and forgets what has left its window by then.
    fn settle(&mut self, clock: i64, check: &Check<'_>) -> i64 {
        let newest: Vec<Option<i64>> = self.logs(check).map(|log| log.last().copied()).collect();
        let ahead = newest
            .iter()
            .flatten()
            .filter(|&&newest| newest <= clock + SLACK);
        let now = ahead.copied().fold(clock, i64::max);
        for (limit, newest) in check.limits.iter().zip(newest) {
            let log = self.logs.entry(name(check.key, limit)).or_default();
            // The time that this log has reached becomes now: its hits keep their ages.
            let reached = newest.map_or(now, |newest| newest.max(clock));
            for at in log.iter_mut() {
                *at += now - reached;
            }
            log.retain(|at| at + length(limit) > now);
        }
        now
    }

    fn logs(&mut self, check: &Check<'_>) -> impl Iterator<Item = &[i64]> {
        for limit in check.limits {
            self.logs.entry(name(check.key, limit)).or_default();
        }
        let names: Vec<Name> = check
            .limits
            .iter()
            .map(|limit| name(check.key, limit))
            .collect();
        names.into_iter().map(|name| &*self.logs[&name])
    }
}

// === Bounds ===

/// Between what a log of one-millisecond grains must remember and what one that remembers each hit up to a grain too
/// long may: two lists, to which everything that the log decided is done as well. For clocks that are never set
/// back.
#[derive(Debug, Default)]
pub struct Bounds {
    logs: HashMap<Name, Two>,
}

#[derive(Debug, Default)]
struct Two {
    /// Hits that must be remembered, by their millisecond, oldest first.
    least: Vec<i64>,
    /// Hits that may be.
    most: Vec<i64>,
    /// The greatest that any limit of this log has had.
    lateness: i64,
    /// Whether limits of this log have differed in that.
    mixed: bool,
}

impl Bounds {
    /// Holds a verdict against what is possible, and follows it.
    pub fn follow(&mut self, clock: Millis, check: &Check<'_>, verdict: &Verdict) {
        let now = clock.0 as i64;
        let count = hits(check.ask);
        let wanted = match check.ask {
            Ask::Take(_) => count,
            Ask::Look | Ask::Charge(_) => 0,
            Ask::Refund(_) => {
                assert!(verdict.admitted, "refunds are always admitted");
                0
            }
        };
        for limit in check.limits {
            let two = self.logs.entry(name(check.key, limit)).or_default();
            let late = lateness(limit);
            two.mixed |= late != two.lateness && !(two.least.is_empty() && two.most.is_empty());
            two.lateness = two.lateness.max(late);
            let window = length(limit);
            two.least.retain(|at| at + window > now);
            two.most.retain(|at| at + window + two.lateness > now);
        }
        let two = |limit: &Limit| &self.logs[&name(check.key, limit)];

        if !matches!(check.ask, Ask::Refund(_)) {
            let must_deny =
                |limit: &&Limit| two(limit).least.len() + wanted > limit.requests as usize;
            let may_deny =
                |limit: &&Limit| two(limit).most.len() + wanted > limit.requests as usize;
            if verdict.admitted {
                assert!(
                    !check.limits.iter().any(|limit| must_deny(&limit)),
                    "overrun"
                );
            } else {
                let tightest = &check.limits[verdict.tightest];
                assert!(may_deny(&tightest), "denied more than a grain too long");
                self.reset_is_possible(now, check, verdict, wanted);
            }
        }
        let tightest = two(&check.limits[verdict.tightest]);
        let possible = tightest.least.len() as u64..=tightest.most.len() as u64;
        assert!(
            possible.contains(&verdict.before),
            "used is {}, not in {possible:?}",
            verdict.before
        );

        for limit in check.limits {
            let two = self.logs.entry(name(check.key, limit)).or_default();
            match check.ask {
                Ask::Take(_) if !verdict.admitted => {}
                Ask::Take(_) | Ask::Charge(_) => {
                    two.least.extend(vec![now; count]);
                    two.most.extend(vec![now; count]);
                }
                Ask::Refund(_) => {
                    drop(two.least.drain(..count.min(two.least.len())));
                    drop(two.most.drain(..count.min(two.most.len())));
                }
                Ask::Look => {}
            }
        }
    }

    /// Follows a give-back: at most, the hits that are left of that millisecond go; at least, as many as were
    /// taken, since what a refund took of them it would otherwise have taken from the next. Where a reload changed
    /// the grain, they may have become part of an entry that the grain of their own time does not lead to: then
    /// nothing goes.
    pub fn give_back(&mut self, taken: &Taken<'_>) {
        let at = taken.at.0 as i64;
        for limit in taken.limits {
            let two = self.logs.entry(name(taken.key, limit)).or_default();
            for _ in 0..taken.hits.0 {
                if let Some(index) = two.most.iter().position(|&hit| hit == at)
                    && !two.mixed
                {
                    two.most.remove(index);
                }
                if let Some(index) = two.least.iter().position(|&hit| hit >= at) {
                    two.least.remove(index);
                }
            }
        }
    }

    /// The moment that a denial names is no earlier than that at which what must be remembered makes room, and no
    /// later than that at which all that may be remembered has.
    fn reset_is_possible(&self, now: i64, check: &Check<'_>, verdict: &Verdict, wanted: usize) {
        let reset = verdict.reset.as_millis() as i64;
        let charged = match check.ask {
            Ask::Charge(hits) => hits.0 as usize,
            _ => 0,
        };
        // The hit whose leaving makes room.
        let leaves = |hits: &[i64], limit: &Limit, late: i64| {
            let window = length(limit);
            if wanted > limit.requests as usize {
                return window;
            }
            let excess = (hits.len() + charged + wanted).saturating_sub(limit.requests as usize);
            match excess.checked_sub(1) {
                None => 0,
                Some(last) => hits.get(last).copied().unwrap_or(now) + window + late - now,
            }
        };
        for limit in check.limits {
            let two = &self.logs[&name(check.key, limit)];
            if two.least.len() + wanted > limit.requests as usize {
                let earliest = leaves(&two.least, limit, 0);
                assert!(reset >= earliest, "reset {reset} is before {earliest}");
            }
        }
        let limit = &check.limits[verdict.tightest];
        let two = &self.logs[&name(check.key, limit)];
        let latest = leaves(&two.most, limit, two.lateness);
        assert!(reset <= latest, "reset {reset} is after {latest}");
    }
}

// === Promise ===

/// What was admitted when, in time as it passed: setting a clock back takes no time, setting it ahead does.
#[derive(Debug, Default)]
pub struct Promise {
    elapsed: u64,
    next: u64,
    logs: HashMap<Name, Vec<Admitted>>,
}

#[derive(Debug)]
struct Admitted {
    id: u64,
    at: u64,
    hits: u64,
}

impl Promise {
    /// Time passes.
    pub fn advance(&mut self, millis: u64) {
        self.elapsed += millis;
    }

    /// Holds a verdict against all that was admitted. Returns a number by which hits can be given back.
    pub fn record(&mut self, check: &Check<'_>, verdict: &Verdict) -> u64 {
        self.next += 1;
        let (id, at) = (self.next, self.elapsed);
        let count = hits(check.ask) as u64;
        for limit in check.limits {
            let log = self.logs.entry(name(check.key, limit)).or_default();
            let window = limit.window.seconds() * 1_000;
            // A window that ends with a hit is as full as any: the last milliseconds up to now, as many as it has.
            log.retain(|admitted| admitted.at + window > at);
            match check.ask {
                Ask::Take(_) if verdict.admitted => log.push(Admitted {
                    id,
                    at,
                    hits: count,
                }),
                Ask::Take(_) => continue,
                Ask::Look | Ask::Charge(_) => {}
                Ask::Refund(_) => {
                    remove(log.iter_mut(), count);
                    continue;
                }
            }
            let used: u64 = log.iter().map(|admitted| admitted.hits).sum();
            assert!(
                !verdict.admitted || used <= u64::from(limit.requests),
                "{used} hits in one window of {}, where {} are allowed",
                limit.window,
                limit.requests
            );
            if matches!(check.ask, Ask::Charge(_)) {
                log.push(Admitted {
                    id,
                    at,
                    hits: count,
                });
            }
        }
        id
    }

    /// Hits that were admitted under a number never happened. What a refund has taken of them it would otherwise
    /// have taken from others, the oldest first.
    pub fn give_back(&mut self, id: u64, taken: &Taken<'_>) {
        for limit in taken.limits {
            let log = self.logs.entry(name(taken.key, limit)).or_default();
            let count = u64::from(taken.hits.0);
            // Once they have left the window nothing is given back.
            if log.iter().any(|admitted| admitted.id == id) {
                let left = remove(log.iter_mut().filter(|admitted| admitted.id == id), count);
                remove(log.iter_mut(), left);
            }
        }
    }
}

/// Takes hits from the first on; returns how many there were too few.
fn remove<'a>(log: impl Iterator<Item = &'a mut Admitted>, mut count: u64) -> u64 {
    for admitted in log {
        let taken = admitted.hits.min(count);
        admitted.hits -= taken;
        count -= taken;
    }
    count
}

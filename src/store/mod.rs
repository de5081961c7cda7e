//! The log of every descriptor, behind one small trait. A store is given keys, limits and hits as plain data and
//! knows no rule and no wire; which stores are stacked on which is read in `server.rs`.

pub mod denials;
pub mod memory;

use std::{
    future::Future,
    sync::Arc,
    time::{Duration, Instant},
};

use smallvec::SmallVec;

use crate::{clock::Millis, descriptor::Hits, limit::Limit};

/// Entries a log keeps before it joins hits of one grain of time; above it, Redis would turn the log's compact
/// listpack into a skiplist (`zset-max-listpack-entries`) of five times the size.
pub const MAX_ENTRIES: u64 = 128;

/// How far, in milliseconds, the newest entry of a log may be ahead of the clock before the clock counts as set
/// back. Within it the newest entry's time is now; beyond it the log is moved to the clock, ages kept.
pub const CLOCK_SLACK: u64 = 10;

/// Milliseconds of one grain of a log of this limit: hits of one grain are one entry. One, unless the limit allows
/// more hits than [`MAX_ENTRIES`] and is not `exact`; then so many that a full window has that many entries, less
/// the two that it may touch beyond its length.
pub const fn grain(limit: &Limit) -> u64 {
    if limit.exact || limit.requests as u64 <= MAX_ENTRIES {
        1
    } else {
        limit.window.millis().div_ceil(MAX_ENTRIES - 2)
    }
}

/// What is asked of the logs of one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Admit these hits and log them, if every limit has room for all of them. At least one.
    Take(Hits),
    /// Is the key within its limits (used at most the limit)? Nothing is logged.
    Look,
    /// Log these hits whether or not they fit: the work is done. Answered as a look before them. At least one.
    Charge(Hits),
    /// Forget this many hits, the oldest first, as far as there are any. Always admitted.
    Refund(Hits),
}

/// One question to the store: one key, all of its limits.
#[derive(Clone, Copy, Debug)]
pub struct Check<'a> {
    /// The descriptor in the spelling of [`key`](crate::key), without window or prefix. All logs of one key are
    /// judged and extended together.
    pub key: &'a [u8],
    /// At least one, no two of the same window length.
    pub limits: &'a [Limit],
    /// What to do.
    pub ask: Ask,
    /// Whether a denial of this check denies the request, so that nothing the request took elsewhere stays taken:
    /// not so for shadowed rules and quota rules, nor where a denied request keeps what it took.
    pub decisive: bool,
}

/// The answer to one check. The numbers are those of one of its limits, the tightest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Whether the hits fit. For a look or a charge: whether the log stood within its limits before.
    pub admitted: bool,
    /// Whose numbers follow: an index into the check's limits. Denied: of the denying limits the one with the
    /// longest reset; admitted: the one with the least remaining share, of equals the one with the longest reset.
    pub tightest: usize,
    /// Hits in that window before this check.
    pub before: u64,
    /// Hits in that window after it.
    pub after: u64,
    /// Denied: until these hits fit if nothing else is admitted, never too early; the whole window for hits above
    /// the limit. A denied look or charge: until a look is admitted, a charge's own hits counted. Admitted: until
    /// the oldest entry leaves; zero for an empty log.
    pub reset: Duration,
    /// The millisecond of the log's clock that taken hits were logged under; a give-back names it. `None` where
    /// nothing was taken that could be given back: denials, looks, charges, refunds.
    pub taken_at: Option<Millis>,
    /// Which layer of the store answered.
    pub by: AnsweredBy,
}

/// Who answered a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnsweredBy {
    /// The log itself.
    Log,
    /// The memory of an earlier denial.
    DenialCache,
    /// Nobody: another check denied the request from memory, so this one was not sent, and nothing was taken. It
    /// counts as admitted; `before` and `after` are 0, since they are not known.
    NotAsked,
}

/// Hits that a check took and that are to be given back, since another descriptor denied the request.
#[derive(Clone, Copy, Debug)]
pub struct Taken<'a> {
    /// The check's key.
    pub key: &'a [u8],
    /// The check's limits.
    pub limits: &'a [Limit],
    /// The hits it took.
    pub hits: Hits,
    /// The verdict's `taken_at`.
    pub at: Millis,
}

/// Why a store has no verdict.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The deadline passed before an answer.
    #[error("the log did not answer in time")]
    Timeout,
}

/// One answer per check, in order.
pub type Verdicts = SmallVec<[Result<Verdict, StoreError>; 4]>;

/// Logs of hits, judged and extended atomically per key.
pub trait Store: Send + Sync + 'static {
    /// Judges all checks of one request. The same key twice is judged twice, in order. `arrived` is when the
    /// request came in: stores that can be slow count their deadline from it. The future may be dropped at any
    /// await point; hits are then either logged whole or not at all.
    fn judge(
        &self,
        arrived: Instant,
        checks: &[Check<'_>],
    ) -> impl Future<Output = Verdicts> + Send;

    /// Takes hits out of the logs again. A log that no longer holds them is left as it is. Does not block.
    fn give_back(&self, taken: &[Taken<'_>]);

    /// Forgets what is only remembered to save calls; called when the rules changed.
    fn flush(&self) {}
}

/// A store that is shared, so that its numbers can be read elsewhere.
impl<S: Store> Store for Arc<S> {
    fn judge(
        &self,
        arrived: Instant,
        checks: &[Check<'_>],
    ) -> impl Future<Output = Verdicts> + Send {
        S::judge(self, arrived, checks)
    }

    fn give_back(&self, taken: &[Taken<'_>]) {
        S::give_back(self, taken);
    }

    fn flush(&self) {
        S::flush(self);
    }
}

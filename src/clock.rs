//! Time as a value. Whatever decides by a clock is given one of these, so that tests turn it by hand.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// A point in time on some log's clock: milliseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Millis(pub u64);

/// Where the milliseconds come from.
#[derive(Clone, Debug)]
pub struct Clock(Source);

/// The hand of a clock made by [`Clock::manual`]; clones move the same clock.
#[derive(Clone, Debug)]
pub struct Hand(Arc<AtomicU64>);

#[derive(Clone, Debug)]
enum Source {
    /// Unix time at the start plus monotonic time since, so that an operator's clock change moves nothing.
    System {
        started: Instant,
        unix: Duration,
    },
    Manual(Hand),
}

// === impl Clock ===

impl Clock {
    /// The machine's time; it never steps, in either direction, while the process lives.
    pub fn system() -> Self {
        Self(Source::System {
            started: Instant::now(),
            unix: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default(),
        })
    }

    /// A clock that stands still until its hand is moved.
    pub fn manual(start: Millis) -> (Self, Hand) {
        let hand = Hand(Arc::new(AtomicU64::new(start.0)));
        (Self(Source::Manual(hand.clone())), hand)
    }

    /// The time now.
    pub fn now(&self) -> Millis {
        match &self.0 {
            Source::System { started, unix } => {
                Millis((*unix + started.elapsed()).as_millis() as u64)
            }
            Source::Manual(hand) => hand.now(),
        }
    }
}

// === impl Hand ===

impl Hand {
    /// Where the clock stands.
    pub fn now(&self) -> Millis {
        Millis(self.0.load(Ordering::SeqCst))
    }

    /// Puts the clock to `now`, earlier or later.
    pub fn set(&self, now: Millis) {
        self.0.store(now.0, Ordering::SeqCst);
    }

    /// Moves the clock on.
    pub fn advance(&self, by: Duration) {
        self.0.fetch_add(by.as_millis() as u64, Ordering::SeqCst);
    }
}

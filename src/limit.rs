//! A limit: so many hits in so long a window. The words for periods live here (units, windows, their
//! spelling); whose limit it is and how it is kept do not.

use std::{fmt, num::NonZeroU32, time::Duration};

/// A period that rules and Envoy name by word. Months have 30 days and years 365, as everywhere in this field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Unit {
    /// 1 s
    Second,
    /// 60 s
    Minute,
    /// 3,600 s
    Hour,
    /// 86,400 s
    Day,
    /// 604,800 s
    Week,
    /// 2,592,000 s (30 days)
    Month,
    /// 31,536,000 s (365 days)
    Year,
}

/// The time a limit looks back over: a whole number of one unit, never zero.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Window {
    unit: Unit,
    multiplier: NonZeroU32,
}

/// At most `requests` hits in any rolling `window`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Limit {
    /// Hits admitted per window; 0 admits none.
    pub requests: u32,
    /// How far back hits count.
    pub window: Window,
    /// Keep one log entry per millisecond even where that takes more than
    /// [`MAX_ENTRIES`](crate::store::MAX_ENTRIES) of them, so that no hit is remembered up to one grain too long.
    pub exact: bool,
}

// === impl Unit ===

impl Unit {
    /// Every unit, shortest first.
    pub const ALL: [Self; 7] = [
        Self::Second,
        Self::Minute,
        Self::Hour,
        Self::Day,
        Self::Week,
        Self::Month,
        Self::Year,
    ];

    /// Length of one unit in seconds.
    pub const fn seconds(self) -> u64 {
        match self {
            Self::Second => 1,
            Self::Minute => 60,
            Self::Hour => 3_600,
            Self::Day => 86_400,
            Self::Week => 604_800,
            Self::Month => 2_592_000,
            Self::Year => 31_536_000,
        }
    }

    /// The word in capitals, as in the protobuf enum.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Second => "SECOND",
            Self::Minute => "MINUTE",
            Self::Hour => "HOUR",
            Self::Day => "DAY",
            Self::Week => "WEEK",
            Self::Month => "MONTH",
            Self::Year => "YEAR",
        }
    }

    /// The unit of that word in any letter case; no plurals, no abbreviations.
    pub fn from_word(word: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|unit| unit.name().eq_ignore_ascii_case(word))
    }
}

// === impl Window ===

impl Window {
    /// `multiplier` times `unit`.
    pub const fn new(unit: Unit, multiplier: NonZeroU32) -> Self {
        Self { unit, multiplier }
    }

    /// One `unit`.
    pub const fn of(unit: Unit) -> Self {
        Self::new(unit, NonZeroU32::MIN)
    }

    /// That many seconds, in the longest unit that divides them (so that 3,600 is one hour). `None` for zero,
    /// and for more than fits the multiplier.
    pub fn from_seconds(seconds: u64) -> Option<Self> {
        let unit = Unit::ALL
            .into_iter()
            .rev()
            .find(|unit| seconds.is_multiple_of(unit.seconds()))?;
        let multiplier = u32::try_from(seconds / unit.seconds()).ok()?;
        Some(Self::new(unit, NonZeroU32::new(multiplier)?))
    }

    /// The unit of the answer's `current_limit`.
    pub const fn unit(self) -> Unit {
        self.unit
    }

    /// How many units; the answer's `unit_multiplier`.
    pub const fn multiplier(self) -> u32 {
        self.multiplier.get()
    }

    /// Length in seconds; at most 2^32 years, so it fits with room to spare.
    pub const fn seconds(self) -> u64 {
        self.unit.seconds() * self.multiplier.get() as u64
    }

    /// Length in milliseconds; windows of over 500 million years end there.
    pub const fn millis(self) -> u64 {
        self.seconds().saturating_mul(1_000)
    }

    /// Length as a duration.
    pub const fn duration(self) -> Duration {
        Duration::from_secs(self.seconds())
    }
}

/// The one spelling used in keys: seconds, `90s`.
impl fmt::Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}s", self.seconds())
    }
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_pick_the_longest_unit_that_divides() {
        let in_words = |seconds| {
            let window = Window::from_seconds(seconds).unwrap();
            (window.multiplier(), window.unit())
        };
        assert_eq!(in_words(1), (1, Unit::Second));
        assert_eq!(in_words(90), (90, Unit::Second));
        assert_eq!(in_words(300), (5, Unit::Minute));
        assert_eq!(in_words(3_600), (1, Unit::Hour));
        assert_eq!(in_words(7 * 86_400), (1, Unit::Week));
        assert_eq!(in_words(2 * 31_536_000), (2, Unit::Year));
        assert!(Window::from_seconds(0).is_none());
        assert!(Window::from_seconds(u64::from(u32::MAX) + 2).is_none());
    }

    #[test]
    fn words_are_read_in_any_case_and_only_whole() {
        assert_eq!(Unit::from_word("mInUtE"), Some(Unit::Minute));
        assert_eq!(Unit::from_word("minutes"), None);
        assert_eq!(Unit::from_word("unknown"), None);
    }
}

//! The rules in force: an immutable set, matched against descriptors. Reading order: `file` (YAML text to a tree
//! of located nodes), `compile` (the tree to rules, with the errors), `tree` (the matcher), `reload` (watch, read,
//! swap). Rules know no store and no wire.

pub mod compile;
pub mod file;
pub mod problem;
pub mod reload;
pub mod summary;
pub(crate) mod tree;

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, OnceLock, atomic::AtomicBool},
};

use crate::{descriptor::Entry, limit::Limit, metrics::RuleCounters};

/// All domains of one load.
#[derive(Debug, Default)]
pub struct RuleSet {
    pub(crate) domains: HashMap<Box<[u8]>, Domain, foldhash::fast::RandomState>,
}

/// The rules of one domain.
#[derive(Debug)]
pub struct Domain {
    /// Its name as written.
    pub name: Box<str>,
    pub(crate) tree: tree::Tree,
}

/// One node of the configuration that carries a limit (or lifts it).
#[derive(Debug)]
pub struct Rule {
    /// Domain and levels as text, `domain.key_value.key`: what `/rlconfig`, logs and metrics call the rule.
    pub path: Box<str>,
    /// How each entry of a descriptor that meets this rule was matched, outermost first.
    pub levels: Box<[Level]>,
    /// The limits; empty when the rule is unlimited. No two have the same window length.
    pub limits: Box<[Limit]>,
    /// The limits' names, one each, possibly empty.
    pub names: Box<[Box<str>]>,
    /// Names of limits that are dropped from a request that meets this rule.
    pub replaces: Box<[Box<str>]>,
    /// Count, but never answer OVER_LIMIT.
    pub shadow: bool,
    /// OVER_LIMIT only when all quota rules of the request are over.
    pub quota: bool,
    /// Which hits are charges.
    pub charge: Charge,
    /// Returned as dynamic metadata when the rule's status is not OVER_LIMIT. `None` for an empty mapping.
    pub metadata: Option<serde_json::Map<String, serde_json::Value>>,
    /// What the rule's counters are called.
    pub stat: StatName,
    /// Whether a descriptor with hits of 0 has met this rule: under [`Charge::Auto`] later hits on it are charges.
    /// Shared with the same rule of the next load.
    pub looked_at: Arc<AtomicBool>,
}

/// How one entry is matched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Level {
    /// The entry's key.
    pub key: Box<str>,
    /// The entry's value.
    pub value: LevelValue,
}

/// How the value of an entry is matched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LevelValue {
    /// Any value.
    Any,
    /// Just this one.
    Exact(Box<str>),
    /// Every value that fits the pattern.
    Wildcard {
        /// `*` stands for any run of bytes, the empty one included.
        pattern: Box<str>,
        /// All matching values share one log, named by the pattern.
        share_threshold: bool,
    },
}

/// Which hits are costs of work already done, logged whether or not they fit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Charge {
    /// Descriptor hits of 1 or more, once the rule has been looked at.
    #[default]
    Auto,
    /// All descriptor hits of 1 or more.
    Always,
    /// None.
    Never,
}

/// The name of a rule's counters.
#[derive(Debug)]
pub enum StatName {
    /// The same for every request.
    Fixed {
        /// Domain and levels joined by dots, before the reference's sanitising.
        name: Box<str>,
        /// Registered when the rule is first met, so that unused rules have no series.
        counters: OnceLock<Arc<RuleCounters>>,
    },
    /// Holds values of the request; one part per level.
    PerRequest(Box<[StatPart]>),
}

/// One level of a name that holds values of the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StatPart {
    /// This text.
    Text(Box<str>),
    /// `key_value`, whatever the value (`detailed_metric`): an empty value leaves `key_`.
    KeyAndValue,
    /// `key_value`, and `key` alone for an empty value (`value_to_metric`).
    KeyAndValueIfAny,
}

impl RuleSet {
    /// The domain of that name.
    pub fn domain(&self, name: &[u8]) -> Option<&Domain> {
        self.domains.get(name)
    }

    /// Every domain, in no order.
    pub fn domains(&self) -> impl Iterator<Item = &Domain> {
        self.domains.values()
    }
}

impl Domain {
    /// The rule that a descriptor meets: exact pair, else the first wildcard in file order, else the key alone, at
    /// every level, without backtracking; as many levels as entries.
    pub fn rule(&self, entries: &[Entry<'_>]) -> Option<&Rule> {
        self.tree.find(entries)
    }

    /// Every rule of the domain, parents before children, siblings in file order.
    pub fn rules(&self) -> impl Iterator<Item = &Rule> {
        self.tree.rules()
    }
}

/// The level as text: `key_value`, or `key` where any value fits.
impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            LevelValue::Any => f.write_str(&self.key),
            LevelValue::Exact(value) | LevelValue::Wildcard { pattern: value, .. } => {
                write!(f, "{}_{value}", self.key)
            }
        }
    }
}

impl Rule {
    /// Whether the rule lifts limits instead of setting one.
    pub fn is_unlimited(&self) -> bool {
        self.limits.is_empty()
    }

    /// What stands for the value of entry `level` in the rule's keys: the pattern where values share one log.
    pub fn shared_value(&self, level: usize) -> Option<&str> {
        match &self.levels.get(level)?.value {
            LevelValue::Wildcard {
                pattern,
                share_threshold: true,
            } => Some(pattern),
            _ => None,
        }
    }
}

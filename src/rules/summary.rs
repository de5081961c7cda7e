//! Stand-in for the summary, so that the command line can be built.

use super::RuleSet;

/// What the rules come to.
#[derive(Debug, serde::Serialize)]
pub struct Summary {
    domains: usize,
}

impl Summary {
    /// Of these rules.
    pub fn of(rules: &RuleSet) -> Self {
        Self {
            domains: rules.domains().count(),
        }
    }
}

/// As text.
pub fn summary(rules: &RuleSet) -> String {
    format!("domains: {}\n", rules.domains().count())
}

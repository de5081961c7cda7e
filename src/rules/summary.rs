//! The rules of a set in short, for people and for programs.

use std::fmt::Write;

use serde::Serialize;

use super::{Charge, Rule, RuleSet};
use crate::limit::Limit;

/// All rules, sorted by domain.
#[derive(Debug, Serialize)]
pub struct Summary<'r> {
    /// Every domain.
    domains: Vec<DomainSummary<'r>>,
}

#[derive(Debug, Serialize)]
struct DomainSummary<'r> {
    domain: &'r str,
    rules: Vec<RuleSummary<'r>>,
}

#[derive(Debug, Serialize)]
struct RuleSummary<'r> {
    rule: &'r str,
    unlimited: bool,
    limits: Vec<LimitSummary<'r>>,
    replaces: &'r [Box<str>],
    shadow_mode: bool,
    quota_mode: bool,
    charge: &'static str,
}

#[derive(Debug, Serialize)]
struct LimitSummary<'r> {
    requests: u32,
    window_seconds: u64,
    name: &'r str,
    exact: bool,
}

// === impl Summary ===

impl<'r> Summary<'r> {
    /// Of these rules.
    pub fn of(rules: &'r RuleSet) -> Self {
        let mut domains: Vec<_> = rules
            .domains()
            .map(|domain| DomainSummary {
                domain: &domain.name,
                rules: domain.rules().map(RuleSummary::of).collect(),
            })
            .collect();
        domains.sort_by_key(|domain| domain.domain);
        Self { domains }
    }
}

impl<'r> RuleSummary<'r> {
    fn of(rule: &'r Rule) -> Self {
        let limits = rule
            .limits
            .iter()
            .zip(rule.names.iter())
            .map(|(limit, name)| LimitSummary {
                requests: limit.requests,
                window_seconds: limit.window.seconds(),
                name,
                exact: limit.exact,
            });
        Self {
            rule: &rule.path,
            unlimited: rule.is_unlimited(),
            limits: limits.collect(),
            replaces: &rule.replaces,
            shadow_mode: rule.shadow,
            quota_mode: rule.quota,
            charge: match rule.charge {
                Charge::Auto => "auto",
                Charge::Always => "always",
                Charge::Never => "never",
            },
        }
    }
}

/// A line per domain and one per rule below it.
pub fn summary(rules: &RuleSet) -> String {
    let mut domains: Vec<_> = rules.domains().collect();
    domains.sort_by_key(|domain| &domain.name);
    let mut text = String::new();
    for domain in domains {
        let rules: Vec<_> = domain.rules().collect();
        // Writing to a String does not fail.
        let _ = writeln!(
            text,
            "domain {}: {}",
            domain.name,
            count(rules.len(), "rule")
        );
        let prefix = format!("{}.", domain.name);
        let name = |rule: &Rule| {
            rule.path
                .strip_prefix(&prefix)
                .unwrap_or(&rule.path)
                .to_owned()
        };
        let width = rules
            .iter()
            .map(|rule| name(rule).chars().count())
            .max()
            .unwrap_or(0)
            .min(50);
        for rule in rules {
            let _ = writeln!(text, "  {:width$}  {}", name(rule), words(rule));
        }
    }
    if text.is_empty() {
        text.push_str("no domains\n");
    }
    text
}

fn words(rule: &Rule) -> String {
    let mut words = if rule.is_unlimited() {
        "unlimited".to_owned()
    } else {
        let limits: Vec<_> = rule.limits.iter().map(limit_words).collect();
        limits.join(" and ")
    };
    let names: Vec<&str> = rule
        .names
        .iter()
        .map(|name| &**name)
        .filter(|name| !name.is_empty())
        .collect();
    for (flag, is_set) in [
        (format!("named {}", names.join(", ")), !names.is_empty()),
        (
            format!("replaces {}", rule.replaces.join(", ")),
            !rule.replaces.is_empty(),
        ),
        ("shadow".to_owned(), rule.shadow),
        ("quota".to_owned(), rule.quota),
        (
            "every hit is a charge".to_owned(),
            rule.charge == Charge::Always,
        ),
        (
            "no hit is a charge".to_owned(),
            rule.charge == Charge::Never,
        ),
    ] {
        if is_set {
            words.push_str(", ");
            words.push_str(&flag);
        }
    }
    words
}

fn limit_words(limit: &Limit) -> String {
    let unit = limit.window.unit().name().to_ascii_lowercase();
    let window = match limit.window.multiplier() {
        1 => unit,
        several => format!("{several} {unit}s"),
    };
    let exact = if limit.exact { " (exact)" } else { "" };
    format!("{} per {window}{exact}", limit.requests)
}

fn count(number: usize, what: &str) -> String {
    if number == 1 {
        format!("1 {what}")
    } else {
        format!("{number} {what}s")
    }
}

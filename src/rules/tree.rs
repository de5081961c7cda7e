//! The matcher of one domain (stand-in).

use super::{Level, Rule};
use crate::descriptor::Entry;

/// All rules of one domain as a tree of levels.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    rules: Vec<Rule>,
}

/// Collects.
#[derive(Default)]
pub(crate) struct TreeBuilder(Vec<Rule>);

impl TreeBuilder {
    pub(crate) fn add(&mut self, _path: Box<[Level]>, rule: Option<Rule>) {
        self.0.extend(rule);
    }

    pub(crate) fn build(self) -> Tree {
        Tree { rules: self.0 }
    }
}

impl Tree {
    pub(crate) fn find(&self, _entries: &[Entry<'_>]) -> Option<&Rule> {
        None
    }

    pub(crate) fn rules(&self) -> impl Iterator<Item = &Rule> {
        self.rules.iter()
    }
}

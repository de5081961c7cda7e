//! The matcher of one domain.

use super::Rule;
use crate::descriptor::Entry;

/// All rules of one domain as a tree of levels.
#[derive(Debug, Default)]
pub(crate) struct Tree {}

impl Tree {
    pub(crate) fn find(&self, _entries: &[Entry<'_>]) -> Option<&Rule> {
        None
    }

    pub(crate) fn rules(&self) -> impl Iterator<Item = &Rule> {
        std::iter::empty()
    }
}

//! The matcher of one domain: a tree with one level per entry. A step looks the pair up, then asks the wildcards of
//! the key, then takes what the key alone says; its cost does not grow with the number of rules. Many wildcards of
//! one key are found through one automaton over a literal piece of each.
//!
//! The tree lies flat, in a few tables for the whole domain: what a step touches is what memory has to fetch, and with
//! ten thousand rules that is most of its cost.

use std::hash::BuildHasher;

use aho_corasick::{AhoCorasick, MatchKind};
use hashbrown::{HashMap, HashTable};
use memchr::memmem;
use smallvec::SmallVec;

use super::{Level, LevelValue, Rule};
use crate::descriptor::Entry;

/// All rules of one domain.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    /// Keys and values come from requests, so the seed is random.
    hasher: foldhash::fast::RandomState,
    /// Every key of the domain, numbered.
    keys: HashMap<Box<[u8]>, Key, foldhash::fast::RandomState>,
    /// By parent and key.
    branches: HashMap<(Id, Key), Branch, foldhash::fast::RandomState>,
    /// Children by branch and value; a wildcard also by the text of its pattern.
    values: HashTable<ValueEdge>,
    /// Of the branches that have any.
    wildcards: Vec<Wildcards>,
    /// Each node's place in `rules`, if it has a rule. The first node is the root.
    nodes: Vec<Option<u32>>,
    /// In the order of the configuration.
    rules: Vec<Rule>,
}

/// Takes the nodes of a configuration and arranges them.
#[derive(Default)]
pub(crate) struct TreeBuilder {
    tree: Tree,
}

/// A node, as its place in [`Tree::nodes`].
type Id = u32;
/// A key, by its number.
type Key = u32;

/// The children of a node that share a key.
#[derive(Clone, Copy, Debug)]
struct Branch {
    number: u32,
    has_values: bool,
    /// In [`Tree::wildcards`].
    wildcards: Option<u32>,
    any: Option<Id>,
}

#[derive(Debug)]
struct ValueEdge {
    branch: u32,
    child: Id,
    value: Box<[u8]>,
}

/// The wildcards of a key, in the order of the configuration: the first that matches is the one.
#[derive(Debug, Default)]
struct Wildcards {
    patterns: Vec<(Pattern, Id)>,
    /// Built where there are many.
    index: Option<Index>,
}

/// Which patterns a value can match, by what it holds.
#[derive(Debug)]
struct Index {
    literals: AhoCorasick,
    /// For each literal the patterns that need it, in order.
    needing: Vec<Box<[u32]>>,
    /// Patterns of stars only: the first of them is enough.
    always: Option<u32>,
}

/// A text in which `*` stands for any run of bytes.
#[derive(Debug)]
struct Pattern {
    prefix: Box<[u8]>,
    middle: Box<[memmem::Finder<'static>]>,
    suffix: Box<[u8]>,
}

/// Literals that were seen in a value, each looked at once however often it occurs.
#[derive(Default)]
struct Seen {
    few: SmallVec<[u32; 16]>,
    many: Vec<u64>,
}

/// Up to so many wildcards are tried one by one.
const FEW: usize = 8;

// === impl Tree ===

impl Tree {
    /// The rule at the end of the walk, if the walk uses up the entries and ends on one.
    pub(crate) fn find(&self, entries: &[Entry<'_>]) -> Option<&Rule> {
        let mut node = 0;
        for entry in entries {
            let key = *self.keys.get(entry.key)?;
            let branch = self.branches.get(&(node, key))?;
            node = self.child(branch, entry.value)?;
        }
        let rule = (*self.nodes.get(node as usize)?)?;
        self.rules.get(rule as usize)
    }

    /// Every rule, parents before children, siblings in the order of the configuration.
    pub(crate) fn rules(&self) -> impl Iterator<Item = &Rule> {
        self.rules.iter()
    }

    fn child(&self, branch: &Branch, value: &[u8]) -> Option<Id> {
        let exact = branch
            .has_values
            .then(|| self.by_value(branch.number, value))
            .flatten();
        let wildcards = || self.wildcards.get(branch.wildcards? as usize);
        exact.or_else(|| wildcards()?.find(value)).or(branch.any)
    }

    fn by_value(&self, branch: u32, value: &[u8]) -> Option<Id> {
        let hash = self.hasher.hash_one((branch, value));
        let edge = self
            .values
            .find(hash, |edge| edge.branch == branch && *edge.value == *value)?;
        Some(edge.child)
    }
}

// === impl TreeBuilder ===

impl TreeBuilder {
    /// Adds the node at the end of `path`. Parents come before their children, and no node comes twice.
    pub(crate) fn add(&mut self, path: Box<[Level]>, rule: Option<Rule>) {
        if self.tree.nodes.is_empty() {
            self.tree.nodes.push(None);
        }
        let mut at = 0;
        for level in path {
            at = self.child(at, &level);
        }
        if let Some(rule) = rule {
            self.tree.nodes[at as usize] = Some(self.tree.rules.len() as u32);
            self.tree.rules.push(rule);
        }
    }

    pub(crate) fn build(mut self) -> Tree {
        for wildcards in &mut self.tree.wildcards {
            wildcards.index();
        }
        self.tree
    }

    /// The child of that level, made if it is not there.
    fn child(&mut self, parent: Id, level: &Level) -> Id {
        let tree = &mut self.tree;
        let number = tree.keys.len() as Key;
        let key = *tree
            .keys
            .entry(level.key.as_bytes().into())
            .or_insert(number);
        let number = tree.branches.len() as u32;
        let branch = tree.branches.entry((parent, key)).or_insert(Branch {
            number,
            has_values: false,
            wildcards: None,
            any: None,
        });
        let next = tree.nodes.len() as Id;
        let value = match &level.value {
            LevelValue::Any => {
                let child = *branch.any.get_or_insert(next);
                if child == next {
                    tree.nodes.push(None);
                }
                return child;
            }
            LevelValue::Exact(value) => value,
            LevelValue::Wildcard { pattern, .. } => pattern,
        };
        let value = value.as_bytes();
        branch.has_values = true;
        let branch = *branch;
        if let Some(known) = tree.by_value(branch.number, value) {
            return known;
        }
        if matches!(level.value, LevelValue::Wildcard { .. }) {
            let place = branch.wildcards.unwrap_or_else(|| {
                let place = tree.wildcards.len() as u32;
                tree.wildcards.push(Wildcards::default());
                if let Some(branch) = tree.branches.get_mut(&(parent, key)) {
                    branch.wildcards = Some(place);
                }
                place
            });
            let patterns = &mut tree.wildcards[place as usize].patterns;
            patterns.push((Pattern::new(value), next));
        }
        let hasher = &tree.hasher;
        let hash = |branch: u32, value: &[u8]| hasher.hash_one((branch, value));
        let edge = ValueEdge {
            branch: branch.number,
            child: next,
            value: value.into(),
        };
        tree.values
            .insert_unique(hash(branch.number, value), edge, |edge| {
                hash(edge.branch, &edge.value)
            });
        tree.nodes.push(None);
        next
    }
}

// === impl Wildcards ===

impl Wildcards {
    fn find(&self, value: &[u8]) -> Option<Id> {
        let first = match &self.index {
            None => self
                .patterns
                .iter()
                .position(|(pattern, _)| pattern.matches(value)),
            Some(index) => index.first(value, &self.patterns).map(|at| at as usize),
        };
        first.map(|at| self.patterns[at].1)
    }

    fn index(&mut self) {
        if self.patterns.len() > FEW {
            self.index = Index::new(&self.patterns);
        }
    }
}

// === impl Index ===

impl Index {
    /// `None` if the automaton would be too large; the patterns are then tried one by one.
    fn new(patterns: &[(Pattern, Id)]) -> Option<Self> {
        let mut uses: HashMap<&[u8], usize, foldhash::fast::RandomState> = HashMap::default();
        for piece in patterns.iter().flat_map(|(pattern, _)| pattern.pieces()) {
            *uses.entry(piece).or_default() += 1;
        }
        let mut needing: Vec<(&[u8], Vec<u32>)> = Vec::new();
        let mut places: HashMap<&[u8], usize, foldhash::fast::RandomState> = HashMap::default();
        let mut always = None;
        for (at, (pattern, _)) in (0..).zip(patterns) {
            // The rarest piece tells most; of equals the longest.
            let rarest = pattern
                .pieces()
                .min_by_key(|piece| (uses[piece], usize::MAX - piece.len()));
            let Some(literal) = rarest else {
                always.get_or_insert(at);
                continue;
            };
            let place = *places.entry(literal).or_insert_with(|| {
                needing.push((literal, Vec::new()));
                needing.len() - 1
            });
            needing[place].1.push(at);
        }
        let literals = AhoCorasick::builder()
            .match_kind(MatchKind::Standard)
            .build(needing.iter().map(|(literal, _)| literal))
            .ok()?;
        Some(Self {
            literals,
            needing: needing
                .into_iter()
                .map(|(_, patterns)| patterns.into())
                .collect(),
            always,
        })
    }

    fn first(&self, value: &[u8], patterns: &[(Pattern, Id)]) -> Option<u32> {
        let mut best = self.always.unwrap_or(u32::MAX);
        let mut seen = Seen::default();
        for literal in self.literals.find_overlapping_iter(value) {
            let literal = literal.pattern().as_u32();
            if !seen.insert(literal, self.needing.len()) {
                continue;
            }
            let candidates = self.needing[literal as usize]
                .iter()
                .take_while(|at| **at < best);
            let matching = candidates
                .copied()
                .find(|at| patterns[*at as usize].0.matches(value));
            best = matching.unwrap_or(best);
        }
        (best < u32::MAX).then_some(best)
    }
}

// === impl Seen ===

impl Seen {
    /// Whether it was not there yet. Only a value that holds many different literals costs an allocation.
    fn insert(&mut self, literal: u32, of: usize) -> bool {
        if self.many.is_empty() {
            if self.few.contains(&literal) {
                return false;
            }
            if self.few.len() < self.few.inline_size() {
                self.few.push(literal);
                return true;
            }
            self.many = vec![0; of.div_ceil(64)];
            for literal in std::mem::take(&mut self.few) {
                self.insert(literal, of);
            }
        }
        let (word, bit) = (&mut self.many[literal as usize / 64], 1 << (literal % 64));
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }
}

// === impl Pattern ===

impl Pattern {
    fn new(text: &[u8]) -> Self {
        let mut pieces: Vec<&[u8]> = text.split(|byte| *byte == b'*').collect();
        // There is a star in it, so there are at least two pieces.
        let suffix = pieces.pop().unwrap_or_default();
        let mut pieces = pieces.into_iter();
        let prefix = pieces.next().unwrap_or_default();
        Self {
            prefix: prefix.into(),
            middle: pieces
                .filter(|piece| !piece.is_empty())
                .map(|piece| memmem::Finder::new(piece).into_owned())
                .collect(),
            suffix: suffix.into(),
        }
    }

    /// The literal pieces, the empty ones left out.
    fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        let middle = self.middle.iter().map(memmem::Finder::needle);
        std::iter::once(&*self.prefix)
            .chain(middle)
            .chain(std::iter::once(&*self.suffix))
            .filter(|piece| !piece.is_empty())
    }

    /// Leftmost places are enough: if any arrangement fits, the leftmost one does. Linear in the value.
    fn matches(&self, value: &[u8]) -> bool {
        let Some(rest) = value.strip_prefix(&*self.prefix) else {
            return false;
        };
        let Some(mut rest) = rest.strip_suffix(&*self.suffix) else {
            return false;
        };
        for piece in &self.middle {
            let Some(at) = piece.find(rest) else {
                return false;
            };
            rest = &rest[at + piece.needle().len()..];
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::rules::{
        compile::{self, Options},
        file::SourceFile,
    };

    /// What the tree must do, said plainly: the levels of each rule against the entries.
    #[derive(Debug)]
    struct Naive(Vec<(Vec<(String, String)>, bool)>);

    impl Naive {
        fn find(&self, entries: &[(String, String)]) -> Option<usize> {
            let mut path: Vec<(String, String)> = Vec::new();
            for (key, value) in entries {
                let children: Vec<_> = self
                    .0
                    .iter()
                    .filter(|(node, _)| node.len() == path.len() + 1 && node.starts_with(&path))
                    .map(|(node, _)| node.last().unwrap())
                    .filter(|(other, _)| other == key)
                    .collect();
                let chosen = children
                    .iter()
                    .find(|(_, other)| !other.is_empty() && other == value)
                    .or_else(|| {
                        children.iter().find(|(_, other)| {
                            other.contains('*') && glob(other.as_bytes(), value.as_bytes())
                        })
                    })
                    .or_else(|| children.iter().find(|(_, other)| other.is_empty()))?;
                path.push((*chosen).clone());
            }
            self.0
                .iter()
                .position(|(node, has_rule)| *has_rule && *node == path)
        }
    }

    /// By definition, and slowly.
    fn glob(pattern: &[u8], value: &[u8]) -> bool {
        match (pattern.first(), value.first()) {
            (None, None) => true,
            (Some(b'*'), _) if glob(&pattern[1..], value) => true,
            (Some(b'*'), Some(_)) => glob(pattern, &value[1..]),
            (Some(one), Some(other)) => one == other && glob(&pattern[1..], &value[1..]),
            _ => false,
        }
    }

    fn level(key: &str, value: &str) -> Level {
        let value = match value {
            "" => LevelValue::Any,
            text if text.contains('*') => LevelValue::Wildcard {
                pattern: text.into(),
                share_threshold: false,
            },
            text => LevelValue::Exact(text.into()),
        };
        Level {
            key: key.into(),
            value,
        }
    }

    fn rule(number: usize) -> Rule {
        let text =
            "domain: d\ndescriptors: [{key: k, rate_limit: {unit: day, requests_per_unit: 1}}]\n";
        let files = [SourceFile {
            name: "c.yaml".into(),
            text: text.into(),
        }];
        let rules = compile::compile(&files, Options::default(), None)
            .unwrap()
            .rules;
        let domain = rules.domains.into_values().next().unwrap();
        let mut rule = domain.tree.rules.into_iter().next().unwrap();
        rule.path = number.to_string().into();
        rule
    }

    fn tree(naive: &Naive) -> Tree {
        let mut builder = TreeBuilder::default();
        for (number, (path, has_rule)) in naive.0.iter().enumerate() {
            let path = path.iter().map(|(key, value)| level(key, value)).collect();
            builder.add(path, has_rule.then(|| rule(number)));
        }
        builder.build()
    }

    fn find(tree: &Tree, entries: &[(String, String)]) -> Option<usize> {
        let entries: Vec<_> = entries
            .iter()
            .map(|(key, value)| Entry {
                key: key.as_bytes(),
                value: value.as_bytes(),
            })
            .collect();
        tree.find(&entries).map(|rule| rule.path.parse().unwrap())
    }

    fn pair() -> impl Strategy<Value = (String, String)> {
        ("[kl]", "[ab*]{0,4}")
    }

    /// Nodes with their parents before them, no two the same.
    fn naive() -> impl Strategy<Value = Naive> {
        prop::collection::vec((prop::collection::vec(pair(), 1..3), any::<bool>()), 0..40).prop_map(
            |rules| {
                let mut nodes: Vec<(Vec<(String, String)>, bool)> = Vec::new();
                for (path, has_rule) in rules {
                    for length in 1..=path.len() {
                        let is_last = length == path.len();
                        if !nodes.iter().any(|(node, _)| node[..] == path[..length]) {
                            nodes.push((path[..length].to_vec(), has_rule && is_last));
                        }
                    }
                }
                Naive(nodes)
            },
        )
    }

    proptest! {
        #[test]
        fn the_tree_finds_what_a_plain_reading_of_the_rules_finds(
            naive in naive(),
            requests in prop::collection::vec(prop::collection::vec(("[klm]", "[ab*]{0,5}"), 0..4), 20),
        ) {
            let tree = tree(&naive);
            for entries in requests {
                prop_assert_eq!(find(&tree, &entries), naive.find(&entries), "{:?}", entries);
            }
        }

        #[test]
        fn an_index_over_many_wildcards_keeps_their_order(
            patterns in prop::collection::vec("[abc]{0,2}\\*[abc]{0,2}(\\*[abc]{0,2})?", FEW + 1..60),
            values in prop::collection::vec("[abc*]{0,8}", 30),
        ) {
            let mut paths: Vec<Vec<(String, String)>> = Vec::new();
            for pattern in patterns {
                let path = vec![("k".to_owned(), pattern)];
                if !paths.contains(&path) {
                    paths.push(path);
                }
            }
            let naive = Naive(paths.into_iter().map(|path| (path, true)).collect());
            let tree = tree(&naive);
            for value in values {
                let entries = [("k".to_owned(), value)];
                prop_assert_eq!(find(&tree, &entries), naive.find(&entries), "{:?}", entries);
            }
        }
    }

    #[test]
    fn hostile_values_are_matched_in_linear_time() {
        let paths = (0..2_000).map(|at| (vec![("k".to_owned(), format!("*a*a*a*b{at}*"))], true));
        let tree = tree(&Naive(paths.collect()));
        let value = "a".repeat(1 << 20);
        assert_eq!(find(&tree, &[("k".to_owned(), value.clone())]), None);
        assert_eq!(find(&tree, &[("k".to_owned(), value + "b1999")]), Some(1));
    }
}

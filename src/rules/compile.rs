//! The tree of a rule file to rules. All semantic checks are here, and the errors of all files come out of one go
//! (what a missing or repeated domain or an empty key hides is not looked at). Where the reference refuses the same, its words open the message; where it reads without a word what is
//! probably a mistake, a warning says so and the meaning stays the reference's.

mod limits;
mod values;

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, OnceLock},
};

use super::{
    Charge, Domain, Level, LevelValue, Rule, RuleSet, StatName, StatPart,
    file::{self, Node, SourceFile},
    problem::{Place, Problem, Problems, Severity},
    tree::TreeBuilder,
};
use values::{DESCRIPTOR, Fields, ROOT, Reader, Site, Text, join};

/// How to compile.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Several files may add to one domain.
    pub merge_domains: bool,
}

/// What comes of it.
#[derive(Debug)]
pub struct Compiled {
    /// The rules.
    pub rules: RuleSet,
    /// What is only probably wrong.
    pub warnings: Vec<Problem>,
}

/// Compiles all files of one load, in the order given. Whether a rule has been looked at is taken over from
/// `previous`.
pub fn compile(
    files: &[SourceFile],
    options: Options,
    previous: Option<&RuleSet>,
) -> Result<Compiled, Problems> {
    let mut domains = Vec::<Draft>::new();
    let mut by_name = HashMap::<String, usize>::new();
    let mut problems = Vec::new();
    for file in files {
        let mut reader = Reader {
            file,
            problems: &mut problems,
            errors: 0,
        };
        let Some(root) = reader.root() else { continue };
        let Some((name, descriptors)) = reader.file(&root) else {
            continue;
        };
        let known = by_name.get(&name.text).copied();
        if known.is_some() && !options.merge_domains {
            let message = format!("duplicate domain '{}' in config file", name.text);
            reader.error(
                &name.site,
                message,
                "give each domain one file, or set MERGE_DOMAIN_CONFIG=true",
            );
            continue;
        }
        let at = known.unwrap_or_else(|| {
            by_name.insert(name.text.clone(), domains.len());
            domains.push(Draft::new(name.text));
            domains.len() - 1
        });
        let draft = &mut domains[at];
        if let Some(descriptors) = descriptors {
            reader.descriptors(
                descriptors,
                &Parent::root(&draft.name),
                &mut draft.siblings,
                &mut draft.nodes,
            );
        }
    }
    for draft in &domains {
        draft.warn_of_mutual_replaces(files, &mut problems);
    }
    problems.sort_by_key(|problem| problem.severity);
    if problems
        .first()
        .is_some_and(|first| first.severity == Severity::Error)
    {
        return Err(Problems(problems));
    }
    let rules = RuleSet {
        domains: domains
            .into_iter()
            .map(|draft| {
                (
                    draft.name.clone().into_bytes().into(),
                    draft.build(previous),
                )
            })
            .collect(),
    };
    Ok(Compiled {
        rules,
        warnings: problems,
    })
}

/// A domain while its files are read.
struct Draft {
    name: String,
    siblings: Siblings,
    nodes: Vec<DraftNode>,
}

/// One node of the configuration, limited or not.
struct DraftNode {
    file: String,
    place: Place,
    levels: Box<[Level]>,
    rule: Option<Rule>,
}

/// What is already there at one place of the tree.
#[derive(Default)]
struct Siblings {
    pairs: HashSet<(String, String)>,
    /// Keys for which a value `*` was seen: no later wildcard of that key, and no bare key, is ever met.
    starred: HashMap<String, usize>,
}

/// The way from the root to where descriptors are read.
struct Parent<'a> {
    domain: &'a str,
    /// For messages: `descriptors[3]`.
    path: String,
    levels: Vec<Level>,
    /// Which levels name their counters by the request's value.
    value_to_metric: Vec<bool>,
}

// === impl Reader ===

impl Reader<'_> {
    /// What the file holds; `None` if that is nothing, or no YAML.
    fn root(&mut self) -> Option<Node> {
        match file::parse(self.file, self.problems) {
            Ok(Some(root)) if !root.is_null() => Some(root),
            Ok(_) => {
                self.no_domain(&Site::START);
                None
            }
            Err(problem) => {
                self.problems.push(*problem);
                None
            }
        }
    }

    /// The domain's name and its descriptors; `None` if the file names no domain.
    fn file<'n>(&mut self, root: &'n Node) -> Option<(Text, Option<&'n Node>)> {
        let fields = self.fields(root, "", ROOT)?;
        let domain = self.text(&fields, "domain");
        let descriptors = fields.known.get("descriptors").map(|(_, node)| *node);
        match domain {
            Some(domain) if !domain.text.is_empty() => Some((domain, descriptors)),
            Some(empty) => {
                self.no_domain(&empty.site);
                None
            }
            // Of a wrong type, and said so; or not there at all.
            None => {
                if !fields.known.contains_key("domain") {
                    self.no_domain(&Site::START);
                }
                None
            }
        }
    }

    fn no_domain(&mut self, site: &Site) {
        let message = "config file cannot have empty domain".to_owned();
        self.error(
            site,
            message,
            "start the file with `domain: NAME`, the name that Envoy's filter sends",
        );
    }

    fn descriptors(
        &mut self,
        list: &Node,
        parent: &Parent<'_>,
        siblings: &mut Siblings,
        nodes: &mut Vec<DraftNode>,
    ) {
        let path = parent.child("descriptors");
        for (at, item) in self.list(list, &path).into_iter().enumerate() {
            self.descriptor(item, format!("{path}[{at}]"), parent, siblings, nodes);
        }
    }

    fn descriptor(
        &mut self,
        node: &Node,
        path: String,
        parent: &Parent<'_>,
        siblings: &mut Siblings,
        nodes: &mut Vec<DraftNode>,
    ) {
        let before = self.errors;
        let Some(fields) = self.fields(node, &path, DESCRIPTOR) else {
            return;
        };
        // A descriptor with a misspelt word may look like another one.
        let is_certain = self.errors == before;
        let key = self.text(&fields, "key");
        let value = self
            .text(&fields, "value")
            .map_or_else(String::new, |value| value.text);
        let flag = |reader: &mut Self, name| reader.flag(&fields, name);
        let shadow = flag(self, "shadow_mode");
        let quota = flag(self, "quota_mode");
        let detailed = flag(self, "detailed_metric");
        let value_to_metric = flag(self, "value_to_metric");
        let share = flag(self, "share_threshold");
        let exact = flag(self, "exact");
        let charge = self.charge(&fields);
        let metadata = self.metadata(&fields);

        let Some(key) = key.filter(|key| !key.text.is_empty()) else {
            let is_misread = fields
                .known
                .get("key")
                .is_some_and(|(_, node)| !node.is_scalar());
            if !is_misread {
                let help = "name the entry that Envoy sends, such as `key: remote_address`";
                self.error(&fields.site, "descriptor has empty key".to_owned(), help);
            }
            return;
        };
        let level = self.level(&fields, &key, value, share);
        let (levels, value_to_metric) = parent.with(level, value_to_metric);
        let full = full_path(parent.domain, &levels);
        if is_certain {
            self.place_among(&fields.site, &full, levels.last(), siblings);
        }

        let limits = self.limits(&fields, exact);
        let rule = limits.map(|rate_limits| {
            let stat = stat_name(&full, &levels, &value_to_metric, detailed);
            let mut limits = Vec::new();
            let mut names = Vec::new();
            let mut replaces = Vec::new();
            for rate_limit in rate_limits {
                replaces.extend(rate_limit.replaces.into_iter().map(String::into_boxed_str));
                if let (Some(limit), false) = (rate_limit.limit, rate_limit.unlimited) {
                    limits.push(limit);
                    names.push(rate_limit.name.into_boxed_str());
                }
            }
            Rule {
                path: full.clone().into(),
                levels: levels.clone().into(),
                limits: limits.into(),
                names: names.into(),
                replaces: replaces.into(),
                shadow,
                quota,
                charge,
                metadata,
                stat,
                looked_at: Arc::default(),
            }
        });
        nodes.push(DraftNode {
            file: self.file.name.clone(),
            place: fields.site.place,
            levels: levels.clone().into(),
            rule,
        });
        if let Some((_, children)) = fields.known.get("descriptors") {
            let parent = Parent {
                domain: parent.domain,
                path,
                levels,
                value_to_metric,
            };
            self.descriptors(children, &parent, &mut Siblings::default(), nodes);
        }
    }

    fn level(
        &mut self,
        fields: &Fields<'_>,
        key: &Text,
        value: String,
        share_threshold: bool,
    ) -> Level {
        if key.text.contains('*') {
            self.warning(
                &key.site,
                "'*' in a key is a plain character".to_owned(),
                "wildcards work in values: name the key, and put the pattern into `value`",
            );
        }
        let joined = if value.is_empty() {
            key.text.clone()
        } else {
            format!("{}_{value}", key.text)
        };
        if share_threshold && !joined.contains('*') {
            let site = fields.at("share_threshold");
            let message = format!(
                "share_threshold can only be used with wildcard values (containing '*'), but found key '{joined}'"
            );
            self.error(
                &site,
                message,
                "give the rule a value such as `value: \"api/*\"`, or drop share_threshold",
            );
        } else if share_threshold && !value.contains('*') {
            let site = fields.at("share_threshold");
            let message = "share_threshold has no effect without a '*' in the value".to_owned();
            self.warning(
                &site,
                message,
                "give the rule a value with a `*`, or drop share_threshold",
            );
        }
        let value = if value.is_empty() {
            LevelValue::Any
        } else if value.contains('*') {
            LevelValue::Wildcard {
                pattern: value.into(),
                share_threshold,
            }
        } else {
            LevelValue::Exact(value.into())
        };
        Level {
            key: key.text.as_str().into(),
            value,
        }
    }

    /// Refuses what is there already; warns of what can't be met.
    fn place_among(
        &mut self,
        site: &Site,
        full: &str,
        level: Option<&Level>,
        siblings: &mut Siblings,
    ) {
        let Some(level) = level else { return };
        let (value, is_wild) = match &level.value {
            LevelValue::Any => ("", true),
            LevelValue::Exact(value) => (&**value, false),
            LevelValue::Wildcard { pattern, .. } => (&**pattern, true),
        };
        let key = level.key.to_string();
        if !siblings.pairs.insert((key.clone(), value.to_owned())) {
            let message = format!("duplicate descriptor composite key '{full}'");
            let help = "key and value are the same as of an earlier one beside it";
            return self.error(site, message, help);
        }
        if let (true, Some(line)) = (is_wild, siblings.starred.get(&key)) {
            let message = format!(
                "this is never met: the value '*' of the same key in line {line} comes first"
            );
            self.warning(
                site,
                message,
                "put it before that one; a bare key means the same as '*'",
            );
        }
        if is_wild && !value.is_empty() && value.bytes().all(|byte| byte == b'*') {
            siblings.starred.entry(key).or_insert(site.place.line);
        }
    }

    fn charge(&mut self, fields: &Fields<'_>) -> Charge {
        let Some(word) = self.text(fields, "charge") else {
            return Charge::Auto;
        };
        match word.text.as_str() {
            "auto" | "" => Charge::Auto,
            "always" => Charge::Always,
            "never" => Charge::Never,
            other => {
                let message = format!("'{other}' is no way to charge");
                self.error(&word.site, message, "one of auto, always, never");
                Charge::Auto
            }
        }
    }
}

// === impl Draft ===

impl Draft {
    fn new(name: String) -> Self {
        Self {
            name,
            siblings: Siblings::default(),
            nodes: Vec::new(),
        }
    }

    /// Two limits that replace each other are both gone whenever one request meets both.
    fn warn_of_mutual_replaces(&self, files: &[SourceFile], problems: &mut Vec<Problem>) {
        let replacing: Vec<_> = self
            .nodes
            .iter()
            .filter_map(|node| Some((node, node.rule.as_ref()?)))
            .filter(|(_, rule)| !rule.replaces.is_empty())
            .collect();
        for (at, (node, rule)) in replacing.iter().enumerate() {
            let mutual = replacing[..at].iter().find(|(_, other)| {
                let drops = |one: &Rule, other: &Rule| {
                    one.replaces
                        .iter()
                        .any(|name| !name.is_empty() && other.names.contains(name))
                };
                drops(rule, other) && drops(other, rule)
            });
            let file = files.iter().find(|file| file.name == node.file);
            if let (Some((other, _)), Some(file)) = (mutual, file) {
                let message = format!(
                    "this rule and the one in line {} of {} replace each other: a request that meets both has neither",
                    other.place.line, other.file
                );
                problems
                    .push(Problem::warning(file, node.place, message).help("drop one of the two"));
            }
        }
    }

    fn build(self, previous: Option<&RuleSet>) -> Domain {
        let known: HashMap<&str, &Rule> = previous
            .and_then(|rules| rules.domain(self.name.as_bytes()))
            .into_iter()
            .flat_map(Domain::rules)
            .map(|rule| (&*rule.path, rule))
            .collect();
        let mut tree = TreeBuilder::default();
        for mut node in self.nodes {
            if let Some(rule) = &mut node.rule
                && let Some(before) = known.get(&*rule.path)
            {
                rule.looked_at = Arc::clone(&before.looked_at);
            }
            tree.add(node.levels, node.rule);
        }
        Domain {
            name: self.name.into(),
            tree: tree.build(),
        }
    }
}

// === impl Parent ===

impl<'a> Parent<'a> {
    fn root(domain: &'a str) -> Self {
        Self {
            domain,
            path: String::new(),
            levels: Vec::new(),
            value_to_metric: Vec::new(),
        }
    }

    fn child(&self, name: &str) -> String {
        join(&self.path, name)
    }

    fn with(&self, level: Level, value_to_metric: bool) -> (Vec<Level>, Vec<bool>) {
        let (mut levels, mut flags) = (self.levels.clone(), self.value_to_metric.clone());
        levels.push(level);
        flags.push(value_to_metric);
        (levels, flags)
    }
}

// === helpers ===

/// For people to read, so a control character shows as its escape.
fn full_path(domain: &str, levels: &[Level]) -> String {
    let levels = levels.iter().map(Level::to_string);
    let path: Vec<_> = std::iter::once(domain.to_owned()).chain(levels).collect();
    let mut shown = String::new();
    for one in path.join(".").chars() {
        if one.is_control() {
            shown.extend(one.escape_default());
        } else {
            shown.push(one);
        }
    }
    shown
}

/// How the rule's counters are called, by the flags of its levels.
fn stat_name(full: &str, levels: &[Level], value_to_metric: &[bool], detailed: bool) -> StatName {
    let is_shared = |level: &Level| {
        matches!(
            level.value,
            LevelValue::Wildcard {
                share_threshold: true,
                ..
            }
        )
    };
    let any_shared = levels.iter().any(is_shared);
    let parts: Box<[StatPart]> = levels
        .iter()
        .zip(value_to_metric)
        .map(|(level, by_value)| match &level.value {
            _ if is_shared(level) => StatPart::Text(level.to_string().into()),
            _ if detailed && any_shared => StatPart::KeyAndValueIfAny,
            _ if detailed => StatPart::KeyAndValue,
            LevelValue::Any | LevelValue::Wildcard { .. } if *by_value => {
                StatPart::KeyAndValueIfAny
            }
            _ => StatPart::Text(level.to_string().into()),
        })
        .collect();
    if parts.iter().all(|part| matches!(part, StatPart::Text(_))) {
        StatName::Fixed {
            name: full.into(),
            counters: OnceLock::new(),
        }
    } else {
        StatName::PerRequest(parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str, text: &str) -> SourceFile {
        SourceFile {
            name: name.into(),
            text: text.into(),
        }
    }

    fn compiled(text: &str) -> Compiled {
        let files = [file("c.yaml", text)];
        compile(&files, Options::default(), None)
            .unwrap_or_else(|problems| panic!("{problems}\n{text}"))
    }

    fn problems(text: &str) -> Vec<Problem> {
        let files = [file("c.yaml", text)];
        compile(&files, Options::default(), None)
            .map(|_| text)
            .expect_err("no error")
            .0
    }

    /// A file with one descriptor whose `rate_limit` holds `inside`.
    fn limit(inside: &str) -> String {
        format!("domain: d\ndescriptors:\n- key: a\n  rate_limit: {{{inside}}}\n")
    }

    fn only_limits(text: &str) -> Vec<(u32, u64, bool)> {
        let compiled = compiled(text);
        let domain = compiled.rules.domains().next().unwrap();
        let rule = domain.rules().next().unwrap();
        rule.limits
            .iter()
            .map(|limit| (limit.requests, limit.window.seconds(), limit.exact))
            .collect()
    }

    /// Every refusal: the text, the reference's words (or ours), line and column, path.
    #[test]
    fn every_refusal_has_its_words_and_its_place() {
        let head = "domain: d\ndescriptors:\n";
        for (text, words, line, column, path) in [
            ("", "config file cannot have empty domain", 1, 1, ""),
            (
                "domain: ''\n",
                "config file cannot have empty domain",
                1,
                9,
                "domain",
            ),
            ("- domain: d\n", "yaml: unmarshal errors:", 1, 1, ""),
            ("domain: [d]\n", "yaml: unmarshal errors:", 1, 9, "domain"),
            (
                "domain: d\n12: x\n",
                "config error, key is not of type string: 12",
                2,
                1,
                "",
            ),
            (
                "domain: d\nyes: x\n",
                "config error, key is not of type string: true",
                2,
                1,
                "",
            ),
            (
                "domain: d\ndescriptor: []\n",
                "config error, unknown key 'descriptor'",
                2,
                1,
                "descriptor",
            ),
            (
                "domain: d\ndescriptors: {key: a}\n",
                "yaml: unmarshal errors:",
                2,
                14,
                "descriptors",
            ),
            (
                "domain: d\ndescriptors: [foo]\n",
                "list of type other than map: foo",
                2,
                15,
                "descriptors[0]",
            ),
            (
                "domain: d\ndescriptors:\n- {value: x}\n",
                "descriptor has empty key",
                3,
                3,
                "descriptors[0]",
            ),
            (
                &format!("{head}- key: a\n- key: b\n  descriptors: [{{key: c}}, {{key: c}}]\n"),
                "duplicate descriptor composite key 'd.b.c'",
                5,
                27,
                "descriptors[1].descriptors[1]",
            ),
            (
                &format!("{head}- {{key: v, value: 1.5}}\n"),
                "error checking config",
                3,
                19,
                "descriptors[0].value",
            ),
            (
                &format!("{head}- {{key: v, value: 99999999999999999999}}\n"),
                "error checking config",
                3,
                19,
                "descriptors[0].value",
            ),
            (
                &format!("{head}- {{key: v, value: w, share_threshold: true}}\n"),
                "share_threshold can only be used with wildcard values (containing '*'), but found key 'v_w'",
                3,
                39,
                "descriptors[0].share_threshold",
            ),
            (
                &format!("{head}- {{key: v, shadow_mode: 'yes'}}\n"),
                "yaml: unmarshal errors:",
                3,
                25,
                "descriptors[0].shadow_mode",
            ),
            (
                &format!("{head}- {{key: v, metadata: [1]}}\n"),
                "yaml: unmarshal errors:",
                3,
                22,
                "descriptors[0].metadata",
            ),
            (
                &format!("{head}- {{key: v, metadata: {{a: .inf}}}}\n"),
                "error parsing metadata: ",
                3,
                26,
                "descriptors[0].metadata.a",
            ),
            (
                &format!("{head}- {{key: v, charge: maybe}}\n"),
                "'maybe' is no way to charge",
                3,
                20,
                "descriptors[0].charge",
            ),
            (
                &limit("unit: fortnight, requests_per_unit: 1"),
                "invalid rate limit unit 'fortnight'",
                4,
                22,
                "descriptors[0].rate_limit.unit",
            ),
            (
                &limit("requests_per_unit: 1"),
                "invalid rate limit unit ''",
                4,
                15,
                "descriptors[0].rate_limit.unit",
            ),
            (
                &limit("unit: unknown"),
                "invalid rate limit unit 'unknown'",
                4,
                22,
                "descriptors[0].rate_limit.unit",
            ),
            (
                &limit("unlimited: true, unit: day"),
                "should not specify rate limit unit when unlimited",
                4,
                39,
                "descriptors[0].rate_limit.unit",
            ),
            (
                &limit("unit: day, requests_per_unit: -1"),
                "yaml: unmarshal errors:",
                4,
                46,
                "descriptors[0].rate_limit.requests_per_unit",
            ),
            (
                &limit("unit: day, requests_per_unit: '5'"),
                "yaml: unmarshal errors:",
                4,
                46,
                "descriptors[0].rate_limit.requests_per_unit",
            ),
            (
                &limit("unit: day, requests_per_unit: 4294967296"),
                "yaml: unmarshal errors:",
                4,
                46,
                "descriptors[0].rate_limit.requests_per_unit",
            ),
            (
                &limit("unit: day, requests_per_unti: 5"),
                "config error, unknown key 'requests_per_unti'",
                4,
                27,
                "descriptors[0].rate_limit.requests_per_unti",
            ),
            (
                &limit("unit: day, requests_per_unit: 1, name: n, replaces: [{name: n}]"),
                "replaces should not contain name of same descriptor",
                4,
                76,
                "descriptors[0].rate_limit.replaces[0].name",
            ),
            (
                &limit("unit: day, requests_per_unit: 1, replaces: [{name: }]"),
                "should not have an empty replaces entry",
                4,
                60,
                "descriptors[0].rate_limit.replaces[0]",
            ),
            (
                &limit("unit: day, requests_per_unit: 1, unit_multiplier: 0"),
                "unit_multiplier is 0",
                4,
                66,
                "descriptors[0].rate_limit.unit_multiplier",
            ),
            (
                &limit("unit: year, requests_per_unit: 1, unit_multiplier: 101"),
                "longer than 100 years",
                4,
                67,
                "descriptors[0].rate_limit.unit_multiplier",
            ),
            (
                &limit("window: 90s, requests: 4, unit: day"),
                "window and unit exclude each other",
                4,
                48,
                "descriptors[0].rate_limit.unit",
            ),
            (
                &limit("window: 90s, requests_per_unit: 4"),
                "window and requests_per_unit exclude each other",
                4,
                48,
                "descriptors[0].rate_limit.requests_per_unit",
            ),
            (
                &limit("unit: day, requests: 4"),
                "requests goes with window",
                4,
                37,
                "descriptors[0].rate_limit.requests",
            ),
            (
                &limit("unit: day, charge: never"),
                "'charge' does not belong here",
                4,
                27,
                "descriptors[0].rate_limit.charge",
            ),
            (
                &format!("{head}- {{key: a, rate_limits: []}}\n"),
                "rate_limits is empty",
                3,
                25,
                "descriptors[0].rate_limits",
            ),
            (
                &format!("{head}- {{key: a, rate_limits: [{{unlimited: true}}]}}\n"),
                "an unlimited entry among several limits",
                3,
                26,
                "descriptors[0].rate_limits[0]",
            ),
            (
                &format!(
                    "{head}- key: a\n  rate_limit: {{unit: day}}\n  rate_limits: [{{unit: hour}}]\n"
                ),
                "rate_limit and rate_limits exclude each other",
                5,
                3,
                "descriptors[0].rate_limits",
            ),
            (
                &format!(
                    "{head}- key: a\n  rate_limits:\n  - {{unit: minute, requests_per_unit: 1}}\n  - {{window: 60s, requests: 2}}\n"
                ),
                "two limits of one descriptor have the same window (see line 5)",
                6,
                5,
                "descriptors[0].rate_limits[1]",
            ),
        ] {
            let found = problems(text);
            let warnings = found
                .iter()
                .filter(|problem| problem.message.contains("that is 0"));
            assert!(
                warnings.count() == 0 || !text.contains("unti"),
                "a warning of what is misspelt: {found:?}"
            );
            let errors: Vec<_> = found
                .iter()
                .filter(|problem| problem.severity == Severity::Error)
                .collect();
            assert_eq!(errors.len(), 1, "cascade in\n{text}\n{found:#?}");
            let error = errors[0];
            assert!(
                error.reference_text().starts_with("c.yaml: ") && error.message.contains(words),
                "{error:?}"
            );
            assert_eq!(
                (error.line, error.column, error.path.as_str()),
                (line, column, path),
                "{error:?}\n{text}"
            );
            assert!(!error.help.is_empty(), "{error:?}");
        }
    }

    #[test]
    fn windows_that_are_none_are_refused_with_what_is_one() {
        for window in [
            "500ms",
            "1.5h",
            "0s",
            "90",
            "s",
            "1m1h",
            "5 m",
            "-5s",
            "1y",
            "101w1000000000000d",
            "99999999999999999999s",
        ] {
            let found = problems(&limit(&format!("window: '{window}', requests: 4")));
            assert_eq!(found.len(), 1, "{window}: {found:?}");
            assert_eq!(found[0].message, format!("'{window}' is no window"));
            assert!(found[0].help.contains("90s"), "{found:?}");
        }
    }

    #[test]
    fn the_nearest_word_is_named() {
        for (inside, near) in [
            ("unit: day, requests_per_unti: 5", "requests_per_unit"),
            ("unit: minutes, requests_per_unit: 5", "minute"),
            ("unti: day, requests_per_unit: 5", "unit"),
            ("unlimted: true", "unlimited"),
        ] {
            let found = problems(&limit(inside));
            assert!(
                found
                    .iter()
                    .any(|problem| problem.help.contains(&format!("did you mean {near}?"))),
                "{found:?}"
            );
        }
    }

    #[test]
    fn all_errors_of_all_files_come_at_once() {
        let files = [
            file("a.yaml", &limit("unit: fortnight, requests_per_unit: x")),
            file(
                "b.yaml",
                "domain: e\ndescriptors:\n- key: [1]\n- {key: b, valeu: 1}\n- {key: b, charge: 7}\n",
            ),
            file("c.yaml", "domain: 'x\n"),
            file("d.yaml", "domain: d\n"),
        ];
        let Problems(found) = compile(&files, Options::default(), None)
            .map(|_| ())
            .unwrap_err();
        let places: Vec<_> = found
            .iter()
            .map(|one| (one.file.as_str(), one.line))
            .collect();
        let expect = [
            ("a.yaml", 4),
            ("a.yaml", 4),
            ("b.yaml", 3),
            ("b.yaml", 4),
            ("b.yaml", 5),
            ("c.yaml", 2),
            ("d.yaml", 1),
        ];
        assert_eq!(places, expect, "{found:#?}");
    }

    #[test]
    fn doubtful_files_load_with_the_references_meaning_and_a_warning() {
        let head = "domain: d\ndescriptors:\n";
        for (text, words) in [
            (limit("unit: day"), "no requests_per_unit: that is 0"),
            (limit("unlimited: true, unit: bogus"), "'bogus' is no unit"),
            (
                limit("unit: day, requests_per_unit: 1, shadow_mode: true"),
                "'shadow_mode' has no effect here",
            ),
            (
                format!("domain: d\nunit: day\n{}", ""),
                "'unit' has no effect here",
            ),
            (
                format!("{head}- {{key: 'a*', share_threshold: true}}\n"),
                "'*' in a key is a plain character",
            ),
            (
                format!("{head}- {{key: a}}\n  \n---\ndomain: e\n"),
                "only the first document",
            ),
            (
                format!("{head}- {{key: a, key: b}}\n"),
                "'key' stands twice",
            ),
            (
                format!("{head}- {{key: a, value: '*'}}\n- {{key: a, value: 'b*'}}\n"),
                "this is never met",
            ),
            (
                format!("{head}- {{key: a, value: '*'}}\n- {{key: a}}\n"),
                "this is never met",
            ),
            (
                format!(
                    "{head}- {{key: a, rate_limit: {{unit: day, requests_per_unit: 1, name: n, replaces: [{{name: m}}]}}}}\n- {{key: b, rate_limit: {{unit: day, requests_per_unit: 1, name: m, replaces: [{{name: n}}]}}}}\n"
                ),
                "replace each other",
            ),
        ] {
            let warnings = compiled(&text).warnings;
            assert!(
                warnings
                    .iter()
                    .any(|warning| warning.message.contains(words)),
                "{warnings:?}\n{text}"
            );
        }
    }

    #[test]
    fn ignored_parts_are_still_checked_for_words() {
        let found =
            problems("domain: d\nrate_limit: {unit: day, untis: 1, replaces: [x], value: 1.5}\n");
        let messages: Vec<_> = found
            .iter()
            .map(|problem| problem.message.as_str())
            .collect();
        assert_eq!(
            messages,
            [
                "config error, unknown key 'untis'",
                "config error, yaml file contains list of type other than map: x",
                "error checking config",
                "'rate_limit' has no effect here",
            ]
        );
    }

    #[test]
    fn limits_are_read_in_every_form() {
        assert_eq!(
            only_limits(&limit("unit: WEEK, requests_per_unit: 0x10")),
            [(16, 604_800, false)]
        );
        assert_eq!(
            only_limits(&limit(
                "unit: minute, unit_multiplier: 5, requests_per_unit: 1_000"
            )),
            [(1_000, 300, false)]
        );
        assert_eq!(
            only_limits(&limit("window: 1h30m, requests: 40, exact: yes")),
            [(40, 5_400, true)]
        );
        assert_eq!(
            only_limits(&limit("unlimited: on, requests_per_unit: 5")),
            []
        );
        let list = "domain: d\ndescriptors:\n- key: a\n  exact: true\n  rate_limits:\n  - {unit: second, requests_per_unit: 10}\n  - {window: 1h, requests: 1000}\n";
        assert_eq!(only_limits(list), [(10, 1, true), (1_000, 3_600, true)]);
    }

    #[test]
    fn counters_are_named_by_the_flags() {
        let text = "domain: d
descriptors:
- {key: a, detailed_metric: true, rate_limit: &l {unit: day, requests_per_unit: 1}}
- {key: b, value_to_metric: true, rate_limit: *l}
- {key: c, value: x, value_to_metric: true, rate_limit: *l}
- key: e
  value: 'y*'
  share_threshold: true
  descriptors: [{key: f, detailed_metric: true, rate_limit: *l}]
";
        let compiled = compiled(text);
        let domain = compiled.rules.domains().next().unwrap();
        let names: Vec<_> = domain
            .rules()
            .map(|rule| match &rule.stat {
                StatName::Fixed { name, .. } => name.to_string(),
                StatName::PerRequest(parts) => format!("{parts:?}"),
            })
            .collect();
        assert_eq!(
            names,
            [
                "[KeyAndValue]",
                "[KeyAndValueIfAny]",
                "d.c_x",
                "[Text(\"e_y*\"), KeyAndValueIfAny]"
            ]
        );
        let paths: Vec<_> = domain.rules().map(|rule| &*rule.path).collect();
        assert_eq!(paths, ["d.a", "d.b", "d.c_x", "d.e_y*.f"]);
    }

    #[test]
    fn a_path_is_one_line_whatever_the_value_holds() {
        let text = "domain: d\ndescriptors:\n- {key: k, value: \"a\\nü\", rate_limit: {unit: day, requests_per_unit: 1}}\n";
        let compiled = compiled(text);
        let rule = compiled
            .rules
            .domains()
            .next()
            .unwrap()
            .rules()
            .next()
            .unwrap();
        assert_eq!(&*rule.path, "d.k_a\\nü");
        assert_eq!(rule.levels[0].value, LevelValue::Exact("a\nü".into()));
    }

    #[test]
    fn metadata_keys_are_texts_and_numbers_are_doubles() {
        let text = "domain: d\ndescriptors:\n- {key: a, rate_limit: {unit: day}, metadata: {y: 1, 7: [~, no, 0.5], deep: {k: v}}}\n- {key: b, rate_limit: {unit: day}, metadata: {}}\n";
        let compiled = compiled(text);
        let domain = compiled.rules.domains().next().unwrap();
        let metadata: Vec<_> = domain
            .rules()
            .map(|rule| rule.metadata.clone().map(serde_json::Value::Object))
            .collect();
        let expect = serde_json::json!({"true": 1.0, "7": [null, false, 0.5], "deep": {"k": "v"}});
        assert_eq!(metadata, [Some(expect), None]);
    }

    #[test]
    fn domains_merge_when_asked() {
        let files = [
            file(
                "a.yaml",
                "domain: d\ndescriptors: [{key: a, rate_limit: {unit: day}}]\n",
            ),
            file(
                "b.yaml",
                "domain: d\ndescriptors: [{key: b, rate_limit: {unit: day}}]\n",
            ),
        ];
        let merged = compile(
            &files,
            Options {
                merge_domains: true,
            },
            None,
        )
        .unwrap();
        let paths: Vec<_> = merged
            .rules
            .domain(b"d")
            .unwrap()
            .rules()
            .map(|rule| rule.path.to_string())
            .collect();
        assert_eq!(paths, ["d.a", "d.b"]);
        let Problems(found) = compile(&files, Options::default(), None)
            .map(|_| ())
            .unwrap_err();
        assert_eq!(
            found[0].reference_text(),
            "b.yaml: duplicate domain 'd' in config file"
        );
        let same = [files[0].clone(), files[0].clone()];
        let Problems(found) = compile(
            &same,
            Options {
                merge_domains: true,
            },
            None,
        )
        .map(|_| ())
        .unwrap_err();
        assert!(
            found[0]
                .message
                .contains("duplicate descriptor composite key 'd.a'")
        );
    }

    #[test]
    fn a_reload_remembers_which_rules_were_looked_at() {
        let files = [file("c.yaml", &limit("unit: day"))];
        let first = compile(&files, Options::default(), None).unwrap();
        let looked_at = |rules: &RuleSet| {
            Arc::clone(
                &rules
                    .domains()
                    .next()
                    .unwrap()
                    .rules()
                    .next()
                    .unwrap()
                    .looked_at,
            )
        };
        looked_at(&first.rules).store(true, std::sync::atomic::Ordering::Relaxed);
        let second = compile(&files, Options::default(), Some(&first.rules)).unwrap();
        assert!(looked_at(&second.rules).load(std::sync::atomic::Ordering::Relaxed));
    }
}

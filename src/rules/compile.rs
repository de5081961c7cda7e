//! The tree of a rule file to rules. All semantic checks are here, and every error of every file comes out of one
//! go. Where the reference refuses the same, its words open the message; where it reads without a word what is
//! probably a mistake, a warning says so and the meaning stays the reference's.

use std::{
    collections::{HashMap, hash_map::Entry},
    num::NonZeroU32,
    sync::{Arc, OnceLock},
};

use super::{
    Charge, Domain, Level, LevelValue, Rule, RuleSet, StatName, StatPart,
    file::{self, Kind, Node, Scalar, SourceFile, Value},
    problem::{Place, Problem, Problems, Severity},
    tree::TreeBuilder,
};
use crate::limit::{Limit, Unit, Window};

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
        let mut reader = Reader { file, problems: &mut problems };
        let Some((name, descriptors)) = reader.file() else { continue };
        let known = by_name.get(&name.text).copied();
        if known.is_some() && !options.merge_domains {
            let message = format!("duplicate domain '{}' in config file", name.text);
            reader.error(&name.site, message, "give each domain one file, or set MERGE_DOMAIN_CONFIG=true");
            continue;
        }
        let at = known.unwrap_or_else(|| {
            by_name.insert(name.text.clone(), domains.len());
            domains.push(Draft::new(name.text));
            domains.len() - 1
        });
        let draft = &mut domains[at];
        if let Some(descriptors) = descriptors {
            reader.descriptors(descriptors, &Parent::root(&draft.name), &mut draft.siblings, &mut draft.nodes);
        }
    }
    for draft in &domains {
        draft.warn_of_mutual_replaces(files, &mut problems);
    }
    problems.sort_by_key(|problem| problem.severity);
    if problems.first().is_some_and(|first| first.severity == Severity::Error) {
        return Err(Problems(problems));
    }
    let rules = RuleSet {
        domains: domains
            .into_iter()
            .map(|draft| (draft.name.clone().into_bytes().into(), draft.build(previous)))
            .collect(),
    };
    Ok(Compiled { rules, warnings: problems })
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
    pairs: HashMap<(String, String), ()>,
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

/// Where something stands.
#[derive(Clone)]
struct Site {
    place: Place,
    path: String,
}

/// A text with its place.
struct Text {
    text: String,
    site: Site,
}

/// The entries of one mapping that are known there, by name.
struct Fields<'n> {
    site: Site,
    known: HashMap<&'static str, (&'n Node, &'n Node)>,
}

/// What a `rate_limit` says.
struct RateLimit {
    limit: Option<Limit>,
    unlimited: bool,
    name: String,
    replaces: Vec<String>,
    site: Site,
}

struct Reader<'a> {
    file: &'a SourceFile,
    problems: &'a mut Vec<Problem>,
}

const ROOT: &[&str] = &["domain", "descriptors"];
const DESCRIPTOR: &[&str] = &[
    "key",
    "value",
    "rate_limit",
    "rate_limits",
    "descriptors",
    "shadow_mode",
    "quota_mode",
    "detailed_metric",
    "value_to_metric",
    "share_threshold",
    "metadata",
    "charge",
    "exact",
];
const RATE_LIMIT: &[&str] = &[
    "unit",
    "requests_per_unit",
    "unit_multiplier",
    "window",
    "requests",
    "exact",
    "unlimited",
    "name",
    "replaces",
];
const REPLACE: &[&str] = &["name"];

/// The reference checks words wherever they stand, so a word of this list in a wrong place is no error.
const REFERENCE_WORDS: &[&str] = &[
    "domain",
    "key",
    "value",
    "descriptors",
    "rate_limit",
    "unit",
    "requests_per_unit",
    "unlimited",
    "shadow_mode",
    "quota_mode",
    "name",
    "replaces",
    "detailed_metric",
    "value_to_metric",
    "share_threshold",
    "metadata",
];

const BAD_TYPE: &str = "error loading config file: yaml: unmarshal errors:";
const UNITS: &str = "one of second, minute, hour, day, week, month, year";
const WINDOWS: &str = "a window is a whole number of seconds, minutes, hours, days or weeks, such as 90s, 5m, 1h30m or 7d";
/// Longest window that can be written: 100 years.
const MAX_WINDOW: u64 = 100 * Unit::Year.seconds();

// === impl Reader: a file ===

impl<'a> Reader<'a> {
    /// The domain's name and its descriptors; `None` if the file has none of it.
    fn file(&mut self) -> Option<(Text, Option<Node>)> {
        let root = match file::parse(self.file, self.problems) {
            Ok(root) => root,
            Err(problem) => {
                self.problems.push(problem);
                return None;
            }
        };
        let start = Site { place: Place::START, path: String::new() };
        let is_empty = root.as_ref().is_none_or(|root| root.is_null());
        let Some(root) = root.filter(|_| !is_empty) else {
            self.no_domain(&start);
            return None;
        };
        let fields = self.fields(&root, "", ROOT)?;
        let domain = self.text(&fields, "domain");
        let descriptors = fields.known.get("descriptors").map(|(_, node)| (*node).clone());
        match domain {
            Some(domain) if !domain.text.is_empty() => Some((domain, descriptors)),
            Some(empty) => {
                self.no_domain(&empty.site);
                None
            }
            // Of a wrong type, and said so; or not there at all.
            None => {
                if !fields.known.contains_key("domain") {
                    self.no_domain(&start);
                }
                None
            }
        }
    }

    fn no_domain(&mut self, site: &Site) {
        let message = "config file cannot have empty domain".to_owned();
        self.error(site, message, "start the file with `domain: NAME`, the name that Envoy's filter sends");
    }

    // === descriptors ===

    fn descriptors(
        &mut self,
        list: Node,
        parent: &Parent<'_>,
        siblings: &mut Siblings,
        nodes: &mut Vec<DraftNode>,
    ) {
        let path = parent.child("descriptors");
        for (at, item) in self.list(&list, &path).into_iter().enumerate() {
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
        let Some(fields) = self.fields(node, &path, DESCRIPTOR) else { return };
        let key = self.text(&fields, "key");
        let value = self.text(&fields, "value").map_or_else(String::new, |value| value.text);
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
            let is_misread = fields.known.get("key").is_some_and(|(_, node)| !node.is_scalar());
            if !is_misread {
                let help = "name the entry that Envoy sends, such as `key: remote_address`";
                self.error(&fields.site, "descriptor has empty key".to_owned(), help);
            }
            return;
        };
        let level = self.level(&fields, &key, value, share);
        let (levels, value_to_metric) = parent.with(level, value_to_metric);
        let full = full_path(parent.domain, &levels);
        self.place_among(&fields.site, &full, levels.last(), siblings);

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
            let parent = Parent { domain: parent.domain, path, levels, value_to_metric };
            self.descriptors((*children).clone(), &parent, &mut Siblings::default(), nodes);
        }
    }

    fn level(&mut self, fields: &Fields<'_>, key: &Text, value: String, share_threshold: bool) -> Level {
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
            self.error(&site, message, "give the rule a value such as `value: \"api/*\"`, or drop share_threshold");
        } else if share_threshold && !value.contains('*') {
            let site = fields.at("share_threshold");
            let message = "share_threshold has no effect without a '*' in the value".to_owned();
            self.warning(&site, message, "give the rule a value with a `*`, or drop share_threshold");
        }
        let value = if value.is_empty() {
            LevelValue::Any
        } else if value.contains('*') {
            LevelValue::Wildcard { pattern: value.into(), share_threshold }
        } else {
            LevelValue::Exact(value.into())
        };
        Level { key: key.text.as_str().into(), value }
    }

    /// Refuses what is there already; warns of what can't be met.
    fn place_among(&mut self, site: &Site, full: &str, level: Option<&Level>, siblings: &mut Siblings) {
        let Some(level) = level else { return };
        let (value, is_wild) = match &level.value {
            LevelValue::Any => ("", true),
            LevelValue::Exact(value) => (&**value, false),
            LevelValue::Wildcard { pattern, .. } => (&**pattern, true),
        };
        let key = level.key.to_string();
        match siblings.pairs.entry((key.clone(), value.to_owned())) {
            Entry::Occupied(_) => {
                let message = format!("duplicate descriptor composite key '{full}'");
                return self.error(site, message, "key and value are the same as of an earlier one beside it");
            }
            Entry::Vacant(free) => {
                free.insert(());
            }
        }
        if let (true, Some(line)) = (is_wild, siblings.starred.get(&key)) {
            let message = format!("this is never met: the value '*' of the same key in line {line} comes first");
            self.warning(site, message, "put it before that one; a bare key means the same as '*'");
        }
        if is_wild && !value.is_empty() && value.bytes().all(|byte| byte == b'*') {
            siblings.starred.entry(key).or_insert(site.place.line);
        }
    }

    fn charge(&mut self, fields: &Fields<'_>) -> Charge {
        let Some(word) = self.text(fields, "charge") else { return Charge::Auto };
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

    // === limits ===

    /// The limits of a descriptor; `None` if it has none, or none that can be used.
    fn limits(&mut self, fields: &Fields<'_>, exact: bool) -> Option<Vec<RateLimit>> {
        let of = |name| fields.known.get(name).map(|(_, node)| *node).filter(|node| !node.is_null());
        match (of("rate_limit"), of("rate_limits")) {
            (None, None) => None,
            (Some(one), None) => {
                let path = fields.site.child("rate_limit");
                Some(vec![self.rate_limit(one, path, exact)?])
            }
            (None, Some(several)) => self.rate_limits(several, &fields.site.child("rate_limits"), exact),
            (Some(_), Some(_)) => {
                let message = "rate_limit and rate_limits exclude each other".to_owned();
                let help = "put all limits of the descriptor into the list rate_limits";
                self.error(&fields.at("rate_limits"), message, help);
                None
            }
        }
    }

    fn rate_limits(&mut self, node: &Node, path: &str, exact: bool) -> Option<Vec<RateLimit>> {
        let items = self.list(node, path);
        if items.is_empty() {
            if matches!(&node.value, Value::List(items) if items.is_empty()) {
                let site = Site { place: node.place, path: path.to_owned() };
                self.error(&site, "rate_limits is empty".to_owned(), "name at least one limit, or drop it");
            }
            return None;
        }
        let mut limits: Vec<RateLimit> = Vec::new();
        let count = items.len();
        for (at, item) in items.into_iter().enumerate() {
            let Some(limit) = self.rate_limit(item, format!("{path}[{at}]"), exact) else { continue };
            if limit.unlimited {
                let message = "an unlimited entry among several limits lifts none of them".to_owned();
                self.error(&limit.site, message, "use `rate_limit: {unlimited: true}` alone, or drop this entry");
                continue;
            }
            let seconds = |limit: &RateLimit| limit.limit.map(|limit| limit.window.seconds());
            if let Some(same) = limits.iter().find(|other| seconds(other) == seconds(&limit)) {
                let line = same.site.place.line;
                let message = format!("two limits of one descriptor have the same window (see line {line})");
                self.error(&limit.site, message, "keep the lower one: both would count the same hits");
                continue;
            }
            limits.push(limit);
        }
        (limits.len() == count).then_some(limits)
    }

    fn rate_limit(&mut self, node: &Node, path: String, exact: bool) -> Option<RateLimit> {
        let fields = self.fields(node, &path, RATE_LIMIT)?;
        let before = self.errors();
        let unlimited = self.flag(&fields, "unlimited");
        let name = self.text(&fields, "name").map_or_else(String::new, |name| name.text);
        let exact = self.flag(&fields, "exact") || exact;
        let replaces = self.replaces(&fields, &name);
        let window = self.window(&fields, unlimited);
        let requests = self.requests(&fields, unlimited);
        if self.errors() > before {
            return None;
        }
        Some(RateLimit {
            limit: window.map(|window| Limit { requests, window, exact }),
            unlimited,
            name,
            replaces,
            site: fields.site,
        })
    }

    fn window(&mut self, fields: &Fields<'_>, unlimited: bool) -> Option<Window> {
        let written = self.text(fields, "window").filter(|_| fields.has("window"));
        let multiplier = self.multiplier(fields);
        let unit = self.text(fields, "unit");
        let word = unit.as_ref().map_or("", |unit| unit.text.as_str());
        let parsed = Unit::from_word(word);
        if unlimited {
            let site = fields.at(if written.is_some() { "window" } else { "unit" });
            if parsed.is_some() || written.is_some() {
                let message = "should not specify rate limit unit when unlimited".to_owned();
                self.error(&site, message, "drop either unlimited or the limit");
            } else if !word.is_empty() {
                let message = format!("'{word}' is no unit, and an unlimited rule needs none");
                self.warning(&site, message, "drop it");
            }
            return None;
        }
        if let Some(written) = written {
            for other in ["unit", "unit_multiplier", "requests_per_unit"] {
                if fields.has(other) {
                    let message = format!("window and {other} exclude each other");
                    let help = "write either window and requests, or unit and requests_per_unit";
                    self.error(&fields.at(other), message, help);
                }
            }
            return self.written_window(&written);
        }
        let Some(parsed) = parsed else {
            let help = if fields.has("requests") {
                "`requests` goes with `window`, such as 90s; or write unit and requests_per_unit".to_owned()
            } else {
                match nearest(word, &Unit::ALL.map(Unit::name).map(str::to_ascii_lowercase)) {
                    Some(near) => format!("did you mean {near}? {UNITS}"),
                    None => format!("{UNITS}, or `window: 90s` with `requests`"),
                }
            };
            self.error(&fields.at("unit"), format!("invalid rate limit unit '{word}'"), &help);
            return None;
        };
        let window = Window::new(parsed, multiplier?);
        if window.seconds() > MAX_WINDOW {
            let message = "the window is longer than 100 years".to_owned();
            self.error(&fields.at("unit_multiplier"), message, "choose a smaller unit_multiplier");
            return None;
        }
        Some(window)
    }

    fn multiplier(&mut self, fields: &Fields<'_>) -> Option<NonZeroU32> {
        if !fields.has("unit_multiplier") {
            return Some(NonZeroU32::MIN);
        }
        let multiplier = NonZeroU32::new(self.number(fields, "unit_multiplier")?);
        if multiplier.is_none() {
            let message = "unit_multiplier is 0".to_owned();
            self.error(&fields.at("unit_multiplier"), message, "the period is this many units: 1 or more");
        }
        multiplier
    }

    fn written_window(&mut self, written: &Text) -> Option<Window> {
        let window = parse_window(&written.text)
            .filter(|seconds| (1..=MAX_WINDOW).contains(seconds))
            .and_then(Window::from_seconds);
        if window.is_none() {
            let message = format!("'{}' is no window", written.text);
            self.error(&written.site, message, &format!("{WINDOWS}; from 1s to 100 years"));
        }
        window
    }

    fn requests(&mut self, fields: &Fields<'_>, unlimited: bool) -> u32 {
        let name = if fields.has("window") { "requests" } else { "requests_per_unit" };
        let other = if fields.has("window") { "requests_per_unit" } else { "requests" };
        if name == "requests_per_unit" && fields.has(other) && fields.has("unit") {
            let message = "requests goes with window, and requests_per_unit with unit".to_owned();
            self.error(&fields.at(other), message, "rename it to requests_per_unit");
        }
        if !fields.has(name) {
            if !unlimited && !fields.has(other) {
                let message = format!("no {name}: that is 0, and every request is over the limit");
                self.warning(&fields.site, message, &format!("write `{name}: 0` if that is what you want"));
            }
            return 0;
        }
        self.number(fields, name).unwrap_or(0)
    }

    fn replaces(&mut self, fields: &Fields<'_>, own: &str) -> Vec<String> {
        let Some((_, node)) = fields.known.get("replaces") else { return Vec::new() };
        let path = fields.site.child("replaces");
        let mut names = Vec::new();
        for (at, item) in self.list(node, &path).into_iter().enumerate() {
            let Some(item) = self.fields(item, &format!("{path}[{at}]"), REPLACE) else { continue };
            let before = self.errors();
            let name = self.text(&item, "name").map_or_else(String::new, |name| name.text);
            if self.errors() > before {
                continue;
            }
            if name.is_empty() {
                let message = "should not have an empty replaces entry".to_owned();
                self.error(&item.site, message, "name a limit: `replaces: [{name: other}]`");
            } else if name == own {
                let message = "replaces should not contain name of same descriptor".to_owned();
                self.error(&item.at("name"), message, "a limit can't replace itself");
            }
            names.push(name);
        }
        names
    }

    // === metadata ===

    fn metadata(&mut self, fields: &Fields<'_>) -> Option<serde_json::Map<String, serde_json::Value>> {
        let (_, node) = fields.known.get("metadata")?;
        let path = fields.site.child("metadata");
        match &node.value {
            Value::Map(_) => match self.json(node, &path) {
                serde_json::Value::Object(map) => Some(map).filter(|map| !map.is_empty()),
                _ => None,
            },
            _ if node.is_null() => None,
            _ => {
                self.bad_type(node, path, "a mapping");
                None
            }
        }
    }

    fn json(&mut self, node: &Node, path: &str) -> serde_json::Value {
        match &node.value {
            Value::Scalar(scalar) => match scalar.kind {
                Kind::Null => serde_json::Value::Null,
                Kind::Bool(truth) => truth.into(),
                // A protobuf number is a double.
                Kind::Int(number) => (number as f64).into(),
                Kind::BigInt => scalar.text.replace('_', "").parse::<f64>().unwrap_or(f64::MAX).into(),
                Kind::Float(number) if number.is_finite() => number.into(),
                Kind::Float(_) => {
                    let site = Site { place: node.place, path: path.to_owned() };
                    let message = format!("error parsing metadata: {} has no JSON form", scalar.text);
                    self.error(&site, message, "quote it, or write a finite number");
                    serde_json::Value::Null
                }
                Kind::Text => scalar.text.clone().into(),
            },
            Value::List(items) => {
                let items = items.iter().enumerate();
                items.map(|(at, item)| self.json(item, &format!("{path}[{at}]"))).collect()
            }
            Value::Map(entries) => {
                let mut map = serde_json::Map::new();
                for (key, value) in entries {
                    let Some(key) = key_text(key) else {
                        let site = Site { place: key.place, path: path.to_owned() };
                        let message = "error parsing metadata: a key is a list or a mapping".to_owned();
                        self.error(&site, message, "keys are texts");
                        continue;
                    };
                    let value = self.json(value, &format!("{path}.{key}"));
                    map.insert(key, value);
                }
                map.into()
            }
        }
    }

    // === values by type ===

    /// The known entries of a mapping. Every other one is judged on the spot.
    fn fields<'n>(&mut self, node: &'n Node, path: &str, words: &'static [&'static str]) -> Option<Fields<'n>> {
        let site = Site { place: node.place, path: path.to_owned() };
        let Value::Map(entries) = &node.value else {
            self.bad_type(node, path.to_owned(), "a mapping");
            return None;
        };
        let mut known = HashMap::new();
        for (key, value) in entries {
            let Some(name) = self.key(key, path) else { continue };
            match words.iter().find(|word| **word == name) {
                Some(word) => {
                    known.insert(*word, (key, value));
                }
                None => self.unexpected(&name, key, value, path, words),
            }
        }
        Some(Fields { site, known })
    }

    fn key(&mut self, key: &Node, path: &str) -> Option<String> {
        match &key.value {
            Value::Scalar(Scalar { text, kind: Kind::Text }) => Some(text.clone()),
            _ => {
                let site = Site { place: key.place, path: path.to_owned() };
                let shown = key_text(key).unwrap_or_else(|| "a list or mapping".to_owned());
                let message = format!("config error, key is not of type string: {shown}");
                self.error(&site, message, "quote it, if it is meant");
                None
            }
        }
    }

    /// A word that has no meaning here.
    fn unexpected(&mut self, name: &str, key: &Node, value: &Node, path: &str, words: &[&str]) {
        let site = Site { place: key.place, path: join(path, name) };
        if REFERENCE_WORDS.contains(&name) {
            let message = format!("'{name}' has no effect here");
            self.warning(&site, message, &right_place(name));
            self.vocabulary(value, &site.path, name == "metadata");
        } else if let ours @ [_, ..] = homes(name).as_slice() {
            let message = format!("config error, '{name}' does not belong here");
            self.error(&site, message, &format!("it goes into {}", ours.join(" or ")));
        } else {
            let help = match nearest(name, words) {
                Some(near) => format!("did you mean {near}?"),
                None => format!("known here: {}", words.join(", ")),
            };
            self.error(&site, format!("config error, unknown key '{name}'"), &help);
        }
    }

    /// What is ignored is checked for words all the same, as in the reference.
    fn vocabulary(&mut self, node: &Node, path: &str, is_metadata: bool) {
        if is_metadata {
            return;
        }
        match &node.value {
            Value::Scalar(_) => {
                self.sound(node, path);
            }
            Value::List(items) => {
                for (at, item) in items.iter().enumerate() {
                    let path = format!("{path}[{at}]");
                    if matches!(item.value, Value::Map(_)) {
                        self.vocabulary(item, &path, false);
                    } else {
                        self.not_a_map(item, path);
                    }
                }
            }
            Value::Map(entries) => {
                for (key, value) in entries {
                    let Some(name) = self.key(key, path) else { continue };
                    if REFERENCE_WORDS.contains(&name.as_str()) {
                        self.vocabulary(value, &join(path, &name), name == "metadata");
                    } else {
                        self.unexpected(&name, key, value, path, REFERENCE_WORDS);
                    }
                }
            }
        }
    }

    /// The items of a list that are mappings.
    fn list<'n>(&mut self, node: &'n Node, path: &str) -> Vec<&'n Node> {
        match &node.value {
            Value::List(items) => items
                .iter()
                .enumerate()
                .filter(|(at, item)| {
                    let is_map = matches!(item.value, Value::Map(_));
                    if !is_map {
                        self.not_a_map(item, format!("{path}[{at}]"));
                    }
                    is_map
                })
                .map(|(_, item)| item)
                .collect(),
            _ if node.is_null() => Vec::new(),
            _ => {
                self.bad_type(node, path.to_owned(), "a list");
                Vec::new()
            }
        }
    }

    fn not_a_map(&mut self, item: &Node, path: String) {
        let shown = key_text(item).unwrap_or_else(|| "a list".to_owned());
        let message = format!("config error, yaml file contains list of type other than map: {shown}");
        self.error(&Site { place: item.place, path }, message, "items look like `- key: ...`");
    }

    /// The source text of a scalar; `None` if the entry is not there, or not usable.
    fn text(&mut self, fields: &Fields<'_>, name: &'static str) -> Option<Text> {
        let (_, node) = fields.known.get(name)?;
        let site = fields.at(name);
        match &node.value {
            Value::Scalar(scalar) if self.sound(node, &site.path) => Some(Text {
                text: if scalar.kind == Kind::Null { String::new() } else { scalar.text.clone() },
                site: Site { place: node.place, ..site },
            }),
            Value::Scalar(_) => None,
            _ => {
                self.bad_type(node, site.path, "a text");
                None
            }
        }
    }

    fn flag(&mut self, fields: &Fields<'_>, name: &'static str) -> bool {
        let Some((_, node)) = fields.known.get(name) else { return false };
        match &node.value {
            Value::Scalar(Scalar { kind: Kind::Bool(truth), .. }) => *truth,
            _ if node.is_null() => false,
            _ => {
                self.bad_type(node, fields.site.child(name), "true or false, without quotes");
                false
            }
        }
    }

    fn number(&mut self, fields: &Fields<'_>, name: &'static str) -> Option<u32> {
        let (_, node) = fields.known.get(name)?;
        let path = fields.site.child(name);
        if !self.sound(node, &path) {
            return None;
        }
        match &node.value {
            Value::Scalar(Scalar { kind: Kind::Int(number), .. }) if u32::try_from(*number).is_ok() => {
                u32::try_from(*number).ok()
            }
            _ if node.is_null() => Some(0),
            _ => {
                self.bad_type(node, path, "a whole number from 0 to 4294967295, without quotes");
                None
            }
        }
    }

    /// Whether a scalar is one that the reference reads at all.
    fn sound(&mut self, node: &Node, path: &str) -> bool {
        match &node.value {
            Value::Scalar(Scalar { text, kind: Kind::Float(_) | Kind::BigInt }) => {
                let site = Site { place: node.place, path: path.to_owned() };
                let help = format!("numbers here are whole and have 64 bits; quote it if it is a text: \"{text}\"");
                self.error(&site, "error checking config".to_owned(), &help);
                false
            }
            _ => true,
        }
    }

    fn bad_type(&mut self, node: &Node, path: String, expected: &str) {
        let found = match &node.value {
            Value::Scalar(scalar) => format!("`{}`", scalar.text),
            Value::List(_) => "a list".to_owned(),
            Value::Map(_) => "a mapping".to_owned(),
        };
        let message = format!("{BAD_TYPE} line {}: found {found}", node.place.line);
        self.error(&Site { place: node.place, path }, message, &format!("expected {expected}"));
    }

    // === problems ===

    fn error(&mut self, site: &Site, message: String, help: &str) {
        let problem = Problem::error(self.file, site.place, message);
        self.problems.push(problem.path(&site.path).help(help));
    }

    fn warning(&mut self, site: &Site, message: String, help: &str) {
        let problem = Problem::warning(self.file, site.place, message);
        self.problems.push(problem.path(&site.path).help(help));
    }

    fn errors(&self) -> usize {
        self.problems.iter().filter(|problem| problem.severity == Severity::Error).count()
    }
}

// === impl Draft ===

impl Draft {
    fn new(name: String) -> Self {
        Self { name, siblings: Siblings::default(), nodes: Vec::new() }
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
                    one.replaces.iter().any(|name| !name.is_empty() && other.names.contains(name))
                };
                drops(rule, other) && drops(other, rule)
            });
            let file = files.iter().find(|file| file.name == node.file);
            if let (Some((other, _)), Some(file)) = (mutual, file) {
                let message = format!(
                    "this rule and the one in line {} of {} replace each other: a request that meets both has neither",
                    other.place.line, other.file
                );
                problems.push(Problem::warning(file, node.place, message).help("drop one of the two"));
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
        Domain { name: self.name.into(), tree: tree.build() }
    }
}

// === impl Parent ===

impl<'a> Parent<'a> {
    fn root(domain: &'a str) -> Self {
        Self { domain, path: String::new(), levels: Vec::new(), value_to_metric: Vec::new() }
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

// === impl Site, Fields, Node ===

impl Site {
    fn child(&self, name: &str) -> String {
        join(&self.path, name)
    }
}

impl Fields<'_> {
    fn has(&self, name: &str) -> bool {
        self.known.get(name).is_some_and(|(_, node)| !node.is_null())
    }

    /// Where an entry stands: its value if it is a scalar, else its key; the mapping if it is not there.
    fn at(&self, name: &str) -> Site {
        let place = match self.known.get(name) {
            Some((_, value)) if value.is_scalar() && !value.is_null() => value.place,
            Some((key, _)) => key.place,
            None => self.site.place,
        };
        Site { place, path: self.site.child(name) }
    }
}

impl Node {
    fn is_null(&self) -> bool {
        matches!(&self.value, Value::Scalar(scalar) if scalar.kind == Kind::Null)
    }

    fn is_scalar(&self) -> bool {
        matches!(self.value, Value::Scalar(_))
    }
}

// === helpers ===

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

fn full_path(domain: &str, levels: &[Level]) -> String {
    let levels = levels.iter().map(Level::to_string);
    std::iter::once(domain.to_owned()).chain(levels).collect::<Vec<_>>().join(".")
}

/// A scalar as the reference turns keys into text.
fn key_text(node: &Node) -> Option<String> {
    let Value::Scalar(scalar) = &node.value else { return None };
    Some(match scalar.kind {
        Kind::Bool(truth) => truth.to_string(),
        Kind::Int(number) => number.to_string(),
        Kind::Null => "null".to_owned(),
        Kind::BigInt | Kind::Float(_) | Kind::Text => scalar.text.clone(),
    })
}

/// How the rule's counters are called, by the flags of its levels.
fn stat_name(full: &str, levels: &[Level], value_to_metric: &[bool], detailed: bool) -> StatName {
    let is_shared = |level: &Level| matches!(level.value, LevelValue::Wildcard { share_threshold: true, .. });
    let any_shared = levels.iter().any(is_shared);
    let parts: Box<[StatPart]> = levels
        .iter()
        .zip(value_to_metric)
        .map(|(level, by_value)| match &level.value {
            _ if is_shared(level) => StatPart::Text(level.to_string().into()),
            _ if detailed && any_shared => StatPart::KeyAndValueIfAny,
            _ if detailed => StatPart::KeyAndValue,
            LevelValue::Any | LevelValue::Wildcard { .. } if *by_value => StatPart::KeyAndValueIfAny,
            _ => StatPart::Text(level.to_string().into()),
        })
        .collect();
    if parts.iter().all(|part| matches!(part, StatPart::Text(_))) {
        StatName::Fixed { name: full.into(), counters: OnceLock::new() }
    } else {
        StatName::PerRequest(parts)
    }
}

/// Seconds of `90s`, `1h30m`, `7d`; `None` for anything else. Each letter at most once, longest first.
fn parse_window(text: &str) -> Option<u64> {
    let letters = [('w', Unit::Week), ('d', Unit::Day), ('h', Unit::Hour), ('m', Unit::Minute), ('s', Unit::Second)];
    let (mut rest, mut seconds, mut letters) = (text, 0_u64, letters.into_iter());
    while !rest.is_empty() {
        let end = rest.find(|one: char| !one.is_ascii_digit())?;
        let letter = rest[end..].chars().next()?;
        let (_, unit) = letters.find(|(other, _)| *other == letter)?;
        let number: u64 = rest[..end].parse().ok()?;
        seconds = seconds.checked_add(number.checked_mul(unit.seconds())?)?;
        rest = &rest[end + 1..];
    }
    Some(seconds)
}

/// The word that a misspelt one was probably meant to be.
fn nearest<T: AsRef<str>>(word: &str, words: &[T]) -> Option<String> {
    words
        .iter()
        .map(|known| (strsim::damerau_levenshtein(word, known.as_ref()), known.as_ref()))
        .filter(|(distance, known)| *distance <= known.len().min(word.len()).div_ceil(3))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, known)| known.to_owned())
}

/// The mappings that know the word.
fn homes(word: &str) -> Vec<&'static str> {
    [(ROOT, "the file's top level"), (DESCRIPTOR, "a descriptor"), (RATE_LIMIT, "rate_limit"), (REPLACE, "replaces")]
        .into_iter()
        .filter(|(words, _)| words.contains(&word))
        .map(|(_, home)| home)
        .collect()
}

fn right_place(word: &str) -> String {
    format!("it means something in {}", homes(word).join(" or "))
}

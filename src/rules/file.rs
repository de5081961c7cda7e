//! YAML text to a tree of located nodes. What the nodes mean is `compile`'s.
//!
//! Two parsers read each file. `serde_yaml` goes first and decides whether it is YAML at all: it descends from
//! libyaml, as the reference's parser does, so both take the same files. `saphyr-parser` then gives the events with
//! their places, from which the tree is built. Scalars are resolved here by YAML 1.1, as the reference's parser
//! (Go's yaml.v2) does, and keep their source text.

use std::collections::HashMap;

use saphyr_parser::{Event, Marker, Parser, ScalarStyle, Span, Tag};
use serde::{Deserialize, de::IgnoredAny};

use super::problem::{Place, Problem};

/// One rule file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceFile {
    /// What messages call it: `c.yaml`, `config.basic.yaml`, or a path.
    pub name: String,
    /// Its content.
    pub text: String,
}

/// A value with its place.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub place: Place,
    pub value: Value,
}

#[derive(Clone, Debug)]
pub(super) enum Value {
    Scalar(Scalar),
    List(Vec<Node>),
    /// In the file's order, merge keys resolved; of equal keys the last one stays.
    Map(Vec<(Node, Node)>),
}

/// A scalar as it stands in the file.
#[derive(Clone, Debug)]
pub(super) struct Scalar {
    pub text: String,
    pub kind: Kind,
}

/// What YAML 1.1 takes a scalar for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    Null,
    Bool(bool),
    Int(i64),
    /// An integer beyond the signed 64-bit range: the reference reads no such number.
    BigInt,
    Float(f64),
    Text,
}

/// Levels of lists and mappings in one another.
const MAX_DEPTH: usize = 128;
/// Nodes that aliases may add to a file, so that a few lines cannot fill the memory.
const MAX_ALIASED: usize = 100_000;

impl SourceFile {
    /// The text that lines and columns count in: without a byte order mark.
    pub(super) fn body(&self) -> &str {
        self.text.strip_prefix('\u{feff}').unwrap_or(&self.text)
    }
}

/// The first document of a file, `None` if there is nothing in it. Whatever is doubtful goes to `problems`.
pub(super) fn parse(
    file: &SourceFile,
    problems: &mut Vec<Problem>,
) -> Result<Option<Node>, Box<Problem>> {
    judge_syntax(file)?;
    let mut builder = Builder {
        file,
        problems,
        anchors: HashMap::new(),
        aliased: 0,
    };
    let mut parser = Parser::new_from_str(file.body());
    let root = builder.document(&mut parser)?;
    Ok(root)
}

fn judge_syntax(file: &SourceFile) -> Result<(), Box<Problem>> {
    let Some(document) = serde_yaml::Deserializer::from_str(file.body()).next() else {
        return Ok(());
    };
    let Err(error) = IgnoredAny::deserialize(document) else {
        return Ok(());
    };
    let place = error.location().map_or(Place::START, |at| Place {
        line: at.line(),
        column: at.column(),
        length: 1,
    });
    Err(syntax(file, place, &error.to_string()))
}

fn syntax(file: &SourceFile, place: Place, what: &str) -> Box<Problem> {
    let line = place.line;
    let problem = Problem::error(
        file,
        place,
        format!("error loading config file: yaml: line {line}: {what}"),
    )
    .help("this is no YAML: mind indentation, colons and quotes near this place");
    Box::new(problem)
}

struct Builder<'a> {
    file: &'a SourceFile,
    problems: &'a mut Vec<Problem>,
    anchors: HashMap<usize, Node>,
    aliased: usize,
}

type Events<'a> = Parser<'a, saphyr_parser::StrInput<'a>>;

impl Builder<'_> {
    fn document(&mut self, events: &mut Events<'_>) -> Result<Option<Node>, Box<Problem>> {
        let mut root = None;
        loop {
            match self.next(events)? {
                (Event::StreamStart | Event::Nothing | Event::DocumentStart(_), _) => {}
                (Event::DocumentEnd, _) => break,
                (Event::StreamEnd, _) => return Ok(root),
                (event, span) => root = Some(self.node(event, span, events, 0)?),
            }
        }
        // What follows is not read by the reference either; it need not even be YAML.
        loop {
            match events.next() {
                Some(Ok((Event::DocumentStart(_), span))) => {
                    let warning = Problem::warning(
                        self.file,
                        place(span),
                        "only the first document of a file is read".to_owned(),
                    );
                    self.problems
                        .push(warning.help("move this document to a file of its own"));
                    return Ok(root);
                }
                Some(Ok((Event::StreamEnd, _))) | Some(Err(_)) | None => return Ok(root),
                Some(Ok(_)) => {}
            }
        }
    }

    fn next<'e>(&self, events: &mut Events<'e>) -> Result<(Event<'e>, Span), Box<Problem>> {
        match events.next() {
            Some(Ok(event)) => Ok(event),
            Some(Err(error)) => Err(syntax(self.file, point(*error.marker()), error.info())),
            None => Ok((Event::StreamEnd, Span::default())),
        }
    }

    fn node(
        &mut self,
        event: Event<'_>,
        span: Span,
        events: &mut Events<'_>,
        depth: usize,
    ) -> Result<Node, Box<Problem>> {
        let place = place(span);
        if depth > MAX_DEPTH {
            return Err(syntax(
                self.file,
                place,
                &format!("lists and mappings stand in one another over {MAX_DEPTH} levels deep"),
            ));
        }
        let (anchor, value) = match event {
            Event::Alias(anchor) => return self.alias(anchor, place),
            Event::Scalar(text, style, anchor, tag) => {
                let kind = kind(&text, style, tag.as_deref());
                let text = text.into_owned();
                (anchor, Value::Scalar(Scalar { text, kind }))
            }
            Event::SequenceStart(anchor, _) => {
                let mut items = Vec::new();
                loop {
                    match self.next(events)? {
                        (Event::SequenceEnd | Event::StreamEnd, _) => break,
                        (event, span) => items.push(self.node(event, span, events, depth + 1)?),
                    }
                }
                (anchor, Value::List(items))
            }
            Event::MappingStart(anchor, _) => (anchor, self.mapping(events, depth)?),
            // Not where a node may stand; the parser does not do that.
            _ => (
                0,
                Value::Scalar(Scalar {
                    text: String::new(),
                    kind: Kind::Null,
                }),
            ),
        };
        let node = Node { place, value };
        if anchor > 0 {
            self.anchors.insert(anchor, node.clone());
        }
        Ok(node)
    }

    /// Entries take effect in order, merged ones at their merge key, as in the reference.
    fn mapping(&mut self, events: &mut Events<'_>, depth: usize) -> Result<Value, Box<Problem>> {
        let mut entries = Entries::default();
        loop {
            let key = match self.next(events)? {
                (Event::MappingEnd | Event::StreamEnd, _) => break,
                (event, span) => {
                    let is_plain = matches!(event, Event::Scalar(_, ScalarStyle::Plain, _, _));
                    (self.node(event, span, events, depth + 1)?, is_plain)
                }
            };
            let (event, span) = self.next(events)?;
            let value = self.node(event, span, events, depth + 1)?;
            match key {
                (
                    Node {
                        value: Value::Scalar(scalar),
                        ..
                    },
                    true,
                ) if scalar.text == "<<" => {
                    self.merge(value, &mut entries)?;
                }
                (key, _) => {
                    if let Some(name) = entries.insert(key, value, false) {
                        self.problems.push(self.repeated(name));
                    }
                }
            }
        }
        Ok(Value::Map(entries.list))
    }

    fn merge(&mut self, from: Node, into: &mut Entries) -> Result<(), Box<Problem>> {
        let place = from.place;
        match from.value {
            Value::Map(entries) => {
                for (key, value) in entries {
                    into.insert(key, value, true);
                }
                Ok(())
            }
            // Of several the first wins.
            Value::List(maps) if maps.iter().all(|map| matches!(map.value, Value::Map(_))) => maps
                .into_iter()
                .rev()
                .try_for_each(|map| self.merge(map, into)),
            _ => Err(syntax(
                self.file,
                place,
                "map merge requires map or sequence of maps as the value",
            )),
        }
    }

    fn alias(&mut self, anchor: usize, place: Place) -> Result<Node, Box<Problem>> {
        let Some(node) = self.anchors.get(&anchor) else {
            return Err(syntax(
                self.file,
                place,
                "an alias inside what it stands for",
            ));
        };
        self.aliased = self.aliased.saturating_add(size(node, MAX_ALIASED));
        if self.aliased > MAX_ALIASED {
            return Err(syntax(
                self.file,
                place,
                &format!("aliases add over {MAX_ALIASED} values to the file"),
            ));
        }
        Ok(node.clone())
    }

    fn repeated(&self, (name, place): (String, Place)) -> Problem {
        let text = format!("'{name}' stands twice in one mapping; the last one counts");
        Problem::warning(self.file, place, text).help("remove one of them")
    }
}

/// The entries of one mapping.
#[derive(Default)]
struct Entries {
    list: Vec<(Node, Node)>,
    /// Where each scalar key stands in the list, and whether it came by a merge.
    at: HashMap<String, (usize, bool)>,
}

impl Entries {
    /// Returns the key and the place of an entry that was written twice by hand.
    fn insert(&mut self, key: Node, value: Node, merged: bool) -> Option<(String, Place)> {
        let Value::Scalar(Scalar { text, .. }) = &key.value else {
            self.list.push((key, value));
            return None;
        };
        let (text, place) = (text.clone(), key.place);
        match self.at.get_mut(&text) {
            Some((at, was_merged)) => {
                let by_hand = !*was_merged && !merged;
                *was_merged &= merged;
                self.list[*at] = (key, value);
                by_hand.then_some((text, place))
            }
            None => {
                self.at.insert(text, (self.list.len(), merged));
                self.list.push((key, value));
                None
            }
        }
    }
}

/// How many nodes this is; counting ends at `most`.
fn size(node: &Node, most: usize) -> usize {
    let mut sum = 1;
    let mut add = |node| {
        if sum <= most {
            sum += size(node, most - sum.min(most));
        }
    };
    match &node.value {
        Value::Scalar(_) => {}
        Value::List(items) => items.iter().for_each(&mut add),
        Value::Map(entries) => entries.iter().for_each(|(key, value)| {
            add(key);
            add(value);
        }),
    }
    sum
}

fn place(span: Span) -> Place {
    let length = if span.end.line() == span.start.line() {
        span.end.index().saturating_sub(span.start.index()).max(1)
    } else {
        1
    };
    Place {
        length,
        ..point(span.start)
    }
}

fn point(marker: Marker) -> Place {
    Place {
        line: marker.line(),
        column: marker.col() + 1,
        length: 1,
    }
}

/// A quoted scalar is text; a plain one is what it looks like, unless a tag says otherwise.
fn kind(text: &str, style: ScalarStyle, tag: Option<&Tag>) -> Kind {
    match tag.map(|tag| tag.suffix.as_str()) {
        Some("str" | "binary") => Kind::Text,
        Some("bool" | "int" | "float" | "null") => resolve(text),
        _ if style == ScalarStyle::Plain => resolve(text),
        _ => Kind::Text,
    }
}

/// By YAML 1.1.
fn resolve(text: &str) -> Kind {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Kind::Null,
        "y" | "Y" | "yes" | "Yes" | "YES" | "true" | "True" | "TRUE" | "on" | "On" | "ON" => {
            return Kind::Bool(true);
        }
        "n" | "N" | "no" | "No" | "NO" | "false" | "False" | "FALSE" | "off" | "Off" | "OFF" => {
            return Kind::Bool(false);
        }
        ".nan" | ".NaN" | ".NAN" => return Kind::Float(f64::NAN),
        ".inf" | ".Inf" | ".INF" | "+.inf" | "+.Inf" | "+.INF" => {
            return Kind::Float(f64::INFINITY);
        }
        "-.inf" | "-.Inf" | "-.INF" => return Kind::Float(f64::NEG_INFINITY),
        _ => {}
    }
    let starts_as_number =
        text.starts_with(|first: char| first.is_ascii_digit() || "+-.".contains(first));
    if !starts_as_number {
        return Kind::Text;
    }
    let digits = text.replace('_', "");
    integer(&digits)
        .or_else(|| float(&digits))
        .unwrap_or(Kind::Text)
}

/// Decimal, or with the prefixes `0x`, `0b`, `0o` and the bare `0` of octal numbers.
fn integer(text: &str) -> Option<Kind> {
    let (negative, digits) = match text.as_bytes().first()? {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    let (radix, digits) = match digits.get(..2) {
        Some("0x" | "0X") => (16, &digits[2..]),
        Some("0b" | "0B") => (2, &digits[2..]),
        Some("0o" | "0O") => (8, &digits[2..]),
        Some(two) if two.starts_with('0') => (8, &digits[1..]),
        _ => (10, digits),
    };
    if digits.is_empty() || !digits.chars().all(|digit| digit.is_digit(radix)) {
        return None;
    }
    let value = u128::from_str_radix(digits, radix).unwrap_or(u128::MAX);
    let value = i128::try_from(value).unwrap_or(i128::MAX);
    let value = if negative { -value } else { value };
    Some(i64::try_from(value).map_or(Kind::BigInt, Kind::Int))
}

/// Digits with a point or an exponent, or both; Rust's own notation, less its words and a bare point.
fn float(text: &str) -> Option<Kind> {
    let digits = text.trim_start_matches(['+', '-']);
    let is_plain = text.len() - digits.len() <= 1
        && digits.starts_with(|first: char| first.is_ascii_digit() || first == '.')
        && digits
            .chars()
            .all(|one| one.is_ascii_digit() || ".eE+-".contains(one));
    if !is_plain {
        return None;
    }
    text.parse().ok().map(Kind::Float)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_scalars_are_read_as_yaml_1_1() {
        for (text, expect) in [
            ("yes", Kind::Bool(true)),
            ("N", Kind::Bool(false)),
            ("~", Kind::Null),
            ("12", Kind::Int(12)),
            ("1_000", Kind::Int(1_000)),
            ("-7", Kind::Int(-7)),
            ("0x1F", Kind::Int(31)),
            ("010", Kind::Int(8)),
            ("0o10", Kind::Int(8)),
            ("0b11", Kind::Int(3)),
            ("0", Kind::Int(0)),
            ("9223372036854775807", Kind::Int(i64::MAX)),
            ("9223372036854775808", Kind::BigInt),
            ("1.5", Kind::Float(1.5)),
            ("1e3", Kind::Float(1_000.0)),
            (".5", Kind::Float(0.5)),
            ("089", Kind::Float(89.0)),
            ("10.2.3.4", Kind::Text),
            ("2024-02-03", Kind::Text),
            ("-", Kind::Text),
            (".", Kind::Text),
            ("1.2.", Kind::Text),
            ("12h", Kind::Text),
            ("infinity", Kind::Text),
        ] {
            assert_eq!(resolve(text), expect, "{text}");
        }
    }

    fn read(text: &str) -> (Result<Option<Node>, Box<Problem>>, Vec<Problem>) {
        let file = SourceFile {
            name: "c.yaml".into(),
            text: text.into(),
        };
        let mut problems = Vec::new();
        let node = parse(&file, &mut problems);
        (node, problems)
    }

    fn show(node: &Node) -> String {
        match &node.value {
            Value::Scalar(scalar) => scalar.text.clone(),
            Value::List(items) => format!("{:?}", items.iter().map(show).collect::<Vec<_>>()),
            Value::Map(entries) => {
                let entries = entries
                    .iter()
                    .map(|(key, value)| format!("{}: {}", show(key), show(value)));
                format!("{{{}}}", entries.collect::<Vec<_>>().join(", "))
            }
        }
    }

    #[test]
    fn merge_keys_and_aliases_are_resolved() {
        let text = "base: &b {a: 1, c: 2}\nuse: {<<: *b, c: 3}\nmany: {<<: [{a: 1}, {a: 2, d: 4}]}\nagain: *b\n";
        let (node, problems) = read(text);
        assert_eq!(
            show(&node.unwrap().unwrap()),
            "{base: {a: 1, c: 2}, use: {a: 1, c: 3}, many: {a: 1, d: 4}, again: {a: 1, c: 2}}"
        );
        assert!(problems.is_empty(), "{problems:?}");
    }

    #[test]
    fn doubtful_files_are_read_with_a_warning() {
        let (node, problems) = read("a: 1\na: 2\n---\nb: [\n");
        assert_eq!(show(&node.unwrap().unwrap()), "{a: 2}");
        let lines: Vec<_> = problems.iter().map(|problem| problem.line).collect();
        assert_eq!(lines, [2, 3]);
    }

    #[test]
    fn odd_but_harmless_bytes_are_read() {
        for text in [
            "\u{feff}a: 1",
            "a: 1\r\n",
            "%YAML 1.1\n---\na: 1\n",
            "# x\na: 1 # y\n",
        ] {
            let (node, _) = read(text);
            assert_eq!(show(&node.unwrap().unwrap()), "{a: 1}", "{text:?}");
        }
        for text in ["", "# nothing\n", "---\n"] {
            let node = read(text).0.unwrap();
            let is_nothing = node.is_none_or(|node| show(&node).is_empty());
            assert!(is_nothing, "{text:?}");
        }
    }

    #[test]
    fn hostile_files_are_refused_quickly() {
        let bomb: String = (1..40)
            .map(|at| format!("a{at}: &x{at} [*x{0}, *x{0}]\n", at - 1))
            .collect();
        let bomb = format!("a0: &x0 [1, 2]\n{bomb}");
        let deep = "[".repeat(10_000);
        let closed = format!("{}{}", "[".repeat(1_000), "]".repeat(1_000));
        for text in [
            &bomb,
            &deep,
            &closed,
            "a: &a [*a]",
            "a: *nothing",
            "a: {<<: 1}",
            "\tb: 1",
            "a: 'x",
        ] {
            let (node, _) = read(text);
            let problem = node.expect_err(&text[..text.len().min(40)]);
            assert!(
                problem
                    .message
                    .contains("error loading config file: yaml: "),
                "{problem:?}"
            );
            assert!(problem.line > 0);
        }
    }
}

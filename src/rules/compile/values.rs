//! Reading the tree by type: mappings with known words, texts, flags, numbers, lists, metadata. Whatever does not
//! fit becomes a problem with its place, once.

use std::collections::HashMap;

use super::super::{
    file::{Kind, Node, Scalar, SourceFile, Value},
    problem::{Place, Problem},
};

pub(super) struct Reader<'a> {
    pub(super) file: &'a SourceFile,
    pub(super) problems: &'a mut Vec<Problem>,
    /// How many of them are errors of this file.
    pub(super) errors: usize,
}

/// Where something stands.
#[derive(Clone)]
pub(super) struct Site {
    pub(super) place: Place,
    pub(super) path: String,
}

/// A text with its place.
pub(super) struct Text {
    pub(super) text: String,
    pub(super) site: Site,
}

/// The entries of one mapping that are known there, by name.
pub(super) struct Fields<'n> {
    pub(super) site: Site,
    pub(super) known: HashMap<&'static str, (&'n Node, &'n Node)>,
}

pub(super) const ROOT: &[&str] = &["domain", "descriptors"];

pub(super) const DESCRIPTOR: &[&str] = &[
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

pub(super) const RATE_LIMIT: &[&str] = &[
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

pub(super) const REPLACE: &[&str] = &["name"];

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

// === impl Reader ===

impl Reader<'_> {
    // === values by type ===

    /// The known entries of a mapping. Every other one is judged on the spot.
    pub(super) fn fields<'n>(
        &mut self,
        node: &'n Node,
        path: &str,
        words: &'static [&'static str],
    ) -> Option<Fields<'n>> {
        let site = Site {
            place: node.place,
            path: path.to_owned(),
        };
        let Value::Map(entries) = &node.value else {
            self.bad_type(node, path.to_owned(), "a mapping");
            return None;
        };
        let mut known = HashMap::new();
        for (key, value) in entries {
            let Some(name) = self.key(key, path) else {
                continue;
            };
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
            Value::Scalar(Scalar {
                text,
                kind: Kind::Text,
            }) => Some(text.clone()),
            _ => {
                let site = Site {
                    place: key.place,
                    path: path.to_owned(),
                };
                let shown = key_text(key).unwrap_or_else(|| "a list or mapping".to_owned());
                let message = format!("config error, key is not of type string: {shown}");
                self.error(&site, message, "quote it, if it is meant");
                None
            }
        }
    }

    /// A word that has no meaning here.
    fn unexpected(&mut self, name: &str, key: &Node, value: &Node, path: &str, words: &[&str]) {
        let site = Site {
            place: key.place,
            path: join(path, name),
        };
        if REFERENCE_WORDS.contains(&name) {
            let message = format!("'{name}' has no effect here");
            self.warning(&site, message, &right_place(name));
            self.vocabulary(value, &site.path, name == "metadata");
        } else if let ours @ [_, ..] = homes(name).as_slice() {
            let message = format!("config error, '{name}' does not belong here");
            self.error(
                &site,
                message,
                &format!("it goes into {}", ours.join(" or ")),
            );
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
                    let Some(name) = self.key(key, path) else {
                        continue;
                    };
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
    pub(super) fn list<'n>(&mut self, node: &'n Node, path: &str) -> Vec<&'n Node> {
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
        let message =
            format!("config error, yaml file contains list of type other than map: {shown}");
        self.error(
            &Site {
                place: item.place,
                path,
            },
            message,
            "items look like `- key: ...`",
        );
    }

    /// The source text of a scalar; `None` if the entry is not there, or not usable.
    pub(super) fn text(&mut self, fields: &Fields<'_>, name: &'static str) -> Option<Text> {
        let (_, node) = fields.known.get(name)?;
        let site = fields.at(name);
        match &node.value {
            Value::Scalar(scalar) if self.sound(node, &site.path) => Some(Text {
                text: if scalar.kind == Kind::Null {
                    String::new()
                } else {
                    scalar.text.clone()
                },
                site: Site {
                    place: node.place,
                    ..site
                },
            }),
            Value::Scalar(_) => None,
            _ => {
                self.bad_type(node, site.path, "a text");
                None
            }
        }
    }

    pub(super) fn flag(&mut self, fields: &Fields<'_>, name: &'static str) -> bool {
        let Some((_, node)) = fields.known.get(name) else {
            return false;
        };
        match &node.value {
            Value::Scalar(Scalar {
                kind: Kind::Bool(truth),
                ..
            }) => *truth,
            _ if node.is_null() => false,
            _ => {
                self.bad_type(
                    node,
                    fields.site.child(name),
                    "true or false, without quotes",
                );
                false
            }
        }
    }

    pub(super) fn number(&mut self, fields: &Fields<'_>, name: &'static str) -> Option<u32> {
        let (_, node) = fields.known.get(name)?;
        let path = fields.site.child(name);
        if !self.sound(node, &path) {
            return None;
        }
        match &node.value {
            Value::Scalar(Scalar {
                kind: Kind::Int(number),
                ..
            }) if u32::try_from(*number).is_ok() => u32::try_from(*number).ok(),
            _ if node.is_null() => Some(0),
            _ => {
                self.bad_type(
                    node,
                    path,
                    "a whole number from 0 to 4294967295, without quotes",
                );
                None
            }
        }
    }

    /// Whether a scalar is one that the reference reads at all.
    fn sound(&mut self, node: &Node, path: &str) -> bool {
        match &node.value {
            Value::Scalar(Scalar {
                text,
                kind: Kind::Float(_) | Kind::BigInt,
            }) => {
                let site = Site {
                    place: node.place,
                    path: path.to_owned(),
                };
                let help = format!(
                    "numbers here are whole and have 64 bits; quote it if it is a text: \"{text}\""
                );
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
        self.error(
            &Site {
                place: node.place,
                path,
            },
            message,
            &format!("expected {expected}"),
        );
    }

    // === problems ===

    pub(super) fn error(&mut self, site: &Site, message: String, help: &str) {
        self.errors += 1;
        let problem = Problem::error(self.file, site.place, message);
        self.problems.push(problem.path(&site.path).help(help));
    }

    pub(super) fn warning(&mut self, site: &Site, message: String, help: &str) {
        let problem = Problem::warning(self.file, site.place, message);
        self.problems.push(problem.path(&site.path).help(help));
    }

    // === metadata ===

    pub(super) fn metadata(
        &mut self,
        fields: &Fields<'_>,
    ) -> Option<serde_json::Map<String, serde_json::Value>> {
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
                Kind::BigInt => scalar
                    .text
                    .replace('_', "")
                    .parse::<f64>()
                    .unwrap_or(f64::MAX)
                    .into(),
                Kind::Float(number) if number.is_finite() => number.into(),
                Kind::Float(_) => {
                    let site = Site {
                        place: node.place,
                        path: path.to_owned(),
                    };
                    let message =
                        format!("error parsing metadata: {} has no JSON form", scalar.text);
                    self.error(&site, message, "quote it, or write a finite number");
                    serde_json::Value::Null
                }
                Kind::Text => scalar.text.clone().into(),
            },
            Value::List(items) => {
                let items = items.iter().enumerate();
                items
                    .map(|(at, item)| self.json(item, &format!("{path}[{at}]")))
                    .collect()
            }
            Value::Map(entries) => {
                let mut map = serde_json::Map::new();
                for (key, value) in entries {
                    let Some(key) = key_text(key) else {
                        let site = Site {
                            place: key.place,
                            path: path.to_owned(),
                        };
                        let message =
                            "error parsing metadata: a key is a list or a mapping".to_owned();
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
}

// === impl Site, Fields, Node ===

impl Site {
    /// The file as a whole.
    pub(super) const START: Self = Self {
        place: Place::START,
        path: String::new(),
    };

    pub(super) fn child(&self, name: &str) -> String {
        join(&self.path, name)
    }
}

impl Fields<'_> {
    pub(super) fn has(&self, name: &str) -> bool {
        self.known
            .get(name)
            .is_some_and(|(_, node)| !node.is_null())
    }

    /// Where an entry stands: its value if it is a scalar, else its key; the mapping if it is not there.
    pub(super) fn at(&self, name: &str) -> Site {
        let place = match self.known.get(name) {
            Some((_, value)) if value.is_scalar() && !value.is_null() => value.place,
            Some((key, _)) => key.place,
            None => self.site.place,
        };
        Site {
            place,
            path: self.site.child(name),
        }
    }
}

impl Node {
    pub(super) fn is_null(&self) -> bool {
        matches!(&self.value, Value::Scalar(scalar) if scalar.kind == Kind::Null)
    }

    pub(super) fn is_scalar(&self) -> bool {
        matches!(self.value, Value::Scalar(_))
    }
}

pub(super) fn join(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_owned()
    } else {
        format!("{path}.{name}")
    }
}

/// A scalar as the reference turns keys into text.
fn key_text(node: &Node) -> Option<String> {
    let Value::Scalar(scalar) = &node.value else {
        return None;
    };
    Some(match scalar.kind {
        Kind::Bool(truth) => truth.to_string(),
        Kind::Int(number) => number.to_string(),
        Kind::Null => "null".to_owned(),
        Kind::BigInt | Kind::Float(_) | Kind::Text => scalar.text.clone(),
    })
}

/// The word that a misspelt one was probably meant to be.
pub(super) fn nearest<T: AsRef<str>>(word: &str, words: &[T]) -> Option<String> {
    words
        .iter()
        .map(|known| {
            (
                strsim::damerau_levenshtein(word, known.as_ref()),
                known.as_ref(),
            )
        })
        .filter(|(distance, known)| *distance <= known.len().min(word.len()).div_ceil(3))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, known)| known.to_owned())
}

/// The mappings that know the word.
fn homes(word: &str) -> Vec<&'static str> {
    [
        (ROOT, "the file's top level"),
        (DESCRIPTOR, "a descriptor"),
        (RATE_LIMIT, "rate_limit"),
        (REPLACE, "replaces"),
    ]
    .into_iter()
    .filter(|(words, _)| words.contains(&word))
    .map(|(_, home)| home)
    .collect()
}

fn right_place(word: &str) -> String {
    format!("it means something in {}", homes(word).join(" or "))
}

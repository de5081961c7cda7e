//! The dynamic metadata of an answer: what was asked, and what the rules that passed say about themselves. Envoy
//! keeps it with the stream, for logs and for routing.

use std::collections::BTreeMap;

use prost_types::{ListValue, Struct, Value, value::Kind};
use serde_json::{Map, Value as Json};

use crate::{
    descriptor::{Descriptor, Entry, Request},
    limiter::Decision,
};

/// The metadata of one answer: `domain`, `descriptors`, `hitsAddend` where it was set, and `metadata` where a rule
/// has any.
pub(super) fn of(request: &Request<'_>, decision: &Decision<'_>) -> Struct {
    let mut merged = Map::new();
    for status in decision.statuses.iter().filter(|status| !status.over_limit) {
        // An unlimited rule contributes nothing, as in the reference.
        let rule = status.rule.filter(|rule| !rule.is_unlimited());
        if let Some(metadata) = rule.and_then(|rule| rule.metadata.as_ref()) {
            merge(&mut merged, metadata);
        }
    }
    let descriptors = request.descriptors.iter().map(descriptor).collect();
    let mut fields = BTreeMap::from([
        ("domain".to_owned(), text(request.domain)),
        ("descriptors".to_owned(), list(descriptors)),
    ]);
    if request.wire_hits > 0 {
        fields.insert(
            "hitsAddend".to_owned(),
            number(f64::from(request.wire_hits)),
        );
    }
    if !merged.is_empty() {
        fields.insert("metadata".to_owned(), value(&Json::Object(merged)));
    }
    Struct { fields }
}

/// What is there first stays; mappings on both sides merge.
fn merge(into: &mut Map<String, Json>, from: &Map<String, Json>) {
    for (key, value) in from {
        match (into.get_mut(key), value) {
            (None, value) => {
                into.insert(key.clone(), value.clone());
            }
            (Some(Json::Object(into)), Json::Object(from)) => merge(into, from),
            (Some(_), _) => {}
        }
    }
}

fn descriptor(descriptor: &Descriptor<'_>) -> Value {
    let entries = descriptor.entries.iter().map(entry).collect();
    let mut fields = BTreeMap::from([("entries".to_owned(), list(entries))]);
    if let Some(limit) = descriptor.limit {
        let (unit, multiplier) = (limit.window.unit().name(), limit.window.multiplier());
        let mut words = format!("requests_per_unit:{} unit:{unit}", limit.requests);
        if multiplier > 1 {
            words += &format!(" unit_multiplier:{{value:{multiplier}}}");
        }
        fields.insert("limit".to_owned(), text(words.as_bytes()));
    }
    if let Some(hits) = descriptor.wire_hits {
        fields.insert("hitsAddend".to_owned(), number(hits as f64));
    }
    Value {
        kind: Some(Kind::StructValue(Struct { fields })),
    }
}

fn entry(entry: &Entry<'_>) -> Value {
    let pair = [entry.key, b"=", entry.value].concat();
    text(&pair)
}

fn value(json: &Json) -> Value {
    match json {
        Json::Null => Value {
            kind: Some(Kind::NullValue(0)),
        },
        Json::Bool(truth) => Value {
            kind: Some(Kind::BoolValue(*truth)),
        },
        Json::Number(digits) => number(digits.as_f64().unwrap_or_default()),
        Json::String(words) => text(words.as_bytes()),
        Json::Array(values) => list(values.iter().map(value).collect()),
        Json::Object(map) => {
            let fields = map
                .iter()
                .map(|(key, json)| (key.clone(), value(json)))
                .collect();
            Value {
                kind: Some(Kind::StructValue(Struct { fields })),
            }
        }
    }
}

fn list(values: Vec<Value>) -> Value {
    Value {
        kind: Some(Kind::ListValue(ListValue { values })),
    }
}

fn number(number: f64) -> Value {
    Value {
        kind: Some(Kind::NumberValue(number)),
    }
}

/// A protobuf string must be UTF-8; what is not shows as U+FFFD.
fn text(bytes: &[u8]) -> Value {
    let text = String::from_utf8_lossy(bytes).into_owned();
    Value {
        kind: Some(Kind::StringValue(text)),
    }
}

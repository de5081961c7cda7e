//! What a `rate_limit` or a list of `rate_limits` says.

use std::num::NonZeroU32;

use super::{
    super::file::{Node, Value},
    values::{Fields, RATE_LIMIT, REPLACE, Reader, Site, Text, nearest},
};
use crate::limit::{Limit, Unit, Window};

/// What a `rate_limit` says.
pub(super) struct RateLimit {
    pub(super) limit: Option<Limit>,
    pub(super) unlimited: bool,
    pub(super) name: String,
    pub(super) replaces: Vec<String>,
    pub(super) site: Site,
}

const UNITS: &str = "one of second, minute, hour, day, week, month, year";

const WINDOWS: &str = "a window is a whole number of seconds, minutes, hours, days or weeks, such as 90s, 5m, 1h30m or 7d";

/// Longest window that can be written: 100 years.
const MAX_WINDOW: u64 = 100 * Unit::Year.seconds();

// === impl Reader ===

impl Reader<'_> {
    /// The limits of a descriptor; `None` if it has none, or none that can be used.
    pub(super) fn limits(&mut self, fields: &Fields<'_>, exact: bool) -> Option<Vec<RateLimit>> {
        let of = |name| {
            fields
                .known
                .get(name)
                .map(|(_, node)| *node)
                .filter(|node| !node.is_null())
        };
        match (of("rate_limit"), of("rate_limits")) {
            (None, None) => None,
            (Some(one), None) => {
                let path = fields.site.child("rate_limit");
                Some(vec![self.rate_limit(one, path, exact)?])
            }
            (None, Some(several)) => {
                self.rate_limits(several, &fields.site.child("rate_limits"), exact)
            }
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
                let site = Site {
                    place: node.place,
                    path: path.to_owned(),
                };
                self.error(
                    &site,
                    "rate_limits is empty".to_owned(),
                    "name at least one limit, or drop it",
                );
            }
            return None;
        }
        let mut limits: Vec<RateLimit> = Vec::new();
        let count = items.len();
        for (at, item) in items.into_iter().enumerate() {
            let Some(limit) = self.rate_limit(item, format!("{path}[{at}]"), exact) else {
                continue;
            };
            if limit.unlimited {
                let message =
                    "an unlimited entry among several limits lifts none of them".to_owned();
                self.error(
                    &limit.site,
                    message,
                    "use `rate_limit: {unlimited: true}` alone, or drop this entry",
                );
                continue;
            }
            let seconds = |limit: &RateLimit| limit.limit.map(|limit| limit.window.seconds());
            if let Some(same) = limits
                .iter()
                .find(|other| seconds(other) == seconds(&limit))
            {
                let line = same.site.place.line;
                let message =
                    format!("two limits of one descriptor have the same window (see line {line})");
                self.error(
                    &limit.site,
                    message,
                    "keep the lower one: both would count the same hits",
                );
                continue;
            }
            limits.push(limit);
        }
        (limits.len() == count).then_some(limits)
    }

    fn rate_limit(&mut self, node: &Node, path: String, exact: bool) -> Option<RateLimit> {
        let before = self.errors;
        let fields = self.fields(node, &path, RATE_LIMIT)?;
        let unlimited = self.flag(&fields, "unlimited");
        let name = self
            .text(&fields, "name")
            .map_or_else(String::new, |name| name.text);
        let exact = self.flag(&fields, "exact") || exact;
        let replaces = self.replaces(&fields, &name);
        let window = self.window(&fields, unlimited);
        let requests = self.requests(&fields, unlimited, self.errors == before);
        if self.errors > before {
            return None;
        }
        Some(RateLimit {
            limit: window.map(|window| Limit {
                requests,
                window,
                exact,
            }),
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
                "`requests` goes with `window`, such as 90s; or write unit and requests_per_unit"
                    .to_owned()
            } else {
                match nearest(
                    word,
                    &Unit::ALL.map(Unit::name).map(str::to_ascii_lowercase),
                ) {
                    Some(near) => format!("did you mean {near}? {UNITS}"),
                    None => format!("{UNITS}, or `window: 90s` with `requests`"),
                }
            };
            self.error(
                &fields.at("unit"),
                format!("invalid rate limit unit '{word}'"),
                &help,
            );
            return None;
        };
        let window = Window::new(parsed, multiplier?);
        if window.seconds() > MAX_WINDOW {
            let message = "the window is longer than 100 years".to_owned();
            self.error(
                &fields.at("unit_multiplier"),
                message,
                "choose a smaller unit_multiplier",
            );
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
            self.error(
                &fields.at("unit_multiplier"),
                message,
                "the period is this many units: 1 or more",
            );
        }
        multiplier
    }

    fn written_window(&mut self, written: &Text) -> Option<Window> {
        let window = parse_window(&written.text)
            .filter(|seconds| (1..=MAX_WINDOW).contains(seconds))
            .and_then(Window::from_seconds);
        if window.is_none() {
            let message = format!("'{}' is no window", written.text);
            self.error(
                &written.site,
                message,
                &format!("{WINDOWS}; from 1s to 100 years"),
            );
        }
        window
    }

    fn requests(&mut self, fields: &Fields<'_>, unlimited: bool, is_certain: bool) -> u32 {
        let name = if fields.has("window") {
            "requests"
        } else {
            "requests_per_unit"
        };
        let other = if fields.has("window") {
            "requests_per_unit"
        } else {
            "requests"
        };
        if name == "requests_per_unit" && fields.has(other) && fields.has("unit") {
            let message = "requests goes with window, and requests_per_unit with unit".to_owned();
            self.error(&fields.at(other), message, "rename it to requests_per_unit");
        }
        if !fields.has(name) {
            // Where a word was misspelt it may be there all the same.
            if is_certain && !unlimited && !fields.has(other) {
                let message = format!("no {name}: that is 0, and every request is over the limit");
                self.warning(
                    &fields.site,
                    message,
                    &format!("write `{name}: 0` if that is what you want"),
                );
            }
            return 0;
        }
        self.number(fields, name).unwrap_or(0)
    }

    fn replaces(&mut self, fields: &Fields<'_>, own: &str) -> Vec<String> {
        let Some((_, node)) = fields.known.get("replaces") else {
            return Vec::new();
        };
        let path = fields.site.child("replaces");
        let mut names = Vec::new();
        for (at, item) in self.list(node, &path).into_iter().enumerate() {
            let Some(item) = self.fields(item, &format!("{path}[{at}]"), REPLACE) else {
                continue;
            };
            let before = self.errors;
            let name = self
                .text(&item, "name")
                .map_or_else(String::new, |name| name.text);
            if self.errors > before {
                continue;
            }
            if name.is_empty() {
                let message = "should not have an empty replaces entry".to_owned();
                self.error(
                    &item.site,
                    message,
                    "name a limit: `replaces: [{name: other}]`",
                );
            } else if name == own {
                let message = "replaces should not contain name of same descriptor".to_owned();
                self.error(&item.at("name"), message, "a limit can't replace itself");
            }
            names.push(name);
        }
        names
    }
}

/// Seconds of `90s`, `1h30m`, `7d`; `None` for anything else. Each letter at most once, longest first.
fn parse_window(text: &str) -> Option<u64> {
    let letters = [
        ('w', Unit::Week),
        ('d', Unit::Day),
        ('h', Unit::Hour),
        ('m', Unit::Minute),
        ('s', Unit::Second),
    ];
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

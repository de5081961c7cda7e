//! Who may use whom: the imports of every file against the map in ARCHITECTURE.md. A call upwards is a failure here
//! before it is a knot in the code.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// Everybody may use these, and they use only each other.
const LEAVES: &[&str] = &["clock", "descriptor", "key", "limit", "metrics", "wire"];

/// Rooms from the top down, with the rooms below each that it may use besides the leaves.
const ROOMS: &[(&str, &[&str])] = &[
    ("main", &["cli", "settings"]),
    ("cli", &["settings", "server", "bench", "rules"]),
    ("bench", &[]),
    ("settings", &[]),
    ("server", &["settings", "edge", "limiter", "rules", "store"]),
    ("edge", &["limiter", "rules", "store"]),
    ("limiter", &["rules", "store"]),
    ("rules", &[]),
    ("store", &[]),
];

/// Crates that belong to one room.
const FENCES: &[(&str, &[&str])] = &[
    ("serde_yaml", &["src/rules/file.rs"]),
    ("saphyr_parser", &["src/rules/file.rs"]),
    ("axum", &["src/edge/http.rs", "src/edge/http1.rs"]),
    ("annotate_snippets", &["src/rules/problem.rs"]),
    ("notify", &["src/rules/reload.rs"]),
    ("prost_reflect", &["src/edge/json.rs"]),
    ("clap", &["src/cli", "src/bench.rs", "src/settings"]),
];

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Every file below `src` with its text, tests and comments cut off, and its room.
fn files() -> Vec<(String, String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    sources(&root.join("src"), &mut found);
    let read = |path: PathBuf| {
        let name = path.strip_prefix(root).unwrap().display().to_string();
        let text = fs::read_to_string(&path).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests").next().unwrap();
        let lines = code
            .lines()
            .filter(|line| !line.trim_start().starts_with("//"));
        let room = name
            .split('/')
            .nth(1)
            .unwrap()
            .trim_end_matches(".rs")
            .to_owned();
        (name.clone(), lines.collect::<Vec<_>>().join("\n"), room)
    };
    found.into_iter().map(read).collect()
}

/// The rooms named after `crate::`, also in a list between braces.
fn used(code: &str) -> BTreeSet<String> {
    let mut rooms = BTreeSet::new();
    let word = |text: &str| {
        text.chars()
            .take_while(|one| one.is_alphanumeric() || *one == '_')
            .collect::<String>()
    };
    for (at, _) in code
        .match_indices("crate::")
        .chain(code.match_indices("slidegate::"))
    {
        let rest = code[at..].split_once("::").unwrap().1;
        if let Some(list) = rest.strip_prefix('{') {
            let (mut depth, mut start) = (0, true);
            for (at, one) in list.char_indices() {
                match one {
                    '{' => depth += 1,
                    '}' if depth == 0 => break,
                    '}' => depth -= 1,
                    ',' if depth == 0 => start = true,
                    _ if start && !one.is_whitespace() => {
                        rooms.insert(word(&list[at..]));
                        start = false;
                    }
                    _ => {}
                }
            }
        } else {
            rooms.insert(word(rest));
        }
    }
    rooms
}

#[test]
fn imports_point_down() {
    let mut wrong = Vec::new();
    for (name, code, room) in files() {
        let allowed = match room.as_str() {
            "lib" => continue,
            leaf if LEAVES.contains(&leaf) => &[],
            room => {
                let known = ROOMS.iter().find(|(other, _)| *other == room);
                known
                    .unwrap_or_else(|| panic!("{name} is in a room that the map does not know"))
                    .1
            }
        };
        for other in used(&code) {
            if other != room
                && !LEAVES.contains(&other.as_str())
                && !allowed.contains(&other.as_str())
            {
                wrong.push(format!("{name} uses {other}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn crates_stay_in_their_rooms() {
    let mut wrong = Vec::new();
    for (name, code, _) in files() {
        for (fenced, rooms) in FENCES {
            let is_named =
                code.contains(&format!("use {fenced}")) || code.contains(&format!("{fenced}::"));
            if is_named && !rooms.iter().any(|room| name.starts_with(room)) {
                wrong.push(format!("{name} names {fenced}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn the_reader_of_imports_reads() {
    let code = "use crate::{\n    clock::{Clock, Millis},\n    rules,\n};\nuse crate::store::Store; fn f() { crate::edge::x() }";
    let found: Vec<_> = used(code).into_iter().collect();
    assert_eq!(found, ["clock", "edge", "rules", "store"]);
}

//! `make bench-match`: what one match costs, by the number of rules. Medians of rounds in one run. The ratio to ten
//! rules is given twice: for the same ten requests against every set, which shows what the matcher itself costs, and
//! for 512 different ones, where a large set also has to be fetched from memory.

#![allow(clippy::print_stdout, reason = "a table is what it is for")]

use std::{fmt::Write, hint::black_box, time::Instant};

use slidegate::{
    descriptor::Entry,
    rules::{
        RuleSet,
        compile::{Options, compile},
        file::SourceFile,
    },
};

const SIZES: [usize; 4] = [10, 100, 1_000, 10_000];
const ROUNDS: usize = 21;
const MATCHES: usize = 20_000;
/// Different requests in a round: a few, whose rules stay in the processor's caches, and so many that they do not.
const REQUESTS: [usize; 2] = [10, 512];

struct Kind {
    name: &'static str,
    /// The text of rule `n`.
    rule: fn(usize) -> String,
    /// Entries that meet it.
    entries: fn(usize) -> Vec<(String, String)>,
}

const LIMIT: &str = "rate_limit: {unit: hour, requests_per_unit: 1}";

const KINDS: [Kind; 3] = [
    Kind {
        name: "exact values of one key",
        rule: |n| format!("- {{key: k, value: v{n}, {LIMIT}}}\n"),
        entries: |n| vec![("k".into(), format!("v{n}"))],
    },
    Kind {
        name: "three levels, keys alone",
        rule: |n| {
            format!(
                "- {{key: a{n}, descriptors: [{{key: b, descriptors: [{{key: c, {LIMIT}}}]}}]}}\n"
            )
        },
        entries: |n| {
            vec![
                (format!("a{n}"), "x".into()),
                ("b".into(), "y".into()),
                ("c".into(), "z".into()),
            ]
        },
    },
    Kind {
        name: "wildcards of one key",
        rule: |n| format!("- {{key: path, value: \"/api/*/item{n}x/*\", {LIMIT}}}\n"),
        entries: |n| vec![("path".into(), format!("/api/v1/item{n}x/7"))],
    },
];

fn main() {
    println!(
        "{:<26} {:>8} {:>9} {:>12} {:>8}",
        "kind", "requests", "rules", "ns per match", "to 10"
    );
    for kind in &KINDS {
        let sets: Vec<RuleSet> = SIZES.iter().map(|size| rules(kind, *size)).collect();
        for requests in REQUESTS {
            let mut times: Vec<Vec<f64>> = SIZES.iter().map(|_| Vec::new()).collect();
            // In turn, so that all sizes meet the same noise.
            for _ in 0..ROUNDS {
                for ((size, set), times) in SIZES.iter().zip(&sets).zip(&mut times) {
                    times.push(round(kind, *size, requests, set));
                }
            }
            let medians: Vec<f64> = times.into_iter().map(median).collect();
            for (size, time) in SIZES.iter().zip(&medians) {
                let ratio = time / medians[0];
                let name = kind.name;
                println!("{name:<26} {requests:>8} {size:>9} {time:>12.1} {ratio:>8.2}");
            }
        }
    }
}

fn rules(kind: &Kind, size: usize) -> RuleSet {
    let mut text = String::from("domain: d\ndescriptors:\n");
    for n in 0..size {
        text.write_str(&(kind.rule)(n)).expect("a string");
    }
    let files = [SourceFile {
        name: "bench.yaml".into(),
        text,
    }];
    compile(&files, Options::default(), None)
        .expect("good rules")
        .rules
}

fn round(kind: &Kind, size: usize, different: usize, rules: &RuleSet) -> f64 {
    let requests: Vec<_> = (0..different)
        .map(|at| (kind.entries)(at * 7_919 % size))
        .collect();
    let requests: Vec<Vec<Entry<'_>>> = requests
        .iter()
        .map(|entries| {
            entries
                .iter()
                .map(|(key, value)| Entry {
                    key: key.as_bytes(),
                    value: value.as_bytes(),
                })
                .collect()
        })
        .collect();
    let domain = rules.domain(b"d").expect("the domain");
    let start = Instant::now();
    for at in 0..MATCHES {
        let rule = domain.rule(black_box(&requests[at % different]));
        assert!(black_box(rule).is_some());
    }
    start.elapsed().as_nanos() as f64 / MATCHES as f64
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

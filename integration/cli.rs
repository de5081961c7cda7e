//! The built program from outside: exit codes, what goes to which stream, and what a closed pipe does.

// A panic is the report here too, outside of the test functions themselves.
#![allow(clippy::unwrap_used)]

use std::{
    io::Read,
    net::TcpListener,
    process::{Command, Output, Stdio},
};

const GOOD: &str = "domain: web\ndescriptors:\n  - key: user\n    rate_limit:\n      unit: minute\n      requests_per_unit: 5\n";
/// Loads, but the unit stands where it has no effect.
const DOUBTFUL: &str = "domain: web\ndescriptors:\n  - key: user\n    unit: minute\n";
const BAD: &str = "domain: web\ndescriptors: [\n";

/// The program with nothing of our environment but what it needs to start.
fn slidegate(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slidegate"));
    command.env_clear().args(args).stdin(Stdio::null());
    command
}

fn run(args: &[&str]) -> Output {
    slidegate(args).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// A file of rules in a directory of its own.
fn rules(name: &str, text: &str) -> (tempfile::TempDir, String) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(name);
    std::fs::write(&path, text).unwrap();
    let path = path.to_str().unwrap().to_owned();
    (directory, path)
}

#[test]
fn good_rules_give_a_summary_and_exit_0() {
    let (directory, file) = rules("good.yaml", GOOD);
    for path in [file.as_str(), directory.path().to_str().unwrap()] {
        for strict in [&["check", path][..], &["check", "--strict", path]] {
            let output = run(strict);
            assert_eq!(output.status.code(), Some(0), "{output:?}");
            assert!(
                !output.stdout.is_empty() && output.stderr.is_empty(),
                "{output:?}"
            );
        }
    }
}

#[test]
fn bad_rules_are_named_on_stderr_and_exit_1() {
    let (_directory, file) = rules("bad.yaml", BAD);
    let (_other, good) = rules("good.yaml", GOOD);
    let output = run(&["check", &good, &file]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    let stderr = text(&output.stderr);
    assert!(stderr.contains("bad.yaml"), "{stderr}");
    assert!(
        !stderr.contains('\u{1b}'),
        "no colour off a terminal: {stderr:?}"
    );
}

#[test]
fn warnings_are_shown_and_only_strict_refuses_them() {
    let (_directory, file) = rules("doubtful.yaml", DOUBTFUL);
    for (flags, code) in [(&["check"][..], 0), (&["check", "--strict"], 1)] {
        let output = run(&[flags, &[&file]].concat());
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        assert!(text(&output.stderr).contains("doubtful.yaml"), "{output:?}");
        assert_eq!(output.stdout.is_empty(), code == 1, "{output:?}");

        let output = run(&[flags, &["--json", &file]].concat());
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(document["ok"], code == 0);
        assert_eq!(
            document["problems"].as_array().map(Vec::len),
            Some(1),
            "{document}"
        );
        assert!(
            document["rules"].is_object() || document["rules"].is_array(),
            "{document}"
        );
    }
}

#[test]
fn paths_that_are_not_there_exit_1() {
    for flags in [&["check"][..], &["check", "--json"]] {
        let output = run(&[flags, &["/no/such/rules.yaml"]].concat());
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let said = [output.stdout, output.stderr].concat();
        assert!(
            text(&said).contains("/no/such/rules.yaml"),
            "{}",
            text(&said)
        );
    }
}

#[test]
fn json_is_one_document_on_stdout_either_way() {
    for (content, code, ok) in [(GOOD, 0, true), (BAD, 1, false)] {
        let (_directory, file) = rules("rules.yaml", content);
        let output = run(&["check", "--json", &file]);
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        assert!(output.stderr.is_empty(), "{output:?}");
        let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(document["ok"], ok);
        assert_eq!(document["rules"].is_null(), !ok);
        let problems = document["problems"].as_array().unwrap();
        assert_eq!(problems.is_empty(), ok, "{document}");
        assert_eq!(
            document["problems"].to_string().contains("rules.yaml"),
            !ok,
            "{document}"
        );
    }
}

#[test]
fn bad_command_lines_and_settings_exit_64() {
    for args in [&["chek"][..], &["check"], &["--prot=1"], &["--port=http"]] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(64), "{args:?}: {output:?}");
        assert!(
            output.stdout.is_empty() && !output.stderr.is_empty(),
            "{output:?}"
        );
    }
    let output = slidegate(&["serve"])
        .env("LOG_LEVEL", "loud")
        .env("PORT", "")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(64), "{output:?}");
    let stderr = text(&output.stderr);
    assert!(
        stderr.contains("LOG_LEVEL=\"loud\"") && stderr.contains("PORT=\"\""),
        "{stderr}"
    );
}

#[test]
fn help_and_version_exit_0() {
    for args in [
        &["--help"][..],
        &["--version"],
        &["serve", "--help"],
        &["bench", "-h"],
    ] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(0), "{args:?}: {output:?}");
        assert!(
            !output.stdout.is_empty() && output.stderr.is_empty(),
            "{output:?}"
        );
    }
}

/// Called as the program it takes the place of, without arguments, it reads the environment and serves.
#[cfg(unix)]
#[test]
fn a_link_named_ratelimit_serves() {
    let directory = tempfile::tempdir().unwrap();
    let link = directory.path().join("ratelimit");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_slidegate"), &link).unwrap();
    let output = Command::new(&link)
        .env_clear()
        .env("GRPC_PORT", "grpc")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(64), "{output:?}");
    assert!(
        text(&output.stderr).contains("GRPC_PORT=\"grpc\""),
        "{output:?}"
    );
}

#[test]
fn a_port_that_is_taken_exits_70_and_is_named_in_the_log() {
    let (_directory, file) = rules("good.yaml", GOOD);
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let output = slidegate(&["--config", &file])
        .env("HOST", "127.0.0.1")
        .env("PORT", &port)
        .env("DEBUG_HOST", "127.0.0.1")
        .env("DEBUG_PORT", "0")
        .env("GRPC_HOST", "127.0.0.1")
        .env("GRPC_PORT", "0")
        .env("LOG_FORMAT", "json")
        .env("TRACING_ENABLED", "true")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(70), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    let lines: Vec<serde_json::Value> = text(&output.stderr)
        .lines()
        .map(|line| serde_json::from_str(line).expect(line))
        .collect();
    let says = |level: &str, what: &str| {
        lines
            .iter()
            .any(|line| line["level"] == level && line.to_string().contains(what))
    };
    assert!(says("warning", "TRACING_ENABLED"), "{lines:?}");
    assert!(says("error", &port), "{lines:?}");
}

/// The reader is gone before the first byte.
#[test]
fn a_closed_pipe_changes_no_exit_code() {
    let (_directory, bad) = rules("bad.yaml", BAD);
    let (_other, good) = rules("good.yaml", GOOD);
    let cases: [(&[&str], i32); 5] = [
        (&["serve", "--help"], 0),
        (&["--print-settings"], 0),
        (&["check", &good], 0),
        (&["check", "--json", &good], 0),
        (&["check", "--json", &bad], 1),
    ];
    for (args, code) in cases {
        let mut child = slidegate(args)
            .stdout(closed_pipe())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stderr = String::new();
        child
            .stderr
            .take()
            .unwrap()
            .read_to_string(&mut stderr)
            .unwrap();
        assert_eq!(
            child.wait().unwrap().code(),
            Some(code),
            "{args:?}: {stderr}"
        );
        assert_eq!(stderr, "", "{args:?}");
    }
}

/// The writing end of a pipe whose reading end is closed.
fn closed_pipe() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

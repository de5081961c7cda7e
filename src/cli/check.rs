//! `slidegate check`: reads rule files as the service would, and says what is wrong with them or what they come to.
//! How a problem looks and what a summary holds is decided by `rules`; here is only where it goes, and the verdict.

use std::{io, path::PathBuf};

use serde_json::json;

use super::{Exit, Streams};
use crate::rules::{
    compile::{self, Compiled},
    file::SourceFile,
    problem::{self, Problem},
    reload::Source,
    summary,
};

/// What can be asked.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Rule files, or directories of them
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// Print one JSON document, for programs
    #[arg(long)]
    json: bool,
    /// Take warnings for errors
    #[arg(long)]
    strict: bool,
    /// Let several files add to one domain, as MERGE_DOMAIN_CONFIG=true does
    #[arg(long)]
    merge_domains: bool,
}

/// What came of a check.
struct Outcome {
    files: Vec<SourceFile>,
    /// Errors, or what is only probably a mistake.
    problems: Vec<Problem>,
    /// The rules, or `None` where they have errors.
    compiled: Option<Compiled>,
}

/// Checks, reports, and tells how to end. Fails only where the report can't be written.
pub fn run(options: &Options, colour: bool, streams: &mut Streams<'_>) -> io::Result<Exit> {
    let files = match Source::Paths(options.paths.clone()).read() {
        Ok(files) => files,
        Err(error) if options.json => {
            let document =
                json!({ "ok": false, "error": error.to_string(), "problems": [], "rules": null });
            writeln!(streams.out, "{document:#}")?;
            return Ok(Exit::RulesInvalid);
        }
        Err(error) => {
            writeln!(streams.err, "slidegate: {error}")?;
            return Ok(Exit::RulesInvalid);
        }
    };
    let outcome = check(files, options.merge_domains);
    let refused = outcome.compiled.is_none() || options.strict && !outcome.problems.is_empty();
    let exit = if refused {
        Exit::RulesInvalid
    } else {
        Exit::Done
    };
    // A pipe that is closed early must not turn errors into success, so the verdict stands before anything is
    // written.
    let written = if options.json {
        write_json(&outcome, !refused, streams)
    } else {
        write_text(&outcome, refused, colour, streams)
    };
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(exit),
        written => written.map(|()| exit),
    }
}

/// Compiles the files as the service would.
fn check(files: Vec<SourceFile>, merge_domains: bool) -> Outcome {
    let options = compile::Options { merge_domains };
    match compile::compile(&files, options, None) {
        Ok(mut compiled) => Outcome {
            files,
            problems: std::mem::take(&mut compiled.warnings),
            compiled: Some(compiled),
        },
        Err(problems) => Outcome {
            files,
            problems: problems.0,
            compiled: None,
        },
    }
}

/// Problems to stderr; a summary to stdout where there is nothing to refuse.
fn write_text(
    outcome: &Outcome,
    refused: bool,
    colour: bool,
    streams: &mut Streams<'_>,
) -> io::Result<()> {
    if !outcome.problems.is_empty() {
        let rendered = problem::render(&outcome.problems, &outcome.files, colour);
        writeln!(streams.err, "{}", rendered.trim_end())?;
    }
    match &outcome.compiled {
        Some(_) if refused => writeln!(
            streams.err,
            "slidegate: warnings count as errors here (--strict)"
        ),
        Some(compiled) => {
            let summary = summary::summary(&compiled.rules);
            writeln!(streams.out, "{}", summary.trim_end())?;
            streams.out.flush()
        }
        None => Ok(()),
    }
}

/// One document: `ok` is the verdict, `problems` are errors or warnings, `rules` is `null` where there are errors.
fn write_json(outcome: &Outcome, ok: bool, streams: &mut Streams<'_>) -> io::Result<()> {
    let rules = outcome
        .compiled
        .as_ref()
        .map(|compiled| summary::Summary::of(&compiled.rules));
    let document = json!({ "ok": ok, "error": null, "problems": outcome.problems, "rules": rules });
    writeln!(streams.out, "{document:#}")?;
    streams.out.flush()
}

//! The command line: what may be typed, who is asked to do it, and with which exit code it ends. The flags of
//! `serve` are made from the table of settings; what values mean is decided there, not here.

mod check;
mod logging;

use std::{
    ffi::{OsStr, OsString},
    fmt::Display,
    future::Future,
    io::{self, Write},
    process::ExitCode,
};

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

use crate::{
    bench, server,
    settings::{self, Environment, Flags, Settings},
};

/// Where a command writes to.
pub struct Streams<'a> {
    /// Results.
    pub out: &'a mut dyn Write,
    /// Complaints, and the log.
    pub err: &'a mut dyn Write,
    /// Complaints go to a terminal, and may be coloured unless the environment asks otherwise.
    pub err_is_terminal: bool,
}

/// How the process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// 0: done.
    Done,
    /// 1: the checked rules have errors.
    RulesInvalid,
    /// 64: the command line or a setting can't be used (`EX_USAGE`).
    Usage,
    /// 70: what was asked for failed, such as a start on a port that is taken (`EX_SOFTWARE`).
    Failed,
    /// 74: the results could not be written (`EX_IOERR`).
    Output,
}

// === impl Exit ===

impl Exit {
    /// The number.
    pub const fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::RulesInvalid => 1,
            Self::Usage => 64,
            Self::Failed => 70,
            Self::Output => 74,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        exit.code().into()
    }
}

/// Does what the arguments say; the first one is the name the program was called by.
///
/// A reader that goes away (`slidegate check ... | head`) is no failure: the rest is simply not written.
pub fn run(
    args: impl IntoIterator<Item = OsString>,
    environment: &dyn Environment,
    streams: &mut Streams<'_>,
) -> Exit {
    let matches = match command().try_get_matches_from(with_command(args)) {
        Ok(matches) => matches,
        Err(error) if !error.use_stderr() => {
            return finish(
                write!(streams.out, "{}", error.render()),
                Exit::Done,
                streams,
            );
        }
        Err(error) => {
            return finish(
                write!(streams.err, "{}", error.render()),
                Exit::Usage,
                streams,
            );
        }
    };
    match matches.subcommand() {
        Some(("check", matches)) => match check::Options::from_arg_matches(matches) {
            Ok(options) => {
                let colour = may_colour(environment, streams.err_is_terminal);
                match check::run(&options, colour, streams) {
                    Ok(exit) => exit,
                    Err(error) => finish(Err(error), Exit::Done, streams),
                }
            }
            Err(error) => complain(error, Exit::Usage, streams),
        },
        Some(("bench", matches)) => match bench::Options::from_arg_matches(matches) {
            Ok(options) => match block_on(None, bench::run(options, streams.out)) {
                Ok(()) => Exit::Done,
                Err(error) if is_broken_pipe(&error) => Exit::Done,
                Err(error) => complain(format!("{error:#}"), Exit::Failed, streams),
            },
            Err(error) => complain(error, Exit::Usage, streams),
        },
        Some(("serve", matches)) => serve(matches, environment, streams),
        _ => complain(
            "no such command; see slidegate --help",
            Exit::Usage,
            streams,
        ),
    }
}

/// Everything that can be typed.
pub fn command() -> Command {
    Command::new("slidegate")
        .version(env!("CARGO_PKG_VERSION"))
        .about("An exact sliding-window rate-limit service for Envoy")
        .after_help("Without a command, slidegate serves; flags of serve may then follow at once.")
        .max_term_width(100)
        .subcommand_required(true)
        .subcommand(serve_command())
        .subcommand(
            check::Options::augment_args(Command::new("check"))
                .about("Check rule files: every error with its place, or a summary of the rules"),
        )
        .subcommand(
            bench::Options::augment_args(Command::new("bench"))
                .about("Put load on a rate-limit service and measure it"),
        )
}

/// `serve`, with a flag for each setting.
fn serve_command() -> Command {
    let flags = settings::rows().iter().map(|row| {
        let default = match row.default {
            "" => "none",
            default => default,
        };
        let arg = Arg::new(row.variable)
            .long(row.flag)
            .value_name(row.value)
            .help_heading(row.group)
            .help(format!(
                "{}\n[env: {}] [default: {default}]",
                row.meaning(),
                row.variable
            ))
            .action(if row.is_list {
                ArgAction::Append
            } else {
                ArgAction::Set
            });
        if row.is_switch {
            arg.num_args(0..=1)
                .require_equals(true)
                .default_missing_value("true")
        } else {
            arg
        }
    });
    Command::new("serve")
        .about("Serve Envoy over gRPC, and JSON, health and metrics over HTTP")
        .after_help(
            "Every setting is a flag and an environment variable; the flag wins. Durations are written \
             10s, 1h30m or 150us, sizes 512MiB or in bytes, switches true or false (the flag alone \
             means true).",
        )
        .next_line_help(true)
        .arg(
            Arg::new("print-settings")
                .long("print-settings")
                .action(ArgAction::SetTrue)
                .help("Print the settings in force and where each came from, and end"),
        )
        .args(flags)
}

/// The arguments with `serve` put in where no command is named: the program that ours takes the place of is
/// started without arguments, often under its own name (`ratelimit`).
fn with_command(args: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut args: Vec<_> = args.into_iter().collect();
    if args.is_empty() {
        args.push("slidegate".into());
    }
    let names_a_command = |arg: &OsString| {
        let about_the_program = ["-h", "--help", "-V", "--version"];
        !arg.as_encoded_bytes().starts_with(b"-")
            || about_the_program.iter().any(|flag| arg == OsStr::new(flag))
    };
    if !args.get(1).is_some_and(names_a_command) {
        args.insert(1, "serve".into());
    }
    args
}

/// Serves until a signal ends it.
fn serve(matches: &ArgMatches, environment: &dyn Environment, streams: &mut Streams<'_>) -> Exit {
    let flags = flags(matches);
    let settings = match Settings::read(&flags, environment) {
        Ok(settings) => settings,
        Err(invalid) => {
            let advice = "See slidegate serve --help for every setting.";
            return complain(format!("{invalid}\n{advice}"), Exit::Usage, streams);
        }
    };
    if matches.get_flag("print-settings") {
        let printed = print_settings(&flags, environment, streams.out);
        return finish(printed, Exit::Done, streams);
    }
    let colour = may_colour(environment, streams.err_is_terminal);
    if let Err(error) = logging::start(settings.log, colour) {
        return complain(error, Exit::Failed, streams);
    }
    if !settings.without_effect.is_empty() {
        tracing::warn!(
            variables = settings.without_effect.join(" "),
            "these variables are set, and have no effect in this version"
        );
    }
    match block_on(settings.worker_threads, server::run(settings)) {
        Ok(()) => Exit::Done,
        Err(error) => {
            tracing::error!("{error:#}");
            Exit::Failed
        }
    }
}

/// What was typed for the settings.
fn flags(matches: &ArgMatches) -> Flags {
    let mut flags = Flags::default();
    for row in settings::rows() {
        if let Some(values) = matches.get_many::<String>(row.variable) {
            let values: Vec<_> = values.map(String::as_str).collect();
            flags.set(row, values.join(","));
        }
    }
    flags
}

/// One line for each setting: `PORT=8080  # default`.
fn print_settings(
    flags: &Flags,
    environment: &dyn Environment,
    out: &mut dyn Write,
) -> io::Result<()> {
    for given in settings::given(flags, environment) {
        let pair = format!("{}={}", given.row.variable, given.shown());
        writeln!(out, "{pair:<50}  # {}", given.origin)?;
    }
    out.flush()
}

/// Runs a future to its end on a runtime of its own.
fn block_on(
    worker_threads: Option<usize>,
    future: impl Future<Output = anyhow::Result<()>>,
) -> anyhow::Result<()> {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    if let Some(threads) = worker_threads {
        runtime.worker_threads(threads);
    }
    let runtime = runtime.enable_all().build()?;
    let result = runtime.block_on(future);
    // Whoever had something to finish was waited for; a name that is still being resolved holds nobody up.
    runtime.shutdown_background();
    result
}

/// Whether colour is wanted: on a terminal, unless NO_COLOR is set (to anything) or the terminal knows none.
fn may_colour(environment: &dyn Environment, is_terminal: bool) -> bool {
    let is_set = |variable| {
        environment
            .get(variable)
            .is_some_and(|value| !value.is_empty())
    };
    is_terminal && !is_set("NO_COLOR") && environment.get("TERM").is_none_or(|term| term != "dumb")
}

/// Says what went wrong. There is nobody left to tell when that can't be written.
fn complain(what: impl Display, exit: Exit, streams: &mut Streams<'_>) -> Exit {
    let _ = writeln!(streams.err, "slidegate: {what}");
    exit
}

/// `exit`, unless the results could not be written; a reader that has seen enough is content with what it got.
fn finish(written: io::Result<()>, exit: Exit, streams: &mut Streams<'_>) -> Exit {
    match written.and_then(|()| streams.out.flush()) {
        Ok(()) => exit,
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => exit,
        Err(error) => complain(
            format!("can't write the results: {error}"),
            Exit::Output,
            streams,
        ),
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a run prints and how it ends, for commands that end by themselves.
    fn run<const N: usize>(
        args: &[&str],
        environment: [(&str, &str); N],
    ) -> (Exit, String, String) {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let mut streams = Streams {
            out: &mut out,
            err: &mut err,
            err_is_terminal: false,
        };
        let args = args.iter().map(OsString::from);
        let exit = super::run(args, &environment, &mut streams);
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (exit, text(out), text(err))
    }

    #[test]
    fn the_command_is_sound() {
        command().debug_assert();
    }

    #[test]
    fn help_lists_every_setting_with_variable_and_default() {
        let (exit, help, err) = run(&["slidegate", "serve", "--help"], []);
        assert_eq!((exit, err.as_str()), (Exit::Done, ""));
        let words = help.split_whitespace().collect::<Vec<_>>().join(" ");
        for row in settings::rows() {
            let default = if row.default.is_empty() {
                "none"
            } else {
                row.default
            };
            let entry = format!(
                "{} [env: {}] [default: {default}]",
                row.meaning(),
                row.variable
            );
            assert!(words.contains(&entry), "{entry}");
            assert!(help.contains(&format!("--{}", row.flag)), "{}", row.flag);
            assert!(
                help.contains(&format!("\n{}:\n", row.group)),
                "{}",
                row.group
            );
        }
        let widest = help.lines().map(|line| line.chars().count()).max();
        assert!(widest.is_some_and(|columns| columns <= 100), "{widest:?}");
    }

    #[test]
    fn no_command_means_serve() {
        let serve = |args: &[&str]| {
            let args = with_command(args.iter().map(OsString::from));
            args.get(1).is_some_and(|arg| arg == "serve")
        };
        assert!(serve(&[]));
        assert!(serve(&["slidegate"]));
        assert!(serve(&["/bin/ratelimit"]));
        assert!(serve(&["slidegate", "--port", "0"]));
        assert!(serve(&["slidegate", "serve", "--port", "0"]));
        for other in [
            "check",
            "bench",
            "--help",
            "-h",
            "--version",
            "-V",
            "help",
            "srve",
        ] {
            assert!(!serve(&["slidegate", other]), "{other}");
        }
    }

    #[test]
    fn version_and_help_go_to_stdout() {
        let (exit, out, err) = run(&["slidegate", "--version"], []);
        let version = format!("slidegate {}\n", env!("CARGO_PKG_VERSION"));
        assert_eq!(
            (exit, out.as_str(), err.as_str()),
            (Exit::Done, version.as_str(), "")
        );
        let (exit, out, _) = run(&["slidegate", "--help"], []);
        assert_eq!(exit, Exit::Done);
        for command in ["serve", "check", "bench"] {
            assert!(out.contains(&format!("\n  {command} ")), "{out}");
        }
    }

    #[test]
    fn a_bad_command_line_is_usage() {
        for args in [
            &["slidegate", "srve"][..],
            &["slidegate", "--prot", "1"],
            &["slidegate", "--port"],
            &["slidegate", "--port", "1", "--port", "2"],
            &["slidegate", "serve", "extra"],
            &["slidegate", "check"],
            &["slidegate", "check", "--colour", "x"],
        ] {
            let (exit, out, err) = run(args, []);
            assert_eq!((exit, out.as_str()), (Exit::Usage, ""), "{args:?}");
            assert!(err.contains("error: "), "{args:?}: {err}");
        }
        let (_, _, err) = run(&["slidegate", "--prot", "1"], []);
        assert!(
            err.contains("--port"),
            "names what was probably meant: {err}"
        );
    }

    #[test]
    fn bad_settings_are_usage_and_named_together() {
        let (exit, out, err) = run(
            &["slidegate", "--near-limit-ratio=2"],
            [("PORT", "http"), ("LOG_LEVEL", "")],
        );
        assert_eq!((exit, out.as_str()), (Exit::Usage, ""));
        assert!(
            err.starts_with("slidegate: 3 settings can't be used:\n"),
            "{err}"
        );
        for named in [
            "--near-limit-ratio=\"2\"",
            "PORT=\"http\"",
            "LOG_LEVEL=\"\"",
        ] {
            assert!(err.contains(named), "{named} in {err}");
        }
    }

    #[test]
    fn settings_in_force_are_printed_with_their_origin() {
        let args = [
            "slidegate",
            "--print-settings",
            "--shadow-mode",
            "--quota-mode=false",
            "--config",
            "a",
            "--config",
            "b,c",
            "--grpc-port=1",
        ];
        let environment = [
            ("PORT", "2"),
            ("BACKEND_TYPE", "memory"),
            ("REDIS_URL", "secret"),
        ];
        let (exit, out, err) = run(&args, environment);
        assert_eq!((exit, err.as_str()), (Exit::Done, ""));
        let lines: Vec<_> = out
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect();
        assert_eq!(lines.len(), settings::rows().len());
        for line in [
            "SHADOW_MODE=true # flag",
            "QUOTA_MODE=false # flag",
            "CONFIG_PATH=a,b,c # flag",
            "GRPC_PORT=1 # flag",
            "PORT=2 # variable",
            "DEBUG_PORT=6070 # default",
            "REDIS_URL=(not shown) # variable",
        ] {
            assert!(
                lines.iter().any(|printed| printed == line),
                "{line} in {out}"
            );
        }
    }

    #[test]
    fn readers_that_go_away_are_no_failure_and_full_disks_are() {
        struct Broken(io::ErrorKind);
        impl Write for Broken {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(self.0.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let exit = |kind, args: &[&str]| {
            let mut streams = Streams {
                out: &mut Broken(kind),
                err: &mut io::sink(),
                err_is_terminal: false,
            };
            super::run(args.iter().map(OsString::from), &[], &mut streams)
        };
        for args in [
            &["slidegate", "--help"][..],
            &["slidegate", "--print-settings"],
        ] {
            assert_eq!(exit(io::ErrorKind::BrokenPipe, args), Exit::Done);
            assert_eq!(exit(io::ErrorKind::StorageFull, args), Exit::Output);
        }
    }

    #[test]
    fn colour_is_for_terminals_that_want_it() {
        assert!(may_colour(&[], true));
        assert!(may_colour(&[("NO_COLOR", ""), ("TERM", "xterm")], true));
        assert!(!may_colour(&[], false));
        assert!(!may_colour(&[("NO_COLOR", "1")], true));
        assert!(!may_colour(&[("TERM", "dumb")], true));
    }
}

//! A real Envoy in front of the upstream, asking Slidegate.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use tempfile::TempDir;

use super::{free_port, http, process::Process, wait_until};

/// A running Envoy.
pub struct Envoy {
    pub process: Process,
    pub port: u16,
    admin_port: u16,
    _directory: TempDir,
}

/// Where a host of the rate-limit service listens.
pub enum Host<'a> {
    /// On this port of loopback.
    Port(u16),
    /// On this Unix socket.
    Socket(&'a Path),
}

/// What differs from test to test.
pub struct Setup<'a> {
    /// The hosts of the rate-limit service.
    pub rls: &'a [Host<'a>],
    /// How long Envoy waits for a decision: `5s`.
    pub timeout: &'a str,
    pub upstream_port: u16,
    /// The cluster's name, which Envoy also sends as `:authority`.
    pub cluster: &'a str,
    /// Routes, each with its rate limits: YAML, indented as deep as `@ROUTES@` is to hold it.
    pub routes: &'a str,
}

impl Envoy {
    pub fn start(setup: &Setup<'_>) -> Self {
        let (port, admin_port) = (free_port(), free_port());
        Self::start_with(&configuration(setup, port, admin_port), port, admin_port)
    }

    /// With a whole configuration, which has these ports.
    pub fn start_with(configuration: &str, port: u16, admin_port: u16) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let config = directory.path().join("envoy.yaml");
        fs::write(&config, configuration).expect("a file");
        let mut command = Command::new(binary());
        command
            .args([
                "--concurrency",
                "2",
                "--log-level",
                "warn",
                "--disable-hot-restart",
                "--config-path",
            ])
            .arg(&config);
        let mut envoy = Self {
            process: Process::start("envoy", &mut command),
            port,
            admin_port,
            _directory: directory,
        };
        wait_until("a ready envoy", || {
            assert!(
                envoy.process.ended().is_none(),
                "envoy ended:\n{}",
                envoy.process.output()
            );
            http::try_get(&format!("{}/ready", envoy.admin()))
                .is_some_and(|reply| reply.status == 200)
        });
        envoy
    }

    /// The address of a path behind it.
    pub fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    /// A counter or gauge; 0 if it is not there.
    pub fn stat(&self, name: &str) -> u64 {
        let page = http::get(&format!("{}/stats?filter={name}", self.admin())).body;
        let line = page
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        line.map_or(0, |number| number.parse().expect("a number"))
    }

    fn admin(&self) -> String {
        format!("http://127.0.0.1:{}", self.admin_port)
    }
}

/// Envoy's program: `ENVOY_BIN`, or what `integration/fetch-tools` fetched.
#[allow(clippy::disallowed_methods, reason = "a test's own setting")]
pub fn binary() -> PathBuf {
    let own = env::var("ENVOY_BIN").map(PathBuf::from);
    let binary = own.unwrap_or_else(|_| {
        PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/target/tools/envoy"))
    });
    assert!(
        binary.exists(),
        "no Envoy at {}: run `make test`, or integration/fetch-tools, or set ENVOY_BIN",
        binary.display()
    );
    binary
}

fn configuration(setup: &Setup<'_>, port: u16, admin_port: u16) -> String {
    let hosts: String = setup
        .rls
        .iter()
        .map(|host| match host {
            Host::Port(port) => {
                format!("socket_address: {{address: 127.0.0.1, port_value: {port}}}")
            }
            Host::Socket(path) => format!("pipe: {{path: \"{}\"}}", path.display()),
        })
        .map(|address| format!("{{endpoint: {{address: {{{address}}}}}}},"))
        .collect();
    include_str!("envoy.yaml")
        .replace("@PORT@", &port.to_string())
        .replace("@ADMIN@", &admin_port.to_string())
        .replace("@UPSTREAM@", &setup.upstream_port.to_string())
        .replace("@CLUSTER@", setup.cluster)
        .replace("@TIMEOUT@", setup.timeout)
        .replace("@RLS_HOSTS@", &hosts)
        .replace("@ROUTES@", setup.routes)
}

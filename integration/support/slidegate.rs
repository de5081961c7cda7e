//! The built binary with rules of the test's own.

use std::{fs, path::Path, process::Command};

use tempfile::TempDir;

use super::{free_port, http, process::Process, wait_until};

/// A running Slidegate.
pub struct Slidegate {
    pub process: Process,
    pub grpc_port: u16,
    pub http_port: u16,
    pub debug_port: u16,
    rules: TempDir,
}

impl Slidegate {
    /// With these rules, as one file, and the log in memory.
    pub fn start(rules: &str) -> Self {
        Self::start_with(rules, &[])
    }

    /// With further settings.
    pub fn start_with(rules: &str, env: &[(&str, &str)]) -> Self {
        let slidegate = Self::start_unchecked(rules, env);
        wait_until("a healthy slidegate", || slidegate.is_healthy());
        slidegate
    }

    /// Does not wait until it serves.
    pub fn start_unchecked(rules: &str, env: &[(&str, &str)]) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        fs::create_dir(directory.path().join("config")).expect("a directory");
        write(directory.path(), "rules.yaml", rules);
        let (grpc_port, http_port, debug_port) = (free_port(), free_port(), free_port());
        let mut command = Command::new(env!("CARGO_BIN_EXE_slidegate"));
        command
            .env_clear()
            .env("HOST", "127.0.0.1")
            .env("PORT", http_port.to_string())
            .env("GRPC_HOST", "127.0.0.1")
            .env("GRPC_PORT", grpc_port.to_string())
            .env("DEBUG_HOST", "127.0.0.1")
            .env("DEBUG_PORT", debug_port.to_string())
            .env("RUNTIME_ROOT", directory.path())
            .env("RUNTIME_WATCH_ROOT", "false")
            .env("BACKEND_TYPE", "memory")
            .env("LOG_LEVEL", "info")
            .env("DRAIN_DELAY", "200ms")
            .envs(env.iter().copied())
            .arg("serve");
        let process = Process::start("slidegate", &mut command);
        Self {
            process,
            grpc_port,
            http_port,
            debug_port,
            rules: directory,
        }
    }

    pub fn is_healthy(&self) -> bool {
        http::try_get(&format!("{}/healthcheck", self.http()))
            .is_some_and(|reply| reply.status == 200)
    }

    /// `http://host:port` of the HTTP port.
    pub fn http(&self) -> String {
        format!("http://127.0.0.1:{}", self.http_port)
    }

    /// `http://host:port` of the debug port.
    pub fn debug(&self) -> String {
        format!("http://127.0.0.1:{}", self.debug_port)
    }

    /// `http://host:port` of the gRPC port.
    pub fn grpc(&self) -> String {
        format!("http://127.0.0.1:{}", self.grpc_port)
    }

    /// Puts other rules in place of the first ones, as an editor does: a new file renamed over the old one.
    pub fn replace_rules(&self, rules: &str) {
        let config = self.rules.path().join("config");
        write(self.rules.path(), ".rules.yaml.new", rules);
        fs::rename(config.join(".rules.yaml.new"), config.join("rules.yaml")).expect("a rename");
    }

    /// One number of the metrics page, by name and labels as written there.
    pub fn metric(&self, series: &str) -> f64 {
        let page = http::get(&format!("{}/metrics", self.http())).body;
        let line = page
            .lines()
            .find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {series} in\n{page}"))
            .parse()
            .expect("a number")
    }
}

fn write(directory: &Path, name: &str, text: &str) {
    fs::write(directory.join("config").join(name), text).expect("a rule file");
}

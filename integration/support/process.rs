//! A child process that ends with its value.

use std::{
    fs::{self, File},
    process::{Child, Command, ExitStatus, Stdio},
};

use tempfile::TempDir;

/// A running program. Its output goes to a file, which is shown when a test fails.
pub struct Process {
    name: String,
    child: Child,
    directory: TempDir,
}

impl Process {
    /// Starts it.
    pub fn start(name: &str, command: &mut Command) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let log = File::create(directory.path().join("log")).expect("a log file");
        let child = command
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a file"))
            .stderr(log)
            .spawn()
            .unwrap_or_else(|error| panic!("can't start {name} ({command:?}): {error}"));
        Self {
            name: name.to_owned(),
            child,
            directory,
        }
    }

    /// What it wrote so far.
    pub fn output(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    /// How it ended, if it did.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("its status")
    }

    /// Sends a signal by name (`TERM`, `INT`).
    pub fn signal(&self, name: &str) {
        let id = self.child.id().to_string();
        let status = Command::new("kill")
            .args(["-s", name, &id])
            .status()
            .expect("kill");
        assert!(status.success(), "can't signal {}", self.name);
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> ExitStatus {
        super::wait_until(&format!("the end of {}", self.name), || {
            self.child.try_wait().expect("its status").is_some()
        });
        self.child.wait().expect("its status")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("=== {} wrote:\n{}", self.name, self.output());
        }
    }
}

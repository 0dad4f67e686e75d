//! `oclaw loop`: the real program, its children, and chats that go on meanwhile.

mod chats;
mod disk;
mod failing;
#[cfg(feature = "torch")]
mod faults;
#[cfg(feature = "torch")]
mod initial;
#[cfg(feature = "torch")]
mod ray;
mod refusals;
mod slurm;
mod stages;
#[cfg(feature = "torch")]
mod store;
mod terminal;
#[cfg(feature = "torch")]
mod whole;
#[cfg(feature = "torch")]
mod windows;

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::follow::Running;
use crate::harness::oclaw;

/// Longest wait for anything. The machine may be busy.
const PATIENCE: Duration = Duration::from_secs(240);

/// A loop's folder and configuration.
pub(super) struct Loop {
    folder: tempfile::TempDir,
    pub(super) front: String,
    #[cfg(feature = "torch")]
    pub(super) engine: String,
    /// What the loop finds in its environment.
    env: Vec<(String, String)>,
}

impl Loop {
    /// Writes a configuration; FRONT, ENGINE and FREE become addresses of this machine.
    pub(super) fn new(config: &str) -> Self {
        // Held together, so that they differ.
        let ports = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let [front, engine, free] = ports.map(|port| port.local_addr().unwrap().to_string());
        let text = config.replace("FRONT", &front).replace("ENGINE", &engine);
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("oclaw.toml"), text.replace("FREE", &free)).unwrap();
        Self {
            folder,
            front,
            #[cfg(feature = "torch")]
            engine,
            env: Vec::new(),
        }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(super) fn command(&self) -> assert_cmd::Command {
        let mut command = oclaw();
        command.args(["loop", "oclaw.toml"]).current_dir(self.folder.path());
        command.env_remove("OMP_WAIT_POLICY").envs(self.env.clone());
        command
    }

    pub(super) fn start(&self) -> Running {
        Running::start(&self.command())
    }

    /// Asks how the loop is.
    pub(super) fn status(&self) -> Value {
        let mut command = oclaw();
        command.args(["loop", "--status", "run"]).current_dir(self.folder.path());
        command.env_remove("OMP_WAIT_POLICY").envs(self.env.clone());
        let output = command.output().unwrap();
        serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)))
    }

    /// Waits until the state is as wanted.
    pub(super) fn until(&self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let start = Instant::now();
        loop {
            let status = self.status();
            conserved(&status);
            if wanted(&status) {
                return status;
            }
            assert!(start.elapsed() < PATIENCE, "{what}: {status:#}\n{}", self.logs());
            std::thread::park_timeout(Duration::from_millis(100));
        }
    }

    /// Returns the process of a child, if it runs.
    pub(super) fn pid(&self, child: &str) -> Option<i64> {
        let status: Value =
            serde_json::from_slice(&fs::read(self.path("run/state/status.json")).ok()?).ok()?;
        let children = status["children"].as_array()?.clone();
        children.iter().find(|it| it["name"] == child)?["pid"].as_i64()
    }

    /// Waits until a child runs. That it was started is said before it is written down.
    pub(super) fn running(&self, child: &str) -> i64 {
        let start = Instant::now();
        loop {
            if let Some(pid) = self.pid(child) {
                return pid;
            }
            assert!(start.elapsed() < PATIENCE, "{child} does not run\n{}", self.logs());
            std::thread::park_timeout(Duration::from_millis(20));
        }
    }

    fn logs(&self) -> String {
        let mut text = String::new();
        let entries = fs::read_dir(self.path("run/logs")).into_iter().flatten();
        for path in entries.map(|entry| entry.unwrap().path()) {
            let said = fs::read_to_string(&path).unwrap_or_default();
            let tail: Vec<_> = said.lines().rev().take(12).collect();
            let tail: Vec<_> = tail.into_iter().rev().collect();
            text.push_str(&format!("== {}\n{}\n", path.display(), tail.join("\n")));
        }
        text
    }
}

impl Drop for Loop {
    /// Serve and engines outlive a loop that was killed.
    fn drop(&mut self) {
        let entries = fs::read_dir(self.path("run/state")).into_iter().flatten();
        for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
            if path.to_string_lossy().ends_with(".process.json") {
                let record: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
                let pid = record["pid"].as_u64().unwrap();
                // A number that is used again is somebody else.
                if runs_here(pid, self.folder.path()) {
                    signal(pid as i64, "KILL");
                }
            }
        }
    }
}

fn runs_here(pid: u64, folder: &Path) -> bool {
    fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|cwd| cwd.starts_with(folder))
}

pub(super) fn signal(pid: i64, name: &str) {
    let kill = format!("kill -{name} {pid} 2>/dev/null || true");
    assert!(std::process::Command::new("sh").args(["-c", &kill]).status().unwrap().success());
}

fn sum(counts: &Value) -> i64 {
    counts.as_object().unwrap().values().map(|count| count.as_i64().unwrap()).sum()
}

/// Captured = trained + refused + pending, always; or it is said why nobody knows.
pub(super) fn conserved(status: &Value) {
    let account = &status["account"];
    if account.is_null() {
        assert!(status["untold"].is_string(), "{status:#}");
        return;
    }
    let number = |name: &str| account[name].as_i64().unwrap();
    let told = number("trained") + sum(&account["refused"]) + sum(&account["pending"]);
    assert_eq!(number("captured"), told, "{account}");
    assert_eq!(number("lost"), 0, "{account}");
    assert_eq!(number("unreadable"), 0, "{account}");
}

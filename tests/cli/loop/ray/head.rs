//! A real head on loopback, of the package that `.ci/run` installs.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};

/// The head, and a folder for all that it writes.
pub(super) struct Head {
    pub(super) url: String,
    folder: tempfile::TempDir,
}

impl Head {
    /// Starts one. Ray gives its own processes half a minute, which is little on a busy
    /// machine: it gets a second and a third try.
    pub(super) fn start(packages: &Path) -> Self {
        let mut said = String::new();
        for _ in 0..3 {
            match Self::try_start(packages) {
                Ok(head) => return head,
                Err(problem) => said = problem,
            }
        }
        panic!("{said}");
    }

    fn try_start(packages: &Path) -> Result<Self, String> {
        // Its sockets must have short names.
        let folder = tempfile::Builder::new().prefix("ray").tempdir_in("/tmp").unwrap();
        // Below the ports of its workers, which start at 10002, is none of them.
        let ports: Vec<u16> = (0..3).map(|_| free_port()).collect();
        // Whatever was started ends with it, also where not all of it comes up.
        let head = Self { url: format!("http://127.0.0.1:{}", ports[1]), folder };
        let started = Command::new("python3")
            .args(["-m", "ray.scripts.scripts", "start", "--head", "--disable-usage-stats"])
            .args(["--node-ip-address", "127.0.0.1", "--port", &ports[0].to_string()])
            .args(["--dashboard-host", "127.0.0.1", "--dashboard-port", &ports[1].to_string()])
            .args(["--ray-client-server-port", &ports[2].to_string()])
            .args(["--dashboard-agent-listen-port", "0"])
            .args(["--min-worker-port", "0", "--max-worker-port", "0"])
            // What a job runs in asks for none; workers would be started for each.
            .args(["--num-cpus", "0", "--num-gpus", "2", "--object-store-memory", "80000000"])
            .arg("--temp-dir")
            .arg(head.folder.path())
            .env("PYTHONPATH", packages)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        match started.status.success() {
            true => Ok(head),
            false => Err(String::from_utf8_lossy(&started.stderr).into_owned()),
        }
    }
}

impl Drop for Head {
    /// Ends every process that was started with our folder, and what these started.
    fn drop(&mut self) {
        let folder = self.folder.path().display().to_string();
        for _ in 0..2 {
            for pid in processes_of(&folder) {
                let _ = Command::new("kill").args(["-9", &pid]).stderr(Stdio::null()).status();
            }
        }
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn processes_of(folder: &str) -> Vec<String> {
    let listed = Command::new("ps").args(["-eo", "pid=,ppid=,args="]).output().unwrap();
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    let rows: Vec<Vec<&str>> =
        listed.lines().map(|line| line.split_whitespace().collect()).collect();
    let own = std::process::id().to_string();
    let named = |row: &&Vec<&str>| row[0] != own && row[2..].iter().any(|it| it.contains(folder));
    let mut found: Vec<String> = rows.iter().filter(named).map(|row| row[0].to_owned()).collect();
    // Workers have names that tell nothing.
    loop {
        let more: Vec<String> = rows
            .iter()
            .filter(|row| {
                found.iter().any(|pid| pid == row[1]) && !found.contains(&row[0].to_owned())
            })
            .map(|row| row[0].to_owned())
            .collect();
        if more.is_empty() {
            return found;
        }
        found.extend(more);
    }
}

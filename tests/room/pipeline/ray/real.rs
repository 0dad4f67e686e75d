//! A real head on loopback, of the package that `.ci/run` installs.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use oclaw::pipeline::{Job, Ray, State};

use crate::harness::root;

const PATIENCE: Duration = Duration::from_secs(180);

/// The head, and a folder for all that it writes.
struct Head {
    url: String,
    folder: tempfile::TempDir,
}

impl Head {
    fn start(packages: &Path) -> Self {
        // Its sockets must have short names.
        let folder = tempfile::Builder::new().prefix("ray").tempdir_in("/tmp").unwrap();
        // Below the ports of its workers, which start at 10002, is none of them.
        let ports: Vec<u16> = (0..3).map(|_| free_port()).collect();
        let started = Command::new("python3")
            .args(["-m", "ray.scripts.scripts", "start", "--head", "--disable-usage-stats"])
            .args(["--node-ip-address", "127.0.0.1", "--port", &ports[0].to_string()])
            .args(["--dashboard-host", "127.0.0.1", "--dashboard-port", &ports[1].to_string()])
            .args(["--ray-client-server-port", &ports[2].to_string()])
            .args(["--dashboard-agent-listen-port", "0"])
            .args(["--min-worker-port", "0", "--max-worker-port", "0"])
            .args(["--num-cpus", "2", "--num-gpus", "2", "--object-store-memory", "80000000"])
            .arg("--temp-dir")
            .arg(folder.path())
            .env("PYTHONPATH", packages)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&started.stderr).into_owned();
        assert!(started.status.success(), "{said}");
        Self { url: format!("http://127.0.0.1:{}", ports[1]), folder }
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

async fn wait(ray: &mut Ray, job: &Job, wanted: impl Fn(State) -> bool) -> State {
    let begun = Instant::now();
    loop {
        let state = ray.poll(job).await;
        if let Ok(state) = state
            && wanted(state)
        {
            return state;
        }
        assert!(begun.elapsed() < PATIENCE, "{state:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test]
async fn a_real_head_runs_oclaw() {
    let packages = root().join("target/tools/ray");
    if !packages.join("ray").is_dir() {
        println!("skipped: no Ray in target/tools/ray (`.ci/run` installs it)");
        return;
    }
    let head = tokio::task::spawn_blocking(move || Head::start(&packages)).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut ray = Ray::new(&head.url, &folder.path().display().to_string(), None).unwrap();
    let job = |id: &str, argv: &[&str]| Job {
        id: id.to_owned(),
        name: id.split('-').next().unwrap().to_owned(),
        argv: argv.iter().map(|word| (*word).to_owned()).collect(),
        env: BTreeMap::from([("WORD".to_owned(), "it's".to_owned())]),
        gpus: Vec::new(),
        log: folder.path().join(format!("{id}.log")),
        folder: folder.path().to_owned(),
        outlives: false,
    };
    let oclaw = assert_cmd::cargo::cargo_bin!("oclaw").display().to_string();
    let read = |job: &Job| std::fs::read_to_string(&job.log).unwrap_or_default();

    // The head answers before it can take jobs: the same start is asked for again.
    let judge = job("judge-1", &[&oclaw, "judge", "no such.parquet", "--rules"]);
    let begun = Instant::now();
    while let Err(error) = ray.start(&judge).await {
        assert!(begun.elapsed() < PATIENCE, "{error}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    ray.start(&judge).await.unwrap();
    // A device is asked for by its number, and Ray says which one it is.
    let mut device = job("device-1", &["sh", "-c", "echo $WORD on $CUDA_VISIBLE_DEVICES; pwd"]);
    device.gpus = vec![7];
    ray.start(&device).await.unwrap();
    let ended = |state| matches!(state, State::Ended { .. });
    let state = wait(&mut ray, &judge, ended).await;
    assert_eq!(state, State::Ended { code: Some(1) });
    ray.logs(&judge).await.unwrap();
    let log = read(&judge);
    assert_eq!(log.matches("oclaw judge: cannot read `no such.parquet`").count(), 1, "{log}");
    assert_eq!(wait(&mut ray, &device, ended).await, State::Ended { code: Some(0) });
    ray.logs(&device).await.unwrap();
    ray.logs(&device).await.unwrap();
    let log = read(&device);
    let lines = |end: &str| log.lines().filter(|line| line.ends_with(end)).count();
    assert_eq!(lines("it's on 0") + lines("it's on 1"), 1, "{log}");
    assert_eq!(lines(&folder.path().canonicalize().unwrap().display().to_string()), 1, "{log}");

    // A follower that is asked to end does, by itself.
    std::fs::create_dir(folder.path().join("turns")).unwrap();
    let words = ["judge", "--follow", "turns", "-o", "judged", "--rules"];
    let follower = job("follow-1", &[&[oclaw.as_str()][..], &words].concat());
    ray.start(&follower).await.unwrap();
    wait(&mut ray, &follower, |state| state == State::Running).await;
    let begun = Instant::now();
    while !folder.path().join("judged/.lock").exists() {
        assert!(begun.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    ray.stop(&follower, false).await.unwrap();
    assert!(ended(wait(&mut ray, &follower, ended).await));
    ray.logs(&follower).await.unwrap();
    let log = read(&follower);
    let words: Vec<_> = log.split_whitespace().collect();
    assert!(words.join(" ").ends_with("ties 0 shards 0"), "{log}");
    tokio::task::spawn_blocking(|| drop(head)).await.unwrap();
}

//! A loop whose processes are jobs of a Slurm cluster: of one in a folder, whose
//! commands run what is submitted.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::super::follow::Running;
use super::chats::converse;
use super::failing::child;
use super::stages::{ONLY_JUDGE, config, engine, pending};
use super::{Loop, signal};
use crate::harness::{program, root};

/// The cluster.
struct Cluster(tempfile::TempDir);

impl Cluster {
    fn new() -> Self {
        let cluster = Self(tempfile::tempdir().unwrap());
        for folder in ["commands", "jobs"] {
            fs::create_dir(cluster.at(folder)).unwrap();
        }
        fs::write(cluster.at("runs"), "").unwrap();
        let script = fs::read_to_string(root().join("tests/room/pipeline/slurm/fake.sh")).unwrap();
        let script = script.replace("@FOLDER@", &cluster.0.path().display().to_string());
        for name in ["sbatch", "squeue", "sacct", "scancel"] {
            let path = cluster.at("commands").join(name);
            program(&path, &script);
        }
        cluster
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A loop that finds these commands first.
    fn command(&self, looped: &Loop) -> assert_cmd::Command {
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = looped.command();
        command.env("PATH", format!("{}:{path}", self.at("commands").display()));
        command
    }

    fn start(&self, looped: &Loop) -> Running {
        Running::start(&self.command(looped))
    }

    /// Lists the jobs: number, name, state.
    fn jobs(&self) -> Vec<(u64, String, String)> {
        let read = |number: u64, what: &str| {
            fs::read_to_string(self.at(&format!("jobs/{number}.{what}"))).unwrap_or_default()
        };
        (1001..)
            .map(|number| (number, read(number, "name"), read(number, "state")))
            .take_while(|(_, name, _)| !name.is_empty())
            .collect()
    }

    fn pid(&self, number: u64) -> Option<i64> {
        fs::read_to_string(self.at(&format!("jobs/{number}.pid"))).ok()?.trim().parse().ok()
    }

    /// Returns the number of the newest job of a stage.
    fn newest(&self, stage: &str) -> u64 {
        let named = |name: &str| name.contains(&format!("-{stage}-"));
        self.jobs().into_iter().rev().find(|(_, name, _)| named(name)).unwrap().0
    }
}

impl Drop for Cluster {
    /// Jobs outlive a loop that failed.
    fn drop(&mut self) {
        for (number, _, state) in self.jobs() {
            if let Some(pid) = self.pid(number).filter(|_| state == "RUNNING") {
                signal(pid, "KILL");
            }
        }
    }
}

#[test]
fn jobs_outlive_the_loop_are_taken_up_started_again_and_ended() {
    let (cluster, upstream) = (Cluster::new(), engine());
    let rest = format!(
        "[judge]\nrules = \"\"\npoll = \"100ms\"\n{ONLY_JUDGE}restart-wait = \"100ms\"\n\
         [scheduler]\nkind = \"slurm\"\npartition = \"gpu\"\nargs = [\"--time=1-0\"]\npoll = \"200ms\"\n"
    );
    let looped = Loop::new(&config(&upstream.url(), &rest));
    let mut first = cluster.start(&looped);
    first.hears("serve: ready");
    first.hears("judge: started");
    first.hears("advantage: started");
    converse(&looped.front, "watched", 4);
    looped.until("turns are ready", |status| pending(status, "nobody") == 3);
    let arguments = fs::read_to_string(cluster.at("jobs/1001.arguments")).unwrap();
    assert!(arguments.contains("--partition=gpu\n--time=1-0\n"), "{arguments}");
    first.kill();
    // Nobody watches: the jobs go on all the same.
    converse(&looped.front, "alone", 4);
    let mut second = cluster.start(&looped);
    for stage in ["serve", "judge", "advantage"] {
        second.hears(&format!("{stage}: taken up"));
    }
    looped.until("turns are ready", |status| pending(status, "nobody") == 6);
    assert_eq!(cluster.jobs().len(), 3, "{:?}", cluster.jobs());
    signal(cluster.pid(cluster.newest("judge")).unwrap(), "KILL");
    second.hears("judge: was killed: started again in 0.1 s");
    second.hears("judge: started");
    converse(&looped.front, "again", 2);
    looped.until("turns are ready", |status| pending(status, "nobody") == 7);
    let (code, words) = second.stop();
    assert_eq!(code, Some(0), "{words}");
    let jobs = cluster.jobs();
    let states: Vec<&str> = jobs.iter().map(|(_, _, state)| state.as_str()).collect();
    assert_eq!(states.iter().filter(|state| **state == "COMPLETED").count(), 3, "{jobs:?}");
    assert_eq!(states.iter().filter(|state| **state == "FAILED").count(), 1, "{jobs:?}");
    assert_eq!(jobs.len(), 4, "{jobs:?}");
    let log = fs::read_to_string(looped.path("run/logs/judge.log")).unwrap();
    assert!(!log.is_empty(), "a job writes its log itself");
}

/// A loop that asks for what is not there ends at once, and says what.
#[test]
fn without_the_commands_nothing_begins() {
    let upstream = engine();
    let rest = format!("[judge]\nrules = \"\"\n{ONLY_JUDGE}[scheduler]\nkind = \"slurm\"\n");
    let looped = Loop::new(&config(&upstream.url(), &rest));
    let mut command = looped.command();
    command.env("PATH", looped.path("nowhere"));
    let output = command.timeout(super::PATIENCE).assert().code(4);
    let said = String::from_utf8(output.get_output().stderr.clone()).unwrap();
    let words = "cannot run `sbatch`, a command of the scheduler: No such file or directory";
    assert!(said.contains(words) && said.contains("hint: start the loop where"), "{said}");

    // Nor without the one that only the end takes.
    let cluster = Cluster::new();
    fs::remove_file(cluster.at("commands/scancel")).unwrap();
    let output = cluster.command(&looped).timeout(super::PATIENCE).assert().code(4);
    let said = String::from_utf8(output.get_output().stderr.clone()).unwrap();
    assert!(said.contains("cannot run `scancel`, a command of the scheduler"), "{said}");
}

/// What cannot be ended because the controller is away is ended when it is back.
#[test]
fn a_process_that_does_not_end_is_killed_once_that_can_be_asked_for() {
    let (cluster, upstream) = (Cluster::new(), engine());
    let stubborn = "command = [\"sh\", \"-c\", \"trap '' TERM; while :; do sleep 0.1; done\"]";
    let rest = format!(
        "[judge]\nrules = \"\"\npoll = \"100ms\"\n{ONLY_JUDGE}grace = \"1s\"\n\
         [scheduler]\nkind = \"slurm\"\npoll = \"100ms\"\n"
    );
    let config = config(&upstream.url(), &rest);
    let looped = Loop::new(&config.replacen("url", &format!("{stubborn}\nurl"), 1));
    let mut running = cluster.start(&looped);
    running.hears("advantage: started");
    running.signal("TERM");
    let number = cluster.newest("engine-policy");
    let calls = || fs::read_to_string(cluster.at("calls")).unwrap().lines().count();
    let wait = |wanted: &dyn Fn() -> bool| {
        let start = Instant::now();
        while !wanted() {
            assert!(start.elapsed() < super::PATIENCE, "{}", looped.logs());
            std::thread::park_timeout(Duration::from_millis(20));
        }
    };
    wait(&|| cluster.at(&format!("jobs/{number}.cancelled")).exists());
    fs::write(cluster.at("controller-away"), "").unwrap();
    // More than the time of grace: a look and a question each time.
    let before = calls();
    wait(&|| calls() > before + 40);
    fs::remove_file(cluster.at("controller-away")).unwrap();
    let (code, words) = running.end();
    assert_eq!(code, Some(0), "{words}");
    let killed = "engine-policy: did not end in time, and is killed";
    assert_eq!(words.matches(killed).count(), 1, "{words}");
}

/// A controller that goes away is shown, and changes nothing: jobs go on.
#[test]
fn a_controller_that_goes_away_is_shown() {
    let (cluster, upstream) = (Cluster::new(), engine());
    let rest = format!(
        "[judge]\nrules = \"\"\npoll = \"100ms\"\n{ONLY_JUDGE}\
         [scheduler]\nkind = \"slurm\"\npoll = \"200ms\"\n"
    );
    let looped = Loop::new(&config(&upstream.url(), &rest));
    let mut running = cluster.start(&looped);
    running.hears("judge: started");
    running.hears("advantage: started");
    fs::write(cluster.at("controller-away"), "").unwrap();
    assert_eq!(converse(&looped.front, "away", 3), 0);
    let away = "Unable to contact slurm controller";
    looped.until("the trouble is shown, and turns are judged", |status| {
        let trouble = child(status, "judge")["trouble"].as_str().map(str::to_owned);
        trouble.is_some_and(|it| it.contains(away)) && pending(status, "nobody") == 2
    });
    fs::remove_file(cluster.at("controller-away")).unwrap();
    looped.until("it is over", |status| child(status, "judge")["trouble"].is_null());
    assert_eq!(cluster.jobs().len(), 3, "{:?}", cluster.jobs());
    let (code, words) = running.stop();
    assert_eq!(code, Some(0), "{words}");
    let told = words.lines().filter(|line| line.starts_with("judge: ") && line.contains(away));
    assert_eq!(told.count(), 1, "{words}");
}

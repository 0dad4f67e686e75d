//! Each state that Slurm knows, in the words of fixtures/slurm.

use std::fs;

use oclaw::pipeline::{Error, Job, Slurm, State};

use super::FakeSlurm;
use crate::harness::{fixture, program};

fn reply(name: &str) -> String {
    fs::read_to_string(fixture(&format!("slurm/{name}"))).unwrap()
}

/// What a job is in a state, by what the documentation says of that. Of one that
/// failed its exit code tells more.
fn meaning(word: &str, code: Option<State>) -> State {
    let table = fs::read(fixture("slurm/states.csv")).unwrap();
    let mut rows = csv::Reader::from_reader(table.as_slice()).into_records().map(Result::unwrap);
    let row = rows.find(|row| &row[0] == word).unwrap_or_else(|| panic!("no row for {word}"));
    match &row[1] {
        "waits" => State::Pending,
        "runs" => State::Running,
        "succeeded" => State::Ended { code: Some(0) },
        "failed with its exit code" => code.unwrap(),
        told => State::Over { told: told.to_owned().leak() },
    }
}

/// Lets a command reply to anything with a text.
fn says(fake: &FakeSlurm, name: &str, text: &str, code: i32) {
    let path = fake.at("commands").join(name);
    let stream = if code == 0 { "" } else { " >&2" };
    let file = fake.at(&format!("{name}.txt"));
    fs::write(&file, text).unwrap();
    program(&path, &format!("#!/bin/sh\ncat '{}'{stream}\nexit {code}\n", file.display()));
}

/// The scope that a job's name has.
async fn title(fake: &FakeSlurm) -> String {
    fake.slurm(&[]).start(&fake.job("x")).await.unwrap();
    fake.read("jobs/1001.name").strip_suffix('x').unwrap().to_owned()
}

#[tokio::test]
async fn each_state_of_the_queue_is_read() {
    let fake = FakeSlurm::new();
    let queue = reply("squeue.txt").replace("@TITLE@", &title(&fake).await);
    says(&fake, "squeue", &queue, 0);
    let mut slurm = fake.slurm(&[]);
    slurm.look().await.unwrap();
    let mut seen = 0;
    for line in queue.lines() {
        let columns: Vec<&str> = line.splitn(3, '|').collect();
        let Some((_, number)) = columns[2].rsplit_once("judge-") else { continue };
        // What has ended is asked for once more, by the accounting.
        says(&fake, "sacct", &format!("{}|7:0\n", columns[1]), 0);
        let wanted = meaning(columns[1], Some(State::Ended { code: Some(7) }));
        let job = fake.job(&format!("judge-{number}"));
        assert_eq!(slurm.poll(&job).await.unwrap(), wanted, "{line}");
        seen += 1;
    }
    assert_eq!(seen, 28);
}

#[tokio::test]
async fn each_state_of_the_accounting_is_read_with_its_code() {
    let fake = FakeSlurm::new();
    let job = fake.job("judge-1");
    let mut slurm = fake.slurm(&[]);
    slurm.start(&job).await.unwrap();
    fake.forget(1001);
    let codes = [
        ("1:0", State::Ended { code: Some(1) }),
        ("3:0", State::Ended { code: Some(3) }),
        ("2:0", State::Ended { code: Some(2) }),
        ("0:9", State::Ended { code: None }),
        ("0:0", State::Over { told: "failed, nobody knows how" }),
    ];
    let text = reply("sacct.txt");
    for line in text.lines() {
        let (_, told) = line.split_once('|').unwrap();
        let (word, code) = told.split_once('|').unwrap();
        says(&fake, "sacct", &format!("{told}\n"), 0);
        let by_code = codes.iter().find(|(text, _)| *text == code).map(|(_, state)| *state);
        let wanted = meaning(word, by_code);
        assert_eq!(slurm.poll(&job).await.unwrap(), wanted, "{line}");
    }
    assert_eq!(text.lines().filter(|line| line.contains("|FAILED|")).count(), codes.len());
}

#[tokio::test]
async fn a_number_comes_with_its_cluster_or_without() {
    let fake = FakeSlurm::new();
    for (line, number) in reply("sbatch.txt").lines().zip(["65541", "65542"]) {
        says(&fake, "sbatch", &format!("{line}\n"), 0);
        says(&fake, "squeue", "", 0);
        says(&fake, "sacct", "", 0);
        let job = fake.job(&format!("judge-{number}"));
        let mut slurm = fake.slurm(&[]);
        slurm.start(&job).await.unwrap();
        // Whoever asks by another number gets no answer.
        let script = format!("#!/bin/sh\ncase \"$*\" in *{number}*) echo RUNNING ;; esac\n");
        fs::write(fake.at("commands/squeue"), script).unwrap();
        assert_eq!(slurm.poll(&job).await.unwrap(), State::Running, "{line}");
    }
    says(&fake, "squeue", "", 0);
    says(&fake, "sbatch", "Submitted batch job 5\n", 0);
    let error = fake.slurm(&[]).start(&fake.job("judge-3")).await.unwrap_err().to_string();
    assert_eq!(error, "`sbatch`: it said `Submitted batch job 5`");
}

/// Polls a job that is known by its number, and that both commands tell nothing of.
async fn told(fake: &FakeSlurm, slurm: &mut Slurm, job: &Job, error: &str) -> Result<State, Error> {
    says(fake, "squeue", &format!("{error}\n"), 1);
    slurm.poll(job).await
}

#[tokio::test]
async fn errors_are_told_apart() {
    let fake = FakeSlurm::new();
    let job = fake.job("judge-1");
    let mut slurm = fake.slurm(&[]);
    slurm.start(&job).await.unwrap();
    says(&fake, "sacct", "COMPLETED|0:0\n", 0);
    let mut kinds = Vec::new();
    for line in reply("errors.txt").lines() {
        let state = told(&fake, &mut slurm, &job, line).await;
        kinds.push(match &state {
            // The queue has forgotten it, and the accounting has not.
            Ok(state) => {
                assert_eq!(*state, State::Ended { code: Some(0) }, "{line}");
                "gone"
            }
            Err(Error::Scheduler { whom, problem }) => {
                assert_eq!((whom.as_str(), problem.as_str()), ("squeue", line));
                "no news"
            }
            Err(error) => panic!("{error}"),
        });
    }
    let expected = ["gone", "gone", "gone", "no news", "no news", "no news", "no news", "no news"];
    assert_eq!(kinds, expected);
    // Nobody keeps accounts, in the words of old and new versions.
    for line in reply("errors.txt").lines().filter(|line| line.ends_with("disabled")) {
        says(&fake, "sacct", &format!("{line}\n"), 1);
        says(&fake, "squeue", "TIMEOUT\n", 0);
        let state = slurm.poll(&job).await.unwrap();
        assert_eq!(state, State::Over { told: "ran into its time limit" }, "{line}");
    }
}

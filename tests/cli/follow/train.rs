//! The whole chain of followers, and `train --follow` alone: no turn is lost, no
//! turn is trained twice, whatever is killed.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use oclaw::table::{Format, read_turns};
use oclaw::train::Ledger;
use oclaw::trajectory::words::NextStateKind;
use oclaw::trajectory::{Turn, Writer};

use super::{Run, Running, all_names, talk, turns_of};
use crate::forge::{STAGES, finished, write, write_made};
use crate::harness::{PATIENCE, fixture_models as models};

/// Of the three turns of a shard two are corrected, and nothing follows the last.
fn shard(run: &Run, number: i64) {
    let mut turns = turns_of(&format!("s{number}"), number * 100, 3);
    turns[2] = Turn { next_state: None, next_state_kind: NextStateKind::None, ..turns[2].clone() };
    let path = run.at("turns").join(format!("{number}.parquet"));
    write(&path, Format::Parquet, &[Writer::Serve], &turns);
}

fn model() -> String {
    models().join("tiny-qwen3").to_str().unwrap().to_owned()
}

fn training(run: &Run, out: &str, further: &[&str]) -> assert_cmd::Command {
    let mut command = run.command("train", ("ready", out));
    command.args(["--lr", "1e-3", "--batch-turns", "3", "--model", &model()]).args(further);
    command
}

/// Returns how many turns the newest policy has learned from, and how many it has
/// refused, by reason.
fn ledger(run: &Run, out: &str) -> BTreeMap<String, usize> {
    let ledger = Ledger::read(&run.at(out).join("latest/oclaw/ledger.parquet")).unwrap();
    let mut counts = BTreeMap::new();
    for turn in read_turns(&[run.at("ready")]).unwrap() {
        let outcome = match ledger.entry(&turn.turn_id) {
            None => "pending".to_owned(),
            Some(entry) => entry.refused.clone().unwrap_or_else(|| "consumed".to_owned()),
        };
        *counts.entry(outcome).or_default() += 1;
    }
    counts
}

fn latest(run: &Run, out: &str) -> PathBuf {
    std::fs::read_link(run.at(out).join("latest")).unwrap()
}

fn counts(pairs: &[(&str, usize)]) -> BTreeMap<String, usize> {
    pairs.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
}

#[test]
fn the_chain_loses_no_turn() {
    let run = Run::new();
    let model = model();
    for name in ["judged", "hinted", "taught", "ready"] {
        std::fs::create_dir(run.at(name)).unwrap();
    }
    let stages: [(&str, (&str, &str), &[&str]); 4] = [
        ("judge", ("turns", "judged"), &["--rules"]),
        ("hint", ("judged", "hinted"), &["--from-feedback"]),
        ("teacher-lp", ("hinted", "taught"), &["--model", &model]),
        ("advantage", ("taught", "ready"), &[]),
    ];
    let stages = stages.map(|(stage, folders, flags)| run.start(stage, folders, flags));
    let mut trainer = Running::start(&training(&run, "policy", &[]));
    for number in 1..=2 {
        shard(&run, number);
    }
    // Four turns: one step of three.
    trainer.hears("policy ");
    trainer.kill();
    for number in 3..=4 {
        shard(&run, number);
    }
    let mut trainer = Running::start(&training(&run, "policy", &[]));
    trainer.hears("resuming at step 1");
    trainer.hears("step 2");
    trainer.hears("4.parquet: 3 turns");
    for stage in stages {
        let (code, words) = stage.stop();
        assert_eq!(code, Some(0), "{words}");
        assert!(words.lines().any(|line| line == "shards 4"), "{words}");
    }
    let (code, words) = trainer.stop();
    assert_eq!(code, Some(0), "{words}");
    assert!(words.contains("2/3 turns wait for a full batch"), "{words}");
    assert!(words.contains("passed over: "), "{words}");
    assert_eq!(latest(&run, "policy"), PathBuf::from("step-000002"));
    for name in ["judged", "hinted", "taught", "ready"] {
        assert_eq!(run.names(name), run.names("turns"), "{name}");
    }
    let ids = |folder: &str| -> Vec<String> {
        let turns = read_turns(&[run.at(folder)]).unwrap();
        turns.into_iter().map(|turn| turn.turn_id).collect()
    };
    assert_eq!(ids("ready"), ids("turns"));
    let before = ledger(&run, "policy");
    assert_eq!(before["consumed"], 6);
    assert_eq!(before.values().sum::<usize>(), 12);

    // What is left makes a step as soon as nobody waits for more.
    let mut rest = training(&run, "policy", &["--once", "--max-wait", "0"]);
    rest.assert().success();
    let expected = counts(&[("consumed", 8), ("no_next_state, no_hint", 4)]);
    assert_eq!(ledger(&run, "policy"), expected);
    assert_eq!(latest(&run, "policy"), PathBuf::from("step-000003"));

    // The same without a kill: the same weights, to the bit.
    training(&run, "straight", &["--once", "--max-wait", "0"]).assert().success();
    assert_eq!(ledger(&run, "straight"), expected);
    let weights = |out: &str| std::fs::read(run.at(out).join("latest/model.safetensors")).unwrap();
    assert!(weights("policy") == weights("straight"), "other weights");
    // All is done: nothing is trained again, and of the shards only the ids are read.
    let ran = training(&run, "straight", &["--once", "--max-wait", "0"]).assert().success();
    let words = talk(ran.get_output());
    let passed = "passed over: 12 turns that the ledger had, 4 whole shards";
    assert!(words.contains(passed) && !words.contains("in the ledger"), "{words}");
    assert_eq!(latest(&run, "straight"), PathBuf::from("step-000003"));
}

fn ready(run: &Run, name: &str, turns: u32) {
    let turns: Vec<_> = (1..=turns).map(|number| finished(name, number)).collect();
    write(&run.at("ready").join(name), Format::Parquet, &STAGES, &turns);
}

#[test]
fn a_batch_may_be_waited_for_only_so_long() {
    let run = Run::new();
    std::fs::create_dir(run.at("ready")).unwrap();
    let mut trainer = Running::start(&training(&run, "policy", &["--max-wait", "10ms"]));
    trainer.hears("starting from the model as step 0");
    ready(&run, "a.parquet", 1);
    trainer.hears("turns 1");
    ready(&run, "b.parquet", 4);
    trainer.hears("turns 3");
    trainer.hears("turns 1");
    let (code, words) = trainer.stop();
    assert_eq!(code, Some(0), "{words}");
    assert!(words.contains("3 steps of 2 shards"), "{words}");
}

/// Who is told no estimator trains by the one that made the first shard.
#[test]
fn the_first_shard_says_how_it_is_trained() {
    let run = Run::new();
    let turns: Vec<_> = (1..=3).map(|number| finished("s", number)).collect();
    std::fs::create_dir(run.at("judged")).unwrap();
    write(&run.at("judged/a.parquet"), Format::Parquet, &[Writer::Serve, Writer::Judge], &turns);
    let mut command = run.command("advantage", ("judged", "ready"));
    command.args(["--estimator", "grpo", "--once"]).assert().success();
    let ran = training(&run, "policy", &["--once"]).assert().success();
    let words = talk(ran.get_output());
    assert!(words.contains("the estimator is `grpo`, as the table's"), "{words}");
    assert!(words.contains("step 1 turns 3"), "{words}");
    assert_eq!(estimator(&run, "policy"), "grpo");
}

/// Returns the estimator that the newest policy's record tells.
fn estimator(run: &Run, out: &str) -> String {
    let record = std::fs::read(run.at(out).join("latest/oclaw/train.json")).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
    record["settings"]["estimator"].as_str().unwrap().to_owned()
}

fn made(run: &Run, name: &str, by: &str, numbers: RangeInclusive<u32>) {
    let turns: Vec<_> = numbers.map(|number| finished("s", number)).collect();
    write_made(&run.at("ready").join(name), by, &turns);
}

/// Started again, a run finds a shard of another estimator first, and goes on as it would
/// have.
#[test]
fn a_run_goes_on_by_the_estimator_that_it_began_with() {
    let run = Run::new();
    std::fs::create_dir(run.at("ready")).unwrap();
    made(&run, "a.parquet", "grpo", 1..=3);
    training(&run, "policy", &["--once"]).assert().success();
    made(&run, "b.parquet", "combine", 4..=6);
    let words = talk(training(&run, "policy", &["--once"]).assert().success().get_output());
    for told in [
        "the estimator is `grpo`, as the newest policy's",
        "the table was made with `combine`, training is with `grpo`",
        "step 2 turns 3",
    ] {
        assert!(words.contains(told), "{told}: {words}");
    }
    assert_eq!(estimator(&run, "policy"), "grpo");
    // The same without an end between.
    training(&run, "straight", &["--once"]).assert().success();
    assert_eq!(latest(&run, "straight"), PathBuf::from("step-000002"));
    let weights = |out: &str| std::fs::read(run.at(out).join("latest/model.safetensors")).unwrap();
    assert!(weights("policy") == weights("straight"), "other weights");
    // What is given goes before it.
    made(&run, "c.parquet", "grpo", 7..=9);
    let more = ["--once", "--estimator", "combine"];
    let words = talk(training(&run, "policy", &more).assert().success().get_output());
    assert!(!words.contains("as the newest policy's"), "{words}");
    assert_eq!(estimator(&run, "policy"), "combine");
}

/// A flag that does not go with the estimator of the shards is no fault of theirs.
#[test]
fn a_flag_that_does_nothing_ends_the_run_at_once() {
    let run = Run::new();
    std::fs::create_dir(run.at("ready")).unwrap();
    made(&run, "a.parquet", "topk-kl", 1..=3);
    let refused = |flags: &[&str]| {
        let mut command = training(&run, "policy", flags);
        command.args(["--subset", "teacher"]).timeout(PATIENCE);
        let ran = command.assert().code(2);
        let words = talk(ran.get_output());
        let told = "`--subset` does nothing under `--estimator topk-kl`";
        assert!(words.contains(told) && words.contains("hint: leave `--subset` out"), "{words}");
        assert!(!words.contains("trying again") && !words.contains("listed as"), "{words}");
        assert!(!run.at("policy/failed.jsonl").exists());
    };
    refused(&["--once"]);
    // Also of a run that would wait for more.
    refused(&[]);
    assert!(!run.at("policy").exists());
    training(&run, "policy", &["--once"]).assert().success();
    // And before any shard is read where a policy has the estimator.
    refused(&["--once"]);
    assert_eq!(latest(&run, "policy"), PathBuf::from("step-000001"));
}

#[test]
fn a_broken_shard_is_listed_and_training_goes_on() {
    let run = Run::new();
    std::fs::create_dir(run.at("ready")).unwrap();
    ready(&run, "a.parquet", 2);
    ready(&run, "b.parquet", 1);
    let whole = std::fs::read(run.at("ready/a.parquet")).unwrap();
    std::fs::write(run.at("ready/c.parquet"), &whole[..whole.len() - 9]).unwrap();
    std::os::unix::fs::symlink("nowhere", run.at("ready/d.parquet")).unwrap();
    let ran = training(&run, "policy", &["--once", "--shard-tries", "1"]).assert().code(3);
    let words = super::talk(ran.get_output());
    assert!(words.contains("step 1 turns 3"), "{words}");
    assert!(words.contains("listed as failed: 2 shards"), "{words}");
    let listed = run.listed("policy");
    let names: Vec<_> = listed.iter().map(|line| line["shard"].as_str().unwrap()).collect();
    assert_eq!(names, ["c.parquet", "d.parquet"]);
    assert!(all_names(&run.at("policy")).contains(&"latest".to_owned()));
}

#[test]
fn train_says_what_it_cannot_follow() {
    let run = Run::new();
    std::fs::create_dir(run.at("ready")).unwrap();
    for (command, words) in [
        (run.command("train", ("nowhere", "policy")).arg("--once"), "to follow"),
        (training(&run, "policy", &["x.parquet"]).arg("--once"), "and nothing beside it"),
        (training(&run, "policy", &["--max-wait", "soon"]).arg("--once"), "--max-wait"),
    ] {
        let ran = command.assert().code(2);
        let said = super::talk(ran.get_output());
        assert!(said.contains(words), "{words}: {said}");
    }
    assert!(!run.at("policy").exists());
}

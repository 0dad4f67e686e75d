//! The file of a loop beside commands that read one file: what concerns a folder that
//! is followed alone is passed over there, and refused where a person types it.

use std::fs;
use std::path::{Path, PathBuf};

use oclaw::table::Format;

use super::written;
use crate::forge::{STAGES, finished, write};
use crate::harness::fake_engine::FakeEngine;
use crate::harness::oclaw;

/// Writes a file of the first kind, with every setting of a follower in it.
fn follower(folder: &Path) {
    let mut text = written(folder, "embedded").replace("batch-turns = 16", "batch-turns = 2");
    assert!(text.contains("\nmax-wait = \"30m\"\n"), "{text}");
    let following = "follow = \"nowhere\"\npoll = \"9s\"\nonce = true\nshard-tries = 9\n";
    for (stage, further) in [
        ("judge", following.to_owned()),
        ("hint", following.to_owned()),
        ("teacher-lp", following.to_owned()),
        ("advantage", following.to_owned()),
        (
            "train",
            format!(
                "{following}when-idle = \"10m\"\nspool = \"nowhere\"\nhours = [\"22:00-06:00\"]\n"
            ),
        ),
        ("sync-weights", "follow = \"nowhere\"\nevery = 3\n".to_owned()),
    ] {
        let header = format!("[{stage}]\n");
        assert!(text.contains(&header), "{stage}");
        text = text.replace(&header, &format!("{header}{further}"));
    }
    fs::write(folder.join("oclaw.toml"), text).unwrap();
}

/// Runs a command with the file; returns what it said.
fn runs(folder: &Path, words: &[&str]) -> String {
    let mut command = oclaw();
    let output = command.args(words).args(["--config", "oclaw.toml"]).current_dir(folder).assert();
    let said = String::from_utf8(output.get_output().stderr.clone()).unwrap();
    assert_eq!(output.get_output().status.code(), Some(0), "{words:?}: {said}");
    said
}

fn table(folder: &Path, name: &str, stages: usize) -> PathBuf {
    let turns = [finished("s", 1), finished("t", 1)];
    write(&folder.join(name), Format::Parquet, &STAGES[..stages], &turns)
}

#[test]
fn one_file_is_read_with_the_file_of_a_loop() {
    let folder = tempfile::tempdir().unwrap();
    follower(folder.path());
    for (stage, before) in [("judge", 1), ("hint", 2), ("advantage", 4)] {
        table(folder.path(), "in.parquet", before);
        let out = format!("{stage}.parquet");
        let said = runs(folder.path(), &[stage, "in.parquet", "-o", &out]);
        let note = "note: `IN` takes the place of `follow` in `oclaw.toml` line ";
        assert!(said.contains(note), "{stage}: {said}");
        assert!(folder.path().join(out).is_file(), "{stage}");
    }
    let policy = folder.path().join("policy/step-000007");
    fs::create_dir_all(&policy).unwrap();
    fs::write(policy.join("config.json"), "{}").unwrap();
    fs::write(policy.join("model.safetensors"), "").unwrap();
    let engine = FakeEngine::sglang();
    let push = ["sync-weights", "policy/step-000007", "--engine", &engine.url()];
    let said = runs(folder.path(), &push);
    assert!(said.contains("`POLICY` takes the place of `follow`"), "{said}");
    assert_eq!(engine.version().as_deref(), Some("7"));
}

#[cfg(feature = "torch")]
#[test]
fn one_file_is_scored_and_trained_with_the_file_of_a_loop() {
    let folder = tempfile::tempdir().unwrap();
    follower(folder.path());
    let model = crate::harness::fixture_models().join("tiny-qwen3").display().to_string();
    table(folder.path(), "in.parquet", 3);
    let flags = ["teacher-lp", "in.parquet", "-o", "out.parquet", "--no-cache", "--model", &model];
    runs(folder.path(), &flags);
    assert!(folder.path().join("out.parquet").is_file());
    let method = oclaw::advantage::Method::new(oclaw::advantage::Estimator::Combine);
    let turns = [finished("s", 1), finished("t", 1)];
    let turns = turns.map(|turn| oclaw::advantage::note(turn, false, &method));
    write(&folder.path().join("in.parquet"), Format::Parquet, &STAGES, &turns);
    runs(folder.path(), &["train", "in.parquet", "--out", "policies", "--model", &model]);
    assert!(folder.path().join("policies/step-000001").is_dir());
}

#[test]
fn what_is_typed_is_refused_without_a_folder_to_follow() {
    let folder = tempfile::tempdir().unwrap();
    table(folder.path(), "in.parquet", 1);
    for words in [
        &["judge", "in.parquet", "--poll", "1s"][..],
        &["hint", "in.parquet", "--once"],
        &["teacher-lp", "in.parquet", "--shard-tries", "2"],
        &["advantage", "in.parquet", "--poll", "1s"],
        &["train", "in.parquet", "--out", "out", "--max-wait", "1s"],
        &["train", "in.parquet", "--out", "out", "--hours", "22:00-06:00"],
        &["sync-weights", "policy", "--engine", "http://127.0.0.1:1", "--every", "2"],
    ] {
        let output = oclaw().args(words).current_dir(folder.path()).assert().code(2);
        let said = String::from_utf8(output.get_output().stderr.clone()).unwrap();
        assert!(said.contains("--follow <FOLDER>"), "{words:?}: {said}");
    }
    let both = ["sync-weights", "policy", "--follow", ".", "--engine", "http://127.0.0.1:1"];
    let output = oclaw().args(both).current_dir(folder.path()).assert().code(2);
    let said = String::from_utf8(output.get_output().stderr.clone()).unwrap();
    assert!(said.contains("give either POLICY or `--follow FOLDER`"), "{said}");
}

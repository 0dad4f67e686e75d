//! `oclaw stats`: figures and verdicts of tables and runs.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use oclaw::table::Format;
use serde_json::Value;

use crate::forge::{STAGES, captured, finished, write};
use crate::harness::{PATIENCE, oclaw, until};

fn json(arguments: &[&str], folder: &Path) -> Vec<Value> {
    let output = oclaw().current_dir(folder).arg("stats").args(arguments).assert().success();
    let text = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn verdicts(told: &Value) -> Vec<String> {
    let health = told["health"].as_array().unwrap();
    health.iter().map(|answer| answer["verdict"].as_str().unwrap().to_owned()).collect()
}

fn shard(path: &Path, session: &str, turns: u32) {
    let turns: Vec<_> = (1..=turns).map(|number| finished(session, number)).collect();
    write(path, Format::Parquet, &STAGES, &turns);
}

const METRICS: &str = r#"{"step":1,"turns":2,"tokens":20,"loss":0.5,"entropy":2.0,"log_prob_gap":0.01,"advantage_std":0.8,"clip_fraction":0.1}
{"step":2,"turns":2,"tokens":20,"loss":0.4,"entropy":1.9,"log_prob_gap":0.2,"advantage_std":0.8,"clip_fraction":null}
{"step":3,"turns":2,"tok"#;

#[test]
fn a_table_is_counted() {
    let folder = tempfile::tempdir().unwrap();
    shard(&folder.path().join("a.parquet"), "s", 2);
    shard(&folder.path().join("b.parquet"), "t", 1);
    let told = json(&["--json", "a.parquet", "b.parquet"], folder.path());
    assert_eq!(told.len(), 1);
    assert!(told[0]["input"].is_null());
    let figures = &told[0]["figures"];
    assert_eq!(figures["turns"]["rows"], 3);
    assert_eq!(figures["turns"]["sessions"], 2);
    assert_eq!(figures["rewards"]["mean"], -1.0);
    assert_eq!(figures["rewards"]["score -1"], 3);
    assert_eq!(figures["votes"]["valid"], 6);
    assert_eq!(figures["signal"]["kind opd+rl"], 3);
    assert_eq!(verdicts(&told[0]), ["healthy", "watch", "unknown"]);
    let shards = json(&["--json", "--per-shard", "a.parquet", "b.parquet"], folder.path());
    let rows: Vec<_> = shards.iter().map(|told| told["figures"]["turns"]["rows"].clone()).collect();
    assert_eq!(rows, [2, 1, 3]);
    assert_eq!(shards[0]["input"], "a.parquet");
}

#[test]
fn the_page_says_verdict_figure_and_advice() {
    let folder = tempfile::tempdir().unwrap();
    shard(&folder.path().join("a.parquet"), "s", 2);
    let output = oclaw().current_dir(folder.path()).args(["stats", "a.parquet"]).assert().success();
    let page = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    let words = page.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [
        "Is exploration collapsing? healthy surprise 0.8750, watch below 0.1",
        "Is the signal alive? watch teacher_failures 0.5000, watch above 0.05: look at",
        "Is it drifting off policy? unknown no data: log_prob_gap not known",
        "rows 2 sessions 1",
        "tokens mean 3.0000",
        "repetition -",
    ] {
        assert!(words.contains(part), "{part}\n{page}");
    }
    assert!(output.get_output().stderr.is_empty());
}

#[test]
fn csv_has_one_value_per_line() {
    let folder = tempfile::tempdir().unwrap();
    shard(&folder.path().join("a.parquet"), "s", 1);
    let output = oclaw()
        .current_dir(folder.path())
        .args(["stats", "--csv", "--per-shard", "a.parquet"])
        .assert()
        .success();
    let text = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    assert!(text.starts_with("input,group,name,value\n"), "{text}");
    for line in [
        "a.parquet,verdict,signal,watch\n",
        "all,verdict,drift,unknown\n",
        "all,drift,log_prob_gap,\n",
        "all,turns,rows,1\n",
    ] {
        assert!(text.contains(line), "{line}{text}");
    }
}

#[test]
fn a_run_has_stages_and_steps() {
    let folder = tempfile::tempdir().unwrap();
    for stage in ["turns", "ready", "policy/step-000001/oclaw"] {
        fs::create_dir_all(folder.path().join("run").join(stage)).unwrap();
    }
    let run = folder.path().join("run");
    write(
        &run.join("turns/a.parquet"),
        Format::Parquet,
        &STAGES[..1],
        &[captured("s", 1), captured("s", 2)],
    );
    shard(&run.join("ready/a.parquet"), "s", 1);
    let record = r#"{"step":1,"metrics":{"step":1,"entropy":9.0}}"#;
    fs::write(run.join("policy/step-000001/oclaw/train.json"), record).unwrap();
    let told = json(&["--json", "run"], folder.path());
    assert_eq!(told[0]["stages"], serde_json::json!({"turns": 2, "ready": 1}));
    assert_eq!(told[0]["step"]["entropy"], 9.0);
    let figures = &told[0]["figures"];
    assert_eq!(figures["turns"]["rows"], 2, "the same turn counts once");
    assert_eq!(figures["signal"]["kind opd+rl"], 1, "as the stage has it that knows most");
    // A last line that is still being written is not there yet.
    fs::write(run.join("metrics.jsonl"), METRICS).unwrap();
    let told = json(&["--json", "run"], folder.path());
    assert_eq!(told[0]["step"]["step"], 2);
    assert_eq!(verdicts(&told[0]), ["healthy", "watch", "ill"]);
    let strict =
        oclaw().current_dir(folder.path()).args(["stats", "--strict", "run"]).assert().code(3);
    let words = String::from_utf8_lossy(&strict.get_output().stdout).into_owned();
    assert!(words.contains("log_prob_gap 0.2000, ill above 0.1"), "{words}");
    // Without the step that was ill nothing is.
    let first = METRICS.lines().next().unwrap();
    fs::write(run.join("metrics.jsonl"), format!("{first}\n")).unwrap();
    oclaw().current_dir(folder.path()).args(["stats", "--strict", "run"]).assert().success();
}

#[test]
fn metrics_may_stand_beside_a_table() {
    let folder = tempfile::tempdir().unwrap();
    shard(&folder.path().join("a.parquet"), "s", 1);
    fs::write(folder.path().join("m.jsonl"), METRICS).unwrap();
    let told = json(&["--json", "a.parquet", "--metrics", "m.jsonl"], folder.path());
    assert_eq!(verdicts(&told[0])[2], "ill");
    fs::write(folder.path().join("m.jsonl"), "{\"step\":1}\nnonsense\n").unwrap();
    let broken = oclaw()
        .current_dir(folder.path())
        .args(["stats", "a.parquet", "--metrics", "m.jsonl"])
        .assert()
        .code(1);
    let words = String::from_utf8_lossy(&broken.get_output().stderr).into_owned();
    assert!(words.contains("`m.jsonl`, line 2: no metrics of a step"), "{words}");
}

#[test]
fn bounds_need_no_input() {
    let output = oclaw().args(["stats", "--bounds"]).assert().success();
    let text = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    for bound in oclaw::health::BOUNDS {
        assert!(text.contains(bound.name), "{}", bound.name);
    }
}

#[test]
fn an_empty_folder_is_no_run() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("turns")).unwrap();
    let output = oclaw().current_dir(folder.path()).args(["stats", "."]).assert().code(1);
    let words = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
    assert!(words.contains("`.`: neither tables nor metrics\nhint: a run has `turns`"), "{words}");
}

/// A running `oclaw stats --live`, whose looks are read line by line; killed if the
/// test fails.
struct Live {
    child: Child,
    lines: Receiver<String>,
}

impl Live {
    fn start(folder: &Path, arguments: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_oclaw"))
            .args(["stats", "--live", "--json", "--every", "20ms"])
            .args(arguments)
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let data = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in data.lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        Self { child, lines }
    }

    /// Returns the next look.
    fn look(&self) -> Value {
        serde_json::from_str(&self.lines.recv_timeout(PATIENCE).unwrap()).unwrap()
    }

    /// Returns the rows that the next look counts.
    fn rows(&self) -> u64 {
        self.look()["figures"]["turns"]["rows"].as_u64().unwrap()
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn live_looks_until_it_is_told_to_stop() {
    let folder = tempfile::tempdir().unwrap();
    let mut live = Live::start(folder.path(), &["."]);
    assert_eq!(live.rows(), 0, "nothing is finished yet");
    let aside = tempfile::tempdir_in(folder.path()).unwrap();
    for (name, expected) in [("a.parquet", 2), ("b.parquet", 4)] {
        shard(&aside.path().join(name), name, 2);
        fs::rename(aside.path().join(name), folder.path().join(name)).unwrap();
        until("a look that counts the new shard", || live.rows() == expected);
    }
    fs::remove_file(folder.path().join("a.parquet")).unwrap();
    until("a look without the shard that is gone", || live.rows() == 2);
    let id = live.child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    let mut code = None;
    until("its end", || {
        code = live.child.try_wait().unwrap();
        code.is_some()
    });
    assert_eq!(code.unwrap().code(), Some(0));
}

#[test]
fn a_fresh_run_is_waited_for_and_metrics_may_stand_beside_it() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("run/turns")).unwrap();
    let live = Live::start(folder.path(), &["run", "--metrics", "m.jsonl"]);
    let first = live.look();
    assert_eq!((&first["step"], &first["figures"]["turns"]["rows"]), (&Value::Null, &0.into()));
    shard(&folder.path().join("a.parquet"), "s", 2);
    fs::rename(folder.path().join("a.parquet"), folder.path().join("run/turns/a.parquet")).unwrap();
    until("a look that counts the shard", || live.rows() == 2);
    fs::write(folder.path().join("m.jsonl"), METRICS).unwrap();
    let mut told = Value::Null;
    until("a look that has the metrics", || {
        told = live.look();
        told["step"]["step"] == 2
    });
    assert_eq!(verdicts(&told)[2], "ill");
}

#[test]
fn a_line_without_a_step_is_no_metrics() {
    let folder = tempfile::tempdir().unwrap();
    shard(&folder.path().join("a.parquet"), "s", 1);
    fs::write(folder.path().join("m.jsonl"), "{\"session_id\":\"s\",\"loss\":1.0}\n").unwrap();
    let broken = oclaw()
        .current_dir(folder.path())
        .args(["stats", "a.parquet", "--metrics", "m.jsonl"])
        .assert()
        .code(1);
    let words = String::from_utf8_lossy(&broken.get_output().stderr).into_owned();
    assert!(words.contains("line 1: no metrics of a step: missing field `step`"), "{words}");
}

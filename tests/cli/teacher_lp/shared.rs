//! What `oclaw teacher-lp --model` saves itself: beginnings that sequences share,
//! and scores that a killed run has paid for.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use oclaw::cache::Cache;
use oclaw::table::{Format, Provenance, Sink, Target};
use oclaw::template::{Chat, Rendering, enhanced_messages};
use oclaw::trajectory::{Turn, Writer, turn};
use serde_json::{Map, Value, json};

use crate::cli::judge::read;
use crate::forge::{captured, write};
use crate::harness::{fixture_models as models, oclaw_keeping};

const STAGES: [Writer; 3] = [Writer::Serve, Writer::Judge, Writer::Hint];
/// A shorter beginning is not shared.
const LEAST_SHARED: usize = 16;
const PATIENCE: Duration = Duration::from_secs(60);

fn messages() -> Vec<Value> {
    let asked = "Name a colour that goes well with grey walls and a wooden floor.";
    vec![json!({"role": "user", "content": asked})]
}

fn hinted(number: u32, hints: &[&str]) -> Turn {
    Turn {
        messages: Value::from(messages()).to_string(),
        prompt_ids: None,
        response_ids: Some(vec![82, 101, 100, 1017]),
        rollout_log_probs: Some(vec![Some(-1.0); 4]),
        hints: Some(hints.iter().map(|hint| (*hint).to_owned()).collect()),
        ..captured("s", number)
    }
}

/// Returns the tokens to score and those left to compute, of sequences that share
/// what they can.
fn work(mut sequences: Vec<Vec<i32>>) -> (usize, usize) {
    sequences.sort();
    let (mut scored, mut computed, mut last) = (0, 0, Vec::new());
    for ids in sequences {
        let same = ids.iter().zip(&last).take_while(|(left, right)| left == right).count();
        scored += ids.len();
        computed += ids.len() - if same < LEAST_SHARED { 0 } else { same };
        last = ids;
    }
    (scored, computed)
}

/// The hints of a turn begin alike, and so does its plain prompt, which the same
/// model scores first.
#[test]
fn what_a_turns_sequences_share_is_computed_once() {
    let folder = tempfile::tempdir().unwrap();
    let model = models().join("tiny-qwen3");
    let hints = ["Say blue.", "One word.", "One word only."];
    let turn = hinted(1, &hints);
    let input = write(
        &folder.path().join("a.parquet"),
        Format::Parquet,
        &STAGES,
        std::slice::from_ref(&turn),
    );
    let chat = Chat::load(&model).unwrap();
    let sequence = |messages: &[Value]| {
        let extra = Map::new();
        let rendering =
            Rendering { messages, tools: None, add_generation_prompt: true, extra: &extra };
        let prompt = chat.prompt_ids(&rendering).unwrap();
        [prompt, turn.response_ids.clone().unwrap()].concat()
    };
    let enhanced =
        hints.map(|hint| sequence(&enhanced_messages(&messages(), hint).unwrap())).to_vec();
    let all = [enhanced.clone(), vec![sequence(&messages())]].concat();
    let without = ["--topk", "0"];
    for (flags, (scored, computed)) in [(&without[..], work(enhanced)), (&[], work(all))] {
        let run = oclaw_keeping(folder.path())
            .args(["teacher-lp", "--no-cache", "--model"])
            .arg(&model)
            .args(flags)
            .arg("-o")
            .args([&folder.path().join("b.parquet"), &input])
            .assert()
            .success();
        let talk = String::from_utf8_lossy(&run.get_output().stderr).into_owned();
        let talk = talk.split_whitespace().collect::<Vec<_>>().join(" ");
        let row = format!("tokens computed, of those to score {computed} of {scored}");
        assert!(computed < scored && talk.contains(&row), "{row}: {talk}");
    }
}

/// Writes turns as a stream, some in a first batch and the rest in a second.
fn stream(path: PathBuf, batches: &[&[Turn]]) -> Vec<u8> {
    let mut sink: Option<Sink> = None;
    for turns in batches {
        let batch = turn::batch(&STAGES, turns).unwrap();
        let target = Target::Path(path.clone());
        let (schema, provenance) = (batch.schema(), Provenance::default());
        let new = || Sink::create(&target, Some(Format::Ipc), schema, &provenance).unwrap();
        sink.get_or_insert_with(new).write(&batch).unwrap();
    }
    sink.unwrap().finish().unwrap();
    std::fs::read(path).unwrap()
}

/// Returns how many scores are kept in a test's cache folder.
fn kept(folder: &Path) -> u64 {
    let path = folder.join("oclaw/answers.sqlite");
    if !path.is_file() {
        return 0;
    }
    // Another process is at it: whatever is in the way now is gone the next time.
    let groups = Cache::open(&path).and_then(|cache| cache.groups(&[])).unwrap_or_default();
    groups.iter().filter(|group| group.kind == "teacher-lp").map(|group| group.entries).sum()
}

#[test]
fn a_killed_run_goes_on_where_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let (output, model) = (folder.path().join("taught.parquet"), models().join("tiny-qwen3"));
    let turns: Vec<Turn> =
        (1..=9).map(|number| hinted(number, &[&format!("Hint {number}.")])).collect();
    let (first, rest) = turns.split_at(6);
    let begun = stream(folder.path().join("begun"), &[first]);
    let whole = stream(folder.path().join("whole"), &[first, rest]);
    // All but the mark of the end.
    let begun = &begun[..begun.len() - 8];
    assert!(whole.starts_with(begun));

    let mut child = Command::new(env!("CARGO_BIN_EXE_oclaw"))
        .args(["teacher-lp", "--topk", "0", "--at-once", "1", "-q", "--model"])
        .arg(&model)
        .arg("-o")
        .arg(&output)
        .env("XDG_CACHE_HOME", folder.path())
        .stdin(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(begun).unwrap();
    input.flush().unwrap();
    let from = Instant::now();
    while kept(folder.path()) < 6 {
        assert!(from.elapsed() < PATIENCE, "{} scores kept", kept(folder.path()));
        std::thread::yield_now();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!output.exists());

    let run = oclaw_keeping(folder.path())
        .args(["teacher-lp", "--topk", "0", "--model"])
        .arg(&model)
        .arg("-o")
        .arg(&output)
        .write_stdin(whole)
        .assert()
        .success();
    let talk = String::from_utf8_lossy(&run.get_output().stderr).into_owned();
    let talk = talk.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(talk.contains("calls 3 cache hits 6"), "{talk}");
    let taught = read(&output);
    assert_eq!(taught.len(), 9);
    assert!(taught.iter().all(|turn| turn.teacher_error == Some(vec![None])));
}

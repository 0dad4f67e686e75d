//! `oclaw teacher-lp --engine` with several servers of one model.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};

use oclaw::serving;
use oclaw::template::Tokenizer;
use serde_json::json;
use tokio::runtime::Runtime;

use super::{hinted, run};
use crate::harness::fake_engine::{FakeEngine, Reply};
use crate::harness::fixture_models as models;

#[test]
fn servers_share_the_calls_and_a_dead_one_is_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let model = models().join("tiny-qwen3");
    let runtime = Runtime::new().unwrap();
    let start = || runtime.block_on(serving::start(serving::Options::new(&model))).unwrap();
    let (one, other) = (start(), start());
    // Nobody listens there any more.
    let dead = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (urls, dead) = ([one.url(), other.url()], format!("http://{dead}"));
    let score = |engines: &[&str]| {
        let mut flags = vec!["--no-cache", "--tokenizer", model.to_str().unwrap()];
        flags.extend(engines.iter().flat_map(|url| ["--engine", url]));
        let (words, turns, _) = run(folder.path(), &flags, 3);
        (words, turns[0].teacher_log_probs.clone().unwrap())
    };
    let (_, alone) = score(&[&urls[0]]);
    assert!(alone.iter().all(Option::is_some));

    let (words, shared) = score(&[&urls[0], &urls[1]]);
    assert_eq!(shared, alone);
    for url in &urls {
        let calls = words.split(&format!("calls of {url}")).nth(1);
        let calls = calls.and_then(|rest| rest.split_whitespace().next());
        assert!(calls.is_some_and(|calls| calls != "0,"), "{url}: {words}");
    }

    let (words, without) = score(&[&dead, &urls[1]]);
    assert_eq!(without, alone);
    assert!(words.contains("left out until it is there again"), "{words}");

    runtime.block_on(one.shutdown());
    runtime.block_on(other.shutdown());
}

#[test]
fn servers_that_are_all_away_end_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let dead = || {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        format!("http://{address}")
    };
    let (engines, model) = (format!("{},{}", dead(), dead()), models().join("tiny-qwen3"));
    let model = model.to_str().unwrap();
    let flags = ["--retries", "0", "--tokenizer", model, "--engine", &engines];
    let (_, turns, _) = run(folder.path(), &flags, 4);
    assert_eq!(turns, []);
}

/// Returns a server's scores of what servers are tried with.
fn scores(model: &Path) -> Reply {
    let probe = Tokenizer::load(model).unwrap().encode("one two three").unwrap();
    let scored = |(at, id): (usize, &i32)| json!([(at > 0).then_some(-1.0), id, null]);
    let scored: Vec<_> = probe.iter().enumerate().map(scored).collect();
    let answer = json!({"text": "", "meta_info": {
        "input_token_logprobs": scored, "weight_version": "7", "prompt_tokens": probe.len(),
        "completion_tokens": 0, "finish_reason": {"type": "length", "length": 0},
    }});
    Reply::json(200, answer)
}

fn scoring(model: &Path) -> FakeEngine {
    let fake = FakeEngine::start();
    let info = json!({"model_path": "m", "weight_version": "7"});
    fake.on("/model_info", [Reply::json(200, info)]);
    fake.on("/v1/models", [Reply::json(200, json!({"data": [{"id": "m"}]}))]);
    fake.on("/generate", [scores(model)]);
    fake
}

/// When the last server goes, the run ends: no hint is blamed and no table written.
#[test]
fn servers_that_are_all_gone_end_the_run() {
    let model = models().join("tiny-qwen3");
    for others in [&[][..], &["http://127.0.0.1:1"]] {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("taught.parquet");
        let fake = scoring(&model);
        fake.hold_after("/generate", 1);
        let mut command = Command::new(env!("CARGO_BIN_EXE_oclaw"));
        command.args(["teacher-lp", "--retries", "0", "--engine", &fake.url(), "--tokenizer"]);
        command.arg(&model).arg("-o").args([&output, &hinted(folder.path())]);
        command.args(others.iter().flat_map(|url| ["--engine", url]));
        command.env("XDG_CACHE_HOME", folder.path()).stderr(Stdio::piped());
        let child = command.stdout(Stdio::null()).spawn().unwrap();
        fake.arrived("/generate", 2);
        drop(fake);
        let ended = child.wait_with_output().unwrap();
        let talk = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), Some(4), "{talk}");
        assert!(talk.contains("cannot reach"), "{talk}");
        assert!(!output.exists());
    }
}

/// A key that is refused after a while is no fault of the hints that are left.
#[test]
fn a_key_that_is_refused_ends_the_run() {
    let model = models().join("tiny-qwen3");
    let folder = tempfile::tempdir().unwrap();
    let fake = scoring(&model);
    fake.on("/generate", [scores(&model), Reply::json(401, json!({"error": "wrong key"}))]);
    let url = fake.url();
    let flags = ["--retries", "0", "--engine", &url, "--tokenizer", model.to_str().unwrap()];
    let (words, turns, _) = run(folder.path(), &flags, 2);
    assert!(words.contains("refused the key (401)"), "{words}");
    assert_eq!(turns, []);
}

/// A student that is away is missed by nothing that was kept, whoever the teacher is.
#[test]
fn a_new_teacher_needs_no_student_whose_scores_are_kept() {
    let (folder, copies) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let model = models().join("tiny-qwen3");
    let second = copies.path().join("second");
    std::fs::create_dir(&second).unwrap();
    for entry in std::fs::read_dir(&model).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), second.join(entry.file_name())).unwrap();
    }
    let runtime = Runtime::new().unwrap();
    let start = |folder| runtime.block_on(serving::start(serving::Options::new(folder))).unwrap();
    let (student, teacher) = (start(&model), start(&second));
    let (away, tokenizer) = (student.url(), model.to_str().unwrap());
    let score = |engine: &str| {
        let flags = ["--engine", engine, "--tokenizer", tokenizer, "--retries", "0"];
        let topk = ["--topk", "2", "--student", &away];
        run(folder.path(), &[&flags[..], &topk].concat(), 3)
    };
    let (_, first, _) = score(&away);
    runtime.block_on(student.shutdown());
    let (words, again, _) = score(&teacher.url());
    assert!(words.contains("calls 2 cache hits 1"), "{words}");
    assert_eq!(again[0].teacher_topk_log_probs, first[0].teacher_topk_log_probs);
    runtime.block_on(teacher.shutdown());
}

/// A dry run leaves out what the budget would.
#[test]
fn a_dry_run_counts_as_far_as_the_calls_go() {
    let folder = tempfile::tempdir().unwrap();
    let model = models().join("tiny-qwen3");
    let flags = ["--model", model.to_str().unwrap(), "--topk", "0", "--max-requests", "1"];
    let (words, ..) = run(folder.path(), &[&flags[..], &["--dry-run"]].concat(), 0);
    assert!(words.contains("to ask about 1 calls 1 cache hits 0"), "{words}");
    assert!(words.contains("left out: budget, at most 1"), "{words}");
    let (words, ..) = run(folder.path(), &flags, 3);
    assert!(words.contains("calls 1 cache hits 0"), "{words}");
    assert!(words.contains("left out: budget 1"), "{words}");
    // Without the student's no teacher's request is made.
    let flags = [&flags[..2], &["--topk", "2", "--max-requests", "0"]].concat();
    let (words, ..) = run(folder.path(), &[&flags[..], &["--dry-run"]].concat(), 0);
    assert!(words.contains("left out: budget, at most 1"), "{words}");
    let (words, ..) = run(folder.path(), &flags, 3);
    assert!(words.contains("left out: budget 1"), "{words}");
}

/// What was scored before is found though nobody is there; what was not ends the run.
#[test]
fn a_server_that_is_away_is_missed_only_by_what_nobody_scored() {
    let folder = tempfile::tempdir().unwrap();
    let model = models().join("tiny-qwen3");
    let runtime = Runtime::new().unwrap();
    let running = runtime.block_on(serving::start(serving::Options::new(&model))).unwrap();
    let (url, tokenizer) = (running.url(), model.to_str().unwrap());
    let flags = ["--engine", &url, "--tokenizer", tokenizer, "--retries", "0"];
    let topk = [&flags[..], &["--topk", "2", "--student", &url]].concat();
    let (_, first, _) = run(folder.path(), &flags, 3);
    let (_, likeliest, _) = run(folder.path(), &topk, 3);
    runtime.block_on(running.shutdown());

    for (flags, expected, hits) in [(&flags[..], first, 2), (&topk, likeliest, 3)] {
        let (words, again, _) = run(folder.path(), flags, 3);
        assert_eq!(again, expected);
        assert!(words.contains("only scores kept of `tiny-qwen3`, met there before"), "{words}");
        assert!(words.contains(&format!("calls 0 cache hits {hits}")), "{words}");
    }
    let (words, turns, _) = run(folder.path(), &[&flags[..], &["--no-cache"]].concat(), 4);
    assert!(turns.is_empty() && words.contains("cannot reach"), "{words}");
    let more = [&topk[..4], &["--retries", "0", "--topk", "3", "--student", &url]].concat();
    let (words, turns, _) = run(folder.path(), &more, 4);
    assert!(turns.is_empty() && words.contains("cannot reach"), "{words}");
}

//! `oclaw teacher-lp --engine` with several servers of one model.

use std::net::TcpListener;
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

/// When the last server goes, the run ends: no hint is blamed and no table written.
#[test]
fn servers_that_are_all_gone_end_the_run() {
    let model = models().join("tiny-qwen3");
    let probe = Tokenizer::load(&model).unwrap().encode("one two three").unwrap();
    let scored = |(at, id): (usize, &i32)| json!([(at > 0).then_some(-1.0), id, null]);
    let scored: Vec<_> = probe.iter().enumerate().map(scored).collect();
    for others in [&[][..], &["http://127.0.0.1:1"]] {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("taught.parquet");
        let fake = FakeEngine::start();
        let info = json!({"model_path": "m", "weight_version": "7"});
        fake.on("/model_info", [Reply::json(200, info)]);
        fake.on("/v1/models", [Reply::json(200, json!({"data": [{"id": "m"}]}))]);
        let answer = json!({"text": "", "meta_info": {
            "input_token_logprobs": scored, "weight_version": "7", "prompt_tokens": probe.len(),
            "completion_tokens": 0, "finish_reason": {"type": "length", "length": 0},
        }});
        fake.on("/generate", [Reply::json(200, answer)]);
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

/// A dry run leaves out what the budget would.
#[test]
fn a_dry_run_counts_as_far_as_the_calls_go() {
    let folder = tempfile::tempdir().unwrap();
    let model = models().join("tiny-qwen3");
    let flags = ["--model", model.to_str().unwrap(), "--max-requests", "1"];
    let (words, ..) = run(folder.path(), &[&flags[..], &["--dry-run"]].concat(), 0);
    assert!(words.contains("to ask about 1 calls 1 cache hits 0"), "{words}");
    assert!(words.contains("left out: budget, at most 1"), "{words}");
    let (words, ..) = run(folder.path(), &flags, 3);
    assert!(words.contains("calls 1 cache hits 0"), "{words}");
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

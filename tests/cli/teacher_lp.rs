//! `oclaw teacher-lp` as it is called, on the tiny model.

#[cfg(feature = "torch")]
mod budget;
#[cfg(feature = "torch")]
mod servers;
#[cfg(feature = "torch")]
mod shared;
#[cfg(feature = "torch")]
mod topk;

use std::path::{Path, PathBuf};

use oclaw::table::Format;
#[cfg(feature = "torch")]
use oclaw::table::Usage;
use oclaw::trajectory::{Turn, Writer};
use serde_json::json;

#[cfg(feature = "torch")]
use super::judge::read;
use crate::forge::{captured, write};
#[cfg(feature = "torch")]
use crate::harness::oclaw_keeping;
use crate::harness::{fixture_models as models, oclaw};

fn hinted(folder: &Path) -> PathBuf {
    let with = |number: u32, hints: Option<&[&str]>| Turn {
        messages: json!([{"role": "user", "content": "Name a colour."}]).to_string(),
        prompt_ids: None,
        response_ids: Some(vec![82, 101, 100, 1017]),
        hints: hints.map(|hints| hints.iter().map(|hint| (*hint).to_owned()).collect()),
        ..captured("s", number)
    };
    let image = json!([{"role": "user", "content": [{"type": "image_url"}]}]).to_string();
    let turns = [
        with(1, Some(&["Say blue.", "One word."])),
        with(2, None),
        Turn { messages: image, ..with(3, Some(&["Look."])) },
    ];
    write(
        &folder.join("hinted.parquet"),
        Format::Parquet,
        &[Writer::Serve, Writer::Judge, Writer::Hint],
        &turns,
    )
}

#[cfg(feature = "torch")]
#[test]
fn the_local_model_scores_each_hint() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (hinted(folder.path()), folder.path().join("taught.parquet"));
    let run = oclaw()
        .args(["teacher-lp", "--model"])
        .arg(models().join("tiny-qwen3"))
        .arg("-o")
        .args([&output, &input])
        .assert()
        .code(3);
    let talk = String::from_utf8_lossy(&run.get_output().stderr).into_owned();
    let talk = talk.split_whitespace().collect::<Vec<_>>().join(" ");
    for row in [
        "warning: the table does not tell the tokenizer of its ids",
        "with a teacher 1",
        "failed 1",
        "hints scored 2",
        "response tokens scored 8",
        "failed: unsupported_content 1",
    ] {
        assert!(talk.contains(row), "{row}: {talk}");
    }
    let turns = read(&output);
    let scored = turns[0].teacher_log_probs.as_ref().unwrap();
    assert_eq!(turns[0].teacher.as_deref(), Some("tiny-qwen3"));
    assert_eq!(turns[0].teacher_error, Some(vec![None, None]));
    for values in scored {
        let values = values.as_ref().unwrap();
        assert!(values.len() == 4 && values.iter().all(|value| *value < 0.0), "{values:?}");
    }
    assert_ne!(scored[0], scored[1]);
    assert_eq!((&turns[1].teacher, &turns[1].teacher_error), (&None, &None));
    assert_eq!(turns[2].teacher_error, Some(vec![Some("unsupported_content".to_owned())]));
}

/// One run with a cache folder of the test's own; returns what it printed and
/// wrote, and what its file says that it used.
#[cfg(feature = "torch")]
fn run(folder: &Path, flags: &[&str], code: i32) -> (String, Vec<Turn>, Option<Usage>) {
    let output = folder.join("taught.parquet");
    let _ = std::fs::remove_file(&output);
    let run = oclaw_keeping(folder)
        .args(["teacher-lp", "-o"])
        .args([&output, &hinted(folder)])
        .args(flags)
        .assert()
        .code(code);
    let ran = run.get_output();
    let told = [&ran.stdout[..], &ran.stderr[..]].map(|text| String::from_utf8_lossy(text));
    let words = told.iter().flat_map(|text| text.split_whitespace()).collect::<Vec<_>>().join(" ");
    if !output.exists() {
        return (words, Vec::new(), None);
    }
    let source = oclaw::table::Source::open(std::slice::from_ref(&output)).unwrap();
    let usage = source.provenance().lines.last().and_then(|line| line.usage.clone());
    (words, read(&output), usage)
}

#[cfg(feature = "torch")]
#[test]
fn what_was_scored_is_not_scored_again() {
    let folder = tempfile::tempdir().unwrap();
    let model = models().join("tiny-qwen3");
    let local = ["--model", model.to_str().unwrap(), "--topk", "0"];
    let topk = [local[0], local[1], "--topk", "2"];
    let dry = [&local[..], &["--dry-run"]].concat();
    let (words, turns, _) = run(folder.path(), &dry, 0);
    assert!(words.contains("turns 3 to ask about 1 calls 2 cache hits 0"), "{words}");
    assert_eq!(turns, []);

    let (words, first, usage) = run(folder.path(), &local, 3);
    assert!(words.contains("calls 2 cache hits 0"), "{words}");
    // The dry run has counted exactly.
    let tokens = usage.unwrap().prompt_tokens;
    let (words, ..) = run(folder.path(), &[&dry[..], &["--no-cache"]].concat(), 0);
    assert!(words.contains(&format!("prompt tokens (counted) {tokens} answer")), "{words}");

    let (words, again, usage) = run(folder.path(), &local, 3);
    assert!(words.contains("calls 0 cache hits 2 prompt tokens 0"), "{words}");
    assert_eq!((again, usage.unwrap().cache_hits), (first, 2));
    let (words, ..) = run(folder.path(), &dry, 0);
    assert!(words.contains("to ask about 1 calls 0 cache hits 2"), "{words}");

    // The likeliest tokens are another question: the student's and two hints'.
    let (words, first, _) = run(folder.path(), &topk, 3);
    assert!(words.contains("calls 3 cache hits 0"), "{words}");
    let (words, again, _) = run(folder.path(), &topk, 3);
    assert!(words.contains("calls 0 cache hits 3"), "{words}");
    assert_eq!(again, first);
    let (words, ..) = run(folder.path(), &[&topk[..], &["--dry-run"]].concat(), 0);
    assert!(words.contains("calls 0 cache hits 3"), "{words}");
    // Other products, other numbers.
    let (words, ..) = run(folder.path(), &[&local[..], &["--dtype", "bf16"]].concat(), 3);
    assert!(words.contains("calls 2 cache hits 0"), "{words}");
}

#[cfg(feature = "torch")]
#[test]
fn a_budget_leaves_hints_out() {
    let folder = tempfile::tempdir().unwrap();
    let model = models().join("tiny-qwen3");
    let flags = |more: &[&'static str]| {
        let mut flags = vec!["--model".to_owned(), model.to_str().unwrap().to_owned()];
        flags.extend(more.iter().map(|flag| (*flag).to_owned()));
        flags
    };
    let left = Some("budget".to_owned());
    for (more, expected) in [
        (&["--topk", "0", "--max-requests", "1"][..], vec![None, left.clone()]),
        (&["--topk", "2", "--max-requests", "0"], vec![left.clone(), left.clone()]),
    ] {
        let flags = flags(more);
        let flags: Vec<_> = flags.iter().map(String::as_str).collect();
        let (words, turns, _) = run(folder.path(), &flags, 3);
        assert_eq!(turns[0].teacher_error, Some(expected.clone()), "{words}");
        let scored = turns[0].teacher_log_probs.as_ref().unwrap();
        let missing: Vec<_> = scored.iter().map(Option::is_none).collect();
        assert_eq!(missing, expected.iter().map(Option::is_some).collect::<Vec<_>>());
        assert!(words.contains("left out: budget"), "{words}");
    }
}

/// A server is known by its model and the version of its weights.
#[cfg(feature = "torch")]
#[test]
fn a_servers_scores_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let model = models().join("tiny-qwen3");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let mut seen = Vec::new();
    for row in ["calls 2 cache hits 0", "calls 0 cache hits 2"] {
        let options = oclaw::serving::Options::new(&model);
        let running = runtime.block_on(oclaw::serving::start(options)).unwrap();
        let url = running.url();
        let flags = ["--engine", &url, "--tokenizer", model.to_str().unwrap()];
        let (words, turns, _) = run(folder.path(), &flags, 3);
        assert!(words.contains(row), "{words}");
        seen.push(turns);
        runtime.block_on(running.shutdown());
    }
    assert_eq!(seen[0], seen[1]);
}

#[cfg(not(feature = "torch"))]
#[test]
fn a_build_without_models_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let input = hinted(folder.path());
    let run = oclaw()
        .args(["teacher-lp", "--model"])
        .arg(models().join("tiny-qwen3"))
        .arg(&input)
        .assert()
        .code(2);
    let talk = String::from_utf8_lossy(&run.get_output().stderr).into_owned();
    assert!(talk.contains("needs the `torch` feature"), "{talk}");
}

#[test]
fn usage() {
    let folder = tempfile::tempdir().unwrap();
    let input = hinted(folder.path());
    for (flags, code, words) in [
        (vec![], 2, "hint: give `--model DIR` or `--engine URL`"),
        (vec!["--engine", "http://127.0.0.1:1"], 2, "--tokenizer"),
        (vec!["--model", "no-such-model"], 1, "cannot read `no-such-model/tokenizer.json`"),
    ] {
        let run = oclaw().arg("teacher-lp").args(&flags).arg(&input).assert().code(code);
        let talk = String::from_utf8_lossy(&run.get_output().stderr).into_owned();
        assert!(talk.contains(words), "{flags:?}: {talk}");
    }
    let plain = write(
        &folder.path().join("plain.parquet"),
        Format::Parquet,
        &[Writer::Serve],
        &[captured("s", 1)],
    );
    let run = oclaw()
        .args(["teacher-lp", "--model"])
        .arg(models().join("tiny-qwen3"))
        .arg("-o")
        .arg(folder.path().join("x"))
        .arg(&plain)
        .assert()
        .failure();
    let talk = String::from_utf8_lossy(&run.get_output().stderr).into_owned();
    assert!(
        cfg!(not(feature = "torch"))
            || talk.contains("there is no column `hints`: run `oclaw hint` first"),
        "{talk}"
    );
}

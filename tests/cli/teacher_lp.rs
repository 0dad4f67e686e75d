//! `oclaw teacher-lp` as it is called, on the tiny model.

#[cfg(feature = "torch")]
mod topk;

use std::path::{Path, PathBuf};

use oclaw::table::Format;
use oclaw::trajectory::{Turn, Writer};
use serde_json::json;

#[cfg(feature = "torch")]
use super::judge::read;
use crate::forge::{captured, write};
use crate::harness::{models, oclaw};

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

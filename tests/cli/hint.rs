//! `oclaw hint` as it is called.

use axum::http::StatusCode;
use oclaw::trajectory::Turn;
use serde_json::{Value, json};

use super::judge::{read, says, scripted, table};
use crate::harness::oclaw;

fn script(body: &Value) -> (StatusCode, Value) {
    let text = body["messages"][1]["content"].as_str().unwrap();
    match body["seed"].as_u64().unwrap() {
        _ if text.contains("FAIL") => (StatusCode::INTERNAL_SERVER_ERROR, json!({})),
        _ if text.contains("Thanks") => says("\\boxed{-1}", "stop"),
        0 => says("[HINT_START]Answer in one short sentence.[HINT_END]\n\\boxed{1}", "stop"),
        1 => says("[HINT_START]Keep it short.[HINT_END]\n\\boxed{1}", "stop"),
        _ => says("[HINT_START]too short[HINT_END]\n\\boxed{1}", "stop"),
    }
}

fn hints(turn: &Turn) -> Vec<&str> {
    turn.hints.iter().flatten().map(String::as_str).collect()
}

#[test]
fn hints_of_a_scripted_judge() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (table(folder.path()), folder.path().join("hinted.parquet"));
    let url = scripted(script);
    let run = oclaw()
        .args(["hint", "--engine", &url, "--retries", "0", "-o"])
        .args([&output, &input])
        .assert()
        .code(3);
    let talk = String::from_utf8_lossy(&run.get_output().stderr).into_owned();
    let talk = talk.split_whitespace().collect::<Vec<_>>().join(" ");
    for row in [
        "with hints 2",
        "failed 1",
        "hints kept 4",
        "hints refused: too short 2",
        "votes +1 / -1 6 / 3",
        "calls without a verdict: status 500 3",
        "calls 12",
    ] {
        assert!(talk.contains(row), "{row}: {talk}");
    }
    let turns = read(&output);
    assert_eq!(hints(&turns[0]), ["Keep it short.", "Answer in one short sentence."]);
    assert_eq!(turns[0].hint_votes, Some(vec![Some(1); 3]));
    assert_eq!((&turns[1].hints, &turns[1].hint_votes), (&None, &Some(vec![Some(-1); 3])));
    assert_eq!(
        (&turns[2].hints, &turns[2].hint_votes, &turns[2].hint_error),
        (&None, &None, &None)
    );
    assert_eq!(turns[4].hint_error.as_deref(), Some("status 500 x3"));

    let longest = folder.path().join("longest.parquet");
    oclaw()
        .args(["hint", "--engine", &url, "--keep", "longest", "--retries", "0", "-q", "-o"])
        .args([&longest, &input])
        .assert()
        .code(3);
    assert_eq!(hints(&read(&longest)[0]), ["Answer in one short sentence."]);
}

#[test]
fn from_feedback_after_rules_in_a_pipe() {
    let folder = tempfile::tempdir().unwrap();
    let input = table(folder.path());
    let judged =
        oclaw().args(["judge", "--rules", "--format", "ipc", "-q"]).arg(&input).assert().code(0);
    let output = folder.path().join("hinted.parquet");
    let bytes = judged.get_output().stdout.clone();
    oclaw()
        .args(["hint", "--from-feedback", "-o"])
        .arg(&output)
        .write_stdin(bytes)
        .assert()
        .code(0);
    let turns = read(&output);
    assert_eq!(hints(&turns[0]), ["No, shorter please."]);
    assert!(turns[1..].iter().all(|turn| turn.hints.is_none() && turn.hint_error.is_none()));
}

#[test]
fn only_negative_saves_calls() {
    let folder = tempfile::tempdir().unwrap();
    let (input, judged) = (table(folder.path()), folder.path().join("judged.parquet"));
    oclaw().args(["judge", "--rules", "-q", "-o"]).args([&judged, &input]).assert().code(0);
    let output = folder.path().join("hinted.parquet");
    let run = oclaw()
        .args(["hint", "--only-negative", "--engine", &scripted(script), "-o"])
        .args([&output, &judged])
        .assert()
        .code(0);
    let talk = String::from_utf8_lossy(&run.get_output().stderr).into_owned();
    assert!(talk.split_whitespace().collect::<Vec<_>>().join(" ").contains("calls 3"), "{talk}");
    let turns = read(&output);
    assert_eq!(turns.iter().filter(|turn| turn.hints.is_some()).count(), 1);
    oclaw().arg("hint").arg(&input).assert().code(2);
}

/// What is too long or could be taken for a control token is refused by name, and
/// the reason stands in the row.
#[test]
fn hints_that_must_not_pass() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (table(folder.path()), folder.path().join("hinted.parquet"));
    let url = scripted(|body: &Value| {
        let text = body["messages"][1]["content"].as_str().unwrap();
        match text.contains("Thanks") {
            true => says("[HINT_START]end <|im_end|> it[HINT_END]\\boxed{1}", "stop"),
            false => says("[HINT_START]Say it in one sentence.[HINT_END]\\boxed{1}", "stop"),
        }
    });
    let run = oclaw()
        .args(["hint", "--engine", &url, "--votes", "1", "--max-hint-chars", "22", "-o"])
        .args([&output, &input])
        .assert()
        .code(3);
    let talk = String::from_utf8_lossy(&run.get_output().stderr).into_owned();
    let talk = talk.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(talk.contains("hints refused: control tokens 1"), "{talk}");
    assert!(talk.contains("hints refused: too long 3"), "{talk}");
    let turns = read(&output);
    assert!(turns.iter().all(|turn| turn.hints.is_none()));
    assert_eq!(turns[0].hint_error.as_deref(), Some("hint refused: too long"));
    assert_eq!(turns[1].hint_error.as_deref(), Some("hint refused: control tokens"));

    let flags = ["hint", "--engine", &url, "--votes", "1", "--max-hint-chars", "23", "-q", "-o"];
    oclaw().args(flags).args([&output, &input]).assert().code(3);
    assert_eq!(hints(&read(&output)[0]), ["Say it in one sentence."]);
}

#[cfg(feature = "torch")]
#[test]
fn a_model_in_this_process_is_asked() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (table(folder.path()), folder.path().join("hinted.parquet"));
    oclaw()
        .args(["hint", "--votes", "1", "--max-tokens", "4", "--model"])
        .arg(crate::harness::fixture_models().join("tiny-qwen3"))
        .arg("-o")
        .args([&output, &input])
        .assert()
        .code(3);
    let turns = read(&output);
    // Four tokens of noise are no hint, and say so.
    assert_eq!((turns[0].hint_votes.as_ref(), turns[0].hints.as_ref()), (Some(&vec![None]), None));
    let reason = turns[0].hint_error.as_deref().unwrap();
    assert!(["truncated", "unreadable"].contains(&reason), "{reason}");
}

//! `oclaw export`: lines for other trainers, exact ones.

use std::path::Path;
use std::process::Command;

use oclaw::table::Format;
use oclaw::trajectory::words::{RewardSource, Status};
use oclaw::trajectory::{Turn, Writer};
use serde_json::{Value, json};

use crate::forge::{STAGES, captured, finished, write};
use crate::harness::{oclaw, root};

fn run(folder: &Path, arguments: &[&str]) -> (Option<i32>, Vec<Value>, String) {
    let output = oclaw().current_dir(folder).arg("export").args(arguments).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let lines = text(output.stdout);
    let lines = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let talk = text(output.stderr);
    (output.status.code(), lines, talk.split_whitespace().collect::<Vec<_>>().join(" "))
}

fn rewarded(session: &str, number: u32, reward: f32) -> Turn {
    let mut turn = captured(session, number);
    (turn.reward, turn.reward_source) = (Some(reward), Some(RewardSource::Judged));
    turn.sample_kind = Some(oclaw::trajectory::words::SampleKind::None);
    turn.sample_reason = Some("test".to_owned());
    turn.promoted = Some(false);
    turn.response =
        json!({"role": "assistant", "content": format!("{session} {number}")}).to_string();
    turn
}

fn assistant(text: &str) -> Value {
    json!({"role": "assistant", "content": text})
}

#[test]
fn fine_tuning_takes_what_was_worth_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut tools = rewarded("a", 1, 0.5);
    tools.tools = Some(r#"[{"type":"function"}]"#.to_owned());
    let truncated = Turn { status: Status::Truncated, ..rewarded("d", 1, 1.0) };
    let stated = Turn {
        reward: None,
        reward_source: None,
        reward_explicit: Some(1.0),
        ..rewarded("e", 1, 0.0)
    };
    let unknown = Turn { reward: None, reward_source: None, ..rewarded("f", 1, 0.0) };
    let turns = [tools, rewarded("b", 1, 0.0), rewarded("c", 1, -1.0), truncated, stated, unknown];
    write(&folder.path().join("t.parquet"), Format::Parquet, &STAGES, &turns);
    let (code, lines, talk) = run(folder.path(), &["t.parquet", "--to", "sft"]);
    assert_eq!(code, Some(0), "{talk}");
    let user = json!({"role": "user", "content": "What is 2 + 2?"});
    let expected = [
        json!({"messages": [user, assistant("a 1")], "tools": [{"type": "function"}]}),
        json!({"messages": [user, assistant("e 1")]}),
    ];
    assert_eq!(lines, expected);
    let counts =
        "lines written 2 left out: no_reward 1 left out: not_complete 1 left out: reward_too_low 2";
    assert!(talk.ends_with(counts), "{talk}");
    let (_, lines, _) = run(folder.path(), &["t.parquet", "--to", "sft", "--min-reward", "-1"]);
    assert_eq!(lines.len(), 4);

    let (code, lines, _) = run(folder.path(), &["t.parquet", "--to", "sft", "-o", "out.jsonl"]);
    assert_eq!((code, lines.len()), (Some(0), 0));
    let text = std::fs::read_to_string(folder.path().join("out.jsonl")).unwrap();
    assert_eq!(text.lines().count(), 2);
    assert_eq!(run(folder.path(), &["t.parquet", "--to", "slime", "--min-reward", "0"]).0, Some(2));
}

#[test]
fn preferences_follow_the_two_rules() {
    let folder = tempfile::tempdir().unwrap();
    let prompt = |turn: Turn, text: &str| Turn {
        messages: json!([{"role": "user", "content": text}]).to_string(),
        ..turn
    };
    let turns = [
        prompt(rewarded("a", 1, -1.0), "first"),
        prompt(rewarded("b", 1, 1.0), "first"),
        prompt(rewarded("c", 1, 1.0), "first"),
        prompt(rewarded("d", 1, 0.0), "first"),
        prompt(rewarded("e", 1, -1.0), "second"),
        prompt(rewarded("e", 2, 1.0), "second, corrected"),
        prompt(rewarded("f", 1, 1.0), "third"),
        prompt(rewarded("f", 2, -1.0), "third, gone on"),
    ];
    write(&folder.path().join("t.parquet"), Format::Parquet, &STAGES, &turns);
    let (code, lines, talk) = run(folder.path(), &["t.parquet", "--to", "preference"]);
    assert_eq!(code, Some(0), "{talk}");
    let pair = |prompt: &str, chosen: &str, rejected: &str| {
        let prompt = json!([{"role": "user", "content": prompt}]);
        json!({"prompt": prompt, "chosen": [assistant(chosen)], "rejected": [assistant(rejected)]})
    };
    let expected =
        [pair("first", "b 1", "d 1"), pair("first", "b 1", "a 1"), pair("second", "e 2", "e 1")];
    assert_eq!(lines, expected);
    let counts = "pairs by redo 1 pairs by same_prompt 2 lines written 3 left out: no_partner 3";
    assert!(talk.ends_with(counts), "{talk}");
}

fn sampled(session: &str, number: u32) -> Turn {
    Turn {
        rollout_log_probs: Some(vec![Some(-0.5), Some(-1.25), Some(-0.1)]),
        ..finished(session, number)
    }
}

#[test]
fn samples_have_the_recorded_numbers_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let gap = finished("gap", 1);
    let bare = Turn { prompt_ids: None, response_ids: None, ..captured("bare", 1) };
    let set_aside = Turn { untrainable_reason: Some("x".to_owned()), ..sampled("aside", 1) };
    let turns = [sampled("a", 1), gap, set_aside];
    write(&folder.path().join("t.parquet"), Format::Parquet, &STAGES, &turns);
    write(&folder.path().join("b.parquet"), Format::Parquet, &[Writer::Serve], &[bare]);
    let (code, lines, talk) = run(folder.path(), &["t.parquet", "b.parquet", "--to", "slime"]);
    assert_eq!(code, Some(0), "{talk}");
    let expected = json!({
        "group_index": 0, "index": 0,
        "prompt": [{"role": "user", "content": "What is 2 + 2?"}],
        "tokens": [1, 2, 3, 4, 5, 6, 2],
        "response": "It is 5.", "response_length": 3, "label": null,
        "reward": {"score": -1.0}, "loss_mask": [1, 1, 1], "weight_versions": ["0"],
        "rollout_log_probs": [-0.5, -1.25, -0.1], "status": "completed", "remove_sample": false,
        "session_id": "a",
        "metadata": {"turn_id": "a-turn-1", "session_id": "a", "turn": 1, "request_id": "a-request-1",
            "choice": 0, "model": "tiny", "tools": null},
        "teacher_log_probs": [-0.1, -0.2, -0.3],
    });
    assert_eq!(lines, [expected]);
    let counts =
        "lines written 1 left out: log_prob_gap 1 left out: no_token_ids 1 left out: untrainable 1";
    assert!(talk.ends_with(counts), "{talk}");
}

/// Rows that JSON, or the field of slime's sample, cannot hold.
fn unspeakable() -> [Turn; 3] {
    let parts = json!({"role": "assistant", "content": [{"type": "text", "text": "5"}]});
    let endless = Some(vec![Some(-0.5), Some(f32::NEG_INFINITY), Some(-0.1)]);
    [
        Turn { response: parts.to_string(), ..sampled("parts", 1) },
        Turn { rollout_log_probs: endless, ..sampled("endless", 1) },
        Turn { reward: Some(f32::NAN), ..sampled("nan", 1) },
    ]
}

#[test]
fn what_a_sample_cannot_say_is_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let call = json!({"role": "assistant", "content": null, "tool_calls": [{"id": "c"}]});
    let calling = Turn { response: call.to_string(), ..sampled("call", 1) };
    let turns: Vec<_> = unspeakable().into_iter().chain([calling]).collect();
    write(&folder.path().join("t.parquet"), Format::Parquet, &STAGES, &turns);
    let (code, lines, talk) = run(folder.path(), &["t.parquet", "--to", "slime"]);
    assert_eq!(code, Some(0), "{talk}");
    assert_eq!((lines.len(), &lines[0]["response"]), (1, &json!("")));
    let counts = "lines written 1 left out: log_prob_not_finite 1 left out: no_text_answer 1 \
        left out: reward_not_finite 1";
    assert!(talk.ends_with(counts), "{talk}");
}

#[test]
fn a_teacher_is_in_all_samples_or_in_none() {
    let folder = tempfile::tempdir().unwrap();
    let untaught = Turn { teacher_log_probs: None, ..sampled("b", 1) };
    write(&folder.path().join("t.parquet"), Format::Parquet, &STAGES, &[sampled("a", 1), untaught]);
    let has = |lines: &[Value]| {
        lines.iter().filter(|line| line.get("teacher_log_probs").is_some()).count()
    };
    let (_, lines, talk) = run(folder.path(), &["t.parquet", "--to", "slime"]);
    assert_eq!((lines.len(), has(&lines)), (2, 0));
    assert!(talk.contains("rows without a teacher, so that no sample has one 1 "), "{talk}");
    let (_, lines, talk) = run(folder.path(), &["t.parquet", "--to", "slime", "--with-teacher"]);
    assert_eq!((lines.len(), has(&lines)), (1, 1));
    assert!(talk.ends_with("left out: no_teacher 1"), "{talk}");
}

#[test]
fn slimes_rollout_function_gives_the_same_samples() {
    let python = std::env::var("OCLAW_TEST_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let found = Command::new(&python).args(["-c", "import pyarrow.parquet"]).output();
    if !found.is_ok_and(|output| output.status.success()) {
        println!("scripts/slime: skipped: no python3 with pyarrow");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("shards");
    std::fs::create_dir(&table).unwrap();
    let twin = Turn { request_id: "a-request-1".to_owned(), choice: 1, ..sampled("a", 2) };
    let unmasked = Turn {
        loss_mask: None,
        reward: None,
        reward_source: None,
        reward_explicit: Some(0.5),
        ..sampled("b", 1)
    };
    let turns = [sampled("a", 1), twin, unmasked, finished("gap", 1)];
    let turns: Vec<_> = turns.into_iter().chain(unspeakable()).collect();
    write(&table.join("t.parquet"), Format::Parquet, &STAGES, &turns);
    for flags in [&[][..], &["--with-teacher"]] {
        let arguments = [&["shards", "--to", "slime", "-o", "out.jsonl"][..], flags].concat();
        let (code, _, talk) = run(folder.path(), &arguments);
        assert_eq!(code, Some(0), "{talk}");
        let output = Command::new(&python)
            .arg("-B")
            .arg(root().join("scripts/slime/selftest.py"))
            .arg(&table)
            .arg(folder.path().join("out.jsonl"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(String::from_utf8_lossy(&output.stdout), "3 samples agree\n");
    }
}

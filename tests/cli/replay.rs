//! `oclaw replay` as it is called: exact on the tiny model, and against scripted
//! engines that answer otherwise.

mod saved;
mod ways;

use std::path::{Path, PathBuf};

use assert_cmd::assert::Assert;
use axum::http::StatusCode;
use oclaw::table::Format;
use oclaw::trajectory::turn::Micros;
use oclaw::trajectory::{Turn, Writer};
use serde_json::{Value, json};

use crate::forge::{captured, write};
#[cfg(feature = "torch")]
use crate::harness::fixture;
use crate::harness::oclaw;

use super::judge::{says, scripted};

fn replay(folder: &Path, arguments: &[&str]) -> Assert {
    let mut command = oclaw();
    command.current_dir(folder).args(["replay", "recorded.parquet"]).args(arguments);
    command.assert()
}

fn stdout(assert: &Assert) -> String {
    String::from_utf8(assert.get_output().stdout.clone()).unwrap()
}

fn stderr(assert: &Assert) -> String {
    String::from_utf8(assert.get_output().stderr.clone()).unwrap()
}

/// Returns the lines of JSON, the summary among them.
fn lines(assert: &Assert) -> Vec<Value> {
    stdout(assert).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

/// A turn that asks after some messages and got an answer.
fn turn(session: &str, number: u32, messages: &[Value], answer: &str) -> Turn {
    Turn {
        messages: Value::from(messages.to_vec()).to_string(),
        response: message("assistant", answer).to_string(),
        ..captured(session, number)
    }
}

fn record(folder: &Path, turns: &[Turn]) -> PathBuf {
    write(&folder.join("recorded.parquet"), Format::Parquet, &[Writer::Serve], turns)
}

/// Two sessions: one of two turns, one of one.
fn two_sessions(folder: &Path) {
    let first = [message("user", "one")];
    let second = [message("user", "one"), message("assistant", "1"), message("user", "two")];
    record(
        folder,
        &[
            turn("a", 1, &first, "1"),
            turn("a", 2, &second, "2"),
            turn("b", 1, &[message("user", "three")], "3"),
        ],
    );
}

/// Answers with the number that the last word is, which is what was recorded.
fn counts(body: &Value) -> (StatusCode, Value) {
    let last = body["messages"].as_array().unwrap().last().unwrap();
    match last["content"].as_str().unwrap() {
        "one" => says("1", "stop"),
        "two" => says("2", "stop"),
        _ => says("3", "stop"),
    }
}

/// Answers all but the first question otherwise.
fn miscounts(body: &Value) -> (StatusCode, Value) {
    let last = body["messages"].as_array().unwrap().last().unwrap();
    match last["content"].as_str().unwrap() {
        "one" => says("1", "stop"),
        _ => says("not <3>", "length"),
    }
}

#[cfg(feature = "torch")]
#[test]
fn the_recorded_sessions_are_exact_on_the_tiny_model() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(fixture("sessions/replay.parquet"), folder.path().join("recorded.parquet"))
        .unwrap();
    let model = fixture("models/tiny-qwen3").display().to_string();
    let ways = ["--model", &model, "--by", "exact,rules,log-prob", "--output-format", "json"];
    for history in ["fixed", "on-policy"] {
        let arguments = [&ways[..], &["--history", history, "--save", "new.parquet"]].concat();
        let done = replay(folder.path(), &arguments).success();
        let lines = lines(&done);
        assert_eq!(lines.len(), 13);
        assert!(lines[..12].iter().all(|line| line["verdict"] == "same"), "{lines:?}");
        // Greedy answers have raw log-probs, which the engine scores again.
        let shift = |line: &Value| line["checks"]["log-prob"]["largest_shift"].as_f64().unwrap();
        assert!(lines[..12].iter().all(|line| shift(line) < 1e-3));
        let way = json!({"compared": 12, "not_compared": {}});
        let summary = json!({
            "sessions": 4, "turns": 12, "same": 12, "differing": 0, "failed": 0,
            "not_compared": {}, "passed": true,
            "ways": {"exact": way, "rules": way, "log-prob": way},
        });
        assert_eq!(lines[12]["summary"], summary);
    }
    // What was saved is a sound table, and replays as well as what was recorded.
    let mut lint = oclaw();
    lint.current_dir(folder.path()).args(["lint", "new.parquet"]).assert().success();
    std::fs::rename(folder.path().join("new.parquet"), folder.path().join("recorded.parquet"))
        .unwrap();
    replay(folder.path(), &["--model", &model]).success();
    // Another model answers otherwise, and its log-probs are others.
    let other = fixture("models/tiny-qwen2").display().to_string();
    let differs =
        replay(folder.path(), &["--model", &other, "--by", "exact,log-prob", "--allow", "50%"])
            .code(3);
    assert!(stderr(&differs).contains("12 of 12 compared turns differ or failed; 6 are allowed"));
    assert!(stdout(&differs).contains("exact: token 0 is id "), "{}", stdout(&differs));
}

#[test]
fn the_same_answers_pass() {
    let folder = tempfile::tempdir().unwrap();
    two_sessions(folder.path());
    let done = replay(folder.path(), &["--engine", &scripted(counts)]).success();
    let rows: Vec<Vec<String>> = stdout(&done)
        .lines()
        .map(|line| line.split_whitespace().map(str::to_owned).collect())
        .collect();
    let expected = [
        &["session", "turn", "verdict", "what"][..],
        &["a", "1", "same"],
        &["b", "1", "same"],
        &["a", "2", "same"],
    ];
    let mut sorted = rows.clone();
    sorted.sort();
    let mut wanted: Vec<Vec<String>> =
        expected.iter().map(|row| row.iter().map(|word| (*word).to_owned()).collect()).collect();
    wanted.sort();
    assert_eq!(sorted, wanted);
    let summary = stderr(&done);
    for words in ["sessions 2", "turns 3", "same 3", "differing 0", "not compared 0"] {
        let squeezed = summary.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(squeezed.contains(words), "{words}: {summary}");
    }
}

#[test]
fn other_answers_are_told_and_counted() {
    let folder = tempfile::tempdir().unwrap();
    two_sessions(folder.path());
    let url = scripted(miscounts);
    let ways = ["--engine", &url, "--by", "rules,exact", "--output-format"];
    let done = replay(folder.path(), &[&ways[..], &["json"]].concat()).code(3);
    let found = lines(&done);
    let of = |session: &str, number: u64| {
        let this = |line: &&Value| line["session_id"] == session && line["turn"] == number;
        found.iter().find(this).unwrap().clone()
    };
    assert_eq!(of("a", 1)["verdict"], "same");
    let differing = of("a", 2);
    assert_eq!(differing["verdict"], "differs");
    assert_eq!(
        differing["checks"]["exact"]["what"],
        "the text differs from its character 0 on; ended by length instead of stop"
    );
    assert_eq!(
        differing["checks"]["rules"]["what"],
        "-1 by rule `cut by the length limit` instead of 0 by no rule"
    );
    assert_eq!(found[3]["summary"]["differing"], 2);
    assert_eq!(found[3]["summary"]["passed"], false);
    replay(folder.path(), &["--engine", &url, "--allow", "2"]).success();
    replay(folder.path(), &["--engine", &url, "--allow", "66%"]).code(3);
    replay(folder.path(), &["--engine", &url, "--allow", "67%"]).success();

    let to_file = [&ways[..], &["junit", "-o", "out.xml"]].concat();
    replay(folder.path(), &to_file).code(3).stdout("");
    let xml = std::fs::read_to_string(folder.path().join("out.xml")).unwrap();
    assert!(xml.contains("<testsuites name=\"oclaw replay\" tests=\"3\" failures=\"2\""), "{xml}");
    assert_eq!(xml.matches("<failure ").count(), 2);
}

#[test]
fn on_policy_puts_the_new_answers_into_the_conversation() {
    fn echoes(body: &Value) -> (StatusCode, Value) {
        let contents = body["messages"].as_array().unwrap().iter();
        let contents: Vec<_> =
            contents.map(|message| message["content"].as_str().unwrap()).collect();
        says(&format!("[{}]", contents.join(",")), "stop")
    }
    let folder = tempfile::tempdir().unwrap();
    two_sessions(folder.path());
    let said = |history: &str| {
        let url = scripted(echoes);
        let arguments = ["--engine", &url, "--history", history, "--save", "new.parquet"];
        replay(folder.path(), &arguments).code(3);
        let turns = oclaw::table::read_turns(&[folder.path().join("new.parquet")]).unwrap();
        let second = turns.iter().find(|turn| turn.session_id == "a" && turn.turn == 2).unwrap();
        // An answer that was never given has no next state.
        assert_eq!(second.next_state, None);
        let response: Value = serde_json::from_str(&second.response).unwrap();
        response["content"].as_str().unwrap().to_owned()
    };
    assert_eq!(said("fixed"), "[one,1,two]");
    assert_eq!(said("on-policy"), "[one,[one],two]");
}

#[test]
fn other_tool_calls_end_the_comparison_on_policy() {
    fn no_calls(_: &Value) -> (StatusCode, Value) {
        says("3", "stop")
    }
    let folder = tempfile::tempdir().unwrap();
    let call =
        json!({"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}});
    let calls = json!({"role": "assistant", "content": null, "tool_calls": [call]});
    let ask = message("user", "1 + 2?");
    let result = json!({"role": "tool", "tool_call_id": "c1", "content": "3"});
    let first =
        Turn { response: calls.to_string(), ..turn("a", 1, std::slice::from_ref(&ask), "") };
    let second = turn("a", 2, &[ask, calls, result], "3");
    record(folder.path(), &[first, second]);
    let url = scripted(no_calls);
    let json = ["--engine", &url, "--output-format", "json"];
    let fixed = lines(&replay(folder.path(), &json).code(3));
    assert_eq!((&fixed[0]["verdict"], &fixed[1]["verdict"]), (&json!("differs"), &json!("same")));
    let on_policy = [&json[..], &["--history", "on-policy"]].concat();
    let on_policy = lines(&replay(folder.path(), &on_policy).code(3));
    assert_eq!(on_policy[1]["verdict"], "not_compared");
    assert_eq!(
        on_policy[2]["summary"]["not_compared"],
        json!({"diverged: turn … before it calls other tools than recorded": 1})
    );
}

#[test]
fn a_judge_scores_both_answers() {
    fn judges(body: &Value) -> (StatusCode, Value) {
        let text = body["messages"][1]["content"].as_str().unwrap();
        says(if text.contains("not <3>") { "\\boxed{-1}" } else { "\\boxed{1}" }, "stop")
    }
    let folder = tempfile::tempdir().unwrap();
    two_sessions(folder.path());
    let (url, judge) = (scripted(miscounts), scripted(judges));
    let arguments =
        ["--engine", &url, "--by", "judge", "--judge-engine", &judge, "--output-format", "json"];
    let found = lines(&replay(folder.path(), &arguments).code(3));
    let differing: Vec<_> = found.iter().filter(|line| line["verdict"] == "differs").collect();
    assert_eq!(differing.len(), 2);
    assert_eq!(differing[0]["what"], "judge: judged -1 instead of 1");
}

#[test]
fn what_is_not_compared_is_no_success() {
    let folder = tempfile::tempdir().unwrap();
    let aborted = Turn {
        status: oclaw::trajectory::words::Status::Aborted,
        ..turn("a", 1, &[message("user", "one")], "1")
    };
    record(folder.path(), &[aborted]);
    let done = replay(folder.path(), &["--engine", &scripted(counts), "--allow", "100%"]).code(3);
    assert!(stderr(&done).contains("nothing was compared"), "{}", stderr(&done));
    assert!(stderr(&done).contains("recorded as aborted"));
}

#[test]
fn failures_have_their_exit_codes() {
    fn refuses(_: &Value) -> (StatusCode, Value) {
        (StatusCode::BAD_REQUEST, json!({"error": {"message": "too long"}}))
    }
    fn overloaded(_: &Value) -> (StatusCode, Value) {
        (StatusCode::SERVICE_UNAVAILABLE, json!({"error": {"message": "busy"}}))
    }
    let folder = tempfile::tempdir().unwrap();
    two_sessions(folder.path());
    let refused =
        replay(folder.path(), &["--engine", &scripted(refuses), "--output-format", "json"]).code(3);
    let found = lines(&refused);
    assert_eq!(
        (&found[0]["verdict"], &found[3]["summary"]["failed"]),
        (&json!("failed"), &json!(3))
    );

    // What there is to report is reported before the engine is said to be away.
    let url = scripted(overloaded);
    let away = ["--engine", &url, "--retries", "0", "--output-format", "json"];
    let away = replay(folder.path(), &[&away[..], &["--concurrency", "1"]].concat()).code(4);
    let found = lines(&away);
    assert_eq!(found[3]["summary"]["failed"], 1);
    assert_eq!(found[3]["summary"]["not_compared"], json!({"the engine was away": 2}));

    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    replay(folder.path(), &["--engine", &format!("http://{free}"), "--retries", "0"]).code(4);
    let url = scripted(counts);
    for (further, words) in [
        (&[][..], "required arguments were not provided:\n  --engine <URL>"),
        (&["--engine", &url, "--by", "judge"], "nobody to judge\nhint: give `--judge-engine URL`"),
        (&["--engine", &url, "--allow", "x"], "invalid value 'x' for '--allow <N>'"),
        (&["--engine", &url, "--speed", "0"], "invalid value '0' for '--speed <FACTOR>'"),
    ] {
        let misused = replay(folder.path(), further).code(2);
        assert!(stderr(&misused).contains(words), "{further:?}: {}", stderr(&misused));
    }
    std::fs::write(
        folder.path().join("next.toml"),
        "[[rule]]\nname = \"praised\"\nrole = \"user\"\nnext = \"thanks\"\nscore = 1\n",
    )
    .unwrap();
    let rules = ["--engine", &url, "--by", "rules", "--rules", "next.toml"];
    let useless = replay(folder.path(), &rules).code(2);
    assert!(stderr(&useless).contains("no rule in `next.toml` looks at the answer"));
    replay(folder.path(), &["missing.parquet", "--engine", &url]).code(1);
}

#[test]
fn what_an_import_does_not_know_is_not_compared() {
    let folder = tempfile::tempdir().unwrap();
    let imported = |session: &str, question: &str, answer: &str| Turn {
        finish_reason: Some("imported".to_owned()),
        created_at: Micros(0),
        ..turn(session, 1, &[message("user", question)], answer)
    };
    let dated = turn("c", 1, &[message("user", "three")], "3");
    record(folder.path(), &[imported("a", "one", "1"), imported("b", "two", "2"), dated]);
    // 1970 is no time: nobody waits for decades.
    let url = scripted(counts);
    let done = replay(folder.path(), &["--engine", &url, "--pace", "recorded"]).success();
    let told = stderr(&done);
    assert!(told.contains("2 turns have no recorded time"), "{told}");
}

#[test]
fn the_recorded_pace_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    two_sessions(folder.path());
    // Turns are recorded a second apart: the second one is due after half a second.
    let url = scripted(counts);
    let start = std::time::Instant::now();
    replay(folder.path(), &["--engine", &url, "--pace", "recorded", "--speed", "2"]).success();
    assert!(start.elapsed() >= std::time::Duration::from_millis(500));
}

//! `oclaw judge` as it is called: a scripted judge behind HTTP, rules, exit
//! codes, and what stands in the file afterwards.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use oclaw::table::{Format, read_turns};
use oclaw::trajectory::words::NextStateKind;
use oclaw::trajectory::{Turn, Writer};
use serde_json::{Value, json};

use crate::forge::{captured, write};
use crate::harness::oclaw;

/// Serves chat completions that a function makes of the request, until the test
/// process ends.
pub(super) fn scripted(reply: fn(&Value) -> (StatusCode, Value)) -> String {
    let (sender, bound) = std::sync::mpsc::channel::<SocketAddr>();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async move {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            sender.send(listener.local_addr().unwrap()).unwrap();
            let models = || async { Json(json!({"data": [{"id": "scripted"}]})) };
            let chat = move |Json(body): Json<Value>| async move {
                let (status, body) = reply(&body);
                (status, Json(body))
            };
            let routes = Router::new()
                .route("/v1/models", get(models))
                .route("/v1/chat/completions", post(chat));
            axum::serve(listener, routes).await.unwrap();
        });
    });
    format!("http://{}", bound.recv().unwrap())
}

/// A completion with 10 prompt tokens and 5 of its own.
pub(super) fn says(text: &str, finish_reason: &str) -> (StatusCode, Value) {
    let message = json!({"role": "assistant", "content": text});
    let choice = json!({"index": 0, "message": message, "finish_reason": finish_reason});
    let usage = json!({"prompt_tokens": 10, "completion_tokens": 5});
    (StatusCode::OK, json!({"choices": [choice], "usage": usage}))
}

/// Five turns: corrected, thanked, nothing after, explicitly rewarded, and one
/// that the scripted judges fail on.
pub(super) fn table(folder: &Path) -> PathBuf {
    let followed = |number: u32, next: &str| Turn {
        next_state: Some(json!([{"role": "user", "content": next}]).to_string()),
        ..captured("s", number)
    };
    let turns = [
        followed(1, "No, shorter please."),
        followed(2, "Thanks, great!"),
        Turn { next_state: None, next_state_kind: NextStateKind::None, ..captured("s", 3) },
        Turn { reward_explicit: Some(0.5), ..followed(4, "No, wrong.") },
        followed(5, "FAIL: tell me about Rome"),
    ];
    write(&folder.join("turns.parquet"), Format::Parquet, &[Writer::Serve], &turns)
}

pub(super) fn read(path: &Path) -> Vec<Turn> {
    read_turns(&[path.to_owned()]).unwrap()
}

fn script(body: &Value) -> (StatusCode, Value) {
    let text = body["messages"][1]["content"].as_str().unwrap();
    assert!(body["messages"][0]["content"].as_str().unwrap().contains("\\boxed{-1}"));
    assert_eq!(
        (body["model"].as_str(), body["temperature"].as_f64()),
        (Some("scripted"), Some(0.6))
    );
    let vote = body["seed"].as_u64().unwrap();
    match vote {
        _ if text.contains("FAIL") && vote == 0 => {
            (StatusCode::BAD_REQUEST, json!({"error": {"message": "maximum context length"}}))
        }
        _ if text.contains("FAIL") => says("\\boxed{1", "length"),
        1 => says("<think>\\boxed{1}</think> cannot tell", "stop"),
        _ if text.contains("No, shorter") => says("It asks for another. \\boxed{-1}", "stop"),
        _ => says("\\boxed{1}", "stop"),
    }
}

#[test]
fn votes_of_a_scripted_judge() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (table(folder.path()), folder.path().join("judged.parquet"));
    let run = oclaw()
        .args(["judge", "--engine", &scripted(script), "--retries", "0", "-o"])
        .args([&output, &input])
        .assert()
        .code(3)
        .stdout("");
    let talk = String::from_utf8_lossy(&run.get_output().stderr).into_owned();
    for row in [
        "turns 5",
        "judged 2",
        "failed 1",
        "nothing to judge 2",
        "scores +1 / 0 / -1 1 / 0 / 1",
        "votes +1 / 0 / -1 2 / 0 / 2",
        "ties 0",
        "calls without a verdict: context length 1",
        "calls without a verdict: truncated 2",
        "calls without a verdict: unreadable 2",
        "calls 9",
        "prompt tokens 80",
        "answer tokens 40",
    ] {
        let words: Vec<_> = talk.split_whitespace().collect();
        assert!(words.join(" ").contains(row), "{row}: {talk}");
    }
    let turns = read(&output);
    assert_eq!(
        turns.iter().map(|turn| turn.score).collect::<Vec<_>>(),
        [Some(-1.0), Some(1.0), None, None, None]
    );
    assert_eq!(turns[0].votes, Some(vec![Some(-1), None, Some(-1)]));
    assert_eq!(
        turns[0].judge_text.as_ref().unwrap()[0].as_deref(),
        Some("It asks for another. \\boxed{-1}")
    );
    for quiet in [&turns[2], &turns[3]] {
        assert_eq!((&quiet.votes, &quiet.judge_text, &quiet.judge_error), (&None, &None, &None));
    }
    assert_eq!(turns[4].judge_error.as_deref(), Some("truncated x2, context length"));
    assert_eq!(turns[4].votes, Some(vec![None; 3]));
}

#[test]
fn rules_need_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (table(folder.path()), folder.path().join("judged.parquet"));
    oclaw()
        .args(["judge", "--rules", "-q", "-o"])
        .args([&output, &input])
        .assert()
        .code(0)
        .stderr("");
    let turns = read(&output);
    assert_eq!(
        turns.iter().map(|turn| turn.score).collect::<Vec<_>>(),
        [Some(-1.0), Some(1.0), None, None, Some(0.0)]
    );
    assert_eq!(turns[1].judge_text, Some(vec![Some("rule `praised`".to_owned())]));

    // Once more: refused; filled: nothing to do; replaced by other rules.
    oclaw().args(["judge", "--rules"]).arg(&output).assert().code(2);
    let own = folder.path().join("rules.toml");
    std::fs::write(&own, "[[rule]]\nname = \"all\"\nscore = 1\n").unwrap();
    let again = folder.path().join("again.parquet");
    let rules = format!("--rules={}", own.display());
    oclaw().args(["judge", "--replace", &rules, "-o"]).args([&again, &output]).assert().code(0);
    assert_eq!(read(&again)[4].score, Some(1.0));

    std::fs::write(&own, "[[rule]]\nname = \"all\"\nscore = 7\n").unwrap();
    let run = oclaw().args(["judge", &rules]).arg(&input).assert().code(2);
    let talk = String::from_utf8_lossy(&run.get_output().stderr).into_owned();
    assert!(talk.contains("rule `all`: score is 7, wanted -1, 0 or 1\nhint: "), "{talk}");
}

#[test]
fn show_rules_prints_what_rules_reads() {
    let folder = tempfile::tempdir().unwrap();
    let shown = oclaw().args(["judge", "--show-rules"]).assert().code(0);
    let own = folder.path().join("rules.toml");
    std::fs::write(&own, &shown.get_output().stdout).unwrap();
    let rules = format!("--rules={}", own.display());
    let again = oclaw().args(["judge", "--show-rules", &rules]).assert().code(0);
    assert_eq!(again.get_output().stdout, shown.get_output().stdout);
}

#[test]
fn usage() {
    let folder = tempfile::tempdir().unwrap();
    let input = table(folder.path());
    let prompt = folder.path().join("prompt.txt");
    std::fs::write(&prompt, "grade it").unwrap();
    let prompt = prompt.to_str().unwrap();
    for (flags, words) in [
        (vec![], "hint: give `--engine URL`, `--model DIR` or `--rules`"),
        (vec!["--engine", "x", "--votes", "0"], "0 is not in 1..=99"),
        (vec!["--engine", "x", "--temperature=-1"], "wanted a number from 0 to 1000"),
        (vec!["--engine", "x", "--model", "y"], "cannot be used with"),
        (vec!["--rules", "--prompt", prompt], "never says `\\boxed`"),
        (vec!["--engine", "not an address"], "not a server's address"),
    ] {
        let run = oclaw()
            .arg("judge")
            .args(&flags)
            .arg("-o")
            .arg(folder.path().join("x"))
            .arg(&input)
            .assert()
            .code(2);
        let talk = String::from_utf8_lossy(&run.get_output().stderr).into_owned();
        assert!(talk.contains(words), "{flags:?}: {talk}");
    }
    assert!(!folder.path().join("x").exists());
}

#[test]
fn nobody_there() {
    let folder = tempfile::tempdir().unwrap();
    let input = table(folder.path());
    // A port that was free a moment ago.
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = format!("http://{address}");
    let output = folder.path().join("x");
    oclaw()
        .args(["judge", "--retries", "0", "--engine", &url, "-o"])
        .args([&output, &input])
        .assert()
        .code(4);
    assert!(!output.exists());
}

/// A random model says nothing that could be read; every turn fails with that
/// reason, and the pipe through the embedded engine is whole.
#[cfg(feature = "torch")]
#[test]
fn the_embedded_engine_is_asked() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (table(folder.path()), folder.path().join("judged.parquet"));
    oclaw()
        .args(["judge", "--votes", "1", "--max-tokens", "4", "--model"])
        .arg(crate::harness::fixture_models().join("tiny-qwen3"))
        .arg("-o")
        .args([&output, &input])
        .assert()
        .code(3);
    let turns = read(&output);
    assert_eq!(turns[0].votes, Some(vec![None]));
    let reason = turns[0].judge_error.as_deref().unwrap();
    assert!(["truncated", "unreadable"].contains(&reason), "{reason}");
}

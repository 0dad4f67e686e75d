//! Every kind of server as a judge, as `protocols` have it: what it is taken for,
//! what is read of its answers, and the line that says what it cannot do.

use oclaw::trajectory::Turn;
use serde_json::{Value, json};

use super::judge::{read, table};
use crate::harness::fake_engine::{FakeEngine, Reply};
use crate::harness::{oclaw, oclaw_keeping};

const CHAT: &str = "/v1/chat/completions";

fn listed(model: &str) -> Reply {
    Reply::json(200, json!({"object": "list", "data": [{"id": model, "object": "model"}]}))
}

/// An answer with the members that all dialects have.
fn answer(message: Value, further: (&str, Value)) -> Reply {
    let mut body = json!({
        "id": "a1", "object": "chat.completion", "created": 1, "model": "q",
        "choices": [{"index": 0, "message": message, "logprobs": null, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11},
    });
    body[further.0] = further.1;
    Reply::json(200, body)
}

/// Judges the usual table with one call a turn, and returns the turns and the talk.
fn judged(fake: &FakeEngine, url: &str, code: i32) -> (Vec<Turn>, String) {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (table(folder.path()), folder.path().join("out.parquet"));
    let run = oclaw()
        .args(["judge", "--votes", "1", "--at-once", "1", "--retries", "1", "--engine", url, "-o"])
        .args([&output, &input])
        .assert()
        .code(code);
    let talk = String::from_utf8_lossy(&run.get_output().stderr).into_owned();
    let asked = fake.seen().into_iter().find(|seen| seen.path.ends_with("/chat/completions"));
    let body = asked.unwrap().body;
    let mut members: Vec<_> = body.as_object().unwrap().keys().cloned().collect();
    members.sort();
    // Nothing that any of them refuses or silently drops.
    assert_eq!(members, ["max_tokens", "messages", "model", "seed", "temperature"]);
    (read(&output), talk.split_whitespace().collect::<Vec<_>>().join(" "))
}

fn scores(turns: &[Turn]) -> Vec<Option<f32>> {
    turns.iter().map(|turn| turn.score).collect()
}

const ALL: [Option<f32>; 5] = [Some(1.0), Some(1.0), None, None, Some(1.0)];

#[test]
fn sglang() {
    let fake = FakeEngine::start();
    let told = json!({"model_path": "/m", "served_model_name": "q", "weight_version": "7"});
    fake.on("/model_info", [Reply::json(200, told)]).on("/v1/models", [listed("q")]);
    let message = json!({"role": "assistant", "content": "\\boxed{1}", "reasoning_content": null, "tool_calls": null});
    fake.on(CHAT, [answer(message, ("metadata", json!({"weight_version": "7"})))]);
    let (turns, talk) = judged(&fake, &fake.url(), 0);
    assert_eq!(scores(&turns), ALL);
    assert!(!talk.contains("tells no version"), "{talk}");
    assert!(talk.contains("prompt tokens 27 answer tokens 6"), "{talk}");
}

/// Weights that change while a file is judged: what the new ones said is no answer of
/// the old, for nobody who asks these again.
#[test]
fn weights_that_change_meanwhile() {
    let (folder, fake) = (tempfile::tempdir().unwrap(), FakeEngine::start());
    let message = json!({"role": "assistant", "content": "\\boxed{1}"});
    let of =
        |version: &str| answer(message.clone(), ("metadata", json!({"weight_version": version})));
    let told = json!({"model_path": "/m", "served_model_name": "q", "weight_version": "7"});
    fake.on("/model_info", [Reply::json(200, told)]).on("/v1/models", [listed("q")]);
    fake.on(CHAT, [of("7"), of("8")]);
    let (input, output) = (table(folder.path()), folder.path().join("out.parquet"));
    let run = || {
        fake.forget();
        let ran = oclaw_keeping(folder.path())
            .args(["judge", "--votes", "1", "--at-once", "1", "--engine", &fake.url(), "-o"])
            .args([&output, &input])
            .assert()
            .success();
        drop(ran);
        assert_eq!(scores(&read(&output)), ALL);
        fake.paths().iter().filter(|path| *path == CHAT).count()
    };
    assert_eq!((run(), run()), (3, 2));
    fake.on(CHAT, [of("7")]);
    assert_eq!((run(), run()), (2, 0));
}

#[test]
fn vllm() {
    let fake = FakeEngine::start();
    fake.on("/version", [Reply::json(200, json!({"version": "0.33.0"}))]);
    fake.on("/v1/models", [listed("q")]);
    // The reasoning has another name there, and no verdict in it counts.
    let message = json!({"role": "assistant", "content": "\\boxed{1}", "reasoning": "\\boxed{-1}"});
    fake.on(CHAT, [answer(message, ("prompt_logprobs", Value::Null))]);
    let (turns, talk) = judged(&fake, &fake.url(), 0);
    assert_eq!(scores(&turns), ALL);
    let line = format!("`{}` (vllm) tells no version of its weights: kept answers", fake.url());
    assert_eq!(talk.matches(&line).count(), 1, "{talk}");
}

#[test]
fn llama_cpp() {
    let fake = FakeEngine::start();
    fake.on("/health", [Reply::json(200, json!({"status": "ok"}))]);
    fake.on(
        "/props",
        [Reply::json(200, json!({"default_generation_settings": {}, "build_info": "b1"}))],
    );
    fake.on("/v1/models", [listed("q.gguf")]);
    let message = json!({"role": "assistant", "content": "\\boxed{1}", "reasoning_content": "so"});
    let loading =
        json!({"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}});
    let long = json!({"error": {"code": 400, "message": "the request exceeds the available context size", "type": "exceed_context_size_error"}});
    let good = answer(message, ("timings", json!({"prompt_n": 9, "predicted_n": 2})));
    fake.on(CHAT, [Reply::json(503, loading), good.clone(), Reply::json(400, long), good]);
    let (turns, talk) = judged(&fake, &fake.url(), 3);
    assert_eq!(scores(&turns), [Some(1.0), None, None, None, Some(1.0)]);
    assert_eq!(turns[1].judge_error.as_deref(), Some("context length"));
    assert!(talk.contains("(llamacpp) tells no version of its weights"), "{talk}");
}

/// A gateway with the ways that one-api and new-api have of saying no.
#[test]
fn a_gateway() {
    let fake = FakeEngine::start();
    let page = Reply::page();
    for path in ["/model_info", "/get_model_info", "/version", "/props", "/health"] {
        fake.on(path, [page.clone()]);
    }
    fake.on("/api/v1/models", [listed("gpt")]);
    let wrong = json!({"error": {"message": "Invalid URL (POST /chat/completions)", "type": "invalid_request_error", "param": "", "code": ""}});
    fake.on("/api/chat/completions", [Reply::json(404, wrong)]);
    let path = "/api/v1/chat/completions";
    let good =
        answer(json!({"role": "assistant", "content": "\\boxed{1}"}), ("usage", Value::Null));
    let thought = json!({"role": "assistant", "content": null, "reasoning_content": "\\boxed{1}"});
    let url = format!("{}/api/v1/", fake.url());
    let told = json!({"error": {"message": "no available channel for model gpt under group default", "type": "new_api_error", "param": "", "code": "model_not_found"}});
    let cases = [
        (Reply::json(503, told), "status 503", 1, 2),
        (Reply::json(200, json!({"choices": []})), "malformed answer", 1, 3),
        (Reply::json(200, json!({"choices": null})), "malformed answer", 1, 3),
        (Reply::json(200, json!({"error": {"message": "no quota"}})), "refused: no quota", 1, 2),
        (answer(thought, ("x", json!(1))), "unreadable", 1, 2),
        (Reply::page(), "malformed answer", 1, 2),
        (
            Reply::json(
                403,
                json!({"error": {"message": "额度不足", "code": "insufficient_user_quota"}}),
            ),
            "key refused (403)",
            1,
            2,
        ),
        (Reply::json(500, json!({"error": {"message": "do_request_failed"}})), "status 500", 2, 2),
    ];
    for (bad, reason, calls, uncounted) in cases {
        fake.forget();
        let replies = std::iter::repeat_n(bad, calls).chain([good.clone()]);
        fake.on(path, replies);
        let (turns, talk) = judged(&fake, &url, 3);
        assert_eq!(turns[0].judge_error.as_deref(), Some(reason));
        assert_eq!(scores(&turns), [None, Some(1.0), None, None, Some(1.0)], "{reason}");
        assert_eq!(fake.paths().iter().filter(|seen| *seen == path).count(), calls + 2);
        assert!(talk.contains(&format!("calls without a verdict: {reason} 1")), "{talk}");
        assert!(talk.contains("(openai) tells no version of its weights and may ignore"), "{talk}");
        // What came as an answer may have cost as much as one that can be read.
        let row = format!("calls whose tokens nobody counted {uncounted}");
        assert!(talk.contains(&row), "{reason}: {talk}");
    }
}

//! The OpenAI SDK for Python as a client of `oclaw serve`.

use std::collections::BTreeMap;
use std::process::Command;

use oclaw::trajectory::Turn;
use oclaw::trajectory::words::{NextStateKind, Status, TokenSource};
use serde_json::{Value, json};

use crate::harness::fake_upstream::{
    FakeUpstream, Seen, Speaks, Step, done, event, json as whole, stream_head,
};
use crate::harness::root;
use crate::harness::serve::{Serve, rows};

const LOG_PROBS: [f64; 3] = [-0.5, -0.25, -0.125];

/// Answers by what was said last.
fn script(seen: &Seen) -> Vec<Step> {
    if seen.target.starts_with("/v1/embeddings") {
        let data = json!([{"object": "embedding", "index": 0, "embedding": [0.5, -0.5]}]);
        return whole(200, &json!({"object": "list", "model": "m1", "data": data}).to_string());
    }
    if seen.target.starts_with("/v1/completions") {
        let choice = json!({"index": 0, "text": "plain", "finish_reason": "stop"});
        return whole(200, &json!({"id": "t", "object": "text_completion", "created": 1, "model": "m1", "choices": [choice]}).to_string());
    }
    if !seen.is_chat() {
        return whole(404, r#"{"error":{"message":"no such route"}}"#);
    }
    let asked: Value = serde_json::from_slice(&seen.body).unwrap();
    let last = asked["messages"].as_array().unwrap().last().unwrap()["content"].clone();
    let last = last.as_str().unwrap();
    let streamed = asked["stream"] == json!(true);
    let text = |text: &str| json!({"role": "assistant", "content": text});
    match last {
        "stream" => {
            stream(&asked, &[json!({"content": "杭"}), json!({"content": "州 🦀"})], "stop")
        }
        "tools" => {
            let calls = [("call_a", "a"), ("call_b", "b")];
            let part = |place: usize, id: Value, name: Value, arguments: String| {
                json!({"tool_calls": [{"index": place, "id": id, "type": "function",
                    "function": {"name": name, "arguments": arguments}}]})
            };
            let parts = calls.iter().enumerate().map(|(place, (id, path))| {
                part(place, json!(id), json!("ls"), format!("{{\"path\":\"{path}\"}}"))
            });
            stream(&asked, &parts.collect::<Vec<_>>(), "tool_calls")
        }
        "structured" => answer(&[text(r#"{"name":"杭州","people":12}"#)]),
        "refusal" => {
            answer(&[json!({"role": "assistant", "content": null, "refusal": "I will not."})])
        }
        "several" => answer(&[text("one"), text("two")]),
        "retry" => match (seen.header("x-stainless-retry-count"), streamed) {
            (Some("2"), false) => answer(&[text("at last")]),
            (Some("2"), true) => {
                stream(&asked, &[json!({"content": "at "}), json!({"content": "last"})], "stop")
            }
            (Some("0"), _) => failure(429, "retry-after-ms"),
            _ => failure(503, "retry-after-ms"),
        },
        "endless" => {
            let mut steps =
                stream(&asked, &[json!({"content": "a"}), json!({"content": "b"})], "stop");
            steps.truncate(2);
            steps.push(Step::UntilClosed);
            steps
        }
        "error in stream" => vec![
            stream_head(),
            event(
                &json!({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m1",
                "choices": [{"index": 0, "delta": {"role": "assistant", "content": "a"}, "finish_reason": null}]}),
            ),
            event(
                &json!({"error": {"message": "out of memory", "type": "server_error", "code": "oom"}}),
            ),
            done(),
            Step::End,
        ],
        _ => match last.strip_prefix("status ") {
            Some(status) => failure(status.parse().unwrap(), "retry-after"),
            None => answer(&[text(&format!("said {last}"))]),
        },
    }
}

/// A whole answer of SGLang's, a choice per message.
fn answer(messages: &[Value]) -> Vec<Step> {
    let triples = LOG_PROBS.iter().zip(7..).map(|(log_prob, id)| json!([log_prob, id, null]));
    let triples: Vec<_> = triples.collect();
    let content = LOG_PROBS.map(
        |log_prob| json!({"token": "t", "logprob": log_prob, "bytes": null, "top_logprobs": []}),
    );
    let choices = messages.iter().enumerate().map(|(index, message)| {
        json!({"index": index, "message": message, "finish_reason": "stop", "matched_stop": 9,
            "logprobs": {"content": content}, "prompt_token_ids": [1, 2], "response_token_ids": [7, 8, 9],
            "meta_info": {"output_token_logprobs": triples}})
    });
    let choices: Vec<_> = choices.collect();
    let usage = json!({"prompt_tokens": 2, "completion_tokens": 3 * choices.len(), "total_tokens": 2 + 3 * choices.len()});
    let document = json!({"id": "a", "object": "chat.completion", "created": 1, "model": "m1",
        "metadata": {"weight_version": "7"}, "choices": choices, "usage": usage});
    whole(200, &document.to_string())
}

/// A stream of SGLang's: two pieces of one token each, then the end of turn.
fn stream(asked: &Value, deltas: &[Value], reason: &str) -> Vec<Step> {
    let chunk = |choices: Value| json!({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m1", "choices": choices});
    let told = |delta: &Value, reason: Value, log_prob: f64| {
        chunk(json!([{"index": 0, "delta": delta, "finish_reason": reason, "logprobs":
            {"content": [{"token": "t", "logprob": log_prob, "bytes": null, "top_logprobs": []}]}}]))
    };
    let mut steps = vec![stream_head()];
    steps
        .extend(deltas.iter().zip(LOG_PROBS).map(|(delta, p)| event(&told(delta, Value::Null, p))));
    steps.push(event(&told(&json!({}), json!(reason), LOG_PROBS[2])));
    if asked["return_output_ids_in_sglext"] == json!(true) {
        let mut late = chunk(json!([]));
        late["sglext"] = json!({"input_ids": [1, 2], "output_ids": [[7, 8, 9]]});
        steps.push(event(&late));
    }
    if asked["stream_options"]["include_usage"] == json!(true) {
        let mut late = chunk(json!([]));
        late["usage"] = json!({"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5});
        steps.push(event(&late));
    }
    steps.extend([done(), Step::End]);
    steps
}

fn failure(status: u16, wait: &'static str) -> Vec<Step> {
    let body = json!({"error": {"message": format!("scripted {status}"), "type": "scripted", "param": null, "code": "c"}});
    let head = vec![
        ("content-type", "application/json".to_owned()),
        (wait, "7".to_owned()),
        ("x-ratelimit-remaining-tokens", "11".to_owned()),
        ("x-request-id", format!("req-{status}")),
    ];
    vec![Step::Head(status, head), Step::Send(body.to_string().into_bytes()), Step::End]
}

#[test]
fn the_openai_sdk_is_a_client() {
    let packages = root().join("target/python");
    if !packages.join("openai").is_dir() {
        println!("skipped: no OpenAI SDK in target/python (`.ci/run` installs it)");
        return;
    }
    let upstream = FakeUpstream::start(Speaks::Sglang, script);
    let folder = tempfile::tempdir().unwrap();
    let (spool, keyed) = (folder.path().join("turns"), folder.path().join("keyed"));
    let keys = folder.path().join("keys");
    std::fs::write(&keys, "ann key-canary\n").unwrap();
    let keys = keys.display().to_string();
    let url = upstream.url();
    let serve = Serve::start(&spool, &["--engine", &url, "--flush-open"]);
    let locked = Serve::start(&keyed, &["--engine", &url, "--key-file", &keys]);
    let output = Command::new("python3")
        .arg("-B")
        .arg(root().join("tests/cli/openai_sdk/client.py"))
        .args([&serve, &locked].map(|serve| format!("http://{}", serve.address)))
        .env("PYTHONPATH", packages)
        .env("NO_PROXY", "*")
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{told}\n{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(told.lines().count(), 14, "{told}");
    // The SDK hangs up on a stream that holds an error, too.
    upstream.wait(|seen| seen.iter().any(|seen| seen.closed && seen.text().contains("endless")));
    assert_eq!(locked.stop().0, Some(0));
    let (code, words) = serve.stop();
    assert_eq!(code, Some(0), "{words}");
    // 20 refused answers of each status, and of the retries two times two.
    assert!(
        words.contains("not captured: upstream_429 4, upstream_4xx 12, upstream_5xx 8"),
        "{words}"
    );
    assert!(!words.contains("canary"), "{words}");
    let canaries =
        upstream.seen().iter().filter(|seen| format!("{seen:?}").contains("canary")).count();
    assert_eq!(canaries, 0, "a client's key reached the engine");
    recorded(rows(&spool));
    assert_eq!(rows(&keyed), Vec::new());
}

/// Each conversation is in the rows, as the engine said it.
fn recorded(rows: Vec<Turn>) {
    let mut sessions = BTreeMap::<String, Vec<Turn>>::new();
    for row in rows {
        sessions.entry(row.session_id.clone()).or_default().push(row);
    }
    for (session, turns) in &sessions {
        for turn in turns {
            let exact = !["hang-up", "errors-stream"].contains(&session.as_str());
            let reason = turn.untrainable_reason.as_deref();
            assert_eq!(exact, reason.is_none() && turn.status == Status::Complete, "{turn:?}");
            if exact {
                assert_eq!(turn.response_ids, Some(vec![7, 8, 9]), "{turn:?}");
                let log_probs = LOG_PROBS.map(|log_prob| Some(log_prob as f32)).to_vec();
                assert_eq!(turn.rollout_log_probs, Some(log_probs), "{turn:?}");
                assert_eq!(turn.token_source, TokenSource::Engine);
            }
        }
    }
    let one = |session: &str| {
        let turns = &sessions[session];
        assert_eq!(turns.len(), 1, "{turns:?}");
        &turns[0]
    };
    assert_eq!(one("hang-up").status, Status::Aborted);
    assert_eq!(one("errors-stream").status, Status::Failed);
    let text = |turn: &Turn| serde_json::from_str::<Value>(&turn.response).unwrap();
    for session in ["stream", "stream-usage", "helper"] {
        assert_eq!(text(one(session))["content"], "杭州 🦀");
    }
    assert_eq!(text(one("refusal"))["refusal"], "I will not.");
    // A request that is sent again is one turn.
    for session in ["retry", "retry-stream"] {
        assert_eq!(text(one(session))["content"], "at last");
    }
    assert_eq!(sessions["several"].len(), 2);
    for number in 0..32 {
        let turn = one(&format!("at-once-{number}"));
        assert_eq!(text(turn)["content"], format!("said number {number}"));
    }
    let chat = &sessions["chat"];
    assert_eq!((chat.len(), chat[0].next_state_kind), (2, NextStateKind::User));
    assert_eq!(chat[0].sampling.seed, Some(3));
    let tools = &sessions["tools"];
    assert_eq!((tools.len(), tools[0].next_state_kind), (2, NextStateKind::Tool));
    let results: Value = serde_json::from_str(tools[0].next_state.as_ref().unwrap()).unwrap();
    assert_eq!(results.as_array().unwrap().len(), 2, "both results are one next state");
    let named = [
        "chat",
        "log-probs",
        "stream",
        "stream-usage",
        "helper",
        "tools",
        "structured",
        "refusal",
        "several",
        "retry",
        "retry-stream",
        "hang-up",
        "errors-stream",
    ];
    assert_eq!(sessions.len(), named.len() + 32, "{:?}", sessions.keys());
}

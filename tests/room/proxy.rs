//! The proxy over real sockets, in front of a scripted engine.

mod captures;
mod days;
mod doors;
mod engines;
mod failures;
mod large;
mod limits;
mod odd;
mod ratings;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use oclaw::engine::{Engine, EngineOptions};
use oclaw::journal::{self, Roll, Sync};
use oclaw::proxy::{self, Backend, Error, Keys, Limits, Options, Running};
use oclaw::table::{Provenance, read_turns};
use oclaw::trajectory::Turn;
use oclaw::trajectory::words::{
    LogProbKind, NextStateKind, SessionSource, Status, TokenSource, WeightVersionSource,
};
use reqwest::{Client, RequestBuilder, Response};
use secrecy::SecretString;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::fake_upstream::{
    FakeUpstream, Gate, Seen, Speaks, Step, done, event, json, stream_head,
};

struct Rig {
    upstream: FakeUpstream,
    running: Running,
    client: Client,
    folder: TempDir,
}

async fn options(upstream: &FakeUpstream, spool: &Path) -> Options {
    Options {
        listen: "127.0.0.1:0".parse().unwrap(),
        engines: vec![backend(upstream).await],
        forward_authorization: false,
        keys: Keys::default(),
        control: Keys::default(),
        journal: journal::Options {
            spool: spool.to_owned(),
            sync: Sync::Every(Duration::from_millis(50)),
            roll: Roll { rows: 1000, bytes: 1 << 30, age: Duration::from_secs(3600) },
            retention: i64::MAX,
            remembered: 65_536,
            compact: 1 << 30,
            provenance: Provenance::default(),
        },
        session_idle: Duration::from_secs(1800),
        flush_open: true,
        limits: Limits {
            body: 4 << 20,
            answer_bytes: 64 << 20,
            answer: Duration::from_secs(20),
            silence: Duration::from_secs(20),
            hold: Duration::from_secs(20),
            drain: Duration::from_secs(20),
            health: Duration::from_millis(20),
            ..Limits::default()
        },
        request_log: None,
    }
}

async fn backend(upstream: &FakeUpstream) -> Backend {
    let engine = Engine::attach(EngineOptions::new(upstream.url())).await.unwrap();
    Backend { temperature: Some(1.0), ..Backend::new(engine) }
}

impl Rig {
    async fn start(
        speaks: Speaks,
        script: impl Fn(&Seen) -> Vec<Step> + Send + std::marker::Sync + 'static,
        change: impl FnOnce(&mut Options),
    ) -> Self {
        let upstream = FakeUpstream::start(speaks, script);
        let folder = tempfile::tempdir().unwrap();
        let mut options = options(&upstream, folder.path()).await;
        change(&mut options);
        let running = proxy::start(options).await.unwrap();
        let client = Client::builder().no_proxy().build().unwrap();
        Self { upstream, running, client, folder }
    }

    fn post(&self, path: &str, body: &Value) -> RequestBuilder {
        let url = format!("http://{}{path}", self.running.address);
        self.client.post(url).body(body.to_string())
    }

    fn get(&self, path: &str) -> RequestBuilder {
        self.client.get(format!("http://{}{path}", self.running.address))
    }

    fn chat(&self, body: &Value) -> RequestBuilder {
        self.post("/v1/chat/completions", body)
    }

    async fn metrics(&self) -> String {
        self.get("/metrics").send().await.unwrap().text().await.unwrap()
    }

    /// Ends the proxy and reads what it recorded.
    async fn rows(self) -> Vec<Turn> {
        self.running.shutdown().await.unwrap();
        rows(self.folder.path())
    }
}

fn rows(spool: &Path) -> Vec<Turn> {
    let entries = std::fs::read_dir(spool).unwrap().map(|entry| entry.unwrap().path());
    let any = entries.into_iter().any(|path| path.extension().is_some_and(|end| end == "parquet"));
    if any { read_turns(&[spool.to_owned()]).unwrap() } else { Vec::new() }
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn said(text: &str) -> Value {
    json!({"role": "assistant", "content": text})
}

fn ask(text: &str) -> Value {
    json!({"model": "m1", "messages": [user(text)]})
}

fn ask_stream(text: &str) -> Value {
    json!({"model": "m1", "messages": [user(text)], "stream": true})
}

fn answer(text: &str) -> String {
    json!({"id": "a", "metadata": {"weight_version": "7"},
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop", "matched_stop": 9,
            "prompt_token_ids": [1, 2], "response_token_ids": [8, 9],
            "meta_info": {"output_token_logprobs": [[-0.5, 8, null], [-0.25, 9, null]]}}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 2}})
    .to_string()
}

fn delta(text: &str, log_prob: f64) -> Value {
    json!({"id": "c", "choices": [{"index": 0, "delta": {"content": text}, "logprobs": {"content": [{"token": text, "logprob": log_prob}]}, "finish_reason": null}]})
}

fn bare(text: &str) -> Value {
    json!({"id": "c", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": null}]})
}

fn finish() -> Value {
    json!({"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "matched_stop": 9}]})
}

fn ids() -> Value {
    json!({"id": "c", "choices": [], "sglext": {"input_ids": [1, 2], "output_ids": [[7, 8, 9]]}})
}

fn usage() -> Value {
    json!({"id": "c", "choices": [], "usage": {"completion_tokens": 3}})
}

fn whole_stream() -> Vec<Step> {
    vec![
        stream_head(),
        event(&delta("a", -0.5)),
        event(&delta("b", -0.25)),
        event(&finish()),
        event(&ids()),
        event(&usage()),
        done(),
        Step::End,
    ]
}

/// A stream that stands still after its first word until the gate is opened.
fn held_stream() -> (Gate, impl Fn(&Seen) -> Vec<Step> + Send + std::marker::Sync + 'static) {
    let gate = Gate::default();
    let held = gate.clone();
    let script = move |_: &Seen| {
        let mut steps = whole_stream();
        steps.insert(2, Step::Hold(held.clone()));
        steps
    };
    (gate, script)
}

/// Reads a stream until it holds a text.
async fn until(response: &mut Response, wanted: &str) -> String {
    let mut text = String::new();
    while !text.contains(wanted) {
        let chunk = response.chunk().await.unwrap().unwrap();
        text.push_str(&String::from_utf8_lossy(&chunk));
    }
    text
}

#[tokio::test]
async fn a_stream_is_a_stream_and_a_row() {
    let (gate, script) = held_stream();
    let rig = Rig::start(Speaks::Sglang, script, |_| {}).await;
    let mut response =
        rig.chat(&ask_stream("hi")).header("x-session-id", "s").send().await.unwrap();
    assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
    let turn_id = response.headers()["x-oclaw-turn-id"].to_str().unwrap().to_owned();
    // The first word is here before the second is sent.
    let mut text = until(&mut response, "\"a\"").await;
    gate.open();
    text.push_str(&response.text().await.unwrap());
    let expected = format!(
        "data: {}\n\ndata: {}\n\ndata: {}\n\ndata: [DONE]\n\n",
        bare("a"),
        bare("b"),
        finish()
    );
    assert_eq!(text, expected);
    let seen = rig.upstream.chats();
    assert_eq!(seen[0].header("accept-encoding"), Some("identity"));
    assert_eq!(seen[0].header("x-session-id"), None);
    assert!(seen[0].text().starts_with(
        r#"{"model":"m1","messages":[{"role":"user","content":"hi"}],"stream":true,"logprobs":true"#
    ));
    let rows = rig.rows().await;
    assert_eq!(rows.len(), 1);
    let row = &rows[0];
    assert_eq!(
        (row.turn_id.as_str(), row.session_id.as_str(), row.turn),
        (turn_id.as_str(), "s", 1)
    );
    assert_eq!(row.response, json!({"role": "assistant", "content": "ab"}).to_string());
    assert_eq!(row.response_ids, Some(vec![7, 8, 9]));
    assert_eq!(row.rollout_log_probs, Some(vec![Some(-0.5), Some(-0.25), None]));
    assert_eq!(
        (row.status, row.token_source, row.untrainable_reason.clone()),
        (Status::Complete, TokenSource::Engine, None)
    );
    assert_eq!((row.ends_with_stop_token, row.usage_completion_tokens), (Some(true), Some(3)));
    assert_eq!(
        (row.weight_version.as_deref(), row.weight_version_source),
        (Some("7"), WeightVersionSource::Polled)
    );
    assert_eq!(
        (row.sampling.temperature, row.sampling.log_prob_kind),
        (Some(1.0), LogProbKind::Tempered)
    );
    assert_eq!(
        (row.session_source, row.next_state_kind),
        (SessionSource::Header, NextStateKind::None)
    );
    assert_eq!(row.messages, r#"[{"role":"user","content":"hi"}]"#);
}

#[tokio::test]
async fn a_conversation_becomes_rows_with_next_states() {
    let script =
        |seen: &Seen| json(200, &answer(if seen.text().contains("second") { "a2" } else { "a1" }));
    let rig = Rig::start(Speaks::Sglang, script, |_| {}).await;
    let first = rig.chat(&json!({"model": "m1", "session_id": "s", "temperature": 0.5, "messages": [user("first")]})).send().await.unwrap();
    let turn_id = first.headers()["x-oclaw-turn-id"].to_str().unwrap().to_owned();
    let expected = r#"{"id":"a","metadata":{"weight_version":"7"},"choices":[{"index":0,"message":{"role":"assistant","content":"a1"},"finish_reason":"stop","matched_stop":9}],"usage":{"prompt_tokens":2,"completion_tokens":2}}"#;
    assert_eq!(first.headers()["content-length"], expected.len().to_string().as_str());
    assert_eq!(first.text().await.unwrap(), expected);
    assert!(!rig.upstream.chats()[0].text().contains("session_id"));
    let feedback = rig
        .post("/v1/feedback", &json!({"turn_id": turn_id, "reward": -0.5, "text": "too short"}))
        .send()
        .await
        .unwrap();
    assert_eq!(feedback.status(), 200);
    let second = json!({"model": "m1", "session_id": "s", "session_done": true, "messages": [user("first"), said("a1"), user("second")]});
    rig.chat(&second).send().await.unwrap().text().await.unwrap();
    // A side request is passed on and not recorded.
    let side = rig.chat(&ask("title?")).header("x-turn-type", "side").send().await.unwrap();
    assert_eq!(side.text().await.unwrap(), answer("a1"));
    // Feedback for a row that may be written goes beside it.
    let late = rig
        .post("/v1/feedback", &json!({"session_id": "nobody", "reward": 1}))
        .send()
        .await
        .unwrap();
    assert_eq!(late.status(), 202);
    for bad in [
        json!({"reward": 1}),
        json!({"turn_id": "x"}),
        json!({"turn_id": "x", "reward": 2}),
        json!({"turn_id": 7, "reward": 1}),
    ] {
        let refused = rig.post("/v1/feedback", &bad).send().await.unwrap();
        assert_eq!(refused.status(), 400, "{bad}");
    }
    let metrics = rig.metrics().await;
    assert!(
        metrics.contains("oclaw_turns_total 2")
            && metrics.contains("oclaw_skipped_total{reason=\"side\"} 1"),
        "{metrics}"
    );
    assert!(rig.folder.path().join("feedback").exists());
    let rows = rig.rows().await;
    assert_eq!(rows.len(), 2);
    assert_eq!(rows[0].next_state.as_deref(), Some(r#"[{"role":"user","content":"second"}]"#));
    assert_eq!(
        (rows[0].reward_explicit, rows[0].feedback_text.as_deref()),
        (Some(-0.5), Some("too short"))
    );
    assert_eq!(
        (rows[0].sampling.temperature, rows[0].next_state_kind),
        (Some(0.5), NextStateKind::User)
    );
    assert_eq!(
        (rows[1].turn, rows[1].session_end, rows[1].session_source),
        (2, true, SessionSource::Body)
    );
    assert_eq!(rows[1].parent_turn_id, Some(rows[0].turn_id.clone()));
    assert_eq!(rows[1].weight_version_source, WeightVersionSource::Answer);
}

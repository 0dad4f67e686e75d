//! The proxy over real sockets, in front of a scripted engine.

mod large;
mod odd;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use oclaw::engine::{Engine, EngineOptions};
use oclaw::journal::{self, Roll, Sync};
use oclaw::proxy::{self, Error, Keys, Limits, Options, Running};
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
        engine: Engine::attach(EngineOptions::new(upstream.url())).await.unwrap(),
        engine_key: None,
        forward_authorization: false,
        keys: Keys::default(),
        control: Keys::default(),
        journal: journal::Options {
            spool: spool.to_owned(),
            sync: Sync::Every(Duration::from_millis(50)),
            roll: Roll { rows: 1000, bytes: 1 << 30, age: Duration::from_secs(3600) },
            retention: i64::MAX,
            compact: 1 << 30,
            provenance: Provenance::default(),
        },
        temperature: Some(1.0),
        session_idle: Duration::from_secs(1800),
        flush_open: true,
        limits: Limits {
            body: 4 << 20,
            answer_bytes: 64 << 20,
            answer: Duration::from_secs(20),
            silence: Duration::from_secs(20),
            hold: Duration::from_secs(20),
            drain: Duration::from_secs(20),
        },
    }
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
    let gate = Gate::default();
    let held = gate.clone();
    let script = move |_: &Seen| {
        let mut steps = whole_stream();
        steps.insert(2, Step::Hold(held.clone()));
        steps
    };
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

#[tokio::test]
async fn statuses_headers_and_bodies_of_the_engine_survive() {
    let script = |seen: &Seen| {
        let asked: Value = serde_json::from_slice(&seen.body).unwrap();
        let headers = vec![
            ("content-type", "application/json".to_owned()),
            ("retry-after", "17".to_owned()),
            ("x-ratelimit-remaining", "0".to_owned()),
            ("connection", "x-private".to_owned()),
            ("x-private", "y".to_owned()),
        ];
        let body = asked["messages"][0]["content"].as_str().unwrap().to_owned();
        vec![
            Step::Head(asked["status"].as_u64().unwrap() as u16, headers),
            Step::Send(body.into_bytes()),
            Step::End,
        ]
    };
    let rig = Rig::start(Speaks::Sglang, script, |_| {}).await;
    for status in [400, 401, 404, 422, 429, 500, 503, 529] {
        for stream in [true, false] {
            for body in [
                "{\"object\":\"error\",\"message\":\"x\"}",
                "{\"error\":{\"message\":\"y\"}}\n",
                "",
            ] {
                let request = json!({"status": status, "stream": stream, "messages": [user(body)]});
                let response = rig.chat(&request).send().await.unwrap();
                assert_eq!(response.status(), status);
                assert_eq!(response.headers()["retry-after"], "17");
                assert_eq!(response.headers()["x-ratelimit-remaining"], "0");
                assert!(!response.headers().contains_key("x-private"));
                assert_eq!(response.text().await.unwrap(), body);
            }
        }
    }
    let metrics = rig.metrics().await;
    assert!(metrics.contains("oclaw_skipped_total{reason=\"upstream_429\"} 6"), "{metrics}");
    assert!(rig.rows().await.is_empty());
}

#[tokio::test]
async fn an_engine_that_is_away_is_a_clear_error() {
    let rig = Rig::start(Speaks::Sglang, |_| json(200, &answer("x")), |_| {}).await;
    rig.upstream.stop();
    for body in [ask("hi"), ask_stream("hi")] {
        let response = rig.chat(&body).send().await.unwrap();
        assert_eq!(response.status(), 502);
        let error: Value = serde_json::from_str(&response.text().await.unwrap()).unwrap();
        assert_eq!(error["error"]["code"], "upstream_unreachable");
        assert!(!error.to_string().contains("127.0.0.1"));
    }
    let ready = rig.get("/readyz").send().await.unwrap();
    assert_eq!(ready.status(), 503);
    assert_eq!(rig.get("/healthz").send().await.unwrap().status(), 200);
    assert!(rig.rows().await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_hangs_up_ends_the_engine_too() {
    let script = |seen: &Seen| {
        let mut steps = vec![stream_head(), event(&delta("a", -0.5))];
        if seen.text().contains("whole") {
            steps.push(event(&finish()));
        }
        if seen.text().contains("silent") {
            steps.clear();
        }
        steps.push(Step::UntilClosed);
        steps
    };
    let rig = Rig::start(Speaks::Sglang, script, |_| {}).await;
    let mut half = rig.chat(&ask_stream("half")).send().await.unwrap();
    until(&mut half, "\"a\"").await;
    drop(half);
    rig.upstream.wait_for_hang_ups(1);
    let mut whole = rig.chat(&ask_stream("whole")).send().await.unwrap();
    until(&mut whole, "finish_reason\":\"stop").await;
    drop(whole);
    rig.upstream.wait_for_hang_ups(2);
    // Before the engine has said a word.
    let silent = tokio::spawn(rig.chat(&ask_stream("silent")).send());
    rig.upstream.wait(|seen| seen.iter().filter(|seen| seen.is_chat()).count() == 3);
    silent.abort();
    rig.upstream.wait_for_hang_ups(3);
    let rows = rig.rows().await;
    let found: Vec<_> =
        rows.iter().map(|row| (row.status, row.untrainable_reason.as_deref())).collect();
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found.contains(&(Status::Aborted, Some("aborted"))), "{found:?}");
    assert!(found.contains(&(Status::Complete, Some("no_token_ids"))), "{found:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_breaks_breaks_and_a_silent_one_ends() {
    let script = |seen: &Seen| {
        let mut steps = vec![stream_head(), event(&delta("a", -0.5))];
        steps.push(if seen.text().contains("break") { Step::Break } else { Step::UntilClosed });
        steps
    };
    let rig = Rig::start(Speaks::Sglang, script, |options| {
        options.limits.silence = Duration::from_millis(200)
    })
    .await;
    for text in ["break", "silent"] {
        let response = rig.chat(&ask_stream(text)).send().await.unwrap();
        let pieces: Vec<_> = response.bytes_stream().collect().await;
        assert!(pieces.last().unwrap().is_err(), "{text}");
    }
    rig.upstream.wait_for_hang_ups(1);
    let rows = rig.rows().await;
    assert_eq!(rows.len(), 2);
    for row in rows {
        assert_eq!(
            (row.status, row.untrainable_reason.as_deref()),
            (Status::Failed, Some("incomplete_stream"))
        );
    }
}

#[tokio::test]
async fn a_whole_answer_needs_no_end_mark() {
    let script = |_: &Seen| vec![stream_head(), event(&bare("a")), event(&finish()), Step::End];
    let rig = Rig::start(Speaks::Generic, script, |_| {}).await;
    let text = rig.chat(&ask_stream("x")).send().await.unwrap().text().await.unwrap();
    assert_eq!(text, format!("data: {}\n\ndata: {}\n\n", bare("a"), finish()));
    let rows = rig.rows().await;
    assert_eq!(
        (rows[0].status, rows[0].untrainable_reason.as_deref()),
        (Status::Complete, Some("no_token_ids"))
    );
    assert_eq!(
        (rows[0].token_source, rows[0].sampling.log_prob_kind),
        (TokenSource::None, LogProbKind::Unknown)
    );
}

#[tokio::test]
async fn every_route_has_the_lock_and_no_key_crosses() {
    let keys = |names: &[&str]| {
        Keys::new(
            names
                .iter()
                .map(|name| ((*name).to_owned(), SecretString::from(format!("key-of-{name}")))),
        )
    };
    let rig = Rig::start(
        Speaks::Sglang,
        |_| json(200, &answer("x")),
        |options| {
            options.keys = keys(&["ann", "bob"]);
            options.control = keys(&["control"]);
            options.engine_key = Some(SecretString::from("engine-canary"));
        },
    )
    .await;
    let routes = [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/feedback"),
        ("GET", "/v1/models"),
        ("GET", "/v1/other"),
        ("GET", "/healthz"),
        ("GET", "/readyz"),
        ("GET", "/metrics"),
        ("POST", "/oclaw/policy"),
        ("POST", "/oclaw/pause"),
        ("POST", "/oclaw/resume"),
        ("GET", "/nothing"),
    ];
    let refused = [
        "",
        "Bearer",
        "Bearer ",
        "bearer  ",
        "Basic key-of-ann",
        "key-of-ann",
        "Bearer key-of-anx",
        "Bearer key-of-an",
        "Bearer key-of-ann2",
    ];
    for (method, path) in routes {
        for value in refused {
            let url = format!("http://{}{path}", rig.running.address);
            let request = rig
                .client
                .request(method.parse().unwrap(), url)
                .body("{}")
                .header("authorization", value);
            let response = request.send().await.unwrap();
            assert_eq!(response.status(), 401, "{path} {value:?}");
            assert_eq!(response.json::<Value>().await.unwrap()["error"]["code"], "invalid_api_key");
        }
    }
    // The control routes have a key of their own.
    let pause = |key: &str| rig.post("/oclaw/resume", &json!({})).bearer_auth(key).send();
    assert_eq!(pause("key-of-ann").await.unwrap().status(), 401);
    assert_eq!(pause("key-of-control").await.unwrap().status(), 200);
    for (name, value) in [
        ("authorization", "bearer key-of-ann"),
        ("x-api-key", "key-of-ann"),
        ("authorization", "Bearer key-of-bob"),
    ] {
        let response = rig
            .chat(&ask("hi"))
            .header(name, value)
            .header("cookie", "c=canary")
            .send()
            .await
            .unwrap();
        assert_eq!(response.status(), 200, "{name} {value}");
    }
    for seen in rig.upstream.seen().iter().filter(|seen| seen.target.starts_with("/v1/chat")) {
        assert_eq!(seen.header("authorization"), Some("Bearer engine-canary"));
        assert!(
            seen.headers
                .iter()
                .all(|(_, value)| !value.contains("key-of") && !value.contains("c=canary"))
        );
    }
    let mut clients: Vec<_> = rig.rows().await.into_iter().map(|row| row.client.unwrap()).collect();
    clients.sort();
    assert_eq!(clients, ["ann", "ann", "bob"]);
}

#[tokio::test]
async fn a_clients_authorization_crosses_only_if_asked() {
    for forward in [false, true] {
        let rig = Rig::start(
            Speaks::Generic,
            |_| json(200, &answer("x")),
            |options| options.forward_authorization = forward,
        )
        .await;
        rig.chat(&ask("hi")).bearer_auth("sk-mine").send().await.unwrap();
        let expected = forward.then_some("Bearer sk-mine");
        assert_eq!(rig.upstream.chats()[0].header("authorization"), expected);
    }
}

#[tokio::test]
async fn an_open_door_is_refused() {
    let upstream = FakeUpstream::start(Speaks::Generic, |_| json(200, "{}"));
    let folder = tempfile::tempdir().unwrap();
    for keys in [Keys::default(), Keys::new([("a".to_owned(), SecretString::from("  "))])] {
        let mut options = options(&upstream, folder.path()).await;
        options.listen = "0.0.0.0:0".parse().unwrap();
        options.keys = keys;
        assert!(matches!(proxy::start(options).await, Err(Error::Open { .. })));
    }
    let mut options = options(&upstream, folder.path()).await;
    let busy = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    options.listen = busy.local_addr().unwrap();
    assert!(matches!(proxy::start(options).await, Err(Error::Bind { .. })));
}

#[tokio::test]
async fn large_bodies_pass_up_to_the_limit() {
    let rig = Rig::start(Speaks::Sglang, |_| json(200, &answer("x")), |_| {}).await;
    let limit = 4 << 20;
    let frame = ask("").to_string().len();
    let exact = rig.chat(&ask(&"x".repeat(limit - frame))).send().await.unwrap();
    assert_eq!(exact.status(), 200);
    let over = rig.chat(&ask(&"x".repeat(limit - frame + 1))).send().await.unwrap();
    assert_eq!(over.status(), 413);
    assert_eq!(over.json::<Value>().await.unwrap()["error"]["code"], "body_too_large");
    assert!(rig.metrics().await.contains("oclaw_skipped_total{reason=\"body_too_large\"} 1"));
    let rows = rig.rows().await;
    assert_eq!((rows.len(), rows[0].messages.len() > 4_000_000), (1, true));
}

#[tokio::test]
async fn other_routes_are_passed_on_and_none_climbs_out() {
    let script =
        |seen: &Seen| json(207, &format!("{} {} {}", seen.method, seen.target, seen.text()));
    let rig = Rig::start(Speaks::Sglang, script, |_| {}).await;
    let response =
        rig.post("/v1/embeddings?x=1&y=%20", &json!({"input": "a"})).send().await.unwrap();
    assert_eq!(response.status(), 207);
    assert_eq!(response.text().await.unwrap(), "POST /v1/embeddings?x=1&y=%20 {\"input\":\"a\"}");
    let models = rig.get("/v1/models").send().await.unwrap().text().await.unwrap();
    assert!(models.contains("\"m1\""));
    for path in ["/nothing", "/oclaw/other", "/model_info"] {
        assert_eq!(rig.get(path).send().await.unwrap().status(), 404, "{path}");
    }
    // A library would tidy this path up; a hostile client does not use one.
    for path in [
        "/v1/../model_info",
        "/v1/%2e%2e/model_info",
        "/v1/x/%2E./%2e./model_info",
        "/v1/..%2fmodel_info",
    ] {
        let status = raw(&rig, path).await;
        assert!(status.starts_with("HTTP/1.1 404"), "{path} {status}");
    }
    assert!(rig.get("/v1/chat/completions").send().await.unwrap().status() == 405);
    assert!(rig.rows().await.is_empty());
}

async fn raw(rig: &Rig, path: &str) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut stream = tokio::net::TcpStream::connect(rig.running.address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

#[tokio::test]
async fn weights_change_under_running_chats() {
    let gate = Gate::default();
    let held = gate.clone();
    let script = move |_: &Seen| {
        let mut steps = whole_stream();
        steps.insert(2, Step::Hold(held.clone()));
        steps
    };
    let rig = Rig::start(Speaks::Sglang, script, |_| {}).await;
    let mut response = rig.chat(&ask_stream("hi")).send().await.unwrap();
    until(&mut response, "\"a\"").await;
    rig.upstream.set_version("8");
    let told = rig
        .post("/oclaw/policy", &json!({"weight_version": "8", "model_path": "/x"}))
        .send()
        .await
        .unwrap();
    assert_eq!(told.json::<Value>().await.unwrap()["success"], true);
    assert_eq!(
        rig.post("/oclaw/policy", &json!({"weight_version": 8})).send().await.unwrap().status(),
        400
    );
    gate.open();
    response.text().await.unwrap();
    let rows = rig.rows().await;
    assert_eq!(
        (rows[0].weight_version.as_deref(), rows[0].weight_version_end.as_deref()),
        (Some("7"), Some("8"))
    );
}

#[tokio::test]
async fn chats_wait_while_the_engine_is_on_hold() {
    let rig = Rig::start(Speaks::Sglang, |_| json(200, &answer("x")), |_| {}).await;
    rig.post("/oclaw/pause", &json!({})).send().await.unwrap();
    assert_eq!(rig.get("/readyz").send().await.unwrap().status(), 503);
    let waiting = tokio::spawn(rig.chat(&ask("hi")).send());
    tokio::task::yield_now().await;
    assert!(rig.upstream.chats().is_empty());
    rig.post("/oclaw/resume", &json!({})).send().await.unwrap();
    assert_eq!(waiting.await.unwrap().unwrap().status(), 200);
    let rig = Rig::start(
        Speaks::Sglang,
        |_| json(200, &answer("x")),
        |options| options.limits.hold = Duration::from_millis(10),
    )
    .await;
    rig.post("/oclaw/pause", &json!({})).send().await.unwrap();
    let refused = rig.chat(&ask("hi")).send().await.unwrap();
    assert_eq!(
        (refused.status().as_u16(), refused.headers()["retry-after"].to_str().unwrap()),
        (503, "5")
    );
}

#[tokio::test]
async fn a_stale_connection_is_tried_once_more_and_only_then() {
    let calls = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counted = calls.clone();
    let script = move |seen: &Seen| {
        let call = counted.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        match (seen.text().contains("begun"), call) {
            // Broken before a byte of the answer; then it works.
            (false, 0) => vec![Step::Break],
            (false, _) => json(200, &answer("x")),
            (true, _) => vec![
                Step::Head(200, vec![("content-type", "application/json".to_owned())]),
                Step::Send(b"{".to_vec()),
                Step::Break,
            ],
        }
    };
    let rig = Rig::start(Speaks::Sglang, script, |_| {}).await;
    assert_eq!(rig.chat(&ask("hi")).send().await.unwrap().status(), 200);
    assert_eq!(rig.upstream.chats().len(), 2);
    let begun = rig.chat(&ask("begun")).send().await.unwrap();
    assert_eq!(begun.status(), 502);
    assert_eq!(rig.upstream.chats().len(), 3);
    assert_eq!(rig.rows().await.len(), 1);
}

#[tokio::test]
async fn what_is_not_quite_json_is_forwarded_as_it_is() {
    let rig = Rig::start(Speaks::Sglang, |_| json(200, &answer("x")), |_| {}).await;
    let url = format!("http://{}/v1/chat/completions", rig.running.address);
    let half = r#"{"model":"m1","messages":[{"role":"user","content":"a\ud83d"}]"#;
    rig.client.post(&url).body(format!("{half}}}")).send().await.unwrap().text().await.unwrap();
    assert!(rig.upstream.chats()[0].text().starts_with(half));
    for broken in ["", "{\"messages\":", "[1]", "{\"prompt\":\"x\"}"] {
        rig.client.post(&url).body(broken).send().await.unwrap().text().await.unwrap();
        assert_eq!(rig.upstream.chats().last().unwrap().text(), broken);
    }
    assert!(rig.metrics().await.contains("oclaw_skipped_total{reason=\"unreadable_request\"} 4"));
    let rows = rig.rows().await;
    assert_eq!(rows.len(), 1);
    assert_eq!(rows[0].messages, "[{\"role\":\"user\",\"content\":\"a\\ufffd\"}]");
}

#[tokio::test]
async fn many_at_once_keep_their_own_words() {
    let script = |seen: &Seen| {
        let asked: Value = serde_json::from_slice(&seen.body).unwrap();
        let name = asked["messages"][0]["content"].as_str().unwrap().to_owned();
        let number: f64 = name.parse().unwrap();
        let mut steps = vec![stream_head()];
        for _ in 0..5 {
            steps.push(event(&delta(&name, -number)));
        }
        let token = number as i32;
        let ids = json!({"choices": [], "sglext": {"input_ids": [token], "output_ids": [[token, token, token, token, token]]}});
        steps.extend([
            event(&finish()),
            event(&ids),
            event(&json!({"choices": [], "usage": {"completion_tokens": 5}})),
            done(),
            Step::End,
        ]);
        steps
    };
    let rig = Arc::new(Rig::start(Speaks::Sglang, script, |_| {}).await);
    let mut talks = Vec::new();
    for number in 1..=100 {
        let rig = rig.clone();
        talks.push(tokio::spawn(async move {
            let name = number.to_string();
            let text = rig.chat(&ask_stream(&name)).send().await.unwrap().text().await.unwrap();
            let one = format!("data: {}\n\n", bare(&name));
            assert_eq!(text, format!("{}data: {}\n\ndata: [DONE]\n\n", one.repeat(5), finish()));
        }));
    }
    for talk in talks {
        talk.await.unwrap();
    }
    let rows = Arc::into_inner(rig).unwrap().rows().await;
    assert_eq!(rows.len(), 100);
    for row in rows {
        let name = row.prompt_ids.as_ref().unwrap()[0];
        assert_eq!(row.response_ids, Some(vec![name; 5]));
        assert_eq!(row.rollout_log_probs, Some(vec![Some(-(name as f32)); 5]));
        assert_eq!(row.response, said(&name.to_string().repeat(5)).to_string());
        assert_eq!(row.untrainable_reason, None);
    }
}

#[tokio::test]
async fn session_names_are_data_and_never_paths() {
    let rig = Rig::start(Speaks::Sglang, |_| json(200, &answer("x")), |_| {}).await;
    let long = "x".repeat(10_000);
    let names = ["../../tmp/pwn", "/etc/x", "ünï", "a b", long.as_str()];
    for name in names {
        let response =
            rig.chat(&ask("hi")).header("x-session-id", name.as_bytes()).send().await.unwrap();
        assert_eq!(response.status(), 200);
    }
    let odd = json!({"messages": [user("hi")], "session_id": "a\nb\u{0}"});
    assert_eq!(rig.chat(&odd).send().await.unwrap().status(), 200);
    let affinity =
        rig.chat(&ask("hi")).header("x-session-affinity", "alpha:1:0").send().await.unwrap();
    assert_eq!(affinity.status(), 200);
    let cached = json!({"messages": [user("hi")], "prompt_cache_key": "beta:3"});
    rig.chat(&cached).send().await.unwrap();
    rig.chat(&json!({"messages": [user("hi")], "prompt_cache_key": "my-app"}))
        .send()
        .await
        .unwrap();
    let folder = rig.folder.path().to_owned();
    rig.running.shutdown().await.unwrap();
    let rows = rows(&folder);
    let mut found: Vec<_> =
        rows.iter().map(|row| (row.session_id.as_str(), row.session_source)).collect();
    found.sort();
    for name in names {
        assert!(found.contains(&(name, SessionSource::Header)), "{name}");
    }
    assert!(found.contains(&("a\nb\u{0}", SessionSource::Body)));
    assert!(found.contains(&("alpha:1", SessionSource::Affinity)));
    assert!(found.contains(&("beta", SessionSource::Body)));
    assert_eq!(found.iter().filter(|(_, source)| *source == SessionSource::None).count(), 1);
    let names: Vec<_> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    let ours = |name: &String| name == ".journal" || name == ".lock" || name.ends_with(".parquet");
    assert!(names.iter().all(ours), "{names:?}");
}

#[tokio::test]
async fn a_restart_goes_on_with_open_conversations() {
    let rig = Rig::start(
        Speaks::Sglang,
        |_| json(200, &answer("a1")),
        |options| options.flush_open = false,
    )
    .await;
    rig.chat(&ask("first")).send().await.unwrap().text().await.unwrap();
    let Rig { upstream, running, client, folder } = rig;
    let summary = running.shutdown().await.unwrap();
    assert_eq!((summary.turns, summary.rows, summary.open, summary.no_session), (1, 0, 1, 1));
    let options = options(&upstream, folder.path()).await;
    let running = proxy::start(options).await.unwrap();
    let rig = Rig { upstream, running, client, folder };
    let next = json!({"model": "m1", "messages": [user("first"), said("a1"), user("second")]});
    rig.chat(&next).send().await.unwrap().text().await.unwrap();
    let rows = rig.rows().await;
    assert_eq!(rows.len(), 2);
    assert_eq!(rows[0].next_state.as_deref(), Some(r#"[{"role":"user","content":"second"}]"#));
    assert_eq!((rows[1].turn, rows[1].session_source), (2, SessionSource::Inferred));
    assert_eq!(rows[1].session_id, rows[0].session_id);
}

#[tokio::test]
async fn shutdown_waits_for_answers_up_to_its_limit() {
    let gate = Gate::default();
    let held = gate.clone();
    let script = move |_: &Seen| {
        let mut steps = whole_stream();
        steps.insert(2, Step::Hold(held.clone()));
        steps
    };
    let rig = Rig::start(Speaks::Sglang, script, |_| {}).await;
    let mut response = rig.chat(&ask_stream("hi")).send().await.unwrap();
    until(&mut response, "\"a\"").await;
    let Rig { running, folder, .. } = rig;
    let ending = tokio::spawn(running.shutdown());
    tokio::task::yield_now().await;
    gate.open();
    assert!(response.text().await.unwrap().ends_with("data: [DONE]\n\n"));
    assert_eq!(ending.await.unwrap().unwrap().rows, 1);
    assert_eq!(rows(folder.path())[0].status, Status::Complete);
    // An answer that takes too long is cut off and recorded as far as it came.
    let script = |_: &Seen| vec![stream_head(), event(&delta("a", -0.5)), Step::UntilClosed];
    let rig = Rig::start(Speaks::Sglang, script, |options| {
        options.limits.drain = Duration::from_millis(10)
    })
    .await;
    let mut response = rig.chat(&ask_stream("hi")).send().await.unwrap();
    until(&mut response, "\"a\"").await;
    let rows = rig.rows().await;
    assert_eq!(rows[0].status, Status::Aborted);
    assert!(response.chunk().await.is_err());
}

//! How much of everything there may be, and who pays for it.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::*;

async fn code(response: Response) -> (u16, String, Option<String>) {
    let status = response.status().as_u16();
    let retry = response.headers().get("retry-after").map(|it| it.to_str().unwrap().to_owned());
    let body: Value = serde_json::from_str(&response.text().await.unwrap()).unwrap();
    (status, body["error"]["code"].as_str().unwrap().to_owned(), retry)
}

#[tokio::test]
async fn headers_have_a_limit() {
    let script = |_: &Seen| json(200, &answer("x"));
    let rig = Rig::start(Speaks::Sglang, script, |options| options.limits.headers = 2000).await;
    let chat = |bytes: usize| rig.chat(&ask("hi")).header("x-much", "x".repeat(bytes)).send();
    assert_eq!(chat(1000).await.unwrap().status(), 200);
    let refused = code(chat(2000).await.unwrap()).await;
    assert_eq!(refused, (431, "headers_too_large".to_owned(), None));
    // The path counts as well, and every route has the limit.
    let long = rig.get(&format!("/metrics?{}", "x".repeat(2000))).send().await.unwrap();
    assert_eq!(long.status(), 431);
    assert_eq!(rig.upstream.chats().len(), 1);
}

#[tokio::test]
async fn so_many_requests_at_a_time_and_no_more() {
    let (gate, script) = held_stream();
    let rig = Rig::start(Speaks::Sglang, script, |options| options.limits.streams = 2).await;
    let mut running = Vec::new();
    for name in ["one", "two"] {
        let mut response = rig.chat(&ask_stream(name)).send().await.unwrap();
        until(&mut response, "\"a\"").await;
        running.push(response);
    }
    assert!(rig.metrics().await.contains("oclaw_running_requests 2\n"));
    for path in ["/v1/chat/completions", "/v1/embeddings"] {
        let refused = rig.post(path, &ask("three")).send().await.unwrap();
        let expected = (503, "too_many_streams".to_owned(), Some("1".to_owned()));
        assert_eq!(code(refused).await, expected);
    }
    gate.open();
    for response in running {
        response.text().await.unwrap();
    }
    assert_eq!(rig.chat(&ask_stream("four")).send().await.unwrap().status(), 200);
    let metrics = rig.metrics().await;
    assert!(metrics.contains("oclaw_skipped_total{reason=\"too_many_streams\"} 1\n"), "{metrics}");
}

#[tokio::test]
async fn bodies_that_wait_have_a_limit_together() {
    let script = |_: &Seen| json(200, &answer("x"));
    let rig = Rig::start(Speaks::Sglang, script, |options| options.limits.queue = 100_000).await;
    rig.post("/oclaw/pause", &json!({})).send().await.unwrap();
    let large = ask(&"x".repeat(60_000));
    let waiting = tokio::spawn(rig.chat(&large).send());
    let queued = async {
        while !rig.metrics().await.contains("oclaw_queued_bytes 60") {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), queued).await.unwrap();
    let refused = code(rig.chat(&large).send().await.unwrap()).await;
    assert_eq!(refused, (503, "queue_full".to_owned(), Some("1".to_owned())));
    rig.post("/oclaw/resume", &json!({})).send().await.unwrap();
    assert_eq!(waiting.await.unwrap().unwrap().status(), 200);
    assert!(rig.metrics().await.contains("oclaw_queued_bytes 0\n"));
    assert_eq!(rig.chat(&large).send().await.unwrap().status(), 200);
}

#[tokio::test]
async fn a_body_that_does_not_come_is_not_waited_for() {
    let rig = Rig::start(
        Speaks::Sglang,
        |_| json(200, &answer("x")),
        |options| options.limits.silence = Duration::from_millis(50),
    )
    .await;
    let mut stream = TcpStream::connect(rig.running.address).await.unwrap();
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{";
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = [0; 32];
    let count = stream.read(&mut answer).await.unwrap();
    assert!(answer[..count].starts_with(b"HTTP/1.1 408 "));
}

/// Nor is one whose head does not come, or that asks for nothing more.
#[tokio::test]
async fn a_head_that_does_not_come_is_not_waited_for() {
    let rig = Rig::start(
        Speaks::Sglang,
        |_| json(200, &answer("x")),
        |options| options.limits.idle = Duration::from_millis(50),
    )
    .await;
    let body = ask("hi").to_string();
    let whole = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let half = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-wait";
    for (sent, answered) in [(half, false), ("", false), (whole.as_str(), true)] {
        let mut stream = TcpStream::connect(rig.running.address).await.unwrap();
        stream.write_all(sent.as_bytes()).await.unwrap();
        let mut heard = String::new();
        let end = stream.read_to_string(&mut heard);
        tokio::time::timeout(Duration::from_secs(20), end).await.unwrap().unwrap();
        assert_eq!(heard.starts_with("HTTP/1.1 200 "), answered, "{sent}: {heard}");
    }
}

/// Sends more than all buffers on the way hold.
fn flood(_: &Seen) -> Vec<Step> {
    let piece = event(&bare(&"z".repeat(1 << 20)));
    let mut steps = vec![stream_head()];
    steps.extend(std::iter::repeat_n(piece, 48));
    steps.extend([event(&finish()), done(), Step::End]);
    steps
}

async fn asked(rig: &Rig, text: &str) -> TcpStream {
    let mut stream = TcpStream::connect(rig.running.address).await.unwrap();
    let body = ask_stream(text).to_string();
    let length = body.len();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n{body}"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_takes_nothing_is_given_up() {
    let rig = Rig::start(Speaks::Generic, flood, |options| {
        options.limits.silence = Duration::from_millis(300)
    })
    .await;
    let stuck = asked(&rig, "stuck").await;
    rig.upstream.wait_for_hang_ups(1);
    drop(stuck);
    let rows = rig.rows().await;
    assert_eq!((rows.len(), rows[0].status), (1, Status::Aborted));
}

/// At the end its connection would never be looked at again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_takes_nothing_at_the_end_is_recorded_as_cut_off() {
    let rig = Rig::start(Speaks::Generic, flood, |options| {
        options.limits.drain = Duration::from_millis(10)
    })
    .await;
    let stuck = asked(&rig, "stuck").await;
    rig.upstream.wait(|seen| seen.iter().any(Seen::is_chat));
    // The engine is read as far as there is room.
    let stands_still = async {
        let (mut before, mut now) = (0, 1);
        while before != now || now < 1 << 20 {
            (before, now) = (now, from_engine(&rig).await);
        }
    };
    tokio::time::timeout(Duration::from_secs(20), stands_still).await.unwrap();
    let rows = rig.rows().await;
    drop(stuck);
    assert_eq!((rows.len(), rows[0].status), (1, Status::Aborted));
}

async fn from_engine(rig: &Rig) -> usize {
    let metrics = rig.metrics().await;
    let line = metrics.lines().find(|line| line.starts_with("oclaw_upstream_bytes_total"));
    line.unwrap().rsplit(' ').next().unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_reader_holds_up_its_own_stream_only() {
    let script = |seen: &Seen| match seen.text().contains("slow") {
        true => flood(seen),
        false => whole_stream(),
    };
    let rig = Rig::start(Speaks::Generic, script, |_| {}).await;
    let mut slow = asked(&rig, "slow").await;
    rig.upstream.wait(|seen| seen.iter().any(Seen::is_chat));
    for number in 0..20 {
        let response = rig.chat(&ask_stream(&number.to_string())).send().await.unwrap();
        assert!(response.text().await.unwrap().ends_with("[DONE]\n\n"));
    }
    // What waits for it is not here: the engine has to wait.
    let held = from_engine(&rig).await;
    assert!(held < 24 << 20, "{held}");
    let mut buffer = vec![0; 1 << 20];
    // To the last chunk: who goes before that has an answer that was cut off.
    let mut tail = Vec::new();
    while !tail.ends_with(b"\r\n0\r\n\r\n") {
        let count = slow.read(&mut buffer).await.unwrap();
        assert_ne!(count, 0);
        tail.extend_from_slice(&buffer[..count]);
        tail.drain(..tail.len().saturating_sub(7));
    }
    drop(slow);
    let rows = rig.rows().await;
    assert_eq!(rows.len(), 21);
    assert!(rows.iter().all(|row| row.status == Status::Complete));
}

#[derive(Clone, Default)]
struct Lines(Arc<std::sync::Mutex<Vec<u8>>>);

impl std::io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A disk that is full for a while.
#[derive(Clone, Default)]
struct Torn(Lines, Arc<std::sync::atomic::AtomicBool>);

impl std::io::Write for Torn {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.1.load(std::sync::atomic::Ordering::SeqCst) {
            return Err(std::io::Error::other("full"));
        }
        let some = bytes.len().min(40);
        self.1.store(some < bytes.len(), std::sync::atomic::Ordering::SeqCst);
        self.0.write(&bytes[..some])
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// What a full disk cut off stays a line by itself.
#[tokio::test]
async fn a_torn_line_is_not_glued_to_the_next() {
    let torn = Torn::default();
    let log = proxy::RequestLog::to(Box::new(torn.clone())).unwrap();
    let rig = Rig::start(
        Speaks::Generic,
        |_| json(200, &answer("x")),
        |options| {
            options.request_log = Some(log);
        },
    )
    .await;
    rig.get("/healthz").send().await.unwrap().text().await.unwrap();
    let full = async {
        while rig.metrics().await.contains("oclaw_lost_log_lines 0\n") {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), full).await.unwrap();
    // As long as it is full nothing comes to it.
    let half = torn.0.0.lock().unwrap().len();
    torn.1.store(false, std::sync::atomic::Ordering::SeqCst);
    rig.get("/metrics").send().await.unwrap().text().await.unwrap();
    rig.running.shutdown().await.unwrap();
    let text = String::from_utf8(torn.0.0.lock().unwrap().clone()).unwrap();
    assert_eq!(text.as_bytes().get(half), Some(&b'\n'), "{text}");
}

#[tokio::test]
async fn a_line_about_each_request_and_no_word_of_it() {
    let lines = Lines::default();
    let log = proxy::RequestLog::to(Box::new(lines.clone())).unwrap();
    let script = |seen: &Seen| match seen.text().contains("\"stream\":true") {
        true => whole_stream(),
        false => json(200, &answer("canary answer")),
    };
    let rig = Rig::start(Speaks::Sglang, script, |options| {
        options.request_log = Some(log);
        options.keys = Keys::new([("ann".to_owned(), SecretString::from("canary-key"))]);
    })
    .await;
    let whole = rig.chat(&ask("canary question")).bearer_auth("canary-key");
    let whole = whole.header("x-session-id", "s\n1").send();
    // Such a header cannot be sent at all.
    assert!(whole.await.is_err());
    let whole = rig.chat(&ask("canary question")).bearer_auth("canary-key");
    let whole = whole.header("x-session-id", "s-1").send().await.unwrap();
    assert!(whole.headers().contains_key("content-length"));
    let turn_id = whole.headers()["x-oclaw-turn-id"].to_str().unwrap().to_owned();
    let size = whole.text().await.unwrap().len();
    let stream = rig.chat(&ask_stream("canary question")).bearer_auth("canary-key").send();
    stream.await.unwrap().text().await.unwrap();
    rig.chat(&ask("x")).bearer_auth("canary-wrong").send().await.unwrap().text().await.unwrap();
    rig.get("/metrics?canary")
        .bearer_auth("canary-key")
        .send()
        .await
        .unwrap()
        .text()
        .await
        .unwrap();
    let url = rig.upstream.url();
    rig.rows().await;
    let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    assert!(!text.contains("canary"), "{text}");
    let found: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |status: u64, path: &str| -> &Value {
        let mut fits = found.iter().filter(|line| line["status"] == status && line["path"] == path);
        fits.next().unwrap_or_else(|| panic!("{text}"))
    };
    assert_eq!(found.len(), 4, "{text}");
    let chat = of(200, "/v1/chat/completions");
    assert_eq!(chat["turn_id"], turn_id);
    assert_eq!((&chat["session_id"], &chat["client"]), (&json!("s-1"), &json!("ann")));
    assert_eq!((&chat["method"], &chat["address"]), (&json!("POST"), &json!("127.0.0.1")));
    assert_eq!((&chat["bytes_out"], &chat["whole"]), (&json!(size), &json!(true)));
    assert_eq!((&chat["engine"], &chat["code"]), (&json!(url), &Value::Null));
    assert!(chat["ms"].as_f64() >= chat["first_ms"].as_f64());
    assert_eq!(found[1]["whole"], true);
    let refused = of(401, "/v1/chat/completions");
    assert_eq!((&refused["code"], &refused["client"]), (&json!("invalid_api_key"), &Value::Null));
    assert_eq!(of(200, "/metrics")["turn_id"], Value::Null);
}

//! No key is ever told: not in a log, a metric, an error, a shard, nor to the other
//! side. And how it ends.

use std::io::Read;
use std::path::Path;

use serde_json::json;

use crate::harness::fake_upstream::{
    FakeUpstream, Gate, Seen, Speaks, Step, event, json as whole, stream_head,
};
use crate::harness::serve::{Serve, ask, echo, rows};

const CLIENT: &str = "canary-client-5e1f";
const CONTROL: &str = "canary-control-77ab";
const ENGINE: &str = "canary-engine-c03d";
const MESSAGE: &str = "canary-message-19e2";

/// Fails in every way, by what is said.
fn failing(seen: &Seen) -> Vec<Step> {
    let text = seen.text();
    if !seen.is_chat() {
        return whole(404, r#"{"error":{"message":"no such route"}}"#);
    }
    let head = |status| Step::Head(status, vec![("content-type", "application/json".to_owned())]);
    match text {
        _ if !text.contains(MESSAGE) => whole(400, r#"{"error":{"message":"no chat"}}"#),
        _ if text.contains("refuse") => {
            whole(401, r#"{"error":{"message":"wrong key","code":"x"}}"#)
        }
        _ if text.contains("limit") => whole(429, r#"{"error":{"message":"slower","code":"x"}}"#),
        _ if text.contains("overloaded") => whole(503, "not even JSON"),
        _ if text.contains("hang up") => vec![Step::Break],
        _ if text.contains("break off") => {
            vec![head(200), Step::Send(b"{\"choices\":".to_vec()), Step::Break]
        }
        _ if text.contains("garbage") => whole(200, "<html>no chat</html>"),
        _ if text.contains("stream") => vec![
            stream_head(),
            event(
                &json!({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": null}]}),
            ),
            Step::Break,
        ],
        _ => echo(seen),
    }
}

/// Reads every file under a folder.
fn files(folder: &Path, found: &mut Vec<u8>) {
    for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap()) {
        match entry.file_type().unwrap().is_dir() {
            true => files(&entry.path(), found),
            false => found.extend(std::fs::read(entry.path()).unwrap()),
        }
    }
}

#[test]
fn no_key_is_told_on_any_route_or_failure() {
    let upstream = FakeUpstream::start(Speaks::Sglang, failing);
    let folder = tempfile::tempdir().unwrap();
    let (spool, keys) = (folder.path().join("turns"), folder.path().join("keys"));
    std::fs::create_dir(&keys).unwrap();
    let file = |name: &str, text: &str| {
        let path = keys.join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let clients = file("clients", &format!("# people\nann {CLIENT}\nbob {CLIENT}-of-bob\n"));
    let (control, engine) = (file("control", CONTROL), file("engine", ENGINE));
    let log = folder.path().join("requests.jsonl");
    let (serve, said) = Serve::start_saying(
        &spool,
        &[
            "-vv",
            "--request-log",
            &log.display().to_string(),
            "--engine",
            &upstream.url(),
            "--key-file",
            &clients,
            "--control-key-file",
            &control,
            "--engine-key-file",
            &engine,
            "--flush-open",
        ],
    );
    let mut told = said;
    let bodies =
        ["fine", "refuse", "limit", "overloaded", "hang up", "break off", "garbage", "stream"];
    let bearers = [CLIENT, &format!("{CLIENT}-of-bob"), CONTROL, ENGINE, "canary-wrong", ""];
    for bearer in bearers {
        let wanted = |status: &str, answer: &str| {
            let known = bearer.starts_with(CLIENT);
            let found = answer.starts_with("HTTP/1.1 401");
            assert!(known || found, "{status}: {bearer}: {answer}");
        };
        for header in ["authorization: Bearer ", "x-api-key: "] {
            let headers = format!(
                "{header}{bearer}\r\ncookie: {bearer}\r\nproxy-authorization: Basic {bearer}\r\n"
            );
            for body in bodies {
                let body = json!({"model": "m1", "stream": body == "stream", "messages": [
                    {"role": "user", "content": format!("{MESSAGE} {body}")}]});
                let answer = serve.ask("POST", "/v1/chat/completions", &headers, &body.to_string());
                wanted("chat", &answer);
                told.push_str(&answer.replace(MESSAGE, ""));
            }
            for (method, path) in [
                ("POST", "/v1/chat/completions"),
                ("GET", "/v1/models"),
                ("POST", "/v1/embeddings"),
                ("POST", "/v1/completions"),
                ("GET", "/v1/unknown"),
                ("POST", "/v1/feedback"),
                ("GET", "/healthz"),
                ("GET", "/readyz"),
                ("GET", "/metrics"),
                ("GET", "/nothing"),
                ("DELETE", "/metrics"),
                ("POST", "/v1/../oclaw/pause"),
            ] {
                let answer = serve.ask(method, path, &headers, "{\"not\": \"a chat\"");
                wanted(path, &answer);
                told.push_str(&answer);
            }
            for path in ["/oclaw/policy", "/oclaw/pause", "/oclaw/resume"] {
                let answer = serve.ask("POST", path, &headers, "{\"weight_version\": \"8\"}");
                let status = if bearer == CONTROL { "HTTP/1.1 200" } else { "HTTP/1.1 401" };
                assert!(answer.starts_with(status), "{path} {bearer}: {answer}");
                told.push_str(&answer);
            }
        }
    }
    upstream.stop();
    let headers = format!("authorization: Bearer {CLIENT}\r\n");
    told.push_str(&serve.ask("POST", "/v1/chat/completions", &headers, &ask("gone").to_string()));
    told.push_str(&serve.ask("GET", "/readyz", &headers, ""));
    let (code, words) = serve.stop();
    assert_eq!(code, Some(0), "{words}");
    told.push_str(&words);
    let lines = std::fs::read_to_string(&log).unwrap();
    assert!(lines.contains("\"client\":\"ann\""), "{lines}");
    told.push_str(&lines);
    for canary in [CLIENT, CONTROL, ENGINE, MESSAGE, "canary"] {
        assert!(!told.contains(canary), "{canary}: {told}");
    }
    // The engine sees its own key on every request, and nobody else's.
    for seen in upstream.seen() {
        let shown = format!("{seen:?}");
        assert_eq!(
            seen.header("authorization"),
            Some(format!("Bearer {ENGINE}").as_str()),
            "{shown}"
        );
        let others = shown.replace(ENGINE, "").replace(MESSAGE, "");
        assert!(!others.contains("canary"), "{shown}");
    }
    let mut kept = Vec::new();
    files(&spool, &mut kept);
    let shown = rows(&spool).iter().map(|row| format!("{row:?}")).collect::<String>();
    assert!(shown.contains(MESSAGE) && shown.contains("ann") && shown.contains("bob"), "{shown}");
    for canary in [CLIENT, CONTROL, ENGINE] {
        assert!(!shown.contains(canary), "{canary}: {shown}");
        assert!(
            !kept.windows(canary.len()).any(|window| window == canary.as_bytes()),
            "{canary} is on the disk"
        );
    }
}

/// A stream that begins, and then waits.
fn slow(gate: &Gate) -> Vec<Step> {
    let delta = |text: &str| {
        event(
            &json!({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": null}]}),
        )
    };
    vec![
        stream_head(),
        delta("begun"),
        Step::Hold(gate.clone()),
        event(&json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})),
        crate::harness::fake_upstream::done(),
        Step::End,
    ]
}

/// Starts so many streams, and returns them when each has begun.
fn begun(serve: &Serve, count: usize) -> Vec<std::net::TcpStream> {
    let streams = (0..count).map(|number| {
        let body =
            json!({"model": "m1", "stream": true, "messages": [{"role": "user", "content": "x"}]});
        let mut stream = serve.connect(&body, &format!("x-session-id: s{number}\r\n"));
        let (mut text, mut piece) = (String::new(), [0; 512]);
        while !text.contains("begun") {
            let count = stream.read(&mut piece).unwrap();
            assert!(count > 0, "{text}");
            text.push_str(&String::from_utf8_lossy(&piece[..count]));
        }
        stream
    });
    streams.collect()
}

#[test]
fn ten_running_streams_end_before_it_does() {
    let gate = Gate::default();
    let held = gate.clone();
    let upstream = FakeUpstream::start(Speaks::Sglang, move |_| slow(&held));
    let folder = tempfile::tempdir().unwrap();
    let serve = Serve::start(folder.path(), &["--engine", &upstream.url(), "--flush-open"]);
    let streams = begun(&serve, 10);
    serve.signal("TERM");
    // Nobody new comes in.
    crate::harness::until("the door is closed", || {
        std::net::TcpStream::connect(&serve.address).is_err()
    });
    gate.open();
    for mut stream in streams {
        let mut rest = String::new();
        stream.read_to_string(&mut rest).unwrap();
        assert!(rest.contains("data: [DONE]"), "{rest}");
    }
    let (code, words) = serve.end();
    assert_eq!(code, Some(0), "{words}");
    assert_eq!(rows(folder.path()).len(), 10, "{words}");
}

#[test]
fn a_second_signal_ends_it_at_once_and_a_limit_ends_the_wait() {
    let gate = Gate::default();
    let held = gate.clone();
    let upstream = FakeUpstream::start(Speaks::Sglang, move |_| slow(&held));
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (folder.path().join("first"), folder.path().join("second"));
    let serve = Serve::start(&first, &["--engine", &upstream.url(), "--drain", "1h"]);
    let streams = begun(&serve, 1);
    serve.signal("TERM");
    crate::harness::until("the door is closed", || {
        std::net::TcpStream::connect(&serve.address).is_err()
    });
    serve.signal("TERM");
    assert_eq!(serve.end().0, Some(130));
    drop(streams);
    // Streams that outlast the limit are cut off, and recorded as such.
    let serve =
        Serve::start(&second, &["--engine", &upstream.url(), "--drain", "10ms", "--flush-open"]);
    let streams = begun(&serve, 3);
    assert_eq!(serve.stop().0, Some(0));
    drop(streams);
    let found = rows(&second);
    assert_eq!(found.len(), 3);
    assert!(
        found.iter().all(|row| row.status == oclaw::trajectory::words::Status::Aborted),
        "{found:?}"
    );
    gate.open();
}

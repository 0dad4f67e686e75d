//! What engines and clients do against the rules, and how it is recorded.

use std::io::Write;

use flate2::Compression;
use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};
use oclaw::trajectory::words::{SessionSource, Status};
use serde_json::{Value, json};

use super::{
    Rig, Seen, Speaks, Step, answer, ask, ask_stream, delta, done, event, finish, rows, said, user,
};
use crate::harness::fake_upstream::json as whole;

pub(super) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zlib(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn raw(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = DeflateEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

pub(super) fn packed_head(kind: &str, coding: &'static str) -> Step {
    let headers = vec![("content-type", kind.to_owned()), ("content-encoding", coding.to_owned())];
    Step::Head(200, headers)
}

#[tokio::test]
async fn a_packed_answer_is_unpacked_captured_and_cut() {
    for (coding, pack) in [
        ("gzip", gzip as fn(&[u8]) -> Vec<u8>),
        ("X-GZip", gzip),
        ("deflate", zlib),
        ("deflate", raw),
        ("identity", <[u8]>::to_vec),
    ] {
        let script = move |seen: &Seen| {
            assert_eq!(seen.header("accept-encoding"), Some("identity"));
            let bytes = pack(answer("你好🦀").as_bytes());
            // In three pieces, for nothing ends where a packet does.
            let third = bytes.len() / 3;
            vec![
                packed_head("application/json", coding),
                Step::Send(bytes[..third].to_vec()),
                Step::Send(bytes[third..2 * third].to_vec()),
                Step::Send(bytes[2 * third..].to_vec()),
                Step::End,
            ]
        };
        let rig = Rig::start(Speaks::Sglang, script, |_| {}).await;
        let response =
            rig.chat(&ask("hi")).header("accept-encoding", "gzip, br").send().await.unwrap();
        assert!(response.headers().get("content-encoding").is_none(), "{coding}");
        let text = response.text().await.unwrap();
        let body: Value =
            serde_json::from_str(&text).unwrap_or_else(|_| panic!("{coding}: {text}"));
        assert_eq!(body["choices"][0]["message"]["content"], "你好🦀");
        assert!(body["choices"][0].get("meta_info").is_none(), "{text}");
        let rows = rig.rows().await;
        assert_eq!(rows.len(), 1, "{coding}");
        assert_eq!((rows[0].status, &rows[0].untrainable_reason), (Status::Complete, &None));
        assert_eq!(rows[0].response_ids, Some(vec![8, 9]));
    }
}

#[tokio::test]
async fn a_packed_stream_is_passed_on_as_it_comes() {
    let gate = super::Gate::default();
    let held = gate.clone();
    let script = move |_: &Seen| {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        let mut piece = |text: String| {
            encoder.write_all(text.as_bytes()).unwrap();
            encoder.flush().unwrap();
            Step::Send(std::mem::take(encoder.get_mut()))
        };
        let event = |value: &Value| format!("data: {value}\n\n");
        let first = piece(event(&delta("a", -0.5)));
        let second = piece(event(&finish()) + "data: [DONE]\n\n");
        let rest = Step::Send(encoder.finish().unwrap());
        let head = packed_head("text/event-stream", "gzip");
        vec![head, first, Step::Hold(held.clone()), second, rest, Step::End]
    };
    let rig = Rig::start(Speaks::Sglang, script, |_| {}).await;
    let mut response = rig.chat(&ask_stream("hi")).send().await.unwrap();
    // The first token is here before the second has left the engine.
    let first = super::until(&mut response, "\"a\"").await;
    gate.open();
    let rest = super::until(&mut response, "[DONE]").await;
    assert!(!format!("{first}{rest}").contains("logprob"), "{first}{rest}");
    let rows = rig.rows().await;
    assert_eq!((rows.len(), rows[0].status), (1, Status::Complete));
}

#[tokio::test]
async fn what_cannot_be_unpacked_is_counted_or_breaks() {
    let script = |seen: &Seen| {
        let broken = seen.text().contains("broken");
        let (coding, bytes) =
            if broken { ("gzip", gzip(b"{}")[..15].to_vec()) } else { ("br", b"??".to_vec()) };
        vec![packed_head("application/json", coding), Step::Send(bytes), Step::End]
    };
    let rig = Rig::start(Speaks::Sglang, script, |_| {}).await;
    let response = rig.chat(&ask("hi")).send().await.unwrap();
    assert_eq!(response.headers()["content-encoding"], "br");
    assert_eq!(response.text().await.unwrap(), "??");
    assert_eq!(rig.chat(&ask("broken")).send().await.unwrap().status(), 502);
    let metrics = rig.metrics().await;
    for reason in ["encoded_answer", "answer_broke_off"] {
        let line = format!("oclaw_skipped_total{{reason=\"{reason}\"}} 1");
        assert!(metrics.contains(&line), "{metrics}");
    }
    let summary = rig.running.shutdown().await.unwrap();
    assert_eq!(summary.skipped, [("answer_broke_off", 1), ("encoded_answer", 1)]);
}

#[tokio::test]
async fn what_is_no_conversation_is_never_trained_on() {
    let script = |seen: &Seen| match seen.text().contains("\"stream\":true") {
        true => vec![
            super::stream_head(),
            event(&delta("a", -0.5)),
            event(&finish()),
            done(),
            Step::End,
        ],
        false => whole(200, &answer("x")),
    };
    let rig = Rig::start(Speaks::Sglang, script, |_| {}).await;
    let tool = json!([{"type": "function", "function": {"name": "f"}}]);
    let table = [
        (json!([user("a")]), tool, None),
        (json!([{"content": "b"}]), json!(null), Some("odd_messages")),
        (json!([user("c"), {"role": null, "content": "c"}]), json!(null), Some("odd_messages")),
        (json!([user("d"), "d"]), json!(null), Some("odd_messages")),
        (json!([]), json!(null), Some("odd_messages")),
        (json!([user("e")]), json!(["f"]), Some("odd_tools")),
    ];
    for (messages, tools, _) in &table {
        let body = json!({"model": "m1", "messages": messages, "tools": tools});
        assert_eq!(rig.chat(&body).send().await.unwrap().status(), 200);
    }
    let odd_settings = [
        ("temperature", json!(-1)),
        ("temperature", json!("0.7")),
        ("temperature", json!(true)),
        ("top_p", json!([0.5])),
        ("top_k", json!("4")),
        ("min_p", json!({})),
        ("seed", json!("7")),
        ("max_tokens", json!(false)),
        ("max_completion_tokens", json!("9")),
    ];
    for (number, (name, value)) in odd_settings.iter().enumerate() {
        let mut hot = json!({"model": "m1", "messages": [user(&format!("hot {number} {name}"))]});
        hot[*name] = value.clone();
        rig.chat(&hot).send().await.unwrap();
    }
    let mut free = json!({"model": "m1", "messages": [user("as you like")]});
    odd_settings.iter().for_each(|(name, _)| free[*name] = Value::Null);
    rig.chat(&free).send().await.unwrap();
    let streamed = json!({"model": "m1", "stream": true, "messages": [{"content": "streamed"}]});
    rig.chat(&streamed).send().await.unwrap().text().await.unwrap();
    let metrics = rig.metrics().await;
    assert!(metrics.contains("oclaw_untrainable_total{reason=\"odd_messages\"} 5"), "{metrics}");
    let rows = rig.rows().await;
    for (messages, _, reason) in table {
        let text = messages.to_string();
        let row = rows.iter().find(|row| row.messages == text).unwrap();
        assert_eq!(row.untrainable_reason.as_deref(), reason, "{messages}");
    }
    let hot: Vec<_> = rows.iter().filter(|row| row.messages.contains("hot")).collect();
    assert_eq!(hot.len(), odd_settings.len());
    for row in hot {
        assert_eq!(row.untrainable_reason.as_deref(), Some("odd_sampling"), "{}", row.messages);
    }
    let row = rows.iter().find(|row| row.messages.contains("as you like")).unwrap();
    assert_eq!(row.untrainable_reason, None);
    let row = rows.iter().find(|row| row.messages.contains("streamed")).unwrap();
    assert_eq!(row.untrainable_reason.as_deref(), Some("odd_messages"));
}

#[tokio::test]
async fn an_answer_without_a_role_is_the_assistants() {
    let script = |seen: &Seen| {
        let mut body: Value = serde_json::from_str(&answer("x")).unwrap();
        let message = body["choices"][0]["message"].as_object_mut().unwrap();
        match seen.text().contains("stranger") {
            true => drop(message.insert("role".to_owned(), json!("bot"))),
            false => drop(message.remove("role")),
        }
        whole(200, &body.to_string())
    };
    let rig = Rig::start(Speaks::Sglang, script, |_| {}).await;
    let text = rig.chat(&ask("hi")).send().await.unwrap().text().await.unwrap();
    assert!(!text.contains("assistant"), "the client gets what the engine said: {text}");
    rig.chat(&ask("stranger")).send().await.unwrap().text().await.unwrap();
    let rows = rig.rows().await;
    let response: Value = serde_json::from_str(&rows[0].response).unwrap();
    assert_eq!(response, json!({"role": "assistant", "content": "x"}));
    assert_eq!(rows[0].untrainable_reason, None);
    assert_eq!(rows[1].untrainable_reason.as_deref(), Some("odd_answer"));
}

#[tokio::test]
async fn a_session_whose_last_answer_is_empty_ends_with_the_turn_before() {
    let script = |seen: &Seen| match seen.text() {
        text if text.contains("bye") => whole(200, &answer("")),
        text if text.contains("break") => vec![
            super::stream_head(),
            event(&json!({"error": {"message": "out of memory"}})),
            done(),
            Step::End,
        ],
        _ => whole(200, &answer("hello")),
    };
    // What the last request is, and which turns are told to be the session's end.
    for (last, ends) in [
        (json!([user("hi"), said("hello"), user("bye")]), vec![true]),
        (json!([user("other"), user("bye")]), vec![true]),
        (json!([user("hi"), said("hello"), user("break")]), vec![false, true]),
    ] {
        let rig = Rig::start(Speaks::Sglang, script, |options| options.flush_open = false).await;
        let chat = |body: &Value| rig.chat(body).header("x-session-id", "s");
        chat(&ask("hi")).send().await.unwrap().text().await.unwrap();
        let body =
            json!({"model": "m1", "messages": last, "stream": last.to_string().contains("break")});
        let done = chat(&body).header("x-session-done", "1");
        done.send().await.unwrap().text().await.unwrap();
        let rows = rig.rows().await;
        let found: Vec<_> = rows.iter().map(|row| row.session_end).collect();
        assert_eq!(found, ends, "{last}");
    }
}

#[tokio::test]
async fn every_choice_is_a_row_or_counted() {
    let script = |seen: &Seen| {
        let choice = |index: i64| {
            json!({"index": index, "delta": {"content": "x"}, "finish_reason": "stop",
                "message": {"role": "assistant", "content": "x"}})
        };
        let indices: &[i64] = match seen.text() {
            text if text.contains("odd") => &[4_000_000_000, -1],
            text if text.contains("twice") => &[0, 0],
            _ => &[0, 300],
        };
        let choices: Vec<_> = indices.iter().map(|index| choice(*index)).collect();
        match seen.text().contains("\"stream\":true") {
            true => {
                let mut steps = vec![super::stream_head()];
                steps.extend(choices.iter().map(|choice| event(&json!({"choices": [choice]}))));
                steps.extend([done(), Step::End]);
                steps
            }
            false => whole(200, &json!({ "choices": choices }).to_string()),
        }
    };
    // A stream's second piece with the same index goes on with the first.
    for (stream, skipped, turns) in [(false, 4, 2), (true, 3, 2)] {
        let rig = Rig::start(Speaks::Sglang, script, |_| {}).await;
        for what in ["odd", "twice", "far"] {
            let body = json!({"model": "m1", "stream": stream, "messages": [user(what)]});
            rig.chat(&body).send().await.unwrap().text().await.unwrap();
        }
        let summary = rig.running.shutdown().await.unwrap();
        assert_eq!(summary.skipped, [("odd_choice_index", skipped)], "{stream}");
        assert_eq!((summary.turns, summary.rows, summary.open), (turns, turns, 0), "{stream}");
        let found = super::rows(rig.folder.path());
        assert!(found.iter().all(|row| row.choice == 0));
        assert_eq!(found.len() as u64, turns);
    }
}

#[tokio::test]
async fn what_is_not_quite_json_is_forwarded_as_it_is() {
    let rig = Rig::start(Speaks::Sglang, |_| whole(200, &answer("x")), |_| {}).await;
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
async fn session_names_are_data_and_never_paths() {
    let rig = Rig::start(Speaks::Sglang, |_| whole(200, &answer("x")), |_| {}).await;
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

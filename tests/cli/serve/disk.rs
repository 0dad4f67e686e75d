//! A disk that takes nothing: chats go on, the loss is counted, readiness says so,
//! and it heals by itself. A long session takes little room.

use std::process::Command;

use serde_json::{Value, json};

use crate::harness::fake_upstream::{FakeUpstream, Seen, Speaks, Step, json as whole};
use crate::harness::serve::{Serve, ask, echo, rows};
use crate::harness::{oclaw, until};

/// A limit on the size of every file that the program writes: what a full disk is
/// to it. It can be set while the program runs, and needs no rights.
fn limit(serve: &Serve, bytes: &str) {
    let limit = format!("prlimit --pid {} --fsize={bytes}:unlimited", serve.id());
    assert!(Command::new("sh").args(["-c", &limit]).status().unwrap().success());
}

/// Starts it so that a write beyond the limit fails instead of ending it.
fn start(spool: &std::path::Path, arguments: &[&str]) -> Serve {
    let mut command = Command::new("sh");
    command.args(["-c", r#"trap "" XFSZ; exec "$0" "$@""#, env!("CARGO_BIN_EXE_oclaw")]);
    let (serve, said) = Serve::start_by(command, spool, arguments);
    assert_eq!(said, "");
    serve
}

fn chat(serve: &Serve, name: &str) {
    let answer = serve.chat(&ask(name), &format!("x-session-id: {name}\r\n"));
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains(name), "{answer}");
}

fn figure(serve: &Serve, name: &str) -> u64 {
    let metrics = serve.get("/metrics");
    let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {name}: {metrics}")).parse().unwrap()
}

#[test]
fn a_full_disk_ends_no_chat_and_heals() {
    let upstream = FakeUpstream::start(Speaks::Sglang, echo);
    let folder = tempfile::tempdir().unwrap();
    let spool = folder.path().join("turns");
    let serve = start(&spool, &["--engine", &upstream.url(), "--flush-open"]);
    assert!(serve.get("/readyz").starts_with("HTTP/1.1 200"));
    chat(&serve, "before");
    limit(&serve, "0");
    for number in 0..5 {
        chat(&serve, &format!("meanwhile-{number}"));
    }
    let ready = serve.get("/readyz");
    assert!(ready.starts_with("HTTP/1.1 503"), "{ready}");
    assert!(ready.contains("spool: the disk does not take turns"), "{ready}");
    assert!(serve.get("/healthz").starts_with("HTTP/1.1 200"));
    assert_eq!(figure(&serve, "oclaw_journal_errors_total"), 5);
    limit(&serve, "unlimited");
    // Nobody chats; it finds out by itself.
    until("readiness", || serve.get("/readyz").starts_with("HTTP/1.1 200"));
    chat(&serve, "after");
    assert_eq!(figure(&serve, "oclaw_journal_errors_total"), 5);
    assert_eq!(figure(&serve, "oclaw_lost_turns_total"), 0);
    // What it owed is on the disk: a kill loses nothing.
    serve.signal("KILL");
    drop(serve);
    let (serve, _) = Serve::start_saying(&spool, &["--engine", &upstream.url(), "--flush-open"]);
    assert_eq!(serve.stop().0, Some(0));
    let mut found: Vec<_> = rows(&spool).into_iter().map(|row| row.session_id).collect();
    found.sort();
    let wanted = [
        "after",
        "before",
        "meanwhile-0",
        "meanwhile-1",
        "meanwhile-2",
        "meanwhile-3",
        "meanwhile-4",
    ];
    assert_eq!(found, wanted);
    assert!(oclaw().arg("lint").arg(&spool).output().unwrap().status.success());
}

#[test]
fn shards_that_cannot_be_written_wait_for_the_disk() {
    let upstream = FakeUpstream::start(Speaks::Sglang, echo);
    let folder = tempfile::tempdir().unwrap();
    let spool = folder.path().join("turns");
    let serve = start(&spool, &["--engine", &upstream.url(), "--shard-age", "1ms"]);
    limit(&serve, "0");
    for number in 0..3 {
        let headers = format!("x-session-id: s{number}\r\nx-session-done: 1\r\n");
        assert!(serve.chat(&ask("hi"), &headers).starts_with("HTTP/1.1 200"));
    }
    until("a shard fails", || figure(&serve, "oclaw_shard_errors_total") > 0);
    assert!(rows(&spool).is_empty());
    limit(&serve, "unlimited");
    until("rows", || figure(&serve, "oclaw_rows_total") == 3);
    until("readiness", || serve.get("/readyz").starts_with("HTTP/1.1 200"));
    assert_eq!(serve.stop().0, Some(0));
    assert_eq!(rows(&spool).len(), 3);
    let left = std::fs::read_dir(&spool).unwrap().map(|entry| entry.unwrap().file_name());
    let odd: Vec<_> = left.filter(|name| name.to_string_lossy().starts_with(".tmp")).collect();
    assert!(odd.is_empty(), "{odd:?}");
}

/// Whoever stops it while the disk is full learns what that costs.
#[test]
fn turns_that_the_disk_never_took_are_told_at_the_end() {
    let upstream = FakeUpstream::start(Speaks::Sglang, echo);
    for flush in [&[][..], &["--flush-open"]] {
        let folder = tempfile::tempdir().unwrap();
        let spool = folder.path().join("turns");
        let url = upstream.url();
        let serve = start(&spool, &[&["--engine", url.as_str()], flush].concat());
        chat(&serve, "kept");
        limit(&serve, "0");
        chat(&serve, "lost-1");
        chat(&serve, "lost-2");
        let (code, words) = serve.stop();
        assert_eq!(code, Some(1), "{words}");
        assert!(words.contains("2 turns are lost: the journal of"), "{words}");
        assert!(words.contains("hint: make room"), "{words}");
        let (serve, _) = Serve::start_saying(&spool, &["--engine", &url, "--flush-open"]);
        assert_eq!(serve.stop().0, Some(0));
        let found: Vec<_> = rows(&spool).into_iter().map(|row| row.session_id).collect();
        assert_eq!(found, ["kept"]);
    }
}

/// An engine whose prompts are as long as what it is sent, and whose answers are
/// made of a hundred tokens.
fn wordy(seen: &Seen) -> Vec<Step> {
    let asked: Value = serde_json::from_slice(&seen.body).unwrap();
    let messages = asked["messages"].as_array().unwrap();
    let mut ids = Vec::new();
    for message in messages {
        ids.extend(
            message["content"]
                .as_str()
                .unwrap()
                .split(' ')
                .map(|word| 100 + word.len() as u64 * 7 + u64::from(word.as_bytes()[0])),
        );
    }
    let said = words(messages.len() as u64, 80);
    let response: Vec<_> =
        (0..100).map(|place| 5 + (place * 31 + messages.len() * 17) % 40_000).collect();
    let triples: Vec<_> = response
        .iter()
        .enumerate()
        .map(|(place, id)| {
            let log_prob = ((place * 37 + messages.len() * 101) % 4001) as f64 / -1000.0;
            json!([log_prob, id, null])
        })
        .collect();
    let answer = json!({"metadata": {"weight_version": "7"}, "choices": [{"index": 0,
        "message": {"role": "assistant", "content": said}, "finish_reason": "stop", "matched_stop": 9,
        "prompt_token_ids": ids, "response_token_ids": response,
        "meta_info": {"output_token_logprobs": triples}}],
        "usage": {"completion_tokens": 100}});
    whole(200, &answer.to_string())
}

/// Makes up words, other ones for each seed.
fn words(seed: u64, count: usize) -> String {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) + 1;
    let mut word = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let length = 2 + (state >> 61) as usize;
        (0..length)
            .map(|place| char::from(b'a' + ((state >> (8 + 5 * place)) % 26) as u8))
            .collect::<String>()
    };
    (0..count).map(|_| word()).collect::<Vec<_>>().join(" ")
}

/// Returns the bytes of the shards of one session, per turn.
fn bytes_per_turn(turns: u64) -> u64 {
    let upstream = FakeUpstream::start(Speaks::Sglang, wordy);
    let folder = tempfile::tempdir().unwrap();
    let spool = folder.path().join("turns");
    // The session comes to be in one shard.
    let serve =
        Serve::start(&spool, &["--engine", &upstream.url(), "--flush-open", "--shard-age", "1h"]);
    let mut messages = vec![json!({"role": "system", "content": words(1 << 40, 60)})];
    for turn in 0..turns {
        messages.push(json!({"role": "user", "content": words(1 << 50 | turn, 40)}));
        let answer =
            serve.chat(&json!({"model": "m1", "messages": messages}), "x-session-id: s\r\n");
        let body = answer.split_once("\r\n\r\n").unwrap().1;
        let answer: Value = serde_json::from_str(body).unwrap_or_else(|_| panic!("{answer}"));
        messages.push(answer["choices"][0]["message"].clone());
    }
    assert_eq!(serve.stop().0, Some(0));
    let files = std::fs::read_dir(&spool).unwrap().map(|entry| entry.unwrap().path());
    let shards: Vec<_> =
        files.filter(|path| path.extension().is_some_and(|end| end == "parquet")).collect();
    assert_eq!((shards.len(), rows(&spool).len() as u64), (1, turns));
    std::fs::metadata(&shards[0]).unwrap().len() / turns
}

#[test]
fn a_long_session_takes_no_more_room_per_turn() {
    let (short, long) = (bytes_per_turn(25), bytes_per_turn(100));
    println!("bytes per turn: {short} at 25 turns, {long} at 100");
    assert!(2 * long <= 3 * short, "{long} bytes per turn at 100 turns, {short} at 25");
}

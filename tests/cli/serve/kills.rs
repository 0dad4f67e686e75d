//! Kills at any moment, of conversations that are streamed.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::sync::atomic::{AtomicUsize, Ordering};

use oclaw::trajectory::words::NextStateKind;
use serde_json::{Value, json};

use crate::harness::fake_upstream::{FakeUpstream, Seen, Speaks, Step, done, event, stream_head};
use crate::harness::serve::{Serve, rows};

/// Streams the last message back, word by word.
fn words(seen: &Seen) -> Vec<Step> {
    let asked: Value = serde_json::from_slice(&seen.body).unwrap();
    let last = asked["messages"].as_array().unwrap().last().unwrap()["content"].clone();
    let mut steps = vec![stream_head()];
    let parts: Vec<_> = last.as_str().unwrap().split_inclusive(' ').collect();
    for part in &parts {
        let log_probs = json!({"content": [{"token": part, "logprob": -0.5}]});
        steps.push(event(&json!({"choices": [{"index": 0, "delta": {"content": part}, "logprobs": log_probs, "finish_reason": null}]})));
    }
    steps.push(event(&json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "matched_stop": 9}]})));
    let ids: Vec<_> = (0..=parts.len()).collect();
    steps
        .push(event(&json!({"choices": [], "sglext": {"input_ids": [1, 2], "output_ids": [ids]}})));
    steps.push(event(&json!({"choices": [], "usage": {"completion_tokens": ids.len()}})));
    steps.extend([done(), Step::End]);
    steps
}

const TURNS: usize = 3;

/// Holds conversations until the server is gone. Returns the turns whose end was
/// seen: the session, and the turn's words.
fn converse(serve: &Serve, name: &str, seen: &AtomicUsize, fatal: usize) -> Vec<(String, String)> {
    let mut ledger = Vec::new();
    for number in 0.. {
        let session = format!("{name}-{number}");
        let mut messages = Vec::new();
        for turn in 0..TURNS {
            let said = format!("{session} turn {turn} of it");
            messages.push(json!({"role": "user", "content": said}));
            let body = json!({"model": "m1", "stream": true, "messages": messages});
            let Some(mut stream) =
                serve.try_connect(&body, &format!("x-session-id: {session}\r\n"))
            else {
                return ledger;
            };
            let (mut text, mut piece) = (Vec::new(), [0; 256]);
            while let Ok(count @ 1..) = stream.read(&mut piece) {
                text.extend_from_slice(&piece[..count]);
                // One of these pieces, of anybody's, is the last that anybody gets.
                if seen.fetch_add(1, Ordering::SeqCst) == fatal {
                    serve.signal("KILL");
                }
            }
            if !String::from_utf8_lossy(&text).contains("data: [DONE]") {
                return ledger;
            }
            ledger.push((session.clone(), said.clone()));
            messages.push(json!({"role": "assistant", "content": said}));
        }
    }
    ledger
}

#[test]
fn a_kill_inside_a_stream_loses_no_answered_turn_and_doubles_none() {
    let upstream = FakeUpstream::start(Speaks::Sglang, words);
    let folder = tempfile::tempdir().unwrap();
    let spool = folder.path().join("turns");
    let url = upstream.url();
    let mut ledger = BTreeSet::new();
    for round in 0..8 {
        let arguments =
            ["--engine", &url, "--shard-rows", "4", "--shard-age", "5ms", "--session-idle", "1h"];
        let (serve, _) = Serve::start_saying(&spool, &arguments);
        let seen = AtomicUsize::new(0);
        let fatal = 40 + 97 * round % 61;
        std::thread::scope(|scope| {
            let (serve, seen) = (&serve, &seen);
            let people: Vec<_> = (0..3)
                .map(|person| {
                    scope.spawn(move || converse(serve, &format!("{round}-{person}"), seen, fatal))
                })
                .collect();
            for person in people {
                ledger.extend(person.join().unwrap());
            }
        });
    }
    let (serve, _) = Serve::start_saying(&spool, &["--engine", &url, "--flush-open"]);
    let (code, words) = serve.stop();
    assert_eq!(code, Some(0), "{words}");
    let mut found = BTreeMap::new();
    for row in rows(&spool) {
        let messages: Vec<Value> = serde_json::from_str(&row.messages).unwrap();
        let said = messages.last().unwrap()["content"].as_str().unwrap().to_owned();
        assert_eq!(row.turn as usize, messages.len().div_ceil(2), "{row:?}");
        let twice = found.insert((row.session_id.clone(), said), row);
        assert!(twice.is_none(), "{twice:?}");
    }
    assert!(ledger.len() >= 24, "{}", ledger.len());
    for (session, said) in &ledger {
        let row = found.get(&(session.clone(), said.clone()));
        let row = row.unwrap_or_else(|| panic!("lost: {said}"));
        assert_eq!(
            (&row.untrainable_reason, row.response_ids.as_ref().map(Vec::len)),
            (&None, Some(6)),
            "{row:?}"
        );
        let turn = row.turn as usize;
        let next = format!("{session} turn {turn} of it");
        if ledger.contains(&(session.clone(), next)) {
            assert_eq!(row.next_state_kind, NextStateKind::User, "{row:?}");
        }
    }
}

//! Chats that go on while weights come.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use oclaw::serving::{Options, start};
use oclaw::trajectory::Turn;

use super::*;
use crate::harness::fixture_models as models;
use crate::harness::serve::{Serve, rows};

const SYNCS: usize = 5;
const PEOPLE: usize = 3;

/// Three people chat without a pause, whole answers and streams; five policies come;
/// no chat fails, and every row tells the versions that it began and ended with.
#[test]
fn no_chat_fails_while_five_policies_come() {
    let (folder, spool) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let base = models().join("tiny-qwen3");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let engine = runtime.block_on(start(Options::new(base.clone()))).unwrap();
    let url = engine.url();
    let serve = Serve::start(spool.path(), &["--engine", &url]);
    let (over, chats, failed) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
    let chat = |person: usize| {
        for turn in 0.. {
            if over.load(Ordering::Relaxed) {
                return;
            }
            let body = json!({
                "model": "m", "max_tokens": 24, "ignore_eos": true, "stream": turn % 2 == 1,
                "messages": [{"role": "user", "content": format!("{person} {turn}")}],
            });
            let session = format!("x-session-id: {person}-{turn}\r\nx-session-done: 1\r\n");
            let answer = serve.chat(&body, &session);
            let is_whole = answer.starts_with("HTTP/1.1 200")
                && answer.contains(r#""finish_reason":"length""#)
                && answer.contains("[DONE]") == (turn % 2 == 1);
            if !is_whole {
                eprintln!("{answer}");
            }
            failed.fetch_add(usize::from(!is_whole), Ordering::Relaxed);
            chats.fetch_add(1, Ordering::Relaxed);
        }
    };
    std::thread::scope(|scope| {
        for person in 0..PEOPLE {
            let chat = &chat;
            scope.spawn(move || chat(person));
        }
        for step in 1..=SYNCS {
            let name = format!("step-{step:06}");
            let policy = folder.path().join(&name);
            std::fs::create_dir(&policy).unwrap();
            for entry in std::fs::read_dir(&base).unwrap() {
                let entry = entry.unwrap();
                std::fs::copy(entry.path(), policy.join(entry.file_name())).unwrap();
            }
            // Several chats of each version.
            let before = chats.load(Ordering::Relaxed);
            while chats.load(Ordering::Relaxed) < before + 2 * PEOPLE {
                std::thread::park_timeout(std::time::Duration::from_millis(5));
            }
            let proxy = format!("http://{}", serve.address);
            let args = ["sync-weights", &name, "--engine", &url, "--proxy", &proxy];
            oclaw().current_dir(folder.path()).args(args).assert().success();
        }
        over.store(true, Ordering::Relaxed);
    });
    assert_eq!(failed.load(Ordering::Relaxed), 0);
    let (code, words) = serve.stop();
    assert_eq!(code, Some(0), "{words}");
    runtime.block_on(engine.shutdown());
    tell_their_versions(&rows(spool.path()), chats.load(Ordering::Relaxed));
}

fn tell_their_versions(rows: &[Turn], chats: usize) {
    assert_eq!(rows.len(), chats);
    let step = |version: &Option<String>| version.as_ref().unwrap().parse::<usize>().unwrap();
    let mut seen = std::collections::BTreeSet::new();
    for row in rows {
        let (begin, end) = (step(&row.weight_version), step(&row.weight_version_end));
        assert!(begin <= end && end <= SYNCS, "{row:?}");
        seen.extend([begin, end]);
    }
    assert_eq!(seen.len(), SYNCS + 1, "{seen:?}");
}

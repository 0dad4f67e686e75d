//! Chats that go on while weights come.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use oclaw::engine::{Engine, EngineOptions, Pushed};
use oclaw::serving::{Options, Running, start};
use oclaw::trajectory::Turn;
use oclaw::wire::sglang::PauseMode;

use super::*;
use crate::harness::serve::{Serve, rows};
use crate::harness::{fixture_models as models, until};

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

/// Returns how many tokens an engine has generated.
fn generated(running: &Running) -> f64 {
    let mut stream = TcpStream::connect(running.address).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let name = "sglang:generation_tokens_total{model_name=\"tiny-qwen3\"} ";
    text.lines().find_map(|line| line.strip_prefix(name)).unwrap().parse().unwrap()
}

/// New weights come in the middle of an answer: its row tells both versions.
#[test]
fn a_row_carries_the_versions_of_its_first_token_and_of_its_last() {
    let spool = tempfile::tempdir().unwrap();
    let base = models().join("tiny-qwen3");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let running = runtime.block_on(start(Options::new(base.clone()))).unwrap();
    let engine = runtime.block_on(Engine::attach(EngineOptions::new(running.url()))).unwrap();
    let serve = Serve::start(spool.path(), &["--engine", &running.url()]);
    let body = json!({
        "model": "m", "max_tokens": 1000, "ignore_eos": true,
        "messages": [{"role": "user", "content": "Go on."}],
    });
    // On a busy machine an answer may be over before they come: then another one.
    let cut = (1..=20).find(|version| {
        let before = generated(&running);
        let session = format!("x-session-id: {version}\r\nx-session-done: 1\r\n");
        std::thread::scope(|scope| {
            let chat = scope.spawn(|| serve.chat(&body, &session));
            until("a token of the answer", || generated(&running) > before);
            runtime.block_on(async {
                engine.pause(PauseMode::InPlace).await.unwrap();
                let pushed = Pushed { folder: &base, version: &version.to_string() };
                engine.update_weights_from_disk(pushed).await.unwrap();
                engine.resume().await.unwrap();
            });
            let answer = chat.join().unwrap();
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
            answer.contains("\"weight_versions\":")
        })
    });
    let (code, words) = serve.stop();
    assert_eq!(code, Some(0), "{words}");
    runtime.block_on(running.shutdown());
    let cut: i32 = cut.unwrap_or_else(|| panic!("the weights never came in time"));
    let rows = rows(spool.path());
    let both = rows.iter().filter(|row| row.weight_version != row.weight_version_end);
    let both: Vec<_> = both
        .map(|row| (row.weight_version.as_deref().unwrap(), row.weight_version_end.as_deref()))
        .collect();
    let (old, new) = ((cut - 1).to_string(), cut.to_string());
    assert_eq!(both, [(&old[..], Some(&new[..]))]);
}

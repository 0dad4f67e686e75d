//! The file that `oclaw init` writes is one that runs.

use std::fs;

use super::Loop;
use super::chats::converse;
use crate::harness::{fixture_models, oclaw};

#[test]
fn what_init_writes_learns_from_a_conversation() {
    let folder = tempfile::tempdir().unwrap();
    let model = fixture_models().join("tiny-qwen3");
    oclaw().args(["init", "--model"]).arg(model).current_dir(folder.path()).assert().success();
    let mut text = fs::read_to_string(folder.path().join("oclaw.toml")).unwrap();
    // Ports of the test's own, and less patience than a person has.
    for (from, to) in [
        ("127.0.0.1:30000\"", "FRONT\""),
        ("127.0.0.1:30001\"", "ENGINE\""),
        ("shard-age = \"10s\"", "shard-age = \"200ms\""),
        ("batch-turns = 16", "batch-turns = 2"),
        ("max-wait = \"30m\"", "max-wait = \"1s\""),
    ] {
        assert!(text.contains(from), "{from}\n{text}");
        text = text.replace(from, to);
    }
    let looped = Loop::new(&text);
    let mut check = oclaw();
    check.args(["check", "oclaw.toml"]).current_dir(looped.path("")).assert().success();
    let mut running = looped.start();
    running.hears("serve: ready");
    converse(&looped.front, "first", 4);
    let engine = format!("http://{}", looped.engine);
    looped.until("a policy is served", |status| {
        status["policy"]["served"][&engine].as_str().is_some_and(|version| version != "0")
    });
    let (code, words) = running.stop();
    assert_eq!(code, Some(0), "{words}");
}

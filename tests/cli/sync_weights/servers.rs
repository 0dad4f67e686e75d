//! Routers, and a proxy in front of adapters.

use super::super::follow::Running;
use super::super::stores::settings;
use super::*;
use crate::harness::serve::{Serve, ask};

#[test]
fn a_router_stands_for_its_workers() {
    let folder = tempfile::tempdir().unwrap();
    policy_in(folder.path());
    let newer = |urls: [String; 2]| json!({"workers": urls.map(|url| json!({"url": url}))});
    let older =
        |[one, two]: [String; 2]| json!({"urls": [format!("{one}@0"), format!("{one}@1"), two]});
    type Form<'a> = (&'a str, &'a dyn Fn([String; 2]) -> serde_json::Value);
    let forms: [Form<'_>; 2] = [("/workers", &newer), ("/list_workers", &older)];
    for (path, form) in forms {
        let (one, two, router) = (FakeEngine::sglang(), FakeEngine::sglang(), FakeEngine::start());
        let info = json!({"model_path": "/m", "weight_version": "default"});
        router.on("/get_model_info", [Reply::json(200, info)]);
        router.on(path, [Reply::json(200, form([one.url(), two.url()]))]);
        let done = sync(folder.path(), &["--engine", &router.url()]).success();
        assert!(stderr(&done).contains("version 7 pushed to 2 of 2"), "{}", stderr(&done));
        for worker in [&one, &two] {
            assert_eq!(worker.version().as_deref(), Some("7"));
        }
        // One after the other: the first is well again before the second is held.
        let time = |fake: &FakeEngine, path: &str| {
            fake.seen().into_iter().find(|seen| seen.path == path).unwrap().at
        };
        assert!(time(&one, "/ready") < time(&two, "/pause_generation"));
        assert!(!router.paths().iter().any(|path| path.contains("generation")));
    }
    let router = FakeEngine::sglang();
    router.on("/workers", [Reply::json(200, json!({"workers": []}))]);
    let none = sync(folder.path(), &["--engine", &router.url()]).code(4);
    assert!(stderr(&none).contains("has no workers"), "{}", stderr(&none));
}

#[test]
fn chats_ask_for_the_adapter_that_was_loaded_last() {
    let (folder, spool) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    policy_in(folder.path());
    let adapter = folder.path().join("step-000007/adapter");
    let without = sync(folder.path(), &["--engine", "http://127.0.0.1:1", "--adapter"]).code(1);
    assert!(stderr(&without).contains("of its `adapter/`"), "{}", stderr(&without));
    std::fs::create_dir(&adapter).unwrap();
    std::fs::write(adapter.join("adapter_config.json"), "{}").unwrap();
    std::fs::write(adapter.join("adapter_model.safetensors"), "").unwrap();
    let fake = FakeEngine::sglang();
    let answer = json!({"choices": [{"index": 0, "finish_reason": "stop",
        "message": {"role": "assistant", "content": "yes"}}]});
    fake.on("/v1/chat/completions", [Reply::json(200, answer)]);
    let asked = || {
        let is_chat = |path: &str| path == "/v1/chat/completions";
        fake.seen().iter().rfind(|seen| is_chat(&seen.path)).unwrap().body["model"].clone()
    };
    let serve = Serve::start(spool.path(), &["--engine", &fake.url(), "--model-name", "m1"]);
    serve.chat(&ask("before"), "");
    assert_eq!(asked(), json!("m"));
    let proxy = format!("http://{}", serve.address);
    sync(folder.path(), &["--engine", &fake.url(), "--proxy", &proxy, "--adapter"]).success();
    serve.chat(&ask("after"), "");
    assert_eq!(asked(), json!("oclaw-v7"));
    serve.stop();

    // One that hands on whatever name clients ask for cannot choose.
    let other = tempfile::tempdir().unwrap();
    let serve = Serve::start(other.path(), &["--engine", &fake.url()]);
    let proxy = format!("http://{}", serve.address);
    let told = sync(folder.path(), &["--engine", &fake.url(), "--proxy", &proxy, "--adapter"]);
    assert!(stderr(&told.code(4)).contains("start it with `--model-name`"));
    serve.stop();
}

/// Follows a folder until a signal.
fn follow(folder: &Path, further: &[&str]) -> Running {
    let mut command = oclaw();
    command.current_dir(folder).args(["sync-weights", "--poll", "1ms", "--tries", "1"]);
    command.args(further);
    Running::start(&command)
}

/// A worker that takes the place of another gets the policy as it comes.
#[test]
fn workers_of_a_router_are_looked_up_again() {
    let folder = tempfile::tempdir().unwrap();
    policy_in(folder.path());
    let (one, two, router) = (FakeEngine::sglang(), FakeEngine::sglang(), FakeEngine::start());
    let info = json!({"model_path": "/m", "weight_version": "default"});
    router.on("/get_model_info", [Reply::json(200, info)]);
    let worker = |url: String| [Reply::json(200, json!({"workers": [{"url": url}]}))];
    router.on("/workers", worker(one.url()));
    let mut syncing = follow(folder.path(), &["--follow", ".", "--engine", &router.url()]);
    syncing.hears("version 7 pushed to 1 of 1");
    assert_eq!((one.version().as_deref(), two.version().as_deref()), (Some("7"), Some("default")));
    router.on("/workers", worker(two.url()));
    syncing.hears("version 7 pushed to 1 of 1");
    assert_eq!(two.version().as_deref(), Some("7"));
    assert_eq!(syncing.stop().0, Some(0));
}

/// Chats may ask for an adapter that was loaded before its push failed.
#[test]
fn a_follower_takes_no_adapter_away() {
    let folder = tempfile::tempdir().unwrap();
    policy_in(folder.path());
    let adapter = folder.path().join("step-000007/adapter");
    std::fs::create_dir(&adapter).unwrap();
    std::fs::write(adapter.join("adapter_config.json"), "{}").unwrap();
    std::fs::write(adapter.join("adapter_model.safetensors"), "").unwrap();
    let fake = FakeEngine::sglang();
    fake.on("/update_weight_version", [Reply::json(503, json!({"error": "busy"}))]);
    let url = fake.url();
    let mut syncing = follow(folder.path(), &["--follow", ".", "--engine", &url, "--adapter"]);
    syncing.hears("answered 503: busy: waiting for it");
    fake.on("/update_weight_version", []);
    syncing.hears("version 7 pushed to 1 of 1");
    assert_eq!(syncing.stop().0, Some(0));
    assert!(!fake.paths().iter().any(|path| path == "/unload_lora_adapter"), "{:?}", fake.paths());
}

/// What is about servers means nothing where none is named.
#[test]
fn flags_for_nobody_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    policy_in(folder.path());
    for (further, name) in [
        (&["--force"][..], "force"),
        (&["--proxy", "http://127.0.0.1:1"], "proxy"),
        (&["--engine-key-file", "key"], "engine-key-file"),
        (&["--proxy-key-file", "key"], "proxy-key-file"),
    ] {
        let refused = sync(folder.path(), &[&["--publish", "public"], further].concat()).code(2);
        let words = format!(
            "`--{name}` is about servers, and none is named\nhint: give `--engine URL`, or leave `--{name}` out"
        );
        assert!(stderr(&refused).contains(&words), "{}", stderr(&refused));
    }
    assert!(!folder.path().join("public").exists());
}

/// A store that takes a call and never answers it does not hold up the end.
#[test]
fn a_store_that_hangs_does_not_hold_up_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut command = oclaw();
    command.current_dir(folder.path()).args(["sync-weights", "--follow", "s3://bucket/policy"]);
    command.args(["--engine", "http://127.0.0.1:1", "--object-cache", "cache"]);
    command.envs(settings(&format!("http://{}", silent.local_addr().unwrap())));
    command.env("NO_PROXY", "127.0.0.1");
    let syncing = Running::start(&command);
    let _asked = silent.accept().unwrap();
    let (code, words) = syncing.stop();
    assert_eq!(code, Some(0), "{words}");
}

//! Routers, and a proxy in front of adapters.

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

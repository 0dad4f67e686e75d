//! Adapters, each under a name of its own.

use super::*;

/// Makes the folder of a policy that has an adapter beside its weights.
fn adapter_in(folder: &Path, name: &str) -> Policy {
    let policy = policy_in(folder, name);
    std::fs::create_dir(policy.join("adapter")).unwrap();
    std::fs::write(policy.join("adapter/adapter_config.json"), "{}").unwrap();
    std::fs::write(policy.join("adapter/adapter_model.safetensors"), "").unwrap();
    Policy::resolve(&policy, None).unwrap().as_adapter().unwrap()
}

async fn proxy(answer: serde_json::Value) -> (FakeEngine, Engine) {
    let proxy = FakeEngine::start();
    proxy.on("/oclaw/policy", [Reply::json(200, answer)]);
    let told = Engine::attach(EngineOptions::new(format!("openai+{}", proxy.url()))).await.unwrap();
    (proxy, told)
}

#[tokio::test]
async fn each_version_is_loaded_beside_the_others_and_old_ones_go() {
    let sglang = [
        "/v1/models",
        "/load_lora_adapter",
        "/update_weight_version",
        "/v1/models",
        "/model_info",
        "/ready",
    ];
    let vllm = ["/v1/models", "/v1/load_lora_adapter", "/v1/models", "/ready", "/health"];
    for (fake, whole, unload) in [
        (FakeEngine::sglang(), &sglang[..], "/unload_lora_adapter"),
        (FakeEngine::vllm(), &vllm[..], "/v1/unload_lora_adapter"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let engines = [engine(&fake).await];
        let (proxy, told) = proxy(json!({"success": true, "renamed": true})).await;
        let proxies = [told];
        for step in 1..=4 {
            let policy = adapter_in(folder.path(), &format!("step-00000{step}"));
            fake.forget();
            let outcome = sync::push(&policy, &engines, &[], Options::default(), &|_| {}).await;
            assert_eq!(outcome.unwrap(), 1);
            assert_eq!(fake.paths(), whole);
            let expected = json!({
                "lora_name": format!("oclaw-v{step}"),
                "lora_path": policy.folder.join("adapter"),
            });
            assert_eq!(fake.seen()[1].body, expected);
            // Again, and the proxy is told; the two before stay for requests on their way.
            let outcome =
                sync::push(&policy, &engines, &proxies, Options::default(), &|_| {}).await;
            assert_eq!(outcome.unwrap(), 0);
            let told = proxy.seen().pop().unwrap().body;
            assert_eq!(told["model"], json!(format!("oclaw-v{step}")));
            assert_eq!(told["weight_version"], json!(step.to_string()));
        }
        assert_eq!(fake.adapters(), ["oclaw-v2", "oclaw-v3", "oclaw-v4"]);
        let gone: Vec<_> = fake.seen().into_iter().filter(|seen| seen.path == unload).collect();
        assert_eq!(gone.len(), 1);
        assert_eq!(gone[0].body, json!({"lora_name": "oclaw-v1"}));

        // The model itself is asked for by its own name again.
        let base = Policy::resolve(&policy_in(folder.path(), "base"), Some("0")).unwrap();
        sync::push(&base, &engines, &proxies, Options::default(), &|_| {}).await.unwrap();
        assert_eq!(proxy.seen().pop().unwrap().body["model"], json!("m"));
    }
}

#[tokio::test]
async fn a_name_of_another_folder_is_replaced_only_by_force() {
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let policy = adapter_in(folder.path(), "step-000007");
    let fake = FakeEngine::sglang();
    push(&fake, &adapter_in(other.path(), "step-000007"), false).await.0.unwrap();
    let (outcome, _) = push(&fake, &policy, false).await;
    let Err(Error::OtherAdapter { name, folder: found, .. }) = outcome else {
        panic!("{outcome:?}");
    };
    let there = other.path().canonicalize().unwrap().join("step-000007/adapter");
    assert_eq!((name.as_str(), Path::new(&found)), ("oclaw-v7", there.as_path()));
    let (outcome, tried) = push(&fake, &policy, true).await;
    assert_eq!(outcome.unwrap(), 1, "{tried:?}");
    assert_eq!(fake.paths()[1..3], ["/unload_lora_adapter", "/load_lora_adapter"]);
    assert_eq!(fake.adapters(), ["oclaw-v7"]);
}

#[tokio::test]
async fn what_fails_leaves_the_proxy_at_the_name_before() {
    let folder = tempfile::tempdir().unwrap();
    let policy = adapter_in(folder.path(), "step-000007");
    let no = || Reply::json(200, json!({"success": false, "error_message": "rank too large"}));
    let list = |name: &str| Reply::json(200, json!({"data": [{"id": name}]}));
    for (path, replies, expected) in [
        ("/load_lora_adapter", vec![no()], "refused: rank too large"),
        (
            "/load_lora_adapter",
            vec![Reply::json(400, json!({"error_message": "no"}))],
            "refused: no",
        ),
        ("/load_lora_adapter", vec![Reply::broken()], "update failed: "),
        ("/load_lora_adapter", vec![Reply::json(200, json!({}))], "whether it was done"),
        ("/update_weight_version", vec![no()], "update failed: "),
        ("/v1/models", vec![list("m"), list("oclaw-v6")], "carries version `6`"),
        ("/v1/models", vec![list("m"), Reply::text(500, "boom")], "version check failed"),
        ("/ready", vec![Reply::text(503, "")], "health check failed"),
    ] {
        let fake = FakeEngine::sglang();
        let (proxy, told) = proxy(json!({"success": true})).await;
        let engines = [engine(&fake).await];
        fake.on(path, replies);
        let outcome = sync::push(&policy, &engines, &[told], Options::default(), &|_| {}).await;
        let message = outcome.unwrap_err().to_string();
        assert!(message.contains(expected), "{path}: {message}");
        assert_eq!(proxy.paths(), [""; 0], "{path}");
        assert!(!fake.paths().contains(&"/pause_generation".to_owned()), "{path}");
    }
}

#[tokio::test]
async fn a_try_that_arrived_all_the_same_is_good() {
    let folder = tempfile::tempdir().unwrap();
    let policy = adapter_in(folder.path(), "step-000007");
    let fake = FakeEngine::sglang();
    push(&fake, &policy, false).await.0.unwrap();
    // It is not listed when it is asked for first: the load was still under way.
    let list = |data| Reply::json(200, json!({"data": data}));
    let whole = json!([{"id": "m"}, {"id": "oclaw-v7", "root": policy.folder.join("adapter")}]);
    let engines = [engine(&fake).await];
    fake.on("/v1/models", [list(json!([{"id": "m"}])), list(whole)]);
    let outcome = sync::push(&policy, &engines, &[], Options::default(), &|_| {}).await;
    assert_eq!(outcome.unwrap(), 1);
}

#[tokio::test]
async fn nothing_goes_while_the_proxy_does_not_ask_for_the_new_name() {
    let folder = tempfile::tempdir().unwrap();
    let fake = FakeEngine::sglang();
    let engines = [engine(&fake).await];
    let (_proxy, told) = proxy(json!({"success": true, "renamed": false})).await;
    let proxies = [told];
    for step in 1..=4 {
        let policy = adapter_in(folder.path(), &format!("step-00000{step}"));
        let outcome = sync::push(&policy, &engines, &proxies, Options::default(), &|_| {}).await;
        let message = outcome.unwrap_err().to_string();
        assert!(message.ends_with("start it with `--model-name`"), "{message}");
    }
    assert_eq!(fake.adapters().len(), 4);
}

#[test]
fn an_adapter_is_a_folder_of_peft() {
    let folder = tempfile::tempdir().unwrap();
    let policy = adapter_in(folder.path(), "step-000007");
    let alone = Policy::resolve(&policy.folder.join("adapter"), Some("7")).unwrap();
    assert_eq!(alone.adapter_name().as_deref(), Some("oclaw-v7"));
    assert_eq!(Policy::resolve(&policy.folder, None).unwrap().adapter_name(), None);
    std::fs::remove_file(policy.folder.join("adapter/adapter_model.safetensors")).unwrap();
    let broken = Policy::resolve(&policy.folder, None).unwrap().as_adapter().unwrap_err();
    assert!(
        broken.to_string().ends_with("of its `adapter/`: it has no `adapter_model.safetensors`"),
        "{broken}"
    );
}

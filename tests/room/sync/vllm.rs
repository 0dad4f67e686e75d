//! vLLM in developer mode.

use super::*;

const VLLM: [&str; 9] = [
    "/weight_info",
    "/pause",
    "/collective_rpc",
    "/update_weight_version",
    "/weight_info",
    "/reset_prefix_cache",
    "/resume",
    // SGLang's, which it does not know.
    "/ready",
    "/health",
];

#[tokio::test]
async fn weights_are_read_again_by_its_workers() {
    let folder = tempfile::tempdir().unwrap();
    let policy = Policy::resolve(&policy_in(folder.path(), "step-000007"), None).unwrap();
    let fake = FakeEngine::vllm();
    let (outcome, _) = push(&fake, &policy, false).await;
    assert_eq!(outcome.unwrap(), 1);
    assert_eq!(fake.paths(), VLLM);
    let seen = fake.seen();
    // Requests wait; in its other modes they would be refused.
    assert_eq!(seen[1].query, "mode=keep&clear_cache=false");
    let folder = policy.folder.display().to_string();
    let expected = json!({"method": "reload_weights", "kwargs": {"weights_path": folder}});
    assert_eq!(seen[2].body, expected);
    assert_eq!(seen[3].body, json!({"new_version": "7"}));
    assert_eq!(seen[5].query, "reset_running_requests=true");
    let (outcome, _) = push(&fake, &policy, false).await;
    assert_eq!(outcome.unwrap(), 0);
}

#[tokio::test]
async fn whatever_fails_it_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let policy = Policy::resolve(&policy_in(folder.path(), "step-000007"), None).unwrap();
    for (path, reply, expected) in [
        ("/pause", Reply::broken(), "pause failed"),
        ("/collective_rpc", Reply::json(500, json!({"detail": "boom"})), "update failed"),
        ("/update_weight_version", Reply::text(500, "boom"), "update failed"),
        ("/reset_prefix_cache", Reply::json(200, json!({"success": false})), "flush failed"),
        ("/reset_prefix_cache", Reply::text(200, "ok"), "flush failed"),
        ("/resume", Reply::text(500, "boom"), "continue failed"),
        ("/health", Reply::text(503, ""), "health check failed"),
    ] {
        let fake = FakeEngine::vllm();
        fake.on(path, [reply]);
        let (outcome, _) = push(&fake, &policy, false).await;
        let message = outcome.unwrap_err().to_string();
        assert!(message.starts_with(expected), "{path}: {message}");
        assert!(fake.paths().contains(&"/resume".to_owned()), "{path}");
    }
}

#[tokio::test]
async fn one_that_tells_no_version_is_taken_on_its_word_and_that_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let policy = Policy::resolve(&policy_in(folder.path(), "step-000007"), None).unwrap();
    let fake = FakeEngine::vllm();
    for path in ["/weight_info", "/update_weight_version"] {
        fake.on(path, [Reply::json(404, json!({"detail": "Not Found"}))]);
    }
    let (outcome, tried) = push(&fake, &policy, false).await;
    assert_eq!(outcome.unwrap(), 1);
    assert_eq!(tried[0], "asking for the version: this server tells no version");
    assert_eq!(tried[3], "version check: this server tells no version: taken on its word");
}

#[tokio::test]
async fn what_it_was_started_without_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let policy = Policy::resolve(&policy_in(folder.path(), "step-000007"), None).unwrap();
    let missing = || [Reply::json(404, json!({"detail": "Not Found"}))];
    let fake = FakeEngine::vllm();
    for path in ["/pause", "/resume", "/weight_info"] {
        fake.on(path, missing());
    }
    let message = push(&fake, &policy, false).await.0.unwrap_err().to_string();
    assert!(message.ends_with("it was started with `VLLM_SERVER_DEV_MODE=1`"), "{message}");
    let adapter = policy.folder.join("adapter");
    std::fs::create_dir(&adapter).unwrap();
    std::fs::write(adapter.join("adapter_config.json"), "{}").unwrap();
    std::fs::write(adapter.join("adapter_model.safetensors"), "").unwrap();
    let policy = policy.as_adapter().unwrap();
    fake.on("/v1/load_lora_adapter", missing());
    let message = push(&fake, &policy, false).await.0.unwrap_err().to_string();
    assert!(message.ends_with("`VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`"), "{message}");
    // A folder that it does not find is another matter.
    let absent = json!({"error": {"message": "No adapter found"}});
    fake.on("/v1/load_lora_adapter", [Reply::json(404, absent)]);
    let message = push(&fake, &policy, false).await.0.unwrap_err().to_string();
    assert!(message.ends_with("answered 404: No adapter found"), "{message}");
}

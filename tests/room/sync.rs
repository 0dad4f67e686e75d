//! Pushing a policy, against a scripted control plane.

mod adapters;
mod faults;
mod vllm;

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use oclaw::engine::{Engine, EngineOptions, Retries};
use oclaw::sync::{self, Error, Lock, Options, Policy, Tried};
use serde_json::json;

use crate::harness::fake_engine::{FakeEngine, Reply};

/// Makes the folder of a policy.
fn policy_in(folder: &Path, name: &str) -> PathBuf {
    let policy = folder.join(name);
    std::fs::create_dir(&policy).unwrap();
    std::fs::write(policy.join("config.json"), "{}").unwrap();
    std::fs::write(policy.join("model.safetensors"), "").unwrap();
    policy
}

async fn engine(fake: &FakeEngine) -> Engine {
    let mut options = EngineOptions::new(fake.url());
    options.timeout = Duration::from_secs(20);
    options.retries =
        Retries { tries: 2, first_wait: Duration::from_millis(1), ..Retries::default() };
    Engine::attach(options).await.unwrap()
}

/// Pushes and returns the outcome with the words of what was tried.
async fn push(
    fake: &FakeEngine,
    policy: &Policy,
    force: bool,
) -> (Result<usize, Error>, Vec<String>) {
    let engine = engine(fake).await;
    fake.forget();
    let tried = RefCell::new(Vec::new());
    let watch = |part: Tried| tried.borrow_mut().push(format!("{}: {}", part.step, part.outcome));
    let outcome = sync::push(policy, &[engine], &[], Options { force }, &watch).await;
    (outcome, tried.into_inner())
}

const WHOLE: [&str; 7] = [
    "/model_info",
    "/pause_generation",
    "/update_weights_from_disk",
    "/model_info",
    "/flush_cache",
    "/continue_generation",
    "/ready",
];

#[tokio::test]
async fn a_push_pauses_loads_verifies_flushes_and_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let path = policy_in(folder.path(), "step-000007");
    let policy = Policy::resolve(&path, None).unwrap();
    let fake = FakeEngine::sglang();
    let (outcome, _) = push(&fake, &policy, false).await;
    assert_eq!(outcome.unwrap(), 1);
    assert_eq!(fake.paths(), WHOLE);
    assert_eq!(fake.version().as_deref(), Some("7"));
    assert_eq!(fake.seen()[1].body, json!({"mode": "retract"}));
    let expected = json!({
        "model_path": path.canonicalize().unwrap(), "weight_version": "7",
        "abort_all_requests": false, "flush_cache": true,
    });
    assert_eq!(fake.seen()[2].body, expected);

    let (outcome, tried) = push(&fake, &policy, false).await;
    assert_eq!(outcome.unwrap(), 0);
    // A push that was killed may have left it held.
    assert_eq!(fake.paths(), ["/model_info", "/continue_generation"]);
    assert_eq!(tried[1], "update: already at version `7` (from `/m`)");
    let (outcome, _) = push(&fake, &policy, true).await;
    assert_eq!((outcome.unwrap(), fake.paths().len()), (1, WHOLE.len()));
}

#[tokio::test]
async fn two_pushes_do_not_overlap() {
    let folder = tempfile::tempdir().unwrap();
    let first = Policy::resolve(&policy_in(folder.path(), "step-000007"), None).unwrap();
    let second = Policy::resolve(&policy_in(folder.path(), "step-000008"), None).unwrap();
    let fake = Arc::new(FakeEngine::sglang());
    let engine = engine(&fake).await;
    fake.forget();
    fake.hold("/update_weights_from_disk");
    let locked = async |policy: &Policy| {
        let _lock = Lock::take(policy, Duration::from_secs(30)).await.unwrap();
        let engines = [engine.clone()];
        sync::push(policy, &engines, &[], Options::default(), &|_| {}).await.unwrap()
    };
    let third = async {
        let held = fake.clone();
        let arrived = move || held.arrived("/update_weights_from_disk", 1);
        tokio::task::spawn_blocking(arrived).await.unwrap();
        let hasty = Lock::take(&second, Duration::ZERO).await;
        assert!(matches!(hasty, Err(Error::Locked { .. })));
        fake.release();
    };
    let both = async { tokio::join!(locked(&first), locked(&second)) };
    let (both, ()) = tokio::join!(both, third);
    assert_eq!(both, (1, 1));
    assert_eq!(fake.paths(), [WHOLE, WHOLE].concat());
    assert_eq!(fake.version().as_deref(), Some("8"));
}

#[tokio::test]
async fn the_proxy_is_told_last() {
    let folder = tempfile::tempdir().unwrap();
    let policy = Policy::resolve(&policy_in(folder.path(), "step-000007"), None).unwrap();
    let (fake, proxy) = (FakeEngine::sglang(), FakeEngine::start());
    proxy.on("/oclaw/policy", [Reply::json(200, json!({"success": true}))]);
    let told = Engine::attach(EngineOptions::new(format!("openai+{}", proxy.url()))).await.unwrap();
    let engine = engine(&fake).await;
    let outcome = sync::push(&policy, &[engine], &[told], Options::default(), &|_| {}).await;
    assert_eq!(outcome.unwrap(), 1);
    assert_eq!(proxy.seen()[0].body["weight_version"], "7");
}

#[test]
fn a_policy_is_a_whole_folder_with_a_version() {
    let folder = tempfile::tempdir().unwrap();
    let path = policy_in(folder.path(), "step-000007");
    let whole = path.canonicalize().unwrap();
    std::os::unix::fs::symlink("step-000007", folder.path().join("latest")).unwrap();
    std::fs::write(folder.path().join("newest"), "step-000007\n").unwrap();
    for name in ["step-000007", "latest", "newest"] {
        let policy = Policy::resolve(&folder.path().join(name), None).unwrap();
        assert_eq!((policy.folder, policy.version.as_str()), (whole.clone(), "7"), "{name}");
    }
    assert_eq!(Policy::resolve(&path, Some("99")).unwrap().version, "99");
    let base = policy_in(folder.path(), "SmolLM2");
    let error = Policy::resolve(&base, None).unwrap_err().to_string();
    assert!(error.ends_with("`SmolLM2` is not named like `step-000007`"), "{error}");
    assert_eq!(Policy::resolve(&base, Some("0")).unwrap().version, "0");
    assert!(matches!(Policy::resolve(&base, Some(" ")), Err(Error::Version { .. })));

    let refused = |path: &Path| Policy::resolve(path, None).unwrap_err().to_string();
    assert!(refused(&folder.path().join("gone")).contains("gone"));
    std::fs::remove_file(path.join("model.safetensors")).unwrap();
    assert!(refused(&path).ends_with("it has no `model.safetensors`"));
    let index = json!({"weight_map": {"a": "model-1.safetensors"}});
    std::fs::write(path.join("model.safetensors.index.json"), index.to_string()).unwrap();
    assert!(refused(&path).ends_with("it has no `model-1.safetensors`, which its index names"));
    std::fs::remove_file(path.join("config.json")).unwrap();
    assert!(refused(&path).ends_with("it has no `config.json`"));
}

#[test]
fn what_a_killed_rollback_left_stops_no_other() {
    let folder = tempfile::tempdir().unwrap();
    for step in ["step-000001", "step-000002"] {
        policy_in(folder.path(), step);
    }
    let latest = folder.path().join("latest");
    std::os::unix::fs::symlink("step-000002", &latest).unwrap();
    let aside = folder.path().join(format!(".tmp-latest-{}", std::process::id()));
    std::os::unix::fs::symlink("nowhere", &aside).unwrap();
    sync::Rollback::plan(folder.path()).unwrap().commit().unwrap();
    assert_eq!(std::fs::read_link(&latest).unwrap(), Path::new("step-000001"));
    assert!(folder.path().join("step-000002").join(sync::WITHDRAWN).exists());
    assert!(std::fs::symlink_metadata(&aside).is_err());
}

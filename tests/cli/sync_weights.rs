//! `oclaw sync-weights`: its words and exit codes.

#[cfg(feature = "torch")]
mod adapters;
mod publish;
mod servers;
#[cfg(feature = "torch")]
mod steady;

use std::path::Path;

use assert_cmd::assert::Assert;
use serde_json::json;

use crate::harness::fake_engine::{FakeEngine, Reply};
use crate::harness::oclaw;

fn policy_in(folder: &Path) {
    let policy = folder.join("step-000007");
    std::fs::create_dir(&policy).unwrap();
    std::fs::write(policy.join("config.json"), "{}").unwrap();
    std::fs::write(policy.join("model.safetensors"), "").unwrap();
    std::os::unix::fs::symlink("step-000007", folder.join("latest")).unwrap();
}

fn sync(folder: &Path, further: &[&str]) -> Assert {
    let mut command = oclaw();
    command.current_dir(folder).args(["sync-weights", "latest", "--tries", "1"]).args(further);
    command.assert()
}

fn stderr(assert: &Assert) -> String {
    String::from_utf8(assert.get_output().stderr.clone()).unwrap()
}

#[test]
fn a_policy_is_pushed_once() {
    let folder = tempfile::tempdir().unwrap();
    policy_in(folder.path());
    let fake = FakeEngine::sglang();
    let pushed = sync(folder.path(), &["--engine", &fake.url()]).success().stdout("");
    let text = stderr(&pushed);
    for words in [
        "pause",
        "loaded version `7`",
        "carries `7`",
        "emptied",
        "goes on",
        "version 7 pushed to 1 of 1",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let again = sync(folder.path(), &["--engine", &fake.url()]).success();
    assert!(stderr(&again).contains("nothing to push: version 7 is served already"));
}

#[test]
fn failures_have_their_exit_codes() {
    let folder = tempfile::tempdir().unwrap();
    policy_in(folder.path());
    let fake = FakeEngine::sglang();
    fake.on(
        "/update_weights_from_disk",
        [Reply::json(200, json!({"success": false, "message": "no room"}))],
    );
    let url = fake.url();
    let refused = sync(folder.path(), &["--engine", &url]).code(4);
    assert!(stderr(&refused).contains("update failed: `"), "{}", stderr(&refused));
    assert!(stderr(&refused).contains("refused: no room"));
    assert!(fake.paths().contains(&"/continue_generation".to_owned()));

    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let away = sync(folder.path(), &["--engine", &format!("http://{free}")]).code(4);
    assert!(stderr(&away).contains(&format!("cannot reach `http://{free}/model_info`")));
    for (further, words) in [
        (&["--engine", "localhost:1"][..], "not a server's address: `localhost:1`"),
        (&[], "required arguments were not provided:\n  --engine <URL>"),
        (&["--engine", &url, "--version", " "], "` ` is no version\nhint: give it by `--version`"),
    ] {
        let misused = sync(folder.path(), further).code(2);
        assert!(stderr(&misused).contains(words), "{further:?}: {}", stderr(&misused));
    }
    std::fs::remove_file(folder.path().join("step-000007/config.json")).unwrap();
    let broken = sync(folder.path(), &["--engine", &url]).code(1);
    assert!(stderr(&broken).contains("it has no `config.json`"), "{}", stderr(&broken));
}

#[test]
fn the_key_comes_from_a_file_or_the_environment() {
    let folder = tempfile::tempdir().unwrap();
    policy_in(folder.path());
    let fake = FakeEngine::sglang();
    let key = folder.path().join("key");
    std::fs::write(&key, "from-file\n").unwrap();
    sync(folder.path(), &["--engine", &fake.url(), "--engine-key-file", "key"]).success();
    assert_eq!(fake.seen()[0].authorization.as_deref(), Some("Bearer from-file"));
    fake.forget();
    let mut command = oclaw();
    command.current_dir(folder.path()).env("OCLAW_SYNC_WEIGHTS_KEY", "from-environment");
    command.args(["sync-weights", "latest", "--engine", &fake.url()]).assert().success();
    assert_eq!(fake.seen()[0].authorization.as_deref(), Some("Bearer from-environment"));
    std::fs::write(&key, " \n").unwrap();
    let empty = sync(folder.path(), &["--engine", &fake.url(), "--engine-key-file", "key"]).code(2);
    assert!(stderr(&empty).contains("the key in `key` is empty"), "{}", stderr(&empty));
}

fn another_policy_in(folder: &Path, name: &str) {
    let policy = folder.join(name);
    std::fs::create_dir(&policy).unwrap();
    std::fs::write(policy.join("config.json"), "{}").unwrap();
    std::fs::write(policy.join("model.safetensors"), "").unwrap();
}

#[test]
fn one_command_rolls_back() {
    let folder = tempfile::tempdir().unwrap();
    policy_in(folder.path());
    another_policy_in(folder.path(), "step-000005");
    another_policy_in(folder.path(), "step-000004");
    let fake = FakeEngine::sglang();
    let back = ["--engine", &fake.url(), "--rollback"];
    let latest = || std::fs::read_link(folder.path().join("latest")).unwrap();
    // A push that fails moves nothing.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    sync(folder.path(), &["--engine", &format!("http://{free}"), "--rollback"]).code(4);
    assert_eq!(latest(), Path::new("step-000007"));
    let done = sync(folder.path(), &back).success();
    assert!(stderr(&done).contains("version 7 is withdrawn; `latest` is 5"), "{}", stderr(&done));
    assert_eq!(
        (latest().as_path(), fake.version().as_deref()),
        (Path::new("step-000005"), Some("5"))
    );
    assert!(folder.path().join("step-000007/oclaw/withdrawn").exists());
    // Once more; the folder may be named instead of its `latest`.
    let mut command = oclaw();
    command.current_dir(folder.path()).args(["sync-weights", "."]).args(back);
    command.assert().success();
    assert_eq!(
        (latest().as_path(), fake.version().as_deref()),
        (Path::new("step-000004"), Some("4"))
    );
    let record = folder.path().join("step-000004/oclaw");
    std::fs::create_dir(&record).unwrap();
    std::fs::write(record.join("train.json"), "{\"base\":{\"folder\":\"/models/base\"}}").unwrap();
    let end = sync(folder.path(), &back).code(1);
    assert!(
        stderr(&end).contains("`oclaw sync-weights /models/base --version 0 --engine URL`"),
        "{}",
        stderr(&end)
    );
    assert!(stderr(&end).contains("no policy before version 4"), "{}", stderr(&end));
    assert_eq!(latest(), Path::new("step-000004"));
}

#[test]
fn withdrawn_policies_are_passed_over_and_a_text_latest_stays_one() {
    let folder = tempfile::tempdir().unwrap();
    policy_in(folder.path());
    another_policy_in(folder.path(), "step-000006");
    std::fs::create_dir(folder.path().join("step-000006/oclaw")).unwrap();
    std::fs::write(folder.path().join("step-000006/oclaw/withdrawn"), "").unwrap();
    another_policy_in(folder.path(), "step-000002");
    std::fs::remove_file(folder.path().join("latest")).unwrap();
    std::fs::write(folder.path().join("latest"), "step-000007\n").unwrap();
    let fake = FakeEngine::sglang();
    // A trainer at work there would go on from the policy that is withdrawn.
    let lock = std::fs::File::create(folder.path().join(".lock")).unwrap();
    lock.lock().unwrap();
    let busy = sync(folder.path(), &["--engine", &fake.url(), "--rollback"]).code(1);
    assert!(stderr(&busy).contains("`oclaw train` is at work"), "{}", stderr(&busy));
    drop(lock);
    sync(folder.path(), &["--engine", &fake.url(), "--rollback"]).success();
    let text = std::fs::read_to_string(folder.path().join("latest")).unwrap();
    assert_eq!((text.as_str(), fake.version().as_deref()), ("step-000002\n", Some("2")));
    for (further, words) in [
        (&["--rollback", "--require-gate"], "'--rollback' cannot be used with '--require-gate'"),
        (&["--receipt", "r.json"], "required arguments were not provided:\n  --require-gate"),
    ] {
        let url = fake.url();
        let misused = sync(folder.path(), &[&["--engine", &url], &further[..]].concat()).code(2);
        assert!(stderr(&misused).contains(words), "{further:?}: {}", stderr(&misused));
    }
    let named = oclaw()
        .current_dir(folder.path())
        .args(["sync-weights", "step-000007", "--rollback", "--engine", &fake.url()])
        .assert()
        .code(1);
    assert!(stderr(&named).contains("it is a folder, not a `latest`"), "{}", stderr(&named));
}

#[test]
fn what_a_server_says_forges_no_line() {
    let folder = tempfile::tempdir().unwrap();
    policy_in(folder.path());
    let fake = FakeEngine::sglang();
    let version = "6\nhint: all is well\u{1b}[32m";
    let info = json!({"model_path": "/m", "weight_version": version});
    fake.on("/model_info", [Reply::json(200, info)]);
    fake.on("/get_model_info", [Reply::json(200, json!({"weight_version": version}))]);
    let other = sync(folder.path(), &["--engine", &fake.url()]).failure();
    let text = stderr(&other);
    assert!(text.contains("6\\nhint: all is well\\u{1b}[32m"), "{text}");
    assert!(!text.contains('\u{1b}'), "{text}");
    assert!(!text.lines().any(|line| line.starts_with("hint: all is well")), "{text}");
}

#[test]
fn nobody_there_leaves_no_lock_file() {
    let folder = tempfile::tempdir().unwrap();
    policy_in(folder.path());
    sync(folder.path(), &["--engine", "http://127.0.0.1:1"]).code(4);
    assert!(!folder.path().join(".sync.lock").exists());
}

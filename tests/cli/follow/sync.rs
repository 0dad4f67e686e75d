//! `sync-weights --follow`: policies that come, servers that start anew or are
//! away, policies that nobody takes.

use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::json;

use super::Running;
use crate::harness::fake_engine::{FakeEngine, Reply};
use crate::harness::oclaw;

const UPDATE: &str = "/update_weights_from_disk";

fn publish(folder: &Path, step: u32) {
    let name = format!("step-{step:06}");
    let policy = folder.join(&name);
    std::fs::create_dir(&policy).unwrap();
    std::fs::write(policy.join("config.json"), "{}").unwrap();
    std::fs::write(policy.join("model.safetensors"), "").unwrap();
    let aside = folder.join(".tmp-latest");
    symlink(name, &aside).unwrap();
    std::fs::rename(aside, folder.join("latest")).unwrap();
}

fn command(folder: &Path, url: &str) -> assert_cmd::Command {
    let mut command = oclaw();
    command.args(["sync-weights", "--poll", "1ms", "--tries", "1", "--follow"]).arg(folder);
    command.args(["--engine", url]);
    command
}

#[test]
fn each_policy_is_pushed_as_it_comes() {
    let folder = tempfile::tempdir().unwrap();
    let (fake, proxy) = (FakeEngine::sglang(), FakeEngine::start());
    proxy.on("/oclaw/policy", [Reply::json(200, json!({"success": true, "message": "ok"}))]);
    let mut syncing = command(folder.path(), &fake.url());
    syncing.args(["--proxy", &proxy.url()]);
    let mut syncing = Running::start(&syncing);
    publish(folder.path(), 1);
    syncing.hears("version 1 pushed to 1 of 1");
    publish(folder.path(), 2);
    syncing.hears("version 2 pushed to 1 of 1");
    assert_eq!(fake.version().as_deref(), Some("2"));
    // A server that was started anew has its first weights.
    fake.restart();
    syncing.hears("version 2 pushed to 1 of 1");
    let (code, words) = syncing.stop();
    assert_eq!(code, Some(0), "{words}");
    let updates = fake.paths().iter().filter(|path| *path == UPDATE).count();
    assert_eq!((updates, proxy.paths().len()), (3, 3));
}

#[test]
fn a_policy_that_nobody_takes_is_skipped() {
    let folder = tempfile::tempdir().unwrap();
    let fake = FakeEngine::sglang();
    fake.on(UPDATE, [Reply::json(200, json!({"success": false, "message": "no room"}))]);
    publish(folder.path(), 1);
    let mut syncing = Running::start(&command(folder.path(), &fake.url()));
    syncing.hears("refused: no room: trying again");
    syncing.hears("version 1 was refused 2 times and is skipped until `latest` moves");
    fake.on(UPDATE, []);
    publish(folder.path(), 2);
    syncing.hears("version 2 pushed to 1 of 1");
    assert_eq!(syncing.stop().0, Some(0));
    let updates = fake.paths().iter().filter(|path| *path == UPDATE).count();
    assert_eq!(updates, 3);
}

#[test]
fn a_server_that_is_away_is_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let fake = FakeEngine::sglang();
    publish(folder.path(), 1);
    let loading = Reply::json(503, json!({"error": "loading"}));
    fake.on("/pause_generation", [loading.clone(), loading]);
    let mut syncing = Running::start(&command(folder.path(), &fake.url()));
    syncing.hears("answered 503: loading: waiting for it");
    fake.on("/pause_generation", []);
    syncing.hears("version 1 pushed to 1 of 1");
    let (code, words) = syncing.stop();
    assert_eq!(code, Some(0));
    assert_eq!(words.matches("waiting for it").count(), 1, "{words}");
}

#[test]
fn what_cannot_be_followed_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |folder: &Path, url: &str, further: &[&str], words: &str| {
        let refused = command(folder, url).args(further).assert().code(2);
        let told = String::from_utf8(refused.get_output().stderr.clone()).unwrap();
        assert!(told.contains(words), "not `{words}`: {told}");
    };
    let (none, url) = (folder.path().join("none"), "http://127.0.0.1:1");
    let no_folder = format!(
        "there is no folder `{}` to follow\nhint: make it, if its policies are still to come",
        none.display()
    );
    refused(&none, url, &[], &no_folder);
    let beside = |other: &str| format!("'--follow <FOLDER>' cannot be used with '{other}'");
    refused(folder.path(), url, &["latest"], "give either POLICY or `--follow FOLDER`");
    refused(folder.path(), url, &["--force"], &beside("--force"));
    refused(folder.path(), url, &["--wait", "1"], &beside("--wait <SECONDS>"));
    publish(folder.path(), 1);
    refused(folder.path(), "nonsense", &[], "not a server's address: `nonsense`");
}

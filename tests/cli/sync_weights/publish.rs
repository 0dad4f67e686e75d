//! Plain folders that policies are published to.

use super::*;

fn content(folder: &Path, name: &str) -> String {
    std::fs::read_to_string(folder.join(name)).unwrap()
}

#[test]
fn a_policy_appears_whole_and_latest_moves_last() {
    let (folder, public) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    policy_in(folder.path());
    let policy = folder.path().join("step-000007");
    std::fs::create_dir_all(policy.join("oclaw/state")).unwrap();
    for (name, text) in [
        ("model.safetensors", "seven"),
        ("oclaw/train.json", "{}"),
        ("oclaw/ledger", "turns"),
        ("oclaw/state/optimizer.safetensors", "moments"),
    ] {
        std::fs::write(policy.join(name), text).unwrap();
    }
    let to = public.path().join("made/here");
    let into = to.display().to_string();
    let done = sync(folder.path(), &["--publish", &into]).success();
    assert!(stderr(&done).contains("version 7 is `latest` of `"), "{}", stderr(&done));
    assert_eq!(content(&to, "latest/model.safetensors"), "seven");
    assert_eq!(content(&to, "latest/oclaw/train.json"), "{}");
    // What only the trainer needs stays with it.
    assert!(!to.join("latest/oclaw/ledger").exists() && !to.join("latest/oclaw/state").exists());
    let names = || {
        let names = std::fs::read_dir(&to).unwrap();
        let mut names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(), ["latest", "step-000007"]);
    // Again, and what the first folder loses stays there.
    sync(folder.path(), &["--publish", &into]).success();
    another_policy_in(folder.path(), "step-000008");
    std::fs::remove_file(folder.path().join("latest")).unwrap();
    std::os::unix::fs::symlink("step-000008", folder.path().join("latest")).unwrap();
    std::fs::remove_dir_all(&policy).unwrap();

    // Servers get the published one; where they refuse it, `latest` stays.
    let fake = FakeEngine::sglang();
    fake.on("/flush_cache", [Reply::json(200, json!({"success": false}))]);
    let failed = sync(folder.path(), &["--publish", &into, "--engine", &fake.url()]).code(4);
    assert!(stderr(&failed).contains("hint: push it again with `--force`"), "{}", stderr(&failed));
    assert_eq!(content(&to, "latest/model.safetensors"), "seven");
    let update = fake.seen().into_iter().find(|seen| seen.path == "/update_weights_from_disk");
    let target = to.canonicalize().unwrap().join("step-000008");
    assert_eq!(update.unwrap().body["model_path"], json!(target));
    fake.heal();
    sync(folder.path(), &["--publish", &into, "--engine", &fake.url(), "--force"]).success();
    assert_eq!(std::fs::read_link(to.join("latest")).unwrap(), Path::new("step-000008"));
    assert_eq!(names(), ["latest", "step-000007", "step-000008"]);

    let other = std::fs::remove_file(folder.path().join("step-000008/model.safetensors"));
    other.unwrap();
    std::fs::write(folder.path().join("step-000008/model.safetensors"), "other").unwrap();
    let refused = sync(folder.path(), &["--publish", &into]).code(1);
    assert!(stderr(&refused).contains("another policy of this name is there"));
}

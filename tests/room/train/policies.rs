//! The folder of policies: room, crashes, numbers, faults.

use super::*;

#[test]
fn old_policies_and_states_make_room() {
    let folder = tempfile::tempdir().unwrap();
    let options = Options { keep: 3, ..options("tiny-qwen3", folder.path()) };
    let mut trainer = Trainer::open(options).unwrap();
    for number in 1..=5 {
        train(&mut trainer, batch(number..=number)).unwrap();
    }
    let mut names: Vec<String> = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, [".lock", "latest", "step-000003", "step-000004", "step-000005"]);
    let state = |step: &str| folder.path().join(step).join("oclaw/optimizer.safetensors").exists();
    assert_eq!(
        [state("step-000003"), state("step-000004"), state("step-000005")],
        [false, true, true]
    );
}

#[test]
fn a_killed_run_leaves_nothing_that_counts() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::open(options("tiny-qwen3", folder.path())).unwrap();
    train(&mut trainer, batch(1..=2)).unwrap();
    let wanted = bytes(&policy(train(&mut trainer, batch(3..=4))), "model.safetensors");
    drop(trainer);
    // Killed after the rename and before `latest` moved, and amid another write.
    let latest = folder.path().join("latest");
    fs::remove_file(&latest).unwrap();
    std::os::unix::fs::symlink("step-000001", &latest).unwrap();
    fs::create_dir_all(folder.path().join(".tmp-step-000002-1/oclaw")).unwrap();
    let mut trainer = Trainer::open(options("tiny-qwen3", folder.path())).unwrap();
    assert_eq!(trainer.step(), 1);
    assert!(!folder.path().join(".tmp-step-000002-1").exists());
    let again = policy(train(&mut trainer, batch(3..=4)));
    assert!(bytes(&again, "model.safetensors") == wanted);
    assert_eq!(fs::read_link(&latest).unwrap(), Path::new("step-000002"));
}

#[test]
fn a_withdrawn_policy_keeps_its_number() {
    let folder = tempfile::tempdir().unwrap();
    let of_three = || Options { keep: 3, ..options("tiny-qwen3", folder.path()) };
    let mut trainer = Trainer::open(of_three()).unwrap();
    for number in 1..=3 {
        train(&mut trainer, batch(number..=number)).unwrap();
    }
    drop(trainer);
    // Twice rolled back, as `sync-weights --rollback` does it.
    for step in ["step-000003", "step-000002"] {
        fs::write(folder.path().join(step).join("oclaw/withdrawn"), "").unwrap();
    }
    let latest = folder.path().join("latest");
    fs::remove_file(&latest).unwrap();
    std::os::unix::fs::symlink("step-000001", &latest).unwrap();
    let withdrawn = bytes(&folder.path().join("step-000002"), "model.safetensors");
    let mut trainer = Trainer::open(of_three()).unwrap();
    assert_eq!(trainer.step(), 1);
    // What only the withdrawn policies learned from is learned again.
    let trained = train(&mut trainer, batch(2..=2)).unwrap();
    assert_eq!(trained.metrics.step, 4);
    assert_eq!(trained.policy.unwrap(), folder.path().join("step-000004"));
    assert_eq!(fs::read_link(&latest).unwrap(), Path::new("step-000004"));
    assert!(bytes(&folder.path().join("step-000002"), "model.safetensors") == withdrawn);
    // The first is the second newest that counts: there is one to go back to.
    assert!(folder.path().join("step-000001/config.json").exists());
    let ledger = trainer.ledger();
    assert!(ledger.consumed(&judged(2, 1.0).turn_id) && !ledger.consumed(&judged(3, 1.0).turn_id));
}

#[test]
fn without_its_state_the_optimiser_says_that_it_starts_anew() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::open(options("tiny-qwen3", folder.path())).unwrap();
    let policy = policy(train(&mut trainer, batch(1..=2)));
    drop(trainer);
    fs::remove_file(policy.join("oclaw/optimizer.safetensors")).unwrap();
    let trainer = Trainer::open(options("tiny-qwen3", folder.path())).unwrap();
    assert!(trainer.notes()[0].contains("starts anew"), "{:?}", trainer.notes());
    drop(trainer);
    fs::write(policy.join("oclaw/optimizer.safetensors"), b"cut").unwrap();
    let error = Trainer::open(options("tiny-qwen3", folder.path())).unwrap_err();
    assert!(error.to_string().contains("optimizer.safetensors"), "{error}");
}

#[test]
fn a_folder_that_cannot_be_used_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let open = |model: Option<&str>, out: &Path| {
        let model = model.map(|model| models().join(model));
        Trainer::open(Options { model, ..options("tiny-qwen3", out) }).map(|_| ())
    };
    let error = open(None, folder.path()).unwrap_err();
    assert!(matches!(error, Error::NoModel { .. }), "{error}");
    let mut trainer = Trainer::open(options("tiny-qwen3", folder.path())).unwrap();
    let error = open(Some("tiny-qwen3"), folder.path()).unwrap_err();
    assert!(matches!(error, Error::Locked { .. }), "{error}");
    train(&mut trainer, batch(1..=2)).unwrap();
    drop(trainer);
    let error = open(Some("tiny-llama"), folder.path()).unwrap_err();
    assert!(matches!(error, Error::OtherBase { .. }), "{error}");
    open(None, folder.path()).unwrap();
    fs::remove_file(folder.path().join("latest")).unwrap();
    fs::write(folder.path().join("latest"), "step-000001\n").unwrap();
    open(None, folder.path()).unwrap();
    fs::write(folder.path().join("latest"), "step-000009\n").unwrap();
    let error = open(None, folder.path()).unwrap_err();
    assert!(error.to_string().contains("`step-000009` is not there"), "{error}");
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let error = open(Some("tiny-qwen3"), &file).unwrap_err();
    assert!(matches!(error, Error::Write { .. }), "{error}");
    let missing = open(Some("no-such-model"), &folder.path().join("new")).unwrap_err();
    assert!(missing.to_string().contains("no-such-model"), "{missing}");
}

//! Policies: whole or not there, each number once.

mod races;

use std::fs;
use std::path::{Path, PathBuf};

use oclaw::store::{Error, Policies, Published};

use super::{in_memory, s3};
use crate::harness::fake_s3::FakeS3;

const MANIFEST: &str = "oclaw/files.json";
const STATE: &str = "oclaw/optimizer.safetensors";

/// Returns the full name of a file of a published policy.
fn name_of(fake: &FakeS3, step: u32, file: &str) -> String {
    let of = format!("policy/step-{step:06}/");
    let mut names = fake.names();
    let own = |name: &String| {
        name.strip_prefix(&of).and_then(|rest| rest.split_once('/')).is_some_and(|it| it.1 == file)
    };
    names.retain(own);
    assert_eq!(names.len(), 1, "{names:?}");
    names.remove(0)
}

pub(super) fn policy(folder: &Path, step: u32, weights: &str) -> PathBuf {
    let policy = folder.join(format!("step-{step:06}"));
    fs::create_dir_all(policy.join("oclaw")).unwrap();
    fs::write(policy.join("config.json"), "{}").unwrap();
    fs::write(policy.join("model.safetensors"), weights).unwrap();
    fs::write(policy.join("oclaw/train.json"), format!("{step}")).unwrap();
    fs::write(policy.join(STATE), "moments").unwrap();
    policy
}

#[tokio::test]
async fn a_policy_is_published_whole_and_once() {
    let folder = tempfile::tempdir().unwrap();
    let fake = FakeS3::start();
    let policies = Policies::new(s3(&fake, "s3://bucket/policy"));
    assert_eq!(policies.latest().await.unwrap(), None);
    let first = policy(folder.path(), 1, "one");
    assert_eq!(policies.publish(&first).await.unwrap(), Published::Now);
    // What a follower could see at any moment: the manifest last, then `latest`.
    let puts: Vec<_> = fake
        .asked()
        .iter()
        .filter_map(|it| Some(it.strip_prefix("PUT /bucket/policy/")?.to_owned()))
        .collect();
    assert_eq!(puts.len(), 6);
    assert_eq!(puts[4..], [format!("step-000001/{MANIFEST}"), "latest".to_owned()]);
    assert_eq!(fake.get("policy/latest").unwrap(), "step-000001\n");
    assert_eq!(policies.latest().await.unwrap().as_deref(), Some("step-000001"));
    // Again, by a run that was killed before it knew.
    assert_eq!(policies.publish(&first).await.unwrap(), Published::Before);
    assert!(policies.has("step-000001", "oclaw/train.json", &first).await.unwrap());
    // Another trainer's.
    let other = policy(&folder.path().join("other"), 1, "two");
    let error = policies.publish(&other).await.unwrap_err();
    assert!(error.to_string().starts_with("`s3://bucket/policy/step-000001`: another policy of"));
    assert_eq!(fake.get(&name_of(&fake, 1, "model.safetensors")).unwrap(), "one");
}

#[tokio::test]
async fn a_policy_is_copied_whole_or_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let fake = FakeS3::start();
    let policies = Policies::new(s3(&fake, "s3://bucket/policy"));
    let first = policy(folder.path(), 1, "one");
    let average = "ema/model.safetensors";
    fs::create_dir(first.join("ema")).unwrap();
    fs::write(first.join(average), "average").unwrap();
    policies.publish(&first).await.unwrap();
    let into = folder.path().join("copies");
    let copy = policies.fetch("step-000001", &into, false).await.unwrap();
    assert_eq!(copy, into.join("step-000001"));
    assert_eq!(fs::read_to_string(copy.join("model.safetensors")).unwrap(), "one");
    assert!(copy.join("oclaw/train.json").is_file() && !copy.join(STATE).exists());
    // Nobody serves the average; who trains on needs it.
    assert!(!copy.join(average).exists());
    // A copy is taken if it is of the same policy, which its list of files tells.
    let asked = fake.asked().len();
    policies.fetch("step-000001", &into, false).await.unwrap();
    let again = fake.asked().split_off(asked);
    assert!(again.len() == 1 && again[0].contains(MANIFEST), "{again:?}");
    let whole = policies.fetch("step-000001", &folder.path().join("work"), true).await.unwrap();
    assert_eq!(fs::read_to_string(whole.join(STATE)).unwrap(), "moments");
    assert_eq!(fs::read_to_string(whole.join(average)).unwrap(), "average");

    // Another run's policy of the same number takes its place.
    let anew = FakeS3::start();
    let others = Policies::new(s3(&anew, "s3://bucket/policy"));
    others.publish(&policy(&folder.path().join("anew"), 1, "two")).await.unwrap();
    let copy = others.fetch("step-000001", &into, false).await.unwrap();
    assert_eq!(fs::read_to_string(copy.join("model.safetensors")).unwrap(), "two");

    // Half of a policy has no manifest; a foreign file is not the one of it.
    fake.put("policy/step-000002/model.safetensors", "half");
    let error = policies.fetch("step-000002", &into, false).await.unwrap_err();
    assert!(error.to_string().ends_with("it has no manifest: it is not whole"), "{error}");
    fake.put(&name_of(&fake, 1, "model.safetensors"), "eno");
    let error = policies.fetch("step-000001", &folder.path().join("new"), false).await.unwrap_err();
    assert!(matches!(&error, Error::Policy { problem, .. }
        if problem == "its `model.safetensors` is not the one of its manifest"));
    assert_eq!(fs::read_dir(folder.path().join("new")).unwrap().count(), 0);
    // A name that leads elsewhere.
    let manifest = r#"{"files": [{"name": "../x", "size": 1, "sha256": ""}]}"#;
    fake.put(&format!("policy/step-000003/{MANIFEST}"), manifest);
    let error = policies.fetch("step-000003", &into, false).await.unwrap_err();
    assert!(error.to_string().ends_with("is no list of files"), "{error}");
}

#[tokio::test]
async fn old_policies_go_and_the_state_of_all_but_two() {
    let folder = tempfile::tempdir().unwrap();
    let store = in_memory("s3://bucket/policy");
    let policies = Policies::new(store.clone());
    for step in 1..=5 {
        policies.publish(&policy(folder.path(), step, "w")).await.unwrap();
    }
    // Somebody else's, of a later number.
    policies.publish(&policy(folder.path(), 9, "w")).await.unwrap();
    policies.prune("step-000005", 3).await.unwrap();
    let listed = store.list_all().await.unwrap().into_iter();
    // Without the folders that are named by what is in them.
    let short = |name: String| {
        let parts: Vec<&str> = name.split('/').filter(|part| part.len() != 32).collect();
        parts.join("/")
    };
    let mut left: Vec<_> = listed.map(|it| short(it.name)).collect();
    left.retain(|name| name.ends_with("config.json") || name.ends_with(STATE));
    left.sort();
    let config = |step: u32| format!("step-{step:06}/config.json");
    let state = |step: u32| format!("step-{step:06}/{STATE}");
    assert_eq!(left, [config(3), config(4), state(4), config(5), state(5), config(9), state(9)]);
}

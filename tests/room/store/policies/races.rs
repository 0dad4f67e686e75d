//! Two trainers with one number, and policies of before.

use oclaw::store::{Error, Policies, Published};

use super::{MANIFEST, STATE, policy};
use crate::harness::fake_s3::FakeS3;
use crate::room::store::{in_memory, s3};

/// Puts of a policy: four files, the manifest, `latest`.
const PUTS: u32 = 6;

/// One is cut off after each of its puts, then the other; then both try again.
#[tokio::test]
async fn of_two_with_one_number_one_gets_it_whole() {
    let folder = tempfile::tempdir().unwrap();
    let (ours, theirs) = (folder.path().join("ours"), folder.path().join("theirs"));
    let (one, other) = (policy(&ours, 1, "one"), policy(&theirs, 1, "other"));
    std::fs::write(other.join("more.json"), "{}").unwrap();
    let fake = FakeS3::start();
    let store = s3(&fake, "s3://bucket/races");
    for first in 0..=PUTS {
        for second in [0, 2, PUTS - 1, PUTS] {
            let policies = Policies::new(store.inside(&format!("{first}-{second}")));
            fake.stop_after(Some(first));
            assert_eq!(policies.publish(&one).await.is_ok(), first == PUTS);
            fake.stop_after(Some(second));
            let cut = policies.publish(&other).await;
            // With its manifest last it is whole; `latest` is moved by whoever comes.
            let (has, has_not) = match first >= PUTS - 1 {
                false if second >= PUTS => (&other, &one),
                _ => (&one, &other),
            };
            assert!(cut.is_err(), "{first} {second} {cut:?}");
            fake.stop_after(None);
            let error = match has == &one {
                true => {
                    policies.publish(&one).await.unwrap();
                    policies.publish(&other).await.unwrap_err()
                }
                false => policies.publish(&one).await.unwrap_err(),
            };
            assert!(error.to_string().contains(": another policy of this number is there"));
            assert_eq!(policies.publish(has).await.unwrap(), Published::Before);
            assert_eq!(policies.latest().await.unwrap().as_deref(), Some("step-000001"));
            let into = folder.path().join(format!("{first}-{second}"));
            let copy = policies.fetch("step-000001", &into, true).await.unwrap();
            let weights = |of: &std::path::Path| std::fs::read(of.join("model.safetensors"));
            assert_eq!(weights(&copy).unwrap(), weights(has).unwrap());
            assert_ne!(weights(&copy).unwrap(), weights(has_not).unwrap());
            // What the other had put goes with the next step.
            policies.prune("step-000001", 2).await.unwrap();
            let left = policies.store().list_all().await.unwrap().len();
            let files = if has == &one { 4 } else { 5 };
            assert_eq!(left, files + 2, "{first} {second}");
        }
    }
}

#[tokio::test]
async fn the_newest_policy_never_goes_back() {
    let folder = tempfile::tempdir().unwrap();
    let policies = Policies::new(in_memory("s3://bucket/policy"));
    policies.publish(&policy(folder.path(), 7, "seven")).await.unwrap();
    let error = policies.publish(&policy(folder.path(), 6, "six")).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "`s3://bucket/policy/step-000006`: a later policy is there, step-000007: is another \
         trainer at work? The next start goes on from that one"
    );
    assert_eq!(policies.latest().await.unwrap().as_deref(), Some("step-000007"));
    let names = policies.store().list().await.unwrap().1;
    assert_eq!(names, ["step-000007"]);
}

/// What was put is not put again after a store was away.
#[tokio::test]
async fn an_upload_goes_on_where_it_was_cut_off() {
    let folder = tempfile::tempdir().unwrap();
    let fake = FakeS3::start();
    let policies = Policies::new(s3(&fake, "s3://bucket/policy"));
    let first = policy(folder.path(), 1, "one");
    fake.stop_after(Some(2));
    let error = policies.publish(&first).await.unwrap_err();
    assert!(matches!(error, Error::Refused { .. }), "{error:?}");
    fake.stop_after(Some(4));
    assert_eq!(policies.publish(&first).await.unwrap(), Published::Now);
}

/// Their files are beside the folder of the manifest.
#[tokio::test]
async fn policies_of_before_are_read_and_pruned() {
    let folder = tempfile::tempdir().unwrap();
    let fake = FakeS3::start();
    let policies = Policies::new(s3(&fake, "s3://bucket/policy"));
    let sum = "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed";
    let manifest =
        format!(r#"{{"files": [{{"name": "model.safetensors", "size": 3, "sha256": "{sum}"}}]}}"#);
    for step in 1..=3 {
        let file = |name: &str| format!("policy/step-{step:06}/{name}");
        fake.put(&file("model.safetensors"), "one");
        fake.put(&file(STATE), "moments");
        fake.put(&file(MANIFEST), manifest.clone());
    }
    fake.put("policy/latest", "step-000003\n");
    let copy = policies.fetch("step-000003", &folder.path().join("copy"), true).await.unwrap();
    assert_eq!(std::fs::read_to_string(copy.join("model.safetensors")).unwrap(), "one");
    let read = policies.read("step-000003", STATE).await.unwrap().unwrap();
    assert_eq!(read, "moments");
    policies.publish(&policy(folder.path(), 4, "four")).await.unwrap();
    policies.prune("step-000004", 3).await.unwrap();
    let mut names = fake.names();
    names.retain(|name| name.ends_with(STATE) || name.ends_with(MANIFEST));
    let there = |step: u32, file: &str| {
        let of = format!("policy/step-{step:06}/");
        names.iter().any(|name| name.starts_with(&of) && name.ends_with(file))
    };
    assert!(!there(1, MANIFEST) && !there(1, STATE));
    assert!(there(2, MANIFEST) && !there(2, STATE));
    assert!(there(3, STATE) && there(4, STATE));
}

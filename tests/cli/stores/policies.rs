//! Policies in a store: published whole, taken up on another machine, handed to
//! servers as checked copies.

use oclaw::table::Format;

use super::{Cloud, Running, talk};
use crate::forge::{STAGES, finished, write};
use crate::harness::fake_engine::FakeEngine;
use crate::harness::fake_s3::FakeS3;
use crate::harness::models;

pub(super) fn ready(cloud: &Cloud, session: &str, turns: u32) -> Vec<u8> {
    let turns: Vec<_> = (1..=turns).map(|number| finished(session, number)).collect();
    let path = cloud.here.path().join("made.parquet");
    write(&path, Format::Parquet, &STAGES, &turns);
    std::fs::read(path).unwrap()
}

pub(super) fn training(cloud: &Cloud, further: &[&str]) -> assert_cmd::Command {
    let model = models().join("tiny-qwen3").to_str().unwrap().to_owned();
    let flags = ["--lr", "1e-3", "--batch-turns", "3", "--model", &model, "--keep", "2"];
    cloud.follow("train", ("ready", "policy"), &[&flags[..], further].concat())
}

fn manifests(fake: &FakeS3) -> Vec<String> {
    let mut names = fake.names();
    names.retain(|name| name.ends_with("oclaw/files.json"));
    names
}

/// Returns the name of the weights of the only policy.
fn weights(fake: &FakeS3) -> String {
    let mut names = fake.names();
    names.retain(|name| name.ends_with("/model.safetensors") && !name.contains("/ema/"));
    assert_eq!(names.len(), 1, "{names:?}");
    names.remove(0)
}

#[test]
fn a_trainer_goes_on_elsewhere_from_what_was_published() {
    let fake = FakeS3::start();
    let cloud = Cloud::new(&fake.endpoint);
    fake.put("ready/a.parquet", ready(&cloud, "a", 4));
    let ran = training(&cloud, &["--once"]).assert().success();
    let words = talk(ran.get_output());
    assert!(words.contains("published s3://bucket/policy/step-000001"), "{words}");
    assert_eq!(fake.get("policy/latest").unwrap(), "step-000001\n");
    // Another machine has none of our files.
    let other = Cloud::new(&fake.endpoint);
    fake.put("ready/b.parquet", ready(&other, "b", 5));
    let ran = training(&other, &["--once"]).assert().success();
    let words = talk(ran.get_output());
    assert!(words.contains("going on from s3://bucket/policy/step-000001"), "{words}");
    assert!(words.contains("a.parquet: 4 turns, 3 of them in the ledger"), "{words}");
    assert_eq!(fake.get("policy/latest").unwrap(), "step-000003\n");
    let manifest = |step: u32| format!("policy/step-{step:06}/oclaw/files.json");
    assert_eq!(manifests(&fake), [manifest(2), manifest(3)]);
    // The first machine's policies are behind: the store's are the truth.
    let ran = training(&cloud, &["--once"]).assert().success();
    let words = talk(ran.get_output());
    assert!(words.contains("going on from s3://bucket/policy/step-000003"), "{words}");
    // A machine that has them keeps them.
    let ran = training(&cloud, &["--once"]).assert().success();
    assert!(!talk(ran.get_output()).contains("going on from"));
}

#[test]
fn a_policy_that_could_not_be_published_is_later() {
    let fake = FakeS3::start();
    let cloud = Cloud::new(&fake.endpoint);
    fake.put("ready/a.parquet", ready(&cloud, "a", 3));
    let mut trainer = Running::start(&training(&cloud, &[]));
    trainer.hears("published s3://bucket/policy/step-000001");
    trainer.kill();
    // It was killed between the step and its publication.
    for name in fake.names().into_iter().filter(|name| name.starts_with("policy/")) {
        fake.remove(&name);
    }
    fake.put("policy/step-000001/model.safetensors", "half of another");
    let ran = training(&cloud, &["--once"]).assert().success();
    let words = talk(ran.get_output());
    assert!(
        words.contains("published s3://bucket/policy/step-000001, which an earlier run"),
        "{words}"
    );
    assert_eq!(fake.get("policy/latest").unwrap(), "step-000001\n");
    let foreign = fake.get("policy/step-000001/model.safetensors").unwrap();
    assert_eq!(foreign, "half of another");
    // It is nobody's: the policy's own is elsewhere.
    fake.remove("policy/step-000001/model.safetensors");
    assert!(fake.get(&weights(&fake)).unwrap().len() > foreign.len());
}

#[test]
fn a_trainer_waits_for_a_store_that_is_away_when_it_starts() {
    let fake = FakeS3::start();
    let cloud = Cloud::new(&fake.endpoint);
    fake.put("ready/a.parquet", ready(&cloud, "a", 3));
    fake.say(503);
    let mut trainer = Running::start(&training(&cloud, &[]));
    let line = trainer.hears("the store is away");
    assert!(line.ends_with(": waiting for it"), "{line}");
    fake.say(0);
    trainer.hears("published s3://bucket/policy/step-000001");
    assert_eq!(trainer.stop().0, Some(0));
}

/// While it waits for the store of its policies, and while that of its shards hangs.
#[test]
fn a_trainer_ends_on_a_signal_whatever_the_store_does() {
    let fake = FakeS3::start();
    let cloud = Cloud::new(&fake.endpoint);
    fake.say(503);
    let mut trainer = Running::start(&training(&cloud, &[]));
    trainer.hears(": waiting for it");
    let (code, words) = trainer.stop();
    assert_eq!(code, Some(0), "{words}");
    fake.say(0);
    fake.put("ready/a.parquet", ready(&cloud, "a", 2));
    let mut trainer = Running::start(&training(&cloud, &[]));
    trainer.hears("a.parquet: 2 turns");
    fake.hang();
    let (code, words) = trainer.stop();
    assert_eq!(code, Some(0), "{words}");
    assert!(words.ends_with("2/3 turns wait for a full batch"), "{words}");
}

/// The trainer waits for a store that is away when it has to list a shard there.
#[test]
fn a_shard_is_listed_when_the_store_is_there_again() {
    let fake = FakeS3::start();
    let cloud = Cloud::new(&fake.endpoint);
    let whole = ready(&cloud, "a", 2);
    fake.put("ready/a.parquet", whole[..whole.len() - 9].to_vec());
    fake.be_away_below("policy/failed/");
    let mut trainer = Running::start(&training(&cloud, &["--shard-tries", "1"]));
    let line = trainer.hears("the store is away");
    assert!(line.starts_with("`s3://bucket/policy/failed/a.json`: "), "{line}");
    assert!(line.ends_with(": waiting for it"), "{line}");
    fake.be_away_below("");
    trainer.hears("a.parquet: `s3://bucket/ready/a.parquet` is cut short");
    assert_eq!(trainer.stop().0, Some(0));
    assert!(fake.get("policy/failed/a.json").is_some());
}

#[test]
fn servers_get_a_checked_copy() {
    let (fake, engine) = (FakeS3::start(), FakeEngine::sglang());
    let cloud = Cloud::new(&fake.endpoint);
    let engine_url = engine.url();
    let words = ["sync-weights", "--tries", "1", "--engine", &engine_url];
    let mut follow = cloud.command(&words);
    follow.args(["--poll", "1ms", "--follow", "s3://bucket/policy"]);
    let mut syncing = Running::start(&follow);
    fake.put("ready/a.parquet", ready(&cloud, "a", 3));
    training(&cloud, &["--once"]).assert().success();
    syncing.hears("version 1 pushed to 1 of 1");
    let (code, said) = syncing.stop();
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(engine.version().as_deref(), Some("1"));
    // By name, on a machine that has no copy.
    let other = Cloud::new(&fake.endpoint);
    let push = |name: &str, code: i32| {
        let mut command = other.command(&words);
        command.args(["--force", &format!("s3://bucket/policy/{name}")]);
        talk(command.assert().code(code).get_output())
    };
    assert!(push("latest", 0).contains("version 1 pushed to 1 of 1"));
    assert!(push("step-000007", 1).contains("it has no manifest: it is not whole"));
    assert!(push("", 2).contains("names no policy"));
    // Weights that are not those of the manifest go to nobody.
    fake.put(&weights(&fake), "broken");
    let third = Cloud::new(&fake.endpoint);
    let mut command = third.command(&words);
    let ran = command.args(["--force", "s3://bucket/policy/latest"]).assert().code(1);
    let said = talk(ran.get_output());
    assert!(said.contains("its `model.safetensors` is not the one of its manifest"), "{said}");
}

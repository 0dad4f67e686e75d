//! What has become of every turn, read off a store.

use std::path::Path;
use std::sync::Arc;

use object_store::memory::InMemory;
use oclaw::pipeline::{Accountant, Run};
use oclaw::store::{Address, Store};

use super::{counts, one_silent, policy, shard, shard_of};
use crate::forge::STAGES;
use crate::harness::fake_s3::FakeS3;

const URL: &str = "s3://bucket/run";

fn client(fake: &FakeS3) -> Store {
    let settings = [
        ("AWS_ENDPOINT", fake.endpoint.as_str()),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_ACCESS_KEY_ID", "a"),
        ("AWS_SECRET_ACCESS_KEY", "b"),
    ];
    let settings = settings.map(|(name, value)| (name.to_owned(), value.to_owned()));
    Store::open(Address::of(Path::new(URL)).unwrap().unwrap(), &settings).unwrap()
}

/// Puts a shard with turns of a session into a folder of the bucket.
fn put(fake: &FakeS3, folder: &str, name: &str, turns: std::ops::Range<u32>) {
    let made = tempfile::tempdir().unwrap();
    shard(made.path(), folder, name, turns);
    let bytes = std::fs::read(made.path().join(format!("{folder}/{name}.parquet"))).unwrap();
    fake.put(&format!("run/{folder}/{name}.parquet"), bytes);
}

fn publish(fake: &FakeS3, step: u64, entries: &[(&str, Option<&str>)]) {
    let made = tempfile::tempdir().unwrap();
    std::fs::create_dir(made.path().join("policy")).unwrap();
    policy(made.path(), step, entries);
    let name = format!("step-{step:06}");
    let ledger = made.path().join(format!("policy/{name}/oclaw/ledger.parquet"));
    fake.put(&format!("run/policy/{name}/oclaw/ledger.parquet"), std::fs::read(ledger).unwrap());
    fake.put(&format!("run/policy/{name}/oclaw/files.json"), "{\"files\": []}");
    fake.put("run/policy/latest", format!("{name}\n"));
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

#[test]
fn every_turn_is_somewhere_in_a_store() {
    let (fake, folder, runtime) = (FakeS3::start(), tempfile::tempdir().unwrap(), runtime());
    let run = Run::new(folder.path()).with_store(Some(URL.to_owned()));
    let mut accountant = Accountant::new(&run, &[]).over(client(&fake));
    assert!(!accountant.has_looked());
    // a is not shipped, b waits for the judge, c was given up there, d waits for the
    // teacher, e is ready.
    for (name, turns) in [("a", 1..3), ("b", 1..4), ("c", 1..5), ("d", 1..6), ("e", 1..7)] {
        shard(folder.path(), "turns", name, turns.clone());
        let way: &[&str] = match name {
            "a" => &[],
            "b" | "c" => &["turns"],
            "d" => &["turns", "judged", "hinted"],
            _ => &["turns", "judged", "hinted", "taught", "ready"],
        };
        way.iter().for_each(|into| put(&fake, into, name, turns.clone()));
    }
    fake.put("run/judged/failed/c.json", "{\"shard\": \"c.parquet\"}");
    publish(&fake, 1, &[("e-turn-1", None), ("e-turn-2", Some("no_signal"))]);
    runtime.block_on(accountant.look()).unwrap();
    let (account, queues) = accountant.take().unwrap();
    assert_eq!((account.captured, account.trained, account.lost), (20, 1, 0));
    let refused = counts(&[("failed_in_judge", 4), ("no_signal", 1)]);
    assert_eq!((account.refused, account.unreadable), (refused, 0));
    let pending = counts(&[("judge", 3), ("ship", 2), ("teacher-lp", 5), ("train", 4)]);
    assert_eq!(account.pending, pending);
    let stages: Vec<_> = queues.iter().map(|queue| queue.stage.as_str()).collect();
    let all = ["ship", "judge", "hint", "teacher-lp", "advantage", "train"];
    assert_eq!(stages, all);
    let told = |stage: usize| (queues[stage].shards, queues[stage].rows, queues[stage].failed);
    assert_eq!([told(0), told(1), told(3), told(5)], [(1, 2, 0), (1, 3, 1), (1, 5, 0), (1, 4, 0)]);
    assert!(queues.iter().all(|queue| queue.oldest.is_some() == (queue.shards > 0)));
    assert_eq!(accountant.published(), Some(1));
    // Who is known is not asked again; lists, the newest policy's name are.
    let before = fake.asked().len();
    runtime.block_on(accountant.look()).unwrap();
    let again = fake.asked().split_off(before);
    assert!(!again.iter().any(|line| line.contains(".parquet")), "{again:?}");
    // Rows that a stage has lost show as lost.
    put(&fake, "judged", "b", 1..3);
    publish(&fake, 2, &[("e-turn-1", None), ("e-turn-3", None)]);
    runtime.block_on(accountant.look()).unwrap();
    let (account, _) = accountant.take().unwrap();
    assert_eq!((account.captured, account.trained, account.lost), (20, 2, 1));
    assert_eq!(account.pending["hint"], 2);
    assert_eq!(accountant.published(), Some(2));
}

#[test]
fn a_turn_without_a_signal_does_not_wait_for_a_step_in_a_store() {
    let (fake, folder, runtime) = (FakeS3::start(), tempfile::tempdir().unwrap(), runtime());
    let run = Run::new(folder.path()).with_store(Some(URL.to_owned()));
    shard(folder.path(), "turns", "a", 1..4);
    for stage in ["turns", "judged", "hinted", "taught"] {
        put(&fake, stage, "a", 1..4);
    }
    shard_of(folder.path(), "ready", "a", (&STAGES, &one_silent("a")));
    fake.put("run/ready/a.parquet", std::fs::read(folder.path().join("ready/a.parquet")).unwrap());
    let mut accountant = Accountant::new(&run, &[]).over(client(&fake));
    runtime.block_on(accountant.look()).unwrap();
    let (account, _) = accountant.take().unwrap();
    assert_eq!(account.refused, counts(&[("no_signal", 1)]));
    assert_eq!((account.pending, account.lost), (counts(&[("train", 2)]), 0));
}

/// Three rows in ten minutes.
#[test]
fn what_was_written_lately_is_a_rate() {
    let folder = tempfile::tempdir().unwrap();
    let address = Address::of(Path::new(URL)).unwrap().unwrap();
    let store = Store::over(Arc::new(InMemory::new()), address);
    let run = Run::new(folder.path()).with_store(Some(URL.to_owned()));
    shard(folder.path(), "turns", "a", 1..4);
    let mut accountant = Accountant::new(&run, &[]).over(store.clone());
    runtime().block_on(async {
        for stage in ["turns", "judged"] {
            let bytes = std::fs::read(folder.path().join("turns/a.parquet")).unwrap();
            store.inside(stage).put_new("a.parquet", bytes.into()).await.unwrap();
        }
        accountant.look().await.unwrap();
    });
    let (account, queues) = accountant.take().unwrap();
    assert_eq!(account.pending, counts(&[("hint", 3)]));
    let rates: Vec<_> = queues.iter().map(|queue| queue.rows_per_minute).collect();
    assert_eq!(rates, [0.3, 0.3, 0.0, 0.0, 0.0, 0.0]);
}

/// What was seen last stays while a store is away; what cannot be read is said.
#[test]
fn a_store_that_is_away_is_as_it_was() {
    let (fake, folder, runtime) = (FakeS3::start(), tempfile::tempdir().unwrap(), runtime());
    let run = Run::new(folder.path()).with_store(Some(URL.to_owned()));
    let mut accountant = Accountant::new(&run, &[]).over(client(&fake));
    shard(folder.path(), "turns", "a", 1..3);
    put(&fake, "turns", "a", 1..3);
    runtime.block_on(accountant.look()).unwrap();
    fake.say(503);
    put(&fake, "judged", "a", 1..3);
    let error = runtime.block_on(accountant.look()).unwrap_err();
    assert!(error.to_string().contains("the store is away"), "{error}");
    assert_eq!(accountant.take().unwrap().0.pending, counts(&[("judge", 2)]));
    fake.say(0);
    runtime.block_on(accountant.look()).unwrap();
    assert_eq!(accountant.take().unwrap().0.pending, counts(&[("hint", 2)]));
    fake.put("run/hinted/a.parquet", "no table, however long it is");
    runtime.block_on(accountant.look()).unwrap();
    let (account, _) = accountant.take().unwrap();
    assert_eq!((account.captured, account.unreadable), (0, 1));
}

/// A look may take long: meanwhile those turns count that the store told of last, and what
/// comes into the spool.
#[test]
fn turns_are_counted_while_a_store_is_looked_at() {
    let (fake, folder, runtime) = (FakeS3::start(), tempfile::tempdir().unwrap(), runtime());
    let run = Run::new(folder.path()).with_store(Some(URL.to_owned()));
    let mut accountant = Accountant::new(&run, &[]).over(client(&fake));
    shard(folder.path(), "turns", "a", 1..3);
    put(&fake, "turns", "a", 1..3);
    assert_eq!((accountant.has_looked(), accountant.told_at()), (false, None));
    runtime.block_on(accountant.look()).unwrap();
    assert!(accountant.told_at().is_some());
    put(&fake, "judged", "a", 1..3);
    let look = accountant.look();
    shard(folder.path(), "turns", "b", 1..4);
    let (account, _) = accountant.take().unwrap();
    assert_eq!(account.pending, counts(&[("judge", 2), ("ship", 3)]));
    runtime.block_on(look).unwrap();
    let (account, _) = accountant.take().unwrap();
    assert_eq!(account.pending, counts(&[("hint", 2), ("ship", 3)]));
}

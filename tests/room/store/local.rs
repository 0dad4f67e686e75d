//! A folder of this machine as a store, by `object_store`'s own client of it: shards,
//! policies, and what follows them. It knows no condition on what it replaces.

use std::fs;
use std::sync::Arc;

use object_store::local::LocalFileSystem;
use oclaw::store::{Cache, Error, Feed, Policies, Published, Store};

use super::{address, names, shard};

fn store(root: &std::path::Path) -> Store {
    let files = LocalFileSystem::new_with_prefix(root).unwrap();
    Store::over(Arc::new(files), address("s3://bucket/run"))
}

#[tokio::test]
async fn shards_of_a_folder_are_published_followed_and_copied() {
    let root = tempfile::tempdir().unwrap();
    let turns = store(root.path()).inside("turns");
    let mut feed = Feed::new(turns.clone());
    assert!(feed.due(&|_| false, &|_| false).await.unwrap().is_empty());
    for (name, at) in [("b.parquet", 2), ("a.parquet", 3)] {
        turns.put_new(name, shard(at).into()).await.unwrap();
    }
    let again = turns.put_new("a.parquet", "other".into()).await.unwrap_err();
    assert!(matches!(again, Error::Exists { .. }), "{again:?}");
    let due = feed.due(&|_| false, &|_| false).await.unwrap();
    assert_eq!(names(&due), ["b.parquet", "a.parquet"]);
    let cache = Cache::new(&root.path().join("cache"), 1 << 20);
    let copy = cache.fetch(&turns, feed.object(&due[0]).unwrap()).await.unwrap();
    let there = root.path().join("run/turns/b.parquet");
    assert_eq!(fs::read(&copy.path).unwrap(), fs::read(there).unwrap());
}

#[tokio::test]
async fn policies_of_a_folder_are_published_once_and_fetched() {
    let root = tempfile::tempdir().unwrap();
    let policies = Policies::new(store(root.path()).inside("policy"));
    for (step, weights) in [(1, "one"), (2, "two")] {
        let made = super::policies::policy(&root.path().join("made"), step, weights);
        assert_eq!(policies.publish(&made).await.unwrap(), Published::Now);
        assert_eq!(policies.publish(&made).await.unwrap(), Published::Before);
    }
    assert_eq!(policies.latest().await.unwrap().as_deref(), Some("step-000002"));
    let other = super::policies::policy(&root.path().join("other"), 2, "other");
    let error = policies.publish(&other).await.unwrap_err().to_string();
    assert!(error.contains("another policy of this number is there"), "{error}");
    let copy = policies.fetch("step-000002", &root.path().join("copies"), true).await.unwrap();
    assert_eq!(fs::read_to_string(copy.join("model.safetensors")).unwrap(), "two");
    policies.prune("step-000002", 1).await.unwrap();
    let (_, left) = policies.store().list().await.unwrap();
    assert_eq!(left.last().map(String::as_str), Some("step-000002"));
    let gone = policies.fetch("step-000001", &root.path().join("copies"), true).await;
    assert!(gone.unwrap_err().to_string().ends_with("it has no manifest: it is not whole"));
}

//! Copies of objects on this machine.

use std::fs;
use std::path::{Path, PathBuf};

use oclaw::store::{Cache, Error, Object, Store};

use super::{in_memory, s3};
use crate::harness::fake_s3::FakeS3;

async fn object(store: &Store, name: &str, bytes: usize) -> Object {
    store.replace(name, vec![b'x'; bytes].into()).await.unwrap();
    store.look(name).await.unwrap().unwrap()
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut found = Vec::new();
    for path in entries.map(|entry| entry.unwrap().path()) {
        match path.is_dir() {
            true => found.extend(files(&path)),
            false => found.push(path),
        }
    }
    found
}

#[tokio::test]
async fn an_object_is_copied_once_and_told_from_its_successor() {
    let fake = FakeS3::start();
    let store = s3(&fake, "s3://bucket/in");
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::new(folder.path(), 1000);
    let first = object(&store, "a.parquet", 10).await;
    let gets = || fake.asked().iter().filter(|it| it.starts_with("GET /bucket/in/a")).count();
    for _ in 0..2 {
        let copy = cache.fetch(&store, &first).await.unwrap();
        assert_eq!(fs::read(&copy.path).unwrap(), vec![b'x'; 10]);
        assert_eq!(copy.url, "s3://bucket/in/a.parquet");
        assert_eq!(copy.path.file_name().unwrap(), "a.parquet");
    }
    assert_eq!(gets(), 1);
    // Of the same length, but another one.
    let second = object(&store, "a.parquet", 10).await;
    let stale = cache.fetch(&store, &Object { size: 11, ..second.clone() }).await.unwrap_err();
    assert!(matches!(&stale, Error::Changed { problem, .. } if problem == "10 bytes came, of 11"));
    assert!(stale.is_transient());
    cache.fetch(&store, &second).await.unwrap();
    fake.put("in/a.parquet", "yyy");
    let gone = cache.fetch(&store, &Object { size: 12, ..second }).await.unwrap_err();
    assert!(matches!(gone, Error::Changed { .. }), "{gone:?}");
    // What failed left nothing.
    assert_eq!(files(folder.path()).len(), 2);
}

#[tokio::test]
async fn the_longest_unused_goes_when_room_is_needed_and_nothing_that_is_read() {
    let store = in_memory("s3://bucket/in");
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::new(folder.path(), 100);
    let (a, b, c) = (
        object(&store, "a", 40).await,
        object(&store, "b", 40).await,
        object(&store, "c", 40).await,
    );
    let held = cache.fetch(&store, &a).await.unwrap();
    cache.fetch(&store, &b).await.unwrap();
    let third = cache.fetch(&store, &c).await.unwrap();
    let mut left: Vec<_> =
        files(folder.path()).iter().map(|it| it.file_name().unwrap().to_owned()).collect();
    left.sort();
    assert_eq!(left, ["a", "c"]);
    drop((held, third));
    // It is too large for the folder, and there as long as it is read.
    let large = object(&store, "large", 300).await;
    let copy = cache.fetch(&store, &large).await.unwrap();
    assert_eq!(files(folder.path()), std::slice::from_ref(&copy.path));
}

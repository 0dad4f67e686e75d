//! Folders of a store: addresses, shards under names that nothing has, copies in a
//! bounded folder, policies that are whole or not there.

mod cache;
mod claim;
mod local;
mod policies;

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;

use object_store::memory::InMemory;
use oclaw::store::{Address, Error, Feed, Store};
use oclaw::table::{Format, Shard};
use oclaw::trajectory::turn::Micros;
use oclaw::trajectory::{Turn, Writer};

use crate::forge::{captured, write};
use crate::harness::fake_s3::FakeS3;

fn address(text: &str) -> Address {
    Address::of(Path::new(text)).unwrap().unwrap()
}

fn in_memory(url: &str) -> Store {
    Store::over(Arc::new(InMemory::new()), address(url))
}

/// The client of a store that can fail.
fn s3(fake: &FakeS3, url: &str) -> Store {
    let settings = [
        ("AWS_ENDPOINT", fake.endpoint.as_str()),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_ACCESS_KEY_ID", "a"),
        ("AWS_SECRET_ACCESS_KEY", "b"),
        ("AWS_NOT_A_SETTING", "c"),
    ];
    let settings = settings.map(|(name, value)| (name.to_owned(), value.to_owned()));
    Store::open(address(url), &settings).unwrap()
}

#[test]
fn addresses_are_told_from_paths_and_hold_no_key() {
    for path in ["turns", "/a/s3:/b", "http://host/a", "s3:/b", "C://x"] {
        assert!(!Address::is(Path::new(path)), "{path}");
    }
    let turns = address("s3://bucket/a/turns/");
    assert_eq!(turns.to_string(), "s3://bucket/a/turns");
    assert_eq!(turns.join("x.parquet").to_string(), "s3://bucket/a/turns/x.parquet");
    let (folder, name) = turns.split().unwrap();
    assert_eq!((folder.to_string().as_str(), name.as_str()), ("s3://bucket/a", "turns"));
    assert_eq!(address("gs://b").split(), None);
    assert_eq!(address("az://container/a").scheme(), "az");
    let told = |text: &str| Address::of(Path::new(text)).unwrap_err().to_string();
    assert_eq!(
        told("s3://id:secret@bucket/a"),
        "`s3://…@bucket/a`: keys are no part of an address: they come from the environment"
    );
    // Nor does a signed address show its signature.
    assert!(told("s3://id:secret@bucket/a?sig=very-secret").starts_with("`s3://…@bucket/a…`: "));
    assert!(told("s3://id:secret@bucket?sig=very-secret").starts_with("`s3://…@bucket/…`: "));
    let signed = Address::of(Path::new("s3://bucket/a?X-Amz-Signature=very-secret")).unwrap_err();
    assert_eq!(
        signed.to_string(),
        "`s3://bucket/a…`: it ends before `?` or `#`: signatures are no part of an address"
    );
    assert_eq!(told("s3:///a"), "`s3:///a`: it names no bucket");
    assert!(told("s3://bucket/a//b").starts_with("`s3://bucket/a//b`: "));
}

#[tokio::test]
async fn a_name_is_given_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x");
    std::fs::write(&file, "first").unwrap();
    let fake = FakeS3::start();
    for store in [in_memory("s3://bucket/out"), s3(&fake, "s3://bucket/out")] {
        store.publish("a.parquet", &file).await.unwrap();
        let again = store.put_new("a.parquet", "second".into()).await.unwrap_err();
        assert!(
            matches!(&again, Error::Exists { url } if url == "s3://bucket/out/a.parquet"),
            "{again:?}"
        );
        assert!(!again.is_transient());
        assert_eq!(store.read("a.parquet").await.unwrap().unwrap(), "first");
        store.replace("a.parquet", "third".into()).await.unwrap();
        assert_eq!(store.read("a.parquet").await.unwrap().unwrap(), "third");
        store.delete("a.parquet").await.unwrap();
        store.delete("a.parquet").await.unwrap();
        assert_eq!(store.look("a.parquet").await.unwrap(), None);
    }
}

#[tokio::test]
async fn a_write_whose_answer_is_lost_is_done_once() {
    let fake = FakeS3::start();
    let store = s3(&fake, "s3://bucket/out");
    fake.lose(1);
    // The second try of the same call finds the name taken, by the first.
    store.put_new("a", "x".into()).await.unwrap();
    let puts = fake.asked().iter().filter(|it| it.starts_with("PUT ")).count();
    assert_eq!((puts, fake.get("out/a").unwrap().as_ref()), (2, &b"x"[..]));
    // Of the same length, but somebody else's.
    let other = store.put_new("a", "y".into()).await.unwrap_err();
    assert!(matches!(other, Error::Exists { .. }), "{other:?}");
    // A conflict with a write that came to nothing is no reason to give up.
    fake.conflict();
    let under_way = store.put_new("b", "x".into()).await.unwrap_err();
    assert!(under_way.is_transient(), "{under_way:?}");
    assert_eq!(
        under_way.to_string(),
        "`s3://bucket/out/b`: the store is away: another write of this name is under way"
    );
    store.put_new("b", "x".into()).await.unwrap();
}

#[tokio::test]
async fn errors_say_whether_waiting_helps() {
    let fake = FakeS3::start();
    let store = s3(&fake, "s3://bucket/in");
    for (status, transient) in [(503, true), (501, false), (403, false), (400, false), (404, false)]
    {
        fake.say(status);
        let error = store.list().await.unwrap_err();
        assert_eq!(error.is_transient(), transient, "{status}: {error}");
        assert!(
            error.to_string().starts_with("`s3://bucket/in/`: ")
                || error.to_string().starts_with("`s3://bucket/in`: "),
            "{error}"
        );
    }
    let nowhere = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let settings =
        [("AWS_ENDPOINT", format!("http://{nowhere}")), ("AWS_ALLOW_HTTP", "true".into())];
    let settings = settings.map(|(name, value)| (name.to_owned(), value));
    let keys = [("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b")];
    let keys = keys.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let store = Store::open(address("s3://bucket/in"), &[settings, keys].concat()).unwrap();
    let error = store.list().await.unwrap_err();
    assert!(matches!(error, Error::Away { .. }), "{error:?}");
}

fn shard(at: i64) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.parquet");
    let turn = Turn { created_at: Micros(at), ..captured("s", 1) };
    write(&path, Format::Parquet, &[Writer::Serve], &[turn]);
    std::fs::read(path).unwrap()
}

fn names(due: &[Shard]) -> Vec<&str> {
    due.iter().map(|shard| shard.name.to_str().unwrap()).collect()
}

#[tokio::test]
async fn shards_come_in_the_order_of_their_turns() {
    let fake = FakeS3::start();
    for store in [in_memory("s3://bucket/turns"), s3(&fake, "s3://bucket/turns")] {
        let mut feed = Feed::new(store.clone());
        assert!(feed.due(&|_| false, &|_| false).await.unwrap().is_empty());
        for (name, at) in [("b.parquet", 2), ("a.parquet", 3), ("d.parquet", 2)] {
            store.replace(name, shard(at).into()).await.unwrap();
        }
        let whole = shard(1);
        store.replace("0.parquet", whole[..whole.len() / 2].to_vec().into()).await.unwrap();
        store.replace("1.parquet", "".into()).await.unwrap();
        for name in [".tmp-x.parquet", "e.arrow", "failed/f.parquet"] {
            store.replace(name, shard(1).into()).await.unwrap();
        }
        let due = feed.due(&|_| false, &|_| false).await.unwrap();
        assert_eq!(names(&due), ["b.parquet", "d.parquet", "a.parquet", "0.parquet", "1.parquet"]);
        assert_eq!(due[0].path, Path::new("s3://bucket/turns/b.parquet"));
        let broken = due[3].clone();
        let done = |name: &OsStr| name == "b.parquet";
        let due = feed.due(&done, &|shard| *shard == broken).await.unwrap();
        assert_eq!(names(&due), ["d.parquet", "a.parquet", "1.parquet"]);
        // Written to its end it is another object.
        store.replace("0.parquet", whole.into()).await.unwrap();
        let due = feed.due(&done, &|shard| *shard == broken).await.unwrap();
        assert_eq!(names(&due), ["0.parquet", "d.parquet", "a.parquet", "1.parquet"]);
    }
    // Footers alone were read, and each of them once.
    let reads = |name: &str| {
        fake.asked()
            .iter()
            .filter(|it| it.starts_with(&format!("GET /bucket/turns/{name}")))
            .count()
    };
    assert_eq!((reads("d.parquet"), reads("a.parquet"), reads("0.parquet")), (1, 1, 2));
}

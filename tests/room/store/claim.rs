//! A claim on a folder: one holder, told to all others, and taken over when it is
//! not renewed.

use std::time::Duration;

use oclaw::store::{Claim, Holder, Renewed, STALE, Store, Take};

use super::{in_memory, s3};
use crate::harness::fake_s3::FakeS3;

const NAME: &str = "loop.claim";

fn holder(id: &str) -> Holder {
    Holder { host: format!("host-{id}"), pid: 7, id: id.to_owned(), since: 1_767_225_600_000 }
}

async fn take(store: &Store, id: &str, stale: Duration) -> Take {
    Claim::take(store, NAME, holder(id), stale).await.unwrap()
}

async fn taken(store: &Store, id: &str, stale: Duration) -> (Claim, Option<Holder>) {
    match take(store, id, stale).await {
        Take::Taken { claim, from } => (claim, from),
        held => panic!("{held:?}"),
    }
}

async fn held(store: &Store, id: &str) -> (Holder, Duration) {
    match take(store, id, STALE).await {
        Take::Held { by, renewed } => (by, renewed),
        taken => panic!("{taken:?}"),
    }
}

#[tokio::test]
async fn one_holds_it_until_it_gives_it_up() {
    let fake = FakeS3::start();
    for store in [in_memory("s3://bucket/run"), s3(&fake, "s3://bucket/run")] {
        let (mut first, from) = taken(&store, "a", STALE).await;
        assert_eq!((from, first.holder()), (None, &holder("a")));
        let (by, renewed) = held(&store, "b").await;
        assert_eq!(by, holder("a"));
        assert!(renewed < STALE);
        assert_eq!(first.renew().await.unwrap(), Renewed::Kept);
        assert_eq!(held(&store, "b").await.0, holder("a"));
        first.release().await.unwrap();
        let (second, from) = taken(&store, "b", STALE).await;
        assert_eq!(from, None);
        // Killed, and started again: it need not wait for itself.
        drop(second);
        let (mut again, from) = taken(&store, "b", STALE).await;
        assert_eq!(from, None);
        // One that somebody removed is put again.
        store.delete(NAME).await.unwrap();
        assert_eq!(again.renew().await.unwrap(), Renewed::Kept);
        assert_eq!(held(&store, "a").await.0, holder("b"));
    }
}

#[tokio::test]
async fn one_that_is_not_renewed_is_taken_over_once() {
    let fake = FakeS3::start();
    let store = s3(&fake, "s3://bucket/run");
    let (mut asleep, _) = taken(&store, "a", STALE).await;
    assert_eq!(held(&store, "b").await.1, Duration::ZERO);
    // By the store's clock, whatever ours says.
    fake.make_old("run/loop.claim");
    let seen = take(&store, "b", STALE * 1000).await;
    assert!(matches!(&seen, Take::Held { renewed, .. } if renewed.as_secs() == 86_400), "{seen:?}");
    let (one, other) = tokio::join!(take(&store, "b", STALE), take(&store, "c", STALE));
    let (taker, loser) = match (one, other) {
        (Take::Taken { from, .. }, Take::Held { by, .. }) => (("b", from), by),
        (Take::Held { by, .. }, Take::Taken { from, .. }) => (("c", from), by),
        both => panic!("{both:?}"),
    };
    assert_eq!((taker.1, loser), (Some(holder("a")), holder(taker.0)));
    // Who wakes up is told.
    let lost = Renewed::Lost { to: holder(taker.0) };
    assert_eq!(asleep.renew().await.unwrap(), lost);
    asleep.release().await.unwrap();
    assert_eq!(held(&store, "d").await.0, holder(taker.0));
}

#[tokio::test]
async fn a_write_whose_answer_is_lost_is_known_for_ones_own() {
    let fake = FakeS3::start();
    let store = s3(&fake, "s3://bucket/run");
    fake.lose(1);
    let (mut claim, _) = taken(&store, "a", STALE).await;
    fake.lose(1);
    assert_eq!(claim.renew().await.unwrap(), Renewed::Kept);
    // By a second start, which has to write over what the first one has left.
    fake.lose(1);
    let (mut over, from) = taken(&store, "a", STALE).await;
    assert_eq!(from, None);
    assert_eq!(over.renew().await.unwrap(), Renewed::Kept);
    // A store that is away takes nothing from anybody.
    fake.say(503);
    assert!(over.renew().await.unwrap_err().is_transient());
    fake.say(0);
    assert_eq!(over.renew().await.unwrap(), Renewed::Kept);
}

#[tokio::test]
async fn what_is_no_claim_is_not_taken() {
    let store = in_memory("s3://bucket/run");
    store.replace(NAME, "x".into()).await.unwrap();
    let error = Claim::take(&store, NAME, Holder::here("a"), STALE).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "`s3://bucket/run/loop.claim`: it is no claim: remove it if nobody else uses this folder"
    );
    let here = Holder::here("a");
    assert_eq!((here.pid, here.id.as_str()), (std::process::id(), "a"));
    assert!(!here.host.is_empty() && here.since > 1_600_000_000_000);
}

//! The whole loop with its shards and policies in an object store.

use std::fs;
use std::path::Path;

use super::super::stores::{real, settings};
use super::Loop;
use super::chats::converse;
use super::whole::{EMBEDDED, with_model};
use crate::harness::fake_s3::FakeS3;

fn over(endpoint: &str) -> Loop {
    let mut looped = Loop::new(&format!(
        "{}[loop]\nstore = \"s3://bucket/run\"\nrestart-wait = \"200ms\"\n",
        with_model(EMBEDDED)
    ));
    looped.env = settings(endpoint);
    looped.env.push(("NO_PROXY".to_owned(), "127.0.0.1".to_owned()));
    looped
}

/// Chats are trained and served; the loop is killed, people chat on, and another
/// takes up what is there. Each look at it finds every turn.
fn goes_round(looped: &Loop) {
    let mut first = looped.start();
    first.hears("serve: ready");
    converse(&looped.front, "first", 4);
    let engine = format!("http://{}", looped.engine);
    let served = |status: &serde_json::Value| {
        let served = status["policy"]["served"][&engine].as_str().map(str::to_owned);
        let published = status["policy"]["published"].as_u64();
        published.filter(|step| served == Some(step.to_string()))
    };
    let before = looped.until("a policy is served", |status| {
        served(status) >= Some(1) && status["account"]["trained"].as_i64() >= Some(2)
    });
    assert_eq!(before["account"]["captured"], 3);
    assert_eq!(before["store"], "s3://bucket/run");
    assert_eq!(before["policy"]["staleness"], 0);
    first.kill();
    converse(&looped.front, "alone", 4);
    let mut second = looped.start();
    second.hears("serve: taken up");
    second.hears("serve: ready");
    let after = looped.until("what was said meanwhile is trained and served", |status| {
        served(status) > served(&before) && status["account"]["captured"] == 6
    });
    assert!(after["account"]["trained"].as_i64() >= Some(4), "{after:#}");
    let (code, words) = second.stop();
    assert_eq!(code, Some(0), "{words}");
    let left = looped.status();
    super::conserved(&left);
    assert!(words.contains(&format!("captured 6 = trained {}", left["account"]["trained"])));
    // Nothing is here that is there, and no key is anywhere.
    for folder in ["judged", "hinted", "taught", "ready", "policy"] {
        assert!(!looped.path(&format!("run/{folder}")).exists(), "{folder}");
    }
    assert!(looped.path("run/objects").is_dir());
    assert_eq!(with_key(&looped.path("run")), Vec::<String>::new());
}

/// Names the files below a folder that have the key in them.
fn with_key(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            found.extend(with_key(&path));
        } else if fs::read(&path)
            .is_ok_and(|bytes| bytes.windows(11).any(|word| word == b"very-secret"))
        {
            found.push(path.display().to_string());
        }
    }
    found
}

#[test]
fn a_loop_goes_round_over_a_store() {
    let fake = FakeS3::start();
    let looped = over(&fake.endpoint);
    goes_round(&looped);
    let names = fake.names();
    for folder in ["turns", "judged", "hinted", "taught", "ready", "policy"] {
        let inside = format!("run/{folder}/");
        assert!(names.iter().any(|name| name.starts_with(&inside)), "{folder}: {names:?}");
    }
}

#[test]
fn a_loop_goes_round_over_a_real_s3_server() {
    let Some(server) = real::Server::start() else { return };
    goes_round(&over(&server.endpoint));
}

/// Chats go on while the store is away, and their turns are counted; what waits in the
/// spool is shipped when it is there again.
#[test]
fn a_loop_waits_for_a_store_that_is_away() {
    let fake = FakeS3::start();
    let looped = over(&fake.endpoint);
    let mut running = looped.start();
    running.hears("serve: ready");
    converse(&looped.front, "first", 2);
    looped.until("a turn is through", |status| status["account"]["captured"] == 1);
    fake.say(503);
    assert_eq!(converse(&looped.front, "meanwhile", 3), 0, "no chat fails");
    running.hears("the store is away");
    // Who asks gets what the loop itself saw last.
    looped.until("its turns wait in the spool", |status| {
        status["account"]["pending"]["ship"].as_i64() >= Some(2)
    });
    fake.say(0);
    looped.until("they are shipped", |status| {
        status["account"]["captured"] == 3 && status["account"]["pending"]["ship"].is_null()
    });
    assert_eq!(running.stop().0, Some(0));
}

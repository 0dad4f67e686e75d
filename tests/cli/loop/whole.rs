//! The whole loop on a tiny model: chats go in, a new policy comes out and is served.

use super::chats::converse;
use super::{Loop, signal};
use crate::harness::fixture_models;

/// Everything, with the engine inside `oclaw serve`.
pub(super) const EMBEDDED: &str = r#"
[serve]
model = "MODEL"
listen = "FRONT"
engine-listen = "ENGINE"
dtype = "f32"
shard-age = "200ms"
env = { OMP_NUM_THREADS = "1" }
[judge]
rules = ""
poll = "100ms"
[hint]
from-feedback = true
poll = "100ms"
[teacher-lp]
poll = "100ms"
no-cache = true
env = { OMP_NUM_THREADS = "1" }
[advantage]
poll = "100ms"
[train]
estimator = "combine"
batch-turns = 2
max-wait = "1s"
lr = 1e-3
poll = "100ms"
max-staleness = 100
env = { OMP_NUM_THREADS = "1" }
[sync-weights]
poll = "100ms"
"#;

pub(super) fn with_model(config: &str) -> String {
    config.replace("MODEL", &fixture_models().join("tiny-qwen3").display().to_string())
}

#[test]
fn chats_go_in_and_a_new_policy_is_served() {
    let looped = Loop::new(&with_model(EMBEDDED));
    let mut running = looped.start();
    running.hears("serve: ready");
    converse(&looped.front, "first", 4);
    let engine = format!("http://{}", looped.engine);
    let trained = looped.until("a policy is served", |status| {
        let served = status["policy"]["served"][&engine].as_str().unwrap_or("0");
        served != "0" && status["account"]["trained"].as_i64() >= Some(2)
    });
    assert!(trained["policy"]["published"].as_u64() >= Some(1), "{trained:#}");
    assert_eq!(trained["account"]["captured"], 3);
    assert_eq!(trained["account"]["open"], 1);
    assert!(trained["policy"]["health"]["signal"].is_string(), "{trained:#}");
    let (code, words) = running.stop();
    assert_eq!(code, Some(0), "{words}");
    assert!(words.contains("captured 3 = trained"), "{words}");
    // What is told once more after the end comes of the folders alone.
    let after = looped.until("nobody runs", |status| status["supervisor"].is_null());
    assert_eq!(after["account"]["captured"], 3);
    assert!(after["children"].as_array().unwrap().iter().all(|it| it["phase"] == "ended"));
}

/// Serve is taken up by the next loop, and so are its chats and its weights; the
/// stages died with the first.
#[test]
fn a_killed_loop_is_taken_up_where_it_was() {
    let looped = Loop::new(&with_model(EMBEDDED));
    let mut first = looped.start();
    first.hears("serve: ready");
    let serve = looped.until("all are up", |status| {
        let children = status["children"].as_array().unwrap();
        children.len() == 7 && children.iter().all(|child| child["phase"] == "up")
    });
    let pid = |status: &serde_json::Value, name: &str| {
        let children = status["children"].as_array().unwrap();
        children.iter().find(|child| child["name"] == name).unwrap()["pid"].as_i64().unwrap()
    };
    let (before, judge) = (pid(&serve, "serve"), pid(&serve, "judge"));
    first.kill();
    let left = looped.until("the stages have died with it", |status| {
        let children = status["children"].as_array().unwrap();
        children.iter().all(|child| {
            child["phase"] == if child["name"] == "serve" { "left running" } else { "ended" }
        })
    });
    assert!(left["supervisor"].is_null(), "{left:#}");
    // Nobody watches, people chat.
    converse(&looped.front, "alone", 4);
    let mut second = looped.start();
    second.hears(&format!("serve: taken up (process {before})"));
    second.hears("serve: ready");
    let status = looped
        .until("turns are trained", |status| status["account"]["trained"].as_i64() >= Some(2));
    assert_eq!(pid(&status, "serve"), before);
    assert_ne!(pid(&status, "judge"), judge);
    assert_eq!(status["account"]["captured"], 3);
    // A child that is killed is started again, and told.
    signal(pid(&status, "judge"), "KILL");
    second.hears("judge: was killed: started again in 1.0 s");
    second.hears("judge: started");
    let (code, words) = second.stop();
    assert_eq!(code, Some(0), "{words}");
}

/// An engine of its own comes up again with the newest weights there are, and gets those
/// that come later.
#[test]
fn an_engine_that_was_killed_gets_the_newest_weights_again() {
    let config = EMBEDDED.replace("model = \"MODEL\"\n", "").replace("dtype = \"f32\"\n", "");
    let config = config.replace("engine-listen = \"ENGINE\"\n", "")
        + "[engines.policy]\nmodel = \"MODEL\"\nurl = \"http://ENGINE\"\n[engine]\ndtype = \"f32\"\n";
    let looped = Loop::new(&with_model(&config));
    let mut running = looped.start();
    running.hears("engine-policy: ready");
    running.hears("serve: ready");
    converse(&looped.front, "first", 3);
    let engine = format!("http://{}", looped.engine);
    let caught_up = |status: &serde_json::Value| {
        let policy = &status["policy"];
        let served = policy["served"][&engine].as_str().map(str::to_owned);
        policy["published"].as_u64().map(|step| step.to_string()) == served && served.is_some()
    };
    looped.until("the policy is served", caught_up);
    let pid = looped.running("engine-policy");
    signal(pid, "KILL");
    running.hears("engine-policy: was killed");
    running.hears("engine-policy: ready");
    looped.until("the policy is served again", |status| {
        caught_up(status) && looped.pid("engine-policy").is_some_and(|now| now != pid)
    });
    let (code, words) = running.stop();
    assert_eq!(code, Some(0), "{words}");
}

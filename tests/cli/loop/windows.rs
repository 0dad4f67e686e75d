//! Training that waits for people to go, and for the night.

use std::fs;
use std::process::Command;

use super::Loop;
use super::chats::{Chatter, converse};
use super::whole::{EMBEDDED, with_model};

/// Nothing is trained while somebody chats; what waits is trained when nobody does.
#[test]
fn training_waits_until_nobody_chats() {
    let rest = "[loop]\ntrain-when-idle = \"3s\"\n[judge]";
    let looped = Loop::new(&with_model(EMBEDDED).replace("[judge]", rest));
    let mut running = looped.start();
    running.hears("train: started");
    let chatter = Chatter::start(&looped.front);
    let busy = looped.until("turns wait for the trainer", |status| {
        status["account"]["pending"]["train"].as_i64() >= Some(6)
    });
    assert_eq!(busy["account"]["trained"], 0, "{busy:#}");
    let (answered, _) = chatter.stop();
    assert!(answered >= 6);
    looped.until("turns are trained", |status| status["account"]["trained"].as_i64() > Some(0));
    let log = fs::read_to_string(looped.path("run/logs/train.log")).unwrap();
    assert!(log.contains("people are chatting: 2 turns wait"), "{log}");
    assert!(log.contains("a step may begin"), "{log}");
    assert_eq!(running.stop().0, Some(0));
}

/// Hours that are far from now, by the clock that `date` reads.
fn far_from_now() -> String {
    let output = Command::new("date").arg("+%H").output().unwrap().stdout;
    let hour: u32 = String::from_utf8(output).unwrap().trim().parse().unwrap();
    format!("{:02}:00-{:02}:00", (hour + 10) % 24, (hour + 12) % 24)
}

#[test]
fn training_waits_for_its_hours_and_weights_for_their_interval() {
    let hours = far_from_now();
    let rest = format!("[loop]\ntrain-hours = [\"{hours}\"]\nweight-sync-interval = 3\n[judge]");
    let config = with_model(EMBEDDED).replace("[judge]", &rest);
    let looped = Loop::new(&config);
    let mut running = looped.start();
    running.hears("train: started");
    converse(&looped.front, "day", 4);
    looped.until("turns wait", |status| {
        let log = fs::read_to_string(looped.path("run/logs/train.log")).unwrap_or_default();
        status["account"]["pending"]["train"] == 3
            && log.contains("outside `--hours`: 2 turns wait")
    });
    assert_eq!(running.stop().0, Some(0));
    // The same file without hours: two policies come, and are not enough for a push.
    let config = fs::read_to_string(looped.path("oclaw.toml")).unwrap();
    let all_day = config.replace(&format!("train-hours = [\"{hours}\"]\n"), "");
    fs::write(looped.path("oclaw.toml"), all_day).unwrap();
    let mut running = looped.start();
    running.hears("sync-weights: started");
    let engine = format!("http://{}", looped.engine);
    let served = |status: &serde_json::Value| {
        status["policy"]["served"][&engine].as_str().map(str::to_owned)
    };
    let two = looped.until("two policies", |status| {
        status["policy"]["published"] == 2 && served(status).is_some()
    });
    assert_eq!(served(&two).as_deref(), Some("0"));
    converse(&looped.front, "more", 5);
    looped.until("the third or a later one is served", |status| {
        served(status).is_some_and(|version| version.parse::<u64>().unwrap() >= 3)
    });
    // It was pushed once: the first two never were.
    let log = fs::read_to_string(looped.path("run/logs/sync-weights.log")).unwrap();
    assert!(!log.contains("version 1 pushed") && !log.contains("version 2 pushed"), "{log}");
    assert_eq!(running.stop().0, Some(0));
}

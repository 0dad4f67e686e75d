//! A stage that fails each time that it is started, and one whose state nobody tells.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use serde_json::Value;

use super::super::follow::Running;
use super::chats::converse;
use super::stages::{ONLY_JUDGE, config, engine, pending};
use super::{Loop, PATIENCE, signal};
use crate::harness::fake_engine::FakeEngine;
use crate::harness::oclaw;

pub(super) fn child(status: &Value, name: &str) -> Value {
    let children = status["children"].as_array().unwrap();
    children.iter().find(|child| child["name"] == name).cloned().unwrap_or_default()
}

/// Somebody else writes into the judge's folder.
fn occupy(looped: &Loop) -> Running {
    for folder in ["run/judged", "elsewhere"] {
        fs::create_dir_all(looped.path(folder)).unwrap();
    }
    // One of an earlier process says nothing.
    let _ = fs::remove_file(looped.path("run/judged/.lock"));
    let mut command = oclaw();
    command.args(["judge", "--rules", "--follow", "elsewhere", "-o", "run/judged"]);
    command.current_dir(looped.path(""));
    let other = Running::start(&command);
    let start = Instant::now();
    while !looped.path("run/judged/.lock").exists() {
        assert!(start.elapsed() < PATIENCE, "nobody takes the folder");
        std::thread::park_timeout(std::time::Duration::from_millis(20));
    }
    other
}

fn metrics(address: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

/// A stage that ends with code 1 each time may heal, as it does here: it is tried for
/// ever, shown, and told once. Serve goes on.
#[test]
fn a_stage_that_fails_each_time_is_shown_and_heals() {
    let upstream = engine();
    let rest = format!(
        "[judge]\nrules = \"\"\npoll = \"100ms\"\n{ONLY_JUDGE}give-up = 3\n\
         restart-wait = \"20ms\"\nrestart-longest = \"1s\"\nlisten = \"FREE\"\n"
    );
    let looped = Loop::new(&config(&upstream.url(), &rest));
    let other = occupy(&looped);
    let mut running = looped.start();
    let address = running.hears("status: http://");
    let address = address.split("http://").nth(1).unwrap().split('/').next().unwrap().to_owned();
    let told =
        "judge: ended with exit code 1, as each time of late: started again every 1 s at least";
    running.hears(told);
    assert_eq!(converse(&looped.front, "on", 3), 0);
    let failing = looped.until("it is shown, and turns wait", |status| {
        let judge = child(status, "judge");
        judge["failures"].as_u64() >= Some(5)
            && judge["phase"] == "failing"
            && pending(status, "judge") == 2
    });
    let last = child(&failing, "judge")["last_end"].as_str().unwrap().to_owned();
    assert!(last.starts_with("ended with exit code 1: ") && last.contains("in use"), "{last}");
    assert_eq!(child(&failing, "serve")["phase"], "up");
    assert!(!metrics(&address).contains("process_failures{process=\"judge\"} 0\n"));
    let log = fs::read_to_string(looped.path("run/logs/loop.log")).unwrap();
    assert_eq!(log.matches(told).count(), 1, "{log}");
    other.kill();
    looped.until("the judge has caught up", |status| {
        pending(status, "nobody") == 2 && child(status, "judge")["phase"] == "up"
    });
    assert_eq!(running.stop().0, Some(0));

    // One that still fails at the end is told by the exit code.
    let other = occupy(&looped);
    let mut running = looped.start();
    running.hears(told);
    let (code, words) = running.stop();
    assert_eq!(code, Some(3), "{words}");
    drop(other);
}

/// Whoever tidies up takes the logs away: what is started next has one again.
#[test]
fn logs_that_were_taken_away_begin_anew() {
    let upstream = engine();
    let rest =
        format!("[judge]\nrules = \"\"\npoll = \"100ms\"\n{ONLY_JUDGE}restart-wait = \"20ms\"\n");
    let looped = Loop::new(&config(&upstream.url(), &rest));
    let mut running = looped.start();
    running.hears("judge: started");
    running.hears("advantage: started");
    let judge = looped.running("judge");
    fs::rename(looped.path("run/logs"), looped.path("old")).unwrap();
    signal(judge, "KILL");
    running.hears("judge: was killed");
    running.hears("judge: started");
    assert_eq!(converse(&looped.front, "on", 3), 0);
    looped.until("the judge goes on", |status| pending(status, "nobody") == 2);
    let said = fs::read_to_string(looped.path("run/logs/judge.log")).unwrap();
    assert!(said.contains("rows"), "{said}");
    assert_eq!(running.stop().0, Some(0));
}

/// The metrics of a server with keys are read by one of them; where that does not do,
/// what is not known is said.
#[test]
fn what_a_server_with_keys_counts_is_known_or_said_not_to_be() {
    let engine = FakeEngine::sglang();
    let rest = "[sync-weights]\nengine-key-file = \"engine.key\"\n[loop]\n\
                without = [\"judge\", \"hint\", \"teacher-lp\", \"advantage\", \"train\"]\n";
    let text = format!(
        "[engines.policy]\nurl = \"{}\"\n[serve]\nlisten = \"FRONT\"\n\
         key-file = \"clients.keys\"\n{rest}",
        engine.url()
    );
    let looped = Loop::new(&text);
    fs::write(looped.path("clients.keys"), "# people\nme sesame\n").unwrap();
    fs::write(looped.path("engine.key"), "open\n").unwrap();
    let mut running = looped.start();
    running.hears("serve: ready");
    let known = looped.until("the open turns are known", |status| {
        status["account"]["open"] == 0 && status["policy"]["served"][&engine.url()] == "default"
    });
    assert!(known["account"]["open_unknown"].is_null(), "{known:#}");
    let asked = engine.seen().into_iter().filter(|seen| seen.path == "/model_info");
    assert!(asked.into_iter().any(|seen| seen.authorization.as_deref() == Some("Bearer open")));
    for (keys, why) in [
        (Some("me wrong\n"), "it refuses the key that the file names"),
        (None, "cannot read the keys in `clients.keys`"),
    ] {
        match keys {
            Some(keys) => fs::write(looped.path("clients.keys"), keys).unwrap(),
            None => fs::remove_file(looped.path("clients.keys")).unwrap(),
        }
        looped.until("it is said that nobody knows", |status| {
            let account = &status["account"];
            account["open"].is_null()
                && account["open_unknown"].as_str().is_some_and(|it| it.contains(why))
        });
    }
    assert_eq!(running.stop().0, Some(0));
}

/// Nobody knows what exit codes of other people's programs mean.
#[test]
fn an_engine_of_others_may_end_as_it_likes() {
    let upstream = engine();
    let script = "trap 'exit 1' TERM; touch trapped; while :; do sleep 0.1; done";
    let rest = format!(
        "[engines.other]\nserves = \"judge\"\ncommand = [\"sh\", \"-c\", \"{script}\"]\n\
         url = \"http://ENGINE\"\n[judge]\nrules = \"\"\npoll = \"100ms\"\n{ONLY_JUDGE}"
    );
    let config = config(&upstream.url(), &rest);
    let looped = Loop::new(&config.replacen("url", "serves = \"policy\"\nurl", 1));
    let mut running = looped.start();
    running.hears("advantage: started");
    let start = Instant::now();
    while !looped.path("trapped").exists() {
        assert!(start.elapsed() < PATIENCE, "the engine does not start");
        std::thread::park_timeout(std::time::Duration::from_millis(20));
    }
    let (code, words) = running.stop();
    assert_eq!(code, Some(0), "{words}");
    assert!(words.contains("engine-other: ended with exit code 1"), "{words}");
}

/// An engine that something kills each time that it is started is done without, as
/// long as another one is there.
#[test]
fn one_of_two_engines_that_never_comes_up_keeps_nobody_from_chatting() {
    let upstream = engine();
    let rest = format!(
        "[engines.other]\nserves = \"policy\"\ncommand = [\"sh\", \"-c\", \"kill -KILL $$\"]\n\
         url = \"http://ENGINE\"\n[judge]\nrules = \"\"\n{ONLY_JUDGE}give-up = 3\n\
         restart-wait = \"20ms\"\nrestart-longest = \"1s\"\n"
    );
    let config = config(&upstream.url(), &rest);
    let looped = Loop::new(&config.replacen("url", "serves = \"policy\"\nurl", 1));
    let mut running = looped.start();
    running.hears("engine-other: was killed, as each time of late");
    running.hears("serve: started");
    running.kill();
}

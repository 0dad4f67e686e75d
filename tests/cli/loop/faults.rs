//! Every child and the loop itself killed in a seeded order, and a full disk, while
//! people chat.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::super::follow::Running;
use super::chats::{Chatter, converse};
use super::disk::Disk;
use super::failing::child;
use super::whole::{EMBEDDED, with_model};
use super::{Loop, PATIENCE, signal, sum};

const STAGES: [&str; 6] = ["judge", "hint", "teacher-lp", "advantage", "train", "sync-weights"];
/// The loop itself, among those to kill.
const LOOP: &str = "the loop";

/// The whole loop, which comes back quickly and makes few steps of many turns.
fn quick() -> String {
    let quick = "[loop]\nrestart-wait = \"200ms\"\nrestart-longest = \"2s\"\n[judge]";
    EMBEDDED.replace("[judge]", quick).replace("batch-turns = 2", "batch-turns = 64")
}

/// Everything in an order that looks random and is the same each time.
fn shuffled(mut what: Vec<&'static str>, mut seed: u64) -> Vec<&'static str> {
    for last in (1..what.len()).rev() {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        what.swap(last, (seed >> 33) as usize % (last + 1));
    }
    what
}

/// Waits until so many more turns were answered: chats go on.
fn more_chats(chatter: &Chatter, turns: u64) {
    let (start, wanted) = (Instant::now(), chatter.turns.load(Ordering::Relaxed) + turns);
    while chatter.turns.load(Ordering::Relaxed) < wanted {
        assert!(start.elapsed() < PATIENCE, "nobody answers the chats");
        std::thread::park_timeout(Duration::from_millis(50));
    }
}

/// Waits until every turn is trained, refused or open, the newest policy is served,
/// and the number of turns is as wanted.
fn settled(looped: &Loop, wanted: impl Fn(u64) -> bool) {
    let engine = format!("http://{}", looped.engine);
    looped.until("everything has settled", |status| {
        let published = status["policy"]["published"].as_u64().map(|step| step.to_string());
        let served = status["policy"]["served"][&engine].as_str().map(str::to_owned);
        let account = &status["account"];
        // What is open was counted a little earlier than the rows.
        let all = account["captured"].as_u64().unwrap() + account["open"].as_u64().unwrap_or(0);
        sum(&account["pending"]) == 0 && published.is_some() && published == served && wanted(all)
    });
}

/// Kills a child, as soon as it runs.
fn kill(looped: &Loop, child: &str) {
    let start = Instant::now();
    loop {
        let pid = looped.pid(child);
        if let Some(pid) = pid.filter(|pid| super::runs_here(*pid as u64, &looped.path(""))) {
            signal(pid, "KILL");
            return;
        }
        assert!(start.elapsed() < PATIENCE, "{child} does not run");
        std::thread::park_timeout(Duration::from_millis(20));
    }
}

/// Kills two of these at once, again and again, until each was killed. People chat in
/// between, and every turn is accounted for at any time.
fn kill_all(looped: &Loop, mut running: Running, chatter: &Chatter, whom: &[&str]) -> Running {
    for two in whom.chunks(2) {
        more_chats(chatter, 1);
        for victim in two {
            if *victim == LOOP {
                running.kill();
                running = looped.start();
                running.hears("serve: ready");
            } else {
                kill(looped, victim);
            }
            super::conserved(&looped.status());
        }
    }
    running
}

/// No chat notices what happens behind serve.
#[test]
fn chats_never_fail_while_each_stage_and_the_loop_are_killed() {
    let looped = Loop::new(&with_model(&quick()));
    let mut running = looped.start();
    running.hears("serve: ready");
    let chatter = Chatter::start(&looped.front);
    let whom = shuffled([&STAGES[..], &[LOOP, LOOP]].concat(), 7);
    let running = kill_all(&looped, running, &chatter, &whom);
    let (answered, retries) = chatter.stop();
    assert_eq!(retries, 0, "of {answered} chats some had to be sent again");
    // Nothing was killed that captures.
    settled(&looped, |all| all == answered);
    assert_eq!(running.stop().0, Some(0));
}

/// Who updates the weights was killed amid that, and so was the loop: the engine is left
/// on hold, and serve is not ready. The next loop starts its stages all the same, for one
/// of them lets it go on.
#[test]
fn an_engine_on_hold_keeps_no_loop_from_starting() {
    let quick = "[loop]\nrestart-wait = \"200ms\"\n[judge]";
    let looped = Loop::new(&with_model(&EMBEDDED.replace("[judge]", quick)));
    let mut running = looped.start();
    running.hears("serve: ready");
    converse(&looped.front, "first", 4);
    settled(&looped, |all| all == 4);
    running.kill();
    let engine = &looped.engine;
    let pause = format!(
        "POST /pause_generation HTTP/1.1\r\nhost: {engine}\r\ncontent-length: 20\r\n\
         content-type: application/json\r\nconnection: close\r\n\r\n{{\"mode\": \"in_place\"}}"
    );
    let mut stream = TcpStream::connect(engine).unwrap();
    stream.write_all(pause.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let mut running = looped.start();
    running.hears("serve: taken up");
    running.hears("serve: ready");
    assert_eq!(converse(&looped.front, "second", 4), 0);
    settled(&looped, |all| all == 8);
    assert_eq!(running.stop().0, Some(0));
}

/// Where serve or its engine is killed a request may have to be sent again; none is
/// lost, and none counts twice.
#[test]
fn nothing_is_lost_where_serve_and_the_engine_are_killed_too() {
    let config = quick().replace("model = \"MODEL\"\n", "").replace("dtype = \"f32\"\n", "");
    let config = config.replace("engine-listen = \"ENGINE\"\n", "")
        + "[engines.policy]\nmodel = \"MODEL\"\nurl = \"http://ENGINE\"\n\
           env = { OMP_NUM_THREADS = \"1\" }\n[engine]\ndtype = \"f32\"\n";
    let looped = Loop::new(&with_model(&config));
    let mut running = looped.start();
    running.hears("serve: ready");
    let chatter = Chatter::start(&looped.front);
    let whom = shuffled(vec!["serve", "engine-policy", "train", "sync-weights", LOOP, "serve"], 11);
    let running = kill_all(&looped, running, &chatter, &whom);
    let (answered, _) = chatter.stop();
    settled(&looped, |all| all >= answered);
    assert_eq!(running.stop().0, Some(0));
}

#[test]
fn a_full_disk_holds_up_a_stage_and_heals() {
    let looped = Loop::new(&with_model(&quick()));
    let Some(disk) = Disk::mount(&looped.path("run/judged")) else {
        println!("skipped: nothing can be mounted here");
        return;
    };
    disk.fill();
    let mut running = looped.start();
    running.hears("serve: ready");
    let chatter = Chatter::start(&looped.front);
    running.hears("judge: ended with exit code 1: started again");
    more_chats(&chatter, 8);
    looped.until("turns wait for the judge", |status| {
        status["account"]["pending"]["judge"].as_i64() >= Some(3)
    });
    disk.empty();
    more_chats(&chatter, 4);
    let (answered, retries) = chatter.stop();
    assert_eq!(retries, 0);
    settled(&looped, |all| all >= answered);
    looped.until("the judge is well again", |status| child(status, "judge")["phase"] == "up");
    assert_eq!(running.stop().0, Some(0));
    drop(looped);
}

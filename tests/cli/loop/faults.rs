//! Every child and the loop itself killed in a seeded order, and a full disk, while
//! people chat.

use std::fs;
use std::io::Write;
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::chats::Chatter;
use super::whole::{EMBEDDED, with_model};
use super::{Loop, PATIENCE, signal, sum};

const STAGES: [&str; 6] = ["judge", "hint", "teacher-lp", "advantage", "train", "sync-weights"];

/// The whole loop, which comes back quickly and makes few steps of many turns.
fn quick() -> String {
    let quick = "[loop]\nrestart-wait = \"200ms\"\nrestart-longest = \"2s\"\n[judge]";
    EMBEDDED.replace("[judge]", quick).replace("batch-turns = 2", "batch-turns = 64")
}

/// Numbers that look random and are the same each time.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % sides
    }
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

fn kill(looped: &Loop, child: &str) {
    if let Some(pid) =
        looped.pid(child).filter(|pid| super::runs_here(*pid as u64, &looped.path("")))
    {
        signal(pid, "KILL");
    }
}

/// No chat notices what happens behind serve.
#[test]
fn chats_never_fail_while_stages_and_the_loop_are_killed() {
    let looped = Loop::new(&with_model(&quick()));
    let mut running = looped.start();
    running.hears("serve: ready");
    let chatter = Chatter::start(&looped.front);
    let mut dice = Dice(7);
    for round in 0..6 {
        more_chats(&chatter, 1);
        match dice.roll(4) {
            0 => {
                running.kill();
                running = looped.start();
                running.hears("serve: ready");
            }
            _ => kill(&looped, STAGES[(round + dice.roll(6)) % 6]),
        }
        super::conserved(&looped.status());
    }
    let (answered, retries) = chatter.stop();
    assert_eq!(retries, 0, "of {answered} chats some had to be sent again");
    // Nothing was killed that captures.
    settled(&looped, |all| all == answered);
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
    let mut dice = Dice(11);
    for round in 0..6 {
        more_chats(&chatter, 1);
        match (round, dice.roll(3)) {
            (2 | 4, _) => {
                running.kill();
                running = looped.start();
                running.hears("serve: ready");
            }
            (_, 0) => kill(&looped, "serve"),
            (_, 1) => kill(&looped, "engine-policy"),
            _ => kill(&looped, STAGES[dice.roll(6)]),
        }
        super::conserved(&looped.status());
    }
    let (answered, _) = chatter.stop();
    settled(&looped, |all| all >= answered);
    assert_eq!(running.stop().0, Some(0));
}

/// A disk of the judge's own. Nothing if nothing can be mounted here.
struct Disk(std::path::PathBuf);

impl Disk {
    fn mount(at: &std::path::Path) -> Option<Self> {
        fs::create_dir_all(at).unwrap();
        let options = ["-t", "tmpfs", "-o", "size=16m", "tmpfs"];
        let mounted = Command::new("mount").args(options).arg(at).output();
        mounted.is_ok_and(|it| it.status.success()).then(|| Self(at.to_owned()))
    }

    fn fill(&self) {
        let mut filler = fs::File::create(self.0.join(".filler")).unwrap();
        while filler.write_all(&[0; 4096]).is_ok() {}
    }

    fn empty(&self) {
        fs::remove_file(self.0.join(".filler")).unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
#[expect(clippy::print_stdout, reason = "what is skipped is said")]
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
    assert_eq!(running.stop().0, Some(0));
    drop(looped);
}

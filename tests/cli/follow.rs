//! `--follow`: shards that come while a stage runs, shards that fail, engines
//! that go away, signals, kills and restarts.

mod away;
mod servers;
mod sync;
#[cfg(feature = "torch")]
mod taught;
#[cfg(feature = "torch")]
mod train;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use oclaw::table::{Format, Provenance, read_turns, write_shard};
use oclaw::trajectory::turn::Micros;
use oclaw::trajectory::{Turn, Writer};
use serde_json::{Value, json};

use super::judge::says;
use crate::forge::{captured, write};
use crate::harness::fake_engine::{FakeEngine, Reply};
use crate::harness::{PATIENCE, oclaw, oclaw_keeping};

const CHAT: &str = "/v1/chat/completions";
const SERVE: &[Writer] = &[Writer::Serve];

/// A folder for a whole run.
pub(super) struct Run(tempfile::TempDir);

impl Run {
    fn new() -> Self {
        let run = Self(tempfile::tempdir().unwrap());
        std::fs::create_dir(run.at("turns")).unwrap();
        run
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a shard of turns that begin at some second.
    fn shard(&self, name: &str, second: i64, turns: u32) -> PathBuf {
        let path = self.at("turns").join(name);
        write(&path, Format::Parquet, SERVE, &turns_of(name, second, turns))
    }

    /// Returns the command of a stage from one folder into another.
    fn command(&self, stage: &str, (from, to): (&str, &str)) -> assert_cmd::Command {
        let mut command = oclaw_keeping(self.0.path());
        command.args([stage, "--poll", "1ms", "--follow"]).arg(self.at(from));
        command.arg(if stage == "train" { "--out" } else { "-o" }).arg(self.at(to));
        command
    }

    /// Starts it.
    fn start(&self, stage: &str, folders: (&str, &str), further: &[&str]) -> Running {
        let mut command = self.command(stage, folders);
        command.args(further);
        Running::start(&command)
    }

    fn judging(&self) -> assert_cmd::Command {
        let mut command = self.command("judge", ("turns", "judged"));
        command.arg("--once");
        command
    }

    /// Returns the names in a folder that are no bookkeeping, sorted.
    fn names(&self, folder: &str) -> Vec<String> {
        let mut names = all_names(&self.at(folder));
        names.retain(|name| !name.starts_with('.'));
        names
    }

    fn scores(&self, shard: &str) -> Vec<Option<f32>> {
        let turns = read_turns(&[self.at("judged").join(shard)]).unwrap();
        turns.iter().map(|turn| turn.score).collect()
    }

    fn listed(&self, folder: &str) -> Vec<Value> {
        let text = std::fs::read_to_string(self.at(folder).join("failed.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

fn turns_of(session: &str, second: i64, turns: u32) -> Vec<Turn> {
    let turn = |number: u32| Turn {
        created_at: Micros((second + i64::from(number)) * 1_000_000),
        finished_at: Micros((second + i64::from(number)) * 1_000_000 + 1),
        next_state: Some(
            json!([{"role": "user", "content": format!("No, {session} {number}.")}]).to_string(),
        ),
        ..captured(session, number)
    };
    (1..=turns).map(turn).collect()
}

fn all_names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// A running `oclaw`, whose talk is read line by line.
pub(super) struct Running {
    child: Child,
    lines: Receiver<String>,
    heard: Vec<String>,
}

impl Running {
    pub(super) fn start(like: &assert_cmd::Command) -> Self {
        let mut command = Command::new(like.get_program());
        command.args(like.get_args());
        for (name, value) in like.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        if let Some(folder) = like.get_current_dir() {
            command.current_dir(folder);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let talk = BufReader::new(child.stderr.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in talk.lines().map_while(Result::ok) {
                let _ = sender.send(line.split_whitespace().collect::<Vec<_>>().join(" "));
            }
        });
        Self { child, lines, heard: Vec::new() }
    }

    /// Waits for a line that has some words.
    pub(super) fn hears(&mut self, words: &str) -> String {
        loop {
            let line = self.lines.recv_timeout(PATIENCE);
            let line = line.unwrap_or_else(|_| panic!("no `{words}` in {:#?}", self.heard));
            self.heard.push(line.clone());
            if line.contains(words) {
                return line;
            }
        }
    }

    pub(super) fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.child.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    }

    /// Waits for the end: exit code and everything said.
    pub(super) fn end(mut self) -> (Option<i32>, String) {
        while let Ok(line) = self.lines.recv_timeout(PATIENCE) {
            self.heard.push(line);
        }
        (self.child.wait().unwrap().code(), self.heard.join("\n"))
    }

    pub(super) fn stop(self) -> (Option<i32>, String) {
        self.signal("TERM");
        self.end()
    }

    pub(super) fn kill(self) {
        self.signal("KILL");
        self.end();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
    }
}

fn judge() -> FakeEngine {
    let fake = FakeEngine::start();
    fake.on("/v1/models", [Reply::json(200, json!({"data": [{"id": "scripted"}]}))]);
    fake.on(CHAT, [Reply::json(200, says("\\boxed{1}", "stop").1)]);
    fake
}

fn calls(fake: &FakeEngine) -> usize {
    fake.paths().iter().filter(|path| *path == CHAT).count()
}

fn talk(output: &std::process::Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn shards_are_done_as_they_come() {
    let run = Run::new();
    run.shard("b.parquet", 100, 2);
    run.shard("a.parquet", 200, 3);
    let mut judging = run.start("judge", ("turns", "judged"), &["--rules"]);
    assert!(judging.hears("rows").starts_with("b.parquet: 2 rows, 2 noted, 0 failed, "));
    assert!(judging.hears("rows").starts_with("a.parquet: 3 rows, 3 noted, 0 failed, "));
    // While it waits.
    let turns = turns_of("late", 50, 1);
    let path = write_shard(&run.at("turns"), SERVE, &turns, &Provenance::default()).unwrap();
    let name = path.file_name().unwrap().to_str().unwrap();
    judging.hears(&format!("{name}: 1 rows"));
    // A second one would write the same files.
    let second = run.command("judge", ("turns", "judged")).arg("--rules").assert().code(1);
    let words = talk(second.get_output());
    assert!(words.contains("judged` is in use by another process hint: one writer"), "{words}");
    let (code, words) = judging.stop();
    assert_eq!(code, Some(0), "{words}");
    assert!(words.contains("oclaw judge\nturns 6\njudged 6"), "{words}");
    assert!(words.ends_with("shards 3"), "{words}");
    assert_eq!(run.names("judged"), run.names("turns"));
    assert_eq!(run.scores("a.parquet").len(), 3);

    // Nothing is done twice.
    let again = run.judging().arg("--rules").assert().success();
    assert!(talk(again.get_output()).ends_with("shards 0"), "{}", talk(again.get_output()));
}

#[test]
fn a_shard_that_fails_is_listed_and_the_next_goes_on() {
    let run = Run::new();
    let whole = run.shard("a.parquet", 100, 2);
    run.shard("b.parquet", 200, 1);
    let bytes = std::fs::read(&whole).unwrap();
    std::fs::write(&whole, &bytes[..bytes.len() - 9]).unwrap();
    let judge = |code: i32| {
        let mut command = run.judging();
        let ran = command.args(["--rules", "--shard-tries", "2"]).assert().code(code);
        talk(ran.get_output())
    };
    let words = judge(3);
    assert!(words.contains("b.parquet: 1 rows, 1 noted"), "{words}");
    assert_eq!(words.matches("is cut short").count(), 2, "{words}");
    assert!(words.contains("listed as failed after 2 tries"), "{words}");
    assert!(words.ends_with("shards 1 listed as failed 1"), "{words}");
    let listed = run.listed("judged");
    assert_eq!((&listed[0]["shard"], &listed[0]["tries"]), (&"a.parquet".into(), &2.into()));
    assert!(listed[0]["error"].as_str().unwrap().contains("is cut short"));
    assert!(listed[0]["at"].as_str().unwrap().ends_with('Z'));
    // A new start tries it again.
    let words = judge(3);
    assert!(words.ends_with("shards 0 listed as failed 1"), "{words}");
    assert_eq!(run.listed("judged").len(), 2);
    std::fs::write(&whole, &bytes).unwrap();
    assert!(judge(0).contains("a.parquet: 2 rows, 2 noted"));
    assert_eq!(run.listed("judged").len(), 2);
    assert_eq!(run.names("judged"), ["a.parquet", "b.parquet", "failed.jsonl"]);
}

#[test]
fn a_shard_that_is_replaced_is_tried_again_at_once() {
    let run = Run::new();
    let path = run.shard("a.parquet", 100, 2);
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, "PAR1").unwrap();
    let mut judging = run.start("judge", ("turns", "judged"), &["--rules", "--shard-tries", "1"]);
    judging.hears("a.parquet: `");
    std::fs::write(&path, bytes).unwrap();
    judging.hears("a.parquet: 2 rows");
    assert_eq!(judging.stop().0, Some(0));
}

#[test]
fn a_stage_that_has_not_run_fails_the_shard() {
    let run = Run::new();
    run.shard("a.parquet", 100, 1);
    let mut command = run.command("advantage", ("turns", "ready"));
    let ran = command.args(["--once", "--shard-tries", "1"]).assert().code(3);
    let words = talk(ran.get_output());
    assert!(words.contains("a.parquet: there is no column `hints`"), "{words}");
    assert_eq!(run.listed("ready").len(), 1);
}

#[test]
fn what_advantage_warns_of_is_said_here_too() {
    let run = Run::new();
    let writers = [Writer::Serve, Writer::Judge, Writer::Hint, Writer::TeacherLp];
    write(&run.at("turns/a.parquet"), Format::Parquet, &writers, &turns_of("a", 100, 2));
    let ran = run.command("advantage", ("turns", "ready")).arg("--once").assert().success();
    let words = talk(ran.get_output());
    assert!(words.contains("warning: no row carries a signal"), "{words}");
}

#[test]
fn killed_and_started_again() {
    let (run, fake) = (Run::new(), judge());
    run.shard("a.parquet", 100, 2);
    run.shard("b.parquet", 200, 3);
    fake.hold_after(CHAT, 4);
    let url = fake.url();
    let flags = ["--engine", &url, "--votes", "1", "--at-once", "1"];
    let judging = run.start("judge", ("turns", "judged"), &flags);
    fake.arrived(CHAT, 5);
    judging.kill();
    fake.release();
    let there = all_names(&run.at("judged"));
    assert_eq!((there.len(), &*there[2]), (3, "a.parquet"), "{there:?}");
    assert!(there[1].starts_with(".tmp-shard-"), "{there:?}");

    let ran = run.judging().args(flags).assert().success();
    let words = talk(ran.get_output());
    assert!(words.contains("calls 1 cache hits 2"), "{words}");
    assert_eq!(all_names(&run.at("judged")), [".lock", "a.parquet", "b.parquet"]);
    assert_eq!(calls(&fake), 5 + 1);
    assert_eq!(run.scores("b.parquet"), [Some(1.0); 3]);
}

#[test]
fn a_signal_drops_the_shard_at_hand() {
    for name in ["TERM", "INT"] {
        let (run, fake) = (Run::new(), judge());
        run.shard("a.parquet", 100, 2);
        fake.hold_after(CHAT, 1);
        let url = fake.url();
        let flags = ["--engine", &url, "--votes", "1", "--at-once", "1"];
        let judging = run.start("judge", ("turns", "judged"), &flags);
        fake.arrived(CHAT, 2);
        judging.signal(name);
        let (code, words) = judging.end();
        fake.release();
        assert_eq!(code, Some(0), "{words}");
        assert_eq!(all_names(&run.at("judged")), [".lock"], "{words}");
        assert!(words.contains("turns 0\njudged 0"), "{words}");
    }
}

#[test]
fn a_spent_budget_ends_the_run_after_the_shard() {
    let (run, fake) = (Run::new(), judge());
    run.shard("a.parquet", 100, 3);
    run.shard("b.parquet", 200, 1);
    let url = fake.url();
    let flags = ["--engine", &url, "--votes", "1", "--at-once", "1", "--max-requests"];
    let mut command = run.command("judge", ("turns", "judged"));
    let ran = command.args(flags).arg("2").assert().code(3);
    let words = talk(ran.get_output());
    assert!(words.contains("a.parquet: 3 rows, 2 noted, 1 failed"), "{words}");
    assert_eq!(run.names("judged"), ["a.parquet"]);
    // What it came to stands in each shard, for itself.
    std::fs::remove_file(run.at("judged/a.parquet")).unwrap();
    run.judging().args(flags).arg("9").assert().success();
    let used = |name: &str| {
        let source = oclaw::table::Source::open(&[run.at("judged").join(name)]).unwrap();
        let usage = source.provenance().lines.last().unwrap().usage.clone().unwrap();
        (usage.calls, usage.cache_hits)
    };
    assert_eq!((used("a.parquet"), used("b.parquet")), ((1, 2), (1, 0)));
}

#[test]
fn usage() {
    let run = Run::new();
    let shard = run.shard("a.parquet", 100, 1);
    let shard = shard.to_str().unwrap();
    let (turns, out) = (run.at("turns"), run.at("judged"));
    let (turns, out) = (turns.to_str().unwrap(), out.to_str().unwrap());
    let judge = |flags: &[&str]| {
        let ran = oclaw().args(["judge", "--rules"]).args(flags).assert().code(2);
        talk(ran.get_output())
    };
    for (flags, words) in [
        (&["--follow", turns][..], "not to standard output"),
        (&["--follow", turns, "-o", "-"], "not to standard output"),
        (&["--follow", turns, "-o", out, shard], "reads one folder and nothing beside it"),
        (&["--follow", turns, "-o", out, "-"], "reads one folder and nothing beside it"),
        (&["--follow", turns, "-o", out, "--replace"], "nothing to `--replace`"),
        (&["--follow", turns, "-o", out, "--format", "ipc"], "writes Parquet only"),
        (&["--follow", turns, "-o", turns], "cannot be followed into itself"),
        (&["--follow", turns, "-o", shard], "is no folder"),
        (&["--follow", turns, "-o", out, "--dry-run"], "follows no folder"),
        (&["--follow", "nowhere", "-o", out], "there is no folder `nowhere` to follow"),
        (&["--follow", "-", "-o", out], "there is no folder `-` to follow"),
        (&["--follow", turns, "-o", out, "--poll", "0"], "wanted a time above 0"),
        (&["--once", shard], "--follow"),
        (&["--poll", "1s", shard], "--follow"),
        (&["--shard-tries", "2", shard], "--follow"),
    ] {
        let said = judge(flags);
        assert!(said.contains(words), "{flags:?}: {said}");
    }
    assert!(!Path::new(out).exists());
}

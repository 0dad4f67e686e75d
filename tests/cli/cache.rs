//! What makes a stage safe to make again: kept answers, and `oclaw cache` itself.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use oclaw::table::{Source, Usage};
use oclaw::trajectory::Turn;
use serde_json::json;

use super::judge::{read, says, table};
use crate::harness::fake_engine::{FakeEngine, Reply};
use crate::harness::oclaw_keeping;

pub(super) const CHAT: &str = "/v1/chat/completions";

/// A judge that likes everything: 10 prompt tokens and 5 of its own a call.
pub(super) fn judge() -> FakeEngine {
    let fake = FakeEngine::start();
    fake.on("/v1/models", [Reply::json(200, json!({"data": [{"id": "scripted"}]}))]);
    let answer = "[HINT_START]Answer in one sentence.[HINT_END] \\boxed{1}";
    fake.on(CHAT, [Reply::json(200, says(answer, "stop").1)]);
    fake
}

pub(super) fn calls(fake: &FakeEngine) -> usize {
    fake.paths().iter().filter(|path| *path == CHAT).count()
}

/// A test's folder: three turns to judge among five, and where answers go.
pub(super) struct Bench {
    folder: tempfile::TempDir,
    input: PathBuf,
}

/// What a run left behind.
pub(super) struct Ran {
    pub(super) talk: String,
    pub(super) data: String,
    pub(super) turns: Vec<Turn>,
    pub(super) usage: Option<Usage>,
}

impl Bench {
    pub(super) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let input = table(folder.path());
        Self { folder, input }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(super) fn answers(&self) -> PathBuf {
        self.path("oclaw/answers.sqlite")
    }

    pub(super) fn run(&self, stage: &str, fake: &FakeEngine, flags: &[&str], code: i32) -> Ran {
        self.run_on(&self.input, (stage, fake), flags, code)
    }

    pub(super) fn run_on(
        &self,
        input: &Path,
        (stage, fake): (&str, &FakeEngine),
        flags: &[&str],
        code: i32,
    ) -> Ran {
        let output = self.path("out.parquet");
        let run = oclaw_keeping(self.folder.path())
            .args([stage, "--engine", &fake.url(), "--retries", "0", "-o"])
            .args([&output, input])
            .args(flags)
            .assert()
            .code(code);
        let words = |bytes: &[u8]| {
            let text = String::from_utf8_lossy(bytes).into_owned();
            text.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        let there = output.exists();
        let usage = there
            .then(|| Source::open(std::slice::from_ref(&output)).unwrap())
            .and_then(|source| source.provenance().lines.last()?.usage.clone());
        let turns = if there { read(&output) } else { Vec::new() };
        let ran = run.get_output();
        Ran { talk: words(&ran.stderr), data: words(&ran.stdout), turns, usage }
    }
}

pub(super) fn errors(ran: &Ran) -> Vec<Option<&str>> {
    ran.turns.iter().map(|turn| turn.judge_error.as_deref()).collect()
}

#[test]
fn a_rerun_makes_no_call() {
    let (bench, fake) = (Bench::new(), judge());
    for stage in ["judge", "hint"] {
        let before = calls(&fake);
        let first = bench.run(stage, &fake, &[], 0);
        let paid = calls(&fake) - before;
        assert_eq!(first.usage.as_ref().unwrap().calls, paid as u64);
        assert!(first.talk.contains("cache hits 0"), "{}", first.talk);

        // Another port, the same model: the same answers.
        let other = judge();
        let again = bench.run(stage, &other, &[], 0);
        assert_eq!(calls(&other), 0);
        let row = format!("calls 0 cache hits {paid} prompt tokens 0 answer tokens 0");
        assert!(again.talk.contains(&row), "{}", again.talk);
        assert_eq!(again.turns, first.turns);
        let usage = again.usage.unwrap();
        assert_eq!((usage.calls, usage.cache_hits), (0, paid as u64));
    }
    let paid = calls(&fake);
    assert_eq!(paid, 9 + 12);
    // More votes: the first three are there. Another temperature or seed: none is.
    for (flags, more) in [
        (&["--votes", "4"][..], 3),
        (&["--votes", "1", "--temperature", "0.7"], 3),
        (&["--votes", "1", "--seed", "1"], 3),
        (&["--votes", "1", "--no-cache"], 3),
    ] {
        let before = calls(&fake);
        bench.run("judge", &fake, flags, 0);
        assert_eq!(calls(&fake) - before, more, "{flags:?}");
    }
    let usage = bench.run("judge", &fake, &["--votes", "1", "--no-provenance"], 0).usage;
    assert_eq!(usage, None);
}

#[test]
fn failures_are_asked_again() {
    let (bench, fake) = (Bench::new(), FakeEngine::start());
    fake.on("/v1/models", [Reply::json(200, json!({"data": [{"id": "scripted"}]}))]);
    let good = || Reply::json(200, says("\\boxed{1}", "stop").1);
    let replies = [
        Reply::json(500, json!({})),
        Reply::json(200, says("", "stop").1),
        Reply::json(200, says("\\boxed{1", "length").1),
        good(),
    ];
    fake.on(CHAT, replies);
    let flags = ["--votes", "1", "--at-once", "1"];
    let ran = bench.run("judge", &fake, &flags, 3);
    let expected = [Some("status 500"), Some("unreadable"), None, None, Some("truncated")];
    assert_eq!(errors(&ran), expected);
    // The answer that was cut at our own limit is an answer, and paid for.
    let ran = bench.run("judge", &fake, &flags, 3);
    assert_eq!(errors(&ran), [None, None, None, None, Some("truncated")]);
    assert_eq!(calls(&fake), 5);
}

/// A model in this process is known by its files, not by the port it got.
#[cfg(feature = "torch")]
#[test]
fn an_embedded_engine_keeps_its_answers() {
    let bench = Bench::new();
    let run = |name: &str| {
        let output = bench.path(name);
        let run = oclaw_keeping(bench.folder.path())
            .args(["judge", "--votes", "1", "--max-tokens", "4", "--model"])
            .arg(crate::harness::fixture_models().join("tiny-qwen3"))
            .arg("-o")
            .args([&output, &bench.input])
            .assert()
            .code(3);
        let talk = String::from_utf8_lossy(&run.get_output().stderr).into_owned();
        (talk.split_whitespace().collect::<Vec<_>>().join(" "), read(&output))
    };
    let (first, second) = (run("a.parquet"), run("b.parquet"));
    assert!(first.0.contains("calls 3 cache hits 0"), "{}", first.0);
    assert!(second.0.contains("calls 0 cache hits 3"), "{}", second.0);
    assert_eq!(first.1, second.1);
}

fn spawned(bench: &Bench, (stage, fake): (&str, &FakeEngine), output: &Path) -> Child {
    Command::new(env!("CARGO_BIN_EXE_oclaw"))
        .args([stage, "--at-once", "1", "--engine", &fake.url(), "-o"])
        .args([output, &bench.input])
        .env("XDG_CACHE_HOME", bench.folder.path())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
fn killed_and_made_again() {
    for (stage, all) in [("judge", 9), ("hint", 12)] {
        let (bench, fake) = (Bench::new(), judge());
        let output = bench.path("out.parquet");
        fake.hold_after(CHAT, 4);
        let mut child = spawned(&bench, (stage, &fake), &output);
        fake.arrived(CHAT, 5);
        child.kill().unwrap();
        child.wait().unwrap();
        fake.release();
        assert!(!output.exists());
        let unfinished = || {
            let entries = std::fs::read_dir(bench.folder.path()).unwrap();
            let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
            names.filter(|name| name.starts_with(".tmp-")).collect::<Vec<_>>()
        };
        assert_eq!(unfinished().len(), 1);

        let ran = bench.run(stage, &fake, &["--at-once", "1"], 0);
        assert!(ran.talk.contains(&format!("calls {} cache hits 4", all - 4)), "{}", ran.talk);
        assert_eq!(calls(&fake), 5 + all - 4);
        assert_eq!(unfinished(), [""; 0]);
        assert_eq!(errors(&ran), [None; 5]);
        match stage {
            "judge" => assert_eq!(ran.turns[0].score, Some(1.0)),
            _ => assert_eq!(ran.turns[0].hints.as_ref().unwrap().len(), 1),
        }
    }
}

#[test]
fn two_processes_on_one_file() {
    let (bench, fake) = (Bench::new(), judge());
    let outputs = [bench.path("a.parquet"), bench.path("b.parquet")];
    // Both are under way before either has its first answer.
    fake.hold(CHAT);
    let children = outputs.each_ref().map(|output| spawned(&bench, ("judge", &fake), output));
    fake.arrived(CHAT, 2);
    fake.release();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    assert_eq!(read(&outputs[0]), read(&outputs[1]));
    let before = calls(&fake);
    bench.run("judge", &fake, &[], 0);
    assert_eq!(calls(&fake), before);
}

#[test]
fn a_damaged_file_is_no_reason_to_stop() {
    let (bench, fake) = (Bench::new(), judge());
    bench.run("judge", &fake, &[], 0);
    for ending in ["-wal", "-shm"] {
        let _ = std::fs::remove_file(bench.path(&format!("oclaw/answers.sqlite{ending}")));
    }
    std::fs::write(bench.answers(), "garbage ".repeat(1000)).unwrap();
    fake.forget();
    oclaw_keeping(bench.folder.path()).arg("cache").assert().code(1);
    let ran = bench.run("judge", &fake, &[], 0);
    assert!(ran.talk.contains("set the answers aside and started anew"), "{}", ran.talk);
    assert_eq!(calls(&fake), 9);
    bench.run("judge", &fake, &[], 0);
    assert_eq!(calls(&fake), 9);
    let folder = bench.answers().parent().unwrap().to_owned();
    let aside = std::fs::read_dir(folder).unwrap().filter(|entry| {
        entry.as_ref().unwrap().file_name().to_string_lossy().contains(".damaged-")
    });
    assert_eq!(aside.count(), 1);

    let folder = bench.folder.path().to_str().unwrap();
    let ran = bench.run("judge", &fake, &["--cache", folder], 0);
    assert!(ran.talk.contains("going on without kept answers"), "{}", ran.talk);
    assert_eq!(calls(&fake), 18);
}

#[test]
fn a_file_named_by_mistake_is_left_alone() {
    let (bench, fake) = (Bench::new(), judge());
    let notes = bench.path("notes.txt");
    std::fs::write(&notes, "precious notes").unwrap();
    let before = std::fs::read(&bench.input).unwrap();
    for file in [&notes, &bench.input] {
        let flags = ["--cache", file.to_str().unwrap()];
        for stage in ["judge", "hint"] {
            let ran = bench.run(stage, &fake, &flags, 2);
            let wanted = format!("`{}` is no database, not a file of answers", file.display());
            assert!(ran.talk.contains(&wanted), "{}", ran.talk);
            assert!(ran.talk.contains("hint: name another file by `--cache`"), "{}", ran.talk);
        }
        bench.run("judge", &fake, &["--dry-run", flags[0], flags[1]], 2);
        oclaw_keeping(bench.folder.path()).arg("cache").args(flags).assert().code(2);
    }
    assert_eq!(fake.paths(), Vec::<String>::new());
    assert_eq!(std::fs::read_to_string(&notes).unwrap(), "precious notes");
    assert_eq!(std::fs::read(&bench.input).unwrap(), before);
    let names: Vec<_> = std::fs::read_dir(bench.folder.path()).unwrap().flatten().collect();
    assert_eq!(names.len(), 2, "{names:?}");
}

#[test]
fn a_run_that_reaches_nobody_makes_no_file() {
    let bench = Bench::new();
    for stage in [&["judge"][..], &["hint"]] {
        oclaw_keeping(bench.folder.path())
            .args(stage)
            .args(["--engine", "http://127.0.0.1:1", "--retries", "0", "-o"])
            .args([&bench.path("out.parquet"), &bench.input])
            .assert()
            .code(4);
        assert!(!bench.answers().exists());
    }
}

#[test]
fn answers_are_shown_and_removed() {
    let (bench, fake) = (Bench::new(), judge());
    let cache = |flags: &[&str]| {
        let run = oclaw_keeping(bench.folder.path()).arg("cache").args(flags).assert().code(0);
        let text = String::from_utf8_lossy(&run.get_output().stdout).into_owned();
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert!(cache(&[]).ends_with("answers.sqlite entries 0"));
    bench.run("judge", &fake, &[], 0);
    let shown = cache(&["--prune-older-than", "1d"]);
    assert!(shown.contains("entries 10 bytes of answers "), "{shown}");
    assert!(shown.contains("judge, under a day 9 entries"), "{shown}");
    assert!(shown.contains("engine, under a day 1 entries"), "{shown}");
    assert!(cache(&["--clear"]).contains("entries 0 bytes of answers 0"));
    bench.run("judge", &fake, &[], 0);
    assert_eq!(calls(&fake), 18);
    assert!(cache(&["--prune-older-than", "0s"]).contains("entries 0 "));
    for wrong in ["5", "d", "-1d", "5y", "é"] {
        let run = oclaw_keeping(bench.folder.path())
            .args(["cache", "--prune-older-than", wrong])
            .assert()
            .code(2);
        let talk = String::from_utf8_lossy(&run.get_output().stderr).into_owned();
        assert!(talk.contains("invalid value") || talk.contains("unexpected"), "{talk}");
    }
}

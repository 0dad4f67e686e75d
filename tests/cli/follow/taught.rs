//! All three stages that ask, following one another, and a teacher that changes
//! meanwhile.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use oclaw::table::{Format, Provenance, Source, StageLine, read_turns, write_shard};
use oclaw::trajectory::{Turn, Writer};
use serde_json::json;

use super::{CHAT, Run, turns_of};
use crate::cli::judge::says;
use crate::forge::write;
use crate::harness::fake_engine::{FakeEngine, Reply};
use crate::harness::{fixture_models as models, oclaw};

const HINTED: &[Writer] = &[Writer::Serve, Writer::Judge, Writer::Hint];

/// A shard goes from folder to folder under its name, and what each stage asked
/// stands in its own line.
#[test]
fn the_stages_follow_one_another() {
    let run = Run::new();
    let fake = FakeEngine::start();
    fake.on("/v1/models", [Reply::json(200, json!({"data": [{"id": "scripted"}]}))]);
    let answer = "[HINT_START]Answer in one sentence.[HINT_END] \\boxed{1}";
    fake.on(CHAT, [Reply::json(200, says(answer, "stop").1)]);
    let (url, model) = (fake.url(), models().join("tiny-qwen3"));
    let asking = ["--engine", &url, "--votes", "2"];
    let judging = run.start("judge", ("turns", "judged"), &asking);
    std::fs::create_dir(run.at("judged")).ok();
    let hinting = run.start("hint", ("judged", "hinted"), &asking);
    std::fs::create_dir(run.at("hinted")).ok();
    let local = ["--model", model.to_str().unwrap(), "--topk", "0"];
    let mut teaching = run.start("teacher-lp", ("hinted", "taught"), &local);
    for (name, second) in [("a.parquet", 100), ("b.parquet", 200)] {
        run.shard(name, second, 2);
        teaching.hears("2 rows, 2 noted, 0 failed");
    }
    for stage in [judging, hinting, teaching] {
        let (code, words) = stage.stop();
        assert_eq!(code, Some(0), "{words}");
    }
    assert_eq!(run.names("taught"), ["a.parquet", "b.parquet"]);
    for name in ["a.parquet", "b.parquet"] {
        let source = Source::open(&[run.at("taught").join(name)]).unwrap();
        let lines = &source.provenance().lines;
        // The turns have the same ids, so the second one's score is there already.
        let used = |line: &StageLine| {
            let usage = line.usage.clone().unwrap();
            usage.calls + usage.cache_hits
        };
        let told: Vec<_> = lines.iter().map(|line| (&*line.command, used(line))).collect();
        assert_eq!(told, [("judge", 4), ("hint", 4), ("teacher-lp", 2)]);
        for turn in read_turns(&[run.at("taught").join(name)]).unwrap() {
            assert_eq!(turn.score, Some(1.0));
            assert_eq!(turn.hints, Some(vec!["Answer in one sentence.".to_owned()]));
            assert_eq!(turn.teacher_error, Some(vec![None]));
            assert_eq!(turn.teacher.as_deref(), Some("tiny-qwen3"));
        }
    }
}

fn hinted(second: i64) -> Vec<Turn> {
    let mut turns = turns_of("s", second, 2);
    turns.iter_mut().for_each(|turn| turn.hints = Some(vec!["Say four.".to_owned()]));
    turns
}

fn copy(from: &str, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(models().join(from)).unwrap() {
        let entry = entry.unwrap();
        let whole = to.join(".tmp");
        std::fs::copy(entry.path(), &whole).unwrap();
        std::fs::rename(whole, to.join(entry.file_name())).unwrap();
    }
}

fn lead(link: &Path, to: &str) {
    let other = link.with_file_name(".link");
    symlink(to, &other).unwrap();
    std::fs::rename(other, link).unwrap();
}

/// Returns what a model says of a shard's first turn when it is asked for it alone.
fn by_itself(run: &Run, model: &str, second: i64) -> Option<Vec<Option<Vec<f32>>>> {
    let (input, output) = (run.at("alone.in"), run.at("alone.out"));
    write(&input, Format::Parquet, HINTED, &hinted(second));
    let mut command = oclaw();
    command.args(["teacher-lp", "--no-cache", "-q", "--topk", "0", "--model"]);
    command.arg(models().join(model)).arg("--tokenizer").arg(models().join("tiny-qwen3"));
    command.arg("-o").args([&output, &input]).assert().code(0);
    read_turns(&[output]).unwrap().remove(0).teacher_log_probs
}

/// The folder of a moving average: its name leads to another one, its files are
/// written anew, it is gone for a while. Each shard is scored by what is there when it
/// comes, and says so.
#[test]
fn a_teacher_that_changes_is_read_again() {
    let run = Run::new();
    let shards = run.at("hinted");
    std::fs::create_dir(&shards).unwrap();
    copy("tiny-qwen3", &run.at("ema/one"));
    copy("tiny-llama", &run.at("ema/two"));
    let link = run.at("ema/latest");
    lead(&link, "one");
    let tokenizer = models().join("tiny-qwen3");
    let flags = ["--model", link.to_str().unwrap(), "--tokenizer", tokenizer.to_str().unwrap()];
    let flags = [&flags[..], &["--topk", "0"]].concat();
    let mut teaching = run.start("teacher-lp", ("hinted", "taught"), &flags);
    let shard = |second| {
        write_shard(&shards, HINTED, &hinted(second), &Provenance::default()).unwrap();
    };
    let mut done = Vec::new();
    let mut newest = |model: &str, second: i64| -> (String, PathBuf) {
        let names = run.names("taught");
        let name = names.iter().find(|name| !done.contains(*name)).unwrap().clone();
        done.push(name.clone());
        let path = run.at("taught").join(name);
        let turns = read_turns(std::slice::from_ref(&path)).unwrap();
        assert_eq!(turns[0].teacher_log_probs, by_itself(&run, model, second), "{model}");
        (turns[0].teacher.clone().unwrap(), path)
    };
    shard(100);
    teaching.hears("2 rows, 2 noted, 0 failed");
    assert_eq!(newest("tiny-qwen3", 100).0, "one");

    lead(&link, "two");
    shard(200);
    teaching.hears("2 rows, 2 noted, 0 failed");
    let (name, path) = newest("tiny-llama", 200);
    assert_eq!(name, "two");
    let told = |path: PathBuf| {
        let lines = Source::open(&[path]).unwrap().provenance().lines.clone();
        lines.last().unwrap().inputs.last().unwrap().clone()
    };
    let before = told(path);
    let real = std::fs::canonicalize(run.at("ema/two")).unwrap();
    assert!(before.starts_with(&format!("{} ", real.display())), "{before}");

    copy("tiny-qwen2", &run.at("ema/two"));
    shard(300);
    teaching.hears("2 rows, 2 noted, 0 failed");
    let (name, path) = newest("tiny-qwen2", 300);
    assert_eq!(name, "two");
    assert_ne!(told(path), before);

    lead(&link, "nowhere");
    shard(400);
    teaching.hears("waiting for it");
    lead(&link, "one");
    teaching.hears("2 rows, 2 noted, 0 failed");
    assert_eq!(newest("tiny-qwen3", 400).0, "one");
    let (code, words) = teaching.stop();
    assert_eq!(code, Some(0), "{words}");
}

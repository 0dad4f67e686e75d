//! Several servers behind one stage.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use super::judge::{read, says, table};
use crate::harness::fake_engine::{FakeEngine, Reply};
use crate::harness::oclaw_keeping;

const CHAT: &str = "/v1/chat/completions";

fn serving(model: &str) -> FakeEngine {
    let fake = FakeEngine::start();
    fake.on("/v1/models", [Reply::json(200, json!({"data": [{"id": model}]}))]);
    let answer = "[HINT_START]Answer in one sentence.[HINT_END] \\boxed{1}";
    fake.on(CHAT, [Reply::json(200, says(answer, "stop").1)]);
    fake
}

fn calls(fake: &FakeEngine) -> usize {
    fake.paths().iter().filter(|path| *path == CHAT).count()
}

struct Bench {
    folder: tempfile::TempDir,
    input: PathBuf,
    output: PathBuf,
}

impl Bench {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (input, output) = (table(folder.path()), folder.path().join("out.parquet"));
        Self { folder, input, output }
    }

    fn run(&self, stage: &str, flags: &[&str], code: i32) -> String {
        let run = oclaw_keeping(self.folder.path())
            .args([stage, "-o"])
            .args([&self.output, &self.input])
            .args(flags)
            .assert()
            .code(code);
        words(&run.get_output().stderr)
    }
}

fn words(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes).into_owned();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn the_calls_are_spread() {
    for stage in ["judge", "hint"] {
        let (bench, fakes) = (Bench::new(), [serving("m"), serving("m")]);
        let urls = fakes.each_ref().map(FakeEngine::url);
        let shares = if stage == "judge" { [5, 4] } else { [6, 6] };
        // Nobody answers until all have their share.
        for fake in &fakes {
            fake.hold(CHAT);
        }
        let talk = std::thread::scope(|scope| {
            let flags = ["--engine", &urls[0], "--engine", &urls[1]];
            let bench = &bench;
            let run = scope.spawn(move || bench.run(stage, &flags, 0));
            fakes.iter().zip(shares).for_each(|(fake, share)| fake.arrived(CHAT, share));
            fakes.iter().for_each(FakeEngine::release);
            run.join().unwrap()
        });
        let counts = fakes.each_ref().map(calls);
        let all = counts[0] + counts[1];
        assert_eq!(counts, shares);
        for (url, count) in urls.iter().zip(counts) {
            assert!(talk.contains(&format!("calls of {url} {count}, 0 of them failed")), "{talk}");
        }
        // The same model at fewer or other servers: nothing is asked again.
        let config = bench.folder.path().join("oclaw.toml");
        let third = serving("m");
        let text = format!("[{stage}]\nengine = [\"{}\", \"{}\"]\n", third.url(), urls[1]);
        std::fs::write(&config, text).unwrap();
        let talk = bench.run(stage, &["--config", config.to_str().unwrap()], 0);
        assert!(talk.contains(&format!("calls 0 cache hits {all}")), "{talk}");
        assert!(talk.contains(&format!("calls of {} 0", third.url())), "{talk}");
        let both = format!("{},{}", urls[0], urls[1]);
        bench.run(stage, &["--engine", &both, "--votes", "4"], 0);
        let asked: usize = fakes.iter().map(calls).sum::<usize>();
        assert_eq!(asked, all + all / 3);
    }
}

#[test]
fn a_dead_server_is_skipped() {
    let (bench, fake) = (Bench::new(), serving("m"));
    let dead = "http://127.0.0.1:1";
    let url = fake.url();
    let flags = ["--engine", dead, "--engine", &url, "--retries", "0"];
    let talk = bench.run("judge", &flags, 0);
    assert_eq!(calls(&fake), 9);
    assert_eq!(talk.matches("left out until it is there again").count(), 1, "{talk}");
    let row = talk.split("calls of http://127.0.0.1:1 ").nth(1).unwrap();
    assert!(row.contains("gone at the end"), "{talk}");
    assert!(read(&bench.output).iter().all(|turn| turn.judge_error.is_none()));
}

#[test]
fn different_models_are_refused() {
    let (bench, fakes) = (Bench::new(), [serving("a"), serving("b")]);
    let urls = fakes.each_ref().map(FakeEngine::url);
    let flags = ["--engine", &urls[0], "--engine", &urls[1]];
    let talk = bench.run("judge", &flags, 2);
    assert!(talk.contains("serves `b`, but"), "{talk}");
    assert!(talk.contains("hint: servers that share the calls must serve one model"), "{talk}");
    let named = [&flags[..], &["--engine-model", "c"]].concat();
    bench.run("judge", &named, 0);
    let asked: Vec<Value> = fakes.iter().flat_map(FakeEngine::seen).map(|seen| seen.body).collect();
    assert!(asked.iter().filter(|body| !body.is_null()).all(|body| body["model"] == "c"));
}

fn spawned(bench: &Bench, urls: &[String], output: &Path) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oclaw"));
    command.args(["judge", "--at-once", "1", "--retries", "0", "-o"]).args([output, &bench.input]);
    for url in urls {
        command.args(["--engine", url]);
    }
    command.env("XDG_CACHE_HOME", bench.folder.path());
    command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap()
}

/// One server or two: when the last one goes, the stage ends, no row is blamed,
/// and what was paid for is kept.
#[test]
fn when_all_are_gone_the_stage_ends() {
    for count in [1, 2] {
        let bench = Bench::new();
        let mut fakes: Vec<_> = (0..count).map(|_| serving("m")).collect();
        let urls: Vec<_> = fakes.iter().map(FakeEngine::url).collect();
        let last = fakes.len() - 1;
        fakes[last].hold_after(CHAT, 2);
        let child = spawned(&bench, &urls, &bench.output);
        fakes[last].arrived(CHAT, 3);
        let paid: usize = fakes.iter().map(calls).sum::<usize>() - 1;
        fakes.clear();
        let ended = child.wait_with_output().unwrap();
        let talk = words(&ended.stderr);
        assert_eq!(ended.status.code(), Some(4), "{talk}");
        assert!(talk.contains("cannot reach"), "{talk}");
        assert!(!bench.output.exists());
        let fresh = serving("m");
        let talk = bench.run("judge", &["--engine", &fresh.url()], 0);
        assert!(talk.contains(&format!("calls {} cache hits {paid}", 9 - paid)), "{talk}");
    }
}

/// A server that only was too busy to tell the version of its weights is not taken
/// for one that has none, under which no answer is kept.
#[test]
fn a_version_that_is_not_told_at_once_is_asked_for_again() {
    let (bench, fake) = (Bench::new(), serving("m"));
    let told = || Reply::json(200, json!({"model_path": "m", "weight_version": "7"}));
    let busy = || Reply::json(503, json!({"error": "busy"})).with("retry-after", "0");
    fake.on("/model_info", [told()]);
    bench.run("judge", &["--engine", &fake.url()], 0);
    for busy_times in 1..=2 {
        let replies = std::iter::once(told()).chain((0..busy_times).map(|_| busy()));
        fake.on("/model_info", replies.chain([told()]));
        let talk = bench.run("judge", &["--engine", &fake.url()], 0);
        assert!(talk.contains("calls 0 cache hits 9"), "{talk}");
    }
    // One that never tells it is asked anew, which is said.
    fake.on("/model_info", [told(), busy()]);
    let talk = bench.run("judge", &["--engine", &fake.url()], 0);
    assert!(talk.contains("calls 9 cache hits 0"), "{talk}");
    assert!(talk.contains("kept under a version of the weights are not found"), "{talk}");
}

/// Answers are kept as the model's of those servers that were met. Another one that
/// was named but was away may serve anything.
#[test]
fn who_was_never_met_has_no_kept_answers() {
    let (bench, fake) = (Bench::new(), serving("m"));
    let (url, dead) = (fake.url(), "http://127.0.0.1:1");
    bench.run("judge", &["--engine", &url, "--engine", dead, "--retries", "0"], 0);
    drop(fake);
    std::fs::remove_file(&bench.output).unwrap();
    let talk = bench.run("judge", &["--engine", dead, "--retries", "0"], 4);
    assert!(talk.contains("cannot reach"), "{talk}");
    assert!(!bench.output.exists());
    let talk = bench.run("judge", &["--engine", dead, "--engine", &url, "--retries", "0"], 0);
    assert!(talk.contains("calls 0 cache hits 9"), "{talk}");
}

/// A dry run leaves out what the budget would.
#[test]
fn a_dry_run_counts_as_far_as_the_calls_go() {
    let (bench, fake) = (Bench::new(), serving("m"));
    let url = fake.url();
    let flags = ["--engine", &url, "--at-once", "1", "--max-requests", "4"];
    let dry = oclaw_keeping(bench.folder.path())
        .arg("judge")
        .arg(&bench.input)
        .args(flags)
        .arg("--dry-run")
        .assert()
        .code(0);
    let foretold = words(&dry.get_output().stdout);
    assert!(foretold.contains("to ask about 3 calls 3 cache hits 0"), "{foretold}");
    assert!(foretold.contains("left out: budget, at most 2"), "{foretold}");
    let talk = bench.run("judge", &flags, 3);
    assert!(talk.contains("calls 3 cache hits 0"), "{talk}");
    assert!(talk.contains("left out: budget 2"), "{talk}");
}

/// What a token budget or a price bounds, a dry run bounds as well: every answer may
/// be as long as it is allowed to be.
#[test]
fn a_dry_run_counts_as_far_as_the_money_goes() {
    let bench = Bench::new();
    let foretold = |flags: &[&str]| {
        let dry = oclaw_keeping(bench.folder.path())
            .arg("judge")
            .arg(&bench.input)
            .args(["--engine", "http://127.0.0.1:1", "--max-tokens", "100", "--dry-run"])
            .args(flags)
            .assert()
            .code(0);
        words(&dry.get_output().stdout)
    };
    // A turn is 3 calls: 300 tokens of answers, some more of prompts.
    let all = foretold(&["--max-tokens-total", "1000000"]);
    assert!(all.contains("calls 9") && !all.contains("left out"), "{all}");
    let some = foretold(&["--max-tokens-total", "300"]);
    assert!(some.contains("to ask about 3 calls 3 cache hits 0"), "{some}");
    assert!(some.contains("answer tokens, at most 300 left out: budget, at most 2"), "{some}");
    let prices = ["--price-in", "0", "--price-out", "1000000", "--max-cost"];
    let some = foretold(&[&prices[..], &["301"]].concat());
    assert!(some.contains("cost, at most 600.000000 left out: budget, at most 1"), "{some}");
}

/// One server that tells the version of its weights and one of another kind that does
/// not: whoever of them is there, what was answered before is found.
#[test]
fn who_is_there_makes_no_difference_to_what_is_kept() {
    let (sglang, vllm) = (serving("m"), serving("m"));
    let told = json!({"model_path": "m", "weight_version": "7"});
    sglang.on("/model_info", [Reply::json(200, told)]);
    vllm.on("/version", [Reply::json(200, json!({"version": "0.33.0"}))]);
    let (one, other) = (sglang.url(), vllm.url());
    let bench = Bench::new();
    let both = ["--engine", &one, "--engine", &other, "--retries", "0"];
    let talk = bench.run("judge", &both, 0);
    assert!(talk.contains("calls 9 cache hits 0"), "{talk}");
    // The SGLang server alone, the other one away, both in the other order.
    let dead = "http://127.0.0.1:1";
    for flags in [
        &["--engine", &one][..],
        &["--engine", &one, "--engine", dead, "--retries", "0"],
        &["--engine", &other, "--engine", &one],
    ] {
        let talk = bench.run("judge", flags, 0);
        assert!(talk.contains("calls 0 cache hits 9"), "{flags:?}: {talk}");
    }
    drop(sglang);
    let talk = bench.run("judge", &both, 0);
    assert!(talk.contains("calls 0 cache hits 9"), "{talk}");
    // More votes are the same model's, too.
    let talk = bench.run("judge", &[&both[..], &["--votes", "4"]].concat(), 0);
    assert!(talk.contains("calls 3 cache hits 9"), "{talk}");
}

//! Every command that calls a server says alike that there is none.

use std::path::Path;

use oclaw::table::Format;
use oclaw::trajectory::Writer;
use serde_json::json;

use crate::forge::{finished, write};
use crate::harness::fake_engine::{FakeEngine, Reply};
use crate::harness::{fixture_models as models, oclaw};

/// Runs each command against a server; returns its exit code and words.
fn every_command(folder: &Path, engine: &str) -> Vec<(&'static str, Option<i32>, String)> {
    let writers = [Writer::Serve, Writer::Judge, Writer::Hint];
    let turns = folder.join("turns.parquet");
    write(&turns, Format::Parquet, &writers[..1], &[finished("s", 1)]);
    let hinted = folder.join("hinted.parquet");
    write(&hinted, Format::Parquet, &writers, &[finished("s", 1)]);
    let policy = folder.join("step-000007");
    std::fs::create_dir_all(&policy).unwrap();
    std::fs::write(policy.join("config.json"), "{}").unwrap();
    std::fs::write(policy.join("model.safetensors"), "").unwrap();
    let path = |path: &Path| path.display().to_string();
    let (turns, hinted, policy) = (path(&turns), path(&hinted), path(&policy));
    let tokenizer = path(&models().join("tiny-qwen3"));
    let (spool, out) = (path(&folder.join("spool")), path(&folder.join("out.parquet")));
    let run = |name: &'static str, further: &[&str]| {
        let mut command = oclaw();
        command.args([name, "--engine", engine]).args(further);
        let output = command.timeout(std::time::Duration::from_secs(60)).output().unwrap();
        (name, output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    vec![
        run("serve", &["--listen", "127.0.0.1:0", "--spool", &spool]),
        run("judge", &["--retries", "0", "-o", &out, &turns]),
        run("hint", &["--retries", "0", "-o", &out, &turns]),
        run("teacher-lp", &["--retries", "0", "--tokenizer", &tokenizer, "-o", &out, &hinted]),
        run("sync-weights", &["--tries", "1", &policy]),
    ]
}

#[test]
fn a_web_page_is_no_engine_and_one_that_fails_is_away() {
    let failed = Reply::json(500, json!({"error": {"message": "on fire"}}));
    for (everywhere, code, words) in [
        (Reply::page(), 2, "is no inference server: it answers with web pages or plain text"),
        (Reply::page_with(404), 2, "is no inference server"),
        (Reply::text(200, "It works!"), 2, "is no inference server"),
        (failed, 4, "answers every question with 500: on fire"),
    ] {
        let fake = FakeEngine::start();
        fake.otherwise(everywhere);
        let folder = tempfile::tempdir().unwrap();
        for (name, found, said) in every_command(folder.path(), &fake.url()) {
            assert_eq!(found, Some(code), "{name}: {said}");
            let line = format!("oclaw {name}: `{}` {words}", fake.url());
            assert!(said.starts_with(&line), "{name}: {said}");
            let others = said.lines().skip(1).filter(|line| !line.starts_with("hint: "));
            assert_eq!(others.count(), 0, "{name}: {said}");
        }
        assert!(!folder.path().join("out.parquet").exists());
    }
}

#[test]
fn limits_that_no_clock_can_hold_are_refused_with_their_bounds() {
    for (arguments, words) in [
        (["judge", "--timeout", "1e300"], "wanted seconds above 0, up to 31536000"),
        (["hint", "--timeout", "inf"], "wanted seconds above 0, up to 31536000"),
        (["judge", "--temperature", "1e300"], "wanted a number from 0 to 1000"),
        (["teacher-lp", "--timeout", "99999999999"], "is not in 1..=31536000"),
        (["sync-weights", "--timeout", "0"], "is not in 1..=31536000"),
        (["sync-weights", "--wait", "18446744073709551615"], "is not in 0..=31536000"),
    ] {
        let output = oclaw().args(arguments).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(words) && said.contains(arguments[2]), "{said}");
    }
}

#[test]
fn a_wrong_key_is_the_users_matter() {
    let fake = FakeEngine::start();
    fake.otherwise(Reply::json(401, json!({"error": {"message": "who are you?"}})));
    let folder = tempfile::tempdir().unwrap();
    let all = every_command(folder.path(), &fake.url());
    // What stands behind `serve` is asked with the clients' own keys.
    for (name, found, said) in all.into_iter().filter(|(name, ..)| *name != "serve") {
        assert_eq!(found, Some(2), "{name}: {said}");
        let mut lines = said.lines();
        let line = lines.next().unwrap();
        assert!(line.starts_with(&format!("oclaw {name}: `{}", fake.url())), "{name}: {said}");
        assert!(line.ends_with("refused the key (401): who are you?"), "{name}: {said}");
        assert_eq!(
            lines.next(),
            Some("hint: give the key by `--engine-key-file` or the environment"),
            "{name}"
        );
        assert_eq!(lines.next(), None, "{name}");
    }
}

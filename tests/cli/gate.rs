//! `oclaw gate`: an equal policy passes, a worse one does not, and the receipt
//! opens the way to `sync-weights --require-gate`.

#[cfg(feature = "torch")]
use std::path::Path;

#[cfg(feature = "torch")]
use assert_cmd::assert::Assert;
#[cfg(feature = "torch")]
use oclaw::table::{Format, read_turns};
#[cfg(feature = "torch")]
use oclaw::trajectory::{Turn, Writer};
#[cfg(feature = "torch")]
use serde_json::Value;
use serde_json::json;

use super::judge::says;
#[cfg(feature = "torch")]
use crate::forge::write;
use crate::harness::fake_engine::{FakeEngine, Reply};
use crate::harness::fixture;
use crate::harness::oclaw;

#[cfg(feature = "torch")]
fn gate(folder: &Path, candidate: &str, arguments: &[&str]) -> Assert {
    let current = fixture("models/tiny-qwen3").display().to_string();
    let mut command = oclaw();
    command.current_dir(folder).args(["gate", "--suite", "suite.parquet"]);
    command.args(["--candidate", candidate, "--current", &current]).args(arguments).assert()
}

#[cfg(feature = "torch")]
fn receipt(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// A suite of what the tiny model said, all of it praised.
#[cfg(feature = "torch")]
fn suite(folder: &Path) {
    let turns = read_turns(&[fixture("sessions/tiny.parquet")]).unwrap();
    let praised: Vec<_> = turns.into_iter().map(|turn| Turn { score: Some(1.0), ..turn }).collect();
    let path = folder.join("suite.parquet");
    write(&path, Format::Parquet, &[Writer::Serve, Writer::Judge], &praised);
}

/// A copy of the tiny model with every weight times a number.
#[cfg(feature = "torch")]
fn policy(folder: &Path, name: &str, scale: f64) {
    let policy = folder.join(name);
    std::fs::create_dir(&policy).unwrap();
    for entry in std::fs::read_dir(fixture("models/tiny-qwen3")).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, policy.join(path.file_name().unwrap())).unwrap();
    }
    if scale != 1.0 {
        let weights = policy.join("model.safetensors");
        let tensors = tch::Tensor::read_safetensors(&weights).unwrap();
        let scaled: Vec<_> =
            tensors.iter().map(|(name, tensor)| (name.as_str(), tensor * scale)).collect();
        tch::Tensor::write_safetensors(&scaled, &weights).unwrap();
    }
}

#[cfg(feature = "torch")]
#[test]
fn an_equal_policy_passes_and_may_be_pushed() {
    let folder = tempfile::tempdir().unwrap();
    suite(folder.path());
    policy(folder.path(), "step-000001", 1.0);
    gate(folder.path(), "step-000001", &["--seed", "7"]).success().stdout("");
    let path = folder.path().join("step-000001/oclaw/gate.json");
    let found = receipt(&path);
    assert_eq!(found["verdict"], "promote");
    assert_eq!(found["by"], "log-prob");
    assert_eq!(found["rule"]["seed"], 7);
    assert_eq!(found["figures"]["items"], 21);
    assert_eq!(found["figures"]["sessions"], 6);
    assert_eq!(found["figures"]["interval"], json!([0.0, 0.0]));
    assert_eq!(found["candidate"]["weights_sha256"], found["current"]["weights_sha256"]);

    let fake = FakeEngine::sglang();
    let url = fake.url();
    let push = |arguments: &[&str]| {
        let mut command = oclaw();
        command.current_dir(folder.path()).args(["sync-weights", "step-000001", "--engine", &url]);
        command.args(["--require-gate", "--tries", "1"]).args(arguments).assert()
    };
    push(&[]).success();
    // Other weights, another verdict, no receipt: nothing is sent.
    fake.forget();
    let refused = |reason: &str| {
        let assert = push(&["--force"]).code(2);
        let text = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
        assert!(text.contains(reason) && text.contains("hint: `oclaw gate"), "{reason}: {text}");
        assert!(fake.paths().is_empty());
    };
    let config = folder.path().join("step-000001/config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, format!("{text}\n")).unwrap();
    refused("it is about other weights");
    std::fs::write(&config, text).unwrap();
    std::fs::write(&path, r#"{"verdict": "undecided"}"#).unwrap();
    refused("its verdict is `undecided`");
    std::fs::write(&path, "{}").unwrap();
    refused("it tells no verdict");
    std::fs::remove_file(&path).unwrap();
    refused("cannot read it");
}

#[cfg(feature = "torch")]
#[test]
fn a_worse_policy_is_rejected() {
    let folder = tempfile::tempdir().unwrap();
    suite(folder.path());
    policy(folder.path(), "worse", 0.8);
    gate(folder.path(), "worse", &["--receipt", "receipt.json"]).code(3);
    let found = receipt(&folder.path().join("receipt.json"));
    assert_eq!(found["verdict"], "reject");
    assert!(found["figures"]["interval"][1].as_f64().unwrap() < 0.0, "{found}");
    assert_ne!(found["candidate"]["weights_sha256"], found["current"]["weights_sha256"]);
    assert!(!folder.path().join("worse/oclaw").exists());
    // Nobody was praised: there is nothing to decide by.
    let turns = read_turns(&[fixture("sessions/tiny.parquet")]).unwrap();
    write(&folder.path().join("suite.parquet"), Format::Parquet, &[Writer::Serve], &turns);
    gate(folder.path(), "worse", &["--receipt", "receipt.json"]).code(3);
    let found = receipt(&folder.path().join("receipt.json"));
    assert_eq!((&found["verdict"], &found["figures"]), (&json!("undecided"), &Value::Null));
    assert_eq!(found["left_out"], json!({"not praised": 21}));
}

#[cfg(feature = "torch")]
#[test]
fn rules_score_what_both_policies_answer() {
    let folder = tempfile::tempdir().unwrap();
    suite(folder.path());
    std::fs::write(
        folder.path().join("rules.toml"),
        "[[rule]]\nname = \"speaks\"\nanswer = '\\w'\nscore = 1\n",
    )
    .unwrap();
    let current = fixture("models/tiny-qwen3").display().to_string();
    let arguments =
        ["--by", "rules", "--rules", "rules.toml", "--receipt", "receipt.json", "--margin", "0"];
    gate(folder.path(), &current, &arguments).success();
    let found = receipt(&folder.path().join("receipt.json"));
    assert_eq!(found["figures"]["difference"], 0.0);
    assert_eq!(found["figures"]["candidate"], 1.0);
    // A suite that is too small decides nothing.
    let arguments = [&arguments[..], &["--min-items", "22"]].concat();
    gate(folder.path(), &current, &arguments).code(3);
    assert_eq!(receipt(&folder.path().join("receipt.json"))["verdict"], "undecided");
}

#[test]
fn both_policies_get_the_same_seeds() {
    let folder = tempfile::tempdir().unwrap();
    let suite = fixture("sessions/tiny.parquet").display().to_string();
    let receipt = folder.path().join("receipt.json").display().to_string();
    let seeds = |further: &[&str]| {
        let fakes = [FakeEngine::start(), FakeEngine::start()];
        for fake in &fakes {
            fake.on("/v1/models", [Reply::json(200, json!({"data": [{"id": "scripted"}]}))]);
            fake.on("/v1/chat/completions", [Reply::json(200, says("yes", "stop").1)]);
        }
        let mut command = oclaw();
        command.args(["gate", "--suite", &suite, "--by", "rules", "--receipt", &receipt]);
        command.args(["--candidate", &fakes[0].url(), "--current", &fakes[1].url()]);
        command.args(further).assert().success();
        fakes.map(|fake| {
            let asked = fake.seen().into_iter().filter(|seen| seen.path.ends_with("completions"));
            let mut seeds: Vec<_> = asked.map(|seen| seen.body["seed"].as_i64().unwrap()).collect();
            seeds.sort_unstable();
            seeds
        })
    };
    let first = seeds(&["--temperature", "1", "--seed", "7"]);
    assert_eq!(first[0], (7..28).collect::<Vec<i64>>());
    assert_eq!(first[0], first[1]);
    let other = seeds(&["--temperature", "1", "--seed", "100"]);
    assert_eq!(other[0], (100..121).collect::<Vec<i64>>());
}

#[test]
fn usage_and_absence_have_their_exit_codes() {
    let suite = fixture("sessions/tiny.parquet").display().to_string();
    let model = fixture("models/tiny-qwen3").display().to_string();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = format!("http://{free}");
    let run = |candidate: &str, further: &[&str]| {
        let mut command = oclaw();
        command.args(["gate", "--suite", &suite, "--candidate", candidate, "--current", &model]);
        command.args(["--retries", "0"]).args(further).assert()
    };
    let fails = |candidate: &str, further: &[&str], code: i32, words: &str| {
        let failed = run(candidate, further).code(code);
        let told = String::from_utf8(failed.get_output().stderr.clone()).unwrap();
        assert!(told.contains(words), "not `{words}`: {told}");
    };
    fails(&url, &[], 2, "the candidate is a server: it has no place for the receipt");
    let folder = tempfile::tempdir().unwrap();
    let receipt = folder.path().join("receipt.json").display().to_string();
    fails(&url, &["--receipt", &receipt], 4, "the candidate: cannot reach `http://");
    fails("missing", &["--receipt", &receipt], 1, "cannot serve the policy `missing`");
    for (further, words) in [
        (["--rules", "r.toml"], "`--rules` says nothing without `--by rules`"),
        (["--judge-engine", &url], "`--judge-engine` says nothing without `--by judge`"),
        (["--temperature", "1"], "`--temperature` says nothing with `--by log-prob`"),
    ] {
        fails(&url, &[&["--receipt", &receipt][..], &further[..]].concat(), 2, words);
    }
    fails(
        &url,
        &["--receipt", &receipt, "--by", "judge"],
        2,
        "nobody to judge\nhint: give `--judge-engine URL`",
    );
    assert!(!folder.path().join("receipt.json").exists());
}

/// A server that answers every question alike.
fn says_always(text: &str) -> FakeEngine {
    let fake = FakeEngine::start();
    fake.on("/v1/models", [Reply::json(200, json!({"data": [{"id": "scripted"}]}))]);
    fake.on("/v1/chat/completions", [Reply::json(200, says(text, "stop").1)]);
    fake
}

#[test]
fn a_judge_decides_between_answers() {
    let folder = tempfile::tempdir().unwrap();
    let suite = fixture("sessions/tiny.parquet").display().to_string();
    let receipt = folder.path().join("receipt.json");
    let judge = super::judge::scripted(|body| {
        let text = body["messages"][1]["content"].as_str().unwrap();
        says(if text.contains("a bad answer") { "\\boxed{-1}" } else { "\\boxed{1}" }, "stop")
    });
    let run = |candidate: &str, current: &str, judge: &str| {
        let fakes = [says_always(candidate), says_always(current)];
        let mut command = oclaw();
        command.args(["gate", "--suite", &suite, "--by", "judge", "--judge-engine", judge]);
        command.args(["--judge-votes", "1", "--retries", "0", "--min-items", "5", "--receipt"]);
        command.arg(&receipt).args(["--candidate", &fakes[0].url(), "--current", &fakes[1].url()]);
        command.assert()
    };
    for (candidate, current, code, verdict, difference) in [
        ("a good answer", "a bad answer", 0, "promote", 2.0),
        ("a bad answer", "a good answer", 3, "reject", -2.0),
    ] {
        run(candidate, current, &judge).code(code);
        let found: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&receipt).unwrap()).unwrap();
        assert_eq!((&found["verdict"], &found["by"]), (&json!(verdict), &json!("judge")));
        assert_eq!(found["figures"]["difference"], difference);
    }
    let gone = says_always("");
    gone.on("/v1/chat/completions", [Reply::json(503, json!({"error": {"message": "busy"}}))]);
    let away = run("a good answer", "a bad answer", &gone.url()).code(4);
    let told = String::from_utf8(away.get_output().stderr.clone()).unwrap();
    assert!(told.contains("the judge: ") && told.contains("answered 503: busy"), "{told}");
}

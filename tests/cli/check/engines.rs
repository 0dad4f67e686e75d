//! Engines that somebody else runs, and keys.

use std::fs;

use serde_json::json;

use super::{Bench, free_port};
use crate::harness::fake_engine::{FakeEngine, Reply};

/// A gateway: some OpenAI-compatible server with so many models.
fn gateway(models: &[&str]) -> FakeEngine {
    let fake = FakeEngine::start();
    let models: Vec<_> = models.iter().map(|name| json!({"id": name})).collect();
    let list = json!({"object": "list", "data": models});
    fake.on("/v1/models", [Reply::json(200, list)]);
    fake
}

#[test]
fn an_engine_that_is_away_is_told_from_wrong_settings() {
    let bench = Bench::new();
    let url = format!("http://127.0.0.1:{}", free_port());
    let away = bench.check(&bench.elsewhere(&url), &[]);
    away.says(
        4,
        "engine",
        "fail",
        &[&url, "serve", "sync-weights", "is the engine running there?"],
    );
    // Not asked, it is not missed.
    let offline = bench.check(&bench.elsewhere(&url), &["--offline"]);
    assert_eq!(offline.code, 0, "{:#?}", offline.findings);
    assert!(offline.talk.contains("were not looked at"), "{}", offline.talk);
}

#[test]
fn an_engine_is_asked_for_what_it_is_wanted_for() {
    let bench = Bench::new();
    let fake = FakeEngine::sglang();
    let able = bench.check(&bench.elsewhere(&fake.url()), &[]);
    able.says(0, "engine", "ok", &["dialect `sglang`"]);
    assert!(!fake.paths().iter().any(|path| path.contains("weights")), "{:?}", fake.paths());

    let fake = gateway(&["m"]);
    let unable = bench.check(&bench.elsewhere(&fake.url()), &[]);
    unable.says(2, "engine", "fail", &["dialect `openai`", "it takes no new weights"]);
    let alone = format!("{}[loop]\nwithout = \"sync-weights\"\n", bench.elsewhere(&fake.url()));
    let warned = bench.check(&alone, &[]);
    warned.says(3, "engine", "warn", &["it tells no ids"]);

    let model = format!("{:?}", Bench::model().display().to_string());
    let teacher =
        format!("{}[teacher-lp]\nengine = \"{}\"\ntokenizer = {model}\n", bench.well(), fake.url());
    let unable = bench.check(&teacher, &[]);
    unable.says(2, "engine", "fail", &["teacher-lp", "it cannot score given ids"]);
}

#[test]
fn a_judge_must_know_its_model() {
    let bench = Bench::new();
    let fake = gateway(&["a", "b"]);
    let judge = bench.well().replace("rules = \"\"", &format!("engine = \"{}\"", fake.url()));
    bench.check(&judge, &[]).says(
        2,
        "engine",
        "fail",
        &["judge", "choose one by `--engine-model`"],
    );
    let judge = judge.replace("[hint]", "engine-model = \"b\"\n[hint]");
    bench.check(&judge, &[]).says(0, "engine", "ok", &["judge", "`b`"]);
}

#[test]
fn a_key_that_is_refused_is_a_wrong_setting() {
    let bench = Bench::new();
    let fake = FakeEngine::start();
    fake.otherwise(Reply::json(401, json!({"error": {"message": "no"}})));
    let judge = bench.well().replace("rules = \"\"", &format!("engine = \"{}\"", fake.url()));
    bench.check(&judge, &[]).says(2, "engine", "fail", &["judge", "key"]);
}

#[test]
fn keys_that_are_missing_are_missed() {
    let bench = Bench::new();
    let https = bench.well().replace("rules = \"\"", "engine = \"https://gateway.invalid/v1\"");
    let offline = ["--offline"];
    bench.check(&https, &offline).says(3, "key", "warn", &["[judge]", "OCLAW_JUDGE_KEY"]);
    let env = [("OCLAW_JUDGE_KEY", "secret")];
    let told = bench.check_with(&https, &offline, &env);
    told.says(0, "key", "ok", &["`OCLAW_JUDGE_KEY` has one"]);
    // A variable of the process alone will do as well.
    let own = https.replace("[hint]", "env = { OCLAW_JUDGE_KEY = \"secret\" }\n[hint]");
    bench.check(&own, &offline).says(0, "key", "ok", &["OCLAW_JUDGE_KEY"]);

    let file = https.replace("[hint]", "engine-key-file = \"judge.key\"\n[hint]");
    bench.check(&file, &offline).says(2, "key", "fail", &["judge.key", "No such file"]);
    fs::write(bench.path().join("judge.key"), "\n").unwrap();
    bench.check(&file, &offline).says(2, "key", "fail", &["`judge.key` is empty"]);
    fs::write(bench.path().join("judge.key"), "secret\n").unwrap();
    let told = bench.check(&file, &offline);
    told.says(0, "key", "ok", &["judge.key"]);
    let all = format!("{:?}{}", told.findings, told.talk);
    assert!(!all.contains("secret"), "{all}");
}

#[test]
fn the_network_needs_a_key() {
    let bench = Bench::new();
    let open = bench.well().replace(
        &format!("127.0.0.1:{}\"\n[judge]", bench.front),
        &format!("0.0.0.0:{}\"\n[judge]", bench.front),
    );
    bench.check(&open, &["--offline"]).says(2, "key", "fail", &["everybody on the network"]);
}

/// What vLLM tells of each position is bounded.
#[test]
fn a_teacher_tells_so_many_likeliest_tokens() {
    let bench = Bench::new();
    let fake = FakeEngine::start();
    fake.on("/version", [Reply::json(200, json!({"version": "0.33.0"}))]);
    fake.on("/health", [Reply::text(200, "")]);
    fake.on("/v1/models", [Reply::json(200, json!({"object": "list", "data": [{"id": "m"}]}))]);
    let model = format!("{:?}", Bench::model().display().to_string());
    let check = |topk: u32| {
        let text = format!(
            "{}[teacher-lp]\nengine = \"{}\"\ntokenizer = {model}\ntopk = {topk}\n",
            bench.well(),
            fake.url()
        );
        bench.check(&text, &[])
    };
    let most = oclaw::engine::VLLM_MOST_TOP as u32;
    let words = [format!("it tells the {most} likeliest only"), format!("topk = {most}` or less")];
    let words = words.each_ref().map(String::as_str);
    check(most + 1).says(2, "engine", "fail", &["teacher-lp", words[0], words[1]]);
    check(most).says(0, "engine", "ok", &["dialect `vllm`", "teacher-lp"]);
}

/// A server that names the folder of its model here is held to its tokenizer.
#[test]
fn a_server_with_another_tokenizer_is_found_out() {
    let bench = Bench::new();
    let other = bench.copy_model("other");
    let path = other.join("tokenizer.json");
    let text = fs::read_to_string(&path).unwrap();
    let fake = FakeEngine::sglang();
    let folder = other.display().to_string();
    let info = json!({"model_path": folder, "tokenizer_path": folder, "weight_version": "0"});
    fake.on("/model_info", [Reply::json(200, info)]);
    let policy = bench.elsewhere(&fake.url());
    bench.check(&policy, &[]).says(0, "tokenizer", "ok", &["the same"]);
    fs::write(&path, format!("{text} ")).unwrap();
    let words = ["the engine at", "is not that of train", "models of one family"];
    bench.check(&policy, &[]).says(2, "tokenizer", "fail", &words);
    // So is a teacher: its ids are those of the policy.
    let model = format!("{:?}", Bench::model().display().to_string());
    let teacher =
        format!("{}[teacher-lp]\nengine = \"{}\"\ntokenizer = {model}\n", bench.well(), fake.url());
    let words = ["the engine at", "is not that of the policy's engine"];
    bench.check(&teacher, &[]).says(2, "tokenizer", "fail", &words);
}

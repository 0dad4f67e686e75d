//! Ways to compare: one that compares nothing, one that nobody asked for, and
//! whoever is asked for it going away.

use super::*;
use crate::harness::fake_engine::{FakeEngine, Reply};

const CHAT: &str = "/v1/chat/completions";

fn judge(reply: Reply) -> FakeEngine {
    let fake = FakeEngine::start();
    fake.on("/v1/models", [Reply::json(200, json!({"data": [{"id": "judge"}]}))]);
    fake.on(CHAT, [reply]);
    fake
}

fn away() -> Reply {
    Reply::json(503, json!({"error": {"message": "busy"}}))
}

#[test]
fn a_way_that_compares_nothing_fails_the_replay() {
    let folder = tempfile::tempdir().unwrap();
    let last = |session: &str| Turn {
        next_state: None,
        ..turn(session, 1, &[message("user", "one")], "1")
    };
    record(folder.path(), &[last("a"), last("b")]);
    let (url, fake) = (scripted(counts), judge(away()));
    let judge = fake.url();
    let arguments = ["--engine", &url, "--by", "exact,judge", "--judge-engine", &judge];
    let done = replay(folder.path(), &arguments).code(3);
    let told = stderr(&done).split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(told.contains("same 2"), "{told}");
    assert!(told.contains("not compared by judge 2 no next state to judge by 2"), "{told}");
    assert!(told.contains("nothing was compared by judge"), "{told}");
    let done = replay(folder.path(), &[&arguments[..], &["--output-format", "json"]].concat());
    let summary = &lines(&done.code(3))[2]["summary"];
    assert_eq!((&summary["passed"], &summary["same"]), (&json!(false), &json!(2)));
    let ways = json!({
        "exact": {"compared": 2, "not_compared": {}},
        "judge": {"compared": 0, "not_compared": {"no next state to judge by": 2}},
    });
    assert_eq!(summary["ways"], ways);
    // One turn that it can judge is enough.
    record(folder.path(), &[last("a"), turn("b", 1, &[message("user", "one")], "1")]);
    replay(folder.path(), &arguments).success();
}

#[test]
fn a_judge_that_goes_away_ends_the_replay() {
    let folder = tempfile::tempdir().unwrap();
    two_sessions(folder.path());
    let (url, fake) = (scripted(miscounts), judge(away()));
    let judge = fake.url();
    let arguments = ["--engine", &url, "--by", "judge", "--judge-engine", &judge, "--retries", "0"];
    let done = replay(folder.path(), &[&arguments[..], &["--concurrency", "1"]].concat()).code(4);
    assert!(stderr(&done).contains("answered 503: busy"), "{}", stderr(&done));
    // One that refuses a question does not.
    fake.on(CHAT, [Reply::json(400, json!({"error": {"message": "too long"}}))]);
    let done = replay(folder.path(), &arguments).code(3);
    assert!(stdout(&done).contains("no verdict"), "{}", stdout(&done));
}

#[test]
fn what_would_be_ignored_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    two_sessions(folder.path());
    let url = scripted(counts);
    let engine = ["--engine", &url];
    for (further, words) in [
        (&["--rules", "r.toml"][..], "`--rules` says nothing without `--by rules`"),
        (&["--judge-engine", &url], "`--judge-engine` says nothing without `--by judge`"),
        (&["--judge-votes", "3"], "required arguments were not provided:\n  --judge-engine <URL>"),
    ] {
        let misused = replay(folder.path(), &[&engine[..], further].concat()).code(2);
        assert!(stderr(&misused).contains(words), "{further:?}: {}", stderr(&misused));
    }
    for flag in [
        "--allow=1",
        "--by=exact",
        "--rules=r.toml",
        "--history=fixed",
        "--pace=fast",
        "--speed=1",
        "--temperature=0",
        "--sampling-seed=1",
        "--max-tokens=1",
        "--judge-engine=http://x",
        "--timeout=1s",
        "--retries=1",
        "--concurrency=1",
    ] {
        let mut command = oclaw();
        let misused = command.args(["replay", "--stages", ".", flag]).assert().code(2);
        let words = "cannot be used with '--stages <RUN>'";
        let told = stderr(&misused);
        let name = flag.split('=').next().unwrap();
        assert!(told.contains(name) && told.contains("cannot be used with"), "{words}: {told}");
    }
}

#[test]
fn nobody_waits_for_an_engine_that_is_gone() {
    let folder = tempfile::tempdir().unwrap();
    let first = turn("a", 1, &[message("user", "one")], "1");
    let hour = 3_600_000_000;
    let later = |session: &str, number: u32| {
        let turn = turn(session, number, &[message("user", "one")], "1");
        Turn { created_at: Micros(turn.created_at.0 + hour), ..turn }
    };
    record(folder.path(), &[first, later("a", 2), later("b", 1)]);
    let fake = judge(away());
    let url = fake.url();
    let mut command = oclaw();
    command.current_dir(folder.path()).args(["replay", "recorded.parquet", "--engine", &url]);
    command.args(["--pace", "recorded", "--retries", "0", "--output-format", "json"]);
    let done = command.timeout(crate::harness::PATIENCE).assert().code(4);
    let summary = &lines(&done)[3]["summary"];
    assert_eq!(summary["not_compared"], json!({"the engine was away": 2}));
}

/// Two sessions that were recorded at one time are asked in their order, no turn
/// before its time.
#[test]
fn the_recorded_order_and_pauses_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let at = |session: &str, number: u32, second: i64| {
        let said = format!("{session}{number}");
        let turn = turn(session, number, &[message("user", &said)], "1");
        Turn { created_at: Micros(1_764_423_296_000_000 + second * 1_000_000), ..turn }
    };
    record(folder.path(), &[at("a", 1, 0), at("a", 2, 2), at("b", 1, 1), at("b", 2, 3)]);
    let fake = judge(Reply::json(200, says("1", "stop").1));
    let url = fake.url();
    let began = std::time::Instant::now();
    replay(folder.path(), &["--engine", &url, "--pace", "recorded", "--speed", "4"]).success();
    let asked = fake.seen().into_iter().filter(|seen| seen.path == CHAT);
    let asked: Vec<_> = asked
        .map(|seen| (seen.body["messages"][0]["content"].as_str().unwrap().to_owned(), seen.at))
        .collect();
    let order: Vec<_> = asked.iter().map(|(said, _)| said.as_str()).collect();
    assert_eq!(order, ["a1", "b1", "a2", "b2"]);
    for (number, (said, at)) in asked.iter().enumerate() {
        let due = std::time::Duration::from_millis(250 * number as u64);
        assert!(*at - began >= due, "{said} came too early");
    }
}

#[cfg(feature = "torch")]
#[test]
fn log_probs_alone_tell_a_model_that_differs() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(fixture("sessions/replay.parquet"), folder.path().join("recorded.parquet"))
        .unwrap();
    for (model, code, same) in [("tiny-qwen3", 0, 12), ("tiny-qwen2", 3, 0)] {
        let model = fixture("models").join(model).display().to_string();
        let arguments = ["--model", &model, "--by", "log-prob", "--output-format", "json"];
        let found = lines(&replay(folder.path(), &arguments).code(code));
        assert_eq!(found[12]["summary"]["same"], same, "{}", found[12]);
        // The engine was asked for no answer, only for log-probs.
        let what = |line: &Value| line["what"].as_str().unwrap().to_owned();
        assert!(same == 12 || found[..12].iter().all(|line| what(line).contains("moved by")));
    }
}

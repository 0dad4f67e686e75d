//! Whom a followed folder's stage asks, or the folder itself, is away.

use axum::http::StatusCode;
use oclaw::table::{Format, read_turns};
use oclaw::trajectory::Turn;
use serde_json::{Value, json};

use super::super::judge::{says, scripted};
use super::{CHAT, Run, SERVE, all_names, calls, judge, talk, turns_of};
use crate::forge::{captured, write};
use crate::harness::fake_engine::{FakeEngine, Reply};

#[test]
fn an_engine_that_is_away_is_nobodys_fault() {
    let (run, fake) = (Run::new(), judge());
    run.shard("a.parquet", 100, 3);
    let away = || Reply::json(503, json!({"error": {"message": "loading"}}));
    let good = || Reply::json(200, says("\\boxed{1}", "stop").1);
    fake.on(CHAT, [good(), away(), away(), away(), good()]);
    let url = fake.url();
    let flags = [
        "--engine",
        &url,
        "--votes",
        "1",
        "--at-once",
        "1",
        "--retries",
        "0",
        "--shard-tries",
        "1",
    ];
    let mut judging = run.start("judge", ("turns", "judged"), &flags);
    judging.hears("answered 503: loading: waiting for it");
    judging.hears("it is there again");
    judging.hears("a.parquet: 3 rows, 3 noted, 0 failed");
    let (code, words) = judging.stop();
    assert_eq!(code, Some(0));
    assert_eq!(words.matches("waiting for it").count(), 1, "{words}");
    assert_eq!(run.names("judged"), ["a.parquet"]);
    // One answer, three times away, one ping, the two turns that were left.
    assert_eq!(calls(&fake), 1 + 3 + 1 + 2);
}

#[test]
fn without_waiting_an_engine_that_is_away_ends_the_run() {
    let run = Run::new();
    run.shard("a.parquet", 100, 1);
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = format!("http://{free}");
    let flags = ["--engine", &url, "--retries", "0"];
    run.judging().args(flags).assert().code(4);
    // With waiting it is a signal that ends the wait.
    let mut judging = run.start("judge", ("turns", "judged"), &flags);
    judging.hears("waiting for it");
    assert_eq!(judging.stop().0, Some(0));
    let fake = judge();
    fake.on(CHAT, [Reply::json(503, json!({}))]);
    let ran = run.judging().args(["--engine", &fake.url(), "--retries", "0"]).assert().code(4);
    assert!(talk(ran.get_output()).contains("answered 503"));
    assert_eq!(all_names(&run.at("judged")), [".lock"]);
}

/// Answers are kept by the weights that gave them.
#[test]
fn weights_that_are_not_told_are_not_those_of_before() {
    let (run, fake) = (Run::new(), FakeEngine::sglang());
    fake.on(CHAT, [Reply::json(200, says("\\boxed{1}", "stop").1)]);
    run.shard("a.parquet", 100, 1);
    let url = format!("sglang+{}", fake.url());
    let flags = ["--engine", &url, "--votes", "1", "--retries", "0"];
    let mut judging = run.start("judge", ("turns", "judged"), &flags);
    judging.hears("a.parquet: 1 rows, 1 noted");
    // A server that does not answer is away.
    let loading = Reply::json(503, json!({"error": {"message": "loading"}}));
    let info = Reply::json(200, json!({"model_path": "/m", "weight_version": "default"}));
    fake.on("/model_info", [loading, info]);
    run.shard("b.parquet", 200, 1);
    judging.hears("answered 503: loading: waiting for it");
    judging.hears("b.parquet: 1 rows, 1 noted");
    // One that has no word for it carries nobody knows what: the question of
    // `a.parquet` is another one.
    let before = calls(&fake);
    fake.on("/model_info", [Reply::json(404, json!({"detail": "Not Found"}))]);
    let path = run.at("turns/c.parquet");
    write(&path, Format::Parquet, SERVE, &turns_of("a.parquet", 100, 1));
    judging.hears("c.parquet: 1 rows, 1 noted");
    assert_eq!(judging.stop().0, Some(0));
    assert_eq!(calls(&fake), before + 1);
}

/// A question that brings its server down is the row's fault after all.
#[test]
fn a_row_that_no_engine_survives_gets_the_blame() {
    let run = Run::new();
    let turn = |number: u32, content: &str| Turn {
        next_state: Some(json!([{"role": "user", "content": content}]).to_string()),
        ..captured("s", number)
    };
    let turns = [turn(1, "Thanks!"), turn(2, "FAIL"), turn(3, "Thanks!")];
    write(&run.at("turns/a.parquet"), Format::Parquet, SERVE, &turns);
    let url = scripted(|body: &Value| match body["messages"].to_string().contains("FAIL") {
        true => (StatusCode::SERVICE_UNAVAILABLE, json!({})),
        false => says("\\boxed{1}", "stop"),
    });
    let flags = ["--engine", &url, "--votes", "1", "--retries", "0", "--shard-tries", "2"];
    let mut judging = run.start("judge", ("turns", "judged"), &flags);
    judging.hears("a.parquet: 3 rows, 2 noted, 1 failed");
    assert_eq!(judging.stop().0, Some(0));
    let turns = read_turns(&[run.at("judged/a.parquet")]).unwrap();
    let errors: Vec<_> = turns.iter().map(|turn| turn.judge_error.as_deref()).collect();
    assert_eq!(errors, [None, Some("status 503"), None]);
}

/// Nobody may take an end for the end of the work.
#[test]
fn what_cannot_be_read_is_told_when_nobody_waits() {
    let (run, fake) = (Run::new(), judge());
    run.shard("a.parquet", 100, 1);
    std::os::unix::fs::symlink("nowhere", run.at("turns/b.parquet")).unwrap();
    fake.hold_after(CHAT, 0);
    let url = fake.url();
    let flags = ["--engine", &url, "--votes", "1", "--shard-tries", "1", "--once"];
    let judging = run.start("judge", ("turns", "judged"), &flags);
    fake.arrived(CHAT, 1);
    std::fs::rename(run.at("turns"), run.at("elsewhere")).unwrap();
    fake.release();
    let (code, words) = judging.end();
    assert_eq!(code, Some(1), "{words}");
    assert!(words.contains(&format!("cannot read `{}", run.at("turns").display())), "{words}");
    std::fs::rename(run.at("elsewhere"), run.at("turns")).unwrap();
    run.judging().args(&flags[..6]).assert().code(3);
    assert_eq!(run.listed("judged")[0]["shard"], "b.parquet");
}

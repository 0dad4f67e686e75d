//! `oclaw judge` beyond one model: rules before it, people's labels beside it,
//! other instructions, bounded and ordered calls.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::routing::{get, post};
use axum::{Json, Router};
use oclaw::table::Format;
use oclaw::trajectory::words::NextStateKind;
use oclaw::trajectory::{Turn, Writer};
use serde_json::{Value, json};

use super::judge::{read, says, table};
use crate::forge::{captured, write};
use crate::harness::fake_engine::{FakeEngine, Reply};
use crate::harness::{oclaw, oclaw_keeping};

const CHAT: &str = "/v1/chat/completions";

fn judge() -> FakeEngine {
    let fake = FakeEngine::start();
    fake.on("/v1/models", [Reply::json(200, json!({"data": [{"id": "scripted"}]}))]);
    fake.on(CHAT, [Reply::json(200, says("\\boxed{0}", "stop").1)]);
    fake
}

fn asked(fake: &FakeEngine) -> Vec<Value> {
    let seen = fake.seen().into_iter().filter(|seen| seen.path == CHAT);
    seen.map(|seen| seen.body["messages"].clone()).collect()
}

fn words(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes).into_owned();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn turn(number: u32, kind: NextStateKind, next: &str) -> Turn {
    let role = if kind == NextStateKind::Tool { "tool" } else { "user" };
    Turn {
        next_state: Some(json!([{"role": role, "content": next}]).to_string()),
        next_state_kind: kind,
        ..captured("s", number)
    }
}

fn file(folder: &Path, turns: &[Turn]) -> PathBuf {
    write(&folder.join("in.parquet"), Format::Parquet, &[Writer::Serve], turns)
}

#[test]
fn rules_save_calls() {
    let (folder, fake) = (tempfile::tempdir().unwrap(), judge());
    let (input, output) = (table(folder.path()), folder.path().join("out.parquet"));
    let url = fake.url();
    let foretold =
        oclaw().args(["judge", "--rules", "--engine", &url, "--dry-run"]).arg(&input).assert();
    let foretold = words(&foretold.code(0).get_output().stdout);
    assert!(foretold.contains("turns 5 to ask about 1 calls 3"), "{foretold}");

    let run = oclaw()
        .args(["judge", "--rules", "--engine", &url, "-o"])
        .args([&output, &input])
        .assert()
        .code(0);
    let talk = words(&run.get_output().stderr);
    assert!(talk.contains("judged 3 by rules, without a call 2 failed 0"), "{talk}");
    let bodies = asked(&fake);
    assert_eq!(bodies.len(), 3);
    assert!(bodies.iter().all(|body| body.to_string().contains("Rome")), "{bodies:?}");
    let turns = read(&output);
    let scores: Vec<_> = turns.iter().map(|turn| turn.score).collect();
    assert_eq!(scores, [Some(-1.0), Some(1.0), None, None, Some(0.0)]);
    assert_eq!(turns[0].judge_text, Some(vec![Some("rule `refused`".to_owned())]));
    assert_eq!(turns[4].votes, Some(vec![Some(0); 3]));
}

#[test]
fn the_lines_of_wrong_rules_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let (input, own) = (table(folder.path()), folder.path().join("rules.toml"));
    for (text, expected) in [
        ("[[rule]]\nname = \"a\"\nscore = 1\nnxt = \"x\"\n", "line 4, column 1"),
        ("[[rule]]\nname = \"a\"\nscore = 1\n[rules]\n", "unknown field `rules`"),
        ("\n[[rule]]\nname = \"a\"\nscore = 3\n", "rules.toml line 2, rule `a`: score is 3"),
        ("[[rule]]\nname = \"a\"\nscore = 1\nexit_code = \"two\"\n", "wanted `zero`, `nonzero`"),
    ] {
        std::fs::write(&own, text).unwrap();
        let rules = format!("--rules={}", own.display());
        let talk = oclaw().args(["judge", &rules]).arg(&input).assert().code(2);
        let talk = words(&talk.get_output().stderr);
        assert!(talk.contains(expected), "{expected}: {talk}");
    }
}

#[test]
fn instructions_by_role_are_sent_and_ask_anew() {
    let (folder, fake) = (tempfile::tempdir().unwrap(), judge());
    let turns = [turn(1, NextStateKind::User, "hm"), turn(2, NextStateKind::Tool, "12")];
    let input = file(folder.path(), &turns);
    let (people, tools) = (folder.path().join("people"), folder.path().join("tools"));
    std::fs::write(&people, "PEOPLE \\boxed{1}").unwrap();
    std::fs::write(&tools, "TOOLS \\boxed{1}").unwrap();
    let (people, tools) = (people.to_str().unwrap(), tools.to_str().unwrap());
    let run = |flags: &[&str]| {
        fake.forget();
        oclaw_keeping(folder.path())
            .args(["judge", "--votes", "1", "--at-once", "1", "--engine", &fake.url(), "-o"])
            .args([&folder.path().join("out.parquet"), &input])
            .args(flags)
            .assert()
            .code(0);
        let first = |body: &Value| {
            let text = body[0]["content"].as_str().unwrap();
            text.split_whitespace().next().unwrap().to_owned()
        };
        asked(&fake).iter().map(first).collect::<Vec<_>>()
    };
    assert_eq!(run(&[]), ["You", "You"]);
    assert_eq!(run(&["--prompt", people]), ["PEOPLE", "PEOPLE"]);
    assert_eq!(run(&["--prompt", people, "--tool-prompt", tools]), ["TOOLS"]);
    assert_eq!(run(&["--tool-prompt", tools]), [""; 0], "all of it is kept by now");
    // A changed text is another question, whatever its file is called.
    std::fs::write(people, "PEOPLE! \\boxed{1}").unwrap();
    assert_eq!(run(&["--prompt", people, "--tool-prompt", tools]), ["PEOPLE!"]);

    let shown = oclaw().args(["judge", "--show-prompt"]).assert().code(0);
    assert!(words(&shown.get_output().stdout).starts_with("You grade one step"));
    let shown = oclaw().args(["hint", "--show-prompt", "--prompt", people]).assert().code(2);
    let talk = words(&shown.get_output().stderr);
    assert!(talk.contains("never says `[HINT_START]`, so no answer could be read"), "{talk}");
    assert!(talk.contains("hint: `--show-prompt` prints the built-in one"), "{talk}");
    std::fs::write(tools, [0xff, 0xfe]).unwrap();
    for flag in ["--prompt", "--tool-prompt"] {
        for wrong in [tools, "/nowhere"] {
            let run = oclaw().args(["judge", "--rules", flag, wrong]).arg(&input).assert().code(2);
            let talk = words(&run.get_output().stderr);
            assert!(talk.contains(&format!("cannot read the prompt `{wrong}`")), "{talk}");
        }
    }
}

/// Serves until the process ends; a call is answered when three others are under
/// way with it. The vote comes from the text. Returns the address and the most
/// calls that were ever under way.
fn in_fours() -> (String, Arc<AtomicUsize>) {
    let most = Arc::new(AtomicUsize::new(0));
    let (told, seen) = (std::sync::mpsc::channel(), most.clone());
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async move {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            told.0.send(listener.local_addr().unwrap()).unwrap();
            let state = Arc::new((tokio::sync::Barrier::new(4), AtomicUsize::new(0), seen));
            let chat = move |Json(body): Json<Value>| {
                let state = state.clone();
                async move {
                    let (barrier, now, most) = &*state;
                    most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    barrier.wait().await;
                    now.fetch_sub(1, Ordering::SeqCst);
                    let text = body["messages"][1]["content"].as_str().unwrap().to_owned();
                    let vote =
                        ["-1", "0", "1"].iter().find(|vote| text.contains(&format!("<{vote}>")));
                    let (status, body) = says(&format!("\\boxed{{{}}}", vote.unwrap()), "stop");
                    (status, Json(body))
                }
            };
            let routes = Router::new()
                .route("/v1/models", get(|| async { Json(json!({"data": [{"id": "m"}]})) }))
                .route(CHAT, post(chat));
            axum::serve(listener, routes).await.unwrap();
        });
    });
    (format!("http://{}", told.1.recv().unwrap()), most)
}

#[test]
fn calls_are_bounded_and_the_order_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let votes: Vec<i32> = (0..20).map(|number| number * 7 % 3 - 1).collect();
    let turns: Vec<Turn> = (1..)
        .zip(&votes)
        .map(|(number, vote)| turn(number, NextStateKind::User, &format!("<{vote}>")))
        .collect();
    let (input, output) = (file(folder.path(), &turns), folder.path().join("out.parquet"));
    let (url, most) = in_fours();
    oclaw()
        .args(["judge", "--votes", "1", "--at-once", "4", "--engine", &url, "-o"])
        .args([&output, &input])
        .assert()
        .code(0);
    assert_eq!(most.load(Ordering::SeqCst), 4);
    let found = read(&output);
    let scores: Vec<_> = found.iter().map(|turn| turn.score.unwrap() as i32).collect();
    assert_eq!(scores, votes);
    assert!(found.iter().zip(&turns).all(|(found, turn)| found.turn_id == turn.turn_id));
}

#[test]
fn a_judge_that_never_answers_costs_its_own_turn() {
    let (folder, fake) = (tempfile::tempdir().unwrap(), judge());
    let (input, output) = (table(folder.path()), folder.path().join("out.parquet"));
    fake.hold_after(CHAT, 2);
    let run = oclaw()
        .args(["judge", "--votes", "1", "--at-once", "1", "--timeout", "0.3", "--retries", "1"])
        .args(["--engine", &fake.url(), "-o"])
        .args([&output, &input])
        .assert()
        .code(3);
    fake.release();
    let talk = words(&run.get_output().stderr);
    assert!(talk.contains("calls without a verdict: timeout 1"), "{talk}");
    assert_eq!(asked(&fake).len(), 2 + 2);
    let errors: Vec<_> = read(&output).into_iter().map(|turn| turn.judge_error).collect();
    assert_eq!(errors, [None, None, None, None, Some("timeout".to_owned())]);
}

#[test]
fn a_server_that_asks_for_patience_gets_it() {
    for header in ["0", "Sun, 06 Nov 1994 08:49:37 GMT"] {
        let (folder, fake) = (tempfile::tempdir().unwrap(), judge());
        let (input, output) = (table(folder.path()), folder.path().join("out.parquet"));
        let busy = Reply::json(429, json!({"error": {"message": "slow down"}}));
        let good = Reply::json(200, says("\\boxed{1}", "stop").1);
        fake.on(CHAT, [busy.with("retry-after", header), good]);
        oclaw()
            .args(["judge", "--votes", "1", "--at-once", "1", "--engine", &fake.url(), "-o"])
            .args([&output, &input])
            .assert()
            .code(0);
        assert_eq!(asked(&fake).len(), 4);
        assert_eq!(read(&output)[0].score, Some(1.0));
    }
}

/// An answer that is no use was paid for: its tokens count, and the budget ends with
/// them.
#[test]
fn what_an_unusable_answer_cost_is_counted() {
    let (folder, fake) = (tempfile::tempdir().unwrap(), judge());
    let (input, output) = (table(folder.path()), folder.path().join("out.parquet"));
    let usage = json!({"prompt_tokens": 10, "completion_tokens": 5});
    let bodies = [
        json!({"choices": [], "usage": usage}),
        json!({"error": {"message": "filtered"}, "usage": usage}),
    ];
    fake.on(CHAT, bodies.map(|body| Reply::json(200, body)));
    let prices = ["--price-in", "100000", "--price-out", "200000"];
    let run = oclaw()
        .args(["judge", "--votes", "1", "--at-once", "1", "--max-tokens-total", "30"])
        .args(prices)
        .args(["--engine", &fake.url(), "-o"])
        .args([&output, &input])
        .assert()
        .code(3);
    let talk = words(&run.get_output().stderr);
    assert!(talk.contains("calls 2 cache hits 0 prompt tokens 20 answer tokens 10"), "{talk}");
    assert!(talk.contains("cost 4.000000 left out: budget 1"), "{talk}");
    let errors: Vec<_> = read(&output).into_iter().map(|turn| turn.judge_error).collect();
    let errors: Vec<_> = errors.iter().map(Option::as_deref).collect();
    let refused = Some("refused: filtered");
    assert_eq!(errors, [Some("malformed answer"), refused, None, None, Some("budget")]);
}

/// A server may count as it likes: a budget by tokens ends there, and nothing else does.
#[test]
fn tokens_beyond_all_numbers_are_spent() {
    let (folder, fake) = (tempfile::tempdir().unwrap(), judge());
    let (input, output) = (table(folder.path()), folder.path().join("out.parquet"));
    let mut body = says("\\boxed{1}", "stop").1;
    body["usage"] = json!({"prompt_tokens": u64::MAX, "completion_tokens": u64::MAX});
    fake.on(CHAT, [Reply::json(200, body)]);
    let run = |flags: &[&str], code: i32| {
        oclaw()
            .args(["judge", "--votes", "1", "--at-once", "1", "--engine", &fake.url(), "-o"])
            .args([&output, &input])
            .args(flags)
            .assert()
            .code(code);
        read(&output).iter().filter(|turn| turn.score == Some(1.0)).count()
    };
    assert_eq!(run(&[], 0), 3);
    assert_eq!(run(&["--max-tokens-total", "100"], 3), 1);
}

/// A key that is good for nothing ends the run, and no row gets the blame.
#[test]
fn a_refused_key_ends_the_run() {
    let (folder, fake) = (tempfile::tempdir().unwrap(), judge());
    let (input, output) = (table(folder.path()), folder.path().join("out.parquet"));
    let wrong = || Reply::json(401, json!({"error": {"message": "wrong key"}}));
    let good = || Reply::json(200, says("\\boxed{1}", "stop").1);
    let run = |replies: &[Reply], code: i32| {
        fake.forget();
        fake.on(CHAT, replies.to_vec());
        let run = oclaw()
            .args(["judge", "--votes", "1", "--at-once", "1", "--engine", &fake.url(), "-o"])
            .args([&output, &input])
            .assert()
            .code(code);
        words(&run.get_output().stderr)
    };
    let talk = run(&[good(), wrong()], 2);
    assert!(talk.contains("refused the key (401): wrong key hint: "), "{talk}");
    assert!(!output.exists());
    assert_eq!(asked(&fake).len(), 3, "two turns, and whether it was the turn's fault");
    // One question that is refused, where others are not, is that turn's.
    let talk = run(&[wrong(), good()], 3);
    assert!(talk.contains("calls without a verdict: key refused (401) 1"), "{talk}");
    assert!(output.exists());
}

/// A server that fails every call does so in one line.
#[test]
fn failures_of_a_kind_are_told_once() {
    let (folder, fake) = (tempfile::tempdir().unwrap(), judge());
    let (input, output) = (table(folder.path()), folder.path().join("out.parquet"));
    fake.on(CHAT, [Reply::json(400, json!({"error": {"message": "no such thing"}}))]);
    let run = |verbose: &[&str]| {
        let run = oclaw()
            .args(["judge", "--engine", &fake.url(), "-o"])
            .args([&output, &input])
            .args(verbose)
            .assert()
            .code(3);
        let talk = words(&run.get_output().stderr);
        assert!(talk.contains("calls without a verdict: status 400 9"), "{talk}");
        talk.matches("no such thing").count()
    };
    assert_eq!((run(&[]), run(&["-v"])), (1, 9));
}

/// No more calls are made at once than may be, and a turn whose answer takes its time
/// keeps its place.
#[test]
fn a_slow_answer_is_waited_for() {
    let (folder, fake) = (tempfile::tempdir().unwrap(), judge());
    let turns: Vec<_> = (1..=40).map(|number| turn(number, NextStateKind::User, "hm")).collect();
    let (input, output) = (file(folder.path(), &turns), folder.path().join("out.parquet"));
    fake.hold_first(CHAT);
    let mut judging = std::process::Command::new(env!("CARGO_BIN_EXE_oclaw"))
        .args(["judge", "--no-cache", "-q", "--votes", "1", "--at-once", "4"])
        .args(["--engine", &fake.url(), "-o"])
        .args([&output, &input])
        .spawn()
        .unwrap();
    fake.arrived(CHAT, 4);
    assert_eq!(asked(&fake).len(), 4);
    fake.release();
    assert!(judging.wait().unwrap().success());
    let found = read(&output);
    assert!(found.iter().all(|turn| turn.score == Some(0.0)));
    let ids = |turns: &[Turn]| turns.iter().map(|turn| turn.turn_id.clone()).collect::<Vec<_>>();
    assert_eq!(ids(&found), ids(&turns));
}

/// As many calls as a server of a data centre keeps busy with; fewer where each takes
/// its share of one machine.
#[test]
fn how_many_calls_are_made_at_once() {
    let turns: Vec<_> = (1..=100).map(|number| turn(number, NextStateKind::User, "hm")).collect();
    for (llama_cpp, most) in [(false, 64), (true, 16)] {
        let (folder, fake) = (tempfile::tempdir().unwrap(), judge());
        if llama_cpp {
            let props = json!({"default_generation_settings": {}, "build_info": "b1"});
            fake.on("/props", [Reply::json(200, props)]);
        }
        let (input, output) = (file(folder.path(), &turns), folder.path().join("out.parquet"));
        fake.hold(CHAT);
        let mut judging = std::process::Command::new(env!("CARGO_BIN_EXE_oclaw"))
            .args(["judge", "--no-cache", "-q", "--votes", "1", "--engine", &fake.url(), "-o"])
            .args([&output, &input])
            .spawn()
            .unwrap();
        fake.arrived(CHAT, most);
        assert_eq!(asked(&fake).len(), most);
        fake.release();
        assert!(judging.wait().unwrap().success());
        assert_eq!(asked(&fake).len(), 100);
    }
}

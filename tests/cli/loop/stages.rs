//! Stages that fail, wait or fill up, while chats go on. Nothing here needs a model.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::super::follow::Running;
use super::super::stores::settings;
use super::chats::{Chatter, converse};
use super::{Loop, PATIENCE, signal};
use crate::harness::fake_engine::{FakeEngine, Reply};
use crate::harness::fake_s3::FakeS3;
use crate::harness::fake_upstream::{FakeUpstream, Seen, Speaks, Step, json as whole};
use crate::harness::oclaw;

const CHAT: &str = "/v1/chat/completions";

/// An engine that answers everything alike, in SGLang's way.
pub(super) fn engine() -> FakeUpstream {
    let answer = |_: &Seen| -> Vec<Step> {
        let answer = json!({"metadata": {"weight_version": "0"}, "choices": [{"index": 0,
            "message": {"role": "assistant", "content": "Paris"}, "finish_reason": "stop",
            "matched_stop": 9, "prompt_token_ids": [1], "response_token_ids": [8, 9],
            "meta_info": {"output_token_logprobs": [[-0.5, 8, null], [-0.25, 9, null]]}}],
            "usage": {"completion_tokens": 2}});
        whole(200, &answer.to_string())
    };
    FakeUpstream::start(Speaks::Sglang, answer)
}

/// Serve in front of somebody else's engine, a judge, and what is asked for.
pub(super) fn config(engine: &str, rest: &str) -> String {
    format!(
        "[engines.policy]\nurl = \"{engine}\"\n[serve]\nlisten = \"FRONT\"\n\
         shard-age = \"200ms\"\n[advantage]\npoll = \"100ms\"\nestimator = \"grpo\"\n{rest}"
    )
}

pub(super) const ONLY_JUDGE: &str =
    "[loop]\nwithout = [\"hint\", \"teacher-lp\", \"train\", \"sync-weights\"]\n";

pub(super) fn pending(status: &Value, stage: &str) -> i64 {
    status["account"]["pending"][stage].as_i64().unwrap_or(0)
}

/// Waits until so many turns were chatted.
fn chatted(chatter: &Chatter, turns: u64) {
    let start = Instant::now();
    while chatter.turns.load(Ordering::Relaxed) < turns {
        assert!(start.elapsed() < PATIENCE, "nobody answers the chats");
        std::thread::park_timeout(Duration::from_millis(50));
    }
}

/// Processes that share the processors do not spin while they wait, unless told to.
#[test]
fn processes_wait_asleep_unless_somebody_says_otherwise() {
    let upstream = engine();
    let rest = format!("[judge]\nrules = \"\"\n{ONLY_JUDGE}");
    for (given, wanted) in [(None, "PASSIVE"), (Some("ACTIVE"), "ACTIVE")] {
        let mut looped = Loop::new(&config(&upstream.url(), &rest));
        looped.env.extend(given.map(|word| ("OMP_WAIT_POLICY".to_owned(), word.to_owned())));
        let running = looped.start();
        let environment = fs::read(format!("/proc/{}/environ", looped.running("serve"))).unwrap();
        let wanted = format!("OMP_WAIT_POLICY={wanted}");
        let has = environment.split(|byte| *byte == 0).any(|entry| entry == wanted.as_bytes());
        assert!(has, "{}", String::from_utf8_lossy(&environment));
        assert_eq!(running.stop().0, Some(0));
    }
}

#[test]
fn a_judge_that_never_answers_holds_up_nothing_but_itself() {
    let upstream = engine();
    let judge = FakeEngine::start();
    judge.on("/v1/models", [Reply::json(200, json!({"data": [{"id": "scripted"}]}))]);
    let verdict = json!({"choices": [{"message": {"role": "assistant", "content": "\\boxed{1}"},
        "finish_reason": "stop"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}});
    judge.on(CHAT, [Reply::json(200, verdict)]);
    judge.hold(CHAT);
    let rest = format!(
        "[judge]\nno-cache = true\npoll = \"100ms\"\n{ONLY_JUDGE}\
         [engines.prm]\nurl = \"{}\"\nserves = \"judge\"\n",
        judge.url()
    );
    let looped = Loop::new(&config(&upstream.url(), &rest));
    let mut running = looped.start();
    running.hears("judge: started");
    let chatter = Chatter::start(&looped.front);
    judge.arrived(CHAT, 1);
    chatted(&chatter, 12);
    looped.until("turns wait for the judge", |status| pending(status, "judge") >= 6);
    judge.release();
    let (turns, retries) = chatter.stop();
    assert_eq!(retries, 0, "no chat of {turns} failed");
    // Shards and open turns are counted one after the other: a turn that is written in
    // between is in both until the next look.
    looped.until("the judge has caught up with every turn", |status| {
        let account = &status["account"];
        let captured = account["captured"].as_i64().unwrap();
        pending(status, "judge") == 0
            && pending(status, "nobody") >= 6
            && captured + account["open"].as_i64().unwrap_or(0) == turns as i64
    });
    assert_eq!(running.stop().0, Some(0));
}

#[test]
fn a_stage_with_wrong_settings_is_given_up_and_the_others_go_on() {
    let upstream = engine();
    let rest = format!(
        "[judge]\nrules = \"absent.toml\"\n{ONLY_JUDGE}give-up = 2\nrestart-wait = \"50ms\"\n\
         listen = \"FREE\"\n"
    );
    let looped = Loop::new(&config(&upstream.url(), &rest));
    let mut running = looped.start();
    let address = running.hears("status: http://");
    let address = address.split("http://").nth(1).unwrap().split('/').next().unwrap().to_owned();
    running.hears("judge: ended with exit code 2 for the second time: it is not started again");
    assert_eq!(converse(&looped.front, "on", 3), 0);
    looped.until("turns wait for nobody", |status| pending(status, "judge") == 2);
    let page = |route: &str| {
        let mut stream = TcpStream::connect(&address).unwrap();
        write!(stream, "GET {route} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    };
    let until = |route: &str, words: &str| {
        let start = Instant::now();
        while !page(route).contains(words) {
            assert!(start.elapsed() < PATIENCE, "{words}: {}", page(route));
            std::thread::park_timeout(Duration::from_millis(50));
        }
    };
    until("/metrics", "oclaw_loop_process_up{process=\"judge\",phase=\"given up\"} 0\n");
    until("/metrics", "oclaw_loop_turns_pending{stage=\"judge\"} 2\n");
    until("/metrics", "oclaw_loop_process_up{process=\"serve\",phase=\"up\"} 1\n");
    until("/status", "\"captured\":2");
    // Why, without a look at its log.
    until("/status", "\"last_end\":\"ended with exit code 2: oclaw judge: ");
    assert!(page("/healthz").starts_with("HTTP/1.1 200"));
    assert!(page("/elsewhere").starts_with("HTTP/1.1 404"));
    let (code, words) = running.stop();
    assert_eq!(code, Some(3), "{words}");
}

/// An engine that dies while it loads new weights comes up with its old ones.
#[test]
fn an_engine_that_dies_during_an_update_gets_it_again() {
    let engine = FakeEngine::sglang();
    let rest = "[sync-weights]\npoll = \"100ms\"\ntries = 1\n[loop]\nwithout = [\"judge\", \
                \"hint\", \"teacher-lp\", \"advantage\", \"train\"]\n";
    let looped = Loop::new(&config(&engine.url(), rest));
    let policy = looped.path("run/policy/step-000007");
    fs::create_dir_all(&policy).unwrap();
    fs::write(policy.join("config.json"), "{}").unwrap();
    fs::write(policy.join("model.safetensors"), "").unwrap();
    engine.hold("/update_weights_from_disk");
    let mut running = looped.start();
    running.hears("sync-weights: started");
    std::os::unix::fs::symlink("step-000007", looped.path("run/policy/latest")).unwrap();
    engine.arrived("/update_weights_from_disk", 1);
    signal(looped.running("sync-weights"), "KILL");
    running.hears("sync-weights: was killed");
    engine.restart();
    engine.release();
    looped.until("the policy is served", |status| {
        status["policy"]["served"][&engine.url()] == "7" && status["policy"]["staleness"] == 0
    });
    assert_eq!(running.stop().0, Some(0));
}

/// Who has a key for chats needs no second one for the weights, and a file in the
/// folder need not be named.
#[test]
fn a_server_with_keys_is_told_of_new_weights() {
    let engine = FakeEngine::sglang();
    let rest = "key-file = \"clients.keys\"\n[sync-weights]\npoll = \"100ms\"\n[loop]\n\
                without = [\"judge\", \"hint\", \"teacher-lp\", \"advantage\", \"train\"]\n";
    let text = format!(
        "[engines.policy]\nurl = \"{}\"\n[serve]\nlisten = \"FRONT\"\n{rest}",
        engine.url()
    );
    let looped = Loop::new(&text);
    fs::write(looped.path("clients.keys"), "# people\nme sesame\n").unwrap();
    let policy = looped.path("run/policy/step-000007");
    fs::create_dir_all(&policy).unwrap();
    fs::write(policy.join("config.json"), "{}").unwrap();
    fs::write(policy.join("model.safetensors"), "").unwrap();
    std::os::unix::fs::symlink("step-000007", looped.path("run/policy/latest")).unwrap();
    let mut command = oclaw();
    command.arg("loop").current_dir(looped.path(""));
    let mut running = Running::start(&command);
    running.hears("sync-weights: started");
    let log = || fs::read_to_string(looped.path("run/logs/sync-weights.log")).unwrap_or_default();
    let start = Instant::now();
    while !log().contains("version 7 pushed") {
        assert!(start.elapsed() < PATIENCE, "{}", log());
        std::thread::park_timeout(Duration::from_millis(50));
    }
    assert!(!log().contains("refused the key"), "{}", log());
    let argv = fs::read(format!("/proc/{}/cmdline", looped.running("sync-weights"))).unwrap();
    let argv = String::from_utf8(argv).unwrap();
    assert!(argv.contains("clients.keys") && !argv.contains("sesame"), "{argv}");
    assert_eq!(running.stop().0, Some(0));
}

/// A second loop in the same folder is refused; the second signal ends at once.
#[test]
fn one_loop_a_folder_and_two_signals_end_it() {
    let upstream = engine();
    let judge = FakeEngine::start();
    judge.on("/v1/models", [Reply::json(200, json!({"data": [{"id": "scripted"}]}))]);
    let rest = format!("[judge]\nrules = \"\"\n{ONLY_JUDGE}");
    let looped = Loop::new(&config(&upstream.url(), &rest));
    let mut running = looped.start();
    running.hears("judge: started");
    let serve = looped.running("serve");
    let second = looped.command().timeout(PATIENCE).assert().code(1);
    let said = String::from_utf8(second.get_output().stderr.clone()).unwrap();
    assert!(said.contains("oclaw loop: another loop works in `run` (process "), "{said}");
    assert!(said.contains("hint: `oclaw loop --status run` says how it is"), "{said}");
    // Serve does not end while it is stopped.
    signal(serve, "STOP");
    running.signal("TERM");
    running.hears("ending: serve first");
    running.signal("INT");
    let (code, words) = running.end();
    assert_eq!(code, Some(130), "{words}");
    let start = Instant::now();
    while super::runs_here(serve as u64, looped.path("").as_path()) {
        assert!(start.elapsed() < PATIENCE, "serve is still there");
        std::thread::park_timeout(Duration::from_millis(20));
    }
}

/// The processes of a loop are shown before its store has told of anything; turns are not.
#[test]
fn what_a_store_has_not_told_is_not_nothing() {
    let (upstream, fake) = (engine(), FakeS3::start());
    fake.say(503);
    let rest = format!("[judge]\nrules = \"\"\n{ONLY_JUDGE}store = \"s3://bucket/run\"\n");
    let mut looped = Loop::new(&config(&upstream.url(), &rest));
    looped.env = settings(&fake.endpoint);
    looped.env.push(("NO_PROXY".to_owned(), "127.0.0.1".to_owned()));
    let mut running = looped.start();
    running.hears("the store is away");
    let status = looped.status();
    assert!(status["account"].is_null() && status["untold"].is_string(), "{status:#}");
    assert_eq!((&status["stages"], &status["policy"]["staleness"]), (&json!([]), &Value::Null));
    let children = status["children"].as_array().unwrap();
    assert!(children.iter().any(|child| child["name"] == "serve"), "{status:#}");
    fake.say(0);
    let told = looped.until("it has told", |status| status["account"]["captured"] == 0);
    assert!(told["told_at"].is_u64() && told["untold"].is_null(), "{told:#}");
    assert_eq!(running.stop().0, Some(0));
    let claim: Value = serde_json::from_slice(&fake.get("run/loop.claim").unwrap()).unwrap();
    assert_eq!(claim["released"], true);
}

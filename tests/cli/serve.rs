//! `oclaw serve`: the real program, its signals, its exit codes, its words.

mod disk;
mod kills;
mod secrets;

use std::collections::BTreeSet;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

use oclaw::trajectory::words::{NextStateKind, Status};
use serde_json::{Value, json};

use crate::harness::fake_upstream::{
    FakeUpstream, Gate, Seen, Speaks, Step, done, event, stream_head,
};
use crate::harness::serve::{Serve, ask, echo, rows};
use crate::harness::{fixture_models as models, oclaw, until};

#[test]
fn a_kill_at_any_moment_loses_no_answered_turn_and_doubles_none() {
    let upstream = FakeUpstream::start(Speaks::Sglang, echo);
    let folder = tempfile::tempdir().unwrap();
    let spool = folder.path().join("turns");
    let url = upstream.url();
    let mut ledger = BTreeSet::new();
    let mut sent = BTreeSet::new();
    for round in 0..6 {
        // Small shards, so that some kills fall while one is written.
        // The journal of a killed one may be damaged, which is said.
        let (serve, _) = Serve::start_saying(
            &spool,
            &[
                "--engine",
                &url,
                "--shard-rows",
                "3",
                "--shard-age",
                "20ms",
                "--session-idle",
                "10ms",
            ],
        );
        std::thread::scope(|scope| {
            let clients: Vec<_> = (0..4)
                .map(|client| {
                    let serve = &serve;
                    scope.spawn(move || {
                        let mut answered = Vec::new();
                        for number in 0.. {
                            let name = format!("{round}-{client}-{number}");
                            let answer = serve.chat(&ask(&name), "");
                            if !answer.contains(&name) || !answer.ends_with("}}") {
                                return (answered, number);
                            }
                            answered.push(name);
                            if client == 0 && number == 7 + round {
                                serve.signal("KILL");
                            }
                        }
                        unreachable!()
                    })
                })
                .collect();
            for (client, handle) in clients.into_iter().enumerate() {
                let (answered, last) = handle.join().unwrap();
                ledger.extend(answered);
                sent.extend((0..=last).map(|number| format!("{round}-{client}-{number}")));
            }
        });
        drop(serve);
    }
    let (serve, _) = Serve::start_saying(&spool, &["--engine", &url, "--flush-open"]);
    let (code, words) = serve.stop();
    assert_eq!(code, Some(0), "{words}");
    let found: Vec<_> = rows(&spool)
        .into_iter()
        .map(|row| {
            serde_json::from_str::<Value>(&row.response).unwrap()["content"]
                .as_str()
                .unwrap()
                .to_owned()
        })
        .collect();
    let distinct: BTreeSet<_> = found.iter().cloned().collect();
    assert_eq!(distinct.len(), found.len(), "a turn stands twice");
    let lost: Vec<_> = ledger.difference(&distinct).collect();
    assert!(lost.is_empty(), "{lost:?}");
    assert!(distinct.is_subset(&sent) && ledger.len() >= 40, "{}", ledger.len());
}

#[test]
fn the_first_signal_drains_and_tells_what_was_captured() {
    let gate = Gate::default();
    let held = gate.clone();
    let script = move |seen: &Seen| match seen.text().contains("\"stream\":true") {
        false => echo(seen),
        true => vec![
            stream_head(),
            event(
                &json!({"choices": [{"index": 0, "delta": {"content": "slow"}, "finish_reason": null}]}),
            ),
            Step::Hold(held.clone()),
            event(&json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})),
            done(),
            Step::End,
        ],
    };
    let upstream = FakeUpstream::start(Speaks::Sglang, script);
    let folder = tempfile::tempdir().unwrap();
    let serve = Serve::start(folder.path(), &["--engine", &upstream.url()]);
    serve.chat(&ask("canary-of-a-message"), "x-session-id: s\r\nx-session-done: 1\r\n");
    serve.chat(&ask("side"), "x-turn-type: side\r\n");
    let mut slow = json!({"stream": true});
    slow.as_object_mut().unwrap().extend(ask("x").as_object().unwrap().clone());
    let mut stream = serve.connect(&slow, "");
    let mut text = vec![0; 4096];
    let mut seen = String::new();
    while !seen.contains("slow") {
        let count = stream.read(&mut text).unwrap();
        assert!(count > 0, "the stream ended early: {seen}");
        seen.push_str(&String::from_utf8_lossy(&text[..count]));
    }
    serve.signal("TERM");
    gate.open();
    stream.read_to_string(&mut seen).unwrap();
    assert!(seen.contains("[DONE]"), "{seen}");
    let (code, words) = serve.end();
    assert_eq!(code, Some(0), "{words}");
    assert!(
        words.contains("captured 2 turns (1 without a session), wrote 1 rows, 1 turns stay open"),
        "{words}"
    );
    assert!(
        words.contains("not captured: side 1")
            && words.contains("not for training: no_token_ids 1"),
        "{words}"
    );
    assert!(!words.contains("canary"), "{words}");
    let rows = rows(folder.path());
    assert_eq!((rows.len(), rows[0].session_end, rows[0].status), (1, true, Status::Complete));
    let lint = oclaw().arg("lint").arg(folder.path()).output().unwrap();
    assert!(lint.status.success(), "{}", String::from_utf8_lossy(&lint.stdout));
}

#[test]
fn idle_sessions_become_rows_while_it_runs() {
    let upstream = FakeUpstream::start(Speaks::Sglang, echo);
    let folder = tempfile::tempdir().unwrap();
    let serve = Serve::start(
        folder.path(),
        &["--engine", &upstream.url(), "--session-idle", "10ms", "--shard-age", "1ms"],
    );
    serve.chat(&ask("hi"), "");
    until("a shard", || !rows(folder.path()).is_empty());
    assert_eq!(rows(folder.path())[0].next_state_kind, NextStateKind::None);
    let (code, words) = serve.stop();
    assert_eq!(code, Some(0), "{words}");
    let names = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let odd: Vec<_> = names
        .filter(|name| !name.ends_with(".parquet") && name != ".journal" && name != ".lock")
        .collect();
    assert_eq!(odd, Vec::<String>::new());
}

#[test]
fn bad_starts_name_the_thing() {
    let upstream = FakeUpstream::start(Speaks::Sglang, echo);
    let url = upstream.url();
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let spool = folder.path().join("spool").display().to_string();
    let (empty, odd) = (file("empty", "# nobody\n\n"), file("odd", "ann k e y\n"));
    let no_folder = file("file", "");
    let busy = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let busy = busy.local_addr().unwrap().to_string();
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let closed = format!("http://{closed}");
    let start = ["--engine", url.as_str(), "--listen", "127.0.0.1:0", "--spool"];
    for (arguments, code, words) in [
        (vec![], 2, "--spool"),
        (vec!["--spool", &spool], 2, "--engine"),
        (vec!["--spool", &spool, "--engine", "ftp://x"], 2, "not a server's address: `ftp://x`"),
        (vec!["--spool", &spool, "--engine", &closed], 4, "cannot reach"),
        (
            vec!["--spool", &spool, "--engine", &url, "--listen", "0.0.0.0:0"],
            2,
            "hint: give the clients' keys by `--key-file`",
        ),
        (vec!["--spool", &spool, "--engine", &url, "--listen", &busy], 1, "cannot listen on"),
        ([&start[..], &[no_folder.as_str()]].concat(), 1, "cannot use the spool folder"),
        ([&start[..], &[spool.as_str(), "--key-file", &empty]].concat(), 2, "no key in"),
        ([&start[..], &[spool.as_str(), "--key-file", &odd]].concat(), 2, "line 1: not `NAME KEY`"),
        (
            [&start[..], &[spool.as_str(), "--key-file", "/nowhere"]].concat(),
            2,
            "cannot read the keys in `/nowhere`",
        ),
        (
            [&start[..], &[spool.as_str(), "--session-idle", "7 moons"]].concat(),
            2,
            "no unit `moons`",
        ),
        (
            [&start[..], &[spool.as_str(), "--session-idle", "1e300"]].concat(),
            2,
            "no time: `1e300`; wanted 0 to 8760 h",
        ),
        ([&start[..], &[spool.as_str(), "--shard-rows", "0"]].concat(), 2, "not a number of rows"),
    ] {
        let output = oclaw().arg("serve").args(&arguments).output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {told}");
        assert!(told.contains(words), "{arguments:?}: {told}");
        assert!(output.stdout.is_empty());
    }
    let serve = Serve::start(Path::new(&spool), &["--engine", &url]);
    let second = oclaw().arg("serve").args(start).arg(&spool).output().unwrap();
    let told = String::from_utf8_lossy(&second.stderr).into_owned();
    assert_eq!(second.status.code(), Some(1), "{told}");
    assert!(
        told.contains("is in use by another process")
            && told.contains("hint: one `oclaw serve` per spool folder"),
        "{told}"
    );
    assert_eq!(serve.stop().0, Some(0));
}

#[cfg(feature = "torch")]
#[test]
fn a_model_inside_the_process_is_captured_exactly() {
    let folder = tempfile::tempdir().unwrap();
    let model = models().join("tiny-qwen3").display().to_string();
    let serve = Serve::start(folder.path(), &["--model", &model]);
    let first = json!({"model": "tiny", "max_tokens": 12, "temperature": 0.7, "seed": 1, "messages": [{"role": "user", "content": "hi"}]});
    let answer = serve.chat(&first, "x-session-id: s\r\n");
    let body: Value = serde_json::from_str(answer.split("\r\n\r\n").nth(1).unwrap_or_default())
        .unwrap_or_else(|_| panic!("{answer}"));
    let choice = &body["choices"][0];
    for name in ["meta_info", "prompt_token_ids", "response_token_ids"] {
        assert!(choice.get(name).is_none(), "{answer}");
    }
    assert!(choice["logprobs"].is_null(), "{answer}");
    let said = choice["message"]["content"].clone();
    let second = json!({"model": "tiny", "max_tokens": 12, "temperature": 0.7, "stream": true, "seed": 2, "messages": [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": said}, {"role": "user", "content": "again"}]});
    let streamed = serve.chat(&second, "x-session-id: s\r\nx-session-done: 1\r\n");
    assert!(
        streamed.contains("[DONE]")
            && !streamed.contains("sglext")
            && !streamed.contains("\"logprob\""),
        "{streamed}"
    );
    assert!(!streamed.contains("completion_tokens"), "{streamed}");
    let (code, words) = serve.stop();
    assert_eq!(code, Some(0), "{words}");
    let rows = rows(folder.path());
    assert_eq!(rows.len(), 2, "{words}");
    for row in &rows {
        let ids = row.response_ids.as_ref().unwrap();
        let log_probs = row.rollout_log_probs.as_ref().unwrap_or_else(|| panic!("{row:?}"));
        assert_eq!(
            (log_probs.len(), row.usage_completion_tokens),
            (ids.len(), Some(ids.len() as u32))
        );
        assert_eq!(
            (row.untrainable_reason.as_deref(), row.weight_version.as_deref()),
            (None, Some("0")),
            "{row:?}"
        );
    }
    assert_eq!(rows[0].next_state_kind, NextStateKind::User);
    refused_for_another_model(folder.path());
    let lint = oclaw().arg("lint").arg(folder.path()).output().unwrap();
    assert!(lint.status.success(), "{}", String::from_utf8_lossy(&lint.stdout));
}

/// A server's tokenizer is known if it names a folder of this machine.
#[test]
fn shards_name_the_tokenizer_that_the_server_names() {
    use crate::harness::fake_engine::{FakeEngine, Reply};
    let own = models().join("tiny-qwen3");
    let hash = oclaw::template::Tokenizer::hash_of(&own).unwrap();
    let own = own.display().to_string();
    for (info, expected) in [
        (json!({"model_path": own}), Some(&hash)),
        (json!({"model_path": "/nowhere", "tokenizer_path": own}), Some(&hash)),
        (json!({"model_path": own, "tokenizer_path": "/nowhere"}), None),
        (json!({"model_path": "org/model"}), None),
    ] {
        let fake = FakeEngine::sglang();
        fake.on("/model_info", [Reply::json(200, info.clone())]);
        let answer = json!({"choices": [{"index": 0, "finish_reason": "stop", "matched_stop": 9,
            "message": {"role": "assistant", "content": "x"},
            "prompt_token_ids": [1], "response_token_ids": [8, 9],
            "meta_info": {"output_token_logprobs": [[-0.5, 8, null], [-0.25, 9, null]]}}]});
        fake.on("/v1/chat/completions", [Reply::json(200, answer)]);
        let folder = tempfile::tempdir().unwrap();
        let serve = Serve::start(folder.path(), &["--engine", &fake.url(), "--flush-open"]);
        assert!(serve.chat(&ask("hi"), "").contains("200 OK"));
        assert_eq!(serve.stop().0, Some(0));
        let source = oclaw::table::Source::open(&[folder.path().to_owned()]).unwrap();
        let found = source.provenance();
        assert_eq!(found.tokenizer_hash.as_ref(), expected, "{info}");
        assert_eq!(found.chat_template_hash.is_some(), expected.is_some(), "{info}");
    }
}

/// The shards say which tokenizer made their ids; stages with another refuse.
#[cfg(feature = "torch")]
fn refused_for_another_model(spool: &Path) {
    let models = models();
    let own = models.join("tiny-qwen3");
    let aside = tempfile::tempdir().unwrap();
    let other = aside.path().join("other");
    std::fs::create_dir(&other).unwrap();
    for entry in std::fs::read_dir(&own).unwrap().map(|entry| entry.unwrap()) {
        std::fs::copy(entry.path(), other.join(entry.file_name())).unwrap();
    }
    let tokenizer = other.join("tokenizer.json");
    let text = std::fs::read_to_string(&tokenizer).unwrap();
    std::fs::write(&tokenizer, format!("{text}\n")).unwrap();
    let source = oclaw::table::Source::open(&[spool.to_owned()]).unwrap();
    let found = source.provenance();
    let chat = oclaw::template::Chat::load(&own).unwrap();
    assert_eq!(found.tokenizer_hash, Some(chat.tokenizer.hash()));
    assert_eq!(found.chat_template_hash, Some(chat.template_hash()));
    let judged = aside.path().join("judged.parquet");
    let ready = aside.path().join("ready.parquet");
    oclaw().args(["judge", "--rules", "-o"]).args([&judged, &spool.to_owned()]).assert().success();
    let advantage = ["advantage", "--estimator", "grpo", "-o"];
    oclaw().args(advantage).args([&ready, &judged]).assert().success();
    let hashes = [own.as_path(), other.as_path()]
        .map(|folder| oclaw::template::Tokenizer::hash_of(folder).unwrap());
    let out = aside.path().join("policy");
    for (arguments, input) in [
        (vec!["teacher-lp".into(), "-o".into(), aside.path().join("taught")], spool),
        (
            vec!["train".into(), "--estimator".into(), "grpo".into(), "--out".into(), out.clone()],
            ready.as_path(),
        ),
    ] {
        let mut command = oclaw();
        command.args(&arguments).arg("--model").arg(&other).arg(input);
        let output = command.output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{told}");
        assert!(told.contains("is not the one that made the ids"), "{told}");
        assert!(hashes.iter().all(|hash| told.contains(hash)), "{told}");
    }
    assert!(!out.join("latest").exists());
}

/// Before anything runs there is nothing to drain: a signal ends the start.
#[test]
fn a_signal_during_the_start_ends_it() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let child = Command::new(env!("CARGO_BIN_EXE_oclaw"))
        .args(["serve", "--listen", "127.0.0.1:0", "--engine"])
        .arg(format!("http://{}", silent.local_addr().unwrap()))
        .arg("--spool")
        .arg(folder.path().join("spool"))
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (_held, _) = silent.accept().unwrap();
    let kill = format!("kill -INT {}", child.id());
    assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(130));
}

//! `oclaw simulate` with a scripted agent: what it is sent, what is told.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::harness::fake_engine::{FakeEngine, Reply, Seen};
use crate::harness::{oclaw, root};

const CHAT: &str = "/v1/chat/completions";

fn says(text: &str, version: &str) -> Reply {
    let body = json!({
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 7},
        "metadata": {"weight_version": version},
    });
    Reply::json(200, body)
}

fn agent(replies: &[(&str, &str)]) -> FakeEngine {
    let fake = FakeEngine::sglang();
    fake.on(CHAT, replies.iter().map(|(text, version)| says(text, version)));
    fake
}

struct Talk {
    folder: tempfile::TempDir,
    questions: PathBuf,
    persona: PathBuf,
}

impl Talk {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let questions = file("q.jsonl", "{\"question\": \"Why?\"}\n");
        let persona = file(
            "p.toml",
            "name = \"p\"\nwish = \"Say sure.\"\n[rule]\nregex = '^Sure'\n\
             [says]\nbroken = [\"Please say sure.\"]\nholds = [\"Thanks.\"]\n",
        );
        Self { folder, questions, persona }
    }

    fn run(&self, fake: &FakeEngine, more: &[&str], code: i32) -> (String, String) {
        let mut command = oclaw();
        command.arg("simulate").arg("--persona").arg(&self.persona);
        command.arg("--questions").arg(&self.questions).args(["--engine", &fake.url()]).args(more);
        let assert = command.assert().code(code);
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        let output = assert.get_output();
        (text(&output.stdout), text(&output.stderr))
    }
}

fn chats(fake: &FakeEngine) -> Vec<Seen> {
    fake.seen().into_iter().filter(|seen| seen.path == CHAT).collect()
}

fn said(seen: &Seen) -> Vec<&str> {
    let messages = seen.body["messages"].as_array().unwrap();
    messages.iter().map(|message| message["content"].as_str().unwrap()).collect()
}

fn header<'a>(seen: &'a Seen, name: &str) -> Option<&'a str> {
    seen.headers.get(name).map(|value| value.to_str().unwrap())
}

/// Returns the columns of a CSV by their names, the id and the time left out.
fn rows(csv: &str) -> Vec<Value> {
    let mut reader = csv::Reader::from_reader(csv.as_bytes());
    let header = reader.headers().unwrap().clone();
    let row = |record: csv::StringRecord| {
        let fields = header.iter().zip(record.iter().map(str::to_owned).collect::<Vec<_>>());
        let told = fields.filter(|(name, _)| *name != "id" && *name != "seconds");
        Value::Object(told.map(|(name, value)| (name.to_owned(), Value::from(value))).collect())
    };
    reader.records().map(|record| row(record.unwrap())).collect()
}

fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn a_person_complains_praises_and_leaves() {
    let replies =
        [("So.", "0"), ("Sure.", "0"), ("x", "0"), ("Sure!", "0"), ("x", "0"), ("No", "0")];
    let (talk, fake) = (Talk::new(), agent(&replies));
    let (csv, stderr) = talk.run(&fake, &["--sessions", "3", "--seed", "5", "--keep-replies"], 0);
    let seen = chats(&fake);
    let conversations: Vec<_> = seen.iter().map(said).collect();
    assert_eq!(
        conversations,
        [
            vec!["Why?"],
            vec!["Why?", "So.", "Please say sure."],
            vec!["Why?", "So.", "Please say sure.", "Sure.", "Thanks."],
            vec!["Why?"],
            vec!["Why?", "Sure!", "Thanks."],
            vec!["Why?"],
            vec!["Why?", "No", "Please say sure."],
            vec!["Why?", "No", "Please say sure.", "No", "Please say sure."],
        ]
    );
    let ids: Vec<_> = seen.iter().map(|seen| header(seen, "x-session-id").unwrap()).collect();
    assert!(ids[0] == ids[1] && ids[1] == ids[2] && ids[2] != ids[3] && ids[3] == ids[4]);
    let done: Vec<_> = seen.iter().map(|seen| header(seen, "x-session-done").is_some()).collect();
    assert_eq!(done, [false, false, true, false, true, false, false, true]);
    // Nobody reads what is said to the last words.
    let limits: Vec<_> =
        seen.iter().map(|seen| seen.body["max_tokens"].as_u64().unwrap()).collect();
    assert_eq!(limits, [64, 64, 1, 64, 1, 64, 64, 1]);
    let row = |session: &str, told: [&str; 5]| {
        let [obeyed, content, replies, all_tokens, reply] = told;
        json!({"session": session, "question": "Why?", "policy": "0", "obeyed": obeyed, "content": content,
               "replies": replies, "tokens": "7", "all_tokens": all_tokens, "reply": reply})
    };
    assert_eq!(
        rows(&csv),
        [
            row("1", ["false", "true", "2", "14", "So."]),
            row("2", ["true", "true", "1", "7", "Sure!"]),
            row("3", ["false", "false", "2", "14", "No"]),
        ]
    );
    let stderr = words(&stderr);
    for told in [
        "sessions to adapt never within 3",
        "first replies that obeyed 0.33 (1 of 3)",
        "tokens of replies 35",
    ] {
        assert!(stderr.contains(told), "{stderr}");
    }
}

#[test]
fn the_same_seed_says_the_same() {
    let talk = Talk::new();
    let seeds = |seed: &str| {
        let fake = agent(&[("Sure", "0")]);
        talk.run(&fake, &["--sessions", "3", "--seed", seed], 0);
        chats(&fake).iter().map(|seen| seen.body["seed"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    let first = seeds("1");
    assert_eq!(first, seeds("1"));
    assert_ne!(first, seeds("2"));
    assert_eq!(std::collections::BTreeSet::from_iter(&first).len(), 6, "{first:?}");
}

#[test]
fn a_newer_policy_is_waited_for() {
    let talk = Talk::new();
    // Told at the start, two sessions of two requests, then two looks.
    let replies = [
        ("hi", "0"),
        ("Sure", "0"),
        ("x", "0"),
        ("Sure", "0"),
        ("x", "0"),
        ("hi", "0"),
        ("hi", "1"),
        ("Sure", "1"),
    ];
    let fake = agent(&replies);
    let out = talk.folder.path().join("out.csv");
    let more = ["--sessions", "9", "--sessions-per-policy", "2", "--until-adapted", "-o"];
    let more: Vec<&str> = more.into_iter().chain([out.to_str().unwrap()]).collect();
    let (stdout, stderr) = talk.run(&fake, &more, 0);
    assert_eq!(stdout, "");
    let policies: Vec<_> = rows(&std::fs::read_to_string(&out).unwrap())
        .iter()
        .map(|row| row["policy"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(policies, ["0", "0", "1", "1"]);
    assert!(words(&stderr).contains("sessions to adapt 1 (the first of 3 in a row)"), "{stderr}");
    let looks = chats(&fake).into_iter().filter(|seen| header(seen, "x-turn-type") == Some("side"));
    assert_eq!(looks.count(), 3);

    let fake = agent(&[("Sure", "0")]);
    let more = ["--sessions", "2", "--sessions-per-policy", "1", "--policy-timeout", "0"];
    let (_, stderr) = talk.run(&fake, &more, 1);
    assert!(stderr.contains("no newer policy than `0` within 0 s"), "{stderr}");
}

#[test]
fn without_rounds_it_ends_once_the_agent_has_adapted() {
    let talk = Talk::new();
    let fake = agent(&[("So", "0"), ("So", "0"), ("x", "0"), ("Sure", "0")]);
    let (csv, stderr) = talk.run(&fake, &["--sessions", "9", "--until-adapted"], 0);
    let obeyed: Vec<_> = rows(&csv).iter().map(|row| row["obeyed"].clone()).collect();
    assert_eq!(obeyed, ["false", "true", "true", "true"]);
    assert!(words(&stderr).contains("sessions to adapt 2 (the first of 3 in a row)"), "{stderr}");
    // Nobody looks for a newer policy.
    assert!(chats(&fake).iter().all(|seen| header(seen, "x-turn-type").is_none()));
}

#[test]
fn flags_without_an_effect_are_refused() {
    let (talk, fake) = (Talk::new(), agent(&[("Sure", "0")]));
    for (flags, problem) in [
        (&["--policy-timeout", "1s"][..], "--sessions-per-policy"),
        (
            &["--sessions", "4", "--sessions-per-policy", "4"],
            "`--sessions-per-policy 4` of 4 sessions: no newer policy would be met",
        ),
        (&["--base-rates", "--until-adapted"], "--until-adapted"),
    ] {
        let (_, stderr) = talk.run(&fake, flags, 2);
        assert!(stderr.contains(problem), "{flags:?}: {stderr}");
    }
    assert!(chats(&fake).is_empty());
}

#[test]
fn base_rates_compare_bare_and_hinted() {
    let (talk, fake) =
        (Talk::new(), agent(&[("So", "0"), ("Sure", "0"), ("So", "0"), ("So", "0")]));
    let (csv, stderr) = talk.run(&fake, &["--base-rates", "--sessions", "2"], 0);
    let seen = chats(&fake);
    assert_eq!(said(&seen[0]), ["Why?"]);
    assert_eq!(said(&seen[1]), ["Why?\n\n[user's hint / instruction]\nPlease say sure."]);
    assert!(seen.iter().all(|seen| header(seen, "x-turn-type") == Some("side")));
    let told: Vec<_> = rows(&csv)
        .iter()
        .map(|row| {
            format!("{} {} {}", row["number"], row["prompt"], row["obeyed"]).replace('"', "")
        })
        .collect();
    assert_eq!(told, ["1 bare false", "1 hinted true", "2 bare false", "2 hinted false"]);
    let stderr = words(&stderr);
    let expected = "obeyed bare 0.00 (0) obeyed hinted 0.50 (1) room to learn yes";
    assert!(stderr.contains(expected), "{stderr}");
}

#[test]
fn an_engine_can_give_the_person_words() {
    let (talk, fake) = (Talk::new(), agent(&[("So", "0")]));
    let voice = agent(&[(" Say sure, will you? ", "0")]);
    let url = voice.url();
    talk.run(&fake, &["--sessions", "1", "--person-engine", &url], 0);
    let seen = chats(&fake);
    assert_eq!(said(&seen[1]), ["Why?", "So", "Say sure, will you?"]);
    let told = chats(&voice);
    let script = said(&told[0])[0];
    for part in [
        "Say sure.",
        "They asked:\nWhy?",
        "answered:\nSo\n",
        "is not as they want it",
        "- Please say sure.",
    ] {
        assert!(script.contains(part), "{script}");
    }
    let silent = agent(&[(" ", "0")]);
    let url = silent.url();
    let (_, stderr) = talk.run(&fake, &["--sessions", "1", "--person-engine", &url], 4);
    assert!(stderr.contains(&format!("`{url}` gave the person no words")), "{stderr}");
}

#[test]
fn what_cannot_be_used_is_said() {
    let (talk, fake) = (Talk::new(), agent(&[("So", "0")]));
    std::fs::write(&talk.persona, "name = 1").unwrap();
    let (_, stderr) = talk.run(&fake, &[], 2);
    let named = format!("persona `{}`", Path::new(&talk.persona).display());
    assert!(stderr.contains(&named), "{stderr}");
    assert!(chats(&fake).is_empty());
}

#[test]
fn the_figures_of_the_proof_are_right() {
    let test = root().join("scripts/prove/selftest.py");
    let Ok(output) = Command::new("python3").arg("-B").arg(test).output() else {
        println!("scripts/prove: skipped: no python3");
        return;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "the proof's figures agree\n");
}

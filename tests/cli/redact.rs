//! `oclaw redact`: every byte of the output searched for what must not be there.

use std::path::Path;

use oclaw::table::{Format, Provenance, Sink, StageLine, Target, read_turns};
use oclaw::trajectory::{Turn, turn};
use serde_json::json;

use crate::forge::{STAGES, finished, write};
use crate::harness::oclaw;

const MAIL: &str = "bob.smith@example.org";
const PHONE: &str = "+49 151 23456789";
const CARD: &str = "4111 1111 1111 1111";

fn key() -> String {
    format!("sk-{}", "aB3dE6gH9jK2mN5pQ8sT")
}

fn run(folder: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = oclaw().current_dir(folder).arg("redact").args(arguments).output().unwrap();
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// Three rows that tell in every place, one that tells nothing.
fn table(folder: &Path) -> Vec<Turn> {
    let arguments = json!({"token": key(), "to": MAIL}).to_string();
    let call =
        json!([{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]);
    let mut telling = finished("s", 1);
    telling.session_id = MAIL.to_owned();
    telling.messages =
        json!([{"role": "user", "content": format!("pay with {CARD}, call {PHONE}")}]).to_string();
    telling.response =
        json!({"role": "assistant", "content": null, "tool_calls": call}).to_string();
    telling.tools = Some(json!([{"type": "function", "description": MAIL}]).to_string());
    let mut judged = finished("j", 1);
    judged.judge_text = Some(vec![Some(format!("it told {MAIL}")), None, Some(key())]);
    judged.feedback_text = Some(format!("call me: {PHONE}"));
    judged.next_state =
        Some(json!([{"role": "user", "content": format!("I am {MAIL}, of Zebedee")}]).to_string());
    judged.client = Some(MAIL.to_owned());
    let mut hinted = finished("h", 1);
    hinted.hints = Some(vec![MAIL.to_owned(), format!("use {} to log in", key())]);
    let turns = vec![telling, judged, hinted, finished("clean", 1)];
    let batch = turn::batch(&STAGES, &turns).unwrap();
    let line = StageLine {
        command: "serve".to_owned(),
        argv: vec![MAIL.to_owned(), "serve".to_owned()],
        ..StageLine::default()
    };
    let provenance = Provenance { lines: vec![line], ..Provenance::default() };
    let target = Target::Path(folder.join("in.parquet"));
    let mut sink =
        Sink::create(&target, Some(Format::Parquet), batch.schema(), &provenance).unwrap();
    sink.write(&batch).unwrap();
    sink.finish().unwrap();
    turns
}

fn holds(bytes: &[u8], needle: &str) -> bool {
    bytes.windows(needle.len()).any(|window| window == needle.as_bytes())
}

#[test]
fn no_byte_of_it_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let turns = table(folder.path());
    std::fs::write(folder.path().join("own.toml"), "place = 'no such place'\n").unwrap();
    let flags = ["--pattern", "project=Zebedee", "--patterns", "own.toml"];
    for (format, name) in [("ipc", "out.arrow"), ("parquet", "out.parquet")] {
        let arguments = [&["in.parquet", "-o", name, "--format", format][..], &flags].concat();
        let (code, stdout, talk) = run(folder.path(), &arguments);
        assert_eq!((code, stdout.as_str()), (Some(0), ""), "{talk}");
        assert!(
            talk.contains("api_key 2, card 1, email 7, phone 2, project 1, secret 1"),
            "{talk}"
        );
        assert!(talk.contains("2 rows lose their token ids"), "{talk}");
        // A stream is not compressed, so its bytes show all that is in it; of the
        // Parquet file the rows are also read back.
        let bytes = std::fs::read(folder.path().join(name)).unwrap();
        let rows =
            oclaw().current_dir(folder.path()).args(["view", "--json", name]).output().unwrap();
        assert!(rows.status.success());
        for needle in [MAIL, PHONE, CARD, &key(), "Zebedee", "bob.smith", "23456789"] {
            assert!(!holds(&bytes, needle), "{name}: {needle}");
            assert!(!holds(&rows.stdout, needle), "{name}: {needle}");
            assert!(!talk.contains(needle), "{needle}");
        }
        let lint = oclaw().current_dir(folder.path()).args(["lint", name]).output().unwrap();
        assert_eq!(lint.status.code(), Some(0), "{}", String::from_utf8_lossy(&lint.stdout));
        let found = read_turns(&[folder.path().join(name)]).unwrap();
        assert_eq!(found.len(), 4);
        assert_eq!(found[3], turns[3]);
        assert_eq!(found[0].session_id, "[redacted:email#1]");
        assert_eq!(found[1].client.as_deref(), Some("[redacted:email#1]"));
        assert_eq!((&found[0].response_ids, &found[2].response_ids), (&None, &None));
        assert_eq!(found[1].response_ids, turns[1].response_ids);
    }
    let redone = run(folder.path(), &["out.parquet", "-o", "again.parquet"]);
    assert!(redone.2.contains("nothing"), "{}", redone.2);
    let read = |name: &str| read_turns(&[folder.path().join(name)]).unwrap();
    assert_eq!(read("again.parquet"), read("out.parquet"));
}

#[test]
fn a_dry_run_lists_places_not_words() {
    let folder = tempfile::tempdir().unwrap();
    table(folder.path());
    let (code, stdout, talk) = run(folder.path(), &["in.parquet", "--dry-run"]);
    assert_eq!(code, Some(0), "{talk}");
    let place = "in.parquet: row 0 (session [redacted:email#1], turn 1)";
    for line in
        ["messages: card (1)", "messages: phone (1)", "response: secret (1)", "tools: email (1)"]
    {
        assert!(stdout.contains(&format!("{place}: {line}\n")), "{line}: {stdout}");
    }
    for needle in [MAIL, PHONE, CARD, &key()] {
        assert!(!stdout.contains(needle) && !talk.contains(needle), "{needle}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn bad_patterns_are_usage_and_not_repeated() {
    let folder = tempfile::tempdir().unwrap();
    table(folder.path());
    let (code, _, talk) = run(folder.path(), &["in.parquet", "-o", "o", "--pattern", "x=(hunter2"]);
    assert_eq!(code, Some(2), "{talk}");
    assert!(talk.starts_with("oclaw redact: pattern `x`: no regular expression\n"), "{talk}");
    assert!(!talk.contains("hunter2"));
    std::fs::write(folder.path().join("p.toml"), "x = 1\n").unwrap();
    let (code, _, talk) = run(folder.path(), &["in.parquet", "-o", "o", "--patterns", "p.toml"]);
    assert_eq!(code, Some(2), "{talk}");
    assert!(talk.contains("patterns in `p.toml`: `x` is no text"), "{talk}");
}

#[test]
fn what_a_word_before_it_tells() {
    let folder = tempfile::tempdir().unwrap();
    let said = |content: &str| json!([{"role": "user", "content": content}]).to_string();
    let mut telling = finished("a", 1);
    telling.messages = said("tel: 030/1234567, password: hunter2");
    telling.next_state = Some(said("call me at 0171 5556789; passwort=geheim1"));
    telling.feedback_text = Some(r#"{"phone": "030 7654321", "passwort": "blume77"}"#.to_owned());
    let mut plain = finished("b", 1);
    plain.messages = said("the password is required; call me at 10:30; mobile 2019 2020");
    let turns = [telling, plain.clone()];
    write(&folder.path().join("in.parquet"), Format::Parquet, &STAGES, &turns);
    let (code, _, talk) = run(folder.path(), &["in.parquet", "-o", "out.parquet"]);
    assert_eq!(code, Some(0), "{talk}");
    assert!(talk.contains("password 2, phone 3, secret 1"), "{talk}");
    let found = read_turns(&[folder.path().join("out.parquet")]).unwrap();
    let expected = said("tel: [redacted:phone], password: [redacted:password]");
    assert_eq!(found[0].messages, expected);
    let next = said("call me at [redacted:phone]; passwort=[redacted:password]");
    assert_eq!(found[0].next_state.as_deref(), Some(next.as_str()));
    let feedback = r#"{"phone":"[redacted:phone]","passwort":"[redacted:secret]"}"#;
    assert_eq!(found[0].feedback_text.as_deref(), Some(feedback));
    assert_eq!(found[1], plain);
}

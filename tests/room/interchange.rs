//! Recorded chats of other programs: each published shape, and what is wrong with
//! lines.

use oclaw::interchange::{Counts, Imported, Importer};
use oclaw::template::Chat;
use oclaw::trajectory::Turn;
use oclaw::trajectory::lint::Linter;
use oclaw::trajectory::words::{NextStateKind, SessionSource, Status, TokenSource};
use serde_json::{Value, json};

use crate::harness::{fixture, fixture_models as models};

fn lines(importer: &mut Importer, text: &str) -> Vec<(usize, String)> {
    let numbered = text.lines().enumerate().filter(|(_, line)| !line.is_empty());
    let wrong = numbered.filter_map(|(number, line)| {
        importer.line(line.as_bytes()).err().map(|what| (number + 1, what))
    });
    wrong.collect()
}

fn read(name: &str) -> String {
    std::fs::read_to_string(fixture("interchange").join(name)).unwrap()
}

fn import(name: &str, chat: Option<&Chat>) -> Imported {
    let mut importer = Importer::new(None);
    assert_eq!(lines(&mut importer, &read(name)), []);
    let imported = importer.finish(chat);
    sound(&imported.turns);
    imported
}

fn sound(turns: &[Turn]) {
    let mut linter = Linter::default();
    let mut found: Vec<_> = turns.iter().flat_map(|turn| linter.see("imported", 0, turn)).collect();
    found.extend(linter.finish());
    assert_eq!(found, []);
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

fn content(turn: &Turn) -> String {
    json(&turn.response)["content"].as_str().unwrap_or_default().to_owned()
}

/// Number, branch is main, whether it has a parent, what came next, whether it was
/// the last.
fn shape(turn: &Turn) -> (String, u32, bool, NextStateKind, bool) {
    let main = turn.branch == "main";
    (content(turn), turn.turn, main, turn.next_state_kind, turn.session_end)
}

#[test]
fn a_conversation_becomes_a_row_per_answer() {
    let Imported { turns, counts, .. } = import("openai.jsonl", None);
    let expected = [
        ("5".to_owned(), 1, true, NextStateKind::User, false),
        ("Right, 4.".to_owned(), 2, true, NextStateKind::None, true),
        (String::new(), 1, true, NextStateKind::Tool, false),
        ("It rains.".to_owned(), 2, true, NextStateKind::User, true),
    ];
    assert_eq!(turns.iter().map(shape).collect::<Vec<_>>(), expected);
    assert_eq!(counts, Counts { lines: 3, rows: 4, repeated: 1, ..Counts::default() });

    assert_eq!(turns[1].parent_turn_id.as_ref(), Some(&turns[0].turn_id));
    assert_eq!(json(&turns[1].messages).as_array().unwrap().len(), 4);
    assert_eq!(
        turns[0].next_state.as_deref(),
        Some(r#"[{"role":"user","content":"No, it is 4."}]"#)
    );
    assert_eq!(turns[0].session_source, SessionSource::None);
    assert_eq!(turns[0].tools, None);
    assert_eq!(turns[0].created_at.0, 0);
    assert_eq!(turns[0].untrainable_reason.as_deref(), Some("no_token_ids"));
    assert_eq!(turns[0].finish_reason.as_deref(), Some("imported"));

    assert_eq!(
        (turns[2].session_id.as_str(), turns[2].session_source),
        ("paris", SessionSource::Body)
    );
    assert_eq!(turns[2].created_at.0, 1_767_323_045_000_000);
    assert_eq!(json(turns[2].tools.as_ref().unwrap())[0]["function"]["name"], "weather");
    assert_eq!(json(&turns[2].response)["tool_calls"][0]["id"], "call_1");
}

#[test]
fn a_second_import_gives_the_same_ids() {
    let ids = || {
        let turns =
            import("openai.jsonl", None).turns.into_iter().chain(import("pairs.jsonl", None).turns);
        turns.map(|turn| (turn.session_id, turn.turn_id)).collect::<Vec<_>>()
    };
    assert_eq!(ids(), ids());
    let version = |id: &str| uuid::Uuid::parse_str(id).unwrap().get_version_num();
    assert!(ids().iter().all(|(_, id)| version(id) == 7));
}

#[test]
fn logged_requests_are_put_together_to_sessions() {
    let Imported { turns, counts, .. } = import("pairs.jsonl", None);
    let expected = [
        ("Four.".to_owned(), 1, true, NextStateKind::User, false),
        ("Five.".to_owned(), 2, true, NextStateKind::User, false),
        ("Seven, which has".to_owned(), 2, false, NextStateKind::None, false),
        ("Hi.".to_owned(), 1, true, NextStateKind::None, false),
        ("Welcome.".to_owned(), 3, true, NextStateKind::None, false),
    ];
    assert_eq!(turns.iter().map(shape).collect::<Vec<_>>(), expected);
    let wanted =
        Counts { lines: 5, rows: 5, unanswered: 1, log_probs_dropped: 1, ..Counts::default() };
    assert_eq!(counts, wanted);
    assert_eq!(turns[0].session_source, SessionSource::None);
    assert_eq!(turns[1].session_source, SessionSource::Inferred);
    assert_eq!(turns[1].session_id, turns[0].session_id);
    assert_eq!(turns[4].parent_turn_id.as_ref(), Some(&turns[1].turn_id));
    assert_ne!(turns[3].session_id, turns[0].session_id);
    assert_eq!(turns[1].request_id, turns[2].request_id);
    assert_eq!((turns[1].choice, turns[2].choice), (0, 1));
    assert_eq!(turns[2].status, Status::Truncated);
    assert_eq!(turns[0].sampling.temperature, Some(0.5));
    assert_eq!(turns[0].sampling.max_tokens, Some(16));
    assert_eq!(turns[0].created_at.0, 1_764_423_296_000_000);
    assert_eq!(turns[0].model, "gpt-x");
    assert_eq!(turns[0].rollout_log_probs, None);
}

#[test]
fn the_references_record_loses_its_template() {
    let Imported { turns, counts, .. } = import("record.jsonl", None);
    let expected = [
        ("Let me look.".to_owned(), 1, true, NextStateKind::Tool, false),
        ("There is a.txt.".to_owned(), 2, true, NextStateKind::User, false),
        ("Done.".to_owned(), 3, true, NextStateKind::None, true),
        ("Hi!".to_owned(), 1, true, NextStateKind::User, false),
    ];
    assert_eq!(turns.iter().map(shape).collect::<Vec<_>>(), expected);
    assert_eq!(counts, Counts { lines: 4, rows: 4, ..Counts::default() });
    let first = json(&turns[0].response);
    assert_eq!(first["reasoning_content"], "I need ls.");
    assert_eq!(first["tool_calls"][0]["function"]["name"], "exec");
    // The record noted the client's envelope; the next request shows the person.
    let expected = r#"[{"role":"user","content":"Good. Delete it."}]"#;
    assert_eq!(turns[1].next_state.as_deref(), Some(expected));
    assert_eq!(turns[3].next_state.as_deref(), Some(r#"[{"role":"user","content":"Go on."}]"#));
    assert!(turns.iter().all(|turn| turn.session_source == SessionSource::Body));
    assert_eq!(turns[0].created_at.0, 1_773_489_600_000_000);
}

#[test]
fn sharegpt_in_a_list_and_with_tools() {
    let mut importer = Importer::new(None);
    let items: Vec<Value> = serde_json::from_str(&read("sharegpt.json")).unwrap();
    items.iter().for_each(|item| importer.value(item).unwrap());
    let Imported { turns, counts, .. } = importer.finish(None);
    sound(&turns);
    let expected = [
        ("A parrot.".to_owned(), 1, true, NextStateKind::User, false),
        ("I am a language model.".to_owned(), 2, true, NextStateKind::None, true),
        ("One, two.".to_owned(), 1, true, NextStateKind::None, true),
    ];
    assert_eq!(turns.iter().map(shape).collect::<Vec<_>>(), expected);
    assert_eq!(counts, Counts { lines: 2, rows: 3, greetings: 1, ..Counts::default() });
    assert_eq!(turns[0].session_id, "identity_0");
    assert_eq!(json(&turns[2].messages)[0]["content"], "How can I help?");

    let turns = import("sharegpt-tools.jsonl", None).turns;
    let call = json(&turns[0].response);
    let function = json!({"name": "add", "arguments": "{\"a\":2,\"b\":3}"});
    let expected = json!([{"id": "call_1", "type": "function", "function": function}]);
    assert_eq!(call["tool_calls"], expected);
    let observed = json(turns[0].next_state.as_ref().unwrap());
    assert_eq!(observed, json!([{"role": "tool", "content": "5", "tool_call_id": "call_1"}]));
    assert_eq!(json(&turns[1].messages)[0], json!({"role": "system", "content": "You add."}));
    assert_eq!(json(turns[1].tools.as_ref().unwrap())[0]["type"], "function");
}

#[test]
fn a_tokenizer_makes_ids_that_say_so() {
    let chat = Chat::load(&models().join("tiny-qwen3")).unwrap();
    for name in ["openai.jsonl", "pairs.jsonl", "record.jsonl", "sharegpt-tools.jsonl"] {
        let Imported { turns, counts, failure } = import(name, Some(&chat));
        assert_eq!((counts.not_retokenized, failure), (0, None));
        for turn in &turns {
            assert_eq!(turn.token_source, TokenSource::Retokenized, "{name} {}", turn.response);
            assert!(turn.untrainable_reason.is_some());
            let text = chat.tokenizer.decode(turn.response_ids.as_ref().unwrap(), true).unwrap();
            assert!(text.contains(&content(turn)), "{text}");
        }
        assert_eq!(counts.retokenized, turns.len() as u64);
    }
    // The log has two log-probs; this tokenizer makes another number of ids.
    let turns = import("pairs.jsonl", Some(&chat)).turns;
    let ids = turns[0].response_ids.as_ref().unwrap().len();
    assert_ne!(ids, 2);
    assert_eq!(turns[0].rollout_log_probs, None);
    assert_eq!(turns[0].untrainable_reason.as_deref(), Some("log_probs_misaligned"));

    let tokens: Vec<_> = (0..ids).map(|_| json!({"token": "?", "logprob": -0.5})).collect();
    let mut line: Value = json(read("pairs.jsonl").lines().next().unwrap());
    line["response"]["choices"][0]["logprobs"]["content"] = tokens.into();
    let mut importer = Importer::new(None);
    importer.value(&line).unwrap();
    let turns = importer.finish(Some(&chat)).turns;
    sound(&turns);
    assert_eq!(turns[0].rollout_log_probs, Some(vec![Some(-0.5); ids]));
    assert_eq!(turns[0].untrainable_reason.as_deref(), Some("retokenized"));
}

#[test]
fn every_malformed_line_says_what_is_wrong() {
    let mut importer = Importer::new(None);
    let found = lines(&mut importer, &read("malformed.jsonl"));
    let expected = [
        (2, "no JSON: EOF while parsing a string at column 46"),
        (3, "`messages` is empty"),
        (4, "`messages` is no list"),
        (5, "no message of an assistant"),
        (6, "`messages[0]`: unknown role `robot`"),
        (7, "`messages[0]`: no role"),
        (8, "`messages[0]`: `content` is neither text nor a list of parts"),
        (9, "`messages[1]`: an assistant's message with neither content nor tool calls"),
        (10, "`tools`: EOF while parsing an object at line 1 column 2"),
        (11, "a `request` without a `response`"),
        (12, "`temperature` is -1"),
        (13, "`choices[0]`: no message (a chunk of a stream?)"),
        (14, "the response has no list of `choices`"),
        (15, "`conversations` is empty"),
        (16, "nothing is from an assistant"),
        (17, "`conversations[0]`: unknown speaker `alien`"),
        (18, "`conversations[0]`: its `value` is no text"),
        (19, "`conversations[1]`: the call is no JSON: expected value at line 1 column 1"),
        (20, "a judge's record, which holds no turn"),
        (21, "`turn` is no number from 1"),
        (22, "`response_text` is no text"),
        (23, "`next_state`: no object"),
        (24, "none of the shapes `openai`, `openclaw-rl` and `sharegpt`"),
        (25, "no JSON object"),
    ];
    let expected: Vec<_> = expected.map(|(line, what)| (line, what.to_owned())).into();
    assert_eq!(found, expected);
    assert_eq!(importer.finish(None).turns.len(), 1);
}

#[test]
fn half_characters_are_replaced_and_counted() {
    let mut importer = Importer::new(None);
    let bytes = std::fs::read(fixture("interchange").join("replaced.jsonl")).unwrap();
    importer.line(bytes.trim_ascii()).unwrap();
    let Imported { turns, counts, .. } = importer.finish(None);
    assert_eq!(counts.repaired, 1);
    assert_eq!(content(&turns[0]), "half \u{fffd}");
}

/// As live: the first that goes on with a turn keeps its branch, another one gets
/// its own.
#[test]
fn conversations_that_part_are_on_branches_of_their_own() {
    let line = |said: &[&str]| {
        let role = |index: usize| if index.is_multiple_of(2) { "user" } else { "assistant" };
        let messages = said.iter().enumerate();
        let messages: Vec<_> =
            messages.map(|(index, text)| json!({"role": role(index), "content": text})).collect();
        json!({"session_id": "s", "messages": messages})
    };
    let mut importer = Importer::new(None);
    for said in [
        &["a", "A", "b", "B"][..],
        &["a", "A", "c", "C", "d", "D"],
        &["a", "A", "b", "B", "e", "E"],
    ] {
        importer.value(&line(said)).unwrap();
    }
    let Imported { turns, counts, .. } = importer.finish(None);
    sound(&turns);
    assert_eq!((counts.rows, counts.repeated), (5, 3));
    let found: Vec<_> =
        turns.iter().map(|turn| (content(turn), turn.turn, turn.branch.as_str())).collect();
    let own = &turns[2].turn_id[turns[2].turn_id.len() - 12..];
    let expected =
        [("A", 1, "main"), ("B", 2, "main"), ("C", 2, own), ("D", 3, own), ("E", 3, "main")];
    assert_eq!(found, expected.map(|(text, turn, branch)| (text.to_owned(), turn, branch)));
}

#[test]
fn log_probs_with_a_gap_are_dropped_and_counted() {
    let dropped = |log_probs: Value| {
        let mut line: Value = json(read("pairs.jsonl").lines().next().unwrap());
        line["response"]["choices"][0]["logprobs"] = log_probs;
        let mut importer = Importer::new(None);
        importer.value(&line).unwrap();
        importer.finish(None).counts.log_probs_dropped
    };
    assert_eq!(dropped(json!({"content": [{"logprob": -0.5}, {"token": "."}]})), 1);
    assert_eq!(dropped(json!({"content": [{"logprob": -0.5}, {"logprob": null}]})), 1);
    assert_eq!(dropped(json!({"content": [{"logprob": -0.5}, {"logprob": -1}]})), 1);
    assert_eq!(dropped(json!({"content": null})), 0);
    assert_eq!(dropped(Value::Null), 0);
}

#[test]
fn rows_that_no_template_takes_say_why() {
    let chat = Chat::load(&models().join("tiny-qwen3")).unwrap();
    let mut importer = Importer::new(None);
    let picture = json!([{"type": "image_url", "image_url": {"url": "x"}}]);
    for content in [json!("What is it?"), picture] {
        let user = json!({"role": "user", "content": content});
        let answer = json!({"role": "assistant", "content": "A dog."});
        importer.value(&json!({"messages": [user, answer]})).unwrap();
    }
    let Imported { turns, counts, failure } = importer.finish(Some(&chat));
    assert_eq!((counts.retokenized, counts.not_retokenized), (1, 1));
    assert_eq!(turns[1].untrainable_reason.as_deref(), Some("template_failed"));
    let expected = "unsupported content: a part of type `image_url` is no text";
    assert_eq!(failure.as_deref(), Some(expected));
}

//! Which turn a request follows.

use std::collections::BTreeMap;

use oclaw::session::identity::{is_envelope, without_envelope};
use oclaw::session::{Arrival, Closed, Counted, History, Incoming, Key, Limits, Source, Tracker};
use serde_json::{Value, json};

const MINUTE: i64 = 60_000_000;

/// A tracker with a clock and a client.
struct Talk {
    tracker: Tracker,
    now: i64,
    requests: usize,
    /// Next state of each turn that has one.
    next: BTreeMap<String, Vec<Value>>,
    closed: Vec<Closed>,
}

#[derive(Clone, Default)]
struct Who {
    session: Option<(String, Source)>,
    client: Option<String>,
    address: Option<String>,
    done: bool,
}

fn limits() -> Limits {
    Limits {
        idle: 30 * MINUTE,
        retention: 720 * MINUTE,
        turns: 1000,
        open: 100_000,
        open_bytes: usize::MAX,
    }
}

impl Talk {
    fn new() -> Self {
        let limits = limits();
        Self {
            tracker: Tracker::new(limits),
            now: 0,
            requests: 0,
            next: BTreeMap::new(),
            closed: Vec::new(),
        }
    }

    fn ask(&mut self, who: &Who, messages: &Value) -> Arrival {
        self.now += 1_000_000;
        let id = format!("request-{}", self.requests);
        self.requests += 1;
        let messages = messages.as_array().unwrap();
        let arrival = self.tracker.arrive(&Incoming {
            id,
            messages,
            history: &History::read(messages),
            session: who.session.clone(),
            client: who.client.clone(),
            address: who.address.clone(),
            done: who.done,
            resent: false,
            at: self.now,
        });
        if let Some(extended) = &arrival.extended {
            let before = self.next.insert(extended.turn_id.clone(), extended.next_state.clone());
            assert_eq!(before, None, "a turn gets one next state");
        }
        arrival
    }

    fn answer(&mut self, arrival: &Arrival, response: &Value) -> String {
        self.now += 1_000_000;
        let known = self.tracker.answer(&arrival.id, 0, &arrival.id, (response, self.now));
        self.closed.extend(self.tracker.finish(&arrival.id, known.is_some(), self.now));
        arrival.id.clone()
    }

    fn turn(&mut self, who: &Who, messages: &Value, answer: &str) -> Arrival {
        let arrival = self.ask(who, messages);
        self.answer(&arrival, &said(answer));
        arrival
    }

    fn next_of(&self, arrival: &Arrival) -> Option<String> {
        let messages = self.next.get(&arrival.id)?;
        let text = |message: &Value| message["content"].as_str().unwrap_or("?").to_owned();
        Some(messages.iter().map(text).collect::<Vec<_>>().join("|"))
    }
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn said(text: &str) -> Value {
    json!({"role": "assistant", "content": text})
}

fn named(session: &str) -> Who {
    Who { session: Some((session.to_owned(), Source::Header)), ..Who::default() }
}

#[test]
fn a_conversation_pairs_each_answer_with_what_came_next() {
    for who in [named("s"), Who::default()] {
        let mut talk = Talk::new();
        let first = talk.turn(&who, &json!([user("1")]), "a1");
        let second = talk.turn(&who, &json!([user("1"), said("a1"), user("2")]), "a2");
        let messages = json!([user("1"), said("a1"), user("2"), said("a2"), user("3")]);
        let third = talk.turn(&who, &messages, "a3");
        assert_eq!(talk.next_of(&first).as_deref(), Some("2"));
        assert_eq!(talk.next_of(&second).as_deref(), Some("3"));
        assert_eq!(talk.next_of(&third), None);
        assert_eq!((first.turn, second.turn, third.turn), (1, 2, 3));
        assert_eq!(third.parent.as_deref(), Some(second.id.as_str()));
        assert_eq!([&first.branch, &second.branch, &third.branch], ["main", "main", "main"]);
        assert_eq!(first.session_id, third.session_id);
    }
}

#[test]
fn the_client_may_write_the_same_history_in_its_own_way() {
    let call = |id: &str, arguments: Value| json!({"id": id, "type": "function", "function": {"name": "ls", "arguments": arguments}});
    let answer = json!({"role": "assistant", "content": null, "reasoning_content": "hm",
        "tool_calls": [call("call_a1_2", json!("{\"path\": \".\", \"all\": true}"))]});
    let histories = [
        json!({"role": "assistant", "content": "", "tool_calls": [call("calla12", json!("{\"all\":true,\"path\":\".\"}"))]}),
        json!({"role": "assistant", "tool_calls": [call("call-a1-2", json!({"path": ".", "all": true}))], "reasoning": "other"}),
    ];
    for history in histories {
        let mut talk = Talk::new();
        let first = talk.ask(&Who::default(), &json!([
            {"role": "system", "content": "one"}, {"role": "user", "content": [{"type": "text", "text": " look "}]}]));
        talk.answer(&first, &answer);
        let result = json!({"role": "tool", "tool_call_id": "calla12", "content": "x"});
        let again = talk.ask(
            &Who::default(),
            &json!([
            {"role": "developer", "content": "two"}, user("look"), history, result]),
        );
        assert_eq!(again.parent.as_deref(), Some(first.id.as_str()));
        assert!(again.extended.as_ref().unwrap().tool);
        // Another system prompt lowers the confidence, no more.
        assert!(again.confidence < 0.9 && again.confidence > 0.5, "{}", again.confidence);
        assert_eq!(talk.next[&first.id], [result]);
    }
}

#[test]
fn thoughts_in_the_text_do_not_count() {
    let mut talk = Talk::new();
    let first = talk.turn(&Who::default(), &json!([user("q")]), "<think>\nhm\n</think>\n\nfour");
    talk.turn(&Who::default(), &json!([user("q"), said("four"), user("ok")]), "x");
    assert_eq!(talk.next_of(&first).as_deref(), Some("ok"));
}

#[test]
fn all_tool_results_are_one_next_state() {
    let mut talk = Talk::new();
    let who = named("s");
    let call = |id: &str| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let answer =
        json!({"role": "assistant", "content": null, "tool_calls": [call("a"), call("b")]});
    let first = talk.ask(&who, &json!([user("do")]));
    talk.answer(&first, &answer);
    let results = [
        json!({"role": "tool", "tool_call_id": "a", "content": "ERROR: no such file"}),
        json!({"role": "tool", "tool_call_id": "b", "content": "ok"}),
    ];
    talk.ask(&who, &json!([user("do"), answer, results[0], results[1]]));
    assert_eq!(talk.next[&first.id], results);
}

#[test]
fn an_edit_or_a_regeneration_is_a_branch_and_no_feedback() {
    let mut talk = Talk::new();
    let who = named("s");
    let first = talk.turn(&who, &json!([user("1")]), "a1");
    let second = talk.turn(&who, &json!([user("1"), said("a1"), user("2")]), "a2");
    // The same list again: a retry.
    let retry = talk.turn(&who, &json!([user("1"), said("a1"), user("2")]), "a2 again");
    // Message 2 edited.
    let edit = talk.turn(&who, &json!([user("1"), said("a1"), user("2 better")]), "a2 better");
    assert_eq!(talk.next_of(&first).as_deref(), Some("2"));
    assert_eq!((talk.next_of(&second), talk.next_of(&retry)), (None, None));
    assert_eq!((second.turn, retry.turn, edit.turn), (2, 2, 2));
    assert_eq!(edit.counted, Some(Counted::Again));
    let branches = [&second.branch, &retry.branch, &edit.branch];
    assert_eq!(branches[0], "main");
    assert!(branches[0] != branches[1] && branches[1] != branches[2], "{branches:?}");
    // The conversation goes on from the retry.
    let messages = json!([user("1"), said("a1"), user("2"), said("a2 again"), user("3")]);
    let third = talk.turn(&who, &messages, "a3");
    assert_eq!(third.parent.as_deref(), Some(retry.id.as_str()));
    assert_eq!(third.branch, retry.branch);
    assert_eq!(talk.next_of(&second), None);
}

#[test]
fn a_compacted_history_judges_nobody() {
    let mut talk = Talk::new();
    let who = named("s");
    let first = talk.turn(&who, &json!([user("1")]), "a1");
    let compacted = talk.turn(&who, &json!([user("summary of all that"), user("2")]), "a2");
    assert_eq!(talk.next_of(&first), None);
    assert_eq!((compacted.turn, compacted.parent.as_deref()), (1, None));
    assert_ne!(compacted.branch, first.branch);
    assert_eq!(compacted.session_id, "s");
}

#[test]
fn parallel_requests_keep_their_own_followers() {
    let mut talk = Talk::new();
    let who = named("s");
    let slow = talk.ask(&who, &json!([user("slow")]));
    let fast = talk.turn(&who, &json!([user("fast")]), "f");
    talk.answer(&slow, &said("s"));
    talk.turn(&who, &json!([user("slow"), said("s"), user("go on")]), "x");
    assert_eq!(talk.next_of(&slow).as_deref(), Some("go on"));
    assert_eq!(talk.next_of(&fast), None);
}

#[test]
fn strangers_are_never_judged_against_each_other() {
    let at = |address: &str| Who { address: Some(address.to_owned()), ..Who::default() };
    let keyed = |client: &str| Who { client: Some(client.to_owned()), ..Who::default() };
    let hello = json!([user("Hi")]);
    let thanks = json!([user("Hi"), said("Hello!"), user("thanks")]);
    // Two addresses: each its own.
    let mut talk = Talk::new();
    let (a, b) = (at("10.0.0.1"), at("10.0.0.2"));
    let (first, other) = (talk.turn(&a, &hello, "Hello!"), talk.turn(&b, &hello, "Hello!"));
    assert_ne!(first.session_id, other.session_id);
    let next = talk.turn(&b, &thanks, "x");
    assert_eq!(next.session_id, other.session_id);
    assert_eq!(talk.next_of(&first), None);
    // One address for both: nobody knows, so nobody is judged.
    let mut talk = Talk::new();
    let (first, other) = (talk.turn(&a, &hello, "Hello!"), talk.turn(&a, &hello, "Hello!"));
    let next = talk.turn(&a, &thanks, "x");
    assert_eq!(next.counted, Some(Counted::Ambiguous));
    assert_eq!((talk.next_of(&first), talk.next_of(&other)), (None, None));
    assert_ne!(next.session_id, first.session_id);
    // Another person's key never goes on with a turn.
    let mut talk = Talk::new();
    let first = talk.turn(&keyed("ann"), &hello, "Hello!");
    let next = talk.turn(&keyed("bob"), &thanks, "x");
    assert_eq!((talk.next_of(&first), next.source), (None, Source::None));
    // A stated session is not searched by people without one.
    let mut talk = Talk::new();
    let first = talk.turn(&named("s"), &hello, "Hello!");
    talk.turn(&Who::default(), &thanks, "x");
    assert_eq!(talk.next_of(&first), None);
}

#[test]
fn empty_answers_shift_nothing() {
    let mut talk = Talk::new();
    let who = named("s");
    let first = talk.turn(&who, &json!([user("1")]), "a1");
    let empty = talk.turn(&who, &json!([user("1"), said("a1"), user("2")]), "");
    assert_eq!(talk.next_of(&first).as_deref(), Some("2"));
    for messages in [
        json!([user("1"), said("a1"), user("2"), said(""), user("3")]),
        json!([user("1"), said("a1"), user("2"), user("3")]),
    ] {
        let third = talk.turn(&who, &messages, "a3");
        assert_eq!((third.turn, third.parent.as_deref()), (2, Some(first.id.as_str())));
    }
    assert_eq!(talk.next_of(&empty), None);
}

#[test]
fn idle_sessions_end_and_may_go_on_late() {
    let mut talk = Talk::new();
    let who = named("s");
    let first = talk.turn(&who, &json!([user("1")]), "a1");
    assert_eq!(talk.tracker.expire(talk.now + 29 * MINUTE), []);
    let closed = talk.tracker.expire(talk.now + 31 * MINUTE);
    assert_eq!(closed, [Closed { turn_id: first.id.clone(), session_end: true }]);
    let late = talk.ask(&who, &json!([user("1"), said("a1"), user("2")]));
    assert_eq!((late.counted, late.extended.is_none()), (Some(Counted::Late), true));
    assert_eq!((late.turn, late.branch.as_str()), (2, "main"));
    // An answer on its way keeps its session.
    assert_eq!(talk.tracker.expire(talk.now + 600 * MINUTE), []);
}

#[test]
fn a_session_that_is_done_closes_what_is_open() {
    let mut talk = Talk::new();
    let who = named("s");
    let first = talk.turn(&who, &json!([user("1")]), "a1");
    let done = Who { done: true, ..who.clone() };
    let last = talk.turn(&done, &json!([user("1"), said("a1"), user("bye")]), "bye");
    assert_eq!(talk.next_of(&first).as_deref(), Some("bye"));
    assert_eq!(talk.closed, [Closed { turn_id: last.id, session_end: true }]);
    // Done with an empty answer: the session is closed all the same.
    let mut talk = Talk::new();
    let first = talk.turn(&who, &json!([user("1")]), "a1");
    talk.turn(&done, &json!([user("new")]), "");
    assert_eq!(talk.closed, [Closed { turn_id: first.id, session_end: true }]);
    // The same, but it went on with the turn before, which thereby is the last.
    let mut talk = Talk::new();
    let first = talk.turn(&who, &json!([user("1")]), "a1");
    talk.turn(&done, &json!([user("1"), said("a1"), user("bye")]), "");
    assert_eq!(talk.next_of(&first).as_deref(), Some("bye"));
    assert_eq!(talk.closed, [Closed { turn_id: first.id, session_end: true }]);
    // A side request says that it is over while an answer is on its way.
    let mut talk = Talk::new();
    talk.turn(&who, &json!([user("1")]), "a1");
    let last = talk.ask(&who, &json!([user("1"), said("a1"), user("2")]));
    assert_eq!(talk.tracker.end_session("s"), []);
    talk.answer(&last, &said("a2"));
    assert_eq!(talk.tracker.end_session("s"), [Closed { turn_id: last.id, session_end: true }]);
    // The id is used again.
    let again = talk.turn(&who, &json!([user("1")]), "a1");
    assert_ne!(again.branch, "main");
}

#[test]
fn memory_levels_off() {
    let mut talk = Talk::new();
    for number in 0..5_000 {
        talk.turn(&Who::default(), &json!([user(&format!("hello {number}"))]), "hi");
        talk.now += MINUTE;
        if number % 50 == 0 {
            talk.closed.extend(talk.tracker.expire(talk.now));
        }
    }
    talk.closed.extend(talk.tracker.expire(talk.now + 31 * MINUTE));
    assert_eq!(talk.closed.len(), 5_000);
    assert_eq!(talk.tracker.open(), 0);
    let text = format!("{:?}", talk.tracker);
    assert!(text.matches("hello").count() == 0 && text.len() < 2_000_000, "{}", text.len());
}

#[test]
fn too_many_open_turns_do_not_wait_any_longer() {
    let mut talk = Talk::new();
    talk.tracker = Tracker::new(Limits { open: 10, open_bytes: 1000, ..limits() });
    let ask = |talk: &mut Talk, number: usize, bytes: usize| {
        let turn =
            talk.turn(&named(&format!("s{number}")), &json!([user(&number.to_string())]), "hi");
        talk.tracker.weigh(&turn.id, bytes);
        turn
    };
    let first: Vec<_> = (0..10).map(|number| ask(&mut talk, number, 1)).collect();
    assert_eq!(talk.tracker.expire(talk.now), []);
    ask(&mut talk, 10, 1);
    // The oldest two make room; their sessions are not over.
    let closed = talk.tracker.expire(talk.now);
    let early = |turn: &Arrival| Closed { turn_id: turn.id.clone(), session_end: false };
    assert_eq!(closed, [early(&first[0]), early(&first[1])]);
    assert_eq!((talk.tracker.open(), talk.tracker.hurried()), (9, 2));
    // One large one is as much as many small ones.
    let large = ask(&mut talk, 11, 1001);
    let closed = talk.tracker.expire(talk.now);
    assert_eq!((closed.len(), closed.last()), (10, Some(&early(&large))));
    assert_eq!((talk.tracker.open(), talk.tracker.hurried()), (0, 12));
    // What comes later is late, and goes on with the session.
    let later = json!([user("0"), said("hi"), user("more")]);
    let next = talk.ask(&named("s0"), &later);
    assert_eq!((next.turn, next.counted), (2, Some(Counted::Late)));
}

#[test]
fn sessions_of_which_nothing_was_recorded_are_forgotten() {
    let mut talk = Talk::new();
    for number in 0..1_500 {
        let arrival = talk.ask(&named(&format!("s{number}")), &json!([user("x")]));
        talk.tracker.finish(&arrival.id, false, talk.now);
    }
    talk.tracker.expire(talk.now);
    let text = format!("{:?}", talk.tracker);
    assert!(text.len() < 1_000 && !text.contains("\"s1\""), "{}", text.len());
}

#[test]
fn envelopes_are_no_messages() {
    let envelope =
        "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nsecret\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>";
    assert!(is_envelope(&user(envelope)));
    assert!(is_envelope(&json!({"role": "user", "content": [{"type": "text", "text": envelope}]})));
    assert!(!is_envelope(&user("hello")) && !is_envelope(&user("")));
    let mixed = user(&format!("hello\n\n{envelope}"));
    assert_eq!(without_envelope(&mixed), Some(user("hello")));
    let parts = json!({"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": envelope}]});
    assert_eq!(
        without_envelope(&parts).unwrap()["content"],
        json!([{"type": "text", "text": "hello"}])
    );
}

#[test]
fn keys_survive_being_written() {
    let history = History::read(&[user("x")]);
    let key = history.key();
    assert_eq!(Key::parse(&key.to_string()), Some(key));
    assert_ne!(key, Key::default());
    assert_eq!(Key::parse("nonsense"), None);
}

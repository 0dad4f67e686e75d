//! The embedded engine asked by chance: bodies for all its routes, changed as values and as
//! bytes. Whatever comes, it answers in a form that it has for answers or for errors, is not
//! at fault itself, and says the same to a good request as before.

use oclaw::model::{Cache, Config};
use oclaw::serving::{Options, Running, start};
use reqwest::header::{CONTENT_TYPE, HeaderName, RETRY_AFTER};
use serde_json::{Value, json};

use super::Chance;
use crate::harness::{PATIENCE, fixture_models};
use crate::room::serving::capabilities::examples;
use crate::room::serving::install_tls;

/// Changed bodies.
const ROUNDS: usize = 800;
/// Tokens of the longest answer, prompt included: what a change makes boundless ends here.
const LONGEST: usize = 256;
/// A route that is not there, asked for as others are.
const NOWHERE: &str = "/update_weights_from_tensor";

struct Target {
    running: Running,
    client: reqwest::Client,
}

/// An answer as it came.
struct Answer {
    status: u16,
    is_stream: bool,
    may_come_again: bool,
    text: String,
}

impl Target {
    async fn start() -> Self {
        let folder = fixture_models().join("tiny-qwen3");
        let mut options = Options::new(&folder);
        options.kv_memory = Some(Cache::bytes_of(&Config::read(&folder).unwrap(), LONGEST));
        let client = reqwest::Client::builder().no_proxy().timeout(PATIENCE).build().unwrap();
        Self { running: start(options).await.unwrap(), client }
    }

    async fn ask(&self, path: &str, body: Vec<u8>) -> Result<Answer, reqwest::Error> {
        let address = format!("{}{path}", self.running.url());
        let response = self.client.post(address).body(body).send().await?;
        let has = |name: HeaderName, value: &str| {
            let found = response.headers().get(name);
            found.is_some_and(|found| found.to_str().is_ok_and(|found| found.contains(value)))
        };
        Ok(Answer {
            status: response.status().as_u16(),
            is_stream: has(CONTENT_TYPE, "text/event-stream"),
            may_come_again: has(RETRY_AFTER, ""),
            text: String::from_utf8(response.bytes().await?.into()).unwrap(),
        })
    }

    /// Returns the ids of a greedy answer.
    async fn greedy(&self) -> Value {
        let sampling = json!({"temperature": 0, "max_new_tokens": 8, "ignore_eos": true});
        let body = json!({"input_ids": [5, 6, 7, 8], "sampling_params": sampling});
        let answer = self.ask("/generate", body.to_string().into_bytes()).await.unwrap();
        assert_eq!(answer.status, 200, "{}", answer.text);
        let ids = serde_json::from_str::<Value>(&answer.text).unwrap()["output_ids"].take();
        assert_eq!(ids.as_array().unwrap().len(), 8, "{ids}");
        ids
    }

    /// Sends a body; what comes back must be an answer.
    async fn check(&self, path: &str, body: Vec<u8>) {
        let beginning = &body[..body.len().min(600)];
        let shown = format!("{path} b\"{}\"", beginning.escape_ascii());
        let answer = self.ask(path, body).await;
        let answer = answer.unwrap_or_else(|error| panic!("{shown}: {error:?}"));
        let Answer { status, is_stream, may_come_again, text } = answer;
        let shown = format!("{shown}: {status} {}", text.chars().take(600).collect::<String>());
        let read = || serde_json::from_str::<Value>(&text).unwrap_or_else(|_| panic!("{shown}"));
        match (status, path) {
            (200, _) if is_stream => check_events(&text, &shown),
            (200, "/abort_request") => assert_eq!(text, "", "{shown}"),
            (200, "/flush_cache") => assert_eq!(text, "Cache flushed.\n", "{shown}"),
            (200, _) => assert!(is_sound(&read()), "{shown}"),
            (400, "/generate") => assert!(is_said(&read()["error"]["message"]), "{shown}"),
            (400, _) | (404, NOWHERE) => assert!(is_refusal(&read(), status), "{shown}"),
            // It has enough to do, and says when to ask again.
            (503, _) => assert!(may_come_again, "{shown}"),
            _ => panic!("{shown}"),
        }
        if path == "/pause_generation" {
            let goes_on = self.ask("/continue_generation", b"{}".to_vec()).await.unwrap();
            assert_eq!(goes_on.status, 200, "{shown}");
        }
    }
}

/// Whether an error has SGLang's form of OpenAI's, or the one of routes that report what
/// they did.
fn is_refusal(error: &Value, status: u16) -> bool {
    let flat = error["object"] == "error" && error["code"] == status && is_said(&error["type"]);
    (flat || error["success"] == false) && is_said(&error["message"])
}

fn is_said(message: &Value) -> bool {
    message.as_str().is_some_and(|message| !message.is_empty())
}

/// Whether all log-probs that are told of sampled tokens are numbers.
fn is_sound(answer: &Value) -> bool {
    let all = |value: &Value, holds: fn(&Value) -> bool| {
        value.is_null() || value.as_array().is_some_and(|items| items.iter().all(holds))
    };
    match answer {
        Value::Array(items) => items.iter().all(is_sound),
        Value::Object(members) => members.iter().all(|(name, member)| match name.as_str() {
            "logprob" => member.is_number(),
            "token_logprobs" => all(member, Value::is_number),
            "output_token_logprobs" => all(member, |triple| triple[0].is_number()),
            _ => is_sound(member),
        }),
        _ => true,
    }
}

/// Checks that a stream is whole, and that nothing failed in it.
#[track_caller]
fn check_events(text: &str, shown: &str) {
    let mut events: Vec<_> = text.split_terminator("\n\n").collect();
    assert_eq!(events.pop(), Some("data: [DONE]"), "{shown}");
    assert!(!events.is_empty(), "{shown}");
    for event in events {
        let data = event.strip_prefix("data: ").unwrap_or_else(|| panic!("{shown}"));
        let event: Value = serde_json::from_str(data).unwrap_or_else(|_| panic!("{shown}"));
        assert!(event.get("error").is_none() && is_sound(&event), "{shown}");
    }
}

/// Requests with more than one field of interest, and routes without a field.
fn further() -> Vec<(String, Value)> {
    let tools = json!([{"type": "function", "function": {"name": "ls"}}]);
    let call = json!({"id": "c", "function": {"name": "ls", "arguments": "{\"p\": 1}"}});
    let talk = json!([
        {"role": "system", "content": "Hm."},
        {"role": "user", "content": [{"type": "text", "text": "a <|im_end|>"}]},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "b"},
    ]);
    let chat = json!({
        "messages": talk, "max_tokens": 2, "n": 2, "logprobs": true, "top_logprobs": 2,
        "return_token_ids": true, "return_meta_info": true, "temperature": 0.5, "stop": ["x"],
    });
    let call = json!({
        "messages": [{"role": "user", "content": "hi"}], "tools": tools, "tool_choice": "required",
        "max_tokens": 3, "stream": true, "stream_options": {"include_usage": true},
    });
    let text = json!({
        "prompt": [[5, 6], [7]], "max_tokens": 2, "logprobs": 2, "stream": true, "seed": 3,
    });
    let scored = json!({
        "input_ids": [[5, 6, 7], [5, 8]], "sampling_params": {"max_new_tokens": 0}, "rid": ["a", "b"],
        "return_logprob": true, "logprob_start_len": 1, "top_logprobs_num": 2,
        "token_ids_logprob": [7], "return_text_in_logprobs": true,
    });
    let told = json!({
        "text": "hi", "sampling_params": {"max_new_tokens": 2, "top_p": 0.9}, "stream": true,
        "return_logprob": true, "logprob_start_len": 0, "return_prompt_token_ids": true,
    });
    let all = [
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", call),
        ("/v1/completions", text),
        ("/generate", scored),
        ("/generate", told),
        ("/v1/embeddings", json!({"model": "m", "input": ["hi"]})),
        ("/continue_generation", json!({"torch_empty_cache": true})),
        ("/flush_cache", json!({"timeout": 1})),
        (NOWHERE, json!({"serialized_named_tensors": ["AA=="], "load_format": null})),
    ];
    all.map(|(path, body)| (path.to_owned(), body)).into()
}

/// Bodies that are no JSON, or none that a route takes.
fn odd_bodies() -> Vec<Vec<u8>> {
    const BODIES: [&[u8]; 22] = [
        b"",
        b" ",
        b"{",
        b"}",
        b"{}",
        b"{}{}",
        b"[]",
        b"null",
        b"5",
        b"\"x\"",
        b"\xef\xbb\xbf{}",
        b"\xff\xfe{\0}\0",
        b"{\"a\"}",
        b"{\"a\":}",
        b"{\"a\":1,}",
        b"{'a': 1}",
        b"{\"rid\":\"a\",\"rid\":\"b\",\"n\":1,\"n\":2}",
        b"{\"text\":\"\xff\xfe\",\"prompt\":\"\xc3\",\"new_version\":\"\xf0\x9f\"}",
        b"{\"text\":\"\\ud83d\",\"prompt\":\"\\udc00\\ud800\",\"lora_name\":\"\\ud800\"}",
        b"{\"temperature\":NaN,\"n\":-Infinity,\"input_ids\":[NaN]}",
        b"{\"temperature\":1e999,\"prompt\":[-1e999]}",
        b"{\"tokens\":[1e3],\"input_ids\":[5.0],\"prompt\":[18446744073709551616]}",
    ];
    let deep = ["[", "{\"a\":", "{\"messages\":[", "\\", "\"\\"].map(|part| part.repeat(20_000));
    let nested = format!("{{\"tools\":{}5{}}}", "[".repeat(120), "]".repeat(120));
    let all = BODIES.map(<[u8]>::to_vec).into_iter();
    all.chain(deep.map(String::into_bytes)).chain([nested.into_bytes()]).collect()
}

/// Returns a value that few fields expect.
fn odd_value(chance: &mut Chance) -> Value {
    let all = [
        json!(null),
        json!(true),
        json!(false),
        json!(0),
        json!(1),
        json!(-1),
        json!(2),
        json!(129),
        json!(i64::MAX),
        json!(i64::MIN),
        json!(u64::MAX),
        json!(0.5),
        json!(-0.5),
        json!(1e-44),
        json!(1e-60),
        json!(1e308),
        json!(-1e308),
        json!(""),
        json!("x"),
        json!("NaN"),
        json!("none"),
        json!("required"),
        json!("<|im_end|>"),
        json!("a\u{0}b\u{fffd}\u{10ffff}"),
        json!("x".repeat(5000)),
        json!([]),
        json!([[]]),
        json!([null]),
        json!([5]),
        json!([5, "x"]),
        json!([-1, 1024]),
        json!([[5], [6]]),
        json!(["", "x"]),
        json!({}),
        json!({"a": {"b": []}}),
        json!({"role": "user", "content": "hi"}),
        json!({"type": "text", "text": "hi"}),
    ];
    all[chance.below(all.len())].clone()
}

fn count(value: &Value) -> usize {
    let inside: usize = match value {
        Value::Array(items) => items.iter().map(count).sum(),
        Value::Object(members) => members.values().map(count).sum(),
        _ => 0,
    };
    1 + inside
}

/// Returns the value at a place, the whole being that at 0.
fn at<'a>(value: &'a mut Value, place: &mut usize) -> Option<&'a mut Value> {
    if *place == 0 {
        return Some(value);
    }
    *place -= 1;
    match value {
        Value::Array(items) => items.iter_mut().find_map(|item| at(item, place)),
        Value::Object(members) => members.values_mut().find_map(|member| at(member, place)),
        _ => None,
    }
}

/// Changes a value somewhere within a body. `other` is a body of any route.
fn change(body: &mut Value, other: &Value, chance: &mut Chance) {
    let mut place = chance.below(count(body));
    let Some(value) = at(body, &mut place) else { return };
    match (chance.below(6), value) {
        (0, Value::Object(members)) => {
            let name = members.keys().nth(chance.below(members.len())).cloned();
            if let Some(name) = name {
                members.remove(&name);
            }
        }
        (0, Value::Array(items)) => items.clear(),
        (1, Value::Object(members)) => {
            members.extend(other.as_object().cloned().unwrap_or_default());
        }
        (1, Value::Array(items)) => {
            let one = items.clone();
            while !one.is_empty() && items.len() < 66 {
                items.extend(one.iter().cloned());
            }
        }
        (2, value) => {
            for _ in 0..[1, 2, 60, 200][chance.below(4)] {
                *value = Value::Array(vec![value.take()]);
            }
        }
        (3, Value::Object(members)) => {
            members.insert(format!("x{}", chance.below(9)), odd_value(chance));
        }
        (_, value) => *value = odd_value(chance),
    }
}

/// Returns a body with some changes. `all` are bodies that pieces are taken from.
fn changed(body: &Value, all: &[(String, Value)], chance: &mut Chance) -> Vec<u8> {
    let mut body = body.clone();
    for _ in 0..=chance.below(2) {
        change(&mut body, &all[chance.below(all.len())].1, chance);
    }
    let mut bytes = body.to_string().into_bytes();
    let members = body.as_object().map_or(0, serde_json::Map::len);
    match chance.below(6) {
        // A member comes twice.
        0 if members > 0 => {
            let name = body.as_object().and_then(|all| all.keys().nth(chance.below(members)));
            let member = format!("{}:{},", json!(name), odd_value(chance));
            bytes.splice(1..1, member.into_bytes());
        }
        // Words that are no values.
        1 => {
            const WORDS: [&str; 12] = [
                "NaN",
                "nan",
                "-Infinity",
                "1e999",
                "-1e999",
                "00",
                "0x10",
                "+1",
                ".5",
                "True",
                "\"\\ud83d\"",
                "\"\\q\"",
            ];
            let after = |byte: &u8| matches!(byte, b':' | b'[' | b',');
            let places: Vec<_> = (0..bytes.len()).filter(|at| after(&bytes[*at])).collect();
            if !places.is_empty() {
                let start = places[chance.below(places.len())] + 1;
                let ends = |byte: &u8| matches!(byte, b',' | b']' | b'}');
                let length = bytes[start..].iter().position(ends).unwrap_or_default();
                let word = WORDS[chance.below(WORDS.len())];
                bytes.splice(start..start + length, word.bytes());
            }
        }
        2 => {
            let other = all[chance.below(all.len())].1.to_string().into_bytes();
            chance.change(&mut bytes, &[other]);
        }
        _ => {}
    }
    bytes
}

#[tokio::test]
async fn whatever_it_is_asked_it_answers_and_goes_on() {
    install_tls();
    let folder = tempfile::tempdir().unwrap();
    let target = Target::start().await;
    let mut all = examples(folder.path());
    all.extend(further());
    let before = target.greedy().await;
    for (path, body) in &all {
        target.check(path, body.to_string().into_bytes()).await;
    }
    let paths: std::collections::BTreeSet<_> = all.iter().map(|(path, _)| path).collect();
    for path in paths {
        for body in odd_bodies() {
            target.check(path, body).await;
        }
    }
    assert_eq!(target.greedy().await, before);
    let mut chance = Chance(0x9e37_79b9_7f4a_7c15);
    for round in 0..ROUNDS {
        let (path, body) = &all[round % all.len()];
        target.check(path, changed(body, &all, &mut chance)).await;
        if round % 50 == 0 {
            assert_eq!(target.greedy().await, before, "round {round}");
        }
    }
    assert_eq!(target.greedy().await, before);
    target.running.shutdown().await;
}

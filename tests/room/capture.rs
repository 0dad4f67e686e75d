//! What is asked of the engine, what is read from its answers, what the client
//! gets of them.

mod dialects;
mod odd;
mod streams;

use std::collections::BTreeMap;

use oclaw::capture::{
    Captured, Dialect, Ending, Outcome, Prepared, Relay, StreamCapture, prepare, read_answer,
};
use oclaw::wire::openai::ChatRequest;
use oclaw::wire::sse::{Decoder, Event};
use proptest::prelude::*;
use serde_json::{Value, json};

fn prepared(body: &str, dialect: Dialect) -> Prepared {
    prepare(body.as_bytes(), &ChatRequest::read(body.as_bytes()).unwrap(), dialect)
}

fn sent(body: &str, dialect: Dialect) -> String {
    String::from_utf8(prepared(body, dialect).body).unwrap()
}

const PLAIN: &str = r#"{"model":"q","messages":[{"role":"user"}]}"#;
const STREAM: &str = r#"{"model":"q","messages":[{"role":"user"}],"stream":true}"#;

#[test]
fn each_dialect_is_asked_in_its_own_way_and_nothing_else_changes() {
    use Dialect::{Generic, LlamaCpp, Sglang, Vllm};
    let tools = r#"{"messages":[{"role":"user"}],"stream":true,"tools":[{"x":1}]}"#;
    for (body, dialect, expected) in [
        (PLAIN, Generic, PLAIN),
        (STREAM, Generic, STREAM),
        (
            PLAIN,
            Sglang,
            r#"{"model":"q","messages":[{"role":"user"}],"logprobs":true,"return_token_ids":true,"return_meta_info":true}"#,
        ),
        (
            STREAM,
            Sglang,
            r#"{"model":"q","messages":[{"role":"user"}],"stream":true,"logprobs":true,"return_input_ids_in_sglext":true,"return_output_ids_in_sglext":true,"stream_options":{"include_usage":true}}"#,
        ),
        (
            PLAIN,
            Vllm,
            r#"{"model":"q","messages":[{"role":"user"}],"logprobs":true,"return_token_ids":true}"#,
        ),
        (
            STREAM,
            Vllm,
            r#"{"model":"q","messages":[{"role":"user"}],"stream":true,"logprobs":true,"return_token_ids":true,"stream_options":{"include_usage":true}}"#,
        ),
        (PLAIN, LlamaCpp, r#"{"model":"q","messages":[{"role":"user"}],"logprobs":true}"#),
        (
            tools,
            LlamaCpp,
            r#"{"messages":[{"role":"user"}],"stream":true,"tools":[{"x":1}],"stream_options":{"include_usage":true}}"#,
        ),
        // Spaces, numbers, order and unknown members stay; our fields go.
        (
            "{ \"session_id\" : \"s\" , \"seed\":1e0, \"messages\" : [ ], \"x\":null, \"turn_type\":\"main\",\"session_done\":true }",
            Generic,
            "{ \"seed\":1e0, \"messages\" : [ ], \"x\":null }",
        ),
        // A refusal is overruled where it stands; what was asked for stays.
        (
            r#"{"logprobs":false,"messages":[{"role":"user"}],"logprobs":null,"top_logprobs":3}"#,
            Vllm,
            r#"{"logprobs":true,"messages":[{"role":"user"}],"logprobs":true,"top_logprobs":3,"return_token_ids":true}"#,
        ),
        (
            r#"{"messages":[{"role":"user"}],"stream":true,"logprobs":true,"return_token_ids":true,"stream_options":{"include_usage":false,"y":2}}"#,
            Vllm,
            r#"{"messages":[{"role":"user"}],"stream":true,"logprobs":true,"return_token_ids":true,"stream_options":{"include_usage":true,"y":2}}"#,
        ),
        (
            r#"{"messages":[{"role":"user"}],"stream":true,"stream_options":null,"logprobs":true}"#,
            LlamaCpp,
            r#"{"messages":[{"role":"user"}],"stream":true,"stream_options":{"include_usage":true},"logprobs":true}"#,
        ),
    ] {
        assert_eq!(sent(body, dialect), expected, "{dialect:?}");
    }
}

fn sglang_answer() -> Value {
    json!({"id":"a1","object":"chat.completion","created":1,"model":"q","metadata":{"weight_version":"7"},
        "choices":[{"index":0,"message":{"role":"assistant","content":"Yo","reasoning_content":null},
        "logprobs":{"content":[{"token":"Yo","bytes":[89,111],"logprob":-0.2,"top_logprobs":[]},{"token":"<|im_end|>","bytes":[1],"logprob":-0.01,"top_logprobs":[]}]},
        "finish_reason":"stop","matched_stop":151645,"prompt_token_ids":[1,2],"response_token_ids":[98,151645],
        "meta_info":{"weight_version":"7","completion_tokens":2,"output_token_logprobs":[[-0.2,98,"Yo"],[-0.01,151645,"<|im_end|>"]]}}],
        "usage":{"prompt_tokens":2,"completion_tokens":2,"total_tokens":4}})
}

#[test]
fn a_whole_answer_is_captured_and_the_client_gets_its_own_part() {
    let answer =
        read_answer(sglang_answer().to_string().as_bytes(), &prepared(PLAIN, Dialect::Sglang));
    let captured = &answer.captured[0];
    assert_eq!(captured.prompt_ids.as_deref(), Some(&[1, 2][..]));
    assert_eq!(captured.response_ids.as_deref(), Some(&[98, 151_645][..]));
    assert_eq!(captured.log_probs.as_deref(), Some(&[Some(-0.2), Some(-0.01)][..]));
    assert_eq!((captured.outcome, captured.untrainable_reason), (Outcome::Complete, None));
    assert_eq!(captured.matched_stop.as_deref(), Some("151645"));
    assert_eq!(captured.ends_with_stop_token, Some(true));
    assert_eq!(
        (captured.weight_version.as_deref(), captured.completion_tokens),
        (Some("7"), Some(2))
    );
    assert_eq!(
        captured.response,
        json!({"role":"assistant","content":"Yo","reasoning_content":null})
    );
    let mut expected = sglang_answer();
    for name in ["logprobs", "prompt_token_ids", "response_token_ids", "meta_info"] {
        expected["choices"][0].as_object_mut().unwrap().shift_remove(name);
    }
    assert_eq!(String::from_utf8(answer.client.unwrap()).unwrap(), expected.to_string());
    // Who asked for all of it gets all of it.
    let all = r#"{"messages":[{"role":"user"}],"logprobs":true,"return_token_ids":true,"return_meta_info":true}"#;
    let answer =
        read_answer(sglang_answer().to_string().as_bytes(), &prepared(all, Dialect::Sglang));
    assert_eq!((answer.client, answer.captured.len()), (None, 1));
}

/// Reads an answer after changes to the one above.
fn changed(changes: &[(&str, Value)]) -> Captured {
    let mut answer = sglang_answer();
    for (pointer, value) in changes {
        *answer.pointer_mut(pointer).unwrap() = value.clone();
    }
    let answer = read_answer(answer.to_string().as_bytes(), &prepared(PLAIN, Dialect::Sglang));
    answer.captured.into_iter().next().unwrap()
}

/// Name, changes, log-probs and reason expected.
type Case =
    (&'static str, Vec<(&'static str, Value)>, Option<Vec<Option<f32>>>, Option<&'static str>);

#[test]
fn ids_log_probs_and_counts_must_agree() {
    let meta = "/choices/0/meta_info/output_token_logprobs";
    let ids = "/choices/0/response_token_ids";
    let finish = "/choices/0/finish_reason";
    let content = "/choices/0/logprobs/content";
    let row = json!([{"token":"Yo","logprob":-0.2}]);
    let both = Some(vec![Some(-0.2), Some(-0.01)]);
    let gap = Some(vec![Some(-0.2), None]);
    let cases: Vec<Case> = vec![
        (
            "last without log-prob",
            vec![(meta, json!([[-0.2, 98, null], [null, 151_645, null]]))],
            gap.clone(),
            None,
        ),
        ("last row missing", vec![(meta, json!([[-0.2, 98, null]]))], gap.clone(), None),
        (
            "missing at a length stop",
            vec![(meta, json!([[-0.2, 98, null]])), (finish, json!("length"))],
            None,
            Some("log_probs_misaligned"),
        ),
        (
            "first without log-prob",
            vec![(meta, json!([[null, 98, null], [-0.01, 151_645, null]]))],
            None,
            Some("log_probs_misaligned"),
        ),
        (
            "other ids",
            vec![(meta, json!([[-0.2, 99, null], [-0.01, 151_645, null]]))],
            None,
            Some("log_probs_misaligned"),
        ),
        (
            "too many rows",
            vec![(meta, json!([[-0.2, 98, null], [-0.01, 151_645, null], [-1.0, 3, null]]))],
            None,
            Some("log_probs_misaligned"),
        ),
        (
            "positive",
            vec![(meta, json!([[0.2, 98, null], [-0.01, 151_645, null]]))],
            None,
            Some("log_probs_misaligned"),
        ),
        ("no rows", vec![(meta, json!([]))], None, Some("no_log_probs")),
        (
            "rows of the open dialect",
            vec![("/choices/0/meta_info", json!({})), (content, row)],
            gap,
            None,
        ),
        (
            "counted otherwise",
            vec![("/usage/completion_tokens", json!(3))],
            both.clone(),
            Some("usage_mismatch"),
        ),
        (
            "not counted",
            vec![("/usage", json!(null)), ("/choices/0/meta_info/completion_tokens", json!(0))],
            both.clone(),
            None,
        ),
        (
            "no prompt ids",
            vec![("/choices/0/prompt_token_ids", json!(null))],
            both.clone(),
            Some("no_prompt_ids"),
        ),
        (
            "ids null",
            vec![(ids, json!(null)), ("/choices/0/meta_info", json!({})), (content, json!([]))],
            None,
            Some("no_token_ids"),
        ),
        ("aborted", vec![(finish, json!("abort"))], both, Some("aborted")),
    ];
    for (name, changes, log_probs, reason) in cases {
        let captured = changed(&changes);
        assert_eq!(captured.log_probs, log_probs, "{name}");
        assert_eq!(captured.untrainable_reason, reason, "{name}");
    }
}

#[test]
fn how_an_answer_ended_is_told() {
    let finish = "/choices/0/finish_reason";
    let stop = "/choices/0/matched_stop";
    for (reason, matched, outcome, ends) in [
        ("stop", json!(151_645), Outcome::Complete, Some(true)),
        ("stop", json!(98), Outcome::Complete, Some(false)),
        ("stop", json!("END"), Outcome::Complete, Some(false)),
        ("stop", json!(null), Outcome::Complete, None),
        ("length", json!(null), Outcome::Truncated, Some(false)),
        ("tool_calls", json!(151_645), Outcome::Complete, Some(true)),
        ("abort", json!(null), Outcome::Aborted, Some(false)),
    ] {
        let captured = changed(&[(finish, json!(reason)), (stop, matched.clone())]);
        assert_eq!(
            (captured.outcome, captured.ends_with_stop_token),
            (outcome, ends),
            "{reason} {matched}"
        );
        assert_eq!(captured.finish_reason.as_deref(), Some(reason));
    }
}

#[test]
fn versions_may_change_inside_an_answer() {
    let spans = json!({"weight_versions":[{"version":"7","start":0,"end":1},{"version":"8","start":1,"end":2}]});
    let captured = changed(&[("/choices/0/meta_info", json!({})), ("/metadata", spans)]);
    assert_eq!(captured.weight_version.as_deref(), Some("7"));
    assert_eq!(captured.weight_version_end.as_deref(), Some("8"));
}

#[test]
fn vllm_and_llamacpp_tell_ids_elsewhere() {
    let answer = json!({"prompt_token_ids":[1,2],"choices":[{"index":0,"message":{"role":"assistant","content":"a"},
        "logprobs":{"content":[{"token":"a","logprob":-0.5},{"token":"","logprob":-0.1}]},
        "finish_reason":"stop","stop_reason":null,"token_ids":[5,6]}],"usage":{"completion_tokens":2}});
    let read = read_answer(answer.to_string().as_bytes(), &prepared(PLAIN, Dialect::Vllm));
    let captured = &read.captured[0];
    assert_eq!(captured.response_ids.as_deref(), Some(&[5, 6][..]));
    assert_eq!(captured.prompt_ids.as_deref(), Some(&[1, 2][..]));
    assert_eq!((captured.ends_with_stop_token, captured.untrainable_reason), (Some(true), None));
    let client = String::from_utf8(read.client.unwrap()).unwrap();
    assert_eq!(
        client,
        r#"{"choices":[{"index":0,"message":{"role":"assistant","content":"a"},"finish_reason":"stop","stop_reason":null}],"usage":{"completion_tokens":2}}"#
    );

    let answer = json!({"choices":[{"index":0,"message":{"role":"assistant","content":"a"},
        "logprobs":{"content":[{"id":5,"token":":","logprob":-0.5},{"id":6,"token":"token_id:9","logprob":-0.1}]},
        "finish_reason":"length"}],"usage":{"completion_tokens":2}});
    let read = read_answer(answer.to_string().as_bytes(), &prepared(PLAIN, Dialect::LlamaCpp));
    assert_eq!(read.captured[0].response_ids.as_deref(), Some(&[5, 6][..]));
    assert_eq!(read.captured[0].log_probs.as_deref(), Some(&[Some(-0.5), Some(-0.1)][..]));
    assert_eq!(read.captured[0].untrainable_reason, Some("no_prompt_ids"));
}

#[test]
fn choices_are_kept_apart_by_their_index() {
    let choice = |index: u8, id: i32| {
        json!({"index":index,"message":{"role":"assistant","content":format!("{index}")},
        "finish_reason":"length","prompt_token_ids":[1],"response_token_ids":[id],
        "meta_info":{"output_token_logprobs":[[-0.5, id, null]]}})
    };
    let answer = json!({"choices":[choice(1, 11), choice(0, 10)],"usage":{"completion_tokens":2}});
    let body = r#"{"messages":[{"role":"user"}],"n":2}"#;
    let read = read_answer(answer.to_string().as_bytes(), &prepared(body, Dialect::Sglang));
    for captured in &read.captured {
        assert_eq!(captured.response_ids, Some(vec![10 + i32::from(captured.choice)]));
        assert_eq!(captured.response["content"], json!(captured.choice.to_string()));
        assert_eq!((captured.untrainable_reason, captured.completion_tokens), (None, None));
    }
}

/// Streams a text through a capture in chunks of a given size: what the client
/// gets, and what is captured.
fn stream(prepared: Prepared, text: &[u8], size: usize) -> (String, Vec<Captured>) {
    let mut decoder = Decoder::default();
    let mut capture = StreamCapture::new(prepared);
    let mut events: Vec<_> =
        text.chunks(size).flat_map(|chunk| decoder.push(chunk).collect::<Vec<_>>()).collect();
    events.extend(decoder.finish());
    let client = relayed(&mut capture, &events);
    (String::from_utf8(client).unwrap(), capture.finish(Ending::Closed))
}

/// Takes events through a capture and returns what the client gets of them.
fn relayed(capture: &mut StreamCapture, events: &[Event]) -> Vec<u8> {
    let mut client = Vec::new();
    for event in events {
        match capture.event(event) {
            Relay::Pass => client.extend_from_slice(&event.raw),
            Relay::Edited(bytes) => client.extend_from_slice(&bytes),
            Relay::Drop => {}
        }
    }
    client
}

fn events(documents: &[Value]) -> String {
    let mut text: String =
        documents.iter().map(|document| format!("data: {document}\n\n")).collect();
    text.push_str("data: [DONE]\n\n");
    text
}

fn chunk(delta: Value, log_probs: Value, finish: Value) -> Value {
    json!({"id":"c","choices":[{"index":0,"delta":delta,"logprobs":log_probs,"finish_reason":finish}]})
}

fn rows(values: &[f64]) -> Value {
    let rows: Vec<_> = values.iter().map(|value| json!({"token":"t","logprob":value})).collect();
    json!({"content": rows})
}

fn sglang_stream() -> Vec<Value> {
    vec![
        chunk(
            json!({"role":"assistant","content":"","reasoning_content":null}),
            Value::Null,
            Value::Null,
        ),
        chunk(json!({"reasoning_content":"hm"}), rows(&[-0.1]), Value::Null),
        chunk(json!({"content":"你好🦀","x_vendor":"v"}), rows(&[-0.2, -0.3]), Value::Null),
        // Log-probs that come late, on a chunk of their own.
        chunk(json!({}), rows(&[-0.4]), Value::Null),
        chunk(
            json!({"tool_calls":[{"index":0,"id":"call_1","type":"function","function":{"name":"ls","arguments":""}}]}),
            Value::Null,
            Value::Null,
        ),
        chunk(
            json!({"tool_calls":[{"index":0,"function":{"arguments":"{\"city\":"}}]}),
            rows(&[-0.5]),
            Value::Null,
        ),
        chunk(
            json!({"tool_calls":[{"index":0,"function":{"arguments":"\"杭州\"}"}}]}),
            Value::Null,
            Value::Null,
        ),
        json!({"id":"c","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"tool_calls","matched_stop":null}]}),
        json!({"id":"c","choices":[],"sglext":{"input_ids":[1,2,3],"output_ids":[[10,11,12,13,14,15]]}}),
        json!({"id":"c","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":6}}),
    ]
}

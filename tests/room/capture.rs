//! What is asked of the engine, what is read from its answers, what the client
//! gets of them.

use oclaw::capture::{
    Captured, Dialect, Ending, Outcome, Prepared, Relay, StreamCapture, prepare, read_answer,
};
use oclaw::wire::openai::ChatRequest;
use oclaw::wire::sse::Decoder;
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

/// Reads the one choice of the answer above with other ids.
fn with_ids(prompt: &Value, ids: &Value, triples: &Value) -> Captured {
    changed(&[
        ("/choices/0/prompt_token_ids", prompt.clone()),
        ("/choices/0/response_token_ids", ids.clone()),
        ("/choices/0/meta_info/output_token_logprobs", triples.clone()),
    ])
}

#[test]
fn ids_that_cannot_be_ids_are_not_recorded_and_not_replaced() {
    let good = json!([[-0.5, 5, null], [-0.5, 6, null]]);
    let misaligned = Some("log_probs_misaligned");
    for odd in
        [json!(-3), json!(5.5), json!(9_999_999_999_u64), json!("5"), json!(null), json!([5])]
    {
        let found = with_ids(&json!([1]), &json!([odd, 6]), &good);
        assert_eq!((found.response_ids, found.log_probs), (None, None), "{odd}");
        assert_eq!(found.untrainable_reason, misaligned, "{odd}");
        assert_eq!(found.prompt_ids, Some(vec![1]), "{odd}");
        let found = with_ids(&json!([1, odd]), &json!([5, 6]), &good);
        assert_eq!((found.prompt_ids, found.untrainable_reason), (None, Some("no_prompt_ids")));
        assert_eq!(found.response_ids, Some(vec![5, 6]), "{odd}");
    }
    let found = with_ids(&json!([1]), &json!("5, 6"), &good);
    assert_eq!((found.response_ids, found.untrainable_reason), (None, misaligned));
    // Ids beside log-probs: they must be ids, and the answer's.
    for odd in [json!(-3), json!(5.5), json!(9_999_999_999_u64), json!("5"), json!(7)] {
        let found =
            with_ids(&json!([1]), &json!([5, 6]), &json!([[-0.5, odd, null], [-0.5, 6, null]]));
        assert_eq!((found.response_ids, found.log_probs), (Some(vec![5, 6]), None), "{odd}");
        assert_eq!(found.untrainable_reason, misaligned, "{odd}");
    }
    let negative = json!([[-0.5, 5, null], [-0.5, -3, null]]);
    let found = with_ids(&json!([1]), &json!(null), &negative);
    assert_eq!((found.response_ids, found.untrainable_reason), (None, misaligned));
    let found = with_ids(&json!([1]), &json!(null), &good);
    assert_eq!((found.response_ids, found.untrainable_reason), (Some(vec![5, 6]), None));
}

#[test]
fn streamed_ids_that_cannot_be_ids_are_not_recorded() {
    let text = |extension: &Value| {
        let mut text = String::new();
        for _ in 0..2 {
            let row = json!({"token":"a","logprob":-0.5,"id":5});
            let choice = json!({"index":0,"delta":{"content":"a"},"logprobs":{"content":[row]}});
            text.push_str(&format!("data: {}\n\n", json!({"choices":[choice]})));
        }
        let end = json!({"index":0,"delta":{},"finish_reason":"length"});
        let last = json!({"choices":[],"sglext":extension});
        text + &format!("data: {}\n\ndata: {last}\n\ndata: [DONE]\n\n", json!({"choices":[end]}))
    };
    let read = |extension: Value| {
        let (_, found) = stream(prepared(STREAM, Dialect::Sglang), text(&extension).as_bytes(), 99);
        assert_eq!(found.len(), 1, "{extension}");
        let found = found.into_iter().next().unwrap();
        (found.prompt_ids, found.response_ids, found.untrainable_reason)
    };
    let (prompt, five) = (Some(vec![1]), Some(vec![5, 5]));
    let misaligned = Some("log_probs_misaligned");
    for (input, output, expected) in [
        (json!([1]), json!([[5, 5]]), (prompt.clone(), five.clone(), None)),
        (json!([[1]]), json!([5, 5]), (prompt.clone(), five.clone(), None)),
        (json!([1]), json!(null), (prompt.clone(), five.clone(), None)),
        (json!([1]), json!([[5, -5]]), (prompt.clone(), None, misaligned)),
        (json!([1]), json!([5, 5.5]), (prompt.clone(), None, misaligned)),
        (json!([1]), json!("5 5"), (prompt.clone(), None, misaligned)),
        (json!([-1]), json!([[5, 5]]), (None, five.clone(), Some("no_prompt_ids"))),
        (json!([["1"]]), json!([[5, 5]]), (None, five.clone(), Some("no_prompt_ids"))),
    ] {
        assert_eq!(read(json!({"input_ids": input, "output_ids": output})), expected);
    }
}

#[test]
fn choices_whose_index_is_none_are_left_out_and_counted() {
    let choice = |index: Value, text: &str| json!({"index":index,"message":{"role":"assistant","content":text},"finish_reason":"stop"});
    let odd = Some("odd_choice_index");
    for (choices, kept, count, skipped) in [
        (vec![choice(json!(4_000_000_000_u64), "a"), choice(json!(-1), "b")], vec![], 1, odd),
        (vec![choice(json!(0), "a"), choice(json!(0), "b")], vec![(0, "a")], 1, None),
        (vec![choice(json!(1), "a"), choice(json!(256), "b")], vec![(1, "a")], 1, None),
        (vec![choice(json!("0"), "a")], vec![], 0, odd),
        (vec![choice(json!(null), "a"), choice(json!(1), "b")], vec![(0, "a"), (1, "b")], 0, None),
    ] {
        let body = json!({ "choices": choices }).to_string();
        let read = read_answer(body.as_bytes(), &prepared(PLAIN, Dialect::Sglang));
        assert_eq!((read.odd_choices, read.skipped), (count, skipped), "{body}");
        let found: Vec<_> = read
            .captured
            .iter()
            .map(|choice| (choice.choice, &choice.response["content"]))
            .collect();
        let kept: Vec<_> = kept.into_iter().map(|(index, text)| (index, json!(text))).collect();
        assert_eq!(found, kept.iter().map(|(index, text)| (*index, text)).collect::<Vec<_>>());
    }
}

#[test]
fn odd_answers_neither_crash_nor_hide() {
    let sglang = prepared(PLAIN, Dialect::Sglang);
    for (body, skipped) in [
        ("", Some("unreadable_answer")),
        ("<html>", Some("unreadable_answer")),
        ("[]", Some("no_choices")),
        ("{}", Some("no_choices")),
        (r#"{"choices":null}"#, Some("no_choices")),
        (r#"{"choices":[]}"#, Some("no_choices")),
        (r#"{"error":{"message":"x"}}"#, Some("upstream_error")),
        (r#"{"choices":[7,null,{"index":"x","message":3}]}"#, None),
    ] {
        let read = read_answer(body.as_bytes(), &sglang);
        assert_eq!((read.skipped, read.client), (skipped, None), "{body}");
    }
    let half = r#"{"choices":[{"index":0,"message":{"role":"assistant","content":"a\ud83d"},"logprobs":{"content":[]},"finish_reason":"stop"}]}"#;
    let read = read_answer(half.as_bytes(), &sglang);
    assert_eq!(read.captured[0].response["content"], json!("a\u{fffd}"));
    assert_eq!(read.captured[0].untrainable_reason, Some("not_quite_json"));
    let client = String::from_utf8(read.client.unwrap()).unwrap();
    assert!(client.contains(r"a\ud83d") && !client.contains("logprobs"), "{client}");
}

/// Streams a text through a capture in chunks of a given size: what the client
/// gets, and what is captured.
fn stream(prepared: Prepared, text: &[u8], size: usize) -> (String, Vec<Captured>) {
    let mut decoder = Decoder::default();
    let mut capture = StreamCapture::new(prepared);
    let mut events: Vec<_> =
        text.chunks(size).flat_map(|chunk| decoder.push(chunk).collect::<Vec<_>>()).collect();
    events.extend(decoder.finish());
    let mut client = Vec::new();
    for event in &events {
        match capture.event(event) {
            Relay::Pass => client.extend_from_slice(&event.raw),
            Relay::Edited(bytes) => client.extend_from_slice(&bytes),
            Relay::Drop => {}
        }
    }
    (String::from_utf8(client).unwrap(), capture.finish(Ending::Closed))
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

#[test]
fn a_stream_is_captured_whatever_its_chunks_and_its_lines() {
    let canonical = events(&sglang_stream());
    let expected_client = {
        let mut documents = sglang_stream();
        documents.truncate(8);
        documents.remove(3);
        for document in &mut documents {
            let choice = document["choices"][0].as_object_mut().unwrap();
            if !choice["logprobs"].is_null() {
                choice.shift_remove("logprobs");
            }
        }
        events(&documents)
    };
    let request =
        r#"{"messages":[{"role":"user"}],"stream":true,"stream_options":{"include_usage":false}}"#;
    for (name, text, client) in [
        ("as it is", canonical.clone(), expected_client.clone()),
        ("crlf", canonical.replace('\n', "\r\n"), expected_client.replace('\n', "\r\n")),
        (
            "no space",
            canonical.replace("data: ", "data:"),
            expected_client.replace("data: ", "data:"),
        ),
        ("no end", canonical.trim_end().to_owned(), expected_client.trim_end().to_owned()),
    ] {
        for size in [1, 7, 100_000] {
            let (got, captured) = stream(prepared(request, Dialect::Sglang), text.as_bytes(), size);
            assert_eq!(got, client, "{name} by {size}");
            let captured = &captured[0];
            assert_eq!(captured.response_ids, Some(vec![10, 11, 12, 13, 14, 15]));
            assert_eq!(captured.prompt_ids, Some(vec![1, 2, 3]));
            let log_probs: Vec<_> =
                [-0.1, -0.2, -0.3, -0.4, -0.5].map(Some).into_iter().chain([None]).collect();
            assert_eq!(captured.log_probs, Some(log_probs), "{name} by {size}");
            assert_eq!((captured.outcome, captured.untrainable_reason), (Outcome::Complete, None));
            assert_eq!(
                captured.response,
                json!({"role":"assistant","content":"你好🦀","reasoning_content":"hm","x_vendor":"v",
                "tool_calls":[{"id":"call_1","type":"function","function":{"name":"ls","arguments":"{\"city\":\"杭州\"}"}}]})
            );
        }
    }
    // Keep-alives pass, and count for nothing.
    let noisy = canonical.replace("data: {", ": ping\n\ndata: {");
    let (got, _) = stream(prepared(request, Dialect::Sglang), noisy.as_bytes(), 5);
    assert_eq!(got.replace(": ping\n\n", ""), expected_client);
    assert_eq!(got.matches(": ping").count(), sglang_stream().len());
    // Who asked for the usage chunk and the log-probs gets them.
    let asked = r#"{"messages":[{"role":"user"}],"stream":true,"logprobs":true,"stream_options":{"include_usage":true}}"#;
    let (got, _) = stream(prepared(asked, Dialect::Sglang), canonical.as_bytes(), 9);
    let mut documents = sglang_stream();
    documents.remove(8);
    assert_eq!(got, events(&documents));
}

proptest! {
    #[test]
    fn any_chunking_gives_one_capture(sizes in prop::collection::vec(1_usize..60, 1..30)) {
        let text = events(&sglang_stream());
        let (client, captured) = stream(prepared(STREAM, Dialect::Sglang), text.as_bytes(), 100_000);
        let mut decoder = Decoder::default();
        let mut capture = StreamCapture::new(prepared(STREAM, Dialect::Sglang));
        let mut got = Vec::new();
        let mut rest = text.as_bytes();
        for size in sizes.iter().cycle() {
            let (chunk, after) = rest.split_at((*size).min(rest.len()));
            rest = after;
            for event in decoder.push(chunk) {
                match capture.event(&event) {
                    Relay::Pass => got.extend_from_slice(&event.raw),
                    Relay::Edited(bytes) => got.extend_from_slice(&bytes),
                    Relay::Drop => {}
                }
            }
            if rest.is_empty() {
                break;
            }
        }
        prop_assert_eq!(String::from_utf8(got).unwrap(), client);
        prop_assert_eq!(capture.finish(Ending::Closed), captured);
    }
}

#[test]
fn missing_tokens_make_a_stream_untrainable() {
    let told = |ids: Value| json!({"id":"c","choices":[{"index":0,"delta":{"content":"a"},"logprobs":{"content":[{"logprob":-0.5}]},"finish_reason":null,"token_ids":ids}]});
    let end = || json!({"choices":[{"index":0,"delta":{},"finish_reason":"stop","stop_reason":null,"token_ids":[]}]});
    let usage = || json!({"choices":[],"usage":{"completion_tokens":3}});
    let first = || json!({"prompt_token_ids":[1],"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]});
    for (name, middle, reason) in [
        ("all there", vec![told(json!([4])), told(json!([5])), told(json!([6]))], None),
        (
            "null once",
            vec![told(json!([4])), told(json!(null)), told(json!([6]))],
            Some("usage_mismatch"),
        ),
        ("dropped", vec![told(json!([4]))], Some("usage_mismatch")),
        (
            "none at all",
            vec![told(json!(null)), told(json!(null)), told(json!(null))],
            Some("no_token_ids"),
        ),
    ] {
        let mut documents = vec![first()];
        documents.extend(middle);
        documents.extend([end(), usage()]);
        let (_, captured) =
            stream(prepared(STREAM, Dialect::Vllm), events(&documents).as_bytes(), 40);
        assert_eq!(captured[0].untrainable_reason, reason, "{name}");
        assert_eq!(captured[0].prompt_ids, Some(vec![1]), "{name}");
    }
}

#[test]
fn errors_and_broken_ends_inside_a_stream_are_failed_turns() {
    let error = json!({"error":{"message":"boom","code":"x"}});
    let delta = || chunk(json!({"content":"half"}), Value::Null, Value::Null);
    let finish = || chunk(json!({}), Value::Null, json!("stop"));
    let request = || prepared(STREAM, Dialect::Generic);
    for (name, documents, outcome, reason) in [
        ("first event", vec![error.clone()], Outcome::Failed, "upstream_error"),
        ("later", vec![delta(), error], Outcome::Failed, "upstream_error"),
        ("no finish", vec![delta()], Outcome::Failed, "incomplete_stream"),
        ("whole", vec![delta(), finish()], Outcome::Complete, "no_token_ids"),
    ] {
        let text = events(&documents);
        let (client, captured) = stream(request(), text.as_bytes(), 11);
        assert_eq!(client, text, "{name}");
        assert_eq!(
            (captured[0].outcome, captured[0].untrainable_reason),
            (outcome, Some(reason)),
            "{name}"
        );
    }
    let mut capture = StreamCapture::new(request());
    let mut decoder = Decoder::default();
    for event in decoder.push(format!("data: {}\n\n", delta()).as_bytes()) {
        capture.event(&event);
    }
    assert_eq!(capture.finish(Ending::Abandoned)[0].outcome, Outcome::Aborted);
    for event in decoder.push(format!("data: {}\n\n", finish()).as_bytes()) {
        capture.event(&event);
    }
    // A seen finish reason is a whole answer.
    assert!(capture.is_finished());
    assert_eq!(capture.finish(Ending::Abandoned)[0].outcome, Outcome::Complete);
}

#[test]
fn odd_chunks_pass_unharmed() {
    let odd = [
        "data: {\"choices\":[]}\n\n",
        "data: {\"choices\":null}\n\n",
        "data: {\"x\":1}\n\n",
        "data: 7\n\n",
        "data: {\"choices\":[null,3,{\"delta\":7}]}\n\n",
        "data: not json\n\n",
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"\\ud83d\"}}]}\n\n",
    ];
    for position in 0..3 {
        let mut parts: Vec<String> = odd.iter().map(|text| (*text).to_owned()).collect();
        parts.insert(
            position * 3,
            format!("data: {}\n\n", chunk(json!({"content":"a"}), Value::Null, json!("stop"))),
        );
        let text = parts.concat();
        let (client, captured) = stream(prepared(STREAM, Dialect::Sglang), text.as_bytes(), 3);
        assert_eq!(client, text);
        let content = captured[0].response["content"].as_str().unwrap();
        assert!(content.contains('a') && content.contains('\u{fffd}'), "{content}");
        assert!(captured[0].untrainable_reason.is_some());
    }
}

#[test]
fn glued_events_lose_nothing() {
    let one = chunk(json!({"content":"a"}), rows(&[-0.1]), Value::Null);
    let two = chunk(json!({"content":"b"}), rows(&[-0.2]), json!("stop"));
    let text = format!("data: {one}\ndata: {two}\ndata: [DONE]\n\n");
    let (client, captured) = stream(prepared(STREAM, Dialect::Sglang), text.as_bytes(), 13);
    assert_eq!(captured[0].response["content"], json!("ab"));
    assert!(!client.contains("logprobs") && client.contains("[DONE]"), "{client}");
}

#[test]
fn choices_of_a_stream_may_be_interleaved() {
    let delta = |index: u8, text: &str, finish: Value| json!({"choices":[{"index":index,"delta":{"content":text},"finish_reason":finish}]});
    let documents = [
        delta(1, "b", Value::Null),
        delta(0, "a", Value::Null),
        delta(1, "B", json!("stop")),
        delta(0, "A", json!("length")),
    ];
    let request = r#"{"messages":[{"role":"user"}],"stream":true,"n":2}"#;
    let (_, captured) =
        stream(prepared(request, Dialect::Generic), events(&documents).as_bytes(), 17);
    let found: Vec<_> = captured
        .iter()
        .map(|one| (one.choice, one.response["content"].as_str().unwrap(), one.outcome))
        .collect();
    assert_eq!(found, [(0, "aA", Outcome::Truncated), (1, "bB", Outcome::Complete)]);
}

#[test]
fn tool_calls_come_in_many_shapes() {
    let call = |call: Value| chunk(json!({"tool_calls":[call]}), Value::Null, Value::Null);
    let documents = [
        call(json!({"id":"a","type":"function","function":{"name":"f","arguments":"{}"}})),
        call(json!({"id":"b","type":"function","function":{"name":"g","arguments":"{\"x\""}})),
        call(json!({"function":{"arguments":":1}"}})),
    ];
    let (_, captured) =
        stream(prepared(STREAM, Dialect::Generic), events(&documents).as_bytes(), 50);
    let calls = captured[0].response["tool_calls"].as_array().unwrap();
    assert_eq!(calls.len(), 2);
    assert_eq!(calls[1]["function"]["arguments"], json!("{\"x\":1}"));
    let legacy = [
        chunk(json!({"function_call":{"name":"f","arguments":"{"}}), Value::Null, Value::Null),
        chunk(json!({"function_call":{"arguments":"}"}}), Value::Null, json!("function_call")),
    ];
    let (_, captured) = stream(prepared(STREAM, Dialect::Generic), events(&legacy).as_bytes(), 50);
    assert_eq!(captured[0].response["function_call"], json!({"name":"f","arguments":"{}"}));
}

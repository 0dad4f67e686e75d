//! Streamed answers.

use super::*;

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

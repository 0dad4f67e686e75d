//! Ids, choices and answers that cannot be taken as they are.

use super::*;

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

#[test]
fn the_count_of_all_choices_is_not_that_of_the_one_which_is_left() {
    let usage = json!({"completion_tokens": 4});
    let choice = |index: u64| {
        json!({"index": index, "delta": {"content": "x"}, "finish_reason": "stop",
            "message": {"role": "assistant", "content": "x"}})
    };
    for (indices, wanted) in [(&[0][..], Some(4)), (&[0, 300], None), (&[0, 1], None)] {
        let choices: Vec<_> = indices.iter().map(|index| choice(*index)).collect();
        let body = json!({"choices": choices, "usage": usage}).to_string();
        let read = read_answer(body.as_bytes(), &prepared(PLAIN, Dialect::Generic));
        assert_eq!(read.captured[0].completion_tokens, wanted, "{indices:?}");
        let mut documents: Vec<_> =
            choices.iter().map(|choice| json!({"choices": [choice]})).collect();
        documents.push(json!({"choices": [], "usage": usage}));
        let text = events(&documents);
        let (_, found) = stream(prepared(STREAM, Dialect::Generic), text.as_bytes(), 99);
        assert_eq!(found[0].completion_tokens, wanted, "{indices:?} in a stream");
    }
    let twice = json!({"choices": [choice(0), choice(0)], "usage": usage}).to_string();
    let read = read_answer(twice.as_bytes(), &prepared(PLAIN, Dialect::Generic));
    assert_eq!((read.captured.len(), read.captured[0].completion_tokens), (1, None));
}

//! `/v1/completions`, and what `/v1/embeddings` says.

use super::*;
use crate::harness::parrot::{SPEECH, parrot};

const PATH: &str = "/v1/completions";

#[tokio::test]
async fn prompts_come_as_text_or_ids_alone_or_in_lists() {
    install_tls();
    let folder = tempfile::tempdir().unwrap();
    parrot(folder.path(), &SPEECH);
    let running = start(Options::new(folder.path())).await.unwrap();
    for (prompt, answers, tokens) in [
        (json!([5]), 1, 1),
        (json!([[5]]), 1, 1),
        (json!([[5], [6, 7]]), 2, 3),
        (json!("("), 1, 1),
        (json!(["(", "("]), 2, 2),
    ] {
        let whole = good(&running, PATH, json!({"prompt": prompt, "temperature": 0})).await;
        let choices = whole["choices"].as_array().unwrap();
        assert_eq!(choices.len(), answers, "{whole}");
        for (index, choice) in choices.iter().enumerate() {
            let expected = json!({
                "index": index, "text": " The name is set", "logprobs": null,
                "finish_reason": "stop", "matched_stop": 1017,
            });
            assert_eq!(choice, &expected);
        }
        assert_eq!(whole["object"], "text_completion");
        assert_eq!(whole["usage"]["prompt_tokens"], tokens);
        assert_eq!(whole["usage"]["completion_tokens"], 5 * answers);
        assert_eq!(whole["metadata"], json!({"weight_version": "0"}));
    }
    let body = json!({"prompt": [5], "stop": " is", "return_token_ids": true, "temperature": 0});
    let stopped = good(&running, PATH, body).await;
    let expected = json!({
        "index": 0, "text": " The name", "logprobs": null, "finish_reason": "stop",
        "matched_stop": " is", "prompt_token_ids": [5], "response_token_ids": [502, 633, 294],
    });
    assert_eq!(stopped["choices"][0], expected);
    running.shutdown().await;
}

#[tokio::test]
async fn an_answer_is_that_of_generate_with_its_log_probs() {
    install_tls();
    let running = tiny().await;
    let body = json!({
        "prompt": [5, 6, 7], "temperature": 0, "logprobs": 2, "ignore_eos": true,
        "return_token_ids": true,
    });
    let choice = good(&running, PATH, body).await["choices"][0].clone();
    let sampling = json!({"temperature": 0, "max_new_tokens": 16, "ignore_eos": true});
    let body = json!({
        "input_ids": [5, 6, 7], "sampling_params": sampling, "return_logprob": true,
        "top_logprobs_num": 2, "return_text_in_logprobs": true,
    });
    let native = good(&running, "/generate", body).await;
    assert_eq!(choice["text"], native["text"]);
    assert_eq!(choice["response_token_ids"], native["output_ids"]);
    assert_eq!(choice["finish_reason"], "length");
    let listed = &choice["logprobs"];
    let triples = native["meta_info"]["output_token_logprobs"].as_array().unwrap();
    assert_eq!(triples.len(), 16, "a completion has 16 tokens if nothing is said");
    let mut offset = 0;
    for (place, triple) in triples.iter().enumerate() {
        assert_eq!(listed["token_logprobs"][place], triple[0]);
        assert_eq!(listed["tokens"][place], triple[2]);
        assert_eq!(listed["text_offset"][place], offset);
        let text = triple[2].as_str().unwrap();
        offset += text.chars().count();
        let top = listed["top_logprobs"][place].as_object().unwrap();
        let likeliest = &native["meta_info"]["output_top_logprobs"][place][0];
        assert_eq!(top[likeliest[2].as_str().unwrap()], likeliest[0]);
        assert_eq!(top[text], triple[0], "the sampled one is among them");
    }
    let body = json!({"prompt": [5], "logprobs": 0, "max_tokens": 2, "ignore_eos": true});
    let bare = good(&running, PATH, body).await;
    assert_eq!(bare["choices"][0]["logprobs"]["top_logprobs"], json!([null, null]));
    running.shutdown().await;
}

#[tokio::test]
async fn a_stream_says_what_the_whole_completion_says() {
    install_tls();
    let running = tiny().await;
    let body = |stream: bool| {
        json!({
            "prompt": [[5, 6], [7]], "max_tokens": 20, "seed": 3, "temperature": 0.9, "n": 2,
            "logprobs": 1, "stream": stream, "stream_options": {"include_usage": true},
            "return_input_ids_in_sglext": true, "return_output_ids_in_sglext": true,
        })
    };
    let whole = good(&running, PATH, body(false)).await;
    let events = Events::open(&running, PATH, body(true)).await.rest().await;
    for index in 0..4 {
        let (mut text, mut finish) = (String::new(), Value::Null);
        let mut lists: [Vec<Value>; 4] = Default::default();
        let names = ["tokens", "token_logprobs", "top_logprobs", "text_offset"];
        let choices = events.iter().flat_map(|event| event["choices"].as_array().unwrap());
        for choice in choices.filter(|choice| choice["index"] == index) {
            assert_eq!(finish, Value::Null, "nothing comes after the end");
            text += choice["text"].as_str().unwrap();
            finish = choice["finish_reason"].clone();
            for (list, name) in lists.iter_mut().zip(names) {
                list.extend(choice["logprobs"][name].as_array().cloned().unwrap_or_default());
            }
        }
        let expected = &whole["choices"][index];
        assert_eq!((&json!(text), &finish), (&expected["text"], &expected["finish_reason"]));
        for (list, name) in lists.into_iter().zip(names) {
            same(&Value::Array(list), &expected["logprobs"][name], name);
        }
    }
    assert_eq!(whole["sglext"]["input_ids"], json!([[5, 6], [7]]));
    let late: Vec<_> = events.iter().filter(|event| event.get("sglext").is_some()).collect();
    assert_eq!((late.len(), &late[0]["sglext"]), (1, &whole["sglext"]));
    assert_eq!(events.last().unwrap()["usage"], whole["usage"]);
    running.shutdown().await;
}

#[tokio::test]
async fn what_is_no_completion_is_refused() {
    install_tls();
    let running = tiny().await;
    for (body, expected) in [
        (json!({}), "`prompt` is neither a text"),
        (json!({"prompt": 5}), "`prompt` is neither a text"),
        (json!({"prompt": []}), "`prompt` is empty"),
        (json!({"prompt": [5, "x"]}), "`prompt` is neither a text"),
        (json!({"prompt": ["x", 5]}), "`prompt` is neither a text"),
        (json!({"prompt": [{}]}), "`prompt` is neither a text"),
        (json!({"prompt": ""}), "the input has no tokens"),
        (json!({"prompt": [2000]}), "id 2000 is outside the vocabulary"),
        (json!({"prompt": [5], "logprobs": 65}), "`logprobs` is 65; it may be 0 to 64"),
        (json!({"prompt": [5], "logprobs": true}), "expected i64"),
        (json!({"prompt": [5], "max_tokens": 0}), "`max_tokens` is 0"),
        (json!({"prompt": [5], "max_tokens": 2048}), "the model's context holds 2048"),
        (json!({"prompt": [5], "echo": true}), "`echo` is not supported: "),
        (
            json!({"prompt": [5], "stream": true, "return_token_ids": true}),
            "do not go with `stream`",
        ),
    ] {
        let shown = body.to_string();
        let (status, answer) = post(&running, PATH, body).await;
        assert_eq!((status, &answer["object"]), (400, &json!("error")), "{shown}: {answer}");
        assert!(answer["message"].as_str().unwrap().contains(expected), "{shown}: {answer}");
    }
    let (status, answer) = post(&running, "/v1/embeddings", json!({"input": "x"})).await;
    let expected = json!({
        "object": "error", "type": "BadRequestError", "param": null, "code": 400, "message":
        "`tiny-qwen3` generates text and makes no embeddings: ask a server of an embedding model",
    });
    assert_eq!((status, answer), (400, expected));
    running.shutdown().await;
}

/// Equal, but for the last digits of numbers that are not whole: who is computed together
/// depends on who came when.
fn same(found: &Value, expected: &Value, name: &str) {
    match (found, expected) {
        (Value::Array(found), Value::Array(expected)) => {
            assert_eq!(found.len(), expected.len(), "{name}");
            found.iter().zip(expected).for_each(|(found, expected)| same(found, expected, name));
        }
        (Value::Object(found), Value::Object(expected)) => {
            assert!(found.keys().eq(expected.keys()), "{name}");
            found.iter().for_each(|(key, found)| same(found, &expected[key], name));
        }
        (Value::Number(found), Value::Number(expected)) if found.is_f64() => {
            let (found, expected) = (found.as_f64().unwrap(), expected.as_f64().unwrap());
            assert!((found - expected).abs() < 1e-5 * (1.0 + expected.abs()), "{name}");
        }
        _ => assert_eq!(found, expected, "{name}"),
    }
}

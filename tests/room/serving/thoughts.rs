//! What a model thinks and which tools it calls, apart from what it says: in whole
//! answers and in streams.

use std::path::Path;

use super::*;
use crate::harness::parrot::{CALL, SPEECH, THOUGHT, parrot};

const CHAT: &str = "/v1/chat/completions";

/// Starts an engine whose model always says the same.
async fn saying(folder: &Path, parts: &[&[i64]]) -> Running {
    install_tls();
    parrot(folder, &parts.concat());
    start(Options::new(folder)).await.unwrap()
}

fn asking(further: Value) -> Value {
    let mut body = json!({
        "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 30,
    });
    body.as_object_mut().unwrap().extend(further.as_object().unwrap().clone());
    body
}

/// A choice as a stream told it: thought, content, calls, the reason of its end, and how
/// many deltas had a thought.
async fn streamed(running: &Running, body: Value) -> (String, String, Vec<Value>, Value, usize) {
    let mut body = body;
    body["stream"] = json!(true);
    let events = Events::open(running, CHAT, body).await.rest().await;
    let (mut thought, mut content, mut calls) = (String::new(), String::new(), Vec::new());
    let (mut finish, mut thoughts) = (Value::Null, 0);
    for choice in events.iter().flat_map(|event| event["choices"].as_array().unwrap()) {
        let delta = &choice["delta"];
        assert!(delta.get("reasoning_content").is_some(), "{choice}");
        thoughts += usize::from(delta["reasoning_content"].is_string());
        thought += delta["reasoning_content"].as_str().unwrap_or_default();
        content += delta["content"].as_str().unwrap_or_default();
        calls.extend(delta["tool_calls"].as_array().cloned().unwrap_or_default());
        finish = choice["finish_reason"].clone();
    }
    (thought, content, calls, finish, thoughts)
}

#[tokio::test]
async fn a_thought_is_told_apart_from_the_answer() {
    let folder = tempfile::tempdir().unwrap();
    let running = saying(folder.path(), &[&THOUGHT, &SPEECH]).await;
    let together = "<think>Hm.</think> The name is set";
    for (further, thought, content, tokens) in [
        (json!({}), json!("Hm."), "The name is set", 5),
        (json!({"separate_reasoning": true}), json!("Hm."), "The name is set", 5),
        (json!({"stream_reasoning": false}), json!("Hm."), "The name is set", 5),
        (json!({"separate_reasoning": false}), Value::Null, together, 0),
        // The prompt ends with the mark: the answer begins inside.
        (json!({"input_ids": [5, 1018]}), json!("Hm."), "The name is set", 4),
        // Cut off while it thinks.
        (json!({"max_tokens": 3}), json!("Hm"), "", 3),
    ] {
        let answer = good(&running, CHAT, asking(further.clone())).await;
        let message = &answer["choices"][0]["message"];
        let told = (&message["reasoning_content"], &message["content"]);
        assert_eq!(told, (&thought, &json!(content)), "{further}: {answer}");
        assert_eq!(answer["usage"]["reasoning_tokens"], tokens, "{further}");
        let stream = streamed(&running, asking(further.clone())).await;
        let wanted = thought.as_str().unwrap_or_default();
        assert_eq!((stream.0.as_str(), stream.1.as_str()), (wanted, content), "{further}");
        assert_eq!(stream.3, answer["choices"][0]["finish_reason"], "{further}");
        if further.get("stream_reasoning").is_some() {
            assert_eq!(stream.4, 1, "in one piece");
        }
    }
    // All of it is among the ids and log-probs.
    let body = asking(json!({"logprobs": true, "return_token_ids": true}));
    let answer = good(&running, CHAT, body).await;
    let said: Vec<i64> = [&THOUGHT[..], &SPEECH, &[1017]].concat();
    assert_eq!(ids(&answer["choices"][0]["response_token_ids"]), said);
    let entries = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(entries.len(), said.len());
    // `/generate` and `/v1/completions` tell the text as it is.
    let sampling = json!({"temperature": 0, "max_new_tokens": 30});
    let body = json!({"input_ids": [5], "sampling_params": sampling});
    assert_eq!(good(&running, "/generate", body).await["text"], together);
    running.shutdown().await;
}

#[tokio::test]
async fn calls_are_read_in_the_forms_of_qwen_and_of_llama() {
    let tools = json!([{"type": "function", "function": {"name": "set", "parameters": {}}}]);
    let marked: Vec<i64> = [&[1020][..], &CALL, &[1021]].concat();
    for (parts, thought) in [
        (vec![&marked[..]], ""),
        (vec![&CALL[..]], ""),
        (vec![&THOUGHT[..], &CALL], "Hm."),
        (vec![&THOUGHT[..], &marked], "Hm."),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let running = saying(folder.path(), &parts).await;
        let answer = good(&running, CHAT, asking(json!({"tools": tools}))).await;
        let (message, finish) =
            (&answer["choices"][0]["message"], &answer["choices"][0]["finish_reason"]);
        let function = json!({"name": "set", "arguments": "{}"});
        assert_eq!(message["tool_calls"][0]["function"], function, "{answer}");
        assert_eq!(message["tool_calls"].as_array().unwrap().len(), 1);
        assert_eq!((&message["content"], finish), (&json!(""), &json!("tool_calls")), "{answer}");
        let stream = streamed(&running, asking(json!({"tools": tools}))).await;
        assert_eq!((stream.0.as_str(), stream.1.as_str()), (thought, ""));
        assert_eq!(stream.2[0]["function"], function);
        assert_eq!(stream.3, "tool_calls");
        // Without tools, or with others, it is text.
        let others = json!([{"type": "function", "function": {"name": "get", "parameters": {}}}]);
        for further in [json!({}), json!({"tools": others})] {
            let answer = good(&running, CHAT, asking(further)).await;
            let message = &answer["choices"][0]["message"];
            assert_eq!(message["tool_calls"], Value::Null);
            assert!(message["content"].as_str().unwrap().contains("{\"name\": \"set\"}"));
        }
        running.shutdown().await;
    }
}

/// A vocabulary that is made for Llama's calls has one demanded in that form.
#[tokio::test]
async fn a_demanded_call_is_begun_in_the_models_form() {
    let folder = tempfile::tempdir().unwrap();
    parrot(folder.path(), &SPEECH);
    let file = folder.path().join("tokenizer.json");
    let text = std::fs::read(&file).unwrap();
    let mut tokenizer: Value = serde_json::from_slice(&text).unwrap();
    let mut token = tokenizer["added_tokens"][0].clone();
    (token["id"], token["content"]) = (json!(1024), json!("<|python_tag|>"));
    tokenizer["added_tokens"].as_array_mut().unwrap().push(token);
    let body = asking(json!({
        "tools": [{"type": "function", "function": {"name": "set", "parameters": {}}}],
        "tool_choice": "required", "return_token_ids": true,
    }));
    for (made, form, opening) in [
        (false, "qwen25", "<tool_call>\n{\"name\": \"set\", \"arguments\":"),
        (true, "llama3", "assistant\n{\"name\": \"set\", \"parameters\":"),
    ] {
        if made {
            std::fs::write(&file, tokenizer.to_string()).unwrap();
        }
        install_tls();
        let running = start(Options::new(folder.path())).await.unwrap();
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let info = client.get(format!("{}/model_info", running.url())).send().await.unwrap();
        let info: Value = serde_json::from_str(&info.text().await.unwrap()).unwrap();
        assert_eq!(
            (&info["tool_call_parser"], &info["reasoning_parser"]),
            (&json!(form), &json!("qwen3"))
        );
        let answer = good(&running, CHAT, body.clone()).await;
        let tokens = json!({"tokens": answer["choices"][0]["prompt_token_ids"],
            "skip_special_tokens": false});
        let prompt = good(&running, "/detokenize", tokens).await;
        assert!(prompt["text"].as_str().unwrap().ends_with(opening), "{prompt}");
        let call = &answer["choices"][0]["message"]["tool_calls"][0]["function"];
        assert_eq!(call, &json!({"name": "set", "arguments": "The name is set"}), "{answer}");
        running.shutdown().await;
    }
}

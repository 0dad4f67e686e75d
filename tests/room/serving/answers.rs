//! Every field of an answer that SGLang's dialect has (`protocols.md` 1.1 to 1.4): which
//! are told, as what, and which are not.

use super::*;

/// What SGLang tells and this engine does not. A client that needs one of these must look
/// elsewhere; one that is told some day has to leave this list.
const ABSENT: &[(&str, &str)] = &[
    ("/meta_info", "num_retractions"),
    ("/meta_info", "e2e_latency"),
    ("/choices/0/meta_info", "num_retractions"),
    ("/choices/0/meta_info", "e2e_latency"),
    ("/usage", "completion_tokens_details"),
    ("", "architectures"),
];

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(number) if number.is_f64() => "float",
        Value::Number(_) => "int",
        Value::String(_) => "string",
        Value::Array(_) => "list",
        Value::Object(_) => "object",
    }
}

/// Compares an answer with a pattern: `int`, or `int|null`, is the kind of a value; an
/// object has just these members; the one item of a list stands for all of its items,
/// several stand for themselves.
#[track_caller]
fn like(pattern: &Value, found: &Value, place: &str) {
    match (pattern, found) {
        (Value::String(kinds), _) => {
            let fits = kinds.split('|').any(|one| one == kind(found));
            assert!(fits, "{place} is {found}, wanted {kinds}");
        }
        (Value::Array(items), Value::Array(found)) if items.len() == 1 => {
            assert!(!found.is_empty(), "{place} is empty: nothing was compared");
            for (index, one) in found.iter().enumerate() {
                like(&items[0], one, &format!("{place}/{index}"));
            }
        }
        (Value::Array(items), Value::Array(found)) => {
            assert_eq!(items.len(), found.len(), "{place}");
            for (index, (pattern, one)) in items.iter().zip(found).enumerate() {
                like(pattern, one, &format!("{place}/{index}"));
            }
        }
        (Value::Object(members), Value::Object(told)) => {
            let mut names: [Vec<_>; 2] = [members.keys().collect(), told.keys().collect()];
            names.iter_mut().for_each(|names| names.sort());
            assert_eq!(names[0], names[1], "{place}: wanted and told");
            for (name, pattern) in members {
                like(pattern, &told[name], &format!("{place}/{name}"));
            }
        }
        _ => panic!("{place} is {found}, wanted {pattern}"),
    }
}

fn with(mut object: Value, further: Value) -> Value {
    object.as_object_mut().unwrap().extend(further.as_object().unwrap().clone());
    object
}

fn meta() -> Value {
    json!({
        "id": "string", "finish_reason": {"type": "string", "length": "int"},
        "prompt_tokens": "int", "completion_tokens": "int", "cached_tokens": "int",
        "reasoning_tokens": "int", "weight_version": "string",
    })
}

fn usage() -> Value {
    json!({
        "prompt_tokens": "int", "completion_tokens": "int", "total_tokens": "int",
        "prompt_tokens_details": {"cached_tokens": "int"}, "reasoning_tokens": "int",
    })
}

fn entries() -> Value {
    let entry = json!({"token": "string", "bytes": "list", "logprob": "float"});
    json!({"content": [with(entry.clone(), json!({"top_logprobs": [entry]}))]})
}

/// An answer of a chat that was asked for all there is.
fn chat() -> Value {
    let triples = json!({"output_token_logprobs": [["float", "int", "string"]]});
    json!({
        "id": "string", "object": "string", "created": "int", "model": "string",
        "choices": [{
            "index": "int",
            "message": {
                "role": "string", "content": "string", "reasoning_content": "string|null",
                "tool_calls": "null",
            },
            "logprobs": entries(), "finish_reason": "string", "matched_stop": "null",
            "prompt_token_ids": ["int"], "response_token_ids": ["int"],
            "meta_info": with(meta(), triples),
        }],
        "usage": usage(), "metadata": {"weight_version": "string"},
        "sglext": {"input_ids": ["int"], "output_ids": [["int"]]},
    })
}

fn asked(further: Value) -> Value {
    let body = json!({
        "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "ignore_eos": true,
        "temperature": 0, "logprobs": true, "top_logprobs": 1, "return_input_ids_in_sglext": true,
        "return_output_ids_in_sglext": true,
    });
    with(body, further)
}

fn lacks(answer: &Value, route: &str) {
    for (place, name) in ABSENT {
        if let Some(object) = answer.pointer(place) {
            assert!(object.get(name).is_none(), "{route}: `{place}/{name}` is told now");
        }
    }
}

#[tokio::test]
async fn a_chat_tells_these_fields() {
    install_tls();
    let running = tiny().await;
    let path = "/v1/chat/completions";
    let further = json!({"return_token_ids": true, "return_meta_info": true});
    let whole = good(&running, path, asked(further)).await;
    like(&chat(), &whole, "chat");
    lacks(&whole, "chat");
    // Who asks for nothing besides is told nothing besides.
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1});
    let bare = good(&running, path, body).await;
    let mut expected = chat();
    expected.as_object_mut().unwrap().remove("sglext");
    let choice = expected["choices"][0].as_object_mut().unwrap();
    for name in ["prompt_token_ids", "response_token_ids", "meta_info"] {
        choice.remove(name);
    }
    choice.extend([
        ("logprobs".to_owned(), json!("null")),
        ("matched_stop".to_owned(), json!("int|null")),
    ]);
    like(&expected, &bare, "bare chat");
    running.shutdown().await;
}

#[tokio::test]
async fn the_events_of_a_chat_tell_these_fields_in_this_order() {
    install_tls();
    let running = tiny().await;
    let further = json!({"stream": true, "stream_options": {"include_usage": true}});
    let events = Events::open(&running, "/v1/chat/completions", asked(further)).await.rest().await;
    let chunk = |choices: Value, further: Value| {
        let chunk = json!({
            "id": "string", "object": "string", "created": "int", "model": "string",
            "choices": choices, "usage": "null",
        });
        with(chunk, further)
    };
    let choice = |delta: Value, log_probs: Value, finish: &str| {
        json!([{"index": "int", "delta": delta, "logprobs": log_probs, "finish_reason": finish,
            "matched_stop": "null"}])
    };
    let [first, between @ .., last, ext, totals] = &events[..] else { panic!("{events:?}") };
    let role = json!({"role": "string", "content": "string", "reasoning_content": "null"});
    like(&chunk(choice(role, json!("null"), "null"), json!({})), first, "first");
    let role = json!({"role": "assistant", "content": "", "reasoning_content": null});
    assert_eq!(first["choices"][0]["delta"], role);
    for event in between {
        let delta = json!({"content": "string|null", "reasoning_content": "string|null"});
        let pattern = choice(delta, json!("object|null"), "null");
        like(&chunk(pattern, json!({})), event, "between");
    }
    let delta = json!({"reasoning_content": "null"});
    let pattern = choice(delta, json!("object|null"), "string");
    like(&chunk(pattern, json!({})), last, "last");
    let told = events.iter().flat_map(|event| event["choices"].as_array().unwrap());
    let told: Vec<_> = told.map(|choice| &choice["logprobs"]).filter(|it| !it.is_null()).collect();
    assert!(!told.is_empty());
    told.into_iter().for_each(|one| like(&entries(), one, "log-probs"));
    let ids = json!({"sglext": {"input_ids": ["int"], "output_ids": [["int"]]}});
    like(&chunk(json!("list"), ids), ext, "ids");
    like(&chunk(json!("list"), json!({"usage": usage()})), totals, "usage");
    for late in [ext, totals] {
        assert_eq!(late["choices"], json!([]));
    }
    running.shutdown().await;
}

/// A `meta_info` of `/generate` with all log-probs that there are.
fn native_meta() -> Value {
    let triple = || json!(["float|null", "int", "string|null"]);
    let lists = json!({
        "input_token_logprobs": [triple()], "output_token_logprobs": [triple()],
        "output_token_logprobs_length": "int",
        "input_top_logprobs": [[triple()]], "output_top_logprobs": [[triple()]],
        "input_token_ids_logprobs": [[triple()]], "output_token_ids_logprobs": [[triple()]],
    });
    with(meta(), lists)
}

#[tokio::test]
async fn generate_tells_these_fields() {
    install_tls();
    let running = tiny().await;
    let body = |longest: u32, stream: bool| {
        json!({
            "input_ids": [5, 6, 7, 8], "return_logprob": true, "logprob_start_len": 1,
            "top_logprobs_num": 2, "token_ids_logprob": [7, 3], "return_prompt_token_ids": true,
            "return_text_in_logprobs": true, "stream": stream,
            "sampling_params": {"max_new_tokens": longest, "ignore_eos": true},
        })
    };
    let mut answers = vec![good(&running, "/generate", body(3, false)).await];
    answers.extend(Events::open(&running, "/generate", body(3, true)).await.rest().await.pop());
    answers.push(good(&running, "/generate", body(0, false)).await);
    for (mut answer, generated) in answers.into_iter().zip([3, 3, 0]) {
        lacks(&answer, "generate");
        let meta = &mut answer["meta_info"];
        // The first of these is null: the position before it was not scored.
        assert_eq!(meta["input_token_logprobs"][0], json!([null, 6, meta_text(meta)]));
        for name in ["input_top_logprobs", "input_token_ids_logprobs"] {
            assert_eq!(meta[name].as_array_mut().unwrap().remove(0), Value::Null);
        }
        let mut pattern = json!({
            "text": "string", "output_ids": ["int"], "prompt_token_ids": ["int"],
            "meta_info": native_meta(),
        });
        if generated == 0 {
            pattern["output_ids"] = json!("list");
            for name in ["token", "top", "token_ids"] {
                pattern["meta_info"][format!("output_{name}_logprobs")] = json!("list");
            }
        }
        like(&pattern, &answer, "generate");
        assert_eq!(answer["output_ids"].as_array().unwrap().len(), generated);
        let finish = json!({"type": "length", "length": generated});
        assert_eq!(answer["meta_info"]["finish_reason"], finish);
    }
    // The text of a triple is null unless it is asked for.
    let mut bare = body(1, false);
    bare.as_object_mut().unwrap().remove("return_text_in_logprobs");
    let bare = good(&running, "/generate", bare).await;
    like(&json!([["float", "int", "null"]]), &bare["meta_info"]["output_token_logprobs"], "bare");
    running.shutdown().await;
}

/// Returns the text of the first scored token, which has no log-prob.
fn meta_text(meta: &Value) -> Value {
    meta["input_token_logprobs"][0][2].clone()
}

#[tokio::test]
async fn what_is_asked_about_the_engine_has_these_fields() {
    install_tls();
    let running = tiny().await;
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let get = async |path: &str| {
        let response = client.get(format!("{}{path}", running.url())).send().await.unwrap();
        assert_eq!(response.status().as_u16(), 200, "{path}");
        response.text().await.unwrap()
    };
    for path in ["/ready", "/health", "/health_generate"] {
        assert_eq!(get(path).await, "", "{path}");
    }
    let info = json!({
        "model_path": "string", "served_model_name": "string", "tokenizer_path": "string",
        "is_generation": "bool", "weight_version": "string", "load_format": "string",
        "reasoning_parser": "string|null", "tool_call_parser": "string", "model_type": "string",
        "max_model_len": "int", "preferred_sampling_params":
            {"temperature": "float", "top_p": "float", "top_k": "int", "min_p": "float"},
    });
    let server = json!({
        "version": "string", "model_path": "string", "served_model_name": "string",
        "dtype": "string", "max_running_requests": "int", "max_queued_requests": "int",
        "kv_memory": "int", "prefix_cache": "int", "chunked_prefill_size": "int",
        "context_length": "int", "weight_version": "string",
        "internal_states": [{
            "running": "int", "waiting": "int", "prefix_bytes": "int", "paused": "bool",
        }],
    });
    let models = json!({"object": "string", "data": [{
        "id": "string", "object": "string", "created": "int", "owned_by": "string",
        "root": "string", "parent": "null", "max_model_len": "int",
    }]});
    for (path, pattern) in [
        ("/model_info", &info),
        ("/get_model_info", &info),
        ("/server_info", &server),
        ("/get_server_info", &server),
        ("/v1/models", &models),
    ] {
        let told: Value = serde_json::from_str(&get(path).await).unwrap();
        like(pattern, &told, path);
        lacks(&told, path);
    }
    running.shutdown().await;
}

#[tokio::test]
async fn control_routes_and_errors_have_these_fields() {
    install_tls();
    let running = tiny().await;
    let folder = tempfile::tempdir().unwrap();
    let adapter = super::adapters::adapter_in(folder.path(), 1);
    let done = || json!({"message": "string", "status": "string"});
    let outcome = || json!({"success": "bool", "message": "string"});
    let updated = || with(outcome(), json!({"num_paused_requests": "int"}));
    let adapters = |error: &str| {
        json!({"success": "bool", "error_message": error, "message": error,
            "loaded_adapters": "object"})
    };
    let flat = || {
        json!({"object": "string", "message": "string", "type": "string", "param": "string|null",
            "code": "int"})
    };
    let native = json!({"error": {"message": "string"}});
    let base = models().join("tiny-qwen3");
    for (path, body, status, pattern) in [
        ("/tokenize", json!({"prompt": "hi"}), 200, tokens()),
        ("/v1/tokenize", json!({"prompt": "hi"}), 200, tokens()),
        ("/detokenize", json!({"tokens": [5]}), 200, json!({"text": "string"})),
        ("/pause_generation", json!({"mode": "retract"}), 200, done()),
        ("/continue_generation", json!({}), 200, done()),
        ("/update_weights_from_disk", json!({"model_path": base}), 200, updated()),
        ("/update_weights_from_disk", json!({"model_path": "gone"}), 400, updated()),
        (
            "/update_weight_version",
            json!({"new_version": "8"}),
            200,
            with(outcome(), json!({"new_version": "string"})),
        ),
        (
            "/load_lora_adapter",
            json!({"lora_name": "a", "lora_path": adapter}),
            200,
            adapters("null"),
        ),
        ("/unload_lora_adapter", json!({"lora_name": "a"}), 200, adapters("null")),
        ("/unload_lora_adapter", json!({"lora_name": "a"}), 400, adapters("string")),
        ("/flush_cache", json!({}), 200, json!("string")),
        ("/abort_request", json!({"abort_all": true}), 200, json!("string")),
        ("/v1/chat/completions", json!({"messages": []}), 400, flat()),
        ("/v1/completions", json!({"prompt": []}), 400, flat()),
        ("/v1/embeddings", json!({"input": "x"}), 400, flat()),
        ("/tokenize", json!({}), 400, flat()),
        ("/nowhere", json!({}), 404, flat()),
        ("/generate", json!({"input_ids": []}), 400, native),
    ] {
        let shown = format!("{path} {body}");
        let (told, answer) = post(&running, path, body).await;
        assert_eq!(told, status, "{shown}: {answer}");
        like(&pattern, &answer, &shown);
    }
    running.shutdown().await;
}

fn tokens() -> Value {
    json!({"count": "int", "max_model_len": "int", "tokens": ["int"]})
}

//! Every field of a request that SGLang and OpenAI's clients know, with an example: what
//! `engine --capabilities` says of it is what happens.

use std::collections::BTreeSet;
use std::path::Path;

use oclaw::serving::{Standing, capabilities};

use super::adapters::adapter_in;
use super::*;

/// A field that does what it says, a value that it takes, and one that it cannot take:
/// who is refused is read.
struct Read {
    route: &'static str,
    field: &'static str,
    good: Value,
    wrong: Value,
}

fn chat_fields(route: &'static str) -> Vec<Read> {
    let odd = || json!({"odd": [1]});
    let mut fields: Vec<_> = [
        ("model", json!("any")),
        ("stream", json!(false)),
        ("stream_options", json!({"include_usage": true})),
        ("max_tokens", json!(1)),
        ("max_completion_tokens", json!(1)),
        ("temperature", json!(0.5)),
        ("top_p", json!(0.5)),
        ("top_k", json!(5)),
        ("min_p", json!(0.1)),
        ("seed", json!(7)),
        ("n", json!(2)),
        ("stop", json!(["a", "b"])),
        ("stop_token_ids", json!([7])),
        ("ignore_eos", json!(true)),
        ("no_stop_trim", json!(true)),
        ("skip_special_tokens", json!(false)),
        ("return_token_ids", json!(true)),
        ("return_prompt_token_ids", json!(true)),
        ("return_meta_info", json!(true)),
        ("return_input_ids_in_sglext", json!(true)),
        ("return_output_ids_in_sglext", json!(true)),
        ("lora_path", json!("")),
        ("rid", json!("r")),
    ]
    .into_iter()
    .map(|(field, good)| Read { route, field, good, wrong: json!([{"odd": 1}]) })
    .collect();
    let of = |field, good| Read { route, field, good, wrong: odd() };
    match route {
        "/v1/completions" => {
            fields.extend([of("prompt", json!("hi")), of("logprobs", json!(1))]);
        }
        _ => fields.extend([
            of("messages", json!([{"role": "user", "content": "hi"}])),
            of("tools", json!([{"type": "function", "function": {"name": "f"}}])),
            of("tool_choice", json!("none")),
            of("logprobs", json!(true)),
            of("top_logprobs", json!(2)),
            of("input_ids", json!([5])),
            Read { wrong: json!("odd"), ..of("chat_template_kwargs", json!({"a": 1})) },
            of("separate_reasoning", json!(false)),
            of("stream_reasoning", json!(false)),
        ]),
    }
    fields
}

fn native_fields(folder: &Path) -> Vec<Read> {
    let odd = || json!({"odd": [1]});
    let base = models().join("tiny-qwen3");
    let of = |route, field, good| Read { route, field, good, wrong: odd() };
    let sampling = |field, good| of("/generate sampling_params", field, good);
    let generate = |field, good| of("/generate", field, good);
    let update = |field, good| of("/update_weights_from_disk", field, good);
    vec![
        generate("text", json!("hi")),
        generate("input_ids", json!([[5], [6]])),
        Read { wrong: json!(5), ..generate("sampling_params", json!({"max_new_tokens": 1})) },
        generate("return_logprob", json!(true)),
        generate("logprob_start_len", json!(0)),
        generate("top_logprobs_num", json!(2)),
        generate("token_ids_logprob", json!([7])),
        generate("return_text_in_logprobs", json!(true)),
        generate("return_prompt_token_ids", json!(true)),
        generate("stream", json!(false)),
        generate("lora_path", json!("")),
        generate("rid", json!("r")),
        sampling("max_new_tokens", json!(1)),
        sampling("temperature", json!(0.5)),
        sampling("top_p", json!(0.5)),
        sampling("top_k", json!(5)),
        sampling("min_p", json!(0.1)),
        sampling("sampling_seed", json!(7)),
        sampling("n", json!(2)),
        sampling("stop", json!("a")),
        sampling("stop_token_ids", json!([7])),
        sampling("ignore_eos", json!(true)),
        sampling("no_stop_trim", json!(true)),
        sampling("skip_special_tokens", json!(false)),
        of("/tokenize", "prompt", json!("hi")),
        of("/tokenize", "messages", json!([{"role": "user", "content": "hi"}])),
        of("/tokenize", "tools", json!([])),
        Read { wrong: json!("odd"), ..of("/tokenize", "chat_template_kwargs", json!({"a": 1})) },
        of("/tokenize", "add_generation_prompt", json!(false)),
        of("/detokenize", "tokens", json!([5])),
        of("/detokenize", "skip_special_tokens", json!(false)),
        of("/pause_generation", "mode", json!("in_place")),
        update("model_path", json!(base)),
        update("weight_version", json!("3")),
        update("abort_all_requests", json!(true)),
        of("/update_weight_version", "new_version", json!("4")),
        of("/update_weight_version", "abort_all_requests", json!(false)),
        of("/load_lora_adapter", "lora_name", json!("named")),
        of("/load_lora_adapter", "lora_path", json!(adapter_in(folder, 1))),
        of("/unload_lora_adapter", "lora_name", json!("loaded")),
        of("/abort_request", "rid", json!("r")),
        of("/abort_request", "abort_all", json!(true)),
    ]
}

/// Returns every field that is read; adapters for them are written into the folder.
fn fields(folder: &Path) -> Vec<Read> {
    let mut fields = native_fields(folder);
    fields.extend(chat_fields("/v1/chat/completions"));
    fields.extend(chat_fields("/v1/completions"));
    fields
}

/// Returns two requests for every such field: with a value that it takes, and with one that
/// it does not. Each is a path and a body.
pub(crate) fn examples(folder: &Path) -> Vec<(String, Value)> {
    let both = |Read { route, field, good, wrong }: Read| {
        [good, wrong].map(|value| request(route, field, &value, folder))
    };
    fields(folder).into_iter().flat_map(both).collect()
}

/// Returns a request that is good, but for a field of this value.
fn request(route: &str, field: &str, value: &Value, folder: &Path) -> (String, Value) {
    let (path, inner) = match route.split_once(' ') {
        Some((path, inner)) => (path, Some(inner)),
        None => (route, None),
    };
    let mut body = match path {
        "/v1/chat/completions" => {
            json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})
        }
        "/v1/completions" => json!({"prompt": [5], "max_tokens": 1}),
        "/generate" if field == "text" => json!({"sampling_params": {"max_new_tokens": 1}}),
        "/generate" => json!({"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}),
        "/tokenize" if field == "messages" => json!({}),
        "/tokenize" => json!({"prompt": "hi"}),
        "/detokenize" => json!({"tokens": [5]}),
        "/update_weights_from_disk" => json!({"model_path": models().join("tiny-qwen3")}),
        "/update_weight_version" => json!({"new_version": "1"}),
        "/load_lora_adapter" => {
            let name = format!("for {field}");
            json!({"lora_name": name, "lora_path": folder.join("adapter-1")})
        }
        "/abort_request" => json!({"rid": "r"}),
        _ => json!({}),
    };
    match inner {
        Some(inner) => body[inner][field] = value.clone(),
        None => body[field] = value.clone(),
    }
    (path.to_owned(), body)
}

#[tokio::test]
async fn what_is_said_of_a_field_is_what_happens() {
    install_tls();
    let folder = tempfile::tempdir().unwrap();
    let running = tiny().await;
    let read = fields(folder.path());
    let body = json!({"lora_name": "loaded", "lora_path": folder.path().join("adapter-1")});
    good(&running, "/load_lora_adapter", body).await;
    for Read { route, field, good: value, wrong } in &read {
        let (path, body) = request(route, field, value, folder.path());
        good(&running, &path, body).await;
        if path == "/pause_generation" {
            good(&running, "/continue_generation", json!({})).await;
        }
        let (path, body) = request(route, field, wrong, folder.path());
        let (status, answer) = post(&running, &path, body.clone()).await;
        assert_eq!(status, 400, "{path} {body}: {answer}");
    }
    let of = |standing: Standing| -> BTreeSet<(&str, &str)> {
        let all = capabilities().into_iter().filter(|one| one.standing == standing);
        all.map(|one| (one.route, one.field)).collect()
    };
    let read: BTreeSet<_> = read.iter().map(|one| (one.route, one.field)).collect();
    assert_eq!(of(Standing::Honoured), read);
    // Each of these is tried in `members`.
    let refused: BTreeSet<_> = super::members::refused_members().into_iter().collect();
    assert_eq!(of(Standing::NeutralOnly), refused);
    for (route, field) in of(Standing::Ignored) {
        // Nobody looks at the value, whatever it is; that of one is at least read.
        let odd = if field == "flush_cache" { json!(false) } else { json!({"odd": [1]}) };
        let (path, body) = request(route, field, &odd, folder.path());
        let (status, answer) = post(&running, &path, body.clone()).await;
        assert_eq!(status, 200, "{path} {body}: {answer}");
    }
    for (route, _) in of(Standing::NoRoute) {
        let (status, answer) = post(&running, route, json!({})).await;
        let expected = if route == "/v1/embeddings" { 400 } else { 404 };
        assert_eq!(status, expected, "{route}: {answer}");
    }
    running.shutdown().await;
}

#[test]
fn a_field_stands_there_once_and_says_why_it_is_not_honoured() {
    let all = capabilities();
    let fields: BTreeSet<_> = all.iter().map(|one| (one.route, one.field)).collect();
    assert_eq!(fields.len(), all.len());
    for one in all {
        assert_eq!(one.note.is_empty(), one.standing == Standing::Honoured, "{one:?}");
    }
}

//! Members that the engine cannot honour: refused by name, unless neutral.

use serde_json::{Value, json};

use super::{good, install_tls, post, tiny};

/// A member, where it stands, values that change nothing, and values that would.
struct Case {
    member: &'static str,
    /// Of chats, of completions, at the top of `/generate`, among its `sampling_params`.
    places: [bool; 4],
    neutral: Value,
    refused: Value,
}

fn case(member: &'static str, places: [u8; 4], neutral: Value, refused: Value) -> Case {
    Case { member, places: places.map(|place| place == 1), neutral, refused }
}

fn table() -> Vec<Case> {
    let grammar = |member| case(member, [1, 1, 0, 1], json!([""]), json!(["[a-z]+"]));
    let penalty = |member| case(member, [1, 1, 0, 1], json!([0, 0.0]), json!([0.5, -1, "0"]));
    vec![
        case("logit_bias", [1, 1, 0, 1], json!([{}]), json!([{"5": 1}])),
        case(
            "response_format",
            [1, 1, 0, 0],
            json!([{"type": "text"}]),
            json!([{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}, {}]),
        ),
        grammar("json_schema"),
        grammar("regex"),
        grammar("ebnf"),
        case("structural_tag", [1, 1, 0, 1], json!([{}]), json!([{"structures": []}])),
        grammar("stop_regex"),
        case("custom_logit_processor", [1, 1, 1, 0], json!([""]), json!(["code"])),
        penalty("frequency_penalty"),
        penalty("presence_penalty"),
        case("repetition_penalty", [1, 1, 0, 1], json!([1, 1.0]), json!([0, 1.1])),
        case("min_tokens", [1, 1, 0, 1], json!([0]), json!([1])),
        case("min_new_tokens", [1, 1, 0, 1], json!([0]), json!([1])),
        case("continue_final_message", [1, 0, 0, 0], json!([false]), json!([true])),
        case("echo", [0, 1, 0, 0], json!([false]), json!([true, 1])),
        case("suffix", [0, 1, 0, 0], json!([""]), json!([" end"])),
        case("best_of", [0, 1, 0, 0], json!([1]), json!([2, 0])),
        case("functions", [1, 0, 0, 0], json!([[]]), json!([[{"name": "f"}]])),
        case("function_call", [1, 0, 0, 0], json!(["none", "auto"]), json!([{"name": "f"}])),
        case("audio", [1, 0, 0, 0], json!([{}]), json!([{"voice": "a", "format": "mp3"}])),
        case("modalities", [1, 0, 0, 0], json!([["text"], []]), json!([["text", "audio"], "text"])),
        case("input_embeds", [0, 0, 1, 0], json!([[]]), json!([[[0.5]]])),
        case("image_data", [0, 0, 1, 0], json!([[]]), json!([["x"]])),
        case("audio_data", [0, 0, 1, 0], json!([[]]), json!(["x"])),
        case("video_data", [0, 0, 1, 0], json!([[]]), json!(["x"])),
        case("session_params", [0, 0, 1, 0], json!([{}]), json!([{"id": "s"}])),
    ]
}

/// Returns what is refused: the routes, as `--capabilities` names them, and the members.
pub(super) fn refused_members() -> Vec<(&'static str, &'static str)> {
    let routes =
        ["/v1/chat/completions", "/v1/completions", "/generate", "/generate sampling_params"];
    let of_case = |case: Case| {
        let there = routes.into_iter().zip(case.places).filter(|(_, there)| *there);
        there.map(move |(route, _)| (route, case.member))
    };
    table().into_iter().flat_map(of_case).collect()
}

fn requests(member: &str, places: [bool; 4], value: &Value) -> Vec<(&'static str, Value)> {
    let mut chat = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1});
    let mut top = json!({"input_ids": [5], "sampling_params": {"max_new_tokens": 1}});
    let mut sampling = top.clone();
    let mut text = json!({"prompt": [5], "max_tokens": 1});
    chat[member] = value.clone();
    text[member] = value.clone();
    top[member] = value.clone();
    sampling["sampling_params"][member] = value.clone();
    let all = [
        (places[0], "/v1/chat/completions", chat),
        (places[1], "/v1/completions", text),
        (places[2], "/generate", top),
        (places[3], "/generate", sampling),
    ];
    all.into_iter().filter(|(here, ..)| *here).map(|(_, path, body)| (path, body)).collect()
}

#[tokio::test]
async fn what_would_change_the_answer_is_refused_by_name() {
    install_tls();
    let running = tiny().await;
    for Case { member, places, neutral, refused } in table() {
        let neutral = neutral.as_array().unwrap().iter().chain([&Value::Null]);
        for (path, body) in neutral.flat_map(|value| requests(member, places, value)) {
            good(&running, path, body).await;
        }
        let refused = refused.as_array().unwrap().iter();
        for (path, body) in refused.flat_map(|value| requests(member, places, value)) {
            let shown = body.to_string();
            let (status, answer) = post(&running, path, body).await;
            assert_eq!(status, 400, "{shown}: {answer}");
            let message = match path {
                "/generate" => &answer["error"]["message"],
                _ => {
                    assert_eq!(answer["param"], member, "{answer}");
                    &answer["message"]
                }
            };
            let expected = format!("`{member}` is not supported: ");
            assert!(message.as_str().unwrap().starts_with(&expected), "{shown}: {answer}");
        }
    }
    running.shutdown().await;
}

/// What client libraries send unasked, and what nobody knows.
#[tokio::test]
async fn neutral_and_unknown_members_pass() {
    install_tls();
    let running = tiny().await;
    let body = json!({
        "model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2,
        "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": null, "n": 1, "store": false,
        "user": "ann", "metadata": {}, "service_tier": "auto", "parallel_tool_calls": true,
        "response_format": {"type": "text"}, "modalities": ["text"], "top_logprobs": 0,
        "prompt_cache_key": "s:0", "tool_choice": "auto", "stop": null, "seed": null, "rid": "",
        "reasoning_effort": "low", "verbosity": "low", "x_vendor": {"a": 1},
    });
    let answer = good(&running, "/v1/chat/completions", body).await;
    assert!(answer["id"].as_str().unwrap().len() > 8, "{answer}");
    let sampling = json!({
        "max_new_tokens": 2, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0,
        "regex": null, "spaces_between_special_tokens": true, "custom_params": null,
    });
    let body = json!({"input_ids": [5], "sampling_params": sampling, "rid": "", "functions": [1]});
    let answer = good(&running, "/generate", body).await;
    assert!(answer["meta_info"]["id"].as_str().unwrap().len() > 8, "{answer}");
    running.shutdown().await;
}

#[tokio::test]
async fn stop_ids_and_their_companions_work_in_a_chat() {
    install_tls();
    let running = tiny().await;
    let ask = |further: Value| {
        let mut body = json!({
            "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 30,
            "ignore_eos": true, "return_token_ids": true,
        });
        body.as_object_mut().unwrap().extend(further.as_object().unwrap().clone());
        body
    };
    let path = "/v1/chat/completions";
    let plain = good(&running, path, ask(json!({}))).await;
    let ids = plain["choices"][0]["response_token_ids"].as_array().unwrap();
    assert_eq!(ids.len(), 30, "`ignore_eos` goes on to the limit");
    let place = ids.iter().position(|id| *id == ids[3]).unwrap();
    let stopped = good(&running, path, ask(json!({"stop_token_ids": [ids[3]]}))).await;
    let choice = &stopped["choices"][0];
    assert_eq!(choice["response_token_ids"].as_array().unwrap().len(), place + 1);
    assert_eq!((&choice["finish_reason"], &choice["matched_stop"]), (&json!("stop"), &ids[3]));
    let kept =
        json!({"stop_token_ids": [ids[3]], "no_stop_trim": true, "skip_special_tokens": false});
    let kept = good(&running, path, ask(kept)).await;
    let (trimmed, whole) =
        (&choice["message"]["content"], &kept["choices"][0]["message"]["content"]);
    assert!(whole.as_str().unwrap().starts_with(trimmed.as_str().unwrap()));
    assert!(whole.as_str().unwrap().len() > trimmed.as_str().unwrap().len(), "{whole} {trimmed}");
    running.shutdown().await;
}

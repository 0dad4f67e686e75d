//! The embedded engine through real sockets, on the tiny models.

mod adapters;
mod answers;
mod bounds;
pub(crate) mod capabilities;
mod completion;
mod control;
mod members;
mod metrics;
mod prefixes;
mod thoughts;
mod weights;

use oclaw::engine::{Engine, EngineOptions, ScoreRequest};
use oclaw::model::Dtype;
use oclaw::serving::{Error, Options, Running, start};
use secrecy::SecretString;
use serde_json::{Value, json};

use crate::harness::fixture_models as models;
use crate::harness::{golden_is_own, has_weights, list, recorded_models, skip_model};

async fn tiny() -> Running {
    start(Options::new(models().join("tiny-qwen3"))).await.unwrap()
}

async fn post(running: &Running, path: &str, body: Value) -> (u16, Value) {
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let request = client.post(format!("{}{path}", running.url())).json(&body);
    let response = request.send().await.unwrap();
    let status = response.status().as_u16();
    let text = response.text().await.unwrap();
    (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
}

async fn good(running: &Running, path: &str, body: Value) -> Value {
    let (status, value) = post(running, path, body).await;
    assert_eq!(status, 200, "{value}");
    value
}

pub(crate) fn install_tls() {
    // reqwest wants a provider even for plain HTTP; a second one is no harm.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

/// A stream that is being read.
struct Events {
    response: reqwest::Response,
    text: String,
}

impl Events {
    async fn open(running: &Running, path: &str, body: Value) -> Self {
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let request = client.post(format!("{}{path}", running.url())).json(&body);
        let response = request.send().await.unwrap();
        assert_eq!(response.status().as_u16(), 200);
        Self { response, text: String::new() }
    }

    /// Returns the next event; nothing at the end.
    async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some((event, rest)) = self.text.split_once("\n\n") {
                let data = event.strip_prefix("data: ").unwrap().to_owned();
                self.text = rest.to_owned();
                return (data != "[DONE]").then(|| serde_json::from_str(&data).unwrap());
            }
            let piece = self.response.chunk().await.unwrap().unwrap();
            self.text.push_str(std::str::from_utf8(&piece).unwrap());
        }
    }

    async fn rest(mut self) -> Vec<Value> {
        let mut events = Vec::new();
        while let Some(event) = self.next().await {
            events.push(event);
        }
        events
    }
}

fn ids(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect()
}

#[tokio::test]
async fn greedy_ids_and_log_probs_are_the_golden_ones() {
    install_tls();
    let mut compared = 0;
    for (name, recorded) in recorded_models() {
        let is_tiny = name.starts_with("tiny-");
        // Elsewhere the figure of `golden/README.md`; the tiny models are nearer.
        let tolerance = if is_tiny { 1e-4 } else { 2e-4 };
        let folder = crate::harness::models().join(&name);
        // The large model is checked where it is fetched: `scripts/golden-smollm2.sh`.
        if !has_weights(&folder) {
            continue;
        }
        let mut options = Options::new(folder);
        options.dtype = Some(Dtype::F32);
        let running = start(options).await.unwrap();
        for case in list(&recorded, "greedy") {
            let expected = ids(&case["output_ids"]);
            let body = json!({
                "input_ids": case["prompt_ids"], "return_logprob": true,
                "sampling_params": {"temperature": 0, "max_new_tokens": expected.len(), "ignore_eos": true},
            });
            let answer = good(&running, "/generate", body).await;
            // From a near tie on, either continuation is right.
            let near = |margin: &Value| margin.as_f64().is_some_and(|margin| margin < 5e-3);
            let margins = case["top2_logit_margin"].as_array();
            let tie = margins.and_then(|margins| margins.iter().position(near));
            let sure = tie.unwrap_or(expected.len());
            assert!(!(is_tiny && golden_is_own()) || sure == expected.len(), "{name}: {sure}");
            let output = ids(&answer["output_ids"]);
            let entries = answer["meta_info"]["output_token_logprobs"].as_array().unwrap();
            let log_probs = case["log_probs"].as_array().unwrap();
            let lengths = [output.len(), entries.len(), log_probs.len()];
            assert_eq!(lengths, [expected.len(); 3], "{name}");
            assert_eq!(output[..sure], expected[..sure], "{name}");
            for (entry, log_prob) in entries.iter().zip(log_probs).take(sure) {
                let apart = (entry[0].as_f64().unwrap() - log_prob.as_f64().unwrap()).abs();
                assert!(apart < tolerance, "{name}: {entry} {log_prob}");
                compared += 1;
            }
        }
        running.shutdown().await;
    }
    if compared == 0 {
        skip_model("no recorded greedy token of a model with weights");
    }
}

#[tokio::test]
async fn a_stream_says_what_the_whole_answer_says() {
    install_tls();
    let running = tiny().await;
    let body = |stream: bool| {
        json!({
            "messages": [{"role": "user", "content": "Write a line."}], "max_tokens": 40, "seed": 11,
            "temperature": 0.8, "n": 2, "logprobs": true, "top_logprobs": 2, "stream": stream,
            "return_input_ids_in_sglext": true, "return_output_ids_in_sglext": true,
            "stream_options": {"include_usage": true},
        })
    };
    let whole = good(&running, "/v1/chat/completions", body(false)).await;
    let events = Events::open(&running, "/v1/chat/completions", body(true)).await.rest().await;
    for index in 0..2 {
        let mut text = String::new();
        let mut entries = Vec::new();
        let mut finish = Value::Null;
        let choices = events.iter().flat_map(|event| event["choices"].as_array().unwrap());
        for choice in choices.filter(|choice| choice["index"] == index) {
            assert!(choice["delta"].get("reasoning_content").is_some(), "{choice}");
            text += choice["delta"]["content"].as_str().unwrap_or_default();
            entries.extend(choice["logprobs"]["content"].as_array().cloned().unwrap_or_default());
            assert_eq!(finish, Value::Null, "nothing comes after the end");
            finish = choice["finish_reason"].clone();
        }
        let expected = &whole["choices"][index];
        assert_eq!(text, expected["message"]["content"].as_str().unwrap());
        assert_eq!(Value::Array(entries), expected["logprobs"]["content"]);
        assert_eq!(finish, expected["finish_reason"]);
        let count = whole["sglext"]["output_ids"][index].as_array().unwrap().len();
        assert_eq!(expected["logprobs"]["content"].as_array().unwrap().len(), count);
    }
    let late: Vec<_> = events.iter().filter(|event| event.get("sglext").is_some()).collect();
    assert_eq!(late.len(), 1);
    assert_eq!((&late[0]["choices"], &late[0]["sglext"]), (&json!([]), &whole["sglext"]));
    assert_eq!(events.last().unwrap()["usage"], whole["usage"]);
    assert_eq!(whole["metadata"], json!({"weight_version": "0"}));
    running.shutdown().await;
}

#[tokio::test]
async fn log_probs_of_an_answer_are_those_of_score_mode() {
    install_tls();
    let running = tiny().await;
    let engine = Engine::connect(EngineOptions::new(running.url())).await.unwrap();
    assert_eq!(engine.model(), Some("tiny-qwen3"));
    let body = json!({
        "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 60, "seed": 5,
        "temperature": 1.0, "logprobs": true, "return_token_ids": true, "return_meta_info": true,
    });
    let answer = good(&running, "/v1/chat/completions", body).await;
    let choice = &answer["choices"][0];
    let (prompt, response) = (ids(&choice["prompt_token_ids"]), ids(&choice["response_token_ids"]));
    let all = prompt.iter().chain(&response).map(|id| *id as i32).collect();
    let scores = ScoreRequest { ids: all, start: prompt.len(), ..Default::default() };
    let scores = engine.score(&scores).await.unwrap().log_probs;
    let entries = choice["logprobs"]["content"].as_array().unwrap();
    assert_eq!((entries.len(), scores.len()), (response.len(), response.len()));
    assert_eq!(answer["usage"]["completion_tokens"], response.len());
    for (place, (entry, score)) in entries.iter().zip(scores).enumerate() {
        let sampled = entry["logprob"].as_f64().unwrap();
        assert!((sampled - f64::from(score)).abs() < 1e-4, "{place}: {sampled} {score}");
        let triple = &choice["meta_info"]["output_token_logprobs"][place];
        assert_eq!(
            (triple[0].as_f64(), triple[1].as_i64()),
            (Some(sampled), Some(response[place]))
        );
    }
    running.shutdown().await;
}

#[tokio::test]
async fn score_mode_has_sglangs_shape() {
    install_tls();
    let running = tiny().await;
    let body = json!({
        "input_ids": [5, 6, 7, 8], "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": true, "logprob_start_len": 1, "top_logprobs_num": 2, "token_ids_logprob": [7, 3],
    });
    let answer = good(&running, "/generate", body).await;
    let meta = &answer["meta_info"];
    let own = meta["input_token_logprobs"].as_array().unwrap();
    assert_eq!(own[0], json!([null, 6, null]));
    let told: Vec<_> = own.iter().map(|entry| entry[1].as_i64().unwrap()).collect();
    assert_eq!(told, [6, 7, 8]);
    let (top, chosen) = (&meta["input_top_logprobs"], &meta["input_token_ids_logprobs"]);
    assert_eq!((&top[0], &chosen[0]), (&Value::Null, &Value::Null));
    assert_eq!(chosen[1][0], own[1], "id 7 stands at place 1");
    assert!(top[2][0][0].as_f64() >= top[2][1][0].as_f64());
    assert_eq!(meta["finish_reason"], json!({"type": "length", "length": 0}));
    assert_eq!((&answer["output_ids"], &answer["text"]), (&json!([]), &json!("")));
    running.shutdown().await;
}

fn endless(rid: &str) -> Value {
    json!({
        "input_ids": [5, 6], "stream": true, "rid": rid,
        "sampling_params": {"max_new_tokens": 2000, "ignore_eos": true},
    })
}

/// Ends a running stream of this name, `a`, by a request. A stream that came to its own
/// end before the request arrived, as on a busy machine it may, is opened again.
async fn cut_off(running: &Running, path: &str, body: Value) {
    for _ in 0..20 {
        let mut stream = Events::open(running, "/generate", endless("a")).await;
        stream.next().await.unwrap();
        let (status, told) = post(running, path, body.clone()).await;
        assert_eq!(status, 200, "{told}");
        let last = stream.rest().await.pop().unwrap();
        let finish = &last["meta_info"]["finish_reason"]["type"];
        if finish != "length" {
            assert_eq!(finish, "abort");
            assert!(last["output_ids"].as_array().unwrap().len() < 2000);
            return;
        }
        good(running, "/continue_generation", json!({})).await;
    }
    panic!("{path} never came in time");
}

#[tokio::test]
async fn requests_end_when_told_to_or_when_nobody_listens() {
    install_tls();
    let running = tiny().await;
    let gone = Events::open(&running, "/generate", endless("b")).await;
    drop(gone);
    cut_off(&running, "/abort_request", json!({"rid": "a"})).await;
    // A pause with mode `abort` ends what runs; what comes then waits.
    cut_off(&running, "/pause_generation", json!({})).await;
    let short = json!({"input_ids": [5], "sampling_params": {"max_new_tokens": 1}});
    let (waited, ()) = tokio::join!(post(&running, "/generate", short), async {
        let ready = reqwest::get(format!("{}/ready", running.url())).await.unwrap();
        assert_eq!(ready.status().as_u16(), 503);
        post(&running, "/continue_generation", json!({})).await;
    });
    assert_eq!(waited.0, 200);
    running.shutdown().await;
}

/// An answer whose prompt is scored first is there to be aborted from the beginning, and
/// the score with it: while the engine is on hold nothing else would end it.
#[tokio::test]
async fn a_stream_can_be_aborted_while_its_prompt_is_scored() {
    install_tls();
    let running = tiny().await;
    good(&running, "/pause_generation", json!({"mode": "in_place"})).await;
    let mut body = endless("a");
    body["return_logprob"] = json!(true);
    body["logprob_start_len"] = json!(0);
    let (stream, ()) = tokio::join!(Events::open(&running, "/generate", body), async {
        // The answer and the score.
        metrics::until(&running, "num_queue_reqs", 2.0).await;
        let (status, told) = post(&running, "/abort_request", json!({"rid": "a"})).await;
        assert_eq!(status, 200, "{told}");
    });
    let last = stream.rest().await.pop().unwrap();
    let meta = &last["meta_info"];
    assert_eq!(
        (&meta["finish_reason"]["type"], &last["output_ids"]),
        (&json!("abort"), &json!([]))
    );
    assert_eq!(meta["input_token_logprobs"], json!([]));
    running.shutdown().await;
}

/// A request that only scores ends like any other: by its name, with all, by a pause.
#[tokio::test]
async fn scores_end_when_they_are_aborted() {
    install_tls();
    let running = tiny().await;
    let score = |rid: &str, longest: u64| {
        json!({
            "input_ids": [5, 6, 7], "rid": rid, "return_logprob": true, "logprob_start_len": 0,
            "sampling_params": {"max_new_tokens": longest, "ignore_eos": true},
        })
    };
    for (path, body) in [
        ("/abort_request", json!({"rid": "a"})),
        ("/abort_request", json!({"abort_all": true})),
        ("/pause_generation", json!({"mode": "abort"})),
    ] {
        good(&running, "/pause_generation", json!({"mode": "in_place"})).await;
        let asked = [0, 9].map(|longest| post(&running, "/generate", score("a", longest)));
        let (ended, ()) = tokio::join!(futures_util::future::join_all(asked), async {
            // Two scores and an answer.
            metrics::until(&running, "num_queue_reqs", 3.0).await;
            let (status, told) = post(&running, path, body.clone()).await;
            assert_eq!(status, 200, "{path}: {told}");
        });
        for (status, answer) in ended {
            assert_eq!(status, 200, "{path} {body}: {answer}");
            let meta = &answer["meta_info"];
            assert_eq!(meta["finish_reason"]["type"], "abort", "{path} {body}");
            assert_eq!(meta["input_token_logprobs"], json!([]), "{path} {body}");
            assert_eq!(meta["completion_tokens"], 0, "{path} {body}");
        }
    }
    good(&running, "/continue_generation", json!({})).await;
    let scored = good(&running, "/generate", score("a", 0)).await;
    assert_eq!(scored["meta_info"]["input_token_logprobs"].as_array().unwrap().len(), 3);
    assert_eq!(scored["meta_info"]["finish_reason"]["type"], "length");
    running.shutdown().await;
}

#[tokio::test]
async fn stops_end_an_answer_and_stay_out_of_its_text() {
    install_tls();
    let running = tiny().await;
    let ask = |further: Value| {
        let mut sampling = json!({"temperature": 0, "max_new_tokens": 30, "ignore_eos": true});
        sampling.as_object_mut().unwrap().extend(further.as_object().unwrap().clone());
        json!({"input_ids": [5, 6, 7, 8], "sampling_params": sampling, "return_logprob": true})
    };
    let plain = good(&running, "/generate", ask(json!({}))).await;
    let text = plain["text"].as_str().unwrap().to_owned();
    let third = plain["output_ids"][2].clone();
    let by_id = good(&running, "/generate", ask(json!({"stop_token_ids": [third]}))).await;
    let place = ids(&plain["output_ids"]).iter().position(|id| json!(id) == third).unwrap();
    assert_eq!(by_id["output_ids"].as_array().unwrap().len(), place + 1);
    assert_eq!(by_id["meta_info"]["finish_reason"], json!({"type": "stop", "matched": third}));
    assert_eq!(by_id["meta_info"]["output_token_logprobs_length"], place + 1);
    assert!(text.starts_with(by_id["text"].as_str().unwrap()));
    let stop: String = text.chars().skip(6).take(3).collect();
    let by_text = good(&running, "/generate", ask(json!({"stop": stop}))).await;
    assert_eq!(by_text["text"].as_str().unwrap(), text.split_once(&stop).unwrap().0);
    assert_eq!(by_text["meta_info"]["finish_reason"], json!({"type": "stop", "matched": stop}));
    let kept =
        good(&running, "/generate", ask(json!({"stop": [stop], "no_stop_trim": true}))).await;
    assert!(kept["text"].as_str().unwrap().ends_with(&stop));
    running.shutdown().await;
}

#[tokio::test]
async fn what_runs_beside_a_request_does_not_change_it() {
    install_tls();
    let running = tiny().await;
    let ask = |seed: u64| {
        let sampling = json!({"temperature": 0.7, "max_new_tokens": 50, "sampling_seed": seed, "ignore_eos": true});
        json!({"input_ids": [9, 10, 11], "sampling_params": sampling, "return_logprob": true})
    };
    let alone = good(&running, "/generate", ask(1)).await;
    let many =
        futures_util::future::join_all((1..=9).map(|seed| good(&running, "/generate", ask(seed))))
            .await;
    assert_eq!(many[0]["output_ids"], alone["output_ids"]);
    let log_probs = |value: &Value| -> Vec<f64> {
        let entries = value["meta_info"]["output_token_logprobs"].as_array().unwrap();
        entries.iter().map(|entry| entry[0].as_f64().unwrap()).collect()
    };
    for (one, other) in log_probs(&alone).iter().zip(log_probs(&many[0])) {
        assert!((one - other).abs() < 1e-5, "{one} {other}");
    }
    assert_ne!(many[0]["output_ids"], many[1]["output_ids"]);
    running.shutdown().await;
}

#[tokio::test]
async fn bad_requests_are_told_what_is_wrong() {
    install_tls();
    let running = tiny().await;
    let hello = json!([{"role": "user", "content": "hi"}]);
    let chat = "/v1/chat/completions";
    let table = [
        (chat, json!({}), "`messages` is empty"),
        (chat, json!({"messages": []}), "`messages` is empty"),
        (chat, json!({"messages": [1]}), "`messages[0]` has no `role`"),
        (chat, json!({"messages": [{"role": 5, "content": "x"}]}), "`messages[0]` has no `role`"),
        (
            chat,
            json!({"messages": [{"role": "user", "content": {"a": 1}}]}),
            "`messages[0].content` is neither text nor a list of parts",
        ),
        (chat, json!({"messages": hello, "temperature": -1}), "`temperature` is -1"),
        (
            chat,
            json!({"messages": hello, "temperature": 1e300}),
            "`temperature` is 1e300; it may be 0 to 1000",
        ),
        (chat, json!([1]), "the body is no JSON object"),
        (chat, json!({"messages": hello, "stream_options": 5}), "expected an object"),
        (chat, json!({"messages": hello, "max_tokens": 0}), "`max_tokens` is 0"),
        (
            chat,
            json!({"messages": hello, "max_tokens": 5, "max_completion_tokens": 0}),
            "`max_completion_tokens` is 0",
        ),
        (chat, json!({"messages": hello, "top_logprobs": -1}), "`top_logprobs` is -1"),
        (chat, json!({"messages": hello, "top_logprobs": 65}), "it may be 0 to 64"),
        (
            chat,
            json!({"messages": hello, "stop_token_ids": [5, 1024]}),
            "`stop_token_ids` has 1024, outside the vocabulary of 1024",
        ),
        (chat, json!({"messages": hello, "top_p": 0}), "`top_p` is 0"),
        // More than 0, but not in the sampler's numbers; told before a stream begins.
        (chat, json!({"messages": hello, "stream": true, "top_p": 1e-60}), "may be above 0, to 1"),
        (chat, json!({"messages": hello, "top_k": 0}), "`top_k` is 0"),
        (chat, json!({"messages": hello, "n": 0}), "`n` is 0"),
        (chat, json!({"messages": hello, "stop": 3}), "`stop` is neither"),
        (
            chat,
            json!({"messages": hello, "stream": true, "return_token_ids": true}),
            "do not go with `stream`",
        ),
        (
            chat,
            json!({"messages": hello, "max_tokens": 5000}),
            "5000 of answer make 5013; the model's context holds 2048",
        ),
        (
            chat,
            json!({"messages": hello, "input_ids": [2000]}),
            "id 2000 is outside the vocabulary of 1024",
        ),
        ("/generate", json!({}), "exactly one of"),
        ("/generate", json!({"input_ids": []}), "the input has no tokens"),
        ("/generate", json!({"input_ids": [-1]}), "id -1 is outside"),
        ("/generate", json!({"input_ids": vec![1; 2048]}), "the input has 2048 tokens"),
        (
            "/generate",
            json!({"input_ids": [1], "return_logprob": true, "logprob_start_len": 2}),
            "`logprob_start_len` is 2",
        ),
        (
            "/generate",
            json!({"input_ids": [1], "sampling_params": {"stop_token_ids": [-1]}}),
            "`stop_token_ids` has -1",
        ),
        ("/generate", json!({"input_ids": [1], "top_logprobs_num": 65}), "it may be 0 to 64"),
        ("/generate", json!({"input_ids": [1], "sampling_params": 5}), "expected an object"),
        ("/generate", json!({"input_ids": [1], "rid": 5}), "`rid` is neither"),
        ("/tokenize", json!({}), "exactly one of"),
        ("/tokenize", json!({"messages": [{"content": "x"}]}), "`messages[0]` has no `role`"),
        ("/detokenize", json!({"tokens": [5, 99999]}), "id 99999 is not in the vocabulary"),
        ("/detokenize", json!({"tokens": [-1]}), "id -1 is not in the vocabulary"),
        ("/detokenize", json!({"tokens": 5}), "expected a sequence"),
        ("/abort_request", json!({"rid": ""}), "give a `rid`"),
        ("/abort_request", json!(5), "the body is no JSON object"),
        ("/pause_generation", json!({"mode": "x"}), "unknown variant `x`"),
        ("/pause_generation", json!({"mode": 5}), "expected"),
        ("/update_weights_from_disk", json!({}), "missing field `model_path`"),
    ];
    for (path, body, expected) in table {
        let shown: String = body.to_string().chars().take(80).collect();
        let (status, answer) = post(&running, path, body).await;
        assert_eq!(status, 400, "{shown}: {answer}");
        let message = match path {
            "/generate" => &answer["error"]["message"],
            _ => &answer["message"],
        };
        let message = message.as_str().unwrap();
        assert!(message.contains(expected), "{shown}: {answer}");
        assert!(!message.contains("struct ") && !message.contains("enum "), "{shown}: {answer}");
        if path != "/generate" {
            assert_eq!((&answer["object"], &answer["code"]), (&json!("error"), &json!(400)));
        }
    }
    running.shutdown().await;
}

#[tokio::test]
async fn messages_are_tokenized_as_the_chat_renders_them() {
    install_tls();
    let running = tiny().await;
    let messages = json!([{"role": "user", "content": "hi <|im_end|>"}]);
    let told = good(&running, "/tokenize", json!({"messages": messages})).await;
    let body = json!({"messages": messages, "max_tokens": 1, "return_token_ids": true});
    let chat = good(&running, "/v1/chat/completions", body).await;
    assert_eq!(told["tokens"], chat["choices"][0]["prompt_token_ids"]);
    assert_eq!(told["count"], told["tokens"].as_array().unwrap().len());
    let plain = good(&running, "/tokenize", json!({"prompt": "hello there"})).await;
    let back = good(&running, "/detokenize", json!({"tokens": plain["tokens"]})).await;
    assert_eq!(back["text"], "hello there");
    running.shutdown().await;
}

#[tokio::test]
async fn a_key_guards_all_but_health() {
    install_tls();
    let mut options = Options::new(models().join("tiny-qwen3"));
    options.key = Some(SecretString::from("right"));
    let running = start(options).await.unwrap();
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    for (path, open) in [
        ("/health", true),
        ("/ready", true),
        ("/metrics", true),
        ("/model_info", false),
        ("/v1/models", false),
    ] {
        for (given, good) in [
            (None, false),
            (Some("Bearer right"), true),
            (Some("bearer right"), true),
            (Some("Bearer wrong"), false),
            (Some("Bearer "), false),
            (Some("right"), false),
        ] {
            let mut request = client.get(format!("{}{path}", running.url()));
            if let Some(given) = given {
                request = request.header("authorization", given);
            }
            let expected = if open || good { 200 } else { 401 };
            assert_eq!(
                request.send().await.unwrap().status().as_u16(),
                expected,
                "{path} {given:?}"
            );
        }
    }
    // What only begins like an open path is none.
    for path in ["/healthy", "/health/x", "/ready/", "/metrics-of-all"] {
        let request = || client.post(format!("{}{path}", running.url())).body("x");
        assert_eq!(request().send().await.unwrap().status().as_u16(), 401, "{path}");
        let request = request().bearer_auth("right");
        assert_eq!(request.send().await.unwrap().status().as_u16(), 404, "{path}");
    }
    // Who sends much hears the refusal nevertheless.
    let long = vec![b' '; 100 << 20];
    let request = client.post(format!("{}/generate", running.url())).body(long);
    let response = request.bearer_auth("wrong").send().await.unwrap();
    assert_eq!(response.status().as_u16(), 401);
    let told: Value = serde_json::from_str(&response.text().await.unwrap()).unwrap();
    assert_eq!(told["message"], "wrong or missing key");
    running.shutdown().await;
}

#[tokio::test]
async fn what_cannot_be_served_is_refused_at_the_start() {
    let folder = models().join("tiny-qwen3");
    let mut options = Options::new(&folder);
    options.listen = "0.0.0.0:0".parse().unwrap();
    assert!(matches!(start(options).await, Err(Error::OpenToAll { .. })));
    assert!(matches!(start(Options::new("gone")).await, Err(Error::NoFolder { .. })));
    let busy = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut options = Options::new(&folder);
    options.listen = busy.local_addr().unwrap();
    assert!(matches!(start(options).await, Err(Error::Listen { .. })));
    let empty = tempfile::tempdir().unwrap();
    assert!(matches!(start(Options::new(empty.path())).await, Err(Error::Template(_))));
}

/// A client that cut a tool result inside an emoji (C14).
#[tokio::test]
async fn half_a_surrogate_pair_does_not_end_a_conversation() {
    install_tls();
    let running = tiny().await;
    let body = r#"{"messages": [{"role": "user", "content": "cut \ud83d"}], "max_tokens": 2}"#;
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let address = format!("{}/v1/chat/completions", running.url());
    let response = client.post(address).body(body).send().await.unwrap();
    assert_eq!(response.status(), 200);
    running.shutdown().await;
}

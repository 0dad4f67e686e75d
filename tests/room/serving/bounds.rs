//! Requests that ask for too much: they hear so with the numbers, and the others go on.

use oclaw::model::{Cache, Config};

use super::*;

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
const NATIVE: &str = "/generate";

/// Returns a body of `/generate` with further members.
fn native(prompt: Value, sampling: Value, further: Value) -> Value {
    let mut body = json!({"input_ids": prompt, "sampling_params": sampling});
    body.as_object_mut().unwrap().extend(further.as_object().unwrap().clone());
    body
}

fn too_much() -> Vec<(&'static str, Value, &'static str)> {
    let hello = json!([{"role": "user", "content": "hi"}]);
    let huge = "9223372036854775807 of answer make 92233720368547758";
    let sampling = |longest: i64| json!({"max_new_tokens": longest});
    let chosen = json!({"return_logprob": true, "token_ids_logprob": vec![7; 4097]});
    let stops = |count: usize| json!({"max_new_tokens": 1, "stop": vec!["x"; count]});
    let long = json!({"max_new_tokens": 1, "stop": "x".repeat(4097)});
    let stop_ids = json!({"max_new_tokens": 1, "stop_token_ids": vec![7; 1025]});
    let name = "x".repeat(4097);
    vec![
        (NATIVE, native(json!([1]), sampling(i64::MAX), json!({})), huge),
        (CHAT, json!({"messages": hello, "max_tokens": i64::MAX}), huge),
        (TEXT, json!({"prompt": [5], "max_tokens": i64::MAX}), huge),
        (
            NATIVE,
            native(json!(vec![[5]; 4097]), sampling(1), json!({})),
            "the request has 4097 prompts; it may have 4096",
        ),
        (
            TEXT,
            json!({"prompt": vec!["a"; 4097], "max_tokens": 1}),
            "the request has 4097 prompts; it may have 4096",
        ),
        (
            NATIVE,
            native(json!(vec![[5]; 33]), json!({"max_new_tokens": 1, "n": 128}), json!({})),
            "33 prompts of 128 answers each make 4224; a request may have 4096",
        ),
        (
            TEXT,
            json!({"prompt": vec![[5]; 33], "max_tokens": 1, "n": 128}),
            "33 prompts of 128 answers each make 4224; a request may have 4096",
        ),
        (
            NATIVE,
            native(json!([[5], [6]]), sampling(512), chosen),
            "`token_ids_logprob` has 4097 ids for 1024 positions, which makes 4195328 log-probs; \
             a request may ask for 4194304",
        ),
        (NATIVE, native(json!([5]), stops(65), json!({})), "`stop` has 65 strings; it may have 64"),
        (
            NATIVE,
            native(json!([5]), long, json!({})),
            "`stop` has a string of 4097 bytes; one may have 4096",
        ),
        (CHAT, json!({"messages": hello, "stop": vec!["x"; 65]}), "`stop` has 65"),
        (
            NATIVE,
            native(json!([5]), stop_ids, json!({})),
            "`stop_token_ids` has 1025 ids; it may have 1024",
        ),
        (
            CHAT,
            json!({"messages": hello, "model": name}),
            "`model` has 4097 bytes; it may have 4096",
        ),
        (CHAT, json!({"messages": hello, "rid": name}), "`rid` has 4097"),
        (TEXT, json!({"prompt": [5], "rid": name}), "`rid` has 4097"),
        (NATIVE, native(json!([[5], [6]]), sampling(1), json!({"rid": name})), "`rid` has 4097"),
        (
            NATIVE,
            native(json!([5]), sampling(1), json!({"lora_path": name})),
            "`lora_path` has 4097",
        ),
        (
            "/load_lora_adapter",
            json!({"lora_name": name, "lora_path": "a"}),
            "`lora_name` has 4097",
        ),
        ("/update_weight_version", json!({"new_version": name}), "`new_version` has 4097"),
        (
            "/update_weights_from_disk",
            json!({"model_path": "gone", "weight_version": name}),
            "`weight_version` has 4097",
        ),
    ]
}

fn unfit() -> Vec<(&'static str, Value, &'static str)> {
    let two = |further: Value| native(json!([[5], [6]]), json!({"max_new_tokens": 1}), further);
    let one = |further: Value| native(json!([5]), json!({"max_new_tokens": 1}), further);
    vec![
        (NATIVE, two(json!({"rid": ["a"]})), "`rid` has 1 entries for 2 prompts"),
        (NATIVE, one(json!({"rid": ["a", "b"]})), "`rid` has 2 entries for 1 prompts"),
        (
            NATIVE,
            two(json!({"lora_path": [null, null, null]})),
            "`lora_path` has 3 entries for 2 prompts",
        ),
        (NATIVE, two(json!({"rid": [5, "b"]})), "`rid` is neither a string nor a list of strings"),
        (
            NATIVE,
            native(json!([5, 6]), json!({"max_new_tokens": 0, "n": 2}), json!({})),
            "`n` is 2, but with `max_new_tokens` 0 there is no answer",
        ),
        (NATIVE, json!({"text": []}), "`text` is empty"),
    ]
}

#[tokio::test]
async fn too_much_is_refused_with_the_numbers() {
    install_tls();
    let running = tiny().await;
    for (path, body, expected) in too_much().into_iter().chain(unfit()) {
        let shown: String = body.to_string().chars().take(80).collect();
        let (status, answer) = post(&running, path, body).await;
        assert_eq!(status, 400, "{shown}: {answer}");
        let message = if path == NATIVE { &answer["error"]["message"] } else { &answer["message"] };
        assert!(message.as_str().unwrap().contains(expected), "{shown}: {answer}");
    }
    // As much as there may be is taken.
    let sampling = json!({"max_new_tokens": 1, "stop": vec!["x".repeat(4096); 64]});
    let further = json!({"rid": ["a", null], "lora_path": [null, ""]});
    let both = good(&running, NATIVE, native(json!([[5], [6]]), sampling, further)).await;
    assert_eq!(both.as_array().unwrap().len(), 2);
    assert_eq!(both[0]["meta_info"]["id"], "a");
    running.shutdown().await;
}

/// What the router refuses by itself is told like all else, and bodies that nobody wants are
/// read on: who sends one must hear the answer.
#[tokio::test]
async fn a_wrong_method_and_too_long_a_body_are_refused_in_words() {
    install_tls();
    let running = tiny().await;
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let address = |path: &str| format!("{}{path}", running.url());
    let long = vec![b' '; 100 << 20];
    let unwanted = vec![b'x'; 8 << 20];
    for (request, status, expected) in [
        (client.get(address(CHAT)), 405, "no route GET /v1/chat/completions"),
        (client.post(address("/health")), 405, "no route POST /health"),
        (client.post(address(NATIVE)).body(long), 413, "the body has more than 67108864 bytes"),
        (
            client.put(address(CHAT)).body(unwanted.clone()),
            405,
            "no route PUT /v1/chat/completions",
        ),
        (client.post(address("/nowhere")).body(unwanted.clone()), 404, "no route POST /nowhere"),
        (client.post(address("/v1/embeddings")).body(unwanted), 400, "makes no embeddings"),
    ] {
        let response = request.send().await.unwrap();
        assert_eq!(response.status().as_u16(), status, "{expected}");
        let told: Value = serde_json::from_str(&response.text().await.unwrap()).unwrap();
        assert_eq!((&told["object"], &told["code"]), (&json!("error"), &json!(status)), "{told}");
        assert_eq!(told["type"] == "NotFoundError", status == 404, "{told}");
        assert!(told["message"].as_str().unwrap().contains(expected), "{told}");
    }
    running.shutdown().await;
}

#[tokio::test]
async fn a_body_that_breaks_off_is_refused_in_words() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    install_tls();
    let running = tiny().await;
    for path in [CHAT, "/abort_request"] {
        let mut stream = tokio::net::TcpStream::connect(running.address).await.unwrap();
        let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n");
        stream.write_all(format!("{head}2\r\n{{}}\r\nno length\r\n").as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 400 "), "{path}: {answer}");
        let (_, told) = answer.split_once("\r\n\r\n").unwrap();
        let told: Value = serde_json::from_str(told).unwrap();
        assert_eq!(told["message"], "the request's body broke off", "{path}");
    }
    running.shutdown().await;
}

/// At next to no temperature all tokens but one are as good as impossible: JSON has no
/// word for their log-probs, and null would be none.
#[tokio::test]
async fn a_log_prob_is_a_number_at_every_temperature() {
    install_tls();
    let running = tiny().await;
    for temperature in [0.0, 1e-44, 1e-6, 1000.0] {
        let sampling = json!({"max_new_tokens": 3, "temperature": temperature, "ignore_eos": true});
        let further =
            json!({"return_logprob": true, "top_logprobs_num": 3, "token_ids_logprob": [7, 9]});
        let answer = good(&running, NATIVE, native(json!([5]), sampling, further)).await;
        let meta = &answer["meta_info"];
        let lists = ["output_top_logprobs", "output_token_ids_logprobs"];
        let places = lists.iter().flat_map(|list| meta[list].as_array().unwrap());
        let entries = places.flat_map(|place| place.as_array().unwrap());
        let all: Vec<_> =
            entries.chain(meta["output_token_logprobs"].as_array().unwrap()).collect();
        assert_eq!(all.len(), 3 * 3 + 3 * 2 + 3);
        for entry in all {
            let told = entry[0].as_f64().unwrap();
            assert!(told <= 0.0 && (told as f32).is_finite(), "{temperature}: {entry}");
        }
    }
    running.shutdown().await;
}

/// Starts the tiny model with room for so many tokens of one answer; returns the bytes.
async fn remembering(tokens: usize) -> (Running, usize) {
    let folder = models().join("tiny-qwen3");
    let bytes = Cache::bytes_of(&Config::read(&folder).unwrap(), tokens);
    let mut options = Options::new(folder);
    options.kv_memory = Some(bytes);
    (start(options).await.unwrap(), bytes)
}

#[tokio::test]
async fn what_the_memory_for_keys_and_values_cannot_hold_is_refused_or_shortened() {
    install_tls();
    let (running, bytes) = remembering(512).await;
    let sampling = |longest: u64| json!({"max_new_tokens": longest, "ignore_eos": true});
    let ask = |longest: u64| native(json!([5]), sampling(longest), json!({}));
    let (status, answer) = post(&running, NATIVE, ask(512)).await;
    let expected = format!(
        "1 tokens of input and 512 of answer make 513; the memory for keys and values ({bytes} \
         bytes, `--kv-memory`) holds 512"
    );
    assert_eq!((status, &answer["error"]["message"]), (400, &json!(expected)));
    // Scores need none of it.
    let score = json!({"return_logprob": true, "logprob_start_len": 0});
    let score = native(json!(vec![5; 600]), json!({"max_new_tokens": 0}), score);
    let scored = good(&running, NATIVE, score).await;
    assert_eq!(scored["meta_info"]["input_token_logprobs"].as_array().unwrap().len(), 600);
    // An answer without a limit takes what there is.
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "ignore_eos": true});
    let whole = good(&running, CHAT, body).await;
    assert_eq!(whole["usage"]["total_tokens"], 512);
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
    running.shutdown().await;
}

/// Together they outgrow the memory: the newest lose what they have computed, and go on.
#[tokio::test]
async fn answers_that_take_turns_are_what_they_would_be_alone() {
    install_tls();
    let (running, _) = remembering(512).await;
    let sampling = json!({"temperature": 0, "max_new_tokens": 300, "ignore_eos": true});
    let ask = |id: i64| native(json!([id]), sampling.clone(), json!({"return_logprob": true}));
    let asked = [5, 6, 7].map(|id| good(&running, NATIVE, ask(id)));
    for (id, answer) in [5, 6, 7].into_iter().zip(futures_util::future::join_all(asked).await) {
        let output = ids(&answer["output_ids"]);
        assert_eq!(output.len(), 300);
        let all: Vec<i64> = std::iter::once(id).chain(output).collect();
        let further = json!({"return_logprob": true, "logprob_start_len": 0});
        let body = native(json!(all), json!({"max_new_tokens": 0}), further);
        let scored = good(&running, NATIVE, body).await;
        let told = answer["meta_info"]["output_token_logprobs"].as_array().unwrap();
        let entries = scored["meta_info"]["input_token_logprobs"].as_array().unwrap();
        assert_eq!(entries.len(), 301);
        for (place, (told, score)) in told.iter().zip(&entries[1..]).enumerate() {
            let apart = told[0].as_f64().unwrap() - score[0].as_f64().unwrap();
            assert!(apart.abs() < 1e-3, "{id}, token {place}: {told} {score}");
        }
    }
    running.shutdown().await;
}

#[tokio::test]
async fn who_comes_when_the_queue_is_full_is_told_to_come_again() {
    install_tls();
    let mut options = Options::new(models().join("tiny-qwen3"));
    (options.max_running, options.max_waiting) = (1, 1);
    let running = start(options).await.unwrap();
    good(&running, "/pause_generation", json!({"mode": "in_place"})).await;
    let sampling = json!({"max_new_tokens": 1, "ignore_eos": true});
    let body = || native(json!([5]), sampling.clone(), json!({"stream": true}));
    let first = Events::open(&running, NATIVE, body()).await;
    let second = Events::open(&running, NATIVE, body()).await;
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let hello = json!({"messages": [{"role": "user", "content": "hi"}], "stream": true});
    for (path, body) in [(NATIVE, body()), (TEXT, json!({"prompt": [5]})), (CHAT, hello)] {
        let request = client.post(format!("{}{path}", running.url())).json(&body);
        let response = request.send().await.unwrap();
        assert_eq!(response.status().as_u16(), 503, "{path}");
        assert_eq!(response.headers()["retry-after"], "1");
        let told: Value = serde_json::from_str(&response.text().await.unwrap()).unwrap();
        let message = if path == NATIVE { &told["error"]["message"] } else { &told["message"] };
        let expected = "2 answers are asked for already, and no more are taken while there are 2 ";
        assert!(message.as_str().unwrap().starts_with(expected), "{told}");
    }
    good(&running, "/continue_generation", json!({})).await;
    for stream in [first, second] {
        let last = stream.rest().await.pop().unwrap();
        assert_eq!(last["meta_info"]["completion_tokens"], 1);
    }
    // Who is answered has left.
    good(&running, NATIVE, native(json!([5]), sampling, json!({}))).await;
    running.shutdown().await;
}

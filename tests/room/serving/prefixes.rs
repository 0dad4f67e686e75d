//! What is computed once for several requests: how much, that it changes no number, and
//! when it is dropped.

use super::adapters::adapter_in;
use super::weights::another_policy;
use super::*;

/// Log-probs of a token whose beginning was computed in other parts differ by the order of
/// f32 sums alone.
const TOLERANCE: f64 = 1e-5;

fn tokens(count: usize, start: usize) -> Vec<i64> {
    (0..count).map(|place| ((place * 131 + start * 17) % 1015) as i64).collect()
}

fn greedy(prompt: &Value, longest: usize) -> Value {
    json!({
        "input_ids": prompt, "return_logprob": true,
        "sampling_params": {"temperature": 0, "max_new_tokens": longest, "ignore_eos": true},
    })
}

fn cached(answer: &Value) -> &Value {
    &answer["meta_info"]["cached_tokens"]
}

#[track_caller]
fn alike(found: &Value, wanted: &Value) {
    assert_eq!(found["output_ids"], wanted["output_ids"]);
    let list = |answer: &Value| answer["meta_info"]["output_token_logprobs"].clone();
    let (found, wanted) = (list(found), list(wanted));
    let both = found.as_array().unwrap().iter().zip(wanted.as_array().unwrap());
    for (place, (found, wanted)) in both.enumerate() {
        let apart = found[0].as_f64().unwrap() - wanted[0].as_f64().unwrap();
        assert!(apart.abs() <= TOLERANCE, "token {place}: {found} {wanted}");
    }
}

async fn without(name: &str) -> Running {
    let mut options = Options::new(models().join(name));
    options.prefix_cache = 0;
    start(options).await.unwrap()
}

#[tokio::test]
async fn the_next_turn_is_computed_from_where_it_is_new_to_the_same_numbers() {
    install_tls();
    for name in ["tiny-llama", "tiny-qwen2", "tiny-qwen3"] {
        let running = start(Options::new(models().join(name))).await.unwrap();
        let off = without(name).await;
        let mut prompt = tokens(150, 1);
        // The prompt, and all that was generated but the last token, in blocks of 64.
        for expected in [0, 192, 256] {
            let body = greedy(&json!(prompt), 80);
            let found = good(&running, "/generate", body.clone()).await;
            let wanted = good(&off, "/generate", body).await;
            assert_eq!((cached(&found), cached(&wanted)), (&json!(expected), &json!(0)), "{name}");
            alike(&found, &wanted);
            prompt.extend(ids(&found["output_ids"]));
            prompt.extend(tokens(9, 2));
        }
        running.shutdown().await;
        off.shutdown().await;
    }
}

#[tokio::test]
async fn what_was_there_is_told_by_every_route_and_in_the_sum() {
    install_tls();
    let running = tiny().await;
    let body = json!({"prompt": tokens(100, 1), "max_tokens": 2, "ignore_eos": true});
    for expected in [0, 64] {
        let answer = good(&running, "/v1/completions", body.clone()).await;
        let usage = &answer["usage"];
        assert_eq!(usage["prompt_tokens_details"], json!({"cached_tokens": expected}));
        assert_eq!(usage["prompt_tokens"], 100);
    }
    // Several answers to a prompt that nobody knows: the first computes it.
    let mut several = greedy(&json!(tokens(70, 2)), 5);
    several["sampling_params"]["n"] = json!(3);
    let several = good(&running, "/generate", several).await;
    let several = several.as_array().unwrap();
    assert_eq!(several.iter().map(cached).collect::<Vec<_>>(), [&json!(0), &json!(69), &json!(69)]);
    several.iter().for_each(|one| alike(one, &several[0]));
    // A score is computed as a whole, always.
    let score = json!({"input_ids": tokens(100, 1), "sampling_params": {"max_new_tokens": 0}});
    assert_eq!(cached(&good(&running, "/generate", score).await), 0);
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let metrics = client.get(format!("{}/metrics", running.url())).send().await.unwrap();
    let metrics = metrics.text().await.unwrap();
    let expected = "sglang:cached_tokens_total{model_name=\"tiny-qwen3\"} 64";
    assert!(metrics.lines().any(|line| line == expected), "{metrics}");
    running.shutdown().await;
}

#[tokio::test]
async fn new_weights_a_flush_and_another_adapter_begin_anew() {
    install_tls();
    let folder = tempfile::tempdir().unwrap();
    let running = tiny().await;
    let ask = async |adapter: Value| {
        let mut body = greedy(&json!(tokens(130, 5)), 3);
        body["lora_path"] = adapter;
        good(&running, "/generate", body).await
    };
    let first = ask(Value::Null).await;
    assert_eq!((cached(&first), cached(&ask(Value::Null).await)), (&json!(0), &json!(128)));
    // Each adapter has its own, and a name that comes again is another adapter.
    for seed in [1, 2] {
        let adapter = adapter_in(folder.path(), seed);
        let body = json!({"lora_name": "one", "lora_path": adapter});
        good(&running, "/load_lora_adapter", body).await;
        for expected in [0, 128] {
            assert_eq!(cached(&ask(json!("one")).await), expected, "{seed}");
        }
        good(&running, "/unload_lora_adapter", json!({"lora_name": "one"})).await;
    }
    assert_eq!(cached(&ask(Value::Null).await), 128);
    good(&running, "/flush_cache", json!({})).await;
    assert_eq!(cached(&ask(Value::Null).await), 0);
    let update = json!({"model_path": another_policy(folder.path()), "weight_version": "1"});
    good(&running, "/update_weights_from_disk", update).await;
    let after = ask(Value::Null).await;
    assert_eq!(cached(&after), 0);
    let fresh = start(Options::new(folder.path().join("step-000001"))).await.unwrap();
    let wanted = good(&fresh, "/generate", greedy(&json!(tokens(130, 5)), 3)).await;
    alike(&after, &wanted);
    fresh.shutdown().await;
    running.shutdown().await;
}

//! Adapters beside the served model: what they compute, who gets them, how they come
//! and go.

use std::path::{Path, PathBuf};

use oclaw::model::{Adapter, Config, Lora, adapter};

use super::weights::another_policy;
use super::*;

/// Log-probs of the matrices beside the weights and of the sum of both differ by the
/// order of f32 sums alone.
const TOLERANCE: f64 = 1e-4;

/// Writes an adapter for tiny-qwen3 that changes what it says.
pub(super) fn adapter_in(folder: &Path, seed: u64) -> PathBuf {
    let base = models().join("tiny-qwen3");
    let lora = Lora { rank: 4, alpha: 8.0, targets: "all-linear".parse().unwrap() };
    let made = Adapter::new(&Config::read(&base).unwrap(), lora, seed, tch::Device::Cpu);
    let out = folder.join(format!("adapter-{seed}"));
    made.write(&base, &out).unwrap();
    // B is 0 in a new one.
    let file = out.join("adapter_model.safetensors");
    let tensors = tch::Tensor::read_safetensors(&file).unwrap();
    let moved = tensors.into_iter().enumerate().map(|(place, (name, tensor))| {
        let waves =
            tch::Tensor::arange(tensor.numel() as i64, (tch::Kind::Float, tch::Device::Cpu));
        let waves = (waves * (1.3 + seed as f64) + place as f64).sin() * 0.1;
        let moved = if name.ends_with("lora_B.weight") { waves.view_as(&tensor) } else { tensor };
        (name, moved)
    });
    tch::Tensor::write_safetensors(&moved.collect::<Vec<_>>(), &file).unwrap();
    out
}

async fn load(running: &Running, name: &str, folder: &Path) -> Value {
    let body = json!({"lora_name": name, "lora_path": folder, "pinned": false});
    good(running, "/load_lora_adapter", body).await
}

fn greedy(adapter: Value) -> Value {
    json!({
        "input_ids": [5, 6, 7, 8], "return_logprob": true, "lora_path": adapter,
        "sampling_params": {"temperature": 0, "max_new_tokens": 60, "ignore_eos": true},
    })
}

fn log_probs(answer: &Value, list: &str) -> Vec<f64> {
    let entries = answer["meta_info"][list].as_array().unwrap().iter();
    entries.filter_map(|entry| entry[0].as_f64()).collect()
}

#[track_caller]
fn alike(one: &[f64], other: &[f64]) {
    assert_eq!(one.len(), other.len());
    for (place, (one, other)) in one.iter().zip(other).enumerate() {
        assert!((one - other).abs() < TOLERANCE, "{place}: {one} {other}");
    }
}

#[tokio::test]
async fn an_adapter_says_what_the_merged_model_says() {
    install_tls();
    let folder = tempfile::tempdir().unwrap();
    let (one, two) = (adapter_in(folder.path(), 1), adapter_in(folder.path(), 2));
    let base = models().join("tiny-qwen3");
    let merged = folder.path().join("merged");
    adapter::merge(&one, &base, &merged, Some(Dtype::F32)).unwrap();
    let sum = start(Options::new(&merged)).await.unwrap();
    let running = tiny().await;
    load(&running, "one", &one).await;
    load(&running, "two", &two).await;
    let expected = good(&sum, "/generate", greedy(Value::Null)).await;
    let alone = good(&running, "/generate", greedy(json!("one"))).await;
    let plain = good(&running, "/generate", greedy(json!(""))).await;
    assert_eq!(alone["output_ids"], expected["output_ids"]);
    assert_ne!(alone["output_ids"], plain["output_ids"], "the adapter does something");
    let output = "output_token_logprobs";
    alike(&log_probs(&alone, output), &log_probs(&expected, output));
    // Together with others, each has its own.
    let mut body = greedy(json!(["one", "two", null, "one"]));
    body["input_ids"] = json!(vec![[5, 6, 7, 8]; 4]);
    let together = good(&running, "/generate", body).await;
    let other = good(&running, "/generate", greedy(json!("two"))).await;
    for (place, single) in [&alone, &other, &plain, &alone].into_iter().enumerate() {
        assert_eq!(together[place]["output_ids"], single["output_ids"], "{place}");
        alike(&log_probs(&together[place], output), &log_probs(single, output));
    }
    assert_ne!(other["output_ids"], alone["output_ids"]);
    // Scores, too.
    let scored = |adapter: Value| {
        json!({"input_ids": [5, 6, 7, 8, 9, 10], "return_logprob": true, "logprob_start_len": 0,
            "lora_path": adapter, "sampling_params": {"max_new_tokens": 0}})
    };
    let input = "input_token_logprobs";
    let expected = log_probs(&good(&sum, "/generate", scored(Value::Null)).await, input);
    alike(&log_probs(&good(&running, "/generate", scored(json!("one"))).await, input), &expected);
    let plain = log_probs(&good(&running, "/generate", scored(Value::Null)).await, input);
    let apart = plain.iter().zip(&expected).map(|(one, other)| (one - other).abs());
    assert!(apart.fold(0.0, f64::max) > 0.01);
    sum.shutdown().await;
    running.shutdown().await;
}

#[tokio::test]
async fn a_chat_chooses_an_adapter_by_its_model() {
    install_tls();
    let folder = tempfile::tempdir().unwrap();
    let running = tiny().await;
    load(&running, "ada:1", &adapter_in(folder.path(), 1)).await;
    let ask = |path: &'static str, further: Value| {
        let mut body = json!({
            "messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "temperature": 0,
            "max_tokens": 20, "ignore_eos": true, "return_token_ids": true,
        });
        body.as_object_mut().unwrap().extend(further.as_object().unwrap().clone());
        let running = &running;
        async move { post(running, path, body).await }
    };
    for path in ["/v1/chat/completions", "/v1/completions"] {
        let ids = |(status, answer): (u16, Value)| {
            assert_eq!(status, 200, "{answer}");
            answer["choices"][0]["response_token_ids"].clone()
        };
        let plain = ids(ask(path, json!({})).await);
        let adapted = ids(ask(path, json!({"lora_path": "ada:1"})).await);
        assert_ne!(plain, adapted);
        for (further, expected) in [
            (json!({"model": "ada:1"}), &adapted),
            (json!({"model": "tiny-qwen3:ada:1"}), &adapted),
            (json!({"model": "any:ada:1"}), &adapted),
            // The one in `model` wins.
            (json!({"model": "ada:1", "lora_path": "gone"}), &adapted),
            (json!({"model": "tiny-qwen3", "lora_path": ""}), &plain),
            (json!({"model": "gpt"}), &plain),
            (json!({"model": "llama3:8b"}), &plain),
        ] {
            assert_eq!(&ids(ask(path, further.clone()).await), expected, "{further}");
        }
        for (further, member) in [
            (json!({"lora_path": "gone"}), "lora_path"),
            (json!({"model": "tiny-qwen3:gone"}), "model"),
        ] {
            let (status, answer) = ask(path, further).await;
            assert_eq!((status, &answer["param"]), (400, &json!(member)), "{answer}");
            let expected = "no adapter `gone` is loaded; these are: `ada:1`";
            assert_eq!(answer["message"], expected);
        }
    }
    running.shutdown().await;
}

#[tokio::test]
async fn adapters_come_and_go_while_an_answer_keeps_its_own() {
    install_tls();
    let folder = tempfile::tempdir().unwrap();
    let (one, two) = (adapter_in(folder.path(), 1), adapter_in(folder.path(), 2));
    let running = tiny().await;
    let listed = load(&running, "one", &one).await;
    assert_eq!(listed["loaded_adapters"], json!({"one": one}));
    let whole = good(&running, "/generate", greedy(json!("one"))).await;
    let mut body = greedy(json!("one"));
    body["stream"] = json!(true);
    let mut stream = Events::open(&running, "/generate", body).await;
    stream.next().await.unwrap();
    good(&running, "/unload_lora_adapter", json!({"lora_name": "one"})).await;
    // The name comes again for another; the stream is not concerned.
    load(&running, "one", &two).await;
    let last = stream.rest().await.pop().unwrap();
    assert_eq!(last["output_ids"], whole["output_ids"]);
    let other = good(&running, "/generate", greedy(json!("one"))).await;
    assert_ne!(other["output_ids"], whole["output_ids"]);
    // What cannot be loaded, or is not there, changes nothing.
    let broken = folder.path().join("broken");
    std::fs::create_dir(&broken).unwrap();
    std::fs::copy(two.join("adapter_config.json"), broken.join("adapter_config.json")).unwrap();
    let load = "/load_lora_adapter";
    for (path, body, expected) in [
        (load, json!({"lora_name": "one", "lora_path": one}), "is loaded already, from `"),
        (
            load,
            json!({"lora_name": "x", "lora_path": folder.path().join("gone")}),
            "cannot be read",
        ),
        (load, json!({"lora_name": "x", "lora_path": broken}), "adapter_model.safetensors"),
        (load, json!({"lora_name": "", "lora_path": one}), "`lora_name` is empty"),
        (
            load,
            json!({"lora_name": "tiny-qwen3", "lora_path": one}),
            "the name of the model itself",
        ),
        ("/unload_lora_adapter", json!({"lora_name": "x"}), "no adapter `x` is loaded"),
    ] {
        let (status, answer) = post(&running, path, body).await;
        assert_eq!((status, &answer["success"]), (400, &json!(false)), "{answer}");
        assert!(answer["error_message"].as_str().unwrap().contains(expected), "{answer}");
        assert_eq!(answer["loaded_adapters"], json!({"one": two}));
    }
    good(&running, "/unload_lora_adapter", json!({"lora_name": "one"})).await;
    // The model alone does not answer for an adapter that was let go of.
    let body = json!({"model": "one", "messages": [{"role": "user", "content": "hi"}]});
    let (status, answer) = post(&running, "/v1/chat/completions", body).await;
    assert_eq!((status, &answer["param"]), (400, &json!("model")), "{answer}");
    running.shutdown().await;
}

#[tokio::test]
async fn an_adapter_has_the_version_that_was_named_after_it_and_moves_to_new_weights() {
    install_tls();
    let folder = tempfile::tempdir().unwrap();
    let (one, two) = (adapter_in(folder.path(), 1), adapter_in(folder.path(), 2));
    let running = tiny().await;
    let named = |version: &str| json!({"new_version": version, "abort_all_requests": false});
    load(&running, "one", &one).await;
    let told = good(&running, "/update_weight_version", named("1")).await;
    assert_eq!((&told["success"], &told["new_version"]), (&json!(true), &json!("1")));
    load(&running, "two", &two).await;
    good(&running, "/update_weight_version", named("2")).await;
    for (adapter, version) in [("one", "1"), ("two", "2"), ("", "2")] {
        let answer = good(&running, "/generate", greedy(json!(adapter))).await;
        assert_eq!(answer["meta_info"]["weight_version"], version, "{adapter}");
    }
    let engine = Engine::attach(EngineOptions::new(running.url())).await.unwrap();
    assert_eq!(engine.weight_version().await.unwrap().as_deref(), Some("2"));
    let listed = engine.listed().await.unwrap();
    let names: Vec<_> = listed.iter().map(|listed| listed.name.as_str()).collect();
    assert_eq!(names, ["tiny-qwen3", "one", "two"]);
    assert_eq!(listed[1].root.as_deref(), one.to_str());
    // On new weights it is what it adds to these.
    let policy = another_policy(folder.path());
    let update = json!({"model_path": policy, "weight_version": "3"});
    good(&running, "/update_weights_from_disk", update).await;
    let merged = folder.path().join("merged");
    adapter::merge(&one, &policy, &merged, Some(Dtype::F32)).unwrap();
    let sum = start(Options::new(&merged)).await.unwrap();
    let expected = good(&sum, "/generate", greedy(Value::Null)).await;
    let answer = good(&running, "/generate", greedy(json!("one"))).await;
    assert_eq!(answer["output_ids"], expected["output_ids"]);
    assert_eq!(answer["meta_info"]["weight_version"], "3");
    sum.shutdown().await;
    running.shutdown().await;
}

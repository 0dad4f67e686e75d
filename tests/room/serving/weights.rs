//! New weights for a running engine, and some that it does not take.

use std::path::{Path, PathBuf};

use oclaw::engine::Pushed;
use oclaw::wire::sglang::PauseMode;

use super::*;

/// Copies a model folder with other weights: another policy of the same shape.
pub(super) fn another_policy(folder: &Path) -> PathBuf {
    let policy = folder.join("step-000001");
    std::fs::create_dir(&policy).unwrap();
    for entry in std::fs::read_dir(models().join("tiny-qwen3")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), policy.join(entry.file_name())).unwrap();
    }
    let file = policy.join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    for weight in bytes[8 + header..].chunks_exact_mut(4) {
        let value = f32::from_le_bytes((*weight).try_into().unwrap());
        weight.copy_from_slice(&(value * 1.03).to_le_bytes());
    }
    std::fs::write(&file, bytes).unwrap();
    policy
}

/// Gives new weights to a running stream of 300 tokens; returns its last event. On a busy
/// machine the stream may have ended before: nothing then.
async fn updated_stream(running: &Running, policy: &Path) -> Option<Value> {
    let engine = Engine::attach(EngineOptions::new(running.url())).await.unwrap();
    let sampling = json!({"temperature": 0, "max_new_tokens": 300, "ignore_eos": true});
    let body = json!({
        "input_ids": [5, 6, 7, 8], "sampling_params": sampling, "return_logprob": true,
        "stream": true,
    });
    let mut stream = Events::open(running, "/generate", body).await;
    let first = stream.next().await.unwrap();
    assert_eq!(first["meta_info"]["weight_version"], "0");
    engine.pause(PauseMode::Retract).await.unwrap();
    let pushed = Pushed { folder: policy, version: "1" };
    engine.update_weights_from_disk(pushed).await.unwrap();
    assert_eq!(engine.weight_version().await.unwrap().as_deref(), Some("1"));
    engine.flush().await.unwrap();
    engine.resume().await.unwrap();
    let last = stream.rest().await.pop().unwrap();
    last["meta_info"].get("weight_versions").is_some().then_some(last)
}

#[tokio::test]
async fn new_weights_come_between_two_tokens_of_a_stream() {
    install_tls();
    let folder = tempfile::tempdir().unwrap();
    let policy = another_policy(folder.path());
    let mut tries = 0;
    let (running, last) = loop {
        tries += 1;
        assert!(tries <= 20, "the weights never came in time");
        let running = tiny().await;
        match updated_stream(&running, &policy).await {
            Some(last) => break (running, last),
            None => running.shutdown().await,
        }
    };
    let meta = &last["meta_info"];
    assert_eq!(meta["finish_reason"], json!({"type": "length", "length": 300}));
    assert_eq!(meta["weight_version"], "1");
    let spans = meta["weight_versions"].as_array().unwrap();
    let turn = spans[0]["end"].as_u64().unwrap() as usize;
    let whole = json!([
        {"version": "0", "start": 0, "end": turn}, {"version": "1", "start": turn, "end": 300},
    ]);
    assert_eq!(&meta["weight_versions"], &whole);
    assert!((1..300).contains(&turn), "{turn}");
    // What came after was computed by the new weights alone: a fresh run over the
    // same beginning goes on in the same way.
    let output = ids(&last["output_ids"]);
    let mut beginning = vec![5_i64, 6, 7, 8];
    beginning.extend(&output[..turn]);
    let rest = output.len() - turn;
    let sampling = json!({"temperature": 0, "max_new_tokens": rest, "ignore_eos": true});
    let body = json!({"input_ids": beginning, "sampling_params": sampling, "return_logprob": true});
    let fresh = good(&running, "/generate", body).await;
    let log_probs = |value: &Value, place: usize| {
        value["meta_info"]["output_token_logprobs"][place][0].as_f64().unwrap()
    };
    for place in 0..rest {
        let apart = log_probs(&fresh, place) - log_probs(&last, turn + place);
        assert!(apart.abs() < 1e-3, "token {place} after the update: {apart}");
    }
    running.shutdown().await;
}

#[tokio::test]
async fn a_folder_that_cannot_be_loaded_changes_nothing() {
    install_tls();
    let folder = tempfile::tempdir().unwrap();
    let policy = another_policy(folder.path());
    let whole = std::fs::read(policy.join("model.safetensors")).unwrap();
    std::fs::write(policy.join("model.safetensors"), &whole[..whole.len() / 2]).unwrap();
    let running = tiny().await;
    let body =
        json!({"input_ids": [5, 6], "sampling_params": {"temperature": 0, "max_new_tokens": 5}});
    let before = good(&running, "/generate", body.clone()).await;
    let other = models().join("tiny-llama");
    let second = tempfile::tempdir().unwrap();
    let broken = another_policy(second.path());
    let mut weights = whole.clone();
    let end = weights.len();
    weights[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(broken.join("model.safetensors"), weights).unwrap();
    for path in [policy, folder.path().join("gone"), other, broken] {
        let update = json!({"model_path": path, "weight_version": "9"});
        let (status, answer) = post(&running, "/update_weights_from_disk", update).await;
        assert_eq!((status, &answer["success"]), (400, &json!(false)), "{answer}");
        assert!(answer["message"].as_str().unwrap().len() > 10, "{answer}");
    }
    let after = good(&running, "/generate", body).await;
    assert_eq!(after["output_ids"], before["output_ids"]);
    assert_eq!(after["meta_info"]["weight_version"], "0");
    running.shutdown().await;
}

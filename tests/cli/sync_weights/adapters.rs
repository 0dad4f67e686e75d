//! An adapter pushed to the embedded engine.

use oclaw::engine::{ChatRequest, Engine, EngineOptions};
use oclaw::model::{Adapter, Config, Lora};
use oclaw::serving::{Options, start};

use super::*;
use crate::harness::fixture_models as models;

/// Writes an adapter for tiny-qwen3 that changes what it says.
fn adapter_in(folder: &Path, scale: f64) {
    let base = models().join("tiny-qwen3");
    let lora = Lora { rank: 2, alpha: 4.0, targets: "all-linear".parse().unwrap() };
    let made = Adapter::new(&Config::read(&base).unwrap(), lora, 1, tch::Device::Cpu);
    made.write(&base, folder).unwrap();
    let file = folder.join("adapter_model.safetensors");
    let tensors = tch::Tensor::read_safetensors(&file).unwrap().into_iter();
    let moved = tensors.map(|(name, tensor)| {
        let waves =
            tch::Tensor::arange(tensor.numel() as i64, (tch::Kind::Float, tch::Device::Cpu));
        let is_b = name.ends_with("lora_B.weight");
        let moved = if is_b { waves.sin().view_as(&tensor) * scale } else { tensor };
        (name, moved)
    });
    tch::Tensor::write_safetensors(&moved.collect::<Vec<_>>(), &file).unwrap();
}

#[test]
fn the_embedded_engine_takes_adapters_version_by_version() {
    let folder = tempfile::tempdir().unwrap();
    adapter_in(&folder.path().join("step-000003"), 0.1);
    // A policy whose adapter lies in its folder.
    policy_in(folder.path());
    adapter_in(&folder.path().join("step-000007/adapter"), -0.1);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let running = runtime.block_on(start(Options::new(models().join("tiny-qwen3")))).unwrap();
    let url = running.url();
    let push = |what: &str, further: &[&str]| {
        let mut command = oclaw();
        command.current_dir(folder.path()).args(["sync-weights", what, "--engine", &url]);
        stderr(&command.args(further).assert().success())
    };
    let ask = |model: &str| {
        let options = EngineOptions { model: Some(model.to_owned()), ..EngineOptions::new(&url) };
        let messages = vec![json!({"role": "user", "content": "hi"})];
        let (temperature, max_tokens) = (Some(0.0), Some(30));
        let request = ChatRequest { messages, temperature, max_tokens, ..ChatRequest::default() };
        runtime.block_on(async {
            let reply = Engine::connect(options).await.unwrap().chat(&request).await.unwrap();
            (reply.weight_version.unwrap(), reply.content)
        })
    };
    let plain = ask("tiny-qwen3");
    assert_eq!(plain.0, "0");
    let said = push("step-000003", &[]);
    assert!(said.contains("loaded `oclaw-v3`"), "{said}");
    assert!(said.contains("version 3 pushed to 1 of 1"), "{said}");
    assert!(said.contains("its adapter is the model `oclaw-v3`"), "{said}");
    let third = ask("oclaw-v3");
    assert_eq!(third.0, "3");
    let again = push("step-000003", &[]);
    assert!(again.contains("nothing to push: version 3 is served already"), "{again}");
    let said = push("latest", &["--adapter"]);
    assert!(said.contains("version 7 pushed to 1 of 1"), "{said}");
    let seventh = ask("oclaw-v7");
    assert_eq!(seventh.0, "7");
    // Who asks for the older one gets it, and its version.
    assert_eq!(ask("oclaw-v3"), third);
    let texts = std::collections::BTreeSet::from([plain.1, third.1, seventh.1]);
    assert_eq!(texts.len(), 3, "{texts:?}");
    // Pushed by force, the same name is loaded anew.
    let said = push("step-000003", &["--force"]);
    assert!(said.contains("version 3 pushed to 1 of 1"), "{said}");
    runtime.block_on(running.shutdown());
}

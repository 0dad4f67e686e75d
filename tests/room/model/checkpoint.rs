//! Model folders: what is written is what was read, and what does not fit is named.

use std::fs;
use std::path::Path;

use oclaw::model::{Dtype, Error, LoadOptions, Model, Score};
use oclaw::tensors::{self, Reader, Writer};
use serde_json::{Value, json};
use tch::{Device, Kind};

use super::{FAMILIES, all_logits, difference, folder, load, tokens};

/// Copies a model folder so that a test may change it.
fn copy_of(name: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(folder(name)).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    copy
}

fn edit_config(folder: &Path, change: impl FnOnce(&mut Value)) {
    let path = folder.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut config);
    fs::write(path, config.to_string()).unwrap();
}

#[test]
fn saving_untouched_weights_gives_the_same_bytes() {
    for name in FAMILIES {
        let out = tempfile::tempdir().unwrap();
        load(name).save(&folder(name), out.path(), None).unwrap();
        for entry in fs::read_dir(folder(name)).unwrap() {
            let file = entry.unwrap().file_name();
            if file == "config_v5.json" {
                continue;
            }
            let (old, new) = (folder(name).join(&file), out.path().join(&file));
            assert_eq!(fs::read(old).unwrap(), fs::read(new).unwrap(), "{name} {file:?}");
        }
    }
}

/// Splits a model's file into two shards with an index.
fn shard(folder: &Path) {
    let single = folder.join("model.safetensors");
    let reader = Reader::open(&single).unwrap();
    let (first, second) = reader.entries().split_at(reader.entries().len() / 2);
    let mut map = serde_json::Map::new();
    for (number, part) in [(1, first), (2, second)] {
        let file = format!("model-0000{number}-of-00002.safetensors");
        let heads = part.iter().map(|entry| (entry.name.clone(), entry.dtype, entry.shape.clone()));
        let mut writer = Writer::create(&folder.join(&file), heads).unwrap();
        for entry in part {
            writer.write(&reader.read(entry).unwrap()).unwrap();
            map.insert(entry.name.clone(), file.clone().into());
        }
        writer.finish().unwrap();
    }
    let index = json!({"metadata": {"total_size": 0}, "weight_map": map});
    fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
    fs::remove_file(single).unwrap();
}

#[test]
fn shards_are_read_and_written_as_shards() {
    for name in FAMILIES {
        let base = copy_of(name);
        shard(base.path());
        let model = Model::load(base.path(), &LoadOptions::default()).unwrap();
        let ids = tokens(9, 1);
        assert_eq!(difference(&all_logits(&model, &ids), &all_logits(&load(name), &ids)), 0.0);
        let out = tempfile::tempdir().unwrap();
        model.save(base.path(), out.path(), None).unwrap();
        for file in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"] {
            let read = |folder: &Path| fs::read(folder.join(file)).unwrap();
            assert_eq!(read(base.path()), read(out.path()), "{name} {file}");
        }
        assert!(!out.path().join("model.safetensors").exists());
        let index = fs::read(out.path().join("model.safetensors.index.json")).unwrap();
        let index: Value = serde_json::from_slice(&index).unwrap();
        let wanted: usize = model.parameters().iter().map(|(_, tensor)| tensor.numel() * 4).sum();
        assert_eq!(index["metadata"]["total_size"], wanted);
    }
}

#[test]
fn changed_weights_are_the_same_after_loading() {
    for name in FAMILIES {
        let model = load(name);
        for (_, tensor) in model.parameters() {
            let _ = tch::no_grad(|| tensor.shallow_clone().g_mul_scalar_(0.75));
        }
        let out = tempfile::tempdir().unwrap();
        model.save(&folder(name), out.path(), None).unwrap();
        let again = Model::load(out.path(), &LoadOptions::default()).unwrap();
        let request = [Score { ids: tokens(30, 1), start: 3, ..Default::default() }];
        assert_eq!(model.score(&request), again.score(&request), "{name}");
        assert_ne!(model.score(&request), load(name).score(&request), "{name}");
        let facts = |folder: &Path| -> Vec<_> {
            let reader = Reader::open(&folder.join("model.safetensors")).unwrap();
            reader.entries().iter().map(|e| (e.name.clone(), e.dtype, e.shape.clone())).collect()
        };
        assert_eq!(facts(out.path()), facts(&folder(name)), "{name}");
    }
}

#[test]
fn another_type_is_written_into_the_configuration_too() {
    for (config, key) in [("config.json", "torch_dtype"), ("config_v5.json", "dtype")] {
        let base = copy_of("tiny-qwen3");
        fs::rename(base.path().join(config), base.path().join("config.json")).unwrap();
        let model = Model::load(base.path(), &LoadOptions::default()).unwrap();
        let out = tempfile::tempdir().unwrap();
        model.save(base.path(), out.path(), Some(Dtype::Bf16)).unwrap();
        let reader = Reader::open(&out.path().join("model.safetensors")).unwrap();
        assert!(reader.entries().iter().all(|entry| entry.dtype == tensors::Dtype::BF16));
        let text = fs::read(out.path().join("config.json")).unwrap();
        let text: Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(text[key], "bfloat16");
        let again = Model::load(out.path(), &LoadOptions::default()).unwrap();
        assert_eq!(again.dtype(), Dtype::Bf16);
        // The same weights in f32 products: only the rounding of the file is left.
        let exact = LoadOptions { dtype: Some(Dtype::F32), ..Default::default() };
        let again = Model::load(out.path(), &exact).unwrap();
        for ((name, old), (_, new)) in model.parameters().iter().zip(again.parameters()) {
            let rounded = old.to_kind(Kind::BFloat16).to_kind(Kind::Float);
            assert_eq!(difference(&rounded, new), 0.0, "{name}");
        }
    }
}

#[test]
fn a_tied_model_whose_file_repeats_the_head_keeps_its_form() {
    let base = copy_of("tiny-qwen3");
    let path = base.path().join("model.safetensors");
    let reader = Reader::open(&path).unwrap();
    let embedding = reader.entries()[0].clone();
    assert_eq!(embedding.name, "model.embed_tokens.weight");
    let write = |head: &[u8]| {
        let heads = reader.entries().iter().map(|e| (e.name.clone(), e.dtype, e.shape.clone()));
        let extra = ("lm_head.weight".to_owned(), embedding.dtype, embedding.shape.clone());
        let aside = base.path().join("aside");
        let mut writer = Writer::create(&aside, [extra].into_iter().chain(heads)).unwrap();
        writer.write(head).unwrap();
        for entry in reader.entries() {
            writer.write(&reader.read(entry).unwrap()).unwrap();
        }
        writer.finish().unwrap();
        fs::rename(aside, &path).unwrap();
    };
    let bytes = reader.read(&embedding).unwrap();
    write(&bytes);
    let model = Model::load(base.path(), &LoadOptions::default()).unwrap();
    assert!(model.parameters().iter().all(|(name, _)| name != "lm_head.weight"));
    let out = tempfile::tempdir().unwrap();
    model.save(base.path(), out.path(), None).unwrap();
    assert_eq!(fs::read(&path).unwrap(), fs::read(out.path().join("model.safetensors")).unwrap());
    write(&vec![0; bytes.len()]);
    let error = Model::load(base.path(), &LoadOptions::default()).unwrap_err();
    assert!(matches!(error, Error::UntiedHead { .. }), "{error}");
}

// What is refused

#[test]
fn a_configuration_that_cannot_be_computed_is_named() {
    let set = |key: &'static str, value: Value| move |config: &mut Value| config[key] = value;
    type Change = Box<dyn FnOnce(&mut Value)>;
    let cases: Vec<(&str, Change, [&str; 2])> = vec![
        ("tiny-llama", Box::new(set("model_type", "gpt2".into())), ["`model_type`", "`gpt2`"]),
        (
            "tiny-llama",
            Box::new(set("architectures", json!(["LlamaForSequenceClassification"]))),
            ["`architectures`", "LlamaForSequenceClassification"],
        ),
        (
            "tiny-llama",
            Box::new(|config| config["rope_scaling"]["rope_type"] = "yarn".into()),
            ["`rope_type`", "`yarn`"],
        ),
        (
            "tiny-llama",
            Box::new(set("rope_scaling", json!({"type": "dynamic", "factor": 2.0}))),
            ["`rope_type`", "`dynamic`"],
        ),
        (
            "tiny-llama",
            Box::new(set("rope_scaling", json!({"rope_type": "llama3", "factor": 8.0}))),
            ["llama3", "`low_freq_factor`"],
        ),
        ("tiny-llama", Box::new(set("hidden_act", "gelu".into())), ["`hidden_act`", "`gelu`"]),
        (
            "tiny-llama",
            Box::new(set("quantization_config", json!({"quant_method": "gptq"}))),
            ["`quantization_config`", "gptq"],
        ),
        (
            "tiny-llama",
            Box::new(set("hidden_size", Value::Null)),
            ["no `hidden_size`", "config.json"],
        ),
        ("tiny-llama", Box::new(set("num_key_value_heads", 3.into())), ["4 heads", "3 key heads"]),
        ("tiny-llama", Box::new(set("vocab_size", "many".into())), ["config.json", "invalid type"]),
        (
            "tiny-qwen3",
            Box::new(|config| {
                config["use_sliding_window"] = true.into();
                config["sliding_window"] = 64.into();
                config["max_window_layers"] = 1.into();
            }),
            ["`use_sliding_window`", "full attention"],
        ),
        (
            "tiny-qwen3",
            Box::new(set("layer_types", json!(["full_attention", "sliding_attention"]))),
            ["`layer_types`", "`sliding_attention`"],
        ),
    ];
    for (name, change, words) in cases {
        let copy = copy_of(name);
        edit_config(copy.path(), change);
        let message = Model::load(copy.path(), &LoadOptions::default()).unwrap_err().to_string();
        for word in words {
            assert!(message.contains(word), "`{word}` is not in: {message}");
        }
    }
}

#[test]
fn a_sliding_window_that_no_layer_uses_is_fine() {
    let copy = copy_of("tiny-qwen2");
    edit_config(copy.path(), |config| {
        config["use_sliding_window"] = true.into();
        config["sliding_window"] = 64.into();
        config["max_window_layers"] = 2.into();
    });
    Model::load(copy.path(), &LoadOptions::default()).unwrap();
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    for (change, words) in [
        (json!({"num_hidden_layers": 3}), ["`model.layers.2.", "missing"]),
        (json!({"num_hidden_layers": 1}), ["`model.layers.1.", "no place"]),
        (json!({"intermediate_size": 96}), ["[64, 128], wanted [64, 96]", "down_proj"]),
        (json!({"tie_word_embeddings": false}), ["`lm_head.weight` [1024, 64]", "missing"]),
        (json!({"model_type": "llama", "architectures": null}), ["k_norm", "no place"]),
    ] {
        let copy = copy_of("tiny-qwen3");
        edit_config(copy.path(), |config| {
            for (key, value) in change.as_object().unwrap() {
                config[key] = value.clone();
            }
        });
        let message = Model::load(copy.path(), &LoadOptions::default()).unwrap_err().to_string();
        for word in words {
            assert!(message.contains(word), "`{word}` is not in: {message}");
        }
    }
}

#[test]
fn files_that_are_not_there_or_not_whole_are_named() {
    let refused =
        |folder: &Path| Model::load(folder, &LoadOptions::default()).unwrap_err().to_string();
    let empty = tempfile::tempdir().unwrap();
    assert!(refused(empty.path()).contains("config.json"));
    let copy = copy_of("tiny-qwen3");
    let weights = copy.path().join("model.safetensors");
    let bytes = fs::read(&weights).unwrap();
    for length in [0, 7, 100, 2464, bytes.len() - 1] {
        fs::write(&weights, &bytes[..length]).unwrap();
        let message = refused(copy.path());
        assert!(message.contains("model.safetensors"), "{message}");
    }
    fs::write(&weights, [&u64::MAX.to_le_bytes()[..], &[b' '; 64]].concat()).unwrap();
    assert!(refused(copy.path()).contains("not a safetensors file"));
    fs::remove_file(&weights).unwrap();
    assert!(refused(copy.path()).contains("holds neither"));
    let index = copy.path().join("model.safetensors.index.json");
    fs::write(&index, json!({"weight_map": {"x": "absent.safetensors"}}).to_string()).unwrap();
    assert!(refused(copy.path()).contains("absent.safetensors"));
    fs::write(&index, json!({"weight_map": {"x": "../x.safetensors"}}).to_string()).unwrap();
    assert!(refused(copy.path()).contains("index.json"));
}

#[test]
fn a_device_that_is_not_there_is_an_error() {
    let device = Device::Cuda(tch::Cuda::device_count() as usize);
    let options = LoadOptions { device, ..Default::default() };
    let error = Model::load(&folder("tiny-qwen3"), &options).unwrap_err();
    assert!(matches!(error, Error::NoDevice { .. }), "{error}");
}

#[test]
fn generation_settings_win_over_the_configuration() {
    let model = load("tiny-qwen3");
    assert_eq!(model.config.eos_token_ids, [1017, 1015]);
    let copy = copy_of("tiny-qwen3");
    let settings = json!({"temperature": 0.7, "top_p": 0.8, "top_k": 20});
    fs::write(copy.path().join("generation_config.json"), settings.to_string()).unwrap();
    let model = Model::load(copy.path(), &LoadOptions::default()).unwrap();
    assert_eq!(model.config.eos_token_ids, [1017]);
    assert_eq!(model.config.generation.temperature, Some(0.7));
    assert_eq!(model.config.generation.top_k, Some(20));
}

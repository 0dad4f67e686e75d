//! The model through its public interface: that batching, caching, saving and
//! loading change no number, and that what cannot be computed is refused by name.
//! The numbers themselves are compared with recorded ones in `golden/model.rs`.

use std::fs;
use std::path::{Path, PathBuf};

use oclaw::model::sampler::top_log_probs;
use oclaw::model::{Dtype, Error, LoadOptions, Model, Sampler, SamplingParams, Score};
use oclaw::tensors::{self, Reader, Writer};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::harness::fixture;

const FAMILIES: [&str; 3] = ["tiny-llama", "tiny-qwen2", "tiny-qwen3"];
/// What decoding may differ from prefill, and a batch from a single sequence.
const STEADY: f64 = 1e-5;

fn folder(name: &str) -> PathBuf {
    fixture("models").join(name)
}

fn load(name: &str) -> Model {
    Model::load(&folder(name), &LoadOptions::default()).unwrap()
}

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

fn tokens(count: usize, start: usize) -> Vec<i64> {
    (0..count).map(|index| ((index * 131 + start * 17) % 1015) as i64).collect()
}

fn difference(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.size(), b.size());
    (a - b).abs().max().double_value(&[])
}

/// Returns the logits after every token of one sequence, without a cache.
fn all_logits(model: &Model, ids: &[i64]) -> Tensor {
    tch::no_grad(|| {
        let hidden = model.hidden(&Tensor::from_slice(ids), &[ids.len() as i64]);
        model.head(&hidden)
    })
}

#[test]
fn a_model_can_be_sent_to_its_thread() {
    fn sent<T: Send>() {}
    sent::<Model>();
    sent::<Sampler>();
}

#[test]
fn packed_sequences_do_not_see_each_other() {
    for name in FAMILIES {
        let model = load(name);
        let sequences = [tokens(3, 1), tokens(40, 2), tokens(1, 3), tokens(9, 4)];
        let lengths: Vec<i64> = sequences.iter().map(|ids| ids.len() as i64).collect();
        let packed = tch::no_grad(|| model.hidden(&Tensor::from_slice(&sequences.concat()), &lengths));
        let mut start = 0;
        for ids in &sequences {
            let length = ids.len() as i64;
            let alone = tch::no_grad(|| model.hidden(&Tensor::from_slice(ids), &[length]));
            assert_eq!(difference(&packed.narrow(0, start, length), &alone), 0.0, "{name}");
            start += length;
        }
    }
}

#[test]
fn decoding_does_not_depend_on_the_batch() {
    for name in FAMILIES {
        let model = load(name);
        let prompts = [tokens(5, 1), tokens(30, 2), tokens(1, 3)];
        let mut caches = [model.cache(), model.cache(), model.cache()];
        let mut batch: Vec<_> =
            prompts.iter().map(Vec::as_slice).zip(&mut caches).collect();
        let together = model.step(&mut batch);
        let next = [[7_i64], [8], [9]];
        let mut batch: Vec<_> = next.iter().map(|id| &id[..]).zip(&mut caches).collect();
        let then = model.step(&mut batch);
        for (index, (prompt, next)) in prompts.iter().zip(next).enumerate() {
            let whole = all_logits(&model, &[prompt.as_slice(), &next].concat());
            let length = prompt.len() as i64;
            let row = |logits: &Tensor, at: i64| logits.narrow(0, at, 1);
            let index = index as i64;
            assert!(difference(&row(&together, index), &row(&whole, length - 1)) < STEADY, "{name}");
            assert!(difference(&row(&then, index), &row(&whole, length)) < STEADY, "{name}");
            let mut cache = model.cache();
            let alone = model.step(&mut [(prompt, &mut cache)]);
            assert!(difference(&alone, &row(&together, index)) < STEADY, "{name}");
        }
    }
}

#[test]
fn a_prompt_in_parts_is_the_prompt() {
    let model = load("tiny-qwen3");
    // More than one growth of the cache.
    let ids = tokens(600, 1);
    let whole = all_logits(&model, &ids).narrow(0, 599, 1);
    let mut cache = model.cache();
    assert!(cache.is_empty());
    let mut logits = Tensor::new();
    for part in [&ids[..1], &ids[1..250], &ids[250..258], &ids[258..600]] {
        logits = model.step(&mut [(part, &mut cache)]);
    }
    assert_eq!(cache.len(), 600);
    assert!(difference(&logits, &whole) < STEADY);
}

#[test]
fn a_cache_can_be_cut_and_forked() {
    let model = load("tiny-llama");
    let ids = tokens(20, 1);
    let mut cache = model.cache();
    model.step(&mut [(&ids, &mut cache)]);
    let mut other = cache.fork(12);
    assert_eq!((cache.len(), other.len()), (20, 12));
    let branched = model.step(&mut [(&[3, 4], &mut other)]);
    let wanted = all_logits(&model, &[&ids[..12], &[3, 4]].concat()).narrow(0, 13, 1);
    assert!(difference(&branched, &wanted) < STEADY);
    // The fork changed nothing in the cache it came from.
    cache.truncate(15);
    let cut = model.step(&mut [(&ids[15..], &mut cache)]);
    let wanted = all_logits(&model, &ids).narrow(0, 19, 1);
    assert!(difference(&cut, &wanted) < STEADY);
}

#[test]
fn scores_are_log_softmax_of_the_logits() {
    let model = load("tiny-qwen2");
    // Longer than one chunk of the head; the second request goes along.
    let long = tokens(1100, 1);
    let chosen: Vec<i64> = (0..1095).flat_map(|row| [row % 7, 1000 - row % 5]).collect();
    let requests = [
        Score { ids: long.clone(), start: 5, temperature: 0.5, top_k: 3, chosen: chosen.clone(), entropy: true },
        Score { ids: tokens(6, 2), start: 6, ..Default::default() },
        Score { ids: tokens(6, 3), start: 1, ..Default::default() },
    ];
    let scored = model.score(&requests);
    let log_probs = (all_logits(&model, &long) / 0.5).log_softmax(-1, Kind::Float);
    assert_eq!(scored[0].log_probs.len(), 1095);
    assert_eq!(scored[0].top_ids.len(), 3 * 1095);
    for row in 0..1095_usize {
        let at = |id: i64| log_probs.double_value(&[row as i64 + 4, id]);
        let near = |found: f32, wanted: f64| assert!((f64::from(found) - wanted).abs() < STEADY, "{row}");
        near(scored[0].log_probs[row], at(long[row + 5]));
        for column in 0..2 {
            near(scored[0].chosen_log_probs[2 * row + column], at(chosen[2 * row + column]));
        }
        for column in 0..3 {
            near(scored[0].top_log_probs[3 * row + column], at(scored[0].top_ids[3 * row + column]));
        }
    }
    let entropy = -(log_probs.exp() * &log_probs).sum_dim_intlist([-1_i64].as_slice(), false, Kind::Float);
    assert!((f64::from(scored[0].entropy[1094]) - entropy.double_value(&[1098])).abs() < STEADY);
    assert!(scored[1].log_probs.is_empty());
    assert_eq!(scored[2].log_probs.len(), 5);
    assert_eq!(scored[2], model.score(&requests[2..])[0]);
}

#[test]
fn gradients_reach_every_weight_of_a_trainable_model() {
    for name in FAMILIES {
        let options = LoadOptions { trainable: true, ..Default::default() };
        let model = Model::load(&folder(name), &options).unwrap();
        let hidden = model.hidden(&Tensor::from_slice(&tokens(12, 1)), &[7, 5]);
        let loss = model.head(&hidden).log_softmax(-1, Kind::Float).select(1, 5).sum(Kind::Float);
        loss.backward();
        for (parameter, tensor) in model.parameters() {
            assert!(tensor.grad().defined(), "{name} {parameter}");
            assert!(tensor.grad().abs().sum(Kind::Float).double_value(&[]) > 0.0, "{name} {parameter}");
        }
        let refused = LoadOptions { dtype: Some(Dtype::Bf16), ..options };
        let error = Model::load(&folder(name), &refused).unwrap_err();
        assert!(matches!(error, Error::TrainableType { wanted: Dtype::Bf16 }));
    }
}

#[test]
fn bf16_products_stay_near_and_steady() {
    let options = LoadOptions { dtype: Some(Dtype::Bf16), ..Default::default() };
    let model = Model::load(&folder("tiny-qwen3"), &options).unwrap();
    assert_eq!(model.dtype(), Dtype::Bf16);
    let exact = load("tiny-qwen3");
    let ids = tokens(20, 1);
    let logits = all_logits(&model, &ids);
    assert_eq!(logits.kind(), Kind::Float);
    // Eight bits of mantissa at logits of up to 19.
    assert!(difference(&logits, &all_logits(&exact, &ids)) < 2.0);
    let mut cache = model.cache();
    let decoded = model.step(&mut [(&ids, &mut cache)]);
    assert!(difference(&decoded, &logits.narrow(0, 19, 1)) < 0.2);
}

#[test]
fn ids_outside_the_vocabulary_are_named() {
    let model = load("tiny-qwen3");
    model.check_ids([0, 1023]).unwrap();
    let error = model.check_ids([5, 1024]).unwrap_err();
    assert!(matches!(error, Error::TokenOutOfRange { id: 1024, position: 1, vocab_size: 1024 }));
    assert!(model.check_ids([-1]).is_err());
}

// Saving

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
        ("tiny-llama", Box::new(set("architectures", json!(["LlamaForSequenceClassification"]))),
            ["`architectures`", "LlamaForSequenceClassification"]),
        ("tiny-llama", Box::new(|config| config["rope_scaling"]["rope_type"] = "yarn".into()),
            ["`rope_type`", "`yarn`"]),
        ("tiny-llama", Box::new(set("rope_scaling", json!({"type": "dynamic", "factor": 2.0}))),
            ["`rope_type`", "`dynamic`"]),
        ("tiny-llama", Box::new(set("rope_scaling", json!({"rope_type": "llama3", "factor": 8.0}))),
            ["llama3", "`low_freq_factor`"]),
        ("tiny-llama", Box::new(set("hidden_act", "gelu".into())), ["`hidden_act`", "`gelu`"]),
        ("tiny-llama", Box::new(set("quantization_config", json!({"quant_method": "gptq"}))),
            ["`quantization_config`", "gptq"]),
        ("tiny-llama", Box::new(set("hidden_size", Value::Null)), ["no `hidden_size`", "config.json"]),
        ("tiny-llama", Box::new(set("num_key_value_heads", 3.into())), ["4 heads", "3 key heads"]),
        ("tiny-llama", Box::new(set("vocab_size", "many".into())), ["config.json", "invalid type"]),
        ("tiny-qwen3", Box::new(|config| {
            config["use_sliding_window"] = true.into();
            config["sliding_window"] = 64.into();
            config["max_window_layers"] = 1.into();
        }), ["`use_sliding_window`", "full attention"]),
        ("tiny-qwen3", Box::new(set("layer_types", json!(["full_attention", "sliding_attention"]))),
            ["`layer_types`", "`sliding_attention`"]),
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
    let refused = |folder: &Path| Model::load(folder, &LoadOptions::default()).unwrap_err().to_string();
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

// Sampling

/// Logits whose probabilities are 1/2, 1/4, 1/8 and 1/8.
fn quarters() -> Vec<f32> {
    [0.125_f32, 0.5, 0.125, 0.25].iter().map(|share| share.ln() + 3.0).collect()
}

fn draw(params: SamplingParams, count: usize) -> Vec<i32> {
    let mut sampler = Sampler::new(params).unwrap();
    (0..count).map(|_| sampler.sample(&quarters()).unwrap().id).collect()
}

#[test]
fn a_log_prob_is_that_of_the_whole_distribution() {
    let near = |found: f32, wanted: f64| assert!((f64::from(found) - wanted).abs() < 1e-6, "{found}");
    // At temperature 1/2 the probabilities are squared: 16, 4, 1 and 1 of 22.
    let params = SamplingParams { temperature: 0.5, top_k: 1, ..Default::default() };
    let sampled = Sampler::new(params).unwrap().sample(&quarters()).unwrap();
    assert_eq!(sampled.id, 1);
    near(sampled.log_prob, (16.0_f64 / 22.0).ln());
    near(sampled.raw_log_prob, 0.5_f64.ln());
    let greedy = SamplingParams { temperature: 0.0, ..Default::default() };
    let sampled = Sampler::new(greedy).unwrap().sample(&quarters()).unwrap();
    assert_eq!(sampled.id, 1);
    near(sampled.log_prob, 0.5_f64.ln());
    let top = top_log_probs(&quarters(), 3, 0.5).unwrap();
    assert_eq!(top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 3, 0]);
    near(top[1].1, (4.0_f64 / 22.0).ln());
    assert_eq!(top_log_probs(&quarters(), 9, 1.0).unwrap().len(), 4);
}

#[test]
fn tokens_come_as_often_as_they_should() {
    let all = draw(SamplingParams { seed: 7, ..Default::default() }, 20_000);
    for (id, share) in [(0, 0.125), (1, 0.5), (2, 0.125), (3, 0.25)] {
        let found = all.iter().filter(|&&drawn| drawn == id).count() as f64 / 20_000.0;
        // Five standard deviations of the widest.
        assert!((found - share).abs() < 0.018, "{id}: {found}");
    }
}

#[test]
fn each_filter_keeps_what_it_should() {
    let plain = SamplingParams { seed: 3, ..Default::default() };
    for (params, kept) in [
        (SamplingParams { top_k: 1, ..plain }, vec![1]),
        (SamplingParams { top_k: 2, ..plain }, vec![1, 3]),
        // Equal probabilities at the border: the lower id.
        (SamplingParams { top_k: 3, ..plain }, vec![0, 1, 3]),
        (SamplingParams { top_p: 0.4, ..plain }, vec![1]),
        (SamplingParams { top_p: 0.6, ..plain }, vec![1, 3]),
        (SamplingParams { top_p: 0.8, ..plain }, vec![0, 1, 3]),
        (SamplingParams { top_p: 0.99, ..plain }, vec![0, 1, 2, 3]),
        (SamplingParams { min_p: 0.4, ..plain }, vec![1, 3]),
        (SamplingParams { min_p: 1.0, ..plain }, vec![1]),
        (SamplingParams { top_k: 3, top_p: 0.6, min_p: 0.1, ..plain }, vec![1, 3]),
        // Squared: 16/22 is above a top-p of 0.7.
        (SamplingParams { temperature: 0.5, top_p: 0.7, ..plain }, vec![1]),
    ] {
        let mut drawn = draw(params, 500);
        drawn.sort_unstable();
        drawn.dedup();
        assert_eq!(drawn, kept, "{params:?}");
    }
}

#[test]
fn the_seed_decides_and_nothing_else() {
    let params = SamplingParams { seed: 11, top_p: 0.95, ..Default::default() };
    assert_eq!(draw(params, 50), draw(params, 50));
    assert_ne!(draw(params, 50), draw(SamplingParams { seed: 12, ..params }, 50));
}

#[test]
fn logits_that_are_no_numbers_are_never_sampled() {
    for (id, bad) in [(2, f32::NAN), (1, f32::INFINITY), (0, f32::NEG_INFINITY)] {
        let mut logits = quarters();
        logits[id] = bad;
        let params = SamplingParams { temperature: 0.0, ..Default::default() };
        for params in [params, SamplingParams::default()] {
            let error = Sampler::new(params).unwrap().sample(&logits).unwrap_err();
            assert!(matches!(error, Error::NotFinite { id: found, .. } if found == id), "{error}");
        }
    }
    assert!(Sampler::new(SamplingParams::default()).unwrap().sample(&[]).is_err());
}

#[test]
fn sampling_settings_that_mean_nothing_are_refused() {
    let plain = SamplingParams::default();
    for (params, name) in [
        (SamplingParams { temperature: -1.0, ..plain }, "temperature"),
        (SamplingParams { temperature: f32::NAN, ..plain }, "temperature"),
        (SamplingParams { top_p: 0.0, ..plain }, "top_p"),
        (SamplingParams { top_p: 1.5, ..plain }, "top_p"),
        (SamplingParams { min_p: -0.1, ..plain }, "min_p"),
    ] {
        let message = Sampler::new(params).unwrap_err().to_string();
        assert!(message.contains(name), "{message}");
    }
}

//! The model through its public interface: that batching, caching, saving and
//! loading change no number, and that what cannot be computed is refused by name.
//! The numbers themselves are compared with recorded ones in `golden/model.rs`.

mod checkpoint;
mod narrow;
mod sampler;
mod shared;

use std::path::PathBuf;

use oclaw::model::{Dtype, Error, Head, LoadOptions, Model, Score};
use tch::{Kind, Tensor};

use crate::harness::fixture;

const FAMILIES: [&str; 3] = ["tiny-llama", "tiny-qwen2", "tiny-qwen3"];
/// What decoding may differ from prefill, and a batch from a single sequence: a
/// few roundings, relative to the largest number.
const STEADY: f64 = 1e-5;

fn folder(name: &str) -> PathBuf {
    fixture("models").join(name)
}

fn load(name: &str) -> Model {
    Model::load(&folder(name), &LoadOptions::default()).unwrap()
}

fn tokens(count: usize, start: usize) -> Vec<i64> {
    (0..count).map(|index| ((index * 131 + start * 17) % 1015) as i64).collect()
}

#[track_caller]
fn assert_steady(what: &str, a: &Tensor, b: &Tensor) {
    let (found, most) = (difference(a, b), b.abs().max().double_value(&[]));
    assert!(found <= STEADY * (1.0 + most), "{what}: off by {found:e} at values up to {most}");
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
    sent::<oclaw::model::Sampler>();
}

#[test]
fn packed_sequences_do_not_see_each_other() {
    for name in FAMILIES {
        let model = load(name);
        let sequences = [tokens(3, 1), tokens(40, 2), tokens(1, 3), tokens(9, 4)];
        let lengths: Vec<i64> = sequences.iter().map(|ids| ids.len() as i64).collect();
        let packed =
            tch::no_grad(|| model.hidden(&Tensor::from_slice(&sequences.concat()), &lengths));
        let mut start = 0;
        for ids in &sequences {
            let length = ids.len() as i64;
            let alone = tch::no_grad(|| model.hidden(&Tensor::from_slice(ids), &[length]));
            assert_steady(name, &packed.narrow(0, start, length), &alone);
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
        let mut batch: Vec<_> = prompts.iter().map(Vec::as_slice).zip(&mut caches).collect();
        let together = model.step(&mut batch);
        let next = [[7_i64], [8], [9]];
        let mut batch: Vec<_> = next.iter().map(|id| &id[..]).zip(&mut caches).collect();
        let then = model.step(&mut batch);
        for (index, (prompt, next)) in prompts.iter().zip(next).enumerate() {
            let whole = all_logits(&model, &[prompt.as_slice(), &next].concat());
            let length = prompt.len() as i64;
            let row = |logits: &Tensor, at: i64| logits.narrow(0, at, 1);
            let index = index as i64;
            assert_steady(name, &row(&together, index), &row(&whole, length - 1));
            assert_steady(name, &row(&then, index), &row(&whole, length));
            let mut cache = model.cache();
            let alone = model.step(&mut [(prompt, &mut cache)]);
            assert_steady(name, &alone, &row(&together, index));
        }
    }
}

/// One token of each is computed without libtorch between the products; beside a sequence
/// that gets two, it is not.
#[test]
fn a_token_each_is_what_any_other_step_makes_of_it() {
    for name in FAMILIES {
        // A bit of bf16 at logits up to 19 is 0.125.
        for (dtype, off) in [(Dtype::F32, 3e-6), (Dtype::Bf16, 0.02)] {
            let options = LoadOptions { dtype: Some(dtype), ..Default::default() };
            let model = Model::load(&folder(name), &options).unwrap();
            let prompts = [tokens(5, 1), tokens(40, 2), tokens(1, 3)];
            let mut caches = [model.cache(), model.cache(), model.cache()];
            let mut batch: Vec<_> = prompts.iter().map(Vec::as_slice).zip(&mut caches).collect();
            let _ = model.step(&mut batch);
            let mut forks = caches.each_ref().map(|cache| cache.fork(cache.len()));
            let mut other = model.cache();
            let next = [[7_i64], [8], [9]];
            let mut batch: Vec<_> = next.iter().map(|id| &id[..]).zip(&mut caches).collect();
            let found = model.step(&mut batch);
            let mut batch: Vec<_> = next.iter().map(|id| &id[..]).zip(&mut forks).collect();
            batch.push((&[1, 2], &mut other));
            let wanted = model.step(&mut batch).narrow(0, 0, 3);
            let most = wanted.abs().max().double_value(&[]);
            let difference = difference(&found, &wanted);
            assert!(difference <= off * (1.0 + most), "{name} {dtype}: {difference:e} at {most}");
            assert_eq!(caches.each_ref().map(|cache| cache.len()), [6, 41, 2]);
        }
    }
}

#[test]
fn a_token_each_does_not_depend_on_the_others_to_the_bit() {
    let model = load("tiny-qwen3");
    let prompts: Vec<_> = (0..9).map(|place| tokens(2 + 3 * place, place)).collect();
    let mut caches: Vec<_> = prompts.iter().map(|_| model.cache()).collect();
    for (prompt, cache) in prompts.iter().zip(&mut caches) {
        let _ = model.step(&mut [(prompt, cache)]);
    }
    let mut forks: Vec<_> = caches.iter().map(|cache| cache.fork(cache.len())).collect();
    let next = [5_i64];
    let mut batch: Vec<_> = caches.iter_mut().map(|cache| (&next[..], cache)).collect();
    let together = model.step(&mut batch);
    for (place, cache) in forks.iter_mut().enumerate() {
        let alone = model.step(&mut [(&next[..], cache)]);
        assert_eq!(alone, together.narrow(0, place as i64, 1), "sequence {place}");
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
    assert_steady("in parts", &logits, &whole);
}

#[test]
fn a_cache_can_be_cut_and_forked() {
    let model = load("tiny-llama");
    let ids = tokens(20, 1);
    let mut cache = model.cache();
    let _ = model.step(&mut [(&ids, &mut cache)]);
    let mut other = cache.fork(12);
    assert_eq!((cache.len(), other.len()), (20, 12));
    let branched = model.step(&mut [(&[3, 4], &mut other)]);
    let wanted = all_logits(&model, &[&ids[..12], &[3, 4]].concat()).narrow(0, 13, 1);
    assert_steady("forked", &branched, &wanted);
    // The fork changed nothing in the cache it came from.
    cache.truncate(15);
    let cut = model.step(&mut [(&ids[15..], &mut cache)]);
    let wanted = all_logits(&model, &ids).narrow(0, 19, 1);
    assert_steady("cut", &cut, &wanted);
}

#[test]
fn scores_are_log_softmax_of_the_logits() {
    let model = load("tiny-qwen2");
    // Longer than one chunk of the head; the second request goes along.
    let long = tokens(1100, 1);
    let chosen: Vec<i64> = (0..1095).flat_map(|row| [row % 7, 1000 - row % 5]).collect();
    let requests = [
        Score {
            ids: long.clone(),
            start: 5,
            temperature: 0.5,
            top_k: 3,
            chosen: chosen.clone(),
            entropy: true,
        },
        Score { ids: tokens(6, 2), start: 6, ..Default::default() },
        Score { ids: tokens(6, 3), start: 1, ..Default::default() },
    ];
    let scored = model.score(&requests);
    let log_probs = (all_logits(&model, &long) / 0.5).log_softmax(-1, Kind::Float);
    assert_eq!(scored[0].log_probs.len(), 1095);
    assert_eq!(scored[0].top_ids.len(), 3 * 1095);
    for row in 0..1095_usize {
        let at = |id: i64| log_probs.double_value(&[row as i64 + 4, id]);
        let near =
            |found: f32, wanted: f64| assert!((f64::from(found) - wanted).abs() < STEADY, "{row}");
        near(scored[0].log_probs[row], at(long[row + 5]));
        for column in 0..2 {
            near(scored[0].chosen_log_probs[2 * row + column], at(chosen[2 * row + column]));
        }
        for column in 0..3 {
            near(
                scored[0].top_log_probs[3 * row + column],
                at(scored[0].top_ids[3 * row + column]),
            );
        }
    }
    let entropy =
        -(log_probs.exp() * &log_probs).sum_dim_intlist([-1_i64].as_slice(), false, Kind::Float);
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
            assert!(
                tensor.grad().abs().sum(Kind::Float).double_value(&[]) > 0.0,
                "{name} {parameter}"
            );
        }
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

/// Training goes through the head by a weight that it has rounded once.
#[test]
fn the_head_of_a_pass_gives_the_logits_that_are_scored_to_the_bit() {
    for name in FAMILIES {
        for (dtype, trainable) in
            [(Dtype::F32, true), (Dtype::F32, false), (Dtype::Bf16, true), (Dtype::Bf16, false)]
        {
            let options = LoadOptions { dtype: Some(dtype), trainable, ..Default::default() };
            let model = Model::load(&folder(name), &options).unwrap();
            let ids = Tensor::from_slice(&tokens(70, 1));
            let hidden = tch::no_grad(|| model.hidden(&ids, &[70]));
            let head = model.head_pass();
            for rows in [1, 5, Head::LEAST_ROWS, 70] {
                let rows = hidden.narrow(0, 0, rows);
                let wanted = tch::no_grad(|| model.head(&rows));
                let found = head.go(&rows).logits;
                assert!(found.equal(&wanted), "{name}, {dtype}, {trainable}: {:?}", rows.size());
            }
        }
    }
}

#[test]
fn ids_outside_the_vocabulary_are_named() {
    let model = load("tiny-qwen3");
    model.check_ids([0, 1023]).unwrap();
    let error = model.check_ids([5, 1024]).unwrap_err();
    assert!(matches!(error, Error::TokenOutOfRange { id: 1024, position: 1, vocab_size: 1024 }));
    assert!(model.check_ids([-1]).is_err());
}

#[test]
fn a_number_of_layers_that_no_model_has_is_refused_at_once() {
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(folder("tiny-qwen3")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    let config = copy.path().join("config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    let text = text.replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1000000000000");
    std::fs::write(&config, text).unwrap();
    let error = Model::load(copy.path(), &LoadOptions::default()).unwrap_err().to_string();
    assert!(error.contains("`num_hidden_layers` is 1000000000000, at most 4096"), "{error}");
}

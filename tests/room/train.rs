//! Training on the tiny models: which rows, which way, how often, and what is
//! left on the disk.

mod adapters;
mod admission;
mod average;
mod distil;
mod objective;
mod parts;
mod policies;
mod rounding;
mod surrogate;

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};

use oclaw::advantage::{self, Estimator, Method};
use oclaw::loss::{Clip, HintSelection, KlKind, Reduction, SubsetIds};
use oclaw::model::{Dtype, LoadOptions, Model};
use oclaw::train::{
    Admission, Compute, Distillation, Distilled, Error, Form, Importance, Measures, OldLogProbs,
    Options, Policy, Prepared, Rates, Rounding, Sample, Schedule, Shape, Teaching, Terms, Trained,
    Trainer, admit, gradients, read_record, sample_log_probs, zero_gradients,
};
use oclaw::trajectory::words::{LogProbKind, Status, TokenSource};
use oclaw::trajectory::{Sampling, Turn};
use tch::{Kind, Tensor};

use crate::forge::{captured, finished};
use crate::harness::fixture_models as models;

fn admission(estimator: Estimator) -> Admission {
    Admission {
        method: Method::new(estimator),
        distillation: Distillation::default(),
        old_log_probs: OldLogProbs::Recompute,
        max_staleness: 4,
        version_aliases: BTreeMap::from([("default".to_owned(), 0)]),
        assume_temperature: None,
        vocabulary: 1024,
    }
}

fn terms() -> Terms {
    Terms {
        policy: Policy {
            form: Form::Ppo,
            clip: Clip { low: 0.2, high: 0.28, dual: Some(3.0) },
            drift: None,
        },
        teaching: Teaching::Surrogate,
        importance: Importance::Truncated { low: 0.0, high: 2.0 },
        kl: KlKind::LowVar,
        kl_unbiased: false,
        kl_coefficient: 0.0,
        entropy_coefficient: 0.0,
        reduction: Reduction::Sample,
    }
}

pub(crate) fn options(model: &str, out: &Path) -> Options {
    Options {
        model: Some(models().join(model)),
        out: out.to_owned(),
        admission: admission(Estimator::Combine),
        terms: terms(),
        rates: Rates { learning_rate: 1e-3, ..Rates::default() },
        average: None,
        schedule: Schedule::default(),
        epochs: 1,
        parts: 1,
        tokens_per_pass: 64,
        dtype: None,
        rounding: Rounding::default(),
        compute: Compute::default(),
        keep: 6,
        seed: 0,
        settings: serde_json::Value::Null,
    }
}

/// A noted turn: judged, without a hint.
fn judged(number: u32, score: f32) -> Turn {
    let first = 5 + number as i32;
    let turn = Turn {
        score: Some(score),
        response_ids: Some(vec![first, first + 300, 1017]),
        ..captured("s", number)
    };
    advantage::note(turn, false, &Method::new(Estimator::Combine))
}

fn batch(numbers: std::ops::RangeInclusive<u32>) -> Vec<Turn> {
    numbers.map(|number| judged(number, if number % 2 == 0 { -1.0 } else { 1.0 })).collect()
}

/// Trains turns as one batch.
fn train(trainer: &mut Trainer, turns: Vec<Turn>) -> Option<Trained> {
    let samples = trainer.collect(&mut VecDeque::from(turns), None);
    trainer.train(samples).unwrap()
}

fn policy(trained: Option<Trained>) -> PathBuf {
    trained.unwrap().policy.unwrap()
}

fn bytes(policy: &Path, file: &str) -> Vec<u8> {
    fs::read(policy.join(file)).unwrap()
}

fn response_log_prob(model: &Model, turn: &Turn) -> f32 {
    let sample = admit(turn, 0, &admission(Estimator::Combine)).unwrap();
    sample_log_probs(model, &[&sample], 64)[0].own.iter().sum()
}

fn prepared(turn: &Turn, mask: [bool; 3], junk: f32) -> Prepared {
    let sample = admit(turn, 0, &admission(Estimator::Combine)).unwrap();
    let fill = |value: f32| mask.map(|flag| if flag { value } else { junk }).to_vec();
    Prepared {
        old_log_probs: fill(-7.0),
        reference_log_probs: None,
        advantages: fill(0.5),
        distilled: None,
        sample: Sample {
            mask: mask.to_vec(),
            rollout: fill(-7.0).into_iter().map(Some).collect(),
            ..sample
        },
    }
}

#[test]
fn a_praised_answer_rises_and_a_blamed_one_falls() {
    for model in ["tiny-qwen3", "tiny-qwen2", "tiny-llama"] {
        let folder = tempfile::tempdir().unwrap();
        let mut trainer = Trainer::open(options(model, folder.path())).unwrap();
        let turns = vec![judged(1, 1.0), judged(2, -1.0)];
        let before: Vec<f32> =
            turns.iter().map(|turn| response_log_prob(trainer.model(), turn)).collect();
        let trained = train(&mut trainer, turns.clone()).unwrap();
        assert_eq!(trained.metrics.advantage_mean, Some(0.0));
        assert_eq!((trained.metrics.turns, trained.metrics.tokens), (2, 6));
        // Old and current log-probs come from the same weights.
        assert!(trained.metrics.approximate_kl.unwrap().abs() < 1e-6);
        let after = |index: usize| response_log_prob(trainer.model(), &turns[index]);
        assert!(after(0) > before[0], "{model}: {} {}", after(0), before[0]);
        assert!(after(1) < before[1], "{model}: {} {}", after(1), before[1]);
    }
}

#[test]
fn a_policy_is_a_whole_model_folder() {
    for model in ["tiny-qwen3", "tiny-llama"] {
        let folder = tempfile::tempdir().unwrap();
        let mut trainer = Trainer::open(options(model, folder.path())).unwrap();
        let turns = batch(1..=2);
        let policy = policy(train(&mut trainer, turns.clone()));
        assert_eq!(policy, folder.path().join("step-000001"));
        assert_eq!(fs::read_link(folder.path().join("latest")).unwrap(), Path::new("step-000001"));
        let saved = Model::load(&policy, &LoadOptions::default()).unwrap();
        for turn in &turns {
            let wanted = response_log_prob(trainer.model(), turn);
            assert_eq!(response_log_prob(&saved, turn), wanted, "{model}");
        }
        let shapes = |folder: &Path| {
            let tensors = Tensor::read_safetensors(folder.join("model.safetensors")).unwrap();
            let shape =
                |(name, tensor): &(String, Tensor)| (name.clone(), tensor.size(), tensor.kind());
            let mut shapes: Vec<_> = tensors.iter().map(shape).collect();
            shapes.sort_by(|a, b| a.0.cmp(&b.0));
            shapes
        };
        assert_eq!(shapes(&policy), shapes(&models().join(model)));
        for file in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
            assert!(policy.join(file).exists(), "{file}");
        }
        let record = read_record(&policy).unwrap();
        assert_eq!((record.step, record.updates, record.dtype.as_str()), (1, 1, "f32"));
    }
}

#[test]
fn same_turns_same_weights() {
    let run = || {
        let folder = tempfile::tempdir().unwrap();
        let mut trainer = Trainer::open(options("tiny-qwen3", folder.path())).unwrap();
        let policy = policy(train(&mut trainer, batch(1..=5)));
        (bytes(&policy, "model.safetensors"), bytes(&policy, "oclaw/optimizer.safetensors"))
    };
    assert!(run() == run());
}

/// Four steps are two, a restart, and two more, to the bit.
#[test]
fn a_restart_changes_nothing() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let (whole, halves) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let open = |folder: &Path| {
            let options = Options { dtype: Some(dtype), ..options("tiny-qwen3", folder) };
            Trainer::open(options).unwrap()
        };
        let mut trainer = open(whole.path());
        for step in 0..4 {
            train(&mut trainer, batch(2 * step + 1..=2 * step + 2)).unwrap();
        }
        for half in 0..2 {
            let mut trainer = open(halves.path());
            assert_eq!(trainer.step(), half * 2);
            for step in 2 * half as u32..2 * half as u32 + 2 {
                train(&mut trainer, batch(2 * step + 1..=2 * step + 2)).unwrap();
            }
        }
        let policies = [whole.path().join("latest"), halves.path().join("latest")];
        for file in ["model.safetensors", "oclaw/optimizer.safetensors", "oclaw/ledger.parquet"] {
            assert!(bytes(&policies[0], file) == bytes(&policies[1], file), "{dtype}: {file}");
        }
        let kind =
            Tensor::read_safetensors(policies[0].join("model.safetensors")).unwrap()[0].1.kind();
        assert_eq!(kind, if dtype == Dtype::F32 { Kind::Float } else { Kind::BFloat16 });
    }
}

#[test]
fn no_turn_is_trained_twice() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::open(options("tiny-qwen3", folder.path())).unwrap();
    let twice = [batch(1..=2), batch(1..=2)].concat();
    let trained = train(&mut trainer, twice).unwrap();
    assert_eq!(trained.metrics.turns, 2);
    assert_eq!(trainer.refused(), &BTreeMap::from([("duplicate_turn_id".to_owned(), 2)]));
    drop(trainer);
    let mut trainer = Trainer::open(options("tiny-qwen3", folder.path())).unwrap();
    assert_eq!(train(&mut trainer, batch(1..=2)), None);
    let trained = train(&mut trainer, batch(1..=3)).unwrap();
    assert_eq!((trained.metrics.turns, trained.metrics.step), (1, 2));
    let entry = trainer.ledger().entry("s-turn-1").unwrap();
    assert_eq!((entry.step, entry.refused.as_deref()), (1, None));
    assert_eq!(trainer.ledger().trained(), 3);
}

/// 23 turns at 16 a batch; with 9 more, all 32 are used.
#[test]
fn what_does_not_fill_a_batch_stays() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::open(options("tiny-qwen3", folder.path())).unwrap();
    let mut run = |turns: Vec<Turn>| {
        let mut queue = VecDeque::from(turns);
        let mut left = 0;
        while left == 0 && !queue.is_empty() {
            let samples = trainer.collect(&mut queue, Some(16));
            match samples.len() {
                16 => assert!(trainer.train(samples).unwrap().is_some()),
                fewer => left = fewer,
            }
        }
        (left, trainer.ledger().trained())
    };
    assert_eq!(run(batch(1..=23)), (7, 16));
    assert_eq!(run(batch(1..=32)), (0, 32));
}

#[test]
fn nothing_to_learn_moves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::open(options("tiny-qwen3", folder.path())).unwrap();
    let masked = Turn { loss_mask: Some(vec![0; 3]), ..judged(1, 1.0) };
    assert_eq!(train(&mut trainer, vec![masked, judged(2, 0.0)]), None);
    assert_eq!(trainer.refused()["masked"], 1);
    assert_eq!(train(&mut trainer, Vec::new()), None);
    assert_eq!(trainer.refused()["judged_neutral, no_hint"], 1);
    assert!(!folder.path().join("latest").exists());
    // Advantages that are all 0: weight decay must not move the weights.
    let reward_only = Method { reward_weight: 0.0, ..Method::new(Estimator::Combine) };
    drop(trainer);
    let admission = Admission { method: reward_only, ..admission(Estimator::Combine) };
    let options = Options { admission, ..options("tiny-qwen3", folder.path()) };
    let mut trainer = Trainer::open(options).unwrap();
    assert_eq!(train(&mut trainer, batch(1..=2)), None);
    assert_eq!(trainer.refused()["zero_advantage"], 2);
    assert!(!folder.path().join("latest").exists());
}

//! Training on the tiny models: which rows, which way, how often, and what is
//! left on the disk.

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};

use oclaw::advantage::{self, Estimator, Method};
use oclaw::loss::{Clip, HintSelection, KlKind, Reduction, SubsetIds};
use oclaw::model::{Dtype, LoadOptions, Model};
use oclaw::train::{
    Admission, Distillation, Distilled, Error, Importance, OldLogProbs, Options, Prepared, Rates,
    Sample, Terms, Trained, Trainer, admit, gradients, read_record, sample_log_probs,
    zero_gradients,
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
        clip: Clip { low: 0.2, high: 0.28, dual: Some(3.0) },
        importance: Importance::Truncated { low: 0.0, high: 2.0 },
        kl: KlKind::LowVar,
        kl_coefficient: 0.0,
        entropy_coefficient: 0.0,
        reduction: Reduction::Sample,
    }
}

fn options(model: &str, out: &Path) -> Options {
    Options {
        model: Some(models().join(model)),
        out: out.to_owned(),
        admission: admission(Estimator::Combine),
        terms: terms(),
        rates: Rates { learning_rate: 1e-3, ..Rates::default() },
        epochs: 1,
        tokens_per_pass: 64,
        dtype: None,
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

#[test]
fn a_policy_of_the_wrong_age_is_refused() {
    let of = |version: Option<&str>| Turn {
        weight_version: version.map(str::to_owned),
        ..judged(1, 1.0)
    };
    let admission = Admission { max_staleness: 1, ..admission(Estimator::Combine) };
    let reason = |turn: &Turn| admit(turn, 5, &admission).map(|sample| sample.staleness);
    assert_eq!(reason(&of(Some("5"))), Ok(0));
    assert_eq!(reason(&of(Some("4"))), Ok(1));
    for (version, wanted) in [
        (Some("3"), "stale"),
        (Some("0"), "stale"),
        (Some("default"), "stale"),
        (Some("6"), "version_from_the_future"),
        (Some("v1"), "version_unknown"),
        (None, "version_missing"),
    ] {
        let refusal = reason(&of(version)).unwrap_err();
        assert_eq!((refusal.reason.as_str(), refusal.fault), (wanted, None));
    }
    let named = |name: &str| Admission {
        version_aliases: BTreeMap::from([(name.to_owned(), 5)]),
        ..admission.clone()
    };
    assert!(admit(&of(Some("v1")), 5, &named("v1")).is_ok());
    assert!(admit(&of(None), 5, &named("none")).is_ok());
}

#[test]
fn the_temperature_of_ratios_is_that_of_the_servers_log_probs() {
    let of = |temperature, log_prob_kind| Turn {
        sampling: Sampling { temperature, log_prob_kind, ..Sampling::default() },
        ..judged(1, 1.0)
    };
    let plain = admission(Estimator::Combine);
    let found = |turn: &Turn, admission: &Admission| {
        admit(turn, 0, admission).map(|sample| sample.temperature).map_err(|error| error.reason)
    };
    assert_eq!(found(&of(Some(0.5), LogProbKind::Raw), &plain), Ok(1.0));
    assert_eq!(found(&of(Some(0.5), LogProbKind::Tempered), &plain), Ok(0.5));
    assert_eq!(found(&of(Some(0.0), LogProbKind::Tempered), &plain), Ok(1.0));
    let unknown = Err("temperature_unknown".to_owned());
    assert_eq!(found(&of(None, LogProbKind::Tempered), &plain), unknown);
    assert_eq!(found(&of(Some(0.5), LogProbKind::Unknown), &plain), unknown);
    let assumed = Admission { assume_temperature: Some(0.25), ..plain };
    assert_eq!(found(&of(Some(0.5), LogProbKind::Unknown), &assumed), Ok(0.25));
}

/// A noted turn whose log-probs are of a temperature.
fn tempered(number: u32, temperature: f32) -> Turn {
    let (temperature, log_prob_kind) = (Some(temperature), LogProbKind::Tempered);
    let sampling = Sampling { temperature, log_prob_kind, ..Sampling::default() };
    Turn { sampling, ..judged(number, 1.0) }
}

/// A table may say that tokens are trained which nobody sampled so.
#[test]
fn the_mask_does_not_stand_alone() {
    let plain = admission(Estimator::Combine);
    let untrainable = Some("log_probs_misaligned".to_owned());
    for (turn, reason) in [
        (Turn { status: Status::Failed, ..judged(1, 1.0) }, "failed"),
        (Turn { status: Status::Aborted, ..judged(1, 1.0) }, "aborted"),
        (Turn { token_source: TokenSource::Retokenized, ..judged(1, 1.0) }, "retokenized"),
        (Turn { token_source: TokenSource::None, ..judged(1, 1.0) }, "no_token_ids"),
        (Turn { prompt_ids: None, ..judged(1, 1.0) }, "no_token_ids"),
        (Turn { prompt_ids: Some(Vec::new()), ..judged(1, 1.0) }, "no_token_ids"),
        (Turn { untrainable_reason: untrainable, ..judged(1, 1.0) }, "log_probs_misaligned"),
    ] {
        let refusal = admit(&turn, 0, &plain).unwrap_err();
        let fault = format!("loss_mask is 1 in a row that must not be trained: {reason}");
        assert_eq!((refusal.reason.as_str(), refusal.fault), (reason, Some(fault)));
        let masked = Turn { loss_mask: Some(vec![0; 3]), ..turn };
        let refusal = admit(&masked, 0, &plain).unwrap_err();
        assert_eq!((refusal.reason.as_str(), refusal.fault), (reason, None));
    }
}

#[test]
fn a_turn_without_an_id_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::open(options("tiny-qwen3", folder.path())).unwrap();
    let nameless = Turn { turn_id: String::new(), ..judged(1, 1.0) };
    let trained = train(&mut trainer, [vec![nameless], batch(2..=2)].concat()).unwrap();
    assert_eq!(trained.metrics.turns, 1);
    assert_eq!(trainer.faults()[0].problem, "turn_id is empty");
    assert_eq!(trainer.ledger().entry(""), None);
}

/// A teacher that says next to nothing of a token makes an advantage that is none.
#[test]
fn an_advantage_of_no_size_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::open(options("tiny-qwen3", folder.path())).unwrap();
    let far = Some(vec![Some(vec![-0.1, -1e30, -0.3]), None]);
    let turn = Turn { teacher_log_probs: far, ..finished("t", 1) };
    let trained = train(&mut trainer, [vec![turn], batch(2..=2)].concat()).unwrap();
    assert_eq!((trained.metrics.turns, trained.metrics.skipped_updates), (1, 0));
    let problem = "the advantage is -1e30 at token 1, more than 1000000 in size";
    assert_eq!(trainer.faults()[0].problem, problem);
}

#[test]
fn a_broken_row_is_refused_by_name_and_the_others_train() {
    let broken = [
        Turn { advantage_error: Some("no luck".to_owned()), ..judged(1, 1.0) },
        Turn { rollout_log_probs: Some(vec![Some(-0.5); 2]), ..judged(2, 1.0) },
        Turn { rollout_log_probs: Some(vec![Some(f32::NAN); 3]), ..judged(3, 1.0) },
        Turn { loss_mask: Some(vec![1; 2]), ..judged(4, 1.0) },
        Turn { response_ids: Some(vec![5, 1024, 2]), ..judged(5, 1.0) },
        Turn { response_ids: Some(vec![5, -1, 2]), ..judged(6, 1.0) },
        Turn { reward: Some(f32::NAN), ..judged(7, 1.0) },
        Turn { teacher_log_probs: Some(vec![Some(vec![-0.5; 4])]), ..judged(8, 1.0) },
        Turn { teacher_temperature: Some(0.0), ..judged(11, 1.0) },
        Turn { teacher_temperature: Some(f32::NAN), ..judged(12, 1.0) },
        tempered(13, 1e-30),
        tempered(14, f32::INFINITY),
        Turn { rl_advantages: Some(vec![1e38; 3]), ..judged(15, 1.0) },
        Turn { rl_advantages: Some(vec![1.0, f32::NAN, 1.0]), ..judged(16, 1.0) },
        Turn { loss_mask: Some(vec![1, 2, 1]), ..judged(17, 1.0) },
        Turn { loss_mask: Some(vec![1, 1, -1]), ..judged(18, 1.0) },
        Turn { reward: Some(7e30), ..judged(19, 1.0) },
        Turn { rollout_log_probs: Some(vec![Some(5.0); 3]), ..judged(20, 1.0) },
    ];
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::open(options("tiny-qwen3", folder.path())).unwrap();
    let count = broken.len();
    let trained = train(&mut trainer, [broken.to_vec(), batch(9..=10)].concat()).unwrap();
    assert_eq!(trained.metrics.turns, 2);
    assert_eq!(trainer.faults().len(), count);
    for (number, words) in [
        (1, "no luck"),
        (2, "rollout_log_probs has 2 values for 3 response ids"),
        (3, "rollout_log_probs is not finite at token 0"),
        (4, "loss_mask has 2 values for 3 response ids"),
        (5, "token id 1024 is not among the model's 1024"),
        (6, "response_ids has id -1 at token 1"),
        (7, "reward is NaN"),
        (8, "teacher_log_probs[0] has 4 values for 3 response ids"),
        (11, "teacher_temperature is 0.0, wanted a number, 0.0001 or more"),
        (12, "teacher_temperature is NaN, wanted a number, 0.0001 or more"),
        (13, "temperature is 1e-30, wanted a number, 0.0001 or more"),
        (14, "temperature is inf, wanted a number, 0.0001 or more"),
        (15, "rl_advantages is 1e38 at token 0, more than 1000000 in size"),
        (16, "rl_advantages is not finite at token 1"),
        (17, "loss_mask is 2 at token 1, wanted 0 or 1"),
        (18, "loss_mask is -1 at token 2, wanted 0 or 1"),
        (19, "wanted -1 to 1"),
        (20, "rollout_log_probs is 5 at token 0, above 0"),
    ] {
        let name = format!("s-turn-{number}");
        let fault = trainer.faults().iter().find(|fault| fault.turn_id == name).unwrap();
        assert!(fault.problem.contains(words), "{}", fault.problem);
        assert!(trainer.ledger().entry(&name).unwrap().refused.is_some());
    }
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

/// A mask selects: NaN at a masked place changes nothing, and a token alone has
/// the loss that an own forward pass gives it.
#[test]
fn a_mask_selects() {
    let options = LoadOptions { trainable: true, ..LoadOptions::default() };
    let model = Model::load(&models().join("tiny-qwen3"), &options).unwrap();
    let turn = judged(1, 1.0);
    let ids = [turn.prompt_ids.clone().unwrap(), turn.response_ids.clone().unwrap()].concat();
    let ids: Vec<i64> = ids.iter().map(|id| i64::from(*id)).collect();
    for token in 0..3 {
        let mut mask = [false; 3];
        mask[token] = true;
        let gradient = |junk: f32| {
            zero_gradients(model.parameters());
            let measures = gradients(&model, &[prepared(&turn, mask, junk)], &terms(), 64);
            let flat = model.parameters().iter().map(|(_, weight)| weight.grad().copy().view(-1));
            (measures.policy_loss, Tensor::cat(&flat.collect::<Vec<_>>(), 0))
        };
        let (clean, dirty) = (gradient(0.0), gradient(f32::NAN));
        assert_eq!(clean.0, dirty.0);
        assert!(clean.1.equal(&dirty.1) && clean.1.norm().double_value(&[]) > 0.0);
        zero_gradients(model.parameters());
        let hidden = model.hidden(&Tensor::from_slice(&ids), &[ids.len() as i64]);
        let row = 4 + token as i64 - 1;
        let logits = model.head(&hidden.narrow(0, row, 1));
        let target = Tensor::from_slice(&[ids[row as usize + 1]]);
        let ratio = (oclaw::loss::log_probs(&logits, &target) + 7.0).exp();
        let wanted = -(ratio.minimum(&Tensor::from(1.28_f32)) * 0.5).sum(Kind::Float);
        assert!((wanted.double_value(&[]) - clean.0).abs() < 1e-4);
        wanted.backward();
        let flat = model.parameters().iter().map(|(_, weight)| weight.grad().copy().view(-1));
        let off = (Tensor::cat(&flat.collect::<Vec<_>>(), 0) - clean.1).abs().max();
        assert!(off.double_value(&[]) < 1e-4, "token {token}: off by {off}");
    }
}

#[test]
fn a_batch_without_trained_tokens_has_no_loss() {
    let options = LoadOptions { trainable: true, ..LoadOptions::default() };
    let model = Model::load(&models().join("tiny-qwen3"), &options).unwrap();
    let measures = gradients(&model, &[prepared(&judged(1, 1.0), [false; 3], 0.0)], &terms(), 64);
    assert_eq!((measures.loss, measures.entropy), (0.0, 0.0));
    assert!(model.parameters().iter().all(|(_, weight)| !weight.grad().defined()));
}

#[test]
fn several_epochs_keep_the_old_log_probs() {
    let folder = tempfile::tempdir().unwrap();
    let options = Options { epochs: 3, ..options("tiny-qwen3", folder.path()) };
    let mut trainer = Trainer::open(options).unwrap();
    let trained = train(&mut trainer, batch(1..=2)).unwrap();
    assert!(trained.metrics.approximate_kl.unwrap().abs() > 1e-3);
    assert_eq!(trained.metrics.step, 1);
    assert_eq!(read_record(&trained.policy.unwrap()).unwrap().updates, 3);
}

#[test]
fn hints_pull_towards_the_teacher() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options("tiny-qwen3", folder.path());
    options.admission = admission(Estimator::Opd);
    // The teacher is sure of the answer, the model is not.
    let mut trainer = Trainer::open(options).unwrap();
    let turn = advantage::note(finished("s", 1), false, &Method::new(Estimator::Opd));
    let before = response_log_prob(trainer.model(), &turn);
    let trained = train(&mut trainer, vec![turn.clone(), judged(2, 1.0)]).unwrap();
    assert_eq!(trained.metrics.turns, 1);
    assert_eq!(trainer.refused()["no_signal_for_estimator"], 1);
    assert!(trained.metrics.advantage_min.unwrap() > 0.0);
    assert!(response_log_prob(trainer.model(), &turn) > before);
}

#[test]
fn the_servers_log_probs_can_stand_for_the_old_ones() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options("tiny-qwen3", folder.path());
    options.admission.old_log_probs = OldLogProbs::Rollout;
    let mut trainer = Trainer::open(options).unwrap();
    let without = Turn { rollout_log_probs: None, ..judged(3, 1.0) };
    let trained = train(&mut trainer, [batch(1..=2), vec![without]].concat()).unwrap();
    // The last token has no log-prob of the server's and no ratio.
    assert_eq!((trained.metrics.turns, trained.metrics.tokens), (2, 4));
    assert_eq!(trained.metrics.importance, Some(1.0));
    assert!(trained.metrics.log_prob_gap.unwrap() > 0.1, "by a forward pass of the trainer");
    assert_eq!(trainer.refused()["no_log_probs"], 1);
}

#[test]
fn a_step_that_is_not_finite_is_skipped() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options("tiny-qwen3", folder.path());
    options.terms.entropy_coefficient = f64::NAN;
    let mut trainer = Trainer::open(options).unwrap();
    let before = response_log_prob(trainer.model(), &judged(1, 1.0));
    for number in 1..=2 {
        let trained = train(&mut trainer, batch(number..=number)).unwrap();
        assert_eq!((trained.policy, trained.metrics.skipped_updates), (None, 1));
    }
    assert_eq!(response_log_prob(trainer.model(), &judged(1, 1.0)), before);
    let samples = trainer.collect(&mut VecDeque::from(batch(3..=3)), None);
    let error = trainer.train(samples).unwrap_err();
    assert!(matches!(error, Error::NotFinite { updates: 3 }), "{error}");
    assert!(!folder.path().join("latest").exists());
}

#[test]
fn old_policies_and_states_make_room() {
    let folder = tempfile::tempdir().unwrap();
    let options = Options { keep: 3, ..options("tiny-qwen3", folder.path()) };
    let mut trainer = Trainer::open(options).unwrap();
    for number in 1..=5 {
        train(&mut trainer, batch(number..=number)).unwrap();
    }
    let mut names: Vec<String> = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, [".lock", "latest", "step-000003", "step-000004", "step-000005"]);
    let state = |step: &str| folder.path().join(step).join("oclaw/optimizer.safetensors").exists();
    assert_eq!(
        [state("step-000003"), state("step-000004"), state("step-000005")],
        [false, true, true]
    );
}

#[test]
fn a_killed_run_leaves_nothing_that_counts() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::open(options("tiny-qwen3", folder.path())).unwrap();
    train(&mut trainer, batch(1..=2)).unwrap();
    let wanted = bytes(&policy(train(&mut trainer, batch(3..=4))), "model.safetensors");
    drop(trainer);
    // Killed after the rename and before `latest` moved, and amid another write.
    let latest = folder.path().join("latest");
    fs::remove_file(&latest).unwrap();
    std::os::unix::fs::symlink("step-000001", &latest).unwrap();
    fs::create_dir_all(folder.path().join(".tmp-step-000002-1/oclaw")).unwrap();
    let mut trainer = Trainer::open(options("tiny-qwen3", folder.path())).unwrap();
    assert_eq!(trainer.step(), 1);
    assert!(!folder.path().join(".tmp-step-000002-1").exists());
    let again = policy(train(&mut trainer, batch(3..=4)));
    assert!(bytes(&again, "model.safetensors") == wanted);
    assert_eq!(fs::read_link(&latest).unwrap(), Path::new("step-000002"));
}

#[test]
fn a_withdrawn_policy_keeps_its_number() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::open(options("tiny-qwen3", folder.path())).unwrap();
    for number in 1..=3 {
        train(&mut trainer, batch(number..=number)).unwrap();
    }
    drop(trainer);
    // Twice rolled back, as `sync-weights --rollback` does it.
    for step in ["step-000003", "step-000002"] {
        fs::write(folder.path().join(step).join("oclaw/withdrawn"), "").unwrap();
    }
    let latest = folder.path().join("latest");
    fs::remove_file(&latest).unwrap();
    std::os::unix::fs::symlink("step-000001", &latest).unwrap();
    let withdrawn = bytes(&folder.path().join("step-000002"), "model.safetensors");
    let mut trainer = Trainer::open(options("tiny-qwen3", folder.path())).unwrap();
    assert_eq!(trainer.step(), 1);
    // What only the withdrawn policies learned from is learned again.
    let trained = train(&mut trainer, batch(2..=2)).unwrap();
    assert_eq!(trained.metrics.step, 4);
    assert_eq!(trained.policy.unwrap(), folder.path().join("step-000004"));
    assert_eq!(fs::read_link(&latest).unwrap(), Path::new("step-000004"));
    assert!(bytes(&folder.path().join("step-000002"), "model.safetensors") == withdrawn);
    let ledger = trainer.ledger();
    assert!(ledger.consumed(&judged(2, 1.0).turn_id) && !ledger.consumed(&judged(3, 1.0).turn_id));
}

#[test]
fn without_its_state_the_optimiser_says_that_it_starts_anew() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::open(options("tiny-qwen3", folder.path())).unwrap();
    let policy = policy(train(&mut trainer, batch(1..=2)));
    drop(trainer);
    fs::remove_file(policy.join("oclaw/optimizer.safetensors")).unwrap();
    let trainer = Trainer::open(options("tiny-qwen3", folder.path())).unwrap();
    assert!(trainer.notes()[0].contains("starts anew"), "{:?}", trainer.notes());
    drop(trainer);
    fs::write(policy.join("oclaw/optimizer.safetensors"), b"cut").unwrap();
    let error = Trainer::open(options("tiny-qwen3", folder.path())).unwrap_err();
    assert!(error.to_string().contains("optimizer.safetensors"), "{error}");
}

#[test]
fn a_folder_that_cannot_be_used_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let open = |model: Option<&str>, out: &Path| {
        let model = model.map(|model| models().join(model));
        Trainer::open(Options { model, ..options("tiny-qwen3", out) }).map(|_| ())
    };
    let error = open(None, folder.path()).unwrap_err();
    assert!(matches!(error, Error::NoModel { .. }), "{error}");
    let mut trainer = Trainer::open(options("tiny-qwen3", folder.path())).unwrap();
    let error = open(Some("tiny-qwen3"), folder.path()).unwrap_err();
    assert!(matches!(error, Error::Locked { .. }), "{error}");
    train(&mut trainer, batch(1..=2)).unwrap();
    drop(trainer);
    let error = open(Some("tiny-llama"), folder.path()).unwrap_err();
    assert!(matches!(error, Error::OtherBase { .. }), "{error}");
    open(None, folder.path()).unwrap();
    fs::remove_file(folder.path().join("latest")).unwrap();
    fs::write(folder.path().join("latest"), "step-000001\n").unwrap();
    open(None, folder.path()).unwrap();
    fs::write(folder.path().join("latest"), "step-000009\n").unwrap();
    let error = open(None, folder.path()).unwrap_err();
    assert!(error.to_string().contains("`step-000009` is not there"), "{error}");
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let error = open(Some("tiny-qwen3"), &file).unwrap_err();
    assert!(matches!(error, Error::Write { .. }), "{error}");
    let missing = open(Some("no-such-model"), &folder.path().join("new")).unwrap_err();
    assert!(missing.to_string().contains("no-such-model"), "{missing}");
}

/// A row that a hint teaches by its top-k ids, without a reward.
fn taught(number: u32) -> Turn {
    let turn = Turn { score: None, votes: None, ..finished("s", number) };
    advantage::note(turn, false, &Method::new(Estimator::Hybrid))
}

fn hybrid(folder: &Path) -> Options {
    let method = Method { distill_clip: Some(1.0), ..Method::new(Estimator::Hybrid) };
    let admission = Admission { method, ..admission(Estimator::Hybrid) };
    Options { admission, ..options("tiny-qwen3", folder) }
}

/// Through the packed model and by plain autograd over all logits.
#[test]
fn the_gradient_of_top_k_distillation() {
    let options = LoadOptions { trainable: true, ..LoadOptions::default() };
    let model = Model::load(&models().join("tiny-qwen3"), &options).unwrap();
    let turn = judged(1, 1.0);
    let ids = [turn.prompt_ids.clone().unwrap(), turn.response_ids.clone().unwrap()].concat();
    let ids: Vec<i64> = ids.iter().map(|id| i64::from(*id)).collect();
    let distilled = Distilled {
        k: 2,
        ids: vec![3, 9, 4, 8, 5, 7],
        inside: vec![true, true, true, false, false, false],
        advantages: vec![0.5, -0.25, 0.75, 0.0, 0.0, 0.0],
        old_log_probs: vec![-7.0; 6],
        gaps: vec![0.0; 3],
        overlaps: vec![0.0; 3],
        unusable: vec![false; 3],
    };
    // The second of three tokens is masked, NaN and all.
    let mut batch = prepared(&turn, [true, false, true], f32::NAN);
    let mut dirty = distilled.clone();
    dirty.advantages[2..4].fill(f32::NAN);
    dirty.old_log_probs[2..4].fill(f32::NAN);
    batch.distilled = Some(dirty);
    // Another sample, without a hint and so without the term.
    let other = prepared(&judged(2, 1.0), [true; 3], 0.0);
    let flat = || {
        let all = model.parameters().iter().map(|(_, weight)| weight.grad().copy().view(-1));
        Tensor::cat(&all.collect::<Vec<_>>(), 0)
    };
    let run = |batch: &[Prepared]| {
        zero_gradients(model.parameters());
        let measures = gradients(&model, batch, &terms(), 64);
        (measures, flat())
    };
    let without: Vec<_> =
        [&batch, &other].map(|prepared| Prepared { distilled: None, ..prepared.clone() }).into();
    let (plain, plain_gradient) = run(&without);
    assert_eq!(plain.distill_loss, None);
    let (found, gradient) = run(&[batch, other]);
    assert_eq!(found.policy_loss, plain.policy_loss);

    zero_gradients(model.parameters());
    let hidden = model.hidden(&Tensor::from_slice(&ids), &[ids.len() as i64]);
    let log_probs = model.head(&hidden.narrow(0, 3, 1)).log_softmax(-1, Kind::Float);
    let ratio = (log_probs.index_select(1, &Tensor::from_slice(&[3_i64, 9])) + 7.0).exp();
    let worth = Tensor::from_slice(&[0.5_f32, -0.25]);
    let clipped = -(ratio.clamp(0.8, 1.28) * &worth);
    let term = (-(&ratio * &worth)).maximum(&clipped);
    let limited = term.minimum(&(&worth * -3.0)).where_self(&worth.lt(0.0), &term);
    // Half of the sample's tokens, half of the batch; the third token's subset
    // is empty and counts.
    let wanted = limited.sum(Kind::Float) * 0.25;
    assert!((wanted.double_value(&[]) - found.distill_loss.unwrap()).abs() < 1e-5);
    assert!((found.loss - found.policy_loss - found.distill_loss.unwrap()).abs() < 1e-6);
    wanted.backward();
    let off = (flat() + plain_gradient - gradient).abs().max().double_value(&[]);
    assert!(off < 1e-4, "off by {off}");
}

#[test]
fn hybrid_pulls_towards_the_ids_that_a_hint_favours() {
    for (selection, subset) in [
        (HintSelection::Sequence, SubsetIds::Student),
        (HintSelection::Token, SubsetIds::Teacher),
        (HintSelection::Shortest, SubsetIds::Overlap),
    ] {
        for old_log_probs in [OldLogProbs::Recompute, OldLogProbs::Rollout] {
            let folder = tempfile::tempdir().unwrap();
            let mut options = hybrid(folder.path());
            options.admission.distillation = Distillation { selection, subset };
            options.admission.old_log_probs = old_log_probs;
            let mut trainer = Trainer::open(options).unwrap();
            let turn = Turn { rollout_log_probs: Some(vec![Some(-7.0); 3]), ..taught(1) };
            let before = response_log_prob(trainer.model(), &turn);
            let trained = train(&mut trainer, vec![turn.clone(), judged(2, 1.0)]).unwrap();
            let metrics = trained.metrics;
            assert_eq!((metrics.turns, metrics.unusable), (2, 0));
            assert_eq!((metrics.subset_size, metrics.overlap), (Some(2.0), Some(2.0)));
            // Teacher and model are further apart than C.
            assert!((metrics.distill_gap.unwrap() - 1.0).abs() < 1e-6);
            // w sums to 1 and d is 1; half of the batch.
            assert!((metrics.distill_loss.unwrap() + 0.5).abs() < 1e-5);
            assert!(response_log_prob(trainer.model(), &turn) > before);
        }
    }
}

/// Deliberate difference: the reference distils a turn without a hint towards
/// the teacher without one.
#[test]
fn hybrid_gives_a_turn_without_a_hint_its_reward_only() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::open(hybrid(folder.path())).unwrap();
    let no_topk = Turn { teacher_topk_ids: Some(vec![None, None]), ..taught(3) };
    let trained = train(&mut trainer, [batch(1..=2), vec![no_topk]].concat()).unwrap();
    assert_eq!((trained.metrics.turns, trained.metrics.distill_loss), (2, None));
    assert_eq!((trained.metrics.subset_size, trained.metrics.overlap), (None, None));
    assert_eq!(trainer.refused()["no_topk"], 1);
}

#[test]
fn a_value_that_is_no_number_teaches_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::open(hybrid(folder.path())).unwrap();
    let odd = vec![Some(vec![-0.1, f32::NAN, -0.3, -0.4, -0.5, -0.6]), None];
    let turn = Turn { teacher_at_student: Some(odd), ..taught(1) };
    let metrics = train(&mut trainer, vec![turn]).unwrap().metrics;
    assert_eq!((metrics.unusable, metrics.subset_size), (1, Some(4.0 / 3.0)));
    assert!((metrics.distill_loss.unwrap() + 2.0 / 3.0).abs() < 1e-5);
}

#[test]
fn broken_top_k_columns_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::open(hybrid(folder.path())).unwrap();
    let turns = [
        Turn { student_topk_ids: Some(vec![5, 6, 7]), ..taught(1) },
        Turn { student_topk_ids: Some(vec![5, 6, 7, 7, 2, 3]), ..taught(2) },
        Turn { teacher_topk_ids: Some(vec![Some(vec![5, 5, 7, 8, 2, 3]), None]), ..taught(3) },
        Turn { teacher_topk_ids: Some(vec![Some(vec![5, 6, 7, 8, 2, 1024]), None]), ..taught(4) },
        Turn { teacher_at_student: Some(vec![Some(vec![-0.1; 5]), None]), ..taught(5) },
        Turn { student_topk_ids: Some(vec![5, 6, 7, -8, 2, 3]), ..taught(6) },
        Turn { teacher_at_student: Some(vec![Some(vec![0.5; 6]), None]), ..taught(7) },
    ];
    assert_eq!(train(&mut trainer, turns.to_vec()), None);
    let problems: Vec<_> = trainer.faults().iter().map(|fault| fault.problem.as_str()).collect();
    let wanted = [
        "student_topk_ids has 3 values for 3 response ids times k = 2",
        "token id 1024 is not among the model's 1024: another tokenizer",
        "teacher_at_student has 5 values for 3 response ids times k = 2",
        "token id -8 is not among the model's 1024: another tokenizer",
        "teacher_at_student is 0.5 for hint 0, above 0",
        "the student's top-k has an id twice at token 1",
        "candidate 0's top-k has an id twice at token 0",
    ];
    assert_eq!(problems, wanted);
}

#[test]
fn reinforce_whitens_over_the_batch() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options("tiny-qwen3", folder.path());
    options.admission = admission(Estimator::ReinforcePlusPlus);
    let mut trainer = Trainer::open(options).unwrap();
    let metrics = train(&mut trainer, batch(1..=3)).unwrap().metrics;
    // Six times 1, three times -1: unbiased variance 1.
    assert!(metrics.advantage_mean.unwrap().abs() < 1e-6);
    assert!((metrics.advantage_max.unwrap() - 2.0 / 3.0).abs() < 1e-5);
    assert!((metrics.advantage_min.unwrap() + 4.0 / 3.0).abs() < 1e-5);
}

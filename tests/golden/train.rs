//! Three AdamW steps of the reference's combine loss, in both groupings of the
//! parameters, through the functions that `oclaw train` runs.

use oclaw::advantage::{self, Estimator, Evidence, Method};
use oclaw::loss::{Clip, KlKind, Reduction};
use oclaw::model::{Dtype, LoadOptions, Model};
use oclaw::train::{
    AdamW, Form, Importance, Measures, Policy, Prepared, Rates, Sample, Teaching, Terms,
    gradient_norm, gradients, sample_log_probs, zero_gradients,
};
use serde_json::Value;
use tch::{Kind, Tensor};

use crate::harness::{golden_file, golden_json, has_weights, list, models, skip};

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("no number: {value}"))
}

fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|item| number(item) as f32).collect()
}

/// Reads the batch. Everything but the current log-probs is recorded.
fn batch(recorded: &Value) -> Vec<Prepared> {
    let (batch, config) = (&recorded["batch"], &recorded["config"]);
    let method = Method {
        distill_weight: number(&config["w_opd"]) as f32,
        reward_weight: number(&config["w_rl"]) as f32,
        ..Method::new(Estimator::Combine)
    };
    let count = batch["tokens"].as_array().unwrap().len();
    let prepare = |index: usize| {
        let list = |key: &str| floats(&batch[key][index]);
        let ids: Vec<i32> = list("tokens").iter().map(|id| *id as i32).collect();
        let prompt = batch["prompt_lengths"][index].as_u64().unwrap() as usize;
        let (old, teacher) = (list("old_log_probs"), list("teacher_log_probs"));
        let reward = number(&batch["rewards"][index]) as f32;
        let evidence = Evidence {
            reward: Some(reward),
            reward_part: None,
            teacher: Some(&teacher),
            old: &old,
            promoted: false,
        };
        let sample = Sample {
            turn_id: index.to_string(),
            prompt_ids: ids[..prompt].to_vec(),
            response_ids: ids[prompt..].to_vec(),
            mask: list("loss_masks").iter().map(|flag| *flag != 0.0).collect(),
            rollout: list("rollout_log_probs").into_iter().map(Some).collect(),
            temperature: number(&config["temperature"]),
            reward: Some(reward),
            reward_part: None,
            teacher: Some(teacher.clone()),
            topk: None,
            teacher_temperature: 1.0,
            promoted: false,
            staleness: 0,
        };
        Prepared {
            sample,
            advantages: advantage::advantages(&method, &evidence).unwrap(),
            old_log_probs: old.clone(),
            reference_log_probs: Some(list("ref_log_probs")),
            distilled: None,
        }
    };
    (0..count).map(prepare).collect()
}

fn terms(config: &Value) -> Terms {
    assert_eq!(config["kl_loss_type"], "low_var_kl");
    let clip = Clip {
        low: number(&config["eps_clip"]),
        high: number(&config["eps_clip_high"]),
        dual: None,
    };
    Terms {
        policy: Policy { form: Form::Ppo, clip, drift: None },
        teaching: Teaching::Surrogate,
        importance: Importance::Off,
        kl: KlKind::LowVar,
        kl_unbiased: false,
        kl_coefficient: number(&config["kl_loss_coef"]),
        entropy_coefficient: number(&config["entropy_coef"]),
        reduction: Reduction::Sample,
    }
}

fn rates(config: &Value, decay_all: bool) -> Rates {
    Rates {
        learning_rate: number(&config["lr"]),
        betas: (number(&config["betas"][0]), number(&config["betas"][1])),
        epsilon: number(&config["eps"]),
        weight_decay: number(&config["weight_decay"]),
        decay_all,
        clip_norm: number(&config["grad_clip"]),
    }
}

#[track_caller]
fn close(found: f64, wanted: f64, tolerance: f64, what: &str) {
    assert!(
        (found - wanted).abs() <= tolerance * (1.0 + wanted.abs()),
        "{what} is {found}, wanted {wanted}"
    );
}

/// The reference reports sums of the samples' means, and takes the server's
/// log-probs against the old ones. Every token has a server's log-prob here.
fn check_measures(measures: &Measures, recorded: &Value, samples: f64, what: &str) {
    close(measures.loss, number(&recorded["loss_scaled"]), 1e-5, what);
    let sums = &recorded["reported_sums"];
    for (name, found) in [
        ("loss", measures.loss),
        ("pg_loss", measures.policy_loss),
        ("entropy_loss", measures.entropy),
        ("ppo_kl", measures.approximate_kl),
        ("train_rollout_logprob_abs_diff", measures.log_prob_gap),
        ("kl_loss", measures.reference_kl.unwrap()),
    ] {
        close(found * samples, number(&sums[name]), 5e-5, &format!("{what}: {name}"));
    }
}

fn check_tensors(model: &Model, recorded: &[(String, Tensor)], prefix: &str, learning_rate: f64) {
    let mut compared = 0;
    for (name, wanted) in recorded {
        let Some(name) = name.strip_prefix(prefix) else { continue };
        let (_, found) = model.parameters().iter().find(|(known, _)| known == name).unwrap();
        let off = (found.detach() - wanted).abs();
        let worst = off.max().double_value(&[]);
        assert!(worst <= 2.0 * learning_rate, "{prefix}{name} is off by {worst:e}");
        // The first step is about lr * sign(gradient): where the gradient is
        // tiny its sign is chance.
        let far = off.gt(1e-5).to_kind(Kind::Float).mean(Kind::Float).double_value(&[]);
        assert!(far < 0.01, "{prefix}{name}: a share of {far} is off by more than 1e-5");
        compared += 1;
    }
    if compared == 0 {
        skip(&format!("no tensor {prefix} in golden train"));
    }
}

fn check_gradients(model: &Model, recorded: &[(String, Tensor)]) {
    let mut compared = 0;
    for (name, wanted) in recorded {
        let Some(name) = name.strip_prefix("grad_unclipped/") else { continue };
        let (_, parameter) = model.parameters().iter().find(|(known, _)| known == name).unwrap();
        let largest = wanted.abs().max().double_value(&[]);
        let off = (parameter.grad() - wanted).abs().max().double_value(&[]);
        assert!(off <= 2e-4 * (1.0 + largest), "gradient of {name} is off by {off:e}");
        compared += 1;
    }
    assert!(compared > 0);
}

fn check_updated(model: &Model, recorded: &Value, what: &str) {
    let updated = recorded["updated"].as_object().unwrap();
    assert!(!updated.is_empty(), "{what}");
    for (name, wanted) in updated {
        let (_, found) = model.parameters().iter().find(|(known, _)| known == name).unwrap();
        let found = found.detach().to_kind(Kind::Double);
        close(
            found.norm().double_value(&[]),
            number(&wanted["norm"]),
            1e-4,
            &format!("{what}: {name}"),
        );
        let sum = found.abs().sum(Kind::Double).double_value(&[]);
        close(sum, number(&wanted["abs_sum"]), 1e-4, &format!("{what}: {name}"));
    }
}

fn run(grouping: &str, decay_all: bool) {
    let Some(recorded) = golden_json("train/train.json") else { return };
    let Some(tensors) = golden_file("train/train.safetensors") else { return };
    let Some((last, _)) = list(&recorded["results"], grouping).split_last() else { return };
    let tensors = Tensor::read_safetensors(tensors).unwrap();
    let config = &recorded["config"];
    let options = LoadOptions { trainable: true, ..LoadOptions::default() };
    let folder = models().join(recorded["model"].as_str().unwrap());
    if !has_weights(&folder) {
        return;
    }
    let model = Model::load(&folder, &options).unwrap();
    let batch = batch(&recorded);
    check_start(&model, &batch, &recorded);
    let terms = terms(config);
    let mut optimizer = AdamW::new(rates(config, decay_all), model.parameters());
    for step in list(&recorded["results"], grouping) {
        let what = format!("{grouping}, step {}", step["step"]);
        zero_gradients(model.parameters());
        // A small budget: the passes of a batch must add up to it.
        let measures = gradients(&model, &batch, &terms, 64);
        check_measures(&measures, step, batch.len() as f64, &what);
        let Some(norm) = step["grad_norm"].as_f64() else {
            // After the last update the loss is measured once more.
            if step["step"] != last["step"] {
                skip(&format!("no `grad_norm` of {what}"));
            }
            continue;
        };
        let found = gradient_norm(model.parameters());
        assert!((found - norm).abs() <= 2e-4 * norm, "{what}: norm is {found}, wanted {norm}");
        let first = step["step"] == 0;
        if first {
            check_gradients(&model, &tensors);
        }
        let update = optimizer.step(model.parameters(), Dtype::F32).unwrap();
        close(update.clip_coefficient, number(&step["clip_coef"]), 2e-4, &what);
        if first {
            let prefix = format!("{grouping}/after_step1/");
            check_tensors(&model, &tensors, &prefix, number(&config["lr"]));
        }
        check_updated(&model, step, &what);
    }
}

fn check_start(model: &Model, batch: &[Prepared], recorded: &Value) {
    let samples: Vec<&Sample> = batch.iter().map(|prepared| &prepared.sample).collect();
    let found = sample_log_probs(model, &samples, 1 << 20);
    for (index, sample) in samples.iter().enumerate() {
        let wanted = floats(&recorded["batch"]["new_log_probs_at_start"][index]);
        for token in sample.trained() {
            let (found, wanted) = (f64::from(found[index].own[token]), f64::from(wanted[token]));
            assert!((found - wanted).abs() < 2e-4, "sample {index}, token {token}: {found}");
        }
    }
}

#[test]
fn golden_train_every_weight_decays() {
    run("wd_all", true);
}

#[test]
fn golden_train_norms_and_biases_do_not_decay() {
    run("megatron_groups", false);
}

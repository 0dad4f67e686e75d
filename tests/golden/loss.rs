//! The reference's losses: value, metrics and the gradient with respect to the
//! logits, and its single functions.
//!
//! Deliberate differences, all of one rule: a mask selects, so masked tokens
//! are not among the inputs and results at masked places are not compared.

use std::path::Path;

use oclaw::advantage::{self, Estimator, Evidence, Method};
use oclaw::loss::{self, Clip, KlKind, Reduction};
use serde_json::Value;
use tch::{Kind, Tensor};

use crate::harness::{golden_file, golden_json, skip};

pub(super) struct Tensors(Vec<(String, Tensor)>);

impl Tensors {
    pub(super) fn read(path: &Path) -> Self {
        Self(Tensor::read_safetensors(path).unwrap())
    }

    fn find(&self, name: &str) -> Option<Tensor> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, tensor)| tensor.shallow_clone())
    }

    pub(super) fn get(&self, name: &str) -> Tensor {
        self.find(name).unwrap_or_else(|| panic!("no tensor `{name}`"))
    }
}

pub(super) fn floats(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor.to_kind(Kind::Float).contiguous().view(-1)).unwrap()
}

pub(super) fn integers(tensor: &Tensor) -> Vec<i64> {
    Vec::try_from(tensor.contiguous().view(-1)).unwrap()
}

/// One batch, its masked tokens taken out.
struct Batch {
    logits: Tensor,
    rows: Tensor,
    ids: Tensor,
    selected: Tensor,
    /// Trained tokens of each sample.
    lengths: Vec<usize>,
    response_lengths: Vec<i64>,
    rewards: Vec<f32>,
    /// Mask of all response tokens.
    mask: Vec<i64>,
    name: String,
}

impl Batch {
    fn read(tensors: &Tensors, name: &str) -> Self {
        let get = |key: &str| tensors.get(&format!("{name}/{key}"));
        let tokens = integers(&get("tokens"));
        let prompt_lengths = integers(&get("prompt_lengths"));
        let response_lengths = integers(&get("response_lengths"));
        let mask = integers(&get("loss_mask"));
        let (mut rows, mut ids, mut selected, mut lengths) = (vec![], vec![], vec![], vec![]);
        let (mut start, mut response) = (0, 0);
        for (prompt, length) in prompt_lengths.iter().zip(&response_lengths) {
            let before = rows.len();
            for token in 0..*length {
                if mask[(response + token) as usize] == 1 {
                    rows.push(start + prompt + token - 1);
                    ids.push(tokens[(start + prompt + token) as usize]);
                    selected.push(response + token);
                }
            }
            lengths.push(rows.len() - before);
            start += prompt + length;
            response += length;
        }
        Self {
            // A copy: the gradients of the cases must not add up.
            logits: get("logits").copy().set_requires_grad(true),
            rows: Tensor::from_slice(&rows),
            ids: Tensor::from_slice(&ids),
            selected: Tensor::from_slice(&selected),
            lengths,
            response_lengths,
            rewards: floats(&get("rewards")),
            mask,
            name: name.to_owned(),
        }
    }

    /// Returns one column of the trained tokens.
    fn column(&self, tensors: &Tensors, key: &str) -> Tensor {
        tensors.get(&format!("{}/{key}", self.name)).index_select(0, &self.selected)
    }

    /// Rows of logits that predict the trained tokens, divided by temperature.
    fn scaled(&self, temperature: f64) -> Tensor {
        self.logits.index_select(0, &self.rows) / temperature
    }

    fn trained_lengths(&self) -> Vec<i64> {
        self.lengths.iter().map(|length| *length as i64).collect()
    }
}

/// What the reference reports: sums over samples, not means.
struct Reducer {
    weights: Tensor,
    factor: f64,
    normalizer: f64,
}

impl Reducer {
    fn new(batch: &Batch, per_token: bool) -> Self {
        let samples = batch.lengths.len() as f64;
        let tokens: usize = batch.lengths.iter().map(|length| (*length).max(1)).sum();
        let (reduction, factor, normalizer) = match per_token {
            true => (Reduction::Token, tokens as f64, tokens as f64),
            false => (Reduction::Sample, samples, 1.0),
        };
        let weights = Tensor::from_slice(&loss::weights(&batch.lengths, reduction));
        Self { weights: weights.to_kind(Kind::Float), factor, normalizer }
    }

    fn sum(&self, values: &Tensor) -> Tensor {
        loss::reduce(values, &self.weights) * self.factor
    }
}

#[derive(Default)]
struct Metrics(Vec<(&'static str, f64)>);

impl Metrics {
    fn put(&mut self, name: &'static str, value: &Tensor) {
        self.0.push((name, value.double_value(&[])));
    }
}

fn number(config: &Value, key: &str) -> f64 {
    config[key].as_f64().unwrap_or_else(|| panic!("no number `{key}` in {config}"))
}

fn flag(config: &Value, key: &str) -> bool {
    config[key].as_bool().unwrap_or(false)
}

pub(super) fn kl_kind(name: &str) -> KlKind {
    match name {
        "k1" => KlKind::K1,
        "k2" => KlKind::K2,
        "k3" => KlKind::K3,
        "low_var_kl" => KlKind::LowVar,
        other => panic!("unknown KL `{other}`"),
    }
}

/// Builds the advantages of the trained tokens with the library's estimators.
fn advantages(batch: &Batch, tensors: &Tensors, case: &Value, old: &str) -> Tensor {
    let config = &case["config"];
    let estimator = match case["kind"].as_str().unwrap() {
        "binary_rl" => Estimator::Grpo,
        "opd" => Estimator::Opd,
        "combine" => Estimator::Combine,
        other => panic!("unknown kind `{other}`"),
    };
    let mut method = Method::new(estimator);
    if estimator == Estimator::Combine {
        method.distill_weight = number(config, "w_opd") as f32;
        method.reward_weight = number(config, "w_rl") as f32;
    }
    let old = floats(&tensors.get(&format!("{}/{old}", batch.name)));
    let teacher = floats(&tensors.get(&format!("{}/teacher_log_probs", batch.name)));
    let (mut all, mut start) = (Vec::new(), 0);
    for (sample, length) in batch.response_lengths.iter().enumerate() {
        let range = start..start + *length as usize;
        let evidence = Evidence {
            reward: Some(batch.rewards[sample]),
            reward_part: None,
            teacher: estimator.reads_teacher().then(|| &teacher[range.clone()]),
            old: &old[range.clone()],
            promoted: false,
        };
        // A reward of 0 is no signal here and a zero advantage there.
        let zeros = || vec![0.0; *length as usize];
        all.extend(advantage::advantages(&method, &evidence).unwrap_or_else(zeros));
        start += *length as usize;
    }
    let trained = Tensor::from_slice(&all).index_select(0, &batch.selected);
    match flag(config, "normalize_advantages") {
        true => loss::whiten(&trained),
        false => trained,
    }
}

fn policy_loss(batch: &Batch, tensors: &Tensors, case: &Value) -> (Tensor, Metrics) {
    let config = &case["config"];
    let old_name = match flag(config, "use_rollout_logprobs") {
        true => "rollout_log_probs",
        false => "old_log_probs",
    };
    let old = batch.column(tensors, old_name);
    let rollout = batch.column(tensors, "rollout_log_probs");
    let advantages = advantages(batch, tensors, case, old_name);
    let logits = batch.scaled(number(config, "rollout_temperature"));
    let log_probs = loss::log_probs(&logits, &batch.ids);
    let entropy = loss::entropy(&logits);
    let reducer = Reducer::new(batch, flag(config, "calculate_per_token_loss"));
    let lengths = batch.trained_lengths();
    let mut metrics = Metrics::default();

    let token_ratio = loss::log_ratio(&log_probs, &old);
    let ratio = match config["advantage_estimator"].as_str() {
        Some("gspo") => loss::sequence_mean(&token_ratio, &lengths),
        _ => token_ratio.shallow_clone(),
    };
    let clip = Clip {
        low: number(config, "eps_clip"),
        high: number(config, "eps_clip_high"),
        dual: config["eps_clip_c"].as_f64(),
    };
    let surrogate = loss::ppo_clip(&ratio, &advantages, &clip);
    let mut policy = surrogate.loss;
    if flag(config, "use_opsm") {
        let keep =
            loss::opsm_keep(&token_ratio, &advantages, &lengths, number(config, "opsm_delta"));
        policy = &policy * &keep;
        metrics.put("opsm_clipfrac", &reducer.sum(&(1.0 - keep)));
    }
    if flag(config, "use_tis") {
        let (low, high) = (number(config, "tis_clip_low"), number(config, "tis_clip"));
        let weight = match config["custom_tis_function_path"].is_string() {
            true => loss::icepop_importance(&old, &rollout, low, high),
            false => loss::truncated_importance(&old, &rollout, low, high),
        };
        let plain = (&old - &rollout).exp();
        let changed = weight.ne_tensor(&plain).to_kind(Kind::Float);
        metrics.put("ois", &reducer.sum(&ratio.exp()));
        metrics.put("tis", &reducer.sum(&plain));
        metrics.put("tis_clipfrac", &reducer.sum(&changed));
        metrics.put("tis_abs", &reducer.sum(&(&plain - 1.0).abs()));
        policy = &policy * weight;
    }
    let mut total = reducer.sum(&policy);
    metrics.put("pg_loss", &total);
    metrics.put("entropy_loss", &reducer.sum(&entropy));
    metrics.put("pg_clipfrac", &reducer.sum(&surrogate.clipped));
    metrics.put("ppo_kl", &reducer.sum(&-&ratio));
    metrics.put("train_rollout_logprob_abs_diff", &reducer.sum(&(&old - &rollout).abs()));
    if number(config, "entropy_coef") != 0.0 {
        total = &total - reducer.sum(&entropy) * number(config, "entropy_coef");
    }
    if flag(config, "use_kl_loss") {
        // The reference's combine loss has no unbiased form.
        let unbiased = flag(config, "use_unbiased_kl") && case["kind"] != "combine";
        let plain = (&log_probs - &old).exp();
        let reference = batch.column(tensors, "ref_log_probs");
        let kind = kl_kind(config["kl_loss_type"].as_str().unwrap());
        let kl = loss::approximate_kl(kind, &log_probs, &reference, unbiased.then_some(&plain));
        let kl = reducer.sum(&kl);
        metrics.put("kl_loss", &kl);
        total = &total + kl * number(config, "kl_loss_coef");
    }
    metrics.put("loss", &total);
    (total, metrics)
}

fn distillation_loss(batch: &Batch, tensors: &Tensors, case: &Value) -> (Tensor, Metrics) {
    let config = &case["config"];
    let logits = batch.scaled(number(config, "rollout_temperature"));
    let log_probs = logits.log_softmax(-1, Kind::Float);
    let student = log_probs.gather(-1, &batch.column(tensors, "topk_indices"), false);
    let teacher = batch.column(tensors, "topk_log_probs");
    let reducer = Reducer::new(batch, flag(config, "calculate_per_token_loss"));
    let terms = loss::topk_kl(&student, &teacher);
    let mut metrics = Metrics::default();
    let mut total = reducer.sum(&terms.kl);
    metrics.put("kl_loss", &total);
    let coefficient = number(config, "entropy_coef");
    let entropy = reducer.sum(&terms.entropy);
    if coefficient != 0.0 {
        metrics.put("entropy_loss", &entropy);
        total = &total - entropy * coefficient;
    }
    metrics.put("loss", &total);
    (total, metrics)
}

pub(super) fn close(found: f64, wanted: f64, tolerance: f64) -> bool {
    (found - wanted).abs() <= tolerance * (1.0 + wanted.abs())
}

fn check_gradient(batch: &Batch, wanted: &Tensor) -> Result<(), String> {
    let found = match batch.logits.grad() {
        gradient if gradient.defined() => gradient,
        _ => batch.logits.zeros_like(),
    };
    let largest = wanted.abs().max().double_value(&[]);
    let off = (found - wanted).abs().max().double_value(&[]);
    match off <= 2e-5 * (1.0 + largest) {
        true => Ok(()),
        false => Err(format!("gradient off by {off:e} (largest {largest:e})")),
    }
}

fn check_case(tensors: &Tensors, case: &Value) -> Vec<String> {
    let batch = Batch::read(tensors, case["batch"].as_str().unwrap());
    let (total, metrics) = match case["kind"].as_str() {
        Some("topk") => distillation_loss(&batch, tensors, case),
        _ => policy_loss(&batch, tensors, case),
    };
    let mut faults = Vec::new();
    for (name, wanted) in case["expect"].as_object().unwrap() {
        let wanted = wanted.as_f64().unwrap();
        match metrics.0.iter().find(|(known, _)| known == name) {
            Some((_, found)) if close(*found, wanted, 2e-5) => {}
            Some((_, found)) => faults.push(format!("{name} is {found}, wanted {wanted}")),
            // Reported as 0 where it is no part of the loss.
            None if wanted == 0.0 => {}
            None => faults.push(format!("{name} is not computed, wanted {wanted}")),
        }
    }
    let reducer = Reducer::new(&batch, flag(&case["config"], "calculate_per_token_loss"));
    if reducer.normalizer != case["normalizer"].as_f64().unwrap() {
        faults.push(format!("normalizer is {}", reducer.normalizer));
    }
    total.backward();
    let wanted = tensors.get(&format!("grad/{}", case["name"].as_str().unwrap()));
    faults.extend(check_gradient(&batch, &wanted).err());
    faults
}

#[test]
fn golden_loss_cases() {
    let Some(cases) = golden_json("loss/cases.json") else { return };
    let Some(tensors) = golden_file("loss/tensors.safetensors") else { return };
    let tensors = Tensors::read(&tensors);
    let cases = cases["cases"].as_array().unwrap();
    assert!(!cases.is_empty());
    let mut faults = Vec::new();
    for case in cases {
        let name = case["name"].as_str().unwrap();
        faults
            .extend(check_case(&tensors, case).into_iter().map(|fault| format!("{name}: {fault}")));
    }
    println!("{} loss cases", cases.len());
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// The recorded advantages are the reference's own.
#[test]
fn golden_loss_advantages() {
    let Some(tensors) = golden_file("loss/tensors.safetensors") else { return };
    let tensors = Tensors::read(&tensors);
    let (mut compared, mut faults) = (0, Vec::new());
    for (name, wanted) in &tensors.0 {
        let Some((batch, estimator)) =
            name.strip_prefix("adv/").and_then(|rest| rest.split_once('/'))
        else {
            continue;
        };
        let kind = match estimator {
            "binary_rl" | "binary_rl_norm" | "grpo" => "binary_rl",
            "opd" => "opd",
            other => {
                skip(&format!("advantages of unknown `{other}`"));
                continue;
            }
        };
        let case = serde_json::json!({"kind": kind, "config": {
            "normalize_advantages": estimator == "binary_rl_norm"}});
        let batch = Batch::read(&tensors, batch);
        let found = advantages(&batch, &tensors, &case, "old_log_probs");
        let off = (found - wanted.index_select(0, &batch.selected)).abs();
        compared += 1;
        if batch.mask.contains(&1) && off.max().double_value(&[]) > 1e-5 {
            faults.push(format!("{name}: off by {off}"));
        }
    }
    assert!(compared > 0);
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

fn vector(value: &Value) -> Tensor {
    let numbers: Vec<f32> =
        value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap() as f32).collect();
    Tensor::from_slice(&numbers)
}

fn lists(value: &Value) -> Vec<Vec<f32>> {
    value.as_array().unwrap().iter().map(|list| floats(&vector(list))).collect()
}

fn differs(found: &Tensor, wanted: &Value, what: &str) -> Option<String> {
    let wanted = floats(&vector(wanted));
    let found = floats(found);
    let off = found
        .iter()
        .zip(&wanted)
        .position(|(found, wanted)| !close(f64::from(*found), f64::from(*wanted), 2e-5));
    match off {
        None if found.len() == wanted.len() => None,
        None => Some(format!("{what}: {} values, wanted {}", found.len(), wanted.len())),
        Some(at) => Some(format!("{what}[{at}] is {}, wanted {}", found[at], wanted[at])),
    }
}

fn check_policy_function(input: &Value, output: &Value) -> Vec<String> {
    let drift = vector(&input["ppo_kl"]).set_requires_grad(true);
    let clip = Clip {
        low: number(input, "eps_clip"),
        high: number(input, "eps_clip_high"),
        dual: input["eps_clip_c"].as_f64(),
    };
    let found = loss::ppo_clip(&-&drift, &vector(&input["advantages"]), &clip);
    found.loss.sum(Kind::Float).backward();
    [
        differs(&found.loss, &output["pg_losses"], "loss"),
        differs(&found.clipped, &output["clipfrac"], "clipped"),
        differs(&drift.grad(), &output["grad_ppo_kl"], "gradient"),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn check_kl_function(input: &Value, output: &Value) -> Vec<String> {
    let log_probs = vector(&input["log_probs"]).set_requires_grad(true);
    let ratio = (!input["importance_ratio"].is_null()).then(|| vector(&input["importance_ratio"]));
    let kind = kl_kind(input["kl_loss_type"].as_str().unwrap());
    let reference = vector(&input["log_probs_base"]);
    let kl = loss::approximate_kl(kind, &log_probs, &reference, ratio.as_ref());
    kl.sum(Kind::Float).backward();
    [
        differs(&kl, &output["kl"], "kl"),
        differs(&log_probs.grad(), &output["grad_log_probs"], "gradient"),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn check_reduction(input: &Value, output: &Value) -> Vec<String> {
    let masks = lists(&input["loss_masks"]);
    let flat: Vec<f32> = masks.concat();
    let selected: Vec<i64> =
        (0..flat.len() as i64).filter(|at| flat[*at as usize] != 0.0).collect();
    let lengths: Vec<usize> =
        masks.iter().map(|mask| mask.iter().filter(|flag| **flag != 0.0).count()).collect();
    let (reduction, factor) = match flag(input, "calculate_per_token_loss") {
        true => (Reduction::Token, lengths.iter().map(|length| (*length).max(1)).sum()),
        false => (Reduction::Sample, lengths.len()),
    };
    let weights = Tensor::from_slice(&loss::weights(&lengths, reduction));
    let values = vector(&input["x"]).index_select(0, &Tensor::from_slice(&selected));
    let found = loss::reduce(&values, &weights).double_value(&[]) * factor as f64;
    let wanted = output.as_f64().unwrap();
    match close(found, wanted, 2e-5) {
        true => vec![],
        false => vec![format!("sum is {found}, wanted {wanted}")],
    }
}

fn check_whitening(input: &Value, output: &Value) -> Vec<String> {
    let mask = floats(&vector(&input["mask"]));
    let selected: Vec<i64> =
        (0..mask.len() as i64).filter(|at| mask[*at as usize] != 0.0).collect();
    let selected = Tensor::from_slice(&selected);
    let found = loss::whiten(&vector(&input["values"]).index_select(0, &selected));
    let wanted = vector(output).index_select(0, &selected);
    let off = (found - wanted).abs().max().double_value(&[]);
    if off <= 2e-5 { vec![] } else { vec![format!("off by {off:e}")] }
}

fn check_broadcast(input: &Value, output: &Value) -> Vec<String> {
    let rewards = floats(&vector(&input["rewards"]));
    let lengths = input["lengths"].as_array().unwrap();
    let tokens = |sample: usize| lengths[sample].as_u64().unwrap() as usize;
    let found: Vec<_> = rewards
        .iter()
        .enumerate()
        .map(|(sample, reward)| advantage::grpo(*reward, tokens(sample)))
        .collect();
    if found == lists(output) { vec![] } else { vec![format!("is {found:?}")] }
}

fn check_lists(found: &[Vec<f32>], wanted: &Value) -> Vec<String> {
    let wanted = wanted.as_array().unwrap();
    assert_eq!(found.len(), wanted.len());
    let pairs = found.iter().zip(wanted);
    pairs
        .filter_map(|(found, wanted)| differs(&Tensor::from_slice(found), wanted, "list"))
        .collect()
}

fn check_reinforce(input: &Value, output: &Value) -> Vec<String> {
    let rewards = floats(&vector(&input["rewards"]));
    let (kl, masks) = (lists(&input["kl"]), lists(&input["loss_masks"]));
    let (beta, gamma) = (number(input, "kl_coef") as f32, number(input, "gamma") as f32);
    let one = |sample: usize| {
        let mask: Vec<bool> = masks[sample].iter().map(|flag| *flag != 0.0).collect();
        advantage::reinforce_plus_plus(rewards[sample], &kl[sample], &mask, beta, gamma)
    };
    check_lists(&(0..rewards.len()).map(one).collect::<Vec<_>>(), output)
}

fn check_reinforce_baseline(input: &Value, output: &Value) -> Vec<String> {
    let rewards = floats(&vector(&input["rewards"]));
    let beta = number(input, "kl_coef") as f32;
    let samples = rewards.iter().zip(lists(&input["kl"]));
    let found =
        samples.map(|(reward, kl)| advantage::reinforce_plus_plus_baseline(*reward, &kl, beta));
    check_lists(&found.collect::<Vec<_>>(), output)
}

/// The chunked form is the same sum in another order.
fn check_gae(input: &Value, output: &Value) -> Vec<String> {
    let (rewards, values) = (lists(&input["rewards"]), lists(&input["values"]));
    let (gamma, lambda) = (number(input, "gamma") as f32, number(input, "lambd") as f32);
    let found: Vec<Vec<f32>> = rewards
        .iter()
        .zip(&values)
        .map(|(rewards, values)| advantage::gae(rewards, values, gamma, lambda))
        .collect();
    let sum = |(advantages, values): (&Vec<f32>, &Vec<f32>)| {
        advantages.iter().zip(values).map(|(advantage, value)| advantage + value).collect()
    };
    let returns: Vec<Vec<f32>> = found.iter().zip(&values).map(sum).collect();
    let mut faults = check_lists(&found, &output["advantages"]);
    faults.extend(check_lists(&returns, &output["returns"]));
    faults
}

#[test]
fn golden_loss_functions() {
    let Some(cases) = golden_json("loss/functions.json") else { return };
    let cases = cases.as_array().unwrap();
    assert!(!cases.is_empty());
    let mut faults = Vec::new();
    for (number, case) in cases.iter().enumerate() {
        let name = case["fn"].as_str().unwrap();
        let check = match name {
            "compute_policy_loss" => check_policy_function,
            "compute_approx_kl" => check_kl_function,
            "get_sum_of_sample_mean" => check_reduction,
            "distributed_masked_whiten(shift_mean=True)" => check_whitening,
            "get_grpo_returns" => check_broadcast,
            "get_reinforce_plus_plus_returns" => check_reinforce,
            "get_reinforce_plus_plus_baseline_advantages" => check_reinforce_baseline,
            "gae" => check_gae,
            other => {
                skip(&format!("unknown function {other}"));
                continue;
            }
        };
        let found = check(&case["inp"], &case["out"]);
        faults.extend(found.into_iter().map(|fault| format!("{number} {name}: {fault}")));
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

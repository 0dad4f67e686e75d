//! Logits, log-probs and greedy tokens of every recorded model whose weights are
//! there, in both spellings of its configuration. Recorded with transformers in
//! float32; tolerances are those of `golden/README.md`.

use std::path::Path;

use oclaw::model::{Dtype, LoadOptions, Model, Score};
use safetensors::SafeTensors;
use serde_json::Value;
use tch::{Kind, Tensor};

use crate::harness::{golden, has_weights, list, models, recorded_models, skip, skip_model};

const LOGIT: f64 = 1e-3;
const LOG_PROB: f64 = 2e-4;
/// Recorded greedy tokens whose runner-up is closer than this are not required.
const MARGIN: f64 = 5e-3;

struct Case {
    name: String,
    recorded: Value,
    /// Full rows of logits, if they were recorded.
    rows: Option<Vec<u8>>,
    model: Model,
}

/// Loads every recorded model in every spelling of its configuration.
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, recorded) in recorded_models() {
        let folder = models().join(&name);
        if !has_weights(&folder) {
            continue;
        }
        // A name may have a dot: no extension to be replaced.
        let rows = golden().join("model").join(format!("{name}.safetensors"));
        let rows = std::fs::read(rows).ok();
        for config in ["config.json", "config_v5.json"] {
            if folder.join(config).exists() {
                let model = load_with(&folder, config);
                let (name, recorded) = (format!("{name} ({config})"), recorded.clone());
                cases.push(Case { name, recorded, rows: rows.clone(), model });
            }
        }
    }
    if cases.is_empty() {
        skip_model("no recorded model with weights");
    }
    cases
}

/// Loads a folder whose settings stand in the given file.
fn load_with(folder: &Path, config: &str) -> Model {
    let variant = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        if !entry.file_name().to_string_lossy().starts_with("config") {
            let path = entry.path().canonicalize().unwrap();
            std::os::unix::fs::symlink(path, variant.path().join(entry.file_name())).unwrap();
        }
    }
    std::fs::copy(folder.join(config), variant.path().join("config.json")).unwrap();
    let options = LoadOptions { dtype: Some(Dtype::F32), ..Default::default() };
    Model::load(variant.path(), &options).unwrap()
}

fn ids(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

#[track_caller]
fn assert_near(what: &str, found: f64, wanted: f64, tolerance: f64) {
    let error = (found - wanted).abs();
    assert!(error <= tolerance, "{what}: {found}, recorded {wanted}, off by {error:e}");
}

fn row(logits: &Tensor, position: i64) -> Vec<f32> {
    Vec::try_from(&logits.get(position)).unwrap()
}

#[test]
fn logits_are_those_recorded() {
    for case in cases() {
        let full = case.rows.as_ref().map(|bytes| SafeTensors::deserialize(bytes).unwrap());
        for (number, sequence) in list(&case.recorded, "logits").iter().enumerate() {
            let ids = ids(&sequence["ids"]);
            let length = ids.len() as i64;
            let hidden = tch::no_grad(|| case.model.hidden(&Tensor::from_slice(&ids), &[length]));
            let logits = tch::no_grad(|| case.model.head(&hidden));
            let per_position = sequence["per_position"].as_array().unwrap();
            // Long sequences are recorded at every so many positions only.
            let stride = stride(ids.len(), per_position.len());
            assert!(stride > 0, "{}: {} positions", case.name, per_position.len());
            for (index, recorded) in per_position.iter().enumerate() {
                let position = index * stride;
                let what = format!("{} sequence {number} position {position}", case.name);
                check_row(&what, &row(&logits, position as i64), recorded);
            }
            for position in self::ids(&sequence["full_positions"]) {
                let name = format!("seq{number}/logits_pos{position}");
                let Some(full) = &full else {
                    skip(&format!("no golden logits of {}", case.name));
                    continue;
                };
                let bytes = full.tensor(&name).unwrap().data();
                let wanted =
                    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
                let found = row(&logits, position);
                assert_eq!(found.len(), bytes.len() / 4);
                for (id, (found, wanted)) in found.iter().zip(wanted).enumerate() {
                    let what = format!("{} {name} token {id}", case.name);
                    assert_near(&what, (*found).into(), wanted.into(), LOGIT);
                }
            }
        }
    }
}

/// Finds the step between recorded positions, which begin at the first; 0 if no
/// step gives that many.
fn stride(length: usize, recorded: usize) -> usize {
    let fits = |stride: &usize| length.div_ceil(*stride) == recorded;
    [1, 10].into_iter().find(fits).or((1..=length).find(fits)).unwrap_or(0)
}

fn check_row(what: &str, logits: &[f32], recorded: &Value) {
    let logits: Vec<f64> = logits.iter().map(|&logit| logit.into()).collect();
    let near = |name: &str, found: f64, tolerance: f64| match recorded[name].as_f64() {
        Some(wanted) => assert_near(&format!("{what} {name}"), found, wanted, tolerance),
        None => skip(&format!("no `{name}` in golden logits")),
    };
    let most = logits.iter().copied().fold(f64::MIN, f64::max);
    let log_sum = most + logits.iter().map(|logit| (logit - most).exp()).sum::<f64>().ln();
    let entropy = logits.iter().map(|logit| (log_sum - logit) * (logit - log_sum).exp()).sum();
    // Sums over the vocabulary may be off by a logit's tolerance per token.
    near("sum", logits.iter().sum(), LOGIT * logits.len() as f64);
    near("abs_sum", logits.iter().map(|logit| logit.abs()).sum(), LOGIT * logits.len() as f64);
    near("max", most, LOGIT);
    near("logsumexp", log_sum, LOGIT);
    near("entropy", entropy, LOGIT);
    match recorded["argmax"].as_u64() {
        Some(id) => {
            assert!(most - logits[id as usize] <= LOGIT, "{what}: token {id} is not the likeliest");
        }
        None => skip("no `argmax` in golden logits"),
    }
    for (found, wanted) in logits.iter().zip(list(recorded, "first8")) {
        assert_near(what, *found, wanted.as_f64().unwrap(), LOGIT);
    }
}

#[test]
fn response_log_probs_are_those_recorded() {
    for case in cases() {
        let recorded = list(&case.recorded, "response_log_probs");
        let requests: Vec<Score> = recorded
            .iter()
            .map(|recorded| {
                let prompt = ids(&recorded["prompt_ids"]);
                let start = prompt.len();
                let ids = [prompt, ids(&recorded["response_ids"])].concat();
                let temperature = recorded["temperature"].as_f64().unwrap() as f32;
                let top_k = recorded["top5_ids_first_token"].as_array().map_or(5, Vec::len);
                Score { ids, start, temperature, top_k, entropy: true, ..Default::default() }
            })
            .collect();
        // All in one batch, and each alone.
        let together = case.model.score(&requests);
        for ((request, recorded), found) in requests.iter().zip(recorded).zip(together) {
            let alone = case.model.score(std::slice::from_ref(request)).remove(0);
            for scored in [found, alone] {
                let near = |name: &str, found: &[f32], wanted: &Value, tolerance: f64| {
                    if wanted.is_null() {
                        return skip(&format!("no golden {name}"));
                    }
                    let wanted = numbers(wanted);
                    assert_eq!(found.len(), wanted.len(), "{} {name}", case.name);
                    for (position, (&found, wanted)) in found.iter().zip(wanted).enumerate() {
                        let what = format!("{} {name} {position}", case.name);
                        assert_near(&what, found.into(), wanted, tolerance);
                    }
                };
                near("log-prob", &scored.log_probs, &recorded["log_probs"], LOG_PROB);
                near("entropy", &scored.entropy, &recorded["entropy"], LOGIT);
                let top = &recorded["top5_log_probs_first_token"];
                let Some(k) = top.as_array().map(Vec::len) else {
                    skip("no golden top log-probs");
                    continue;
                };
                near("top log-prob", &scored.top_log_probs[..k], top, LOG_PROB);
                // Equal up to the tolerance means the order is not known.
                let top_ids = ids(&recorded["top5_ids_first_token"]);
                let spread = numbers(top).windows(2).all(|pair| pair[0] - pair[1] > 2.0 * LOG_PROB);
                assert!(!spread || scored.top_ids[..k] == top_ids, "{} top ids", case.name);
            }
        }
    }
}

#[test]
fn greedy_tokens_are_those_recorded() {
    for case in cases() {
        for recorded in list(&case.recorded, "greedy") {
            let mut cache = case.model.cache();
            let mut next = ids(&recorded["prompt_ids"]);
            let steps = ids(&recorded["output_ids"]);
            let log_probs = numbers(&recorded["log_probs"]);
            let margins = numbers(&recorded["top2_logit_margin"]);
            for (step, &wanted) in steps.iter().enumerate() {
                let logits = case.model.step(&mut [(&next, &mut cache)]);
                let what = format!("{} greedy step {step}", case.name);
                let found = logits.argmax(-1, false).int64_value(&[0]);
                assert!(margins[step] < MARGIN || found == wanted, "{what}: {found}, not {wanted}");
                let log_prob = logits.log_softmax(-1, Kind::Float).double_value(&[0, wanted]);
                assert_near(&what, log_prob, log_probs[step], LOG_PROB);
                // Where two nearly tie, the recorded one goes on.
                next = vec![wanted];
            }
        }
    }
}

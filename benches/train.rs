//! What `scripts/bench.sh train` runs: the functions that a step of `oclaw train`
//! consists of, on a recorded batch.
//!
//! ```text
//! train FILE MODEL TYPE TOKENS_PER_PASS [checkpoint]
//!     trains a step per line read from standard input, and prints its figures
//! ```
//!
//! A line is a number of copies of the batch, or `random SEED`: the batch with its
//! prompts and answers cut to random lengths.

use std::error::Error;
use std::io::{BufRead as _, Write as _};
use std::path::PathBuf;
use std::time::Instant;

use oclaw::advantage::{self, Estimator, Evidence, Method};
use oclaw::loss::{Clip, KlKind, Reduction};
use oclaw::model::{Dtype, LoadOptions, Model};
use oclaw::train::{
    AdamW, Form, Importance, Policy, Prepared, Rates, Sample, Teaching, Terms, gradients,
    zero_gradients,
};
use serde_json::{Value, json};

fn main() -> Result<(), Box<dyn Error>> {
    // `cargo bench` adds a flag of its own.
    let words: Vec<_> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [file, model, dtype, budget, ref more @ ..] => {
            let recorded: Value = serde_json::from_slice(&std::fs::read(file)?)?;
            let dtype = Some(dtype.parse::<Dtype>()?);
            let checkpoint_activations = more.contains(&"checkpoint");
            let options = LoadOptions {
                dtype,
                trainable: true,
                checkpoint_activations,
                ..LoadOptions::default()
            };
            let model = Model::load(&PathBuf::from(model), &options)?;
            run(&model, &recorded, budget.parse()?)
        }
        // What `cargo bench` without words comes to.
        [] => Ok(()),
        _ => Err("words: FILE MODEL TYPE TOKENS_PER_PASS".into()),
    }
}

fn run(model: &Model, recorded: &Value, budget: usize) -> Result<(), Box<dyn Error>> {
    let batch = batch(recorded).ok_or("the batch is not readable")?;
    let terms = terms(recorded).ok_or("the batch has no `eps_low` or `eps_high`")?;
    let mut optimizer = AdamW::new(Rates::default(), model.parameters());
    let mut out = std::io::stdout();
    writeln!(out, "{}", json!({"threads": tch::get_num_threads()}))?;
    out.flush()?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let samples = match line.strip_prefix("random ") {
            Some(seed) => cut(&batch, seed.parse()?),
            None => {
                batch.iter().cycle().take(batch.len() * line.parse::<usize>()?).cloned().collect()
            }
        };
        let tokens: usize = samples.iter().map(length).sum();
        let before = Instant::now();
        zero_gradients(model.parameters());
        let measures = gradients(model, &samples, &terms, budget);
        let between = before.elapsed().as_secs_f64();
        let update = optimizer.step(model.parameters(), Dtype::F32).ok_or("not finite")?;
        let figures = json!({
            "seconds": before.elapsed().as_secs_f64(),
            "optimizer_seconds": before.elapsed().as_secs_f64() - between,
            "tokens": tokens,
            "loss": measures.loss,
            "gradient_norm": update.gradient_norm,
            "resident_mib": resident_mib()?,
        });
        writeln!(out, "{figures}")?;
        out.flush()?;
    }
    Ok(())
}

fn length(prepared: &Prepared) -> usize {
    prepared.sample.prompt_ids.len() + prepared.sample.response_ids.len()
}

fn resident_mib() -> Result<u64, Box<dyn Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? / 1024)
}

fn terms(recorded: &Value) -> Option<Terms> {
    let number = |key: &str| recorded[key].as_f64();
    Some(Terms {
        policy: Policy {
            form: Form::Ppo,
            clip: Clip { low: number("eps_low")?, high: number("eps_high")?, dual: None },
            drift: None,
        },
        teaching: Teaching::Surrogate,
        importance: Importance::Off,
        kl: KlKind::LowVar,
        kl_unbiased: false,
        kl_coefficient: 0.0,
        entropy_coefficient: 0.0,
        reduction: Reduction::Sample,
    })
}

fn batch(recorded: &Value) -> Option<Vec<Prepared>> {
    let method = Method::new(Estimator::Combine);
    recorded["samples"].as_array()?.iter().map(|sample| prepare(sample, &method)).collect()
}

fn prepare(recorded: &Value, method: &Method) -> Option<Prepared> {
    let numbers = |key: &str| -> Option<Vec<f64>> {
        recorded[key].as_array()?.iter().map(Value::as_f64).collect()
    };
    let ids = |key: &str| Some(numbers(key)?.into_iter().map(|id| id as i32).collect::<Vec<_>>());
    let floats = |key: &str| Some(numbers(key)?.into_iter().map(|value| value as f32).collect());
    let (old, teacher): (Vec<f32>, Vec<f32>) =
        (floats("old_log_probs")?, floats("teacher_log_probs")?);
    let reward = Some(recorded["score"].as_f64()? as f32);
    let evidence =
        Evidence { reward, reward_part: None, teacher: Some(&teacher), old: &old, promoted: false };
    let advantages = advantage::advantages(method, &evidence)?;
    let sample = Sample {
        turn_id: recorded["session_id"].as_str()?.to_owned(),
        prompt_ids: ids("prompt_ids")?,
        response_ids: ids("response_ids")?,
        mask: numbers("loss_mask")?.into_iter().map(|flag| flag != 0.0).collect(),
        rollout: old.iter().copied().map(Some).collect(),
        temperature: 1.0,
        reward,
        reward_part: None,
        teacher: Some(teacher),
        topk: None,
        teacher_temperature: 1.0,
        promoted: false,
        staleness: 0,
    };
    let old_log_probs = old;
    Some(Prepared { sample, old_log_probs, reference_log_probs: None, advantages, distilled: None })
}

/// Cuts every prompt and answer to a random length.
fn cut(batch: &[Prepared], seed: u64) -> Vec<Prepared> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut up_to = |most: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        1 + (state >> 33) as usize % most
    };
    let mut batch = batch.to_vec();
    for prepared in &mut batch {
        let sample = &mut prepared.sample;
        sample.prompt_ids.truncate(up_to(sample.prompt_ids.len()));
        let length = up_to(sample.response_ids.len());
        sample.response_ids.truncate(length);
        sample.mask.truncate(length);
        sample.rollout.truncate(length);
        prepared.old_log_probs.truncate(length);
        prepared.advantages.truncate(length);
    }
    batch
}

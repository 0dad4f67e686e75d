//! What `scripts/bench.sh score` runs: the call that `oclaw teacher-lp --model`
//! makes, [`Model::score`], on made-up sequences.
//!
//! ```text
//! score sequences FILE                 the sequences, as JSON
//! score run FILE SET MODEL TYPE TOP_K  scores a set of them once per line read
//!                                      from standard input, and prints the
//!                                      seconds and the mean log-prob of each
//! ```

use std::error::Error;
use std::io::{BufRead as _, Write as _};
use std::path::PathBuf;
use std::time::Instant;

use oclaw::model::{Dtype, LoadOptions, Model, Score};
use serde_json::{Value, json};

fn main() -> Result<(), Box<dyn Error>> {
    // `cargo bench` adds a flag of its own.
    let words: Vec<_> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["sequences", file] => Ok(std::fs::write(file, sequences().to_string())?),
        ["run", file, set, model, dtype, top_k] => {
            let dtype = if dtype == "bf16" { Dtype::Bf16 } else { Dtype::F32 };
            let options = LoadOptions { dtype: Some(dtype), ..LoadOptions::default() };
            let model = Model::load(&PathBuf::from(model), &options)?;
            let all: Value = serde_json::from_slice(&std::fs::read(file)?)?;
            run(&model, &requests(&all[set], top_k.parse()?))
        }
        // What `cargo bench` without words comes to.
        [] => Ok(()),
        _ => Err("words: sequences FILE | run FILE SET MODEL TYPE TOP_K".into()),
    }
}

fn run(model: &Model, requests: &[Score]) -> Result<(), Box<dyn Error>> {
    let mut out = std::io::stdout();
    writeln!(out, "{}", json!({"threads": tch::get_num_threads()}))?;
    out.flush()?;
    for line in std::io::stdin().lock().lines() {
        let _ = line?;
        let before = Instant::now();
        let scored = model.score(requests);
        let seconds = before.elapsed().as_secs_f64();
        let means = scored.iter().map(|scored| {
            let sum: f64 = scored.log_probs.iter().copied().map(f64::from).sum();
            sum / scored.log_probs.len().max(1) as f64
        });
        writeln!(out, "{}", json!({"seconds": seconds, "means": means.collect::<Vec<_>>()}))?;
        out.flush()?;
    }
    Ok(())
}

fn requests(set: &Value, top_k: usize) -> Vec<Score> {
    let each = set.as_array().into_iter().flatten();
    each.map(|sequence| {
        let ids = sequence["ids"].as_array().into_iter().flatten();
        Score {
            ids: ids.filter_map(Value::as_i64).collect(),
            start: sequence["start"].as_u64().unwrap_or_default() as usize,
            temperature: 1.0,
            top_k,
            ..Score::default()
        }
    })
    .collect()
}

/// `distinct`: 16 sequences that have nothing in common. `hinted`: 4 turns, each
/// under its plain prompt and three hints.
fn sequences() -> Value {
    let mut state = 1_u64;
    let mut below = |most: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) % most
    };
    let mut ids = |count: u64| (0..count).map(|_| below(49_000)).collect::<Vec<_>>();
    let sequence = |parts: &[&[u64]]| {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        let start = length - parts.last().map_or(0, |part| part.len());
        json!({"ids": parts.concat(), "start": start})
    };
    let distinct: Vec<Value> = (0..16_u64)
        .map(|index| {
            let (prompt, response) = (ids(80 + 25 * index), ids(60 + 10 * ((index * 7) % 16)));
            sequence(&[&prompt, &response])
        })
        .collect();
    let mut hinted = Vec::new();
    for turn in 0..4_u64 {
        let (prompt, closing, response) = (ids(300 + 60 * turn), ids(5), ids(100 + 20 * turn));
        hinted.push(sequence(&[&prompt, &closing, &response]));
        for hint in 0..3_u64 {
            let hint = ids(25 + 10 * hint);
            hinted.push(sequence(&[&prompt, &hint, &closing, &response]));
        }
    }
    json!({"distinct": distinct, "hinted": hinted})
}

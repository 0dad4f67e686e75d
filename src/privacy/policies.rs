//! Which policies have learned from which turns, read off their ledgers.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};

use arrow::array::AsArray;
use arrow::datatypes::UInt64Type;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use super::Error;

/// A policy that has learned from some of the turns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trained {
    /// The policy's folder.
    pub policy: PathBuf,
    /// How many of the turns.
    pub turns: u64,
    /// The earliest step that trained one of them.
    pub first_step: u64,
}

/// What a policy's ledger says of turns.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Learned {
    /// What it has learned from them, if it has.
    pub trained: Option<Trained>,
    /// How many of them it names without having learned from them.
    pub refused: u64,
}

/// Returns what a policy's ledger says of the turns.
pub fn learned_from(policy: &Path, turn_ids: &BTreeSet<String>) -> Result<Learned, Error> {
    let path = policy.join("oclaw/ledger.parquet");
    let failed = |reason: String| Error::Ledger { path: path.clone(), reason };
    let file = File::open(&path).map_err(|source| Error::read(&path, source))?;
    let reader = ParquetRecordBatchReaderBuilder::try_new(file)
        .and_then(|builder| builder.build())
        .map_err(|error| failed(error.to_string()))?;
    let (mut steps, mut refused) = (Vec::new(), 0);
    for batch in reader {
        let batch = batch.map_err(|error| failed(error.to_string()))?;
        let column = |name: &str| batch.column_by_name(name);
        let columns = (
            column("turn_id").and_then(|column| column.as_string_opt::<i32>()),
            column("step").and_then(|column| column.as_primitive_opt::<UInt64Type>()),
            column("outcome").and_then(|column| column.as_string_opt::<i32>()),
        );
        let (Some(ids), Some(at), Some(outcomes)) = columns else {
            return Err(failed("a column is missing or has another type".to_owned()));
        };
        for row in (0..batch.num_rows()).filter(|row| turn_ids.contains(ids.value(*row))) {
            match outcomes.value(row) {
                "consumed" => steps.push(at.value(row)),
                _ => refused += 1,
            }
        }
    }
    let (turns, first_step) = (steps.len() as u64, steps.iter().min().copied());
    let trained =
        first_step.map(|first_step| Trained { policy: policy.to_owned(), turns, first_step });
    Ok(Learned { trained, refused })
}

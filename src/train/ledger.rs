//! Which turns a policy has learned from, and which it has refused and why. It
//! lies in the policy's folder: weights and ledger change together or not at
//! all, so that no turn is trained twice.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch, StringArray, UInt64Array};
use arrow::datatypes::{DataType, Field, Schema, UInt64Type};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;

use super::Error;

/// What became of a turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The policy step that consumed or last refused it.
    pub step: u64,
    /// Why it was refused; `None` if it was trained.
    pub refused: Option<String>,
}

/// The ledger, by turn id.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ledger {
    entries: HashMap<String, Entry>,
}

impl Ledger {
    /// Returns whether a turn has been trained.
    pub fn consumed(&self, turn_id: &str) -> bool {
        self.entries.get(turn_id).is_some_and(|entry| entry.refused.is_none())
    }

    /// Returns what became of a turn.
    pub fn entry(&self, turn_id: &str) -> Option<&Entry> {
        self.entries.get(turn_id)
    }

    /// Notes that a step trained a turn.
    pub fn consume(&mut self, turn_id: &str, step: u64) {
        self.entries.insert(turn_id.to_owned(), Entry { step, refused: None });
    }

    /// Notes that a step refused a turn. A refused turn may come again: with
    /// other flags it may be fit.
    pub fn refuse(&mut self, turn_id: &str, step: u64, reason: &str) {
        if !self.consumed(turn_id) {
            let refused = Some(reason.to_owned());
            self.entries.insert(turn_id.to_owned(), Entry { step, refused });
        }
    }

    /// Returns the number of turns that have been trained.
    pub fn trained(&self) -> usize {
        self.entries.values().filter(|entry| entry.refused.is_none()).count()
    }

    /// Writes the ledger, ordered by step and turn id.
    pub(super) fn write(&self, path: &Path) -> Result<(), Error> {
        let mut rows: Vec<(&String, &Entry)> = self.entries.iter().collect();
        rows.sort_by_key(|(turn_id, entry)| (entry.step, *turn_id));
        let outcome = |entry: &Entry| match entry.refused {
            None => "consumed",
            Some(_) => "refused",
        };
        let columns: [ArrayRef; 4] = [
            Arc::new(rows.iter().map(|(turn_id, _)| Some(turn_id)).collect::<StringArray>()),
            Arc::new(rows.iter().map(|(_, entry)| Some(entry.step)).collect::<UInt64Array>()),
            Arc::new(rows.iter().map(|(_, entry)| Some(outcome(entry))).collect::<StringArray>()),
            Arc::new(rows.iter().map(|(_, entry)| entry.refused.as_ref()).collect::<StringArray>()),
        ];
        let failed = |error: String| Error::Ledger { path: path.to_owned(), problem: error };
        let batch = RecordBatch::try_new(schema(), columns.to_vec())
            .map_err(|error| failed(error.to_string()))?;
        let file = File::create(path).map_err(|source| Error::write(path, source))?;
        let level = ZstdLevel::try_new(1).map_err(|error| failed(error.to_string()))?;
        let properties =
            WriterProperties::builder().set_compression(Compression::ZSTD(level)).build();
        let mut writer = ArrowWriter::try_new(file, schema(), Some(properties))
            .map_err(|error| failed(error.to_string()))?;
        writer.write(&batch).map_err(|error| failed(error.to_string()))?;
        writer.close().map_err(|error| failed(error.to_string()))?;
        Ok(())
    }

    /// Reads a ledger.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let failed = |problem: String| Error::Ledger { path: path.to_owned(), problem };
        let file = File::open(path).map_err(|source| Error::read(path, source))?;
        let reader = ParquetRecordBatchReaderBuilder::try_new(file)
            .and_then(|builder| builder.build())
            .map_err(|error| failed(error.to_string()))?;
        let mut entries = HashMap::new();
        for batch in reader {
            let batch = batch.map_err(|error| failed(error.to_string()))?;
            let column = |name: &str| {
                let found = batch.column_by_name(name).cloned();
                found.ok_or_else(|| failed(format!("it has no column `{name}`")))
            };
            let (turn_ids, steps) = (column("turn_id")?, column("step")?);
            let (outcomes, reasons) = (column("outcome")?, column("reason")?);
            let texts = (
                turn_ids.as_string_opt::<i32>(),
                steps.as_primitive_opt::<UInt64Type>(),
                outcomes.as_string_opt::<i32>(),
                reasons.as_string_opt::<i32>(),
            );
            let (Some(turn_ids), Some(steps), Some(outcomes), Some(reasons)) = texts else {
                return Err(failed("its columns have other types".to_owned()));
            };
            for row in 0..batch.num_rows() {
                let reason = reasons.is_valid(row).then(|| reasons.value(row).to_owned());
                let refused = match outcomes.value(row) {
                    "consumed" => None,
                    _ => Some(reason.unwrap_or_default()),
                };
                let entry = Entry { step: steps.value(row), refused };
                entries.insert(turn_ids.value(row).to_owned(), entry);
            }
        }
        Ok(Self { entries })
    }
}

fn schema() -> Arc<Schema> {
    Arc::new(Schema::new(vec![
        Field::new("turn_id", DataType::Utf8, false),
        Field::new("step", DataType::UInt64, false),
        Field::new("outcome", DataType::Utf8, false),
        Field::new("reason", DataType::Utf8, true),
    ]))
}

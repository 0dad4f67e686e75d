//! What rows are held against: the groups of `--group-by`, the values of
//! `--value-column`. Both may be columns that the schema does not know.

use std::collections::HashMap;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::compute::{CastOptions, cast_with_options};
use arrow::datatypes::{DataType, Float32Type};
use arrow::row::{RowConverter, SortField};
use oclaw::table::Source;
use sha2::{Digest, Sha256};

use crate::report::Failure;

/// What was read of each row, in order. Empty if nothing was asked for.
#[derive(Debug, Default)]
pub(super) struct Peers {
    groups: Vec<u64>,
    values: Vec<f32>,
}

impl Peers {
    /// Reads the table once, and rewinds it.
    pub(super) fn read(
        source: &mut Source,
        group_by: Option<&str>,
        value_column: Option<&str>,
    ) -> anyhow::Result<Self> {
        let mut peers = Self::default();
        if group_by.is_none() && value_column.is_none() {
            return Ok(peers);
        }
        let group_by = group_by.map(|name| match name {
            "prompt" => "prompt_ids",
            name => name,
        });
        source.hold()?;
        let mut numbers = HashMap::new();
        while let Some(batch) = source.next_batch()? {
            if let Some(name) = group_by {
                number_groups(column(&batch, name)?, &mut numbers, &mut peers.groups)?;
            }
            if let Some(name) = value_column {
                read_values(column(&batch, name)?, name, &mut peers.values)?;
            }
        }
        source.rewind()?;
        Ok(peers)
    }

    /// Returns the group of a row.
    pub(super) fn group(&self, row: usize) -> Option<u64> {
        self.groups.get(row).copied()
    }

    /// Returns what was expected of a row.
    pub(super) fn value(&self, row: usize) -> f32 {
        self.values.get(row).copied().unwrap_or(0.0)
    }
}

fn column<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a ArrayRef, Failure> {
    let found = batch.column_by_name(name);
    found.ok_or_else(|| {
        Failure::usage(format!("there is no column `{name}`"))
            .hint("`oclaw view --schema` lists the columns of a table")
    })
}

/// Rows of equal cells, of whatever type, are a group. A row without a value is
/// in a group of its own.
fn number_groups(
    column: &ArrayRef,
    numbers: &mut HashMap<[u8; 32], u64>,
    groups: &mut Vec<u64>,
) -> anyhow::Result<()> {
    let converter = RowConverter::new(vec![SortField::new(column.data_type().clone())])?;
    let rows = converter.convert_columns(std::slice::from_ref(column))?;
    for (index, row) in rows.iter().enumerate() {
        let place = groups.len() as u64;
        groups.push(match column.is_null(index) {
            true => place,
            // Prompts are long: their digests are held, not they.
            false => *numbers.entry(Sha256::digest(row.as_ref()).into()).or_insert(place),
        });
    }
    Ok(())
}

fn read_values(column: &ArrayRef, name: &str, values: &mut Vec<f32>) -> anyhow::Result<()> {
    if !column.data_type().is_numeric() {
        return Err(Failure::usage(format!("column `{name}` holds no numbers")).into());
    }
    let options = CastOptions { safe: false, ..CastOptions::default() };
    let numbers = cast_with_options(column, &DataType::Float32, &options)?;
    for value in numbers.as_primitive::<Float32Type>() {
        match value {
            Some(value) if value.is_finite() => values.push(value),
            _ => {
                let row = values.len();
                let problem = format!("column `{name}` has no finite number in row {row}");
                return Err(Failure::failed(problem).into());
            }
        }
    }
    Ok(())
}

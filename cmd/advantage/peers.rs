//! What rows are held against: the groups of `--group-by`, the values of
//! `--value-column`. Both may be columns that the schema does not know.

use std::collections::HashMap;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::compute::{CastOptions, cast_with_options};
use arrow::datatypes::{DataType, Float32Type};
use arrow::row::{RowConverter, SortField};
use oclaw::advantage::Estimator;
use oclaw::table::Source;
use sha2::{Digest, Sha256};

use crate::report::Failure;

/// What rewards are held against.
#[derive(clap::Args, Debug)]
pub(super) struct PeerArgs {
    /// Rows of one group: `request_id`, `prompt`, or any other column
    #[arg(long, value_name = "COLUMN")]
    pub(super) group_by: Option<String>,
    /// Discount of `gae`, per turn, and of `reinforce++`, per token [default: 1]
    #[arg(long, value_name = "X", value_parser = unit)]
    pub(super) gamma: Option<f32>,
    /// How far `gae` looks ahead [default: 0.95]
    #[arg(long, value_name = "X", value_parser = unit)]
    pub(super) lambda: Option<f32>,
    /// Column of what was expected of a turn, for `gae` [default: 0 everywhere]
    #[arg(long, value_name = "COLUMN")]
    pub(super) value_column: Option<String>,
}

impl PeerArgs {
    /// Errors unless the estimator can use what is given, and has what it needs.
    pub(super) fn check(&self, estimator: Estimator, fill: bool) -> Result<(), Failure> {
        self.check_some(&[estimator])?;
        let gae = estimator == Estimator::Gae;
        match () {
            () if fill && (self.group_by.is_some() || gae) => {
                let problem = "`--fill` would compare new rows with none of the old".to_owned();
                Err(Failure::usage(problem).hint("compute all of them again: `--replace`"))
            }
            () => Ok(()),
        }
    }

    /// Errors unless each thing given is of use to one of the estimators, and each has
    /// what it needs.
    pub(super) fn check_some(&self, estimators: &[Estimator]) -> Result<(), Failure> {
        let unused = |flag: &str| {
            let names: Vec<String> = estimators.iter().map(|one| format!("`{one}`")).collect();
            Err(Failure::usage(match &names[..] {
                [one] => format!("{one} has no `{flag}`"),
                several => format!("none of {} has `{flag}`", several.join(", ")),
            }))
        };
        let some = |can: fn(Estimator) -> bool| estimators.iter().any(|one| can(*one));
        let discounts = |one| matches!(one, Estimator::Gae | Estimator::ReinforcePlusPlus);
        let gae = |one| one == Estimator::Gae;
        let alone = estimators.iter().find(|one| one.must_group());
        match (self.group_by.is_some(), alone) {
            (true, _) if !some(Estimator::can_group) => unused("--group-by"),
            _ if self.gamma.is_some() && !some(discounts) => unused("--gamma"),
            _ if self.lambda.is_some() && !some(gae) => unused("--lambda"),
            _ if self.value_column.is_some() && !some(gae) => unused("--value-column"),
            (false, Some(one)) => {
                let problem = format!("`{one}` compares the rewards of a group");
                Err(Failure::usage(problem).hint("say which rows are one: `--group-by request_id`"))
            }
            _ => Ok(()),
        }
    }
}

fn unit(text: &str) -> Result<f32, String> {
    match text.parse() {
        Ok(value) if (0.0..=1.0).contains(&value) => Ok(value),
        _ => Err("wanted a number from 0 to 1".to_owned()),
    }
}

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
        let columns: Vec<&str> = group_by.into_iter().chain(value_column).collect();
        source.only(&columns);
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

pub(super) fn column<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a ArrayRef, Failure> {
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

//! Which columns a stage's table has, and which rows still lack theirs.

use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, RecordBatchOptions};
use arrow::datatypes::{FieldRef, Schema, SchemaRef};

use super::{Error, Existing, Plan};
use crate::table::Source;
use crate::trajectory;
use crate::trajectory::{Column, Turn, Writer, turn};

/// The columns of a stage's output and where each comes from.
pub(super) struct Layout {
    writer: Writer,
    mends: &'static [&'static str],
    schema: SchemaRef,
    origins: Vec<Origin>,
}

enum Origin {
    /// The column of the input at this place.
    Input(usize),
    /// The stage's own column of this name.
    Stage(&'static str),
}

impl Layout {
    /// Lays the output out: the input's columns in their order, the stage's own
    /// replaced where they are or added at the end.
    pub(super) fn plan(source: &Source, plan: &Plan) -> Result<Self, Error> {
        let input = source.schema();
        for needed in plan.needs {
            if let Some(column) = column(needed)
                && input.index_of(needed).is_err()
            {
                let stage = column.writer.command();
                return Err(Error::ColumnMissing { column: column.name, stage });
            }
        }
        let own = arrays(plan.writer, plan.mends, &[])?;
        let (mut fields, mut origins) = (Vec::new(), Vec::new());
        for (index, field) in input.fields().iter().enumerate() {
            match own.iter().find(|(own, _)| own.name() == field.name()) {
                None => {
                    fields.push(field.clone());
                    origins.push(Origin::Input(index));
                }
                Some((own, _)) => {
                    let Some(column) = column(own.name()) else { continue };
                    if plan.existing == Existing::Refuse && column.writer == plan.writer {
                        let stage = plan.writer.command();
                        return Err(Error::ColumnExists { column: column.name, stage });
                    }
                    fields.push(own.clone());
                    origins.push(Origin::Stage(column.name));
                }
            }
        }
        for (field, _) in own {
            if let Some(column) = column(field.name())
                && input.index_of(field.name()).is_err()
            {
                fields.push(field);
                origins.push(Origin::Stage(column.name));
            }
        }
        let schema = Arc::new(Schema::new_with_metadata(fields, input.metadata().clone()));
        Ok(Self { writer: plan.writer, mends: plan.mends, schema, origins })
    }

    pub(super) fn writer(&self) -> Writer {
        self.writer
    }

    pub(super) fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    /// Returns the stage's own columns, in the order of the output.
    pub(super) fn own(&self) -> Vec<&'static str> {
        let own = |origin: &Origin| match origin {
            Origin::Input(_) => None,
            Origin::Stage(name) => Some(*name),
        };
        self.origins.iter().filter_map(own).collect()
    }

    /// Builds them, in that order.
    pub(super) fn build(&self, turns: &[Turn]) -> Result<Vec<(FieldRef, ArrayRef)>, Error> {
        let own = arrays(self.writer, self.mends, turns)?;
        let found = |name| own.iter().find(|(field, _)| field.name() == name).cloned();
        Ok(self.own().into_iter().filter_map(found).collect())
    }

    /// Puts the input's columns and the turns' notes together.
    pub(super) fn apply(&self, batch: &RecordBatch, turns: &[Turn]) -> Result<RecordBatch, Error> {
        let own = arrays(self.writer, self.mends, turns)?;
        let columns: Option<Vec<ArrayRef>> = self
            .origins
            .iter()
            .map(|origin| match origin {
                Origin::Input(index) => Some(batch.column(*index).clone()),
                Origin::Stage(name) => own
                    .iter()
                    .find(|(field, _)| field.name() == name)
                    .map(|(_, array)| array.clone()),
            })
            .collect();
        let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
        let columns = columns.unwrap_or_default();
        RecordBatch::try_new_with_options(self.schema.clone(), columns, &options).map_err(
            |source| Error::Note { source: trajectory::Error::Arrow { column: "*", source } },
        )
    }
}

/// Builds the columns of a stage, and those that it mends.
fn arrays(
    writer: Writer,
    mends: &[&str],
    turns: &[Turn],
) -> Result<Vec<(FieldRef, ArrayRef)>, Error> {
    let own = |column: &Column| column.writer == writer || mends.contains(&column.name);
    turn::some_arrays(own, turns).map_err(|source| Error::Note { source })
}

fn column(name: &str) -> Option<&'static trajectory::Column> {
    trajectory::columns().iter().find(|column| column.name == name)
}

/// Whether a row has no note of the stage yet, or one that failed.
pub(super) fn due(writer: Writer, turn: &Turn) -> bool {
    failed(writer, turn) || !noted(writer, turn)
}

/// Whether the stage says that it tried this row and failed.
pub(super) fn failed(writer: Writer, turn: &Turn) -> bool {
    match writer {
        Writer::Serve => false,
        Writer::Judge => turn.judge_error.is_some(),
        Writer::Hint => turn.hint_error.is_some(),
        Writer::TeacherLp => turn.teacher_error.iter().flatten().any(|error| error.is_some()),
        Writer::Advantage => turn.advantage_error.is_some(),
    }
}

/// Whether the row has any value in the stage's columns.
fn noted(writer: Writer, turn: &Turn) -> bool {
    match turn::arrays(&[writer], std::slice::from_ref(turn)) {
        Ok(arrays) => arrays.iter().any(|(_, array)| array.null_count() < array.len()),
        // A value that must be there is not: there is no note.
        Err(_) => false,
    }
}

//! The trajectory table: what one row is, and how rows and record batches
//! become each other.
//!
//! One row is one main-line assistant turn (one per choice when `n > 1`).
//! Every column name stands once in the whole repository, in [`turn`]. Null
//! means "not known"; nothing here pads, cuts or guesses. Absent on purpose:
//! files, pipes, any notion of which stage runs when.

mod cell;
pub mod lint;
pub mod message;
pub mod turn;
pub mod words;

pub use turn::{Sampling, Turn, Writer, columns};

use arrow::datatypes::{DataType, Field};

/// Version of the schema that this build reads and writes. A file with a newer
/// one is refused by name.
pub const SCHEMA_VERSION: u32 = 1;

/// One line of the column table.
#[derive(Debug, Clone)]
pub struct Column {
    /// Name in the file.
    pub name: &'static str,
    /// Arrow type.
    pub data_type: DataType,
    /// Whether a row may have no value.
    pub nullable: bool,
    /// The stage that writes the column.
    pub writer: Writer,
    /// One sentence for people.
    pub meaning: &'static str,
}

impl Column {
    /// Returns the Arrow field of this column.
    pub fn field(&self) -> Field {
        Field::new(self.name, self.data_type.clone(), self.nullable)
    }
}

/// What can be wrong with a table that claims to hold trajectories.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A column without which a row has no meaning is not there.
    #[error("not a trajectory table (no `{column}` column)")]
    MissingColumn {
        /// Name of the column.
        column: &'static str,
    },
    /// A column is there with a type that cannot be read as the schema's.
    #[error("column `{column}` has type {found}, wanted {wanted}")]
    WrongType {
        /// Name of the column.
        column: &'static str,
        /// Type in the file.
        found: String,
        /// Type of the schema.
        wanted: String,
    },
    /// A row has no value where the schema demands one.
    #[error("row {row}: `{column}` is null and must not be")]
    Null {
        /// Name of the column.
        column: &'static str,
        /// Row, counted from 0.
        row: usize,
    },
    /// A word column holds a word the schema does not know.
    #[error("row {row}: `{column}` is `{found}`, wanted one of {wanted}")]
    UnknownWord {
        /// Name of the column.
        column: &'static str,
        /// Row, counted from 0.
        row: usize,
        /// The word found.
        found: String,
        /// The words allowed.
        wanted: String,
    },
    /// Arrow refused to build or convert an array.
    #[error("column `{column}`")]
    Arrow {
        /// Name of the column.
        column: &'static str,
        /// Arrow's own message.
        source: arrow::error::ArrowError,
    },
}

impl Error {
    /// Returns the error with its row counted from another one: readers see
    /// batches, people see files.
    pub fn from_row(mut self, first: u64) -> Self {
        match &mut self {
            Self::Null { row, .. } | Self::UnknownWord { row, .. } => {
                *row += usize::try_from(first).unwrap_or_default();
            }
            Self::MissingColumn { .. } | Self::WrongType { .. } | Self::Arrow { .. } => {}
        }
        self
    }
}

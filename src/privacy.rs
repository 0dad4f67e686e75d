//! What must not be kept: secrets and persons in the words of turns, and whole
//! turns that somebody wants forgotten.
//!
//! [`Redactor`] replaces words and drops the token ids that would still spell
//! them. [`find`] and [`remove`] take turns out of every table of a run, one file
//! at a time and each at once, so that what is interrupted can be done again.
//! Absent on purpose: the journal and the cache, which clean up after themselves.

mod forget;
mod inventory;
mod patterns;
mod pending;
mod policies;
mod redact;
mod scan;
mod spans;
mod told;
mod turns;
mod views;

use std::io;
use std::path::{Path, PathBuf};

use crate::table;

pub use forget::{Found, Removed, Whose, find, remove, repeats};
pub use inventory::{Inventory, inventory, remove_file};
pub use pending::Pending;
pub use policies::{Learned, Trained, learned_from};
pub use redact::{Counts, Redacted, Redactor};
pub use scan::{Left, still_there};
pub use spans::Pattern;
pub use turns::{Rows, Spot};

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A table cannot be read or written.
    #[error(transparent)]
    Table(#[from] table::Error),
    /// A file or folder cannot be read.
    #[error("cannot read `{}`", .path.display())]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// A file cannot be written or removed.
    #[error("cannot write `{}`", .path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// A policy's ledger cannot be understood.
    #[error("ledger `{}`: {reason}", .path.display())]
    Ledger {
        /// The ledger.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// There is too much to look for at once.
    #[error("cannot look for all words at once: {reason}")]
    Search {
        /// What is too much.
        reason: String,
    },
    /// A pattern is no regular expression, or has no name.
    #[error("pattern `{name}`: {reason}")]
    Pattern {
        /// Its name. Never the pattern, which may spell the secret.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A file of patterns cannot be understood.
    #[error("patterns in `{}`: {reason}", .path.display())]
    Patterns {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A column of another program holds text that cannot be replaced.
    #[error("column `{column}` has type {found}, whose text cannot be redacted")]
    Column {
        /// The column.
        column: String,
        /// Its type.
        found: String,
    },
}

impl Error {
    fn read(path: &Path, source: io::Error) -> Self {
        Self::Read { path: path.to_owned(), source }
    }

    fn write(path: &Path, source: io::Error) -> Self {
        Self::Write { path: path.to_owned(), source }
    }
}

//! The door: tables come in and go out here, and nowhere else.
//!
//! Input is sniffed, never guessed from a name: Parquet at rest, an Arrow
//! stream in a pipe. [`Source`] gives batches of one schema, bounded in bytes,
//! from any mixture of files, folders, patterns and standard input; [`Sink`]
//! writes a path aside and renames it when it is whole. A file that ends too
//! early is an error, never a short success. Absent on purpose: what any column
//! means, beyond its type.

mod aside;
mod follow;
mod inputs;
mod layout;
mod merge;
mod parquet_file;
mod provenance;
pub mod row_json;
mod sink;
mod size;
mod sniff;
mod source;
mod splice;
mod spool;
mod stream;
mod unfinished;

pub use aside::aside_of;
pub use follow::{
    Claim, Follow, Shard, Stamp, first_created_at, is_shard, places, row_count, shard_names, texts,
    turn_ids,
};
pub use inputs::Input;
pub use provenance::{Provenance, StageLine, Usage};
pub use sink::Sink;
pub use source::{Source, read_turns};
pub use splice::{Columns, Encoded, Encoding, Reading, Splice};
pub use spool::write_shard;
pub use unfinished::discard_unfinished;

use std::io;
use std::path::PathBuf;

use crate::trajectory;

/// A format that a table can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Parquet, for files.
    Parquet,
    /// An Arrow IPC stream, for pipes.
    Ipc,
}

/// Where a table goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// A file. Anything there already is replaced, at once, at the end.
    Path(PathBuf),
    /// A shard: Parquet under a name that nothing may have yet.
    Shard(PathBuf),
    /// Standard output.
    Stdout,
}

impl Target {
    /// Says early what [`Sink::create`] would say: a table is not for a terminal,
    /// and a file needs a folder.
    pub fn check(&self) -> Result<(), Error> {
        sink::check(self)
    }

    /// Returns whether what goes there is a file of its own until it is finished, and not
    /// a pipe or a device.
    pub fn is_a_file(&self) -> bool {
        match self {
            Self::Stdout => false,
            Self::Path(path) | Self::Shard(path) => {
                std::fs::metadata(path).map_or(true, |there| there.is_file())
            }
        }
    }
}

/// What can go wrong at the door.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An input cannot be opened or read.
    #[error("cannot read `{name}`")]
    Read {
        /// The input.
        name: String,
        /// The operating system's reason.
        source: io::Error,
    },
    /// A pattern or a folder names no table.
    #[error("`{name}`: no table found ({wanted})")]
    NothingThere {
        /// The pattern or folder.
        name: String,
        /// What was looked for.
        wanted: &'static str,
    },
    /// A spool folder has no shard yet, and a journal.
    #[error("`{name}`: no table found, only the journal of turns that are still open")]
    StillOpen {
        /// The folder.
        name: String,
    },
    /// Nothing came at all.
    #[error("`{name}` is empty: zero bytes")]
    Empty {
        /// The input.
        name: String,
    },
    /// Nobody pipes a table into standard input.
    #[error("standard input is a terminal, and no input was named")]
    StdinTerminal,
    /// Standard input was named twice, or beside an input that is already there.
    #[error("standard input can be read only once")]
    StdinTwice,
    /// The bytes are neither Parquet nor an Arrow stream.
    #[error("`{name}` is no table: {found}, wanted Parquet or an Arrow IPC stream")]
    Foreign {
        /// The input.
        name: String,
        /// What stands there.
        found: String,
    },
    /// The table ends before its end mark.
    #[error("`{name}` is cut short: {what}")]
    Cut {
        /// The input.
        name: String,
        /// Which mark is missing.
        what: String,
    },
    /// The table is of a known format and cannot be decoded.
    #[error("`{name}` is damaged: {reason}")]
    Damaged {
        /// The input.
        name: String,
        /// The decoder's reason.
        reason: String,
    },
    /// The table is sound, and compressed in a way that this build has not.
    #[error("`{name}` is compressed by `{codec}`, which this build cannot read")]
    Codec {
        /// The input.
        name: String,
        /// The compression, or the library that reads it.
        codec: String,
    },
    /// The table was written by a later oclaw.
    #[error("`{name}` has schema version {found}; this build reads up to {known}")]
    NewerSchema {
        /// The input.
        name: String,
        /// Version in the file.
        found: String,
        /// The newest version that this build knows.
        known: u32,
    },
    /// The table says something as its schema version that is none.
    #[error("`{name}` has schema version `{found}`, which is no version number")]
    OddSchema {
        /// The input.
        name: String,
        /// What stands in the file.
        found: String,
    },
    /// The table does not hold what the schema demands.
    #[error("`{name}` breaks the schema")]
    Schema {
        /// The input.
        name: String,
        /// What is wrong.
        source: trajectory::Error,
    },
    /// Two inputs give one column types that do not go together.
    #[error("`{name}`: column `{column}` has type {found}, and {wanted} in the inputs before")]
    Clash {
        /// The later input.
        name: String,
        /// The column.
        column: String,
        /// Its type there.
        found: String,
        /// Its type before.
        wanted: String,
    },
    /// A table would land on a terminal.
    #[error("standard output is a terminal: a table is no text")]
    StdoutTerminal,
    /// Somebody else puts shards there.
    #[error("`{name}` is in use by another process")]
    InUse {
        /// The folder.
        name: String,
    },
    /// The output cannot be written.
    #[error("cannot write `{name}`")]
    Write {
        /// The output.
        name: String,
        /// The operating system's reason.
        source: io::Error,
    },
    /// The output's encoder refused a batch.
    #[error("cannot encode `{name}`: {reason}")]
    Encode {
        /// The output.
        name: String,
        /// The encoder's reason.
        reason: String,
    },
}

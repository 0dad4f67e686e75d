//! `failed.jsonl`: the shards that a follower gave up, one JSON object a line; and
//! whose fault an error is.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::Context as _;
use oclaw::stage;
use oclaw::table;
use oclaw::table::row_json;
use serde_json::json;

/// The list of a folder.
pub(crate) struct Failures {
    path: PathBuf,
}

impl Failures {
    /// Returns the list of the folder that results go to.
    pub(crate) fn of(folder: &Path) -> Self {
        Self { path: folder.join("failed.jsonl") }
    }

    /// Adds a shard with what was wrong the last time.
    pub(crate) fn list(&self, shard: &OsStr, error: &str, tries: u32) -> anyhow::Result<()> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let at = row_json::instant(i64::try_from(now.as_micros()).unwrap_or(i64::MAX));
        let shard = shard.to_string_lossy();
        let line = json!({"shard": shard, "error": error, "tries": tries, "at": at});
        let writing = || format!("cannot write `{}`", self.path.display());
        let mut file =
            File::options().create(true).append(true).open(&self.path).with_context(writing)?;
        file.write_all(format!("{line}\n").as_bytes()).with_context(writing)
    }
}

/// Returns the table error in a chain.
fn of_table(error: &anyhow::Error) -> Option<&table::Error> {
    error.chain().find_map(|cause| {
        let inside = cause.downcast_ref::<stage::Error>().and_then(|error| match error {
            stage::Error::Table(error) => Some(error),
            _ => None,
        });
        inside.or_else(|| cause.downcast_ref())
    })
}

/// Returns whether it was the writing that failed: no shard is to blame for that.
pub(crate) fn is_ours(error: &anyhow::Error) -> bool {
    matches!(of_table(error), Some(table::Error::Write { .. }))
}

/// Returns whether somebody has written the result meanwhile.
pub(crate) fn is_taken(error: &anyhow::Error) -> bool {
    match of_table(error) {
        Some(table::Error::Write { source, .. }) => {
            source.kind() == std::io::ErrorKind::AlreadyExists
        }
        _ => false,
    }
}

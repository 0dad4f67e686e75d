//! `failed.jsonl`: the shards that a follower gave up, one JSON object a line; and
//! whose fault an error is.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::Context as _;
use oclaw::stage;
use oclaw::store::{self, Store};
use oclaw::table;
use oclaw::table::row_json;
use serde_json::json;

/// The list of a folder.
pub(crate) enum Failures {
    /// A file of this machine.
    File(PathBuf),
    /// A folder of a store, in which nothing can be appended to: one object a shard.
    Store(Store),
}

impl Failures {
    /// Returns the list of the folder that results go to.
    pub(crate) fn of(folder: &Path) -> Self {
        Self::File(folder.join("failed.jsonl"))
    }

    /// Returns the list of a store that results go to: `failed/`.
    pub(crate) fn in_store(store: Store) -> Self {
        Self::Store(store.inside("failed"))
    }

    /// Adds a shard with what was wrong the last time.
    pub(crate) async fn list(&self, shard: &OsStr, error: &str, tries: u32) -> anyhow::Result<()> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let at = row_json::instant(i64::try_from(now.as_micros()).unwrap_or(i64::MAX));
        let name = shard.to_string_lossy();
        let line = json!({"shard": name, "error": error, "tries": tries, "at": at});
        let path = match self {
            Self::File(path) => path,
            Self::Store(store) => {
                let name = format!("{}.json", name.trim_end_matches(".parquet"));
                return Ok(store.replace(&name, format!("{line}\n").into()).await?);
            }
        };
        let writing = || format!("cannot write `{}`", path.display());
        let mut file =
            File::options().create(true).append(true).open(path).with_context(writing)?;
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
    use store::Error;
    let refused = |error: &Error| {
        matches!(
            error,
            Error::Refused { .. }
                | Error::File { .. }
                | Error::Address { .. }
                | Error::Client { .. }
        )
    };
    error.chain().filter_map(|cause| cause.downcast_ref()).any(refused)
        || matches!(of_table(error), Some(table::Error::Write { .. }))
}

/// Returns whether somebody has written the result meanwhile.
pub(crate) fn is_taken(error: &anyhow::Error) -> bool {
    if error.chain().any(|cause| matches!(cause.downcast_ref(), Some(store::Error::Exists { .. })))
    {
        return true;
    }
    match of_table(error) {
        Some(table::Error::Write { source, .. }) => {
            source.kind() == std::io::ErrorKind::AlreadyExists
        }
        _ => false,
    }
}

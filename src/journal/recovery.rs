//! What a run that was killed may have done without saying so.

use std::collections::HashSet;
use std::path::Path;

use crate::table::{self, Source};

use super::log::ShardList;
use super::{Error, Options};

/// What is in shards that the list does not name.
#[derive(Debug, Default)]
pub(super) struct Unlisted {
    pub(super) shards: Vec<String>,
    pub(super) turn_ids: HashSet<String>,
}

/// Reads which turns are in shards that the list does not name.
pub(super) fn unlisted(options: &Options, shards: &ShardList) -> Result<Unlisted, Error> {
    let failed = |source| Error::Folder { path: options.spool.clone(), source };
    let mut found = Unlisted::default();
    for path in shards.unlisted(&options.spool).map_err(failed)? {
        match turn_ids(&path) {
            Ok(ids) => found.turn_ids.extend(ids),
            // Readers name it; a broken file must not stop the chats.
            Err(error) => {
                let error = with_causes(&error);
                tracing::warn!(path = %path.display(), %error, "cannot read a shard");
                continue;
            }
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        found.shards.push(name);
    }
    Ok(found)
}

fn turn_ids(path: &Path) -> Result<Vec<String>, table::Error> {
    let mut source = Source::open(&[path.to_owned()])?;
    let mut found = Vec::new();
    while let Some(turns) = source.next_turns()? {
        found.extend(turns.into_iter().map(|turn| turn.turn_id));
    }
    Ok(found)
}

/// Writes an error with its causes on one line.
pub(super) fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}

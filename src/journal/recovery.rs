//! What a run that was killed may have done without saying so.

use std::collections::HashSet;
use std::path::Path;

use crate::table::{self, Source};

use super::log::ShardList;
use super::{Error, Options};

/// Reads which turns are in shards that the list does not name, and lists them.
pub(super) fn unlisted_turns(
    options: &Options,
    shards: &mut ShardList,
) -> Result<HashSet<String>, Error> {
    let failed = |source| Error::Folder { path: options.spool.clone(), source };
    let mut found = HashSet::new();
    for path in shards.unlisted(&options.spool).map_err(failed)? {
        match turn_ids(&path) {
            Ok(ids) => found.extend(ids),
            // Readers name it; a broken file must not stop the chats.
            Err(error) => {
                let error = with_causes(&error);
                tracing::warn!(path = %path.display(), %error, "cannot read a shard");
                continue;
            }
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        shards.add(&name).map_err(failed)?;
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

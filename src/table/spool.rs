//! Shards of a spool folder, written by whoever captures turns.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use uuid::Uuid;

use super::size::BATCH_BYTES;
use super::{Error, Provenance, Sink};
use crate::trajectory::{Turn, Writer, turn};

/// Writes turns to a new shard of a spool folder and returns its path. The rows
/// are sorted by session and turn, so that what a session repeats stands close
/// together. An existing file is never replaced.
pub fn write_shard(
    folder: &Path,
    writers: &[Writer],
    turns: &[Turn],
    provenance: &Provenance,
) -> Result<PathBuf, Error> {
    let path = folder.join(format!("{}.parquet", Uuid::now_v7()));
    let failed = |source| Error::Schema { name: path.display().to_string(), source };
    let key = |turn: &Turn| (turn.session_id.clone(), turn.turn, turn.choice, turn.turn_id.clone());
    let turns = match turns.is_sorted_by_key(key) {
        true => Cow::Borrowed(turns),
        false => {
            let mut sorted = turns.to_vec();
            sorted.sort_by_cached_key(key);
            Cow::Owned(sorted)
        }
    };
    let schema = turn::batch(writers, &[]).map_err(failed)?.schema();
    let mut sink = Sink::create_shard(&path, schema, provenance)?;
    for chunk in chunks(&turns) {
        sink.write(&turn::batch(writers, chunk).map_err(failed)?)?;
    }
    sink.finish()?;
    Ok(path)
}

/// Cuts turns so that no batch built of them outweighs the bound by much.
fn chunks(turns: &[Turn]) -> Vec<&[Turn]> {
    let mut found = Vec::new();
    let (mut start, mut bytes) = (0, 0);
    for (index, turn) in turns.iter().enumerate() {
        let heavy = text_bytes(turn);
        if index > start && bytes + heavy > BATCH_BYTES {
            found.push(&turns[start..index]);
            (start, bytes) = (index, 0);
        }
        bytes += heavy;
    }
    found.push(&turns[start..]);
    found
}

/// Returns the bytes of the columns that can be long.
fn text_bytes(turn: &Turn) -> usize {
    let text = |text: &Option<String>| text.as_ref().map_or(0, String::len);
    let ids = |ids: &Option<Vec<i32>>| ids.as_ref().map_or(0, |ids| 4 * ids.len());
    turn.messages.len()
        + turn.response.len()
        + text(&turn.tools)
        + text(&turn.next_state)
        + ids(&turn.prompt_ids)
        + 2 * ids(&turn.response_ids)
}

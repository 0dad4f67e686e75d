//! What a shard tells by its end alone, or by its end and a few columns of texts:
//! little is read however large it is.

use std::fs::File;
use std::os::unix::fs::FileExt;

use super::{Error, Object, Store};
use crate::table::{places, row_count, texts};

/// As much of a shard's end is read for its footer, which tells its first time.
const TAIL: u64 = 64 << 10;
/// Longest footer that is read.
const LONGEST: u64 = 16 << 20;
/// The two marks and the footer's length: a table has more.
const SMALLEST: u64 = 12;

/// What a shard tells without being read whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Counted<const N: usize> {
    /// Its rows.
    pub rows: u64,
    /// The texts of its columns, row by row, if any were asked for.
    pub texts: Option<Vec<[Option<String>; N]>>,
}

/// Counts the rows of a shard, and reads some columns if they are wanted. Nothing if
/// it cannot be read.
pub async fn count<const N: usize>(
    store: &Store,
    object: &Object,
    columns: Option<[&str; N]>,
) -> Result<Option<Counted<N>>, Error> {
    let Some(file) = end_of(store, object).await? else { return Ok(None) };
    let Some(rows) = file.try_clone().ok().and_then(row_count) else { return Ok(None) };
    let Some(columns) = columns else { return Ok(Some(Counted { rows, texts: None })) };
    let found = file.try_clone().ok().and_then(|file| places(file, &columns));
    let Some(places) = found else { return Ok(None) };
    for place in places {
        if place.start > place.end || place.end > object.size {
            return Ok(None);
        }
        let part = match store.part(object, place.clone()).await {
            Ok(part) => part,
            Err(error @ Error::Away { .. }) => return Err(error),
            Err(_) => return Ok(None),
        };
        if file.write_all_at(&part, place.start).is_err() {
            return Ok(None);
        }
    }
    Ok(texts(file, columns).map(|texts| Counted { rows, texts: Some(texts) }))
}

/// Returns a file of a shard's length with nothing but its end: its footer.
/// Nothing if there is none; whoever does the shard says what is wrong.
pub(super) async fn end_of(store: &Store, object: &Object) -> Result<Option<File>, Error> {
    let size = object.size;
    if size < SMALLEST {
        return Ok(None);
    }
    let mut wanted = TAIL.min(size);
    loop {
        let tail = match store.part(object, size - wanted..size).await {
            Ok(tail) => tail,
            Err(error @ Error::Away { .. }) => return Err(error),
            Err(_) => return Ok(None),
        };
        let Some([footer @ .., _, _, _, _]) = tail.last_chunk::<8>() else { return Ok(None) };
        let footer = u64::from(u32::from_le_bytes(*footer)) + 8;
        if footer > wanted && footer <= LONGEST.min(size) {
            wanted = footer;
            continue;
        }
        let Ok(file) = tempfile::tempfile() else { return Ok(None) };
        let written =
            file.set_len(size).and_then(|()| file.write_all_at(&tail, size - tail.len() as u64));
        return Ok(written.is_ok().then_some(file));
    }
}

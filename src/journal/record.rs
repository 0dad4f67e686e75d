//! The records of the log and their frame: a mark, the length, a checksum, JSON.
//!
//! The mark lets a reader find the next record after a damaged one; the checksum
//! lets it be sure.

use serde::{Deserialize, Serialize};

use crate::trajectory::words::NextStateKind;

use super::entry::{Entry, Remembered, word};

const MARK: [u8; 4] = *b"OCJ1";
const HEAD: usize = 12;
/// A damaged log is searched for marks so often, then it is given up: what is
/// searched may be made to look like records.
const SEARCHES: usize = 10_000;

/// One fact about a turn.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Record {
    /// A turn is complete.
    Turn(Box<Entry>),
    /// A request has extended it.
    Extended {
        /// The turn.
        turn_id: String,
        /// The messages, a JSON list.
        next_state: String,
        /// What kind of next state that is.
        #[serde(with = "word")]
        kind: NextStateKind,
    },
    /// It is over without a next state.
    Closed {
        /// The turn.
        turn_id: String,
        /// Whether its session ended with it.
        session_end: bool,
    },
    /// Somebody said what it was worth.
    Feedback {
        /// The turn.
        turn_id: String,
        /// -1 to 1.
        reward: Option<f32>,
        /// Words.
        text: Option<String>,
    },
    /// Rows are in a shard.
    Written {
        /// Name of the shard.
        shard: String,
        /// Their turns.
        turn_ids: Vec<String>,
    },
    /// A turn whose row is written, as far as pairing needs it.
    Known(Remembered),
}

impl Record {
    /// Appends the record to a buffer, framed.
    pub(super) fn frame(&self, out: &mut Vec<u8>) -> Result<(), serde_json::Error> {
        let start = out.len();
        out.extend_from_slice(&MARK);
        out.extend_from_slice(&[0; 8]);
        if let Err(error) = serde_json::to_writer(&mut *out, self) {
            out.truncate(start);
            return Err(error);
        }
        let payload = &out[start + HEAD..];
        let (length, sum) = (payload.len() as u32, crc32c::crc32c(payload));
        out[start + 4..start + 8].copy_from_slice(&length.to_le_bytes());
        out[start + 8..start + HEAD].copy_from_slice(&sum.to_le_bytes());
        Ok(())
    }
}

/// What a log holds.
#[derive(Debug, Default)]
pub(super) struct Contents {
    pub(super) records: Vec<Record>,
    /// Bytes that are no whole, undamaged record.
    pub(super) damaged: u64,
}

/// Reads every whole record of a log, whatever stands between them.
pub(super) fn read(bytes: &[u8]) -> Contents {
    let mut contents = Contents::default();
    walk(bytes, |span| match span {
        Span::Record(record, _) => contents.records.push(record),
        Span::Damaged(bytes) => contents.damaged += bytes.len() as u64,
    });
    contents
}

/// A piece of a log.
pub(super) enum Span<'a> {
    /// A whole record, and the bytes it stands in.
    Record(Record, &'a [u8]),
    /// Bytes that are none.
    Damaged(&'a [u8]),
}

/// Goes through a log piece by piece; the pieces make up all of it.
pub(super) fn walk<'a>(bytes: &'a [u8], mut see: impl FnMut(Span<'a>)) {
    let (mut at, mut searches) = (0, 0);
    while at < bytes.len() {
        if let Some((record, next)) = record(bytes, at) {
            see(Span::Record(record, &bytes[at..next]));
            at = next;
            continue;
        }
        searches += 1;
        let found = bytes[at + 1..].windows(MARK.len()).position(|window| window == MARK);
        let next = found.filter(|_| searches <= SEARCHES).map(|found| at + 1 + found);
        let next = next.unwrap_or(bytes.len());
        see(Span::Damaged(&bytes[at..next]));
        at = next;
    }
}

fn record(bytes: &[u8], at: usize) -> Option<(Record, usize)> {
    let head = bytes.get(at..at + HEAD)?;
    let number = |at: usize| Some(u32::from_le_bytes(head.get(at..at + 4)?.try_into().ok()?));
    (head[..4] == MARK).then_some(())?;
    let end = at + HEAD + number(4)? as usize;
    let payload = bytes.get(at + HEAD..end)?;
    (crc32c::crc32c(payload) == number(8)?).then_some(())?;
    Some((serde_json::from_slice(payload).ok()?, end))
}

//! Places that may still tell of turns that shall be gone, and whether a file that
//! is no table of turns does.

use std::collections::BTreeSet;
use std::error::Error as _;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use aho_corasick::AhoCorasick;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::Value;

use super::Error;
use crate::table::row_json;

/// Weights spell nothing, and are large.
const NO_TEXT: [&str; 6] = ["safetensors", "gguf", "bin", "pt", "pth", "npz"];
const PACKED: [&str; 13] =
    ["gz", "tgz", "zst", "tzst", "zip", "tar", "xz", "txz", "bz2", "tbz2", "lz4", "7z", "rar"];
/// How files begin that are packed: gzip, Zstandard, xz, bzip2.
const PACKED_HEADS: [&[u8]; 4] =
    [&[0x1f, 0x8b], &[0x28, 0xb5, 0x2f, 0xfd], &[0xfd, b'7', b'z', b'X', b'Z'], b"BZh"];
/// A page may show no more of a long text than its beginning.
const BEGINNING: usize = 120;

/// Bytes of a file that are searched at once.
const BLOCK: u64 = 1 << 20;
/// Bytes before an id that tell whether it stands alone.
const BEFORE: usize = 2;
/// Bytes that tell the kind of a file.
const HEAD: usize = 8;

/// Why a place still tells of the turns, or may.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Left {
    /// It holds words of theirs.
    Words,
    /// It names them, or their session.
    Ids,
    /// It is compressed or an archive, and was not looked into.
    Packed,
    /// It cannot be read, for a reason.
    Unreadable(String),
    /// It is a link to a place that was not looked at.
    Link(PathBuf),
}

impl Left {
    /// Tells of a place that cannot be read.
    pub fn unreadable(error: &Error) -> Self {
        let mut reason = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            reason = format!("{reason}: {cause}");
            source = cause.source();
        }
        Self::Unreadable(reason)
    }
}

impl fmt::Display for Left {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Words => out.write_str("words of the turns"),
            Self::Ids => out.write_str("ids of the turns or their session"),
            Self::Packed => out.write_str("compressed, not looked into"),
            Self::Unreadable(reason) => write!(out, "cannot be searched ({reason})"),
            Self::Link(target) => {
                write!(
                    out,
                    "a link to `{}`, not followed: give it to `--in` itself",
                    target.display()
                )
            }
        }
    }
}

/// Returns the files that hold one of some texts or ids, as they are or as JSON or
/// HTML writes them, and those of which nobody can say.
pub fn still_there(
    files: &[PathBuf],
    texts: &BTreeSet<String>,
    ids: &BTreeSet<String>,
) -> Result<Vec<(PathBuf, Left)>, Error> {
    let search = Search::of(texts, ids)?;
    let mut found = Vec::new();
    for path in files {
        let name = path.file_name().unwrap_or_default().as_encoded_bytes();
        let left = match search.tells(name) {
            Some(left) => Some(left),
            None if !may_hold_text(path) => None,
            None => contents(path, &search).unwrap_or_else(|error| Some(Left::unreadable(&error))),
        };
        found.extend(left.map(|left| (path.clone(), left)));
    }
    Ok(found)
}

/// Bytes that are looked for, all at once.
struct Search {
    words: AhoCorasick,
    ids: AhoCorasick,
    /// Length of the longest.
    longest: usize,
}

/// Where bytes lie in what is searched.
#[derive(Clone, Copy)]
struct Ends {
    first: bool,
    last: bool,
}

impl Search {
    fn of(texts: &BTreeSet<String>, ids: &BTreeSet<String>) -> Result<Self, Error> {
        let words: BTreeSet<Vec<u8>> =
            texts.iter().flat_map(|text| spellings(beginning(text))).collect();
        let ids: BTreeSet<Vec<u8>> = ids.iter().flat_map(|id| spellings(id)).collect();
        let longest = words.iter().chain(&ids).map(Vec::len).max().unwrap_or_default();
        let of = |needles| {
            AhoCorasick::new(needles).map_err(|error| Error::Search { reason: error.to_string() })
        };
        Ok(Self { words: of(words)?, ids: of(ids)?, longest })
    }

    fn tells(&self, bytes: &[u8]) -> Option<Left> {
        self.tells_in(bytes, Ends { first: true, last: true })
    }

    /// The same of a part of the bytes. What stands at an end that is none is seen
    /// whole in the part beside it.
    fn tells_in(&self, bytes: &[u8], ends: Ends) -> Option<Left> {
        if self.words.is_match(bytes) {
            return Some(Left::Words);
        }
        let named = self.ids.find_overlapping_iter(bytes).any(|found| {
            let inside =
                (ends.first || found.start() >= BEFORE) && (ends.last || found.end() < bytes.len());
            inside && stands_alone(bytes, found.range())
        });
        named.then_some(Left::Ids)
    }
}

fn contents(path: &Path, search: &Search) -> Result<Option<Left>, Error> {
    let read = |source| Error::read(path, source);
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(read(source)),
    };
    let (mut bytes, mut ends) = (Vec::new(), Ends { first: true, last: false });
    let mut head = Vec::new();
    while !ends.last {
        let more = (&mut file).take(BLOCK).read_to_end(&mut bytes).map_err(read)?;
        ends.last = (more as u64) < BLOCK;
        if ends.first {
            head = bytes[..bytes.len().min(HEAD)].to_vec();
        }
        if let Some(left) = search.tells_in(&bytes, ends) {
            return Ok(Some(left));
        }
        let again = bytes.len().min(search.longest + BEFORE + 1);
        bytes.drain(..bytes.len() - again);
        ends.first = false;
    }
    let packed = PACKED.contains(&ending(path).as_str())
        || PACKED_HEADS.iter().any(|packed| head.starts_with(packed));
    match packed {
        true => Ok(Some(Left::Packed)),
        false if head.starts_with(b"PAR1") => rows(path, search),
        false => Ok(None),
    }
}

/// Looks through a table that is none of turns, whose bytes are packed.
fn rows(path: &Path, search: &Search) -> Result<Option<Left>, Error> {
    let failed = |reason: String| Error::read(path, io::Error::other(reason));
    let file = File::open(path).map_err(|source| Error::read(path, source))?;
    let reader = ParquetRecordBatchReaderBuilder::try_new(file)
        .and_then(|builder| builder.build())
        .map_err(|error| failed(error.to_string()))?;
    for batch in reader {
        let batch = batch.map_err(|error| failed(error.to_string()))?;
        for row in 0..batch.num_rows() {
            let text = Value::from(row_json::row(&batch, row)).to_string();
            if let Some(left) = search.tells(text.as_bytes()) {
                return Ok(Some(left));
            }
        }
    }
    Ok(None)
}

fn ending(path: &Path) -> String {
    let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
    ending.to_ascii_lowercase()
}

fn may_hold_text(path: &Path) -> bool {
    !NO_TEXT.contains(&ending(path).as_str())
}

fn beginning(text: &str) -> &str {
    text.char_indices().nth(BEGINNING).map_or(text, |(end, _)| &text[..end])
}

/// Returns a text as it is, in JSON, in JSON in JSON, and each of them in HTML.
fn spellings(text: &str) -> Vec<Vec<u8>> {
    let json = |text: &str| {
        let quoted = Value::from(text).to_string();
        quoted[1..quoted.len() - 1].to_owned()
    };
    let quoted = json(text);
    let twice = json(&quoted);
    let mut found = Vec::new();
    for spelled in [text.to_owned(), quoted, twice] {
        found.extend(["&#39;", "&#x27;", "'"].map(|quote| html(&spelled, quote).into_bytes()));
        found.push(spelled.into_bytes());
    }
    found.retain(|spelled| !spelled.is_empty());
    found
}

fn html(text: &str, quote: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    text.replace('"', "&quot;").replace('\'', quote)
}

/// Tells whether an id at a place is not part of a longer one.
fn stands_alone(bytes: &[u8], id: Range<usize>) -> bool {
    let joins = |byte: &u8| byte.is_ascii_alphanumeric() || b"_-".contains(byte);
    let before = id.start.checked_sub(1).and_then(|before| bytes.get(before));
    // `\nID` in JSON: the letter is the escape's.
    let escaped = id.start >= BEFORE && bytes[id.start - BEFORE] == b'\\';
    let after = bytes.get(id.end);
    (escaped || !before.is_some_and(joins)) && !after.is_some_and(joins)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What lies across the border of two blocks is found, and a longer id is not
    /// taken for the one it begins or ends with.
    #[test]
    fn blocks_hide_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("talk.log");
        let texts = BTreeSet::from(["the hidden garden behind the mill".to_owned()]);
        let ids = BTreeSet::from(["turn-17".to_owned()]);
        let left = |needle: &str, at: usize| {
            let mut bytes = vec![b'.'; 2 * BLOCK as usize + 100];
            bytes[at..at + needle.len()].copy_from_slice(needle.as_bytes());
            std::fs::write(&path, bytes).unwrap();
            let found = still_there(std::slice::from_ref(&path), &texts, &ids).unwrap();
            found.into_iter().map(|(_, left)| left).next()
        };
        let block = BLOCK as usize;
        for at in block - 40..block + 3 {
            assert_eq!(left("the hidden garden behind the mill", at), Some(Left::Words), "{at}");
            assert_eq!(left("turn-17", at), Some(Left::Ids), "{at}");
            assert_eq!(left("\\nturn-17", at), Some(Left::Ids), "{at}");
            assert_eq!(left("return-17", at), None, "{at}");
            assert_eq!(left("turn-178", at), None, "{at}");
        }
        for at in [0, block, 2 * block, 2 * block + 93] {
            assert_eq!(left("turn-17", at), Some(Left::Ids), "{at}");
        }
        assert_eq!(left("the hidden garden", 7), None);
    }
}

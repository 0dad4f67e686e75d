//! Places that may still tell of turns that shall be gone, and whether a file that
//! is no table of turns does.

use std::collections::BTreeSet;
use std::error::Error as _;
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

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
) -> Vec<(PathBuf, Left)> {
    let words: BTreeSet<Vec<u8>> =
        texts.iter().flat_map(|text| spellings(beginning(text))).collect();
    let ids: BTreeSet<Vec<u8>> = ids.iter().flat_map(|id| spellings(id)).collect();
    let tells = |bytes: &[u8]| {
        if words.iter().any(|needle| places(bytes, needle).next().is_some()) {
            return Some(Left::Words);
        }
        let named = ids.iter().any(|id| places(bytes, id).any(|at| stands_alone(bytes, at, id)));
        named.then_some(Left::Ids)
    };
    let mut found = Vec::new();
    for path in files {
        let name = path.file_name().unwrap_or_default().as_encoded_bytes();
        let left = match tells(name) {
            Some(left) => Some(left),
            None if !may_hold_text(path) => None,
            None => contents(path, &tells).unwrap_or_else(|error| Some(Left::unreadable(&error))),
        };
        found.extend(left.map(|left| (path.clone(), left)));
    }
    found
}

fn contents(path: &Path, tells: &dyn Fn(&[u8]) -> Option<Left>) -> Result<Option<Left>, Error> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(Error::read(path, source)),
    };
    let packed = PACKED.contains(&ending(path).as_str())
        || PACKED_HEADS.iter().any(|head| bytes.starts_with(head));
    match tells(&bytes) {
        None if packed => Ok(Some(Left::Packed)),
        None if bytes.starts_with(b"PAR1") => rows(path, tells),
        left => Ok(left),
    }
}

/// Looks through a table that is none of turns, whose bytes are packed.
fn rows(path: &Path, tells: &dyn Fn(&[u8]) -> Option<Left>) -> Result<Option<Left>, Error> {
    let failed = |reason: String| Error::read(path, io::Error::other(reason));
    let file = File::open(path).map_err(|source| Error::read(path, source))?;
    let reader = ParquetRecordBatchReaderBuilder::try_new(file)
        .and_then(|builder| builder.build())
        .map_err(|error| failed(error.to_string()))?;
    for batch in reader {
        let batch = batch.map_err(|error| failed(error.to_string()))?;
        for row in 0..batch.num_rows() {
            let text = Value::from(row_json::row(&batch, row)).to_string();
            if let Some(left) = tells(text.as_bytes()) {
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
fn stands_alone(bytes: &[u8], at: usize, id: &[u8]) -> bool {
    let joins = |byte: &u8| byte.is_ascii_alphanumeric() || b"_-".contains(byte);
    let before = at.checked_sub(1).and_then(|before| bytes.get(before));
    // `\nID` in JSON: the letter is the escape's.
    let escaped = at >= 2 && bytes[at - 2] == b'\\';
    let after = bytes.get(at + id.len());
    (escaped || !before.is_some_and(joins)) && !after.is_some_and(joins)
}

fn places<'a>(bytes: &'a [u8], needle: &'a [u8]) -> impl Iterator<Item = usize> + 'a {
    let first = needle.first().copied();
    let starts = bytes.iter().enumerate().filter(move |(_, byte)| Some(**byte) == first);
    starts.map(|(at, _)| at).filter(move |at| bytes[*at..].starts_with(needle))
}

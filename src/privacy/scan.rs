//! Whether a file that is no table still spells words that shall be gone.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::Error;

/// Weights spell nothing, and are large.
const NO_TEXT: [&str; 3] = ["safetensors", "gguf", "bin"];

/// Returns the files that hold one of some texts, as they are or as JSON writes
/// them.
pub fn still_there(files: &[PathBuf], texts: &BTreeSet<String>) -> Result<Vec<PathBuf>, Error> {
    let mut needles: BTreeSet<Vec<u8>> = BTreeSet::new();
    for text in texts {
        needles.insert(text.as_bytes().to_vec());
        let quoted = serde_json::Value::from(text.as_str()).to_string();
        needles.insert(quoted.as_bytes()[1..quoted.len() - 1].to_vec());
    }
    let mut found = Vec::new();
    for path in files.iter().filter(|path| may_hold_text(path)) {
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(source) => return Err(Error::read(path, source)),
        };
        if needles.iter().any(|needle| contains(&bytes, needle)) {
            found.push(path.clone());
        }
    }
    Ok(found)
}

fn may_hold_text(path: &Path) -> bool {
    let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
    !NO_TEXT.contains(&ending)
}

fn contains(bytes: &[u8], needle: &[u8]) -> bool {
    !needle.is_empty() && memchr_first(bytes, needle[0]).any(|at| bytes[at..].starts_with(needle))
}

fn memchr_first(bytes: &[u8], first: u8) -> impl Iterator<Item = usize> + '_ {
    bytes.iter().enumerate().filter(move |(_, byte)| **byte == first).map(|(at, _)| at)
}

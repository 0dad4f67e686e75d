//! What the processes say, kept within bounds.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Old logs kept of each process.
const KEPT: u32 = 4;
/// The last words of a process are looked for in so much of its log.
const TAIL: u64 = 4096;

/// Sets a log aside as `NAME.log.1` once it is too long. Its writer appends, and
/// goes on at the beginning; a line said between copy and cut is lost.
pub(super) fn rotate(log: &Path, longest: u64) -> io::Result<()> {
    match fs::metadata(log) {
        Ok(facts) if facts.len() > longest => {}
        _ => return Ok(()),
    }
    for number in (1..KEPT).rev() {
        let from = numbered(log, number);
        if from.exists() {
            fs::rename(from, numbered(log, number + 1))?;
        }
    }
    fs::copy(log, numbered(log, 1))?;
    File::options().write(true).open(log)?.set_len(0)
}

fn numbered(log: &Path, number: u32) -> PathBuf {
    let mut name = log.as_os_str().to_owned();
    name.push(format!(".{number}"));
    PathBuf::from(name)
}

/// Returns what a process of ours said last of what was wrong: the last line but for
/// hints.
pub(super) fn last_words(log: &Path) -> Option<String> {
    let mut file = File::open(log).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL))).ok()?;
    let mut tail = Vec::new();
    file.read_to_end(&mut tail).ok()?;
    let text = String::from_utf8_lossy(&tail);
    let mut lines = text.lines().rev().map(str::trim).filter(|line| !line.is_empty());
    let first = lines.clone().next()?;
    let told = lines.find(|line| line.starts_with("oclaw ") || line.starts_with("error: "));
    Some(told.unwrap_or(first).to_owned())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_long_log_is_set_aside_while_it_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("judge.log");
        let mut writer = File::options().create(true).append(true).open(&log).unwrap();
        for word in ["one", "two", "three", "four", "five", "six"] {
            writeln!(writer, "{word}").unwrap();
            assert_eq!(last_words(&log).as_deref(), Some(word));
            rotate(&log, 2).unwrap();
        }
        writeln!(writer, "7").unwrap();
        rotate(&log, 2).unwrap();
        assert_eq!(fs::read_to_string(&log).unwrap(), "7\n");
        for (number, word) in [(1, "six\n"), (2, "five\n"), (3, "four\n"), (4, "three\n")] {
            assert_eq!(fs::read_to_string(numbered(&log, number)).unwrap(), word);
        }
        assert!(!numbered(&log, 5).exists());
    }
}

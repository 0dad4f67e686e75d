//! What the processes say, kept within bounds.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
#[cfg(target_os = "linux")]
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Old logs kept of each process.
const KEPT: u32 = 4;
/// The last words of a process are looked for in so much of its log.
const TAIL: u64 = 4096;

/// Sets a log aside as `NAME.log.1` once it is too long. Its writer appends all the
/// while, and goes on at the beginning.
///
/// Where the file system can take the beginning out of a file (ext4, XFS), nothing is
/// lost, whenever it is said: what was copied goes, in whole blocks, and the rest
/// stays. A line may begin in one file and end in the other. Elsewhere the file is cut
/// once nothing has come since the copy; what comes in the instant between is lost.
pub(super) fn rotate(log: &Path, longest: u64) -> io::Result<()> {
    match fs::metadata(log) {
        Ok(facts) if facts.len() > longest => {}
        _ => return Ok(()),
    }
    // The old ones move once there is another: on a full disk they stay.
    let fresh = numbered(log, 0);
    if let Err(error) = take_over(log, &fresh) {
        // What is half there is still in the log.
        let _ = fs::remove_file(&fresh);
        return Err(error);
    }
    for number in (0..KEPT).rev() {
        let from = numbered(log, number);
        if from.exists() {
            fs::rename(from, numbered(log, number + 1))?;
        }
    }
    Ok(())
}

/// Appends a line to a log that this process alone writes, and keeps it within bounds.
pub fn append_line(log: &Path, line: &str, longest: u64) -> io::Result<()> {
    rotate(log, longest)?;
    let mut file = File::options().create(true).append(true).open(log)?;
    file.write_all(format!("{line}\n").as_bytes())
}

/// Moves what a log holds into another file.
fn take_over(log: &Path, fresh: &Path) -> io::Result<()> {
    let mut source = File::options().read(true).write(true).open(log)?;
    let facts = source.metadata()?;
    let mut aside = File::create(fresh)?;
    // Less than the whole, for a file that ends where it is cut cannot be cut so.
    let block = facts.blksize().max(1);
    let whole = facts.len().saturating_sub(1) / block * block;
    let copied = io::copy(&mut (&source).take(whole), &mut aside)?;
    if copied == whole && whole > 0 && take_out(&source, whole).is_ok() {
        return Ok(());
    }
    while io::copy(&mut source, &mut aside)? > 0 {}
    source.set_len(0)
}

/// Takes the first bytes out of a file, in one step.
#[cfg(target_os = "linux")]
fn take_out(file: &File, bytes: u64) -> io::Result<()> {
    let bytes = libc::off_t::try_from(bytes).map_err(io::Error::other)?;
    #[expect(unsafe_code, reason = "std cannot take anything out of a file")]
    // SAFETY: the descriptor is open for as long as the call takes.
    let done =
        unsafe { libc::fallocate(file.as_raw_fd(), libc::FALLOC_FL_COLLAPSE_RANGE, 0, bytes) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// No other system is known to be able to.
#[cfg(not(target_os = "linux"))]
fn take_out(_: &File, _: u64) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
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
        // What cannot be set aside leaves those that were.
        fs::create_dir(numbered(&log, 0)).unwrap();
        fs::write(&log, "much too long").unwrap();
        let before = fs::read_to_string(numbered(&log, 1)).unwrap();
        assert!(rotate(&log, 5).is_err());
        assert_eq!(fs::read_to_string(numbered(&log, 1)).unwrap(), before);
        assert_eq!(fs::read_to_string(&log).unwrap(), "much too long");
    }

    #[test]
    fn a_log_of_ones_own_is_kept_within_bounds_too() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("loop.log");
        for line in ["one", "two", "three"] {
            append_line(&log, line, 6).unwrap();
        }
        assert_eq!(fs::read_to_string(&log).unwrap(), "three\n");
        assert_eq!(fs::read_to_string(numbered(&log, 1)).unwrap(), "one\ntwo\n");
    }

    /// Whether beginnings can be taken out of the files of a folder.
    fn can_take_out(folder: &Path) -> bool {
        let path = folder.join("probe");
        fs::write(&path, vec![b'x'; 1 << 20]).unwrap();
        let file = File::options().read(true).write(true).open(path).unwrap();
        take_out(&file, file.metadata().unwrap().blksize()).is_ok()
    }

    #[test]
    fn what_is_said_meanwhile_is_in_one_of_the_files() {
        let folder = tempfile::tempdir().unwrap();
        if !can_take_out(folder.path()) {
            println!("skipped: nothing can be taken out of files here");
            return;
        }
        let log = folder.path().join("judge.log");
        let mut writer = File::options().create(true).append(true).open(&log).unwrap();
        let lines = 60_000;
        let writing = std::thread::spawn(move || {
            for number in 0..lines {
                writeln!(writer, "line {number}").unwrap();
            }
        });
        // Each of the files set aside is taken before the next.
        let mut said = String::new();
        let mut rotated = 0;
        while !writing.is_finished() {
            rotate(&log, 16384).unwrap();
            if let Ok(text) = fs::read_to_string(numbered(&log, 1)) {
                said.push_str(&text);
                rotated += 1;
                fs::remove_file(numbered(&log, 1)).unwrap();
            }
        }
        writing.join().unwrap();
        said.push_str(&fs::read_to_string(&log).unwrap());
        let wanted: String = (0..lines).map(|number| format!("line {number}\n")).collect();
        assert!(rotated > 3, "{rotated}");
        assert!(said == wanted, "{} bytes of {}", said.len(), wanted.len());
    }
}

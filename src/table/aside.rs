//! Files that are not finished yet, beside what they become.

use std::fs::{self, File, Permissions, TryLockError};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

/// Starts a file that is to become `target`. Dropped, it is removed; one whose owner
/// was killed is removed when the next one for the same target is started. Whoever is
/// alive holds a lock on theirs, so that two may write the same at once.
pub fn aside_of(target: &Path) -> io::Result<NamedTempFile> {
    let (folder, prefix) = (folder_of(target), prefix_of(target));
    discard_abandoned(&folder, &prefix);
    loop {
        let aside = start(&folder, &prefix)?;
        match aside.as_file().try_lock() {
            // Before it was locked, it may have been taken for abandoned.
            Ok(()) if aside.as_file().metadata()?.nlink() == 0 => {}
            Err(TryLockError::WouldBlock) => {}
            // Where nothing can be locked, nothing is taken for abandoned.
            Ok(()) | Err(TryLockError::Error(_)) => return Ok(aside),
        }
    }
}

/// Starts a file with a name that begins so.
pub(super) fn start(folder: &Path, prefix: &str) -> io::Result<NamedTempFile> {
    tempfile::Builder::new()
        .prefix(prefix)
        // What the umask leaves of it, as for any other file.
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(folder)
}

/// Returns the folder that a file is in.
pub(super) fn folder_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// Names may be as long as the system takes, so that only their beginning fits.
fn prefix_of(target: &Path) -> String {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    let beginning: String = name.chars().take(40).collect();
    format!(".tmp-of-{beginning}-")
}

/// Removes what nobody writes to any more. What cannot be seen or removed stays: it is
/// in nobody's way.
fn discard_abandoned(folder: &Path, prefix: &str) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        if !entry.file_name().as_encoded_bytes().starts_with(prefix.as_bytes()) {
            continue;
        }
        let path = entry.path();
        if !entry.file_type().is_ok_and(|kind| kind.is_file()) {
            continue;
        }
        let Ok(file) = File::open(&path) else { continue };
        if file.try_lock().is_ok() {
            drop(fs::remove_file(path));
        }
        // Let go of only now: whoever has just started this file must not lock it between
        // the look at its lock and its removal, and write to what has no name.
        drop(file);
    }
}

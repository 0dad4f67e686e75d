//! The hold of one trainer on its folder: the lock file, and the memory of what
//! it made, so that a run without a result leaves nothing.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use super::Error;

/// What holds have made so far that no policy came of.
static UNFINISHED: Mutex<Vec<Made>> = Mutex::new(Vec::new());

/// Removes the folders and lock files of runs that have no policy yet. For a
/// signal's sake, just before the process ends.
pub fn discard_unfinished() {
    for made in UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        discard_aside(&made.folder);
        made.remove();
    }
}

/// Files and folders that one run made.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Made {
    folder: PathBuf,
    lock: bool,
    /// The folder and those above it that were not there, innermost first.
    folders: Vec<PathBuf>,
}

impl Made {
    fn remove(&self) {
        // What cannot be removed is in nobody's way; a folder in which somebody
        // else has put something stays.
        if self.lock {
            let _ = fs::remove_file(lock_path(&self.folder));
        }
        for folder in &self.folders {
            let _ = fs::remove_dir(folder);
        }
    }
}

/// A folder held by one trainer, for as long as this lives.
#[derive(Debug)]
pub(super) struct Hold {
    lock: File,
    made: Made,
}

impl Hold {
    /// Takes a folder, which is made if it is not there.
    pub(super) fn take(folder: &Path) -> Result<Self, Error> {
        let missing: Vec<PathBuf> = folder
            .ancestors()
            .take_while(|folder| !folder.as_os_str().is_empty() && !folder.exists())
            .map(Path::to_owned)
            .collect();
        let mut made = Made { folder: folder.to_owned(), lock: false, folders: missing };
        let lock = fs::create_dir_all(folder)
            .map_err(|source| Error::write(folder, source))
            .and_then(|()| lock(folder, &mut made.lock));
        let lock = match lock {
            Ok(lock) => lock,
            Err(error) => {
                // A lock file that somebody holds is theirs by now.
                made.lock &= !matches!(error, Error::Locked { .. });
                made.remove();
                return Err(error);
            }
        };
        // What a killed run left behind.
        discard_aside(folder);
        UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner).push(made.clone());
        Ok(Self { lock, made })
    }

    /// Lets everything stay: a policy is there, or about to be.
    pub(super) fn keep(&mut self) {
        self.forget();
        self.made.lock = false;
        self.made.folders.clear();
    }

    fn forget(&self) {
        let mut unfinished = UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = unfinished.iter().position(|made| *made == self.made) {
            unfinished.swap_remove(at);
        }
    }
}

impl Drop for Hold {
    /// The lock is held until the file is gone, and no longer: a process that is just
    /// being started shares it for a moment, and must not hold it on.
    fn drop(&mut self) {
        self.forget();
        discard_aside(&self.made.folder);
        self.made.remove();
        let _ = self.lock.unlock();
    }
}

fn lock_path(folder: &Path) -> PathBuf {
    folder.join(".lock")
}

/// Locks the lock file. One that its last holder removed in this moment is
/// nobody's: another is made.
fn lock(folder: &Path, made: &mut bool) -> Result<File, Error> {
    let path = lock_path(folder);
    let failed = |source| Error::write(&path, source);
    loop {
        let file = match File::options().write(true).create_new(true).open(&path) {
            Ok(file) => {
                *made = true;
                file
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                *made = false;
                match File::options().write(true).open(&path) {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                    opened => opened.map_err(failed)?,
                }
            }
            Err(source) => return Err(failed(source)),
        };
        match file.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => {
                return Err(Error::Locked { folder: folder.to_owned() });
            }
            Err(fs::TryLockError::Error(source)) => return Err(failed(source)),
        }
        let inode = file.metadata().map_err(failed)?.ino();
        if fs::metadata(&path).is_ok_and(|there| there.ino() == inode) {
            return Ok(file);
        }
    }
}

/// Removes what was begun and never got its name.
fn discard_aside(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        if entry.file_name().to_string_lossy().starts_with(".tmp-") {
            let path = entry.path();
            let _ = fs::remove_dir_all(&path).or_else(|_| fs::remove_file(&path));
        }
    }
}

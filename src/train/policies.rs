//! The folder of policies: `step-000001`, `step-000002`, …, and `latest`, which
//! points to the newest whole one.
//!
//! A policy is written aside, synced and renamed, and only then `latest` moves.
//! Killed at any point, the folder still has its old `latest`, and what was
//! begun has a name that starts with `.tmp-`.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use super::Error;

const LATEST: &str = "latest";
/// What `sync-weights --rollback` leaves in a policy's folder.
const WITHDRAWN: &str = "oclaw/withdrawn";

/// The folder, held by one trainer.
#[derive(Debug)]
pub(super) struct Policies {
    folder: PathBuf,
    /// Held for as long as we write here.
    _lock: File,
}

impl Policies {
    /// Opens the folder, making it if need be, for this process alone.
    pub(super) fn open(folder: &Path) -> Result<Self, Error> {
        fs::create_dir_all(folder).map_err(|source| Error::write(folder, source))?;
        let path = folder.join(".lock");
        let lock = File::create(&path).map_err(|source| Error::write(&path, source))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => {
                return Err(Error::Locked { folder: folder.to_owned() });
            }
            Err(fs::TryLockError::Error(source)) => return Err(Error::write(&path, source)),
        }
        let policies = Self { folder: folder.to_owned(), _lock: lock };
        policies.discard_unfinished();
        Ok(policies)
    }

    /// Removes what a killed run left behind.
    fn discard_unfinished(&self) {
        let Ok(entries) = fs::read_dir(&self.folder) else { return };
        for entry in entries.flatten() {
            if entry.file_name().to_string_lossy().starts_with(".tmp-") {
                let path = entry.path();
                // What cannot be removed is in nobody's way.
                let _ = fs::remove_dir_all(&path).or_else(|_| fs::remove_file(&path));
            }
        }
    }

    /// Returns the policy that `latest` points to: a link, or a one-line text
    /// file where links cannot be made.
    pub(super) fn latest(&self) -> Result<Option<PathBuf>, Error> {
        let link = self.folder.join(LATEST);
        let broken = |problem: String| Error::Latest { path: link.clone(), problem };
        let metadata = match fs::symlink_metadata(&link) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(Error::read(&link, source)),
        };
        let target = match metadata.is_symlink() {
            true => fs::read_link(&link).map_err(|source| Error::read(&link, source))?,
            false => {
                let text = fs::read_to_string(&link)
                    .map_err(|error| broken(format!("it is no link and no text: {error}")))?;
                PathBuf::from(text.trim())
            }
        };
        let policy = self.folder.join(&target);
        match policy.is_dir() {
            true => Ok(Some(policy)),
            false => Err(broken(format!("`{}` is not there", target.display()))),
        }
    }

    /// Returns the number of the policy after a step. A policy that was rolled
    /// back keeps its number: servers and turns know it by that.
    pub(super) fn after(&self, step: u64) -> u64 {
        let withdrawn = |step: &u64| self.folder.join(name(*step)).join(WITHDRAWN).exists();
        (step + 1..).find(|step| !withdrawn(step)).unwrap_or(step + 1)
    }

    /// Returns the folder in which a policy is written until it is whole.
    pub(super) fn begin(&self, step: u64) -> Result<PathBuf, Error> {
        let aside = self.folder.join(format!(".tmp-{}-{}", name(step), std::process::id()));
        fs::create_dir_all(&aside).map_err(|source| Error::write(&aside, source))?;
        Ok(aside)
    }

    /// Gives a whole policy its name, then moves `latest` to it.
    pub(super) fn publish(&self, aside: &Path, step: u64) -> Result<PathBuf, Error> {
        sync_tree(aside)?;
        let policy = self.folder.join(name(step));
        if policy.exists() {
            // A run was killed between this rename and the next. Nobody has been
            // told of that policy: it makes room for its equal.
            let orphan = self.folder.join(format!(".tmp-orphan-{}", std::process::id()));
            fs::rename(&policy, &orphan).map_err(|source| Error::write(&policy, source))?;
            let _ = fs::remove_dir_all(&orphan);
        }
        fs::rename(aside, &policy).map_err(|source| Error::write(&policy, source))?;
        sync_folder(&self.folder)?;
        let link = self.folder.join(format!(".tmp-latest-{}", std::process::id()));
        let latest = self.folder.join(LATEST);
        std::os::unix::fs::symlink(name(step), &link)
            .map_err(|source| Error::write(&link, source))?;
        fs::rename(&link, &latest).map_err(|source| Error::write(&latest, source))?;
        sync_folder(&self.folder)?;
        Ok(policy)
    }

    /// Removes policies older than the `keep` newest up to `step`, and the
    /// optimiser state of all but the two newest.
    pub(super) fn prune(&self, step: u64, keep: u64, optimizer: &str) -> Result<(), Error> {
        let entries =
            fs::read_dir(&self.folder).map_err(|source| Error::read(&self.folder, source))?;
        for entry in entries.flatten() {
            let Some(old) = step_of(&entry.file_name().to_string_lossy()) else { continue };
            let age = step.saturating_sub(old);
            let path = entry.path();
            if old <= step && age >= keep.max(1) {
                // Gone from view first, so that nobody loads half of it.
                let aside = self.folder.join(format!(".tmp-pruned-{old}"));
                fs::rename(&path, &aside).map_err(|source| Error::write(&path, source))?;
                fs::remove_dir_all(&aside).map_err(|source| Error::write(&aside, source))?;
            } else if old <= step && age >= 2 {
                let state = path.join(optimizer);
                match fs::remove_file(&state) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => {
                        return Err(Error::write(&state, error));
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }
}

/// Returns the name of a policy's folder.
pub(super) fn name(step: u64) -> String {
    format!("step-{step:06}")
}

fn step_of(name: &str) -> Option<u64> {
    name.strip_prefix("step-")?.parse().ok()
}

/// Waits until every file of a folder, and the folder itself, is on the disk.
fn sync_tree(folder: &Path) -> Result<(), Error> {
    let entries = fs::read_dir(folder).map_err(|source| Error::read(folder, source))?;
    for entry in entries {
        let path = entry.map_err(|source| Error::read(folder, source))?.path();
        match path.is_dir() {
            true => sync_tree(&path)?,
            false => sync_file(&path)?,
        }
    }
    sync_folder(folder)
}

fn sync_file(path: &Path) -> Result<(), Error> {
    let file = File::open(path).map_err(|source| Error::read(path, source))?;
    file.sync_all().map_err(|source| Error::write(path, source))
}

fn sync_folder(folder: &Path) -> Result<(), Error> {
    sync_file(folder)
}

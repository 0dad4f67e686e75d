//! The folder of policies: `step-000001`, `step-000002`, …, and `latest`, which
//! points to the newest whole one.
//!
//! A policy is written aside, synced and renamed, and only then `latest` moves.
//! Killed at any point, the folder still has its old `latest`, and what was
//! begun has a name that starts with `.tmp-`. A run that comes to no policy takes
//! away the folder and the lock file that it made.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use super::Error;
use super::hold::Hold;
use crate::model;
use crate::tensors;

const LATEST: &str = "latest";
/// What `sync-weights --rollback` leaves in a policy's folder.
const WITHDRAWN: &str = "oclaw/withdrawn";

/// The folder, held by one trainer.
#[derive(Debug)]
pub(super) struct Policies {
    folder: PathBuf,
    /// Held for as long as we write here; not yet, if the folder is still to be
    /// made.
    hold: Option<Hold>,
}

impl Policies {
    /// Opens the folder for this process alone. One that is not there is not
    /// made yet: see [`Policies::make`].
    pub(super) fn open(folder: &Path) -> Result<Self, Error> {
        let hold = match folder.symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            _ if !folder.is_dir() => {
                return Err(Error::write(folder, io::ErrorKind::NotADirectory.into()));
            }
            _ => Some(Hold::take(folder)?),
        };
        Ok(Self { folder: folder.to_owned(), hold })
    }

    /// Makes the folder, now that nothing else stands against the first step.
    pub(super) fn make(&mut self) -> Result<(), Error> {
        if self.hold.is_none() {
            self.hold = Some(Hold::take(&self.folder)?);
            if self.latest()?.is_some() {
                // It began and ended while we were getting ready.
                return Err(Error::Locked { folder: self.folder.clone() });
            }
        }
        Ok(())
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
        let aside = self.aside(step);
        fs::create_dir_all(&aside).map_err(|source| Error::write(&aside, source))?;
        Ok(aside)
    }

    /// Names the file that was to be, not the one it was written as.
    pub(super) fn named(&self, error: Error, step: u64) -> Error {
        let aside = self.aside(step);
        let named = |path: PathBuf| match path.strip_prefix(&aside) {
            Ok(file) => self.folder.join(name(step)).join(file),
            Err(_) => path,
        };
        match error {
            Error::Write { path, source } => Error::Write { path: named(path), source },
            Error::Ledger { path, problem } => Error::Ledger { path: named(path), problem },
            Error::Tensors(tensors::Error::Write { path, source }) => {
                Error::Tensors(tensors::Error::Write { path: named(path), source })
            }
            Error::Model(model::Error::Write { path, source }) => {
                Error::Model(model::Error::Write { path: named(path), source })
            }
            Error::Model(model::Error::Tensors(tensors::Error::Write { path, source })) => {
                let error = tensors::Error::Write { path: named(path), source };
                Error::Model(model::Error::Tensors(error))
            }
            error => error,
        }
    }

    fn aside(&self, step: u64) -> PathBuf {
        self.folder.join(format!(".tmp-{}-{}", name(step), std::process::id()))
    }

    /// Gives a whole policy its name, then moves `latest` to it.
    pub(super) fn publish(&mut self, aside: &Path, step: u64) -> Result<PathBuf, Error> {
        sync_tree(aside)?;
        // From here on the folder has something to keep.
        self.hold.iter_mut().for_each(Hold::keep);
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
    /// optimiser state of all but the two newest. Those that were withdrawn are no
    /// such policies: nobody goes back to them.
    pub(super) fn prune(&self, step: u64, keep: u64, optimizer: &str) -> Result<(), Error> {
        let entries =
            fs::read_dir(&self.folder).map_err(|source| Error::read(&self.folder, source))?;
        let policies = entries.flatten().filter_map(|entry| {
            let old = step_of(&entry.file_name().to_string_lossy())?;
            Some((old, entry.path()))
        });
        let policies: Vec<_> = policies.filter(|(old, _)| *old <= step).collect();
        let sound: Vec<u64> = policies
            .iter()
            .filter(|(_, path)| !path.join(WITHDRAWN).exists())
            .map(|(old, _)| *old)
            .collect();
        for (old, path) in policies {
            let age = sound.iter().filter(|newer| **newer > old).count() as u64;
            if age >= keep.max(1) {
                // Gone from view first, so that nobody loads half of it.
                let aside = self.folder.join(format!(".tmp-pruned-{old}"));
                fs::rename(&path, &aside).map_err(|source| Error::write(&path, source))?;
                fs::remove_dir_all(&aside).map_err(|source| Error::write(&aside, source))?;
            } else if age >= 2 {
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

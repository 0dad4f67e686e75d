//! Going back: `latest` points to the policy before, and nobody takes the number
//! of the one that was withdrawn for another.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use super::latest::{self, sync_folder};
use super::{Error, Policy};

/// Marks a policy that was withdrawn, inside its folder. The trainer gives its
/// number to no other policy: servers and turns know it as this one's.
pub const WITHDRAWN: &str = "oclaw/withdrawn";

/// A step back that has been thought through but not taken.
#[derive(Debug)]
pub struct Rollback {
    /// The policy to go back to.
    pub to: Policy,
    /// The policy to be withdrawn.
    pub from: Policy,
    link: PathBuf,
    /// Held for as long as this exists: no trainer goes on from the policy that
    /// is withdrawn.
    _trainer: File,
}

impl Rollback {
    /// Finds the policy before the one that `latest` points to. `given` is the
    /// `latest`, or the folder that holds it.
    pub fn plan(given: &Path) -> Result<Self, Error> {
        let refuse = |reason: String| Error::Rollback { link: given.to_owned(), reason };
        let inside = given.join("latest");
        let link = match fs::symlink_metadata(&inside) {
            Ok(_) => inside,
            Err(_) => given.to_owned(),
        };
        let kind = fs::symlink_metadata(&link).map_err(|error| refuse(error.to_string()))?;
        if kind.is_dir() {
            return Err(refuse("it is a folder, not a `latest`".to_owned()));
        }
        let from = Policy::resolve(&link, None)?;
        let folder = link.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        let trainer = held(folder)?;
        let to = before(folder, &from).map_err(|error| refuse(error.to_string()))?;
        let to = to.ok_or_else(|| Error::Oldest {
            link: given.to_owned(),
            version: from.version.clone(),
            base: base(&from.folder),
        })?;
        Ok(Self { to: Policy::resolve(&to, None)?, from, link, _trainer: trainer })
    }

    /// Marks the policy as withdrawn and points `latest` to the one before.
    pub fn commit(&self) -> Result<(), Error> {
        let failed = |error: std::io::Error| Error::Rollback {
            link: self.link.clone(),
            reason: error.to_string(),
        };
        let mark = self.from.folder.join(WITHDRAWN);
        // The mark first: a crash between the two leaves a `latest` whose number
        // is at worst not used again.
        let record = self.from.folder.join("oclaw");
        fs::create_dir_all(&record).map_err(failed)?;
        let file = File::create(&mark).map_err(failed)?;
        file.sync_all().map_err(failed)?;
        sync_folder(&record).and_then(|()| sync_folder(&self.from.folder)).map_err(failed)?;
        let name = self.to.folder.file_name().unwrap_or_default();
        latest::point(&self.link, name).map_err(failed)
    }
}

/// Takes the trainer's lock, if the folder has one.
fn held(folder: &Path) -> Result<File, Error> {
    let path = folder.join(".lock");
    let failed = |source| Error::Lock { path: path.clone(), source };
    let file = File::options().create(true).append(true).open(&path).map_err(failed)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::Error(source)) => Err(failed(source)),
        Err(TryLockError::WouldBlock) => Err(Error::Training { folder: folder.to_owned() }),
    }
}

/// Returns the model that a policy was trained from.
fn base(policy: &Path) -> Option<PathBuf> {
    let record = fs::read(policy.join("oclaw/train.json")).ok()?;
    let record: serde_json::Value = serde_json::from_slice(&record).ok()?;
    record["base"]["folder"].as_str().map(PathBuf::from)
}

/// Finds the newest policy before another that was not withdrawn itself.
fn before(folder: &Path, from: &Policy) -> std::io::Result<Option<PathBuf>> {
    let step = |name: &str| name.strip_prefix("step-")?.parse::<u64>().ok();
    let name = from.folder.file_name().unwrap_or_default().to_string_lossy();
    let newest = step(&name).unwrap_or_default();
    let mut found: Option<(u64, PathBuf)> = None;
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let Some(old) = step(&name).filter(|old| *old < newest) else { continue };
        if !path.join(WITHDRAWN).exists() && found.as_ref().is_none_or(|(best, _)| *best < old) {
            found = Some((old, path));
        }
    }
    Ok(found.map(|(_, path)| path))
}

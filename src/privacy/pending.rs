//! What an interrupted run was about. The rows that name the turns may be gone by
//! then, and copies of them still there.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::inventory::{remove_file, sync_folder};
use super::{Error, Whose};

/// How the names of the files that note it begin. Each aim has its own.
pub(super) const PREFIX: &str = ".forgetting-";

/// Turns that a run has begun to remove. Ids only, no words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pending {
    /// Whose they are.
    pub whose: Whose,
    /// Their ids.
    pub turn_ids: BTreeSet<String>,
    /// Their places: session and number.
    pub places: BTreeSet<(String, u32)>,
}

impl Pending {
    /// Reads what an interrupted run of the same aim has left in a folder.
    pub fn read(folder: &Path, whose: &Whose) -> Result<Option<Self>, Error> {
        let path = path(folder, whose)?;
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(Error::read(&path, source)),
        };
        // It is renamed whole; what is not ours is left alone.
        let pending: Option<Self> = serde_json::from_slice(&bytes).ok();
        Ok(pending.filter(|pending| pending.whose == *whose))
    }

    /// Writes it down, before anything is removed.
    pub fn write(&self, folder: &Path) -> Result<(), Error> {
        let path = path(folder, &self.whose)?;
        let write = |source| Error::write(&path, source);
        let mut aside =
            tempfile::Builder::new().prefix(".tmp-").tempfile_in(folder).map_err(write)?;
        let bytes = serde_json::to_vec(self).map_err(|error| write(error.into()))?;
        aside.write_all(&bytes).map_err(write)?;
        aside.as_file().sync_all().map_err(write)?;
        aside.persist(&path).map_err(|error| write(error.error))?;
        sync_folder(&path)
    }

    /// Removes it, after everything is.
    pub fn done(folder: &Path, whose: &Whose) -> Result<(), Error> {
        let path = path(folder, whose)?;
        match File::open(&path) {
            Ok(_) => remove_file(&path),
            Err(_) => Ok(()),
        }
    }
}

/// The aim may be any text: its hash is a name, and tells nobody.
fn path(folder: &Path, whose: &Whose) -> Result<PathBuf, Error> {
    let aim = serde_json::to_vec(whose).map_err(|error| Error::write(folder, error.into()))?;
    let hash: String = Sha256::digest(&aim).iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(folder.join(format!("{PREFIX}{}", &hash[..16])))
}

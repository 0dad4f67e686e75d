//! Objects on this machine: a bounded folder, shared by every process that is
//! given it. An entry that somebody reads is locked and stays; the others go, the
//! one longest unused first, when room is needed.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};

use super::{Error, Object, Store};

/// What a process leaves that was killed while it fetched.
const ASIDE: &str = ".tmp-fetch-";
/// A file so young may not have its lock yet.
const YOUNG: Duration = Duration::from_secs(60);

/// The folder.
#[derive(Debug, Clone)]
pub struct Cache {
    folder: PathBuf,
    limit: u64,
}

/// An object on this machine. It stays there as long as this does.
#[derive(Debug)]
pub struct Fetched {
    /// Where it is.
    pub path: PathBuf,
    /// Its address.
    pub url: String,
    _lock: File,
}

impl Cache {
    /// Uses a folder, which is made when it is needed, for so many bytes. One
    /// object that is larger than that is kept as long as it is read.
    pub fn new(folder: &Path, limit: u64) -> Self {
        Self { folder: folder.to_owned(), limit }
    }

    /// Returns the folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns an object as a file, copying it unless it is here already.
    pub async fn fetch(&self, store: &Store, object: &Object) -> Result<Fetched, Error> {
        let url = store.url(&object.name);
        let folder = self.folder.join("objects").join(key(&url, object));
        let path = folder.join(object.name.rsplit('/').next().unwrap_or_default());
        let failed = |source| Error::File { path: path.clone(), source };
        if let Some(lock) = held(&path, object.size).map_err(failed)? {
            return Ok(Fetched { path, url, _lock: lock });
        }
        fs::create_dir_all(&folder).map_err(failed)?;
        self.make_room(object.size).map_err(failed)?;
        // The folder may have been empty, and thus removed.
        fs::create_dir_all(&folder).map_err(failed)?;
        let aside = tempfile::Builder::new().prefix(ASIDE).tempfile_in(&folder).map_err(failed)?;
        let (mut file, aside) = aside.into_parts();
        file.lock_shared().map_err(failed)?;
        store.fetch(object, &path, &mut file).await?;
        aside.persist(&path).map_err(|error| failed(error.error))?;
        Ok(Fetched { path, url, _lock: file })
    }

    /// Removes what nobody reads until `more` bytes fit.
    fn make_room(&self, more: u64) -> io::Result<()> {
        let mut entries = Vec::new();
        for folder in folders(&self.folder.join("objects"))? {
            for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
                let Ok(facts) = entry.metadata() else { continue };
                let used = facts.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                let left = entry.file_name().as_encoded_bytes().starts_with(ASIDE.as_bytes());
                entries.push((!left, used, facts.len(), entry.path()));
            }
        }
        let mut size: u64 = entries.iter().map(|(_, _, size, _)| size).sum();
        entries.sort();
        for (whole, used, bytes, path) in entries {
            let young = used.elapsed().is_ok_and(|age| age < YOUNG);
            if (whole && size.saturating_add(more) <= self.limit) || (!whole && young) {
                continue;
            }
            if let Ok(file) = File::open(&path)
                && file.try_lock().is_ok()
                && fs::remove_file(&path).is_ok()
            {
                size -= bytes;
                // It has nothing else in it, unless somebody is fetching the same.
                let _ = path.parent().map(fs::remove_dir);
            }
        }
        Ok(())
    }
}

/// Opens and locks an entry, if it is there and whole.
fn held(path: &Path, size: u64) -> io::Result<Option<File>> {
    let file = match File::options().read(true).write(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    file.lock_shared()?;
    // Before it was locked it may have been removed, or replaced.
    let same = fs::metadata(path).is_ok_and(|there| {
        file.metadata().is_ok_and(|here| here.ino() == there.ino() && here.len() == size)
    });
    if same {
        file.set_modified(SystemTime::now())?;
    }
    Ok(same.then_some(file))
}

fn folders(folder: &Path) -> io::Result<Vec<PathBuf>> {
    match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        entries => entries?.map(|entry| Ok(entry?.path())).collect(),
    }
}

/// Names an entry by all that tells one object from another.
fn key(url: &str, object: &Object) -> String {
    let Object { size, tag, modified, .. } = object;
    let tag = tag.as_deref().unwrap_or_default();
    let digest = Sha256::digest(format!("{url}\n{size}\n{tag}\n{modified}"));
    digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

//! Files that have not got their name yet: written aside, made durable, checked and
//! renamed.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use tempfile::TempPath;

use super::aside::{aside_of, folder_of, start};
use super::{Error, Format, parquet_file, stream};

/// How the name of a shard begins that is not finished.
pub(super) const SHARD_ASIDE: &str = ".tmp-shard-";

/// Temporary files of all sinks that are not finished.
static UNFINISHED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// Removes what unfinished sinks have written so far. For a signal's sake, just
/// before the process ends.
pub fn discard_unfinished() {
    for path in UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        // It may have been renamed or removed in this very moment.
        let _ = fs::remove_file(path);
    }
}

/// Takes the name of a temporary file out of an error: nobody asked for that file.
fn without_name(error: io::Error) -> io::Error {
    match error.to_string().rsplit_once(" at path ") {
        Some((reason, _)) => io::Error::new(error.kind(), reason),
        None => error,
    }
}

/// What to do about a file that has the final name already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Existing {
    Replaced,
    Refused,
}

/// Opens a path for writing. What is no plain file (a pipe, `/dev/null`) cannot
/// be replaced and is written to directly.
pub(super) fn open(path: &Path, existing: Existing) -> io::Result<(File, Option<Aside>, Format)> {
    let target = match fs::metadata(path) {
        Ok(there) if there.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
        Ok(there) if !there.is_file() => {
            let file = File::options().write(true).open(path)?;
            return Ok((file, None, Format::Ipc));
        }
        // A link stays a link: what it points to is replaced.
        Ok(_) => fs::canonicalize(path)?,
        Err(_) => path.to_owned(),
    };
    let folder = folder_of(&target);
    let temporary = match existing {
        Existing::Replaced => aside_of(&target),
        // Whoever writes shards here next removes what is left of them.
        Existing::Refused => start(&folder, SHARD_ASIDE),
    };
    let temporary = temporary.map_err(without_name)?;
    let (file, temporary) = temporary.into_parts();
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner).insert(temporary.to_path_buf());
    let aside =
        Aside { file: file.try_clone()?, temporary: Some(temporary), target, folder, existing };
    Ok((file, Some(aside), Format::Parquet))
}

/// A file that has not got its final name yet.
pub(super) struct Aside {
    file: File,
    temporary: Option<TempPath>,
    target: PathBuf,
    folder: PathBuf,
    existing: Existing,
}

impl Aside {
    pub(super) fn publish(mut self, name: &str, format: Format) -> Result<(), Error> {
        let write = |source| Error::Write { name: name.to_owned(), source };
        self.file.sync_all().map_err(write)?;
        self.check(name, format)?;
        let Some(temporary) = self.temporary.take() else { return Ok(()) };
        let path = temporary.to_path_buf();
        let renamed = match self.existing {
            Existing::Replaced => temporary.persist(&self.target),
            Existing::Refused => temporary.persist_noclobber(&self.target),
        };
        UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner).remove(&path);
        renamed.map_err(|error| write(error.error))?;
        File::open(&self.folder).and_then(|folder| folder.sync_all()).map_err(write)
    }

    /// Reads the end mark back: a disk that lost it must not be believed.
    fn check(&mut self, name: &str, format: Format) -> Result<(), Error> {
        let write = |source| Error::Write { name: name.to_owned(), source };
        let length = self.file.seek(SeekFrom::End(0)).map_err(write)?;
        match format {
            Format::Parquet => parquet_file::check_tail(name, &self.file, length),
            Format::Ipc => {
                let mut tail = [0; 8];
                self.file.read_exact_at(&mut tail, length.saturating_sub(8)).map_err(write)?;
                match tail == *stream::END {
                    true => Ok(()),
                    false => {
                        let what = "the end mark just written is not there".to_owned();
                        Err(Error::Cut { name: name.to_owned(), what })
                    }
                }
            }
        }
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        if let Some(temporary) = self.temporary.take() {
            let mut unfinished = UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner);
            unfinished.remove(&*temporary);
        }
    }
}

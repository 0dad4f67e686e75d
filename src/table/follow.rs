//! A folder of shards that somebody else fills, looked at again and again: which
//! shards are to be done now, and a claim on the folder that they are done into.
//!
//! It is looked at by reading it, which works on every file system. Nothing in
//! here waits: the caller asks again when it likes. A shard that vanishes or is
//! replaced while it is looked at is no error.

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata, TryLockError};
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::Error;
use super::parquet_file::ParquetFile;
use super::unfinished::SHARD_ASIDE;

/// A finished shard of a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shard {
    /// Where it is.
    pub path: PathBuf,
    /// Its name in the folder.
    pub name: OsString,
    /// Tells it from another file that takes its name later.
    pub stamp: Stamp,
}

/// What changes when a file, or an object of a store, is written or replaced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stamp {
    /// Of a file.
    File {
        /// Which file it is on its file system.
        inode: u64,
        /// Its size in bytes.
        length: u64,
        /// When it was written, in seconds and nanoseconds.
        modified: (i64, i64),
    },
    /// Of an object.
    Object {
        /// Its size in bytes.
        size: u64,
        /// Its entity tag.
        tag: Option<String>,
        /// When it was written, in milliseconds.
        modified: i64,
    },
}

impl Shard {
    /// Tells whether it was taken away. A link that leads nowhere is still there.
    pub fn is_gone(&self) -> bool {
        matches!(fs::symlink_metadata(&self.path), Err(error) if error.kind() == io::ErrorKind::NotFound)
    }
}

impl Stamp {
    fn of(facts: &Metadata) -> Self {
        Self::File {
            inode: facts.ino(),
            length: facts.len(),
            modified: (facts.mtime(), facts.mtime_nsec()),
        }
    }
}

/// A folder that is followed.
#[derive(Debug)]
pub struct Follow {
    folder: PathBuf,
    /// First `created_at` of the shards that were not done when last looked at.
    first: HashMap<OsString, (Stamp, Option<i64>)>,
}

impl Follow {
    /// Starts to follow a folder, which need not be there yet.
    pub fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), first: HashMap::new() }
    }

    /// Returns the shards that are neither done, by their names, nor `given_up` as
    /// they are, ordered by their first `created_at` and name. Those that tell no
    /// time, for they are empty or broken, come last; so does a link that leads
    /// nowhere, which whoever does the shard finds out.
    pub fn due(
        &mut self,
        done: &dyn Fn(&OsStr) -> bool,
        given_up: &dyn Fn(&Shard) -> bool,
    ) -> Result<Vec<Shard>, Error> {
        let mut due = Vec::new();
        for name in shard_names(&self.folder)?.into_iter().filter(|name| !done(name)) {
            let path = self.folder.join(&name);
            let Some(facts) = facts(&path)? else { continue };
            let shard = Shard { path, name, stamp: Stamp::of(&facts) };
            if !facts.is_dir() && !given_up(&shard) {
                due.push(shard);
            }
        }
        let mut first = HashMap::new();
        for Shard { path, name, stamp } in &due {
            let known = self.first.get(name).filter(|(of, first)| of == stamp && first.is_some());
            let at = || File::open(path).ok().and_then(first_created_at);
            let at = known.map_or_else(at, |(_, first)| *first);
            first.insert(name.clone(), (stamp.clone(), at));
        }
        self.first = first;
        let at = |shard: &Shard| self.first.get(&shard.name).and_then(|(_, first)| *first);
        due.sort_by_cached_key(|shard| (at(shard).is_none(), at(shard), shard.name.clone()));
        Ok(due)
    }
}

/// Returns the names of the finished shards of a folder.
pub fn shard_names(folder: &Path) -> Result<HashSet<OsString>, Error> {
    let read = |source| Error::Read { name: folder.display().to_string(), source };
    let mut found = HashSet::new();
    for entry in fs::read_dir(folder).map_err(read)? {
        let name = entry.map_err(read)?.file_name();
        if is_shard(&name) {
            found.insert(name);
        }
    }
    Ok(found)
}

/// Returns what tells one file from another; nothing if it has vanished. A link that
/// cannot be followed has facts of its own.
fn facts(path: &Path) -> Result<Option<Metadata>, Error> {
    match fs::metadata(path).or_else(|_| fs::symlink_metadata(path)) {
        Ok(facts) => Ok(Some(facts)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::Read { name: path.display().to_string(), source }),
    }
}

/// Returns whether a finished shard is named so. Names that start with a dot are
/// unfinished, or bookkeeping.
pub fn is_shard(name: &OsStr) -> bool {
    let bytes = name.as_encoded_bytes();
    bytes.ends_with(b".parquet") && !bytes.starts_with(b".")
}

/// Returns the first `created_at` of a shard, of which the end may be enough. What
/// cannot be read tells no time; whoever does the shard says what is wrong.
pub fn first_created_at(file: File) -> Option<i64> {
    let parquet = ParquetFile::open("a shard", Arc::new(file)).ok()?;
    parquet.first_created_at().ok()?
}

/// Returns the turn ids of a shard, of which that column alone is read. What cannot be
/// read tells none; whoever does the shard says what is wrong.
pub fn turn_ids(file: File) -> Option<Vec<String>> {
    texts(file, ["turn_id"])?.into_iter().map(|[id]| id).collect()
}

/// Returns the texts of some columns of a shard, row by row, of which those alone are
/// read. A column that is not there, or is none of texts, gives nulls.
pub fn texts<const N: usize>(file: File, columns: [&str; N]) -> Option<Vec<[Option<String>; N]>> {
    ParquetFile::open("a shard", Arc::new(file)).ok()?.texts(columns).ok()
}

/// Returns how many rows a shard has by its footer.
pub fn row_count(file: File) -> Option<u64> {
    Some(ParquetFile::open("a shard", Arc::new(file)).ok()?.row_count())
}

/// Returns where some columns of a shard are in its file, by its footer.
pub fn places(file: File, columns: &[&str]) -> Option<Vec<Range<u64>>> {
    ParquetFile::open("a shard", Arc::new(file)).ok()?.places(columns)
}

/// A folder that this process alone puts shards into. The system ends the claim
/// with the process, however that ends.
#[derive(Debug)]
pub struct Claim {
    _lock: File,
}

impl Claim {
    /// Claims a folder, making it if need be, and removes what a killed process
    /// has left in it unfinished.
    pub fn take(folder: &Path) -> Result<Self, Error> {
        let write = |path: &Path, source| Error::Write { name: path.display().to_string(), source };
        fs::create_dir_all(folder).map_err(|source| write(folder, source))?;
        let path = folder.join(".lock");
        let lock = File::options().create(true).append(true).open(&path);
        let lock = lock.map_err(|source| write(&path, source))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(Error::InUse { name: folder.display().to_string() });
            }
            Err(TryLockError::Error(source)) => return Err(write(&path, source)),
        }
        discard_abandoned(folder).map_err(|source| write(folder, source))?;
        Ok(Self { _lock: lock })
    }
}

/// Whoever writes shards here holds the lock, so that what has the name of an
/// unfinished one now belongs to nobody.
fn discard_abandoned(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        if name.as_encoded_bytes().starts_with(SHARD_ASIDE.as_bytes()) {
            match fs::remove_file(folder.join(name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
    }
    Ok(())
}

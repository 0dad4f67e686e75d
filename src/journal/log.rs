//! The files of the log: one that grows, and what start-up found damaged.

use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::Error;
use super::record::{self, Record};

/// The log that is being written.
#[derive(Debug)]
pub(super) struct Log {
    folder: PathBuf,
    file: File,
    number: u64,
    /// Length up to the last whole record.
    length: u64,
    /// Length when it was begun.
    base: u64,
    dirty: bool,
}

/// What the logs of earlier runs hold.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) records: Vec<Record>,
    pub(super) damaged: u64,
    /// Each file, and whether all of it could be read.
    files: Vec<(PathBuf, bool)>,
    last: u64,
}

impl Log {
    /// Reads the logs of earlier runs, in order.
    pub(super) fn find(folder: &Path) -> Result<Found, Error> {
        let failed = |path: &Path, source| Error::Folder { path: path.to_owned(), source };
        fs::create_dir_all(folder).map_err(|source| failed(folder, source))?;
        let mut paths = Vec::new();
        for entry in fs::read_dir(folder).map_err(|source| failed(folder, source))? {
            let path = entry.map_err(|source| failed(folder, source))?.path();
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
            let number = name.as_deref().and_then(|name| name.strip_suffix(".log"));
            if let Some(number) = number.and_then(|number| number.parse::<u64>().ok()) {
                paths.push((number, path));
            }
        }
        paths.sort();
        let mut found = Found::default();
        for (number, path) in paths {
            let bytes = fs::read(&path).map_err(|source| failed(&path, source))?;
            let mut contents = record::read(&bytes);
            found.records.append(&mut contents.records);
            found.damaged += contents.damaged;
            found.files.push((path, contents.damaged == 0));
            found.last = number;
        }
        Ok(found)
    }

    /// Begins a new log with what the old ones add up to, and then removes
    /// these. A damaged one is moved to `aside/` instead: it may hold what
    /// nobody could read.
    pub(super) fn begin(folder: &Path, found: &Found, records: &[Record]) -> Result<Self, Error> {
        let number = found.last + 1;
        let failed = |source| Error::Folder { path: folder.to_owned(), source };
        let log = Self::create(folder, number, records).map_err(failed)?;
        for (path, whole) in &found.files {
            match whole {
                true => fs::remove_file(path).map_err(failed)?,
                false => set_aside(folder, path).map_err(failed)?,
            }
        }
        sync_folder(folder).map_err(failed)?;
        Ok(log)
    }

    /// Appends whole records. On failure the file is as before.
    pub(super) fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        if let Err(error) = self.file.write_all(bytes) {
            // A part of it may be there; the next record must not follow it.
            self.file.set_len(self.length)?;
            return Err(error);
        }
        self.length += bytes.len() as u64;
        self.dirty = true;
        Ok(())
    }

    /// Makes the disk itself hold what was appended.
    pub(super) fn sync(&mut self) -> io::Result<()> {
        if self.dirty {
            self.file.sync_data()?;
            self.dirty = false;
        }
        Ok(())
    }

    /// Returns the file for another thread to sync; what was appended so far counts
    /// as synced unless it says otherwise.
    pub(super) fn syncing(&mut self) -> io::Result<File> {
        let file = self.file.try_clone()?;
        self.dirty = false;
        Ok(file)
    }

    /// Says that what was appended may not be on the disk.
    pub(super) fn not_synced(&mut self) {
        self.dirty = true;
    }

    /// Returns whether something was appended since the last sync.
    pub(super) fn is_dirty(&self) -> bool {
        self.dirty
    }

    /// Returns by how many bytes the log has grown since it was begun.
    pub(super) fn growth(&self) -> u64 {
        self.length - self.base
    }

    /// Returns the length with which the log was begun.
    pub(super) fn base(&self) -> u64 {
        self.base
    }

    /// Goes on in a new log that begins with these records.
    pub(super) fn compact(&mut self, records: &[Record]) -> io::Result<()> {
        let next = Self::create(&self.folder, self.number + 1, records)?;
        let old = path(&self.folder, self.number);
        *self = next;
        fs::remove_file(old)?;
        sync_folder(&self.folder)
    }

    fn create(folder: &Path, number: u64, records: &[Record]) -> io::Result<Self> {
        let mut bytes = Vec::new();
        for record in records {
            record.frame(&mut bytes)?;
        }
        let aside = folder.join(".tmp-log");
        // An unfinished one holds only what the old log still holds.
        let mut file = File::create(&aside)?;
        file.write_all(&bytes)?;
        file.sync_all()?;
        drop(file);
        let path = path(folder, number);
        fs::rename(&aside, &path)?;
        sync_folder(folder)?;
        let file = OpenOptions::new().append(true).open(&path)?;
        let length = bytes.len() as u64;
        Ok(Self { folder: folder.to_owned(), file, number, length, base: length, dirty: false })
    }
}

fn path(folder: &Path, number: u64) -> PathBuf {
    folder.join(format!("{number:08}.log"))
}

fn set_aside(folder: &Path, path: &Path) -> io::Result<()> {
    let aside = folder.join("aside");
    fs::create_dir_all(&aside)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut target = aside.join(&name);
    let mut number = 1;
    while target.exists() {
        target = aside.join(format!("{name}.{number}"));
        number += 1;
    }
    fs::rename(path, target)
}

fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// The names of the shards that this spool folder's journal has written. A
/// shard that is not among them was finished by a run that was killed before it
/// could say so, or is somebody else's.
#[derive(Debug)]
pub(super) struct ShardList {
    path: PathBuf,
    names: HashSet<String>,
}

impl ShardList {
    pub(super) fn read(folder: &Path) -> Result<Self, Error> {
        let path = folder.join("shards");
        let text = match fs::read(&path) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(source) => return Err(Error::Folder { path, source }),
        };
        Ok(Self { path, names: text.lines().map(str::to_owned).collect() })
    }

    /// Lists the shards of the spool folder that are not in the list.
    pub(super) fn unlisted(&self, spool: &Path) -> io::Result<Vec<PathBuf>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(spool)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.ends_with(".parquet") && !name.starts_with('.') && !self.names.contains(&name) {
                found.push(path);
            }
        }
        Ok(found)
    }

    pub(super) fn add(&mut self, name: &str) -> io::Result<()> {
        let mut file = OpenOptions::new().create(true).append(true).open(&self.path)?;
        file.write_all(format!("{name}\n").as_bytes())?;
        self.names.insert(name.to_owned());
        Ok(())
    }
}

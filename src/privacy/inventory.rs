//! What lies in a run's folders, by what has to be done about it.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::Error;
use crate::table::{self, Source};
use crate::trajectory;

/// The files of a run.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Inventory {
    /// Tables of turns, those of spool folders last: the other ones are copies.
    pub tables: Vec<PathBuf>,
    /// What an interrupted writer left.
    pub unfinished: Vec<PathBuf>,
    /// Spool folders.
    pub spools: Vec<PathBuf>,
    /// Policies that keep a ledger.
    pub policies: Vec<PathBuf>,
    /// Files of other kinds.
    pub others: Vec<PathBuf>,
}

/// Looks through folders, and takes files as they are named. Links are not
/// followed: what they point to is elsewhere, or seen anyway.
pub fn inventory(roots: &[PathBuf]) -> Result<Inventory, Error> {
    let mut found = Inventory::default();
    for root in roots {
        let kind = fs::metadata(root).map_err(|source| Error::read(root, source))?;
        match kind.is_dir() {
            true => folder(root, &mut found)?,
            false => file(root, &mut found)?,
        }
    }
    for list in [
        &mut found.tables,
        &mut found.unfinished,
        &mut found.spools,
        &mut found.policies,
        &mut found.others,
    ] {
        let unique: BTreeSet<PathBuf> = list.drain(..).collect();
        list.extend(unique);
    }
    let spools = found.spools.clone();
    let in_spool = |path: &PathBuf| spools.iter().any(|spool| path.parent() == Some(spool));
    found.tables.sort_by_key(|path| in_spool(path));
    Ok(found)
}

fn folder(path: &Path, found: &mut Inventory) -> Result<(), Error> {
    if path.join("oclaw/ledger.parquet").is_file() {
        found.policies.push(path.to_owned());
        return Ok(());
    }
    if path.join(".journal").is_dir() || path.join("feedback").is_dir() {
        found.spools.push(path.to_owned());
    }
    let read = |source| Error::read(path, source);
    for entry in fs::read_dir(path).map_err(read)? {
        let entry = entry.map_err(read)?;
        let kind = entry.file_type().map_err(read)?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let inner = entry.path();
        let journals = [".journal", "feedback"].contains(&name.as_ref())
            && found.spools.iter().any(|spool| spool == path);
        if kind.is_file() && name.starts_with(".tmp-") {
            found.unfinished.push(inner);
        } else if kind.is_dir() && !journals && !name.starts_with(".tmp-") {
            folder(&inner, found)?;
        } else if kind.is_file() {
            file(&inner, found)?;
        }
    }
    Ok(())
}

fn file(path: &Path, found: &mut Inventory) -> Result<(), Error> {
    match is_table(path)? {
        true => found.tables.push(path.to_owned()),
        false => found.others.push(path.to_owned()),
    }
    Ok(())
}

/// Tells whether a file is a table of turns. One that should be and cannot be
/// read is an error: nobody could say what is in it.
fn is_table(path: &Path) -> Result<bool, Error> {
    let mut head = [0; 4];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut head));
    match read {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
        Err(source) => return Err(Error::read(path, source)),
        Ok(()) => {}
    }
    if head != *b"PAR1" && head != [0xff; 4] {
        return Ok(false);
    }
    match Source::open(&[path.to_owned()]) {
        Ok(_) => Ok(true),
        Err(table::Error::Schema { source: trajectory::Error::MissingColumn { .. }, .. }) => {
            Ok(false)
        }
        Err(error) => Err(error.into()),
    }
}

/// Removes a file for good, as far as a file system does that. One that is gone
/// already is fine.
pub fn remove_file(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Error::write(path, error)),
        _ => sync_folder(path),
    }
}

/// Makes the disk itself know what became of a file's name.
pub(super) fn sync_folder(path: &Path) -> Result<(), Error> {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    synced.map_err(|source| Error::write(folder, source))
}

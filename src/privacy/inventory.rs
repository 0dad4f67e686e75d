//! What lies in a run's folders, by what has to be done about it.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::pending;
use super::{Error, Left};
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
    /// Places that are not looked into, and why.
    pub left: Vec<(PathBuf, Left)>,
    /// Folders that were looked through, by their one true name.
    seen: BTreeSet<PathBuf>,
}

/// Looks through folders, and takes files as they are named. Links are not
/// followed: those that lead to a place that is not seen anyway are told. So is
/// what cannot be read; only that a root is there is demanded.
pub fn inventory(roots: &[PathBuf]) -> Result<Inventory, Error> {
    let mut found = Inventory::default();
    let mut links = Vec::new();
    let mut named = BTreeSet::new();
    for root in roots {
        let read = |source| Error::read(root, source);
        let kind = fs::metadata(root).map_err(read)?;
        let linked = fs::symlink_metadata(root).map_err(read)?.is_symlink();
        match (kind.is_dir(), linked) {
            (true, _) => folder(root, &mut found, &mut links)?,
            (false, false) => file(root, &mut found),
            // The words are in what the link points to.
            (false, true) => file(&fs::canonicalize(root).map_err(read)?, &mut found),
        }
        named.extend(fs::canonicalize(root));
    }
    for link in links {
        let target = fs::read_link(&link).unwrap_or_default();
        if !is_seen(&link, &target, &found.seen, &named) {
            found.left.push((link, Left::Link(target)));
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

/// Tells whether what a link points to is looked at by its own name, or is not
/// there in a folder that is.
fn is_seen(
    link: &Path,
    target: &Path,
    seen: &BTreeSet<PathBuf>,
    named: &BTreeSet<PathBuf>,
) -> bool {
    let known = |path: &Path| seen.contains(path) || named.contains(path);
    let beside = link.parent().unwrap_or(Path::new("."));
    match fs::canonicalize(link) {
        Ok(real) if real.is_dir() => known(&real),
        Ok(real) => {
            named.contains(&real) || real.parent().is_some_and(|parent| seen.contains(parent))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let parent = beside.join(target).parent().map(fs::canonicalize);
            parent.is_some_and(|parent| parent.is_ok_and(|parent| seen.contains(&parent)))
        }
        Err(_) => false,
    }
}

fn folder(path: &Path, found: &mut Inventory, links: &mut Vec<PathBuf>) -> Result<(), Error> {
    let real = fs::canonicalize(path).map_err(|source| Error::read(path, source))?;
    if path.join("oclaw/ledger.parquet").is_file() {
        found.policies.push(path.to_owned());
        found.seen.insert(real);
        return Ok(());
    }
    let is_spool = path.join(".journal").is_dir();
    if is_spool {
        found.spools.push(path.to_owned());
    }
    let read = |source| Error::read(path, source);
    let entries = fs::read_dir(path).map_err(read)?;
    found.seen.insert(real.clone());
    for entry in entries {
        let entry = entry.map_err(read)?;
        let kind = entry.file_type().map_err(read)?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let inner = entry.path();
        let journals = is_spool && [".journal", "feedback"].contains(&name.as_ref());
        if kind.is_file() && name.starts_with(".tmp-") {
            found.unfinished.push(inner);
        } else if kind.is_dir() {
            // An unfinished folder may be a whole policy.
            let looked = match journals {
                true => beside_journal(&inner, found, links),
                false => folder(&inner, found, links),
            };
            if let Err(error) = looked {
                found.left.push((inner, Left::unreadable(&error)));
            }
        } else if kind.is_symlink() {
            links.push(inner);
        } else if kind.is_file() && !name.starts_with(pending::PREFIX) {
            file(&inner, found);
        }
    }
    Ok(())
}

/// Looks for what the journal itself does not know in its own folders.
fn beside_journal(
    path: &Path,
    found: &mut Inventory,
    links: &mut Vec<PathBuf>,
) -> Result<(), Error> {
    let read = |source| Error::read(path, source);
    let is_journal = path.file_name().is_some_and(|name| name == ".journal");
    found.seen.insert(fs::canonicalize(path).map_err(read)?);
    for entry in fs::read_dir(path).map_err(read)? {
        let entry = entry.map_err(read)?;
        let kind = entry.file_type().map_err(read)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let inner = entry.path();
        if kind.is_symlink() {
            links.push(inner);
        } else if kind.is_dir() && is_journal && name == "aside" {
            found.seen.insert(fs::canonicalize(&inner).map_err(read)?);
        } else if kind.is_dir() {
            folder(&inner, found, links)?;
        } else if !is_known(&name, is_journal) {
            file(&inner, found);
        }
    }
    Ok(())
}

/// Tells whether the journal cleans a file itself, or it holds names of shards only.
fn is_known(name: &str, is_journal: bool) -> bool {
    let own = match is_journal {
        true => name == "shards" || name.ends_with(".log"),
        false => name.ends_with(".jsonl"),
    };
    (own && !name.starts_with('.')) || name.starts_with(".tmp-")
}

fn file(path: &Path, found: &mut Inventory) {
    match is_table(path) {
        Ok(true) => found.tables.push(path.to_owned()),
        Ok(false) => found.others.push(path.to_owned()),
        Err(error) => found.left.push((path.to_owned(), Left::unreadable(&error))),
    }
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

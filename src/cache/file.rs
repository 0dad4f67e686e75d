//! The SQLite file itself: opened, laid out, locked, set aside.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rusqlite::{Connection, ErrorCode};

use super::{Error, seconds};

/// Marks the file as ours: `oclw`.
const APPLICATION: i64 = 0x6f63_6c77;

/// Bytes of SQLite's header.
const HEAD: u64 = 100;

/// Version of the table's layout.
const VERSION: i64 = 1;

/// Longest that one process waits for another's write.
const PATIENCE: Duration = Duration::from_secs(30);

const LAYOUT: &str = "
    CREATE TABLE answers (
        key BLOB PRIMARY KEY NOT NULL,
        kind TEXT NOT NULL,
        created INTEGER NOT NULL,
        answer TEXT NOT NULL
    );
";

/// Lets one process at a time open the file or set it aside: SQLite does not wait
/// for its turn to make a file a WAL one, and two that find the same damage must
/// not rename each other's new file. The lock ends when it is dropped.
pub(super) fn lock(path: &Path) -> Result<File, Error> {
    let locked = || {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let file = File::options().create(true).append(true).open(beside(path, ".lock"))?;
        file.lock()?;
        Ok(file)
    };
    locked().map_err(|error: std::io::Error| unusable(path, &error))
}

/// Refuses a file that is not ours, without touching anything. Ours has our lock
/// file beside it, or our mark in its head; damage may cost it one of the two.
pub(super) fn check(path: &Path) -> Result<(), Error> {
    let foreign = |what| Err(Error::Foreign { path: path.to_owned(), what });
    let mut head = Vec::new();
    match File::open(path) {
        Ok(file) if path.is_file() => {
            file.take(HEAD).read_to_end(&mut head).map_err(|error| unusable(path, &error))?;
        }
        // What is there and no file is told by who opens it.
        _ => return Ok(()),
    }
    if head.is_empty() || beside(path, ".lock").exists() {
        return Ok(());
    }
    if !head.starts_with(b"SQLite format 3\0") {
        return foreign("no database");
    }
    let mark = head.get(68..72).and_then(|bytes| bytes.try_into().ok()).map(i32::from_be_bytes);
    match mark.map(i64::from) {
        Some(APPLICATION) => Ok(()),
        _ => foreign("another database"),
    }
}

/// Opens a connection to a file that is ours, or to be.
pub(super) fn connect(path: &Path) -> Result<Connection, Error> {
    let failure = |error| failure(path, &error);
    let mut connection = Connection::open(path).map_err(failure)?;
    connection.busy_timeout(PATIENCE).map_err(failure)?;
    let number = |connection: &Connection, question: &str| {
        connection.query_row(question, [], |row| row.get::<_, i64>(0)).map_err(failure)
    };
    let tables = number(&connection, "SELECT count(*) FROM sqlite_schema")?;
    if tables == 0 {
        // Must be said before the first page is written.
        connection.pragma_update(None, "auto_vacuum", "INCREMENTAL").map_err(failure)?;
        connection.pragma_update(None, "journal_mode", "WAL").map_err(failure)?;
        let transaction = connection.transaction().map_err(failure)?;
        transaction.execute_batch(LAYOUT).map_err(failure)?;
        transaction.pragma_update(None, "application_id", APPLICATION).map_err(failure)?;
        transaction.pragma_update(None, "user_version", VERSION).map_err(failure)?;
        transaction.commit().map_err(failure)?;
    }
    if number(&connection, "PRAGMA application_id")? != APPLICATION {
        return Err(Error::Foreign { path: path.to_owned(), what: "another database" });
    }
    let found = number(&connection, "PRAGMA user_version")?;
    if found > VERSION {
        return Err(Error::Newer { path: path.to_owned(), found, known: VERSION });
    }
    // A commit is in the operating system's hands when it returns, which is enough
    // against the end of this process; a power cut may cost the last answers.
    connection.pragma_update(None, "synchronous", "NORMAL").map_err(failure)?;
    // Reads the table's root, which a cut file lacks.
    let probe = "SELECT count(*) FROM (SELECT answer FROM answers LIMIT 1)";
    number(&connection, probe)?;
    Ok(connection)
}

/// Renames the file and what SQLite keeps beside it.
pub(super) fn set_aside(path: &Path) -> Result<PathBuf, Error> {
    let now = seconds(SystemTime::now());
    let name = |attempt: u32| match attempt {
        0 => beside(path, &format!(".damaged-{now}")),
        _ => beside(path, &format!(".damaged-{now}-{attempt}")),
    };
    let aside = (0..).map(name).find(|name| !name.exists()).unwrap_or_else(|| name(0));
    fs::rename(path, &aside).map_err(|error| unusable(path, &error))?;
    for ending in ["-wal", "-shm"] {
        // A log that stayed would be taken for the new file's.
        match fs::rename(beside(path, ending), beside(&aside, ending)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(unusable(path, &error));
            }
            _ => {}
        }
    }
    Ok(aside)
}

/// Tells damage from other failures.
pub(super) fn failure(path: &Path, error: &rusqlite::Error) -> Error {
    let (path, reason) = (path.to_owned(), error.to_string());
    let lost = reason.contains("no such table") || reason.contains("no such column");
    match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => {
            Error::Damaged { path, reason }
        }
        _ if lost => Error::Damaged { path, reason },
        _ => Error::Unusable { path, reason },
    }
}

fn unusable(path: &Path, error: &std::io::Error) -> Error {
    Error::Unusable { path: path.to_owned(), reason: error.to_string() }
}

fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name: OsString = path.to_owned().into_os_string();
    name.push(ending);
    PathBuf::from(name)
}

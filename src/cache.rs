//! Answers that were paid for once, kept in one SQLite file.
//!
//! An answer is found by what was asked: the [`Key`] is a hash of the kind of
//! question, who was asked, the request and the number of the vote. The file is
//! safe with several processes at once, and what [`Cache::put`] has confirmed
//! survives the end of this process, however it ends. Nothing in here is
//! precious: a file that cannot be read may be set aside. Absent on purpose: what
//! an answer means, and when one is worth keeping.

mod file;
mod forget;
mod key;
mod writer;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rusqlite::{Connection, OptionalExtension};

use writer::{Put, Writer};

pub use key::{Key, Question};

/// What can go wrong with a file of answers. None of it is a reason to stop.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file is damaged.
    #[error("the answers in `{path}` are damaged: {reason}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What SQLite says.
        reason: String,
    },
    /// The file is somebody else's, and is left alone.
    #[error("`{path}` is {what}, not a file of answers")]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What it looks like.
        what: &'static str,
    },
    /// The file was made by a newer oclaw.
    #[error("the answers in `{path}` have version {found}, this build knows {known}")]
    Newer {
        /// The file.
        path: PathBuf,
        /// Version of its layout.
        found: i64,
        /// Version that this build writes.
        known: i64,
    },
    /// The file cannot be opened, read or written.
    #[error("cannot use the answers in `{path}`: {reason}")]
    Unusable {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

/// A file of answers, opened.
#[derive(Debug)]
pub struct Cache {
    path: PathBuf,
    reader: Mutex<Connection>,
    writer: Writer,
}

/// An opened file, and where a damaged one in its place has gone.
#[derive(Debug)]
pub struct Opened {
    /// The file of answers.
    pub cache: Cache,
    /// New name of the damaged file, and what was wrong with it.
    pub set_aside: Option<(PathBuf, Error)>,
}

/// Answers of one kind and about one age.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Kind of question.
    pub kind: String,
    /// Index into the ages that were asked for; their number for older ones.
    pub age: usize,
    /// How many answers.
    pub entries: u64,
    /// Bytes of the answers.
    pub bytes: u64,
}

impl Cache {
    /// Opens a file of answers, which is made if it is not there.
    pub fn open(path: &Path) -> Result<Self, Error> {
        file::check(path)?;
        let _lock = file::lock(path)?;
        Self::open_locked(path)
    }

    /// Refuses a file that is somebody else's. Touches nothing.
    pub fn check(path: &Path) -> Result<(), Error> {
        file::check(path)
    }

    /// Opens a file of answers; one that is damaged is renamed and a new one made.
    /// What never was a file of answers is refused instead.
    pub fn open_or_renew(path: &Path) -> Result<Opened, Error> {
        file::check(path)?;
        let _lock = file::lock(path)?;
        match Self::open_locked(path) {
            Ok(cache) => Ok(Opened { cache, set_aside: None }),
            Err(damage @ Error::Damaged { .. }) => {
                let aside = file::set_aside(path)?;
                let cache = Self::open_locked(path)?;
                Ok(Opened { cache, set_aside: Some((aside, damage)) })
            }
            Err(error) => Err(error),
        }
    }

    fn open_locked(path: &Path) -> Result<Self, Error> {
        let reader = file::connect(path)?;
        let writer = Writer::start(path, file::connect(path)?)?;
        Ok(Self { path: path.to_owned(), reader: Mutex::new(reader), writer })
    }

    /// Returns the file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Renames the file, which turned out to be damaged, and returns its new name.
    /// What has it open goes on with the renamed one.
    pub fn set_aside(&self) -> Result<PathBuf, Error> {
        let _lock = file::lock(&self.path)?;
        file::set_aside(&self.path)
    }

    /// Returns the answer to a question, as JSON.
    pub fn get(&self, key: &Key) -> Result<Option<String>, Error> {
        self.read(|connection| {
            connection
                .prepare("SELECT answer FROM answers WHERE key = ?1")?
                .query_row([key.as_bytes()], |row| row.get(0))
                .optional()
        })
    }

    /// Returns the answers to several questions, in their order.
    pub fn get_all(&self, keys: &[Key]) -> Result<Vec<Option<String>>, Error> {
        self.read(|connection| {
            let mut found = connection.prepare("SELECT answer FROM answers WHERE key = ?1")?;
            let each = |key: &Key| found.query_row([key.as_bytes()], |row| row.get(0)).optional();
            keys.iter().map(each).collect()
        })
    }

    /// Keeps an answer. `then` is called on another thread when it is stored, or
    /// could not be; many answers that come at once are stored in one go.
    pub fn put(
        &self,
        key: Key,
        kind: &str,
        answer: String,
        then: impl FnOnce(Result<(), Error>) + Send + 'static,
    ) {
        let created = seconds(SystemTime::now());
        self.writer.send(Put { key, kind: kind.to_owned(), answer, created, then: Box::new(then) });
    }

    /// Counts the answers by kind and age. `ages` are upper bounds, ascending.
    pub fn groups(&self, ages: &[Duration]) -> Result<Vec<Group>, Error> {
        let now = SystemTime::now();
        let bounds: Vec<i64> =
            ages.iter().map(|age| now.checked_sub(*age).map_or(0, seconds)).collect();
        let mut cases = String::new();
        for (index, bound) in bounds.iter().enumerate() {
            cases.push_str(&format!("WHEN created > {bound} THEN {index} "));
        }
        let age = match cases.is_empty() {
            true => "0".to_owned(),
            false => format!("CASE {cases} ELSE {} END", bounds.len()),
        };
        let query = format!(
            "SELECT kind, {age} AS age, count(*), sum(octet_length(answer)) FROM answers \
             GROUP BY kind, age ORDER BY kind, age"
        );
        self.read(|connection| {
            let mut statement = connection.prepare(&query)?;
            let rows = statement.query_map([], |row| {
                Ok(Group {
                    kind: row.get(0)?,
                    age: row.get::<_, i64>(1)?.unsigned_abs() as usize,
                    entries: row.get::<_, i64>(2)?.unsigned_abs(),
                    bytes: row.get::<_, i64>(3)?.unsigned_abs(),
                })
            })?;
            rows.collect()
        })
    }

    /// Removes answers older than an age and gives their space back. Returns how
    /// many there were.
    pub fn prune(&self, age: Duration) -> Result<u64, Error> {
        let bound = SystemTime::now().checked_sub(age).map_or(0, seconds);
        self.remove("DELETE FROM answers WHERE created <= ?1", [bound])
    }

    /// Removes every answer and gives the space back. Returns how many there were.
    pub fn clear(&self) -> Result<u64, Error> {
        self.remove("DELETE FROM answers", [])
    }

    fn remove(&self, statement: &str, bound: impl rusqlite::Params) -> Result<u64, Error> {
        self.read(|connection| {
            let removed = connection.execute(statement, bound)?;
            // The pragma frees pages as its rows are read.
            let mut freeing = connection.prepare("PRAGMA incremental_vacuum")?;
            let mut rows = freeing.query([])?;
            while rows.next()?.is_some() {}
            // Another process may be reading: the log shrinks some other time.
            connection
                .query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()))
                .optional()
                .map(|_| removed as u64)
        })
    }

    fn read<T>(
        &self,
        question: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T, Error> {
        let connection = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        question(&connection).map_err(|error| file::failure(&self.path, &error))
    }
}

fn seconds(instant: SystemTime) -> i64 {
    let since = instant.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

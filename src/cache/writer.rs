//! The thread that stores answers: whatever has come in while it stored the last
//! ones goes into the next transaction, so that a thousand answers cost a few
//! commits and a single one is stored at once.

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rusqlite::{Connection, TransactionBehavior, params};

use super::{Error, Key, file};

/// Most answers in one transaction.
const TOGETHER: usize = 1024;

/// How long a transaction waits for more answers after one that had several.
const MOMENT: Duration = Duration::from_millis(3);

type Then = Box<dyn FnOnce(Result<(), Error>) + Send>;

/// An answer to store.
pub(super) struct Put {
    pub(super) key: Key,
    pub(super) kind: String,
    pub(super) answer: String,
    pub(super) created: i64,
    pub(super) then: Then,
}

/// A handle on the thread. Dropped, it waits for what is still to be stored.
#[derive(Debug)]
pub(super) struct Writer {
    path: PathBuf,
    puts: Option<mpsc::Sender<Put>>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    pub(super) fn start(path: &Path, connection: Connection) -> Result<Self, Error> {
        let (puts, waiting) = mpsc::channel();
        let place = path.to_owned();
        let thread = std::thread::Builder::new()
            .name("answers".to_owned())
            .spawn(move || serve(&place, connection, &waiting))
            .map_err(|error| Error::Unusable {
                path: path.to_owned(),
                reason: error.to_string(),
            })?;
        Ok(Self { path: path.to_owned(), puts: Some(puts), thread: Some(thread) })
    }

    pub(super) fn send(&self, put: Put) {
        let refused = match &self.puts {
            Some(puts) => puts.send(put).err().map(|refused| refused.0),
            None => Some(put),
        };
        if let Some(put) = refused {
            let reason = "the thread that stores them has ended".to_owned();
            (put.then)(Err(Error::Unusable { path: self.path.clone(), reason }));
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.puts = None;
        if let Some(thread) = self.thread.take() {
            // A panic in there has been reported where it happened.
            let _ = thread.join();
        }
    }
}

fn serve(path: &Path, mut connection: Connection, waiting: &mpsc::Receiver<Put>) {
    let mut busy = false;
    while let Ok(first) = waiting.recv() {
        let puts = gather(first, waiting, busy);
        busy = puts.len() > 1;
        let stored = store(&mut connection, &puts);
        for put in puts {
            let outcome = match &stored {
                Ok(()) => Ok(()),
                Err(error) => Err(file::failure(path, error)),
            };
            (put.then)(outcome);
        }
    }
}

/// Takes what is there; when answers come in crowds, also what comes within a
/// moment, for a commit costs more than an answer.
fn gather(first: Put, waiting: &mpsc::Receiver<Put>, busy: bool) -> Vec<Put> {
    let mut puts = vec![first];
    let until = Instant::now() + if busy { MOMENT } else { Duration::ZERO };
    while puts.len() < TOGETHER {
        let left = until.saturating_duration_since(Instant::now());
        let next = match left.is_zero() {
            true => waiting.try_recv().ok(),
            false => waiting.recv_timeout(left).ok(),
        };
        match next {
            Some(put) => puts.push(put),
            None => break,
        }
    }
    puts
}

fn store(connection: &mut Connection, puts: &[Put]) -> rusqlite::Result<()> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    {
        // Another process may have had the same answer first; the later one wins.
        let mut insert = transaction.prepare(
            "INSERT OR REPLACE INTO answers (key, kind, created, answer) VALUES (?1, ?2, ?3, ?4)",
        )?;
        for Put { key, kind, answer, created, .. } in puts {
            insert.execute(params![key.as_bytes(), kind, created, answer])?;
        }
    }
    transaction.commit()
}

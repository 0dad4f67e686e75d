//! What was captured survives the process: a write-ahead log of turns, and the
//! shards they become.
//!
//! A turn is appended before its client sees the end of the answer. It stays
//! open until a request extends it, its session ends or it has been idle; then
//! it is a row, once and for ever, and rows become shards. Start-up takes open
//! turns up again, sets aside what it cannot read, deletes nothing it has not
//! carried over, and always ends. A disk that fails loses no chat: what could
//! not be written is kept in memory, counted, and written when it can be.
//! Absent: sessions, HTTP.
//!
//! One thread owns the log and the open turns; another one, at most, is writing
//! a shard. Callers only send messages.

mod entry;
mod feedback;
mod forget;
mod log;
mod origin;
mod owed;
mod record;
mod recovery;
mod state;
mod syncing;
mod writer;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::oneshot;

use crate::table::Provenance;
use crate::trajectory::words::NextStateKind;

pub use entry::{Entry, Lineage, Origin, Remembered, Settings};
pub use feedback::{Feedback, late_feedback};
pub use forget::{Forgotten, IsAbout, Wanted, forget, hold};
pub use record::Record;

use writer::Command;

/// When the log reaches the disk itself (it reaches the system at once).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sync {
    /// Before every acknowledgement.
    Always,
    /// In groups.
    Every(Duration),
}

/// When rows become a shard.
#[derive(Debug, Clone, Copy)]
pub struct Roll {
    /// So many rows wait.
    pub rows: usize,
    /// Rows of so many bytes wait.
    pub bytes: usize,
    /// A row has waited so long.
    pub age: Duration,
}

/// How a journal is kept.
#[derive(Debug, Clone)]
pub struct Options {
    /// The spool folder.
    pub spool: PathBuf,
    /// When the log reaches the disk itself.
    pub sync: Sync,
    /// When rows become a shard.
    pub roll: Roll,
    /// How long a turn is remembered for pairing, microseconds.
    pub retention: i64,
    /// How many turns are remembered at most.
    pub remembered: usize,
    /// The log is written anew when it has grown by so many bytes.
    pub compact: u64,
    /// Where the shards come from.
    pub provenance: Provenance,
}

/// What can go wrong with a spool folder.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The folder, or a file of the journal, cannot be used.
    #[error("cannot use the spool folder: `{}`", .path.display())]
    Folder {
        /// The file or folder.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// Another process writes there.
    #[error("the spool folder `{}` is in use by another process", .path.display())]
    Locked {
        /// The folder.
        path: PathBuf,
    },
    /// The last rows could not be written.
    #[error("cannot write the last rows; they are kept in the journal")]
    Shard {
        /// What the table said.
        #[source]
        source: Box<crate::table::Error>,
    },
    /// The disk took neither the log nor the shard of these turns, up to the end.
    #[error("{turns} turns are lost: the journal of `{}` cannot be written", .spool.display())]
    Lost {
        /// How many.
        turns: usize,
        /// The spool folder.
        spool: PathBuf,
    },
    /// The journal's thread has ended.
    #[error("the journal of `{}` has stopped", .spool.display())]
    Stopped {
        /// The spool folder.
        spool: PathBuf,
    },
}

/// What a journal has done so far.
#[derive(Debug, Default)]
pub struct Counts {
    /// Rows that are in shards.
    pub rows: AtomicU64,
    /// Shards written.
    pub shards: AtomicU64,
    /// Turns that could not be logged when they ended.
    pub append_errors: AtomicU64,
    /// Shards that could not be written when they were due.
    pub shard_errors: AtomicU64,
    /// Turns lost because the disk was away for too long.
    pub lost: AtomicU64,
    /// Feedback for rows that were written before.
    pub late_feedback: AtomicU64,
    /// Feedback that could not be kept.
    pub lost_feedback: AtomicU64,
    /// Bytes of damaged logs that were set aside at start-up.
    pub set_aside: AtomicU64,
    /// Turns that are open.
    pub open: AtomicU64,
    /// Rows that wait for their shard.
    pub waiting: AtomicU64,
    log_failing: AtomicBool,
    shard_failing: AtomicBool,
}

impl Counts {
    /// Returns whether the disk takes what it is given.
    pub fn is_healthy(&self) -> bool {
        !self.log_failing.load(Ordering::Relaxed) && !self.shard_failing.load(Ordering::Relaxed)
    }
}

/// Reads every whole record in the bytes of a log. Also returns how many bytes are
/// none.
pub fn read_log(bytes: &[u8]) -> (Vec<Record>, u64) {
    let contents = record::read(bytes);
    (contents.records, contents.damaged)
}

/// What an earlier run left.
#[derive(Debug, Default)]
pub struct Recovered {
    /// Turns that still wait for their next state.
    pub open: Vec<Entry>,
    /// Turns that are rows, as far as pairing needs them.
    pub known: Vec<Remembered>,
}

/// A spool folder that is being written. Cheap to share.
#[derive(Debug)]
pub struct Journal {
    spool: PathBuf,
    sender: Sender<Command>,
    counts: Arc<Counts>,
    thread: std::sync::Mutex<Option<JoinHandle<()>>>,
    // Held as long as the journal lives; the system lets go of it on kill.
    _lock: File,
}

impl Journal {
    /// Takes a spool folder, and up what an earlier run left there.
    pub fn open(options: Options) -> Result<(Self, Recovered), Error> {
        let spool = options.spool.clone();
        let lock = lock(&spool)?;
        let counts = Arc::new(Counts::default());
        let (sender, receiver) = mpsc::channel();
        let (writer, recovered) = writer::Writer::open(options, counts.clone(), sender.clone())?;
        let thread = std::thread::Builder::new()
            .name("journal".to_owned())
            .spawn(move || writer.run(&receiver))
            .map_err(|source| Error::Folder { path: spool.clone(), source })?;
        let thread = std::sync::Mutex::new(Some(thread));
        Ok((Self { spool, sender, counts, thread, _lock: lock }, recovered))
    }

    /// Returns what has been done so far.
    pub fn counts(&self) -> &Arc<Counts> {
        &self.counts
    }

    /// Logs a turn. When this returns, the turn survives the process. Returns
    /// whether it does: a failing disk must not keep a client waiting.
    pub async fn turn(&self, entry: Entry) -> bool {
        let (ack, acknowledged) = oneshot::channel();
        self.send(Command::Append { record: Record::Turn(Box::new(entry)), ack: Some(ack) });
        acknowledged.await.unwrap_or(false)
    }

    /// Gives a turn its next state; it becomes a row.
    pub fn extend(&self, turn_id: String, next_state: String, kind: NextStateKind) {
        let record = Record::Extended { turn_id, next_state, kind };
        self.send(Command::Append { record, ack: None });
    }

    /// Ends a turn without a next state; it becomes a row.
    pub fn close(&self, turn_id: String, session_end: bool) {
        self.send(Command::Append { record: Record::Closed { turn_id, session_end }, ack: None });
    }

    /// Keeps feedback: in the turn's row if that is not written yet, else in
    /// the feedback folder. Returns whether it is in the row. `None` if it could
    /// not be kept.
    pub async fn feedback(&self, feedback: Feedback) -> Option<bool> {
        let (ack, kept) = oneshot::channel();
        self.send(Command::Feedback { feedback, expected: false, ack: Some(ack) });
        kept.await.unwrap_or(None)
    }

    /// Keeps feedback for a turn that its client has seen, whether its record has
    /// come yet or not.
    pub fn rate(&self, feedback: Feedback) {
        self.send(Command::Feedback { feedback, expected: true, ack: None });
    }

    /// Writes the rows that wait, ends the journal and returns how many turns
    /// stay open for the next run. With `flush_open` these become rows, too.
    pub async fn finish(&self, flush_open: bool) -> Result<u64, Error> {
        let stopped = || Error::Stopped { spool: self.spool.clone() };
        let (ack, finished) = oneshot::channel();
        self.send(Command::Finish { flush_open, ack });
        let outcome = finished.await.map_err(|_| stopped())?;
        let thread = self.thread.lock().ok().and_then(|mut thread| thread.take());
        if let Some(thread) = thread {
            thread.join().map_err(|_| stopped())?;
        }
        outcome
    }

    fn send(&self, command: Command) {
        if self.sender.send(command).is_err() {
            // Readiness tells; there is nobody else to tell.
            self.counts.log_failing.store(true, Ordering::Relaxed);
        }
    }
}

impl Drop for Journal {
    /// Ends the thread and nothing else: what was logged is the next run's.
    fn drop(&mut self) {
        let thread = self.thread.lock().ok().and_then(|mut thread| thread.take());
        if let Some(thread) = thread {
            self.send(Command::Abandon);
            // A thread that panicked has said so itself.
            let _ = thread.join();
        }
    }
}

fn lock(spool: &Path) -> Result<File, Error> {
    let failed = |path: &Path, source| Error::Folder { path: path.to_owned(), source };
    std::fs::create_dir_all(spool).map_err(|source| failed(spool, source))?;
    let path = spool.join(".lock");
    let file = File::create(&path).map_err(|source| failed(&path, source))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => Err(Error::Locked { path: spool.to_owned() }),
        Err(std::fs::TryLockError::Error(source)) => Err(failed(&path, source)),
    }
}

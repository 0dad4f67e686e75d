//! What the disk still owes us.

use std::collections::HashSet;
use std::sync::atomic::Ordering;

use super::writer::Writer;
use super::{Error, Sync};

/// Bytes of records that a failing disk may owe us; beyond, the oldest are lost.
const BACKLOG: usize = 256 << 20;

/// Framed records, and the turns among them.
pub(super) struct Owed {
    pub(super) bytes: Vec<u8>,
    pub(super) turn_ids: Vec<String>,
}

impl Writer {
    /// Appends to the log, after what the disk still owes us.
    pub(super) fn append(&mut self, records: Owed) -> bool {
        if !records.bytes.is_empty() {
            self.backlog.push_back(records);
        }
        while let Some(owed) = self.backlog.front() {
            if let Err(error) = self.log.append(&owed.bytes) {
                return self.append_failed(&error);
            }
            self.backlog.pop_front();
        }
        self.list_shards();
        if self.options.sync == Sync::Always && !self.sync() {
            return false;
        }
        self.counts.log_failing.store(self.sync_failed, Ordering::Relaxed);
        true
    }

    pub(super) fn append_failed(&mut self, error: &std::io::Error) -> bool {
        if !self.counts.log_failing.swap(true, Ordering::Relaxed) {
            tracing::error!(%error, "cannot write the journal; turns are kept in memory");
        }
        let mut held: usize = self.backlog.iter().map(|owed| owed.bytes.len()).sum();
        while held > BACKLOG {
            let Some(owed) = self.backlog.pop_front() else { break };
            held -= owed.bytes.len();
            self.lose(owed.turn_ids.len());
        }
        false
    }

    fn lose(&self, turns: usize) {
        self.counts.lost.fetch_add(turns as u64, Ordering::Relaxed);
    }

    /// Does what is owed; at the very end. Turns that are neither in the log nor in
    /// a shard then are lost.
    pub(super) fn settle(&mut self) -> Result<(), Error> {
        let paid = self.pay();
        self.sync();
        if paid {
            return Ok(());
        }
        let owed: HashSet<_> = self.backlog.drain(..).flat_map(|owed| owed.turn_ids).collect();
        let lost = owed.iter().filter(|turn_id| self.state.holds(turn_id)).count();
        self.lose(lost);
        match lost {
            // The records owed are about turns that are safe.
            0 => Ok(()),
            turns => Err(Error::Lost { turns, spool: self.options.spool.clone() }),
        }
    }

    /// Appends what is owed.
    pub(super) fn pay(&mut self) -> bool {
        self.append(Owed { bytes: Vec::new(), turn_ids: Vec::new() })
    }
}

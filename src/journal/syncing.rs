//! When the log reaches the disk itself.

use std::time::Instant;

use super::writer::{Command, Writer};

impl Writer {
    /// Makes the disk hold the log, on a thread of its own: that takes a while, in
    /// which turns are logged and acknowledged.
    pub(super) fn start_sync(&mut self) {
        self.last_sync = Instant::now();
        let sender = self.sender.clone();
        let started = self.log.syncing().and_then(|file| {
            let work = move || {
                // Nobody listens any more at the end, when all was synced anyway.
                let _ = sender.send(Command::Synced { outcome: file.sync_data() });
            };
            std::thread::Builder::new().name("journal-sync".to_owned()).spawn(work)
        });
        match started {
            Ok(_) => self.sync_running = true,
            Err(error) => self.synced(Err(error)),
        }
    }

    pub(super) fn synced(&mut self, outcome: std::io::Result<()>) {
        self.sync_running = false;
        self.sync_failed = outcome.is_err();
        if let Err(error) = outcome {
            self.log.not_synced();
            self.append_failed(&error);
        }
    }

    /// Makes the disk hold the log, and waits for that.
    pub(super) fn sync(&mut self) -> bool {
        self.last_sync = Instant::now();
        let synced = self.log.sync();
        self.sync_failed = synced.is_err();
        match synced {
            Ok(()) => true,
            Err(error) => self.append_failed(&error),
        }
    }
}

//! The thread that owns the log and the open turns.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::oneshot;

use crate::table::{self, write_shard};
use crate::trajectory;

use super::entry::Entry;
use super::feedback::{Feedback, FeedbackFile};
use super::log::{Log, ShardList};
use super::origin;
use super::owed::Owed;
use super::record::Record;
use super::recovery::{unlisted, with_causes};
use super::state::State;
use super::{Counts, Error, Options, Recovered, Sync};

/// Messages taken together, at most.
const GROUP: usize = 256;
const TICK: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// What the thread is told.
#[derive(Debug)]
pub(super) enum Command {
    Append { record: Record, ack: Option<oneshot::Sender<bool>> },
    Feedback { feedback: Feedback, expected: bool, ack: Option<oneshot::Sender<Option<bool>>> },
    Shard { outcome: Result<PathBuf, Box<table::Error>> },
    Synced { outcome: std::io::Result<()> },
    Finish { flush_open: bool, ack: oneshot::Sender<Result<u64, Error>> },
    Abandon,
}

/// The owner of the log and the open turns.
pub(super) struct Writer {
    pub(super) options: Options,
    pub(super) counts: Arc<Counts>,
    pub(super) sender: Sender<Command>,
    pub(super) log: Log,
    shards: ShardList,
    /// Shards of which the log does not tell yet. A shard is listed after that: one that
    /// is listed is not looked into by who comes after a kill.
    untold: Vec<String>,
    feedback: FeedbackFile,
    pub(super) state: State,
    /// Framed records that the disk would not take.
    pub(super) backlog: VecDeque<Owed>,
    pub(super) last_sync: Instant,
    /// Another thread makes the disk hold the log.
    pub(super) sync_running: bool,
    pub(super) sync_failed: bool,
    /// Since when rows wait.
    waiting_since: Option<Instant>,
    shard_running: bool,
    /// After a failure: when to try again, and how long to wait next time.
    pause: Option<(Instant, Duration)>,
}

impl Writer {
    /// Takes up what an earlier run left.
    pub(super) fn open(
        options: Options,
        counts: Arc<Counts>,
        sender: Sender<Command>,
    ) -> Result<(Self, Recovered), Error> {
        let folder = options.spool.join(".journal");
        let mut found = Log::find(&folder)?;
        let mut shards = ShardList::read(&folder)?;
        let mut state = State::default();
        for record in std::mem::take(&mut found.records) {
            state.restore(record);
        }
        let unlisted = unlisted(&options, &shards)?;
        state.drop_rows(&unlisted.turn_ids);
        state.forget(now().saturating_sub(options.retention), options.remembered);
        counts.set_aside.store(found.damaged, Ordering::Relaxed);
        if found.damaged > 0 {
            tracing::warn!(
                damaged = found.damaged,
                folder = %folder.join("aside").display(),
                "Parts of the journal were damaged and are set aside."
            );
        }
        let log = Log::begin(&folder, &found, &state.snapshot())?;
        // Only now does the log know of them: a kill before this finds them again.
        for name in &unlisted.shards {
            shards.add(name).map_err(|source| Error::Folder { path: folder.clone(), source })?;
        }
        let recovered = Recovered {
            open: state.open.values().cloned().collect(),
            known: state.remembered().cloned().collect(),
        };
        let waiting_since = (!state.ready.is_empty()).then(Instant::now);
        let feedback = FeedbackFile::new(&options.spool);
        let writer = Self {
            options,
            counts,
            sender,
            log,
            shards,
            untold: Vec::new(),
            feedback,
            state,
            backlog: VecDeque::new(),
            last_sync: Instant::now(),
            sync_running: false,
            sync_failed: false,
            waiting_since,
            shard_running: false,
            pause: None,
        };
        writer.report();
        Ok((writer, recovered))
    }

    /// Serves the messages until it is told to finish.
    pub(super) fn run(mut self, receiver: &Receiver<Command>) {
        loop {
            let first = match receiver.recv_timeout(self.patience()) {
                Ok(command) => Some(command),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            let more = std::iter::from_fn(|| receiver.try_recv().ok()).take(GROUP);
            let group: Vec<_> = first.into_iter().chain(more).collect();
            if group.iter().any(|command| matches!(command, Command::Abandon)) {
                return;
            }
            if let Some((flush_open, ack)) = self.group(group) {
                let outcome = self.finish(flush_open, receiver);
                // Whoever asked may be gone.
                let _ = ack.send(outcome);
                return;
            }
            self.keep_up();
        }
    }

    fn patience(&self) -> Duration {
        let sync = match self.options.sync {
            Sync::Every(interval) if self.log.is_dirty() && !self.sync_running => {
                interval.saturating_sub(self.last_sync.elapsed())
            }
            _ => TICK,
        };
        let age = self.waiting_since.map_or(TICK, |since| {
            self.options.roll.age.saturating_sub(since.elapsed()).max(Duration::from_millis(1))
        });
        sync.min(age).min(TICK)
    }

    /// Logs and applies messages that came together.
    fn group(
        &mut self,
        commands: Vec<Command>,
    ) -> Option<(bool, oneshot::Sender<Result<u64, Error>>)> {
        let mut bytes = Vec::new();
        let mut turn_ids = Vec::new();
        let mut acks = Vec::new();
        let mut feedback_acks = Vec::new();
        let mut finish = None;
        for command in commands {
            match command {
                Command::Append { record, ack } => {
                    self.frame(&record, &mut bytes);
                    if let Record::Turn(entry) = &record {
                        turn_ids.push(entry.turn_id.clone());
                    }
                    self.state.apply(record);
                    acks.extend(ack);
                }
                Command::Feedback { feedback, expected, ack } => {
                    let kept = self.keep_feedback(&feedback, expected, &mut bytes);
                    feedback_acks.extend(ack.map(|ack| (ack, kept)));
                }
                Command::Shard { outcome } => self.end_shard(outcome, &mut bytes),
                Command::Synced { outcome } => self.synced(outcome),
                Command::Finish { flush_open, ack } => finish = Some((flush_open, ack)),
                Command::Abandon => {}
            }
        }
        let logged = self.append(Owed { bytes, turn_ids });
        if !logged {
            self.counts.append_errors.fetch_add(acks.len() as u64, Ordering::Relaxed);
        }
        for ack in acks {
            // A client that went away does not wait any more.
            let _ = ack.send(logged);
        }
        for (ack, kept) in feedback_acks {
            let _ = ack.send(kept);
        }
        finish
    }

    fn frame(&self, record: &Record, bytes: &mut Vec<u8>) {
        if let Err(error) = record.frame(bytes) {
            // No record of ours fails to serialise; if one does, it is counted.
            tracing::error!(%error, "cannot log a record");
            self.counts.append_errors.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Keeps feedback. What is `expected` may come before the record of its turn.
    fn keep_feedback(
        &mut self,
        feedback: &Feedback,
        expected: bool,
        bytes: &mut Vec<u8>,
    ) -> Option<bool> {
        if let Some(turn_id) = feedback.turn_id.clone() {
            let (reward, text) = (feedback.reward, feedback.text.clone());
            let record = Record::Feedback { turn_id: turn_id.clone(), reward, text };
            let found = self.state.apply(record.clone());
            let early = !found && expected && !self.state.is_known(&turn_id);
            if found || early {
                self.frame(&record, bytes);
                if early {
                    self.state.expect(record);
                }
                return Some(true);
            }
        }
        match self.feedback.append(feedback) {
            Ok(()) => {
                self.counts.late_feedback.fetch_add(1, Ordering::Relaxed);
                Some(false)
            }
            Err(error) => {
                tracing::error!(%error, "cannot keep feedback");
                self.counts.lost_feedback.fetch_add(1, Ordering::Relaxed);
                None
            }
        }
    }

    /// Does what is due.
    fn keep_up(&mut self) {
        if !self.backlog.is_empty() {
            self.pay();
        }
        if let Sync::Every(interval) = self.options.sync
            && self.log.is_dirty()
            && !self.sync_running
            && self.last_sync.elapsed() >= interval
        {
            self.start_sync();
        }
        match (self.state.ready.is_empty(), self.waiting_since) {
            (true, _) => self.waiting_since = None,
            (false, None) => self.waiting_since = Some(Instant::now()),
            (false, Some(_)) => {}
        }
        if self.shard_is_due() {
            self.start_shard();
        }
        let grown = self.log.growth() > self.options.compact.max(self.log.base());
        if grown && self.backlog.is_empty() {
            self.compact();
        }
        self.report();
    }

    fn compact(&mut self) {
        let before = now().saturating_sub(self.options.retention);
        self.state.forget(before, self.options.remembered);
        if let Err(error) = self.log.compact(&self.state.snapshot()) {
            tracing::error!(%error, "cannot begin a new log");
        }
    }

    fn shard_is_due(&self) -> bool {
        let roll = &self.options.roll;
        let waited = self.waiting_since.is_some_and(|since| since.elapsed() >= roll.age);
        let paused = self.pause.is_some_and(|(until, _)| Instant::now() < until);
        let full = self.state.ready.len() >= roll.rows || self.state.ready_bytes() >= roll.bytes;
        !self.state.ready.is_empty() && !self.shard_running && !paused && (full || waited)
    }

    /// Writes a shard on a thread of its own: compressing must not keep a
    /// client waiting for its acknowledgement.
    fn start_shard(&mut self) {
        let entries = self.state.start_writing();
        let provenance = origin::provenance(&self.options.provenance, entries);
        let rows: Vec<_> = entries.iter().map(Entry::row).collect();
        let spool = self.options.spool.clone();
        let sender = self.sender.clone();
        let work = move || {
            let writers = [trajectory::Writer::Serve];
            let outcome = write_shard(&spool, &writers, &rows, &provenance).map_err(Box::new);
            // The journal waits for this message before it ends.
            let _ = sender.send(Command::Shard { outcome });
        };
        self.waiting_since = None;
        match std::thread::Builder::new().name("shard".to_owned()).spawn(work) {
            Ok(_) => self.shard_running = true,
            Err(error) => {
                tracing::error!(%error, "cannot start a thread");
                self.state.stop_writing();
            }
        }
    }

    fn end_shard(&mut self, outcome: Result<PathBuf, Box<table::Error>>, bytes: &mut Vec<u8>) {
        self.shard_running = false;
        match outcome {
            Ok(path) => {
                let shard = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                self.untold.push(shard.clone());
                let turn_ids: Vec<_> =
                    self.state.writing.iter().map(|entry| entry.turn_id.clone()).collect();
                self.counts.rows.fetch_add(turn_ids.len() as u64, Ordering::Relaxed);
                self.counts.shards.fetch_add(1, Ordering::Relaxed);
                self.counts.shard_failing.store(false, Ordering::Relaxed);
                self.pause = None;
                let record = Record::Written { shard, turn_ids };
                self.frame(&record, bytes);
                self.state.apply(record);
            }
            Err(error) => {
                let error = with_causes(&error);
                tracing::error!(%error, "cannot write a shard; its rows wait");
                self.counts.shard_errors.fetch_add(1, Ordering::Relaxed);
                self.counts.shard_failing.store(true, Ordering::Relaxed);
                self.state.stop_writing();
                let wait = self.pause.map_or(Duration::from_secs(1), |(_, wait)| wait * 2);
                let wait = wait.min(LONGEST_PAUSE);
                self.pause = Some((Instant::now() + wait, wait));
            }
        }
    }

    /// Lists the shards that the log tells of by now.
    pub(super) fn list_shards(&mut self) {
        for shard in std::mem::take(&mut self.untold) {
            if let Err(error) = self.shards.add(&shard) {
                tracing::warn!(%error, "cannot list a shard");
            }
        }
    }

    fn finish(&mut self, flush_open: bool, receiver: &Receiver<Command>) -> Result<u64, Error> {
        // What was sent before we were told to end, and the shard on its way.
        while self.shard_running {
            let Ok(command) = receiver.recv() else { break };
            self.group(vec![command]);
        }
        if flush_open {
            self.state.close_all();
        }
        let mut failed = None;
        if !self.state.ready.is_empty() {
            let entries = self.state.start_writing();
            let provenance = origin::provenance(&self.options.provenance, entries);
            let rows: Vec<_> = entries.iter().map(Entry::row).collect();
            let writers = [trajectory::Writer::Serve];
            let spool = &self.options.spool;
            let mut bytes = Vec::new();
            match write_shard(spool, &writers, &rows, &provenance) {
                Ok(path) => self.end_shard(Ok(path), &mut bytes),
                Err(source) => {
                    self.state.stop_writing();
                    failed = Some(Error::Shard { source: Box::new(source) });
                }
            }
            self.append(Owed { bytes, turn_ids: Vec::new() });
        }
        let settled = self.settle();
        self.report();
        // What is lost is worse news than what waits.
        settled?;
        failed.map_or(Ok(self.state.open.len() as u64), Err)
    }

    fn report(&self) {
        let waiting = self.state.ready.len() + self.state.writing.len();
        self.counts.open.store(self.state.open.len() as u64, Ordering::Relaxed);
        self.counts.waiting.store(waiting as u64, Ordering::Relaxed);
    }
}

fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

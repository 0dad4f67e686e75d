//! The door to the compute thread: what can be asked of it, and what it tells.
//!
//! One thread owns the model. Everybody else holds a [`Compute`], sends commands
//! and reads the status; nothing of libtorch leaves the thread.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, PoisonError, RwLock};
use std::thread::JoinHandle;

use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;

use crate::model::{LoadOptions, Model, SamplingParams};
use crate::wire::sglang::PauseMode;

use super::adapters::{AdapterId, Load, Names, Unload};
use super::failure::Failure;
use super::metrics::Metrics;
use super::schedule::Scheduler;

/// One answer to be generated.
#[derive(Debug)]
pub(super) struct Job {
    /// The request it belongs to.
    pub(super) rid: Arc<str>,
    /// Ids of the prompt, checked.
    pub(super) prompt: Arc<[i64]>,
    /// The adapter that makes it, if not the model alone.
    pub(super) adapter: Option<AdapterId>,
    /// How it is sampled and when it ends.
    pub(super) plan: Plan,
    /// Where its tokens go. A closed receiver ends it.
    pub(super) events: UnboundedSender<Event>,
}

/// How an answer is sampled and when it ends.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    pub(super) sampling: SamplingParams,
    pub(super) max_new: usize,
    pub(super) stop_ids: Vec<i32>,
    /// How many alternatives are told per token.
    pub(super) top: usize,
    /// Ids whose log-probs are told per token.
    pub(super) chosen: Vec<i64>,
}

/// What becomes of a job.
#[derive(Debug, Clone)]
pub(super) enum Event {
    /// The first token comes next; so many tokens of the prompt were not computed for it.
    Begun(usize),
    /// One more token.
    Token(Token),
    /// No more tokens.
    End(End),
    /// The whole request has failed.
    Failed(Failure),
}

/// A sampled token.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Token {
    pub(super) id: i32,
    /// After temperature, before truncation.
    pub(super) log_prob: f32,
    pub(super) top: Vec<(i32, f32)>,
    pub(super) chosen: Vec<(i64, f32)>,
    /// Version of the weights that made it.
    pub(super) version: Arc<str>,
}

/// Why an answer ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum End {
    /// By this token.
    Stop(i32),
    /// By its limit.
    Length,
    /// By request.
    Abort,
}

/// A sequence to be scored.
#[derive(Debug)]
pub(super) struct ScoreJob {
    /// The request it belongs to.
    pub(super) rid: Arc<str>,
    pub(super) request: crate::model::Score,
    pub(super) adapter: Option<AdapterId>,
    /// Gets nothing if the request is aborted.
    pub(super) reply: oneshot::Sender<Result<Option<Scores>, Failure>>,
}

/// A scored sequence, and the version that scored it.
#[derive(Debug)]
pub(super) struct Scores {
    pub(super) scored: crate::model::Scored,
    pub(super) version: Arc<str>,
}

/// New weights.
#[derive(Debug)]
pub(super) struct Update {
    pub(super) folder: PathBuf,
    pub(super) version: Option<String>,
    pub(super) abort: bool,
    /// The number of answers that were carried over.
    pub(super) reply: oneshot::Sender<Result<usize, String>>,
}

/// What the thread can be told.
#[derive(Debug)]
pub(super) enum Command {
    Generate(Vec<Job>),
    Score(ScoreJob),
    Update(Update),
    Load(Load),
    Unload(Unload),
    /// Sets the version that answers carry, and nothing else.
    NameVersion(String, oneshot::Sender<()>),
    Pause(PauseMode, oneshot::Sender<()>),
    Continue(oneshot::Sender<()>),
    /// Drops what outlives its sequence.
    Flush(oneshot::Sender<()>),
    /// Ends a request, or all.
    Abort(Option<String>),
    Stop,
}

/// What the thread says of itself.
#[derive(Debug, Clone)]
pub(super) struct Status {
    pub(super) version: Arc<str>,
    pub(super) folder: PathBuf,
    pub(super) paused: bool,
    pub(super) running: usize,
    pub(super) waiting: usize,
    /// Bytes of keys and values that have outlived their sequences.
    pub(super) prefix_bytes: usize,
    pub(super) alive: bool,
    /// Shared: every request reads them.
    pub(super) adapters: Arc<Names>,
}

/// The status, shared.
#[derive(Debug, Clone)]
pub(super) struct Board(Arc<RwLock<Status>>);

impl Board {
    pub(super) fn new(version: String, folder: PathBuf) -> Self {
        Self(Arc::new(RwLock::new(Status {
            version: version.into(),
            folder,
            paused: false,
            running: 0,
            waiting: 0,
            prefix_bytes: 0,
            alive: true,
            adapters: Arc::default(),
        })))
    }

    pub(super) fn read(&self) -> Status {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut Status)) {
        change(&mut self.0.write().unwrap_or_else(PoisonError::into_inner));
    }
}

/// The handle of the compute thread.
#[derive(Debug)]
pub(super) struct Compute {
    commands: Sender<Command>,
    board: Board,
    pub(super) metrics: Arc<Metrics>,
}

/// How the thread goes about it.
#[derive(Debug, Clone)]
pub(super) struct Limits {
    /// Answers that are generated together.
    pub(super) max_running: usize,
    /// Bytes of keys and values of all of them together.
    pub(super) kv_memory: usize,
    /// Tokens of a prompt that are computed between two tokens of running streams.
    pub(super) prefill_chunk: usize,
    /// Bytes of keys and values that may outlive their sequences.
    pub(super) prefix_cache: usize,
    /// How later weights are loaded.
    pub(super) load: LoadOptions,
}

impl Compute {
    /// Starts the thread with a loaded model.
    pub(super) fn start(
        model: Model,
        folder: PathBuf,
        version: String,
        limits: Limits,
    ) -> std::io::Result<(Self, JoinHandle<()>)> {
        let (commands, inbox) = mpsc::channel();
        let board = Board::new(version, folder);
        let scheduler = Scheduler::new(model, limits, board.clone());
        let told = board.clone();
        let thread = std::thread::Builder::new()
            .name("compute".to_owned())
            .spawn(move || work(&told, || scheduler.run(&inbox)))?;
        let metrics = Arc::new(Metrics::new());
        Ok((Self { commands, board, metrics }, thread))
    }

    /// Returns what the thread says of itself.
    pub(super) fn status(&self) -> Status {
        self.board.read()
    }

    /// Sends a command.
    pub(super) fn send(&self, command: Command) -> Result<(), Failure> {
        self.commands.send(command).map_err(|_| Failure::stopped())
    }

    /// Scores a sequence of a request, by an adapter or by the model alone. Returns nothing
    /// if the request is aborted.
    pub(super) async fn score(
        &self,
        rid: Arc<str>,
        request: crate::model::Score,
        adapter: Option<AdapterId>,
    ) -> Result<Option<Scores>, Failure> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Score(ScoreJob { rid, request, adapter, reply }))?;
        answer.await.map_err(|_| Failure::stopped())?
    }
}

/// Does the thread's work and says when that is over. A panic ends it, too: its requests
/// are dropped and so answered, and `/health` must not go on saying that all is well.
fn work(board: &Board, run: impl FnOnce()) {
    let ended = catch_unwind(AssertUnwindSafe(run));
    board.change(|status| status.alive = false);
    if ended.is_err() {
        tracing::error!("the compute thread has failed: nothing is answered until a new start");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_the_thread_is_told_and_leaves_nobody_waiting() {
        let (commands, inbox) = mpsc::channel();
        let board = Board::new("0".to_owned(), PathBuf::new());
        let metrics = Arc::new(Metrics::new());
        let compute = Compute { commands, board: board.clone(), metrics };
        let (reply, answer) = oneshot::channel();
        compute.send(Command::Continue(reply)).unwrap();
        assert!(compute.status().alive);
        let thread = std::thread::spawn(move || {
            work(&board, move || {
                let _inbox = inbox;
                panic!("a fault, as this test wants it");
            });
        });
        thread.join().unwrap();
        assert!(!compute.status().alive);
        assert!(answer.blocking_recv().is_err(), "who waited hears that nothing comes");
        let refused = compute.send(Command::Abort(None)).unwrap_err();
        assert_eq!(refused, Failure::stopped());
        assert_eq!(refused.status.as_u16(), 503);
    }
}

//! The door to the compute thread: what can be asked of it, and what it tells.
//!
//! One thread owns the model. Everybody else holds a [`Compute`], sends commands
//! and reads the status; nothing of libtorch leaves the thread.

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
    pub(super) request: crate::model::Score,
    pub(super) adapter: Option<AdapterId>,
    pub(super) reply: oneshot::Sender<Result<Scores, Failure>>,
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
    pub(super) alive: bool,
    pub(super) adapters: Names,
}

/// The status, shared.
#[derive(Debug, Clone)]
pub(super) struct Board(Arc<RwLock<Status>>);

impl Board {
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
        let status = Status {
            version: version.into(),
            folder,
            paused: false,
            running: 0,
            waiting: 0,
            alive: true,
            adapters: Names::default(),
        };
        let board = Board(Arc::new(RwLock::new(status)));
        let scheduler = Scheduler::new(model, limits, board.clone());
        let told = board.clone();
        let thread = std::thread::Builder::new().name("compute".to_owned()).spawn(move || {
            scheduler.run(&inbox);
            told.change(|status| status.alive = false);
        })?;
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

    /// Scores a sequence, by an adapter or by the model alone.
    pub(super) async fn score(
        &self,
        request: crate::model::Score,
        adapter: Option<AdapterId>,
    ) -> Result<Scores, Failure> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Score(ScoreJob { request, adapter, reply }))?;
        answer.await.map_err(|_| Failure::stopped())?
    }
}

//! The HTTP proxy that people chat through.
//!
//! It passes chats on as they are and hands what it sees to `capture`, `session`
//! and `journal`. Trouble in any of these never breaks a chat: it is counted and
//! the chat goes on. Absent: what a chunk means, which turn follows which, how a
//! turn is kept.

mod auth;
mod body;
mod chat;
mod dispatch;
mod encoding;
mod error;
mod exchange;
mod feedback;
mod fleet;
mod forward;
mod limits;
mod metrics;
mod pass;
mod recorder;
mod relay;
mod request_log;
mod routes;
mod row;
mod upstream;
mod whole;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use secrecy::SecretString;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::engine::Engine;
use crate::journal;
use crate::listener::Door;

pub use crate::capture::Names;
pub use crate::journal::Origin;
pub use auth::Keys;
pub use limits::{LEAST_IDLE, Limits};
pub use metrics::Summary;
pub use request_log::RequestLog;
pub use routes::{Lock, Route, routes};

use fleet::Fleet;
use limits::{Flights, Queue};
use metrics::Metrics;
use recorder::Recorder;

/// Documents larger than this are read on a thread of their own.
const LARGE: usize = 256 << 10;
/// Why an answer is not recorded that outgrows the limit of what is held.
const TOO_LARGE: &str = "answer_too_large";

/// How long the last lines of the request log may take.
const LAST_LINES: Duration = Duration::from_secs(5);

/// How a proxy works.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where it listens.
    pub listen: SocketAddr,
    /// The engines behind it, one at least.
    pub engines: Vec<Backend>,
    /// Whether a client's own `Authorization` is the engine's and is passed on.
    pub forward_authorization: bool,
    /// The clients' keys; without any, everybody on this machine may chat.
    pub keys: Keys,
    /// The key of the control routes; without one, the clients' keys do.
    pub control: Keys,
    /// The spool folder and how it is kept.
    pub journal: journal::Options,
    /// A session without a request for so long is over.
    pub session_idle: Duration,
    /// Whether turns that are still open at the end become rows.
    pub flush_open: bool,
    /// Limits.
    pub limits: Limits,
    /// Where a line about each request goes.
    pub request_log: Option<RequestLog>,
}

/// An engine, and what is known of it.
#[derive(Debug, Clone)]
pub struct Backend {
    /// The engine.
    pub engine: Engine,
    /// Its key.
    pub key: Option<SecretString>,
    /// What the model is called by clients and there, if that differs.
    pub names: Option<Names>,
    /// The temperature in force where a request states none, if it is known.
    pub temperature: Option<f32>,
    /// What makes the ids of its answers.
    pub origin: Origin,
}

impl Backend {
    /// Returns an engine of which nothing else is known.
    pub fn new(engine: Engine) -> Self {
        Self { engine, key: None, names: None, temperature: None, origin: Origin::default() }
    }
}

/// Why a proxy cannot start or end well.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The address cannot be used.
    #[error("cannot listen on {address}")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// Other machines could come in without a key.
    #[error("refusing to listen on {address} without a key: anybody could chat and be recorded")]
    Open {
        /// The address.
        address: SocketAddr,
    },
    /// There is nobody to answer.
    #[error("no engine to answer the chats")]
    NoEngine,
    /// The HTTP client, or the engine's key, is unusable.
    #[error("cannot call `{url}`: {reason}")]
    Client {
        /// The engine.
        url: String,
        /// What is wrong.
        reason: String,
    },
    /// The spool folder cannot be used.
    #[error(transparent)]
    Journal(#[from] journal::Error),
}

/// What every request handler sees.
#[derive(Debug)]
struct Shared {
    fleet: Arc<Fleet>,
    recorder: Arc<Recorder>,
    metrics: Arc<Metrics>,
    keys: Keys,
    control: Keys,
    forward_authorization: bool,
    limits: Limits,
    /// Becomes true when running answers must end.
    stop: watch::Sender<bool>,
    flights: Flights,
    queue: Queue,
    log: Option<RequestLog>,
}

/// A running proxy.
#[derive(Debug)]
pub struct Running {
    /// Where it listens.
    pub address: SocketAddr,
    shared: Arc<Shared>,
    accepting: watch::Sender<bool>,
    server: JoinHandle<()>,
    tickers: [JoinHandle<()>; 2],
    flush_open: bool,
}

/// Starts a proxy: takes the spool folder, listens, serves.
pub async fn start(options: Options) -> Result<Running, Error> {
    if !options.listen.ip().is_loopback() && options.keys.is_empty() {
        return Err(Error::Open { address: options.listen });
    }
    let bind = |source| Error::Bind { address: options.listen, source };
    let listener = TcpListener::bind(options.listen).await.map_err(bind)?;
    let address = listener.local_addr().map_err(bind)?;
    let fleet = Arc::new(Fleet::new(options.engines)?);
    let metrics = Arc::new(Metrics::default());
    let limits = options.limits;
    let settings = recorder::Settings {
        idle: options.session_idle,
        retention: options.journal.retention,
        open: (limits.open_turns, limits.open_bytes),
    };
    let recorder = Arc::new(Recorder::open(options.journal, settings, metrics.clone())?);
    let shared = Arc::new(Shared {
        fleet: fleet.clone(),
        recorder: recorder.clone(),
        metrics,
        keys: options.keys,
        control: options.control,
        forward_authorization: options.forward_authorization,
        limits,
        stop: watch::Sender::new(false),
        flights: Flights::up_to(limits.streams),
        queue: Queue::up_to(limits.queue),
        log: options.request_log,
    });
    let accepting = watch::Sender::new(true);
    let (patience, idle) = (limits.silence, limits.idle);
    let door = Door { listener, patience, idle, stop: shared.stop.subscribe() };
    let server = door.serve(routes::router(shared.clone()), accepting.subscribe());
    let server = tokio::spawn(server);
    let tickers = [tokio::spawn(recorder.tick()), tokio::spawn(fleet.watch(limits.health))];
    Ok(Running { address, shared, accepting, server, tickers, flush_open: options.flush_open })
}

impl Running {
    /// Stops accepting, lets running answers end within the limit, ends the
    /// rest as aborted, and writes what there is to write.
    pub async fn shutdown(self) -> Result<Summary, Error> {
        self.accepting.send_replace(false);
        let drain = self.shared.limits.drain;
        let flights = async { self.shared.flights.landed().await };
        if tokio::time::timeout(drain, flights).await.is_err() {
            self.shared.stop.send_replace(true);
            // Each answer that is cut off is still recorded.
            let landed = self.shared.flights.landed();
            let _ = tokio::time::timeout(Duration::from_secs(5), landed).await;
        }
        self.server.abort();
        self.tickers.iter().for_each(JoinHandle::abort);
        let finished = self.shared.recorder.finish(self.flush_open).await;
        // A disk that hangs keeps nobody from ending.
        if let Some(log) = &self.shared.log
            && tokio::time::timeout(LAST_LINES, log.flush()).await.is_err()
        {
            tracing::warn!("the last lines of the request log could not be written in time");
        }
        let open = finished?;
        Ok(self.shared.metrics.summary(self.shared.recorder.counts(), open))
    }

    /// Returns how many rows are in shards by now.
    pub fn rows(&self) -> u64 {
        self.shared.recorder.counts().rows.load(Ordering::Relaxed)
    }
}

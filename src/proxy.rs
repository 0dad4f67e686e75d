//! The HTTP proxy that people chat through.
//!
//! It passes chats on as they are and hands what it sees to `capture`, `session`
//! and `journal`. Trouble in any of these never breaks a chat: it is counted and
//! the chat goes on. Absent: what a chunk means, which turn follows which, how a
//! turn is kept.

mod auth;
mod body;
mod chat;
mod encoding;
mod error;
mod exchange;
mod feedback;
mod forward;
mod metrics;
mod recorder;
mod relay;
mod routes;
mod upstream;
mod whole;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::serve::ListenerExt;
use secrecy::SecretString;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::engine::Engine;
use crate::journal;

pub use auth::Keys;
pub use metrics::Summary;

use metrics::Metrics;
use recorder::Recorder;
use upstream::Upstream;

/// Documents larger than this are read on a thread of their own.
const LARGE: usize = 256 << 10;
/// Why an answer is not recorded that outgrows the limit of what is held.
const TOO_LARGE: &str = "answer_too_large";

/// How a proxy works.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where it listens.
    pub listen: SocketAddr,
    /// The engine behind it.
    pub engine: Engine,
    /// The engine's key.
    pub engine_key: Option<SecretString>,
    /// Whether a client's own `Authorization` is the engine's and is passed on.
    pub forward_authorization: bool,
    /// The clients' keys; without any, everybody on this machine may chat.
    pub keys: Keys,
    /// The key of the control routes; without one, the clients' keys do.
    pub control: Keys,
    /// The spool folder and how it is kept.
    pub journal: journal::Options,
    /// The temperature in force where a request states none, if it is known.
    pub temperature: Option<f32>,
    /// A session without a request for so long is over.
    pub session_idle: Duration,
    /// Whether turns that are still open at the end become rows.
    pub flush_open: bool,
    /// Limits.
    pub limits: Limits,
}

/// Limits of a proxy.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes of a request's body.
    pub body: usize,
    /// Bytes of an answer, unpacked, that are held to record it. A larger one only
    /// passes.
    pub answer_bytes: usize,
    /// Time until the engine begins to answer.
    pub answer: Duration,
    /// Time between two pieces of an answer.
    pub silence: Duration,
    /// Time that a request waits while the engine is on hold.
    pub hold: Duration,
    /// Time that running answers get at the end.
    pub drain: Duration,
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
    upstream: Upstream,
    recorder: Arc<Recorder>,
    metrics: Arc<Metrics>,
    keys: Keys,
    control: Keys,
    forward_authorization: bool,
    limits: Limits,
    /// Whether requests wait for the engine.
    held: watch::Sender<bool>,
    /// Becomes true when running answers must end.
    stop: watch::Sender<bool>,
    flights: Flights,
}

/// A running proxy.
#[derive(Debug)]
pub struct Running {
    /// Where it listens.
    pub address: SocketAddr,
    shared: Arc<Shared>,
    accepting: watch::Sender<bool>,
    server: JoinHandle<std::io::Result<()>>,
    ticker: JoinHandle<()>,
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
    let upstream = Upstream::new(options.engine, options.engine_key.as_ref())?;
    let metrics = Arc::new(Metrics::default());
    let settings = recorder::Settings {
        idle: options.session_idle,
        retention: options.journal.retention,
        temperature: options.temperature,
        dialect: upstream.dialect,
        origin: journal::Origin {
            tokenizer_hash: options.journal.provenance.tokenizer_hash.clone(),
            chat_template_hash: options.journal.provenance.chat_template_hash.clone(),
        },
    };
    let recorder = Arc::new(Recorder::open(options.journal, settings, metrics.clone())?);
    let shared = Arc::new(Shared {
        upstream,
        recorder: recorder.clone(),
        metrics,
        keys: options.keys,
        control: options.control,
        forward_authorization: options.forward_authorization,
        limits: options.limits,
        held: watch::Sender::new(false),
        stop: watch::Sender::new(false),
        flights: Flights(watch::Sender::new(0)),
    });
    let accepting = watch::Sender::new(true);
    let mut closing = accepting.subscribe();
    let service =
        routes::router(shared.clone()).into_make_service_with_connect_info::<SocketAddr>();
    let listener = listener.tap_io(|stream| {
        // A token must not wait for the next one.
        let _ = stream.set_nodelay(true);
    });
    let server = axum::serve(listener, service).with_graceful_shutdown(async move {
        // The sender lives as long as the proxy.
        let _ = closing.wait_for(|accepting| !accepting).await;
    });
    let server = tokio::spawn(server.into_future());
    let ticker = tokio::spawn(recorder.tick());
    Ok(Running { address, shared, accepting, server, ticker, flush_open: options.flush_open })
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
        self.ticker.abort();
        let open = self.shared.recorder.finish(self.flush_open).await?;
        Ok(self.shared.metrics.summary(self.shared.recorder.counts(), open))
    }

    /// Returns how many rows are in shards by now.
    pub fn rows(&self) -> u64 {
        self.shared.recorder.counts().rows.load(Ordering::Relaxed)
    }
}

/// Counts the requests on their way.
#[derive(Debug)]
struct Flights(watch::Sender<usize>);

impl Flights {
    fn begin(&self) -> Flight {
        self.0.send_modify(|flying| *flying += 1);
        Flight(self.0.clone())
    }

    async fn landed(&self) {
        // The sender is our own, so this cannot fail.
        let _ = self.0.subscribe().wait_for(|flying| *flying == 0).await;
    }
}

/// A request on its way.
#[derive(Debug)]
struct Flight(watch::Sender<usize>);

impl Drop for Flight {
    fn drop(&mut self) {
        self.0.send_modify(|flying| *flying = flying.saturating_sub(1));
    }
}

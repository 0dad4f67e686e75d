//! The embedded engine: a small inference server that speaks SGLang's HTTP
//! dialect.
//!
//! Requests become jobs; one thread owns the model and gives each running job a
//! token at a time; text, stop strings and tool calls are made of the ids on the
//! way out. Adapters lie ready beside the model, and a request chooses one. Only
//! ids and log-probs as sampled leave the compute thread, so what a trainer reads is
//! what happened. What sequences begin with is computed once, as long as it is kept.
//! Absent: several models.

mod adapters;
mod admission;
mod answer;
mod begin;
mod body;
mod capabilities;
mod chat;
mod chat_stream;
mod completion;
mod compute;
mod control;
mod extras;
mod failure;
mod generate;
mod generation;
mod metrics;
mod request;
mod routes;
mod schedule;
mod shape;
mod text;
mod unsupported;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread::JoinHandle;
use std::time::Duration;

use secrecy::{ExposeSecret, SecretString};
use tch::Device;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::listener::Door;
use crate::model::{self, Cache, Config, Dtype, LoadOptions};
use crate::template::{self, Chat};

pub use capabilities::{Capability, Standing, capabilities};

use admission::Gate;
use compute::{Command, Compute, Limits};
use routes::Served;

/// Answers that may wait, if nothing is said.
const MAX_WAITING: usize = 1024;
/// Bytes of keys and values, if nothing is said and the context is no longer.
const KV_MEMORY: usize = 2 << 30;
/// Tokens of a prompt between two tokens of running streams, if nothing is said.
const PREFILL_CHUNK: usize = 256;
/// Bytes of keys and values that outlive their answers, if nothing is said.
const PREFIX_CACHE: usize = 512 << 20;

/// What to serve, and where.
#[derive(Debug, Clone)]
pub struct Options {
    /// A Hugging Face folder.
    pub model: PathBuf,
    /// Where to listen; port 0 takes any free one.
    pub listen: SocketAddr,
    /// Type of the products; the checkpoint's own if not given.
    pub dtype: Option<Dtype>,
    /// Where the weights live, and all is computed.
    pub device: Device,
    /// The key that requests must carry.
    pub key: Option<SecretString>,
    /// Answers that are generated together.
    pub max_running: usize,
    /// Answers that may wait for their turn; requests that come then are told to come
    /// again later.
    pub max_waiting: usize,
    /// Bytes of keys and values of all running answers; 2 GiB if not given, or what one
    /// answer over the whole context takes, if that is more.
    pub kv_memory: Option<usize>,
    /// Tokens of a prompt that are computed between two tokens of the running answers.
    pub prefill_chunk: usize,
    /// Bytes of keys and values that are kept for later requests that begin alike, on top
    /// of those of the running answers; with 0, none are.
    pub prefix_cache: usize,
    /// Start of the seeds of requests that name none.
    pub seed: u64,
    /// Version of the weights at the start.
    pub weight_version: String,
    /// A policy to begin with instead: its folder, and its version. If it cannot be
    /// loaded the model is served, and a warning says so. The name is the model's.
    pub policy: Option<(PathBuf, String)>,
}

impl Options {
    /// Returns the options of a folder served on some loopback port.
    pub fn new(model: impl Into<PathBuf>) -> Self {
        Self {
            model: model.into(),
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            dtype: None,
            device: Device::Cpu,
            key: None,
            max_running: 16,
            max_waiting: MAX_WAITING,
            kv_memory: None,
            prefill_chunk: PREFILL_CHUNK,
            prefix_cache: PREFIX_CACHE,
            seed: 0,
            weight_version: "0".to_owned(),
            policy: None,
        }
    }
}

/// An engine that could not be started.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Anybody on the network could use it.
    #[error("no key protects `{listen}`, which others can reach")]
    OpenToAll {
        /// The address asked for.
        listen: SocketAddr,
    },
    /// The address is not to be had.
    #[error("cannot listen on `{listen}`: {source}")]
    Listen {
        /// The address asked for.
        listen: SocketAddr,
        /// What the system said.
        source: std::io::Error,
    },
    /// The model's folder is not there.
    #[error("no model folder `{}`", .folder.display())]
    NoFolder {
        /// The folder.
        folder: PathBuf,
    },
    /// The weights cannot be loaded.
    #[error(transparent)]
    Model(#[from] model::Error),
    /// The tokenizer or the chat template cannot be loaded.
    #[error(transparent)]
    Template(#[from] template::Error),
    /// The compute thread cannot be started.
    #[error("cannot start the compute thread: {0}")]
    Thread(std::io::Error),
}

/// A running engine.
#[derive(Debug)]
pub struct Running {
    /// Where it listens.
    pub address: SocketAddr,
    served: Arc<Served>,
    accepting: watch::Sender<bool>,
    /// Becomes true when nobody is waited for any more.
    stop: watch::Sender<bool>,
    server: tokio::task::JoinHandle<()>,
    thread: JoinHandle<()>,
}

/// How long running answers may take to end at a shutdown.
const DRAIN: Duration = Duration::from_secs(30);
/// How long connections may linger after that.
const LINGER: Duration = Duration::from_secs(2);

/// Binds, loads and serves. Must be called in a tokio runtime.
pub async fn start(options: Options) -> Result<Running, Error> {
    let Options { model: folder, listen, dtype, device, key, seed, .. } = options;
    if !listen.ip().is_loopback() && key.is_none() {
        return Err(Error::OpenToAll { listen });
    }
    if !folder.is_dir() {
        return Err(Error::NoFolder { folder });
    }
    let failed = |source| Error::Listen { listen, source };
    let listener = TcpListener::bind(listen).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let chat = Chat::load(&folder)?;
    let load = LoadOptions { dtype, device, narrow: true, ..LoadOptions::default() };
    let config = Config::read(&folder)?;
    warn_of_penalty(&config, &folder);
    let name = routes::name_of(&folder);
    let first = (options.policy, options.weight_version);
    let (model, folder, version) = begin::begin(folder, first, (&chat, &config), &load)?;
    let dtype = model.dtype().config_name();
    let (max_running, max_waiting) = (options.max_running.max(1), options.max_waiting);
    let whole = Cache::bytes_of(&config, config.max_position_embeddings as usize);
    let kv_memory = options.kv_memory.unwrap_or_else(|| whole.max(KV_MEMORY));
    let (prefill_chunk, prefix_cache) = (options.prefill_chunk.max(1), options.prefix_cache);
    let limits = Limits { max_running, kv_memory, prefill_chunk, prefix_cache, load };
    let (compute, thread) =
        Compute::start(model, folder, version, limits).map_err(Error::Thread)?;
    let served = Arc::new(Served {
        chat,
        config,
        name,
        compute,
        key: key.map(|key| routes::digest(key.expose_secret())),
        gate: Gate::new(max_running, max_waiting),
        max_running,
        max_waiting,
        kv_memory,
        prefill_chunk,
        prefix_cache,
        dtype,
        seeds: AtomicU64::new(seed),
    });
    let (accepting, stop) = (watch::Sender::new(true), watch::Sender::new(false));
    let (patience, idle) = (body::PATIENCE, body::PATIENCE);
    let door = Door { listener, patience, idle, stop: stop.subscribe() };
    let server = door.serve(routes::router(served.clone()), accepting.subscribe());
    let server = tokio::spawn(server);
    Ok(Running { address, served, accepting, stop, server, thread })
}

fn warn_of_penalty(config: &Config, folder: &Path) {
    let Some(penalty) = config.generation.repetition_penalty.filter(|penalty| *penalty != 1.0)
    else {
        return;
    };
    tracing::warn!(
        penalty,
        folder = %folder.display(),
        "the model's `generation_config.json` wants a repetition penalty, which is not applied"
    );
}

impl Running {
    /// Returns the address as a URL.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns the name under which the model is served.
    pub fn name(&self) -> &str {
        &self.served.name
    }

    /// Takes no more requests, lets running answers end within a limit, and
    /// stops the compute thread.
    pub async fn shutdown(self) {
        let Self { served, accepting, stop, mut server, thread, .. } = self;
        accepting.send_replace(false);
        // A pause must not keep answers from ending.
        let _ = served.compute.send(Command::Continue(tokio::sync::oneshot::channel().0));
        if tokio::time::timeout(DRAIN, &mut server).await.is_err() {
            stop.send_replace(true);
            let _ = served.compute.send(Command::Stop);
            if tokio::time::timeout(LINGER, &mut server).await.is_err() {
                server.abort();
            }
        }
        let _ = served.compute.send(Command::Stop);
        let _ = tokio::task::spawn_blocking(move || thread.join()).await;
    }
}

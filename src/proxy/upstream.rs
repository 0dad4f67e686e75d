//! One engine behind the proxy: its dialect, its name for the model, which weights
//! are at work, and how it is doing.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use axum::http::HeaderValue;
use reqwest::Client;
use secrecy::ExposeSecret;

use crate::capture::{Dialect, Names};
use crate::engine::{self, Engine};
use crate::journal::Origin;
use crate::trajectory::words::LogProbKind;

use super::{Backend, Error};

/// Longest wait for the engine's word about its weights.
const PATIENCE: Duration = Duration::from_secs(2);

/// What a request for an engine looks like.
pub(super) type Kind = (Dialect, Option<Arc<Names>>);

/// One engine behind the proxy.
#[derive(Debug)]
pub(super) struct Upstream {
    pub(super) client: Client,
    pub(super) engine: Engine,
    /// Its address, without credentials.
    pub(super) url: String,
    dialect: Dialect,
    names: RwLock<Option<Arc<Names>>>,
    /// The engine's key, as the header carries it.
    pub(super) authorization: Option<HeaderValue>,
    /// The temperature in force where a request states none, if it is known.
    pub(super) temperature: Option<f32>,
    pub(super) log_prob_kind: LogProbKind,
    /// What makes the ids of its answers.
    pub(super) origin: Origin,
    pub(super) held: AtomicBool,
    /// It could not be reached, or says that it is not well.
    pub(super) away: AtomicBool,
    /// Requests on their way.
    pub(super) busy: AtomicUsize,
    pub(super) requests: AtomicU64,
    pub(super) failures: AtomicU64,
    version: Mutex<Version>,
    /// Held by whoever asks for the version.
    asking: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct Version {
    known: Option<String>,
    /// When the engine said so. None if it was told, not asked.
    asked: Option<Instant>,
    /// How often it was told: an answer on its way since before is stale.
    told: u64,
}

/// An engine while it answers a request.
#[derive(Debug)]
pub(super) struct Busy(Arc<Upstream>);

impl Busy {
    pub(super) fn upstream(&self) -> &Arc<Upstream> {
        &self.0
    }
}

impl Deref for Busy {
    type Target = Upstream;

    fn deref(&self) -> &Upstream {
        &self.0
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.busy.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Makes the client that calls the engines.
pub(super) fn client() -> Result<Client, Error> {
    let builder = Client::builder()
        // Headers pass as they are, and a broken answer breaks only itself.
        .http1_only()
        .connect_timeout(Duration::from_secs(5))
        // A followed redirect would turn a POST into a GET in silence.
        .redirect(reqwest::redirect::Policy::none())
        // Common servers close an idle connection after five seconds; one
        // that is used at that very moment breaks.
        .pool_idle_timeout(Duration::from_secs(4))
        .tcp_nodelay(true)
        .no_proxy();
    builder
        .build()
        .map_err(|error| Error::Client { url: "the engine".to_owned(), reason: error.to_string() })
}

impl Upstream {
    pub(super) fn new(client: Client, backend: Backend) -> Result<Self, Error> {
        let Backend { engine, key, names, temperature, origin } = backend;
        let authorization = match key {
            None => None,
            Some(key) => {
                let value =
                    HeaderValue::from_str(&format!("Bearer {}", key.expose_secret().trim()));
                let mut value = value.map_err(|_| Error::Client {
                    url: engine.url(),
                    reason: "the key holds a character that no header can carry".to_owned(),
                })?;
                value.set_sensitive(true);
                Some(value)
            }
        };
        let dialect = match engine.dialect() {
            engine::Dialect::Sglang => Dialect::Sglang,
            engine::Dialect::Vllm => Dialect::Vllm,
            engine::Dialect::LlamaCpp => Dialect::LlamaCpp,
            engine::Dialect::Generic => Dialect::Generic,
        };
        Ok(Self {
            client,
            url: engine.url(),
            engine,
            dialect,
            names: RwLock::new(names.map(Arc::new)),
            authorization,
            temperature,
            log_prob_kind: LogProbKind::of(dialect.tempers_log_probs()),
            origin,
            held: AtomicBool::new(false),
            away: AtomicBool::new(false),
            busy: AtomicUsize::new(0),
            requests: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            version: Mutex::default(),
            asking: tokio::sync::Mutex::default(),
        })
    }

    /// Counts a request that is on its way from now on.
    pub(super) fn begin(self: Arc<Self>) -> Busy {
        self.busy.fetch_add(1, Ordering::Relaxed);
        self.requests.fetch_add(1, Ordering::Relaxed);
        Busy(self)
    }

    pub(super) fn is_away(&self) -> bool {
        self.away.load(Ordering::Relaxed)
    }

    pub(super) fn is_held(&self) -> bool {
        self.held.load(Ordering::SeqCst)
    }

    /// Returns what its requests look like.
    pub(super) fn kind(&self) -> Kind {
        (self.dialect, self.names())
    }

    /// Returns what the model is called here and there, if that differs.
    pub(super) fn names(&self) -> Option<Arc<Names>> {
        self.names.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes the engine's new name for the model. Clients keep theirs; returns false
    /// if they have none of their own, and ask by whatever name they like.
    pub(super) fn rename(&self, engine: &str) -> bool {
        let mut names = self.names.write().unwrap_or_else(PoisonError::into_inner);
        let Some(known) = names.take() else { return false };
        *names = Some(Arc::new(Names { public: known.public.clone(), engine: engine.to_owned() }));
        true
    }

    /// Returns the version of the weights at work if the engine need not be asked.
    pub(super) fn version_known(&self, age: Duration) -> Option<Option<String>> {
        let version = self.version.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = version.asked.is_some_and(|asked| asked.elapsed() < age);
        (fresh || self.dialect != Dialect::Sglang).then(|| version.known.clone())
    }

    /// Returns the version of the weights at work. The engine is asked again if
    /// what it said is older than `age`; many askers share one question.
    pub(super) async fn version(&self, age: Duration) -> Option<String> {
        if let Some(known) = self.version_known(age) {
            return known;
        }
        let _asking = self.asking.lock().await;
        if let Some(known) = self.version_known(age) {
            return known;
        }
        let told = self.version.lock().unwrap_or_else(PoisonError::into_inner).told;
        let answer = tokio::time::timeout(PATIENCE, self.engine.weight_version()).await;
        let known = answer.ok().and_then(Result::ok).flatten();
        let mut version = self.version.lock().unwrap_or_else(PoisonError::into_inner);
        if version.told == told {
            *version = Version { known: known.clone(), asked: Some(Instant::now()), told };
        }
        known
    }

    /// Takes the word of whoever pushed new weights. An engine that can be asked
    /// is asked again.
    pub(super) fn told(&self, told: String) {
        let mut version = self.version.lock().unwrap_or_else(PoisonError::into_inner);
        *version = Version { known: Some(told), asked: None, told: version.told + 1 };
    }
}

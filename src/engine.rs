//! The client of inference servers: chat, score, weights, health.
//!
//! One `Engine` is one server at one address. What dialect it speaks is probed
//! once; every call has time limits of its own and a bounded number of tries.
//! Whatever goes wrong becomes one [`Error`] kind; nothing becomes a number.
//! Deliberately absent: prompts, caching of answers.

mod adapters;
mod address;
mod chat;
mod error;
mod pool;
mod probe;
mod retry;
mod score;
mod stream;
mod transport;
mod weights;
mod workers;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use reqwest::Method;
use secrecy::SecretString;

use address::Address;
use transport::{Answer, Call, Transport};

pub use adapters::Listed;
pub use chat::{ChatReply, ChatRequest};
pub use error::Error;
pub use pool::{Account, News, Pool, Tell};
pub use retry::Retries;
pub use score::{ScoreRequest, Scores, VLLM_MOST_TOP};
pub use stream::{ChatStream, Delta};
pub use weights::{Carried, Pushed, Readiness};

/// The HTTP dialect that a server speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// SGLang, and the embedded engine.
    Sglang,
    /// vLLM.
    Vllm,
    /// The server of llama.cpp.
    LlamaCpp,
    /// Some OpenAI-compatible server or gateway.
    Generic,
}

impl Dialect {
    /// Every dialect.
    pub const ALL: [Self; 4] = [Self::Sglang, Self::Vllm, Self::LlamaCpp, Self::Generic];

    /// Returns the dialect's name, as it stands before `+http://`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Sglang => "sglang",
            Self::Vllm => "vllm",
            Self::LlamaCpp => "llamacpp",
            Self::Generic => "openai",
        }
    }
}

impl std::fmt::Display for Dialect {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.as_str())
    }
}

/// How to reach a server.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Address, with or without `/v1`, a trailing slash or a dialect in front
    /// (`sglang+http://host:30000`).
    pub url: String,
    /// The dialect, where it should not be probed.
    pub dialect: Option<Dialect>,
    /// Sent as `Authorization: Bearer`.
    pub key: Option<SecretString>,
    /// Name of the model; none asks the server, which must then have just one.
    pub model: Option<String>,
    /// Limit of one try, from connecting to the answer's last byte.
    pub timeout: Duration,
    /// Limit of connecting.
    pub connect_timeout: Duration,
    /// How often and how patiently a failed call is tried again.
    pub retries: Retries,
}

impl EngineOptions {
    /// Returns the options of an address with nothing special.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            dialect: None,
            key: None,
            model: None,
            timeout: Duration::from_secs(300),
            connect_timeout: Duration::from_secs(5),
            retries: Retries::default(),
        }
    }
}

/// One server. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Engine {
    inner: Arc<Inner>,
    retries: Retries,
}

#[derive(Debug)]
struct Inner {
    transport: Transport,
    address: Address,
    dialect: Dialect,
    model: Option<String>,
    /// Index of the base that has answered before; `usize::MAX` before that.
    base: AtomicUsize,
    timeout: Duration,
}

impl Engine {
    /// Finds out what the server speaks and which model it serves.
    pub async fn connect(options: EngineOptions) -> Result<Self, Error> {
        let (mut engine, found) = Self::probed(options).await?;
        engine.check_foreign(&found).await?;
        // Where a probe was refused, the list of models shows whether the key
        // was, or only the path.
        if engine.inner.model.is_none() || found.refused.is_some() {
            let models = engine.models().await;
            if let (Err(Error::Unauthorized { .. }), Some(refused)) = (&models, found.refused) {
                return Err(refused);
            }
            if engine.inner.model.is_none() {
                let name = only(models?, &engine.url())?;
                if let Some(inner) = Arc::get_mut(&mut engine.inner) {
                    inner.model = Some(name);
                }
            }
        }
        Ok(engine)
    }

    /// Finds out what the server speaks, and asks for no model: enough for
    /// weights, health and scoring.
    pub async fn attach(options: EngineOptions) -> Result<Self, Error> {
        let (engine, found) = Self::probed(options).await?;
        engine.check_foreign(&found).await?;
        match found.refused {
            Some(refused) => Err(refused),
            None => Ok(engine),
        }
    }

    /// Refuses what is no inference server: not even its list of models is JSON.
    async fn check_foreign(&self, found: &probe::Found) -> Result<(), Error> {
        if !found.foreign {
            return Ok(());
        }
        let foreign = || Error::Foreign { url: self.url() };
        match self.api(Method::GET, "/models", None).await {
            Ok(answer) => answer.json::<serde_json::Value>().map(drop).map_err(|_| foreign()),
            Err(error) if error.is_web_page() => Err(foreign()),
            Err(error @ (Error::Unreachable { .. } | Error::Timeout { .. })) => Err(error),
            Err(error) if probe::is_failing(&error) => Err(error),
            Err(_) => Ok(()),
        }
    }

    async fn probed(options: EngineOptions) -> Result<(Self, probe::Found), Error> {
        let address = Address::parse(&options.url)?;
        let transport = Transport::new(&options, &address)?;
        let found = match options.dialect.or(address.dialect) {
            Some(dialect) => probe::Found::told(dialect),
            None => probe::dialect(&transport, &address, &options.retries).await?,
        };
        tracing::info!(url = %address, dialect = %found.dialect, "engine attached");
        let inner = Inner {
            transport,
            address,
            dialect: found.dialect,
            model: options.model,
            base: AtomicUsize::new(usize::MAX),
            timeout: options.timeout,
        };
        Ok((Self { inner: Arc::new(inner), retries: options.retries }, found))
    }

    /// Returns the same server, to be tried otherwise.
    pub fn with_retries(self, retries: Retries) -> Self {
        Self { retries, ..self }
    }

    /// Returns the server's address, without credentials.
    pub fn url(&self) -> String {
        self.inner.address.to_string()
    }

    /// Returns the dialect.
    pub fn dialect(&self) -> Dialect {
        self.inner.dialect
    }

    /// Returns the name of the model, if `connect` made this engine or the
    /// options named one.
    pub fn model(&self) -> Option<&str> {
        self.inner.model.as_deref()
    }

    /// Returns the address of an OpenAI route (`/chat/completions`) at the base
    /// that works, as far as that is known by now.
    pub fn api_url(&self, path: &str) -> String {
        let known = self.inner.base.load(Ordering::Relaxed);
        let bases = self.inner.address.bases();
        let base = bases.get(known).or(bases.first());
        base.map_or_else(String::new, |base| format!("{base}{path}"))
    }

    /// Returns the address of a native route (`/model_info`).
    pub fn native_url(&self, path: &str) -> String {
        self.inner.address.native(path)
    }

    /// Lists the ids of `/v1/models`.
    pub async fn models(&self) -> Result<Vec<String>, Error> {
        let answer = self.api(Method::GET, "/models", None).await?;
        let listed: serde_json::Value = answer.json()?;
        let Some(models) = listed.get("data").and_then(serde_json::Value::as_array) else {
            return Err(answer.malformed("no `data` list"));
        };
        let ids = models.iter().filter_map(|model| model.get("id")?.as_str().map(str::to_owned));
        Ok(ids.collect())
    }

    /// Calls an OpenAI route. An address without a version segment is tried
    /// with `/v1` first and, where that path is not known, without it; what
    /// worked is remembered.
    async fn api(&self, method: Method, path: &str, body: Option<Bytes>) -> Result<Answer, Error> {
        self.api_call(ApiCall { method, path, body, headers: &[] }).await
    }

    async fn api_call(&self, call: ApiCall<'_>) -> Result<Answer, Error> {
        let ApiCall { method, path, body, headers } = call;
        let inner = &*self.inner;
        let bases = inner.address.bases();
        let known = inner.base.load(Ordering::Relaxed);
        let send = |base: &str| {
            let call = Call {
                method: method.clone(),
                url: format!("{base}{path}"),
                body: body.clone(),
                headers: headers.to_vec(),
                timeout: inner.timeout,
            };
            async move { inner.transport.send(&call, &self.retries).await }
        };
        if let Some(base) = bases.get(known) {
            return send(base).await;
        }
        let mut first = None;
        for (index, base) in bases.iter().enumerate() {
            match send(base).await {
                Err(error) if error.is_wrong_path() => {
                    first.get_or_insert(error);
                }
                Err(error) => return Err(error),
                Ok(answer) => {
                    inner.base.store(index, Ordering::Relaxed);
                    return Ok(answer);
                }
            }
        }
        Err(first.unwrap_or_else(|| Error::NoModel { url: self.url() }))
    }

    /// Calls a native route.
    async fn native(&self, call: NativeCall<'_>) -> Result<Answer, Error> {
        let NativeCall { method, path, body, timeout, retries } = call;
        let inner = &*self.inner;
        let url = inner.address.native(path);
        let body = body.map(|body| Bytes::from(body.to_string()));
        let timeout = timeout.map_or(inner.timeout, |timeout| timeout.min(inner.timeout));
        let call = Call { method, url, body, headers: Vec::new(), timeout };
        inner.transport.send(&call, retries.unwrap_or(&self.retries)).await
    }

    /// Refuses what a dialect cannot do.
    fn needs(&self, dialect: Dialect, what: &'static str) -> Result<(), Error> {
        if self.inner.dialect == dialect {
            return Ok(());
        }
        Err(Error::Unsupported { url: self.url(), dialect: self.inner.dialect, what })
    }
}

/// A call of an OpenAI route.
struct ApiCall<'a> {
    method: Method,
    path: &'a str,
    body: Option<Bytes>,
    headers: &'a [(&'static str, String)],
}

/// A call of a native route; `None` takes what the engine was made with, whose time
/// no call outlasts.
struct NativeCall<'a> {
    method: Method,
    path: &'a str,
    body: Option<&'a serde_json::Value>,
    timeout: Option<Duration>,
    retries: Option<&'a Retries>,
}

fn only(mut names: Vec<String>, url: &str) -> Result<String, Error> {
    match (names.pop(), names.len()) {
        (Some(name), 0) => Ok(name),
        (Some(last), _) => {
            names.push(last);
            Err(Error::SeveralModels { url: url.to_owned(), names })
        }
        (None, _) => Err(Error::NoModel { url: url.to_owned() }),
    }
}

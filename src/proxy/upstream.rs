//! The engine behind the proxy: its HTTP client, its dialect, and which weights
//! are at work.

use std::time::{Duration, Instant};

use axum::http::HeaderValue;
use reqwest::Client;
use secrecy::{ExposeSecret, SecretString};
use tokio::sync::Mutex;

use crate::capture::Dialect;
use crate::engine::{self, Engine};

use super::Error;

/// Longest wait for the engine's word about its weights.
const PATIENCE: Duration = Duration::from_secs(2);

/// The engine behind the proxy.
#[derive(Debug)]
pub(super) struct Upstream {
    pub(super) client: Client,
    pub(super) engine: Engine,
    pub(super) dialect: Dialect,
    /// The engine's key, as the header carries it.
    pub(super) authorization: Option<HeaderValue>,
    version: Mutex<Version>,
}

#[derive(Debug, Default)]
struct Version {
    known: Option<String>,
    /// When the engine said so. None if it was told, not asked.
    asked: Option<Instant>,
}

impl Upstream {
    pub(super) fn new(engine: Engine, key: Option<&SecretString>) -> Result<Self, Error> {
        let refuse = |reason: String| Error::Client { url: engine.url(), reason };
        let authorization = match key {
            None => None,
            Some(key) => {
                let value =
                    HeaderValue::from_str(&format!("Bearer {}", key.expose_secret().trim()));
                let mut value = value.map_err(|_| {
                    refuse("the key holds a character that no header can carry".to_owned())
                })?;
                value.set_sensitive(true);
                Some(value)
            }
        };
        let client = Client::builder()
            // Headers pass as they are, and a broken answer breaks only itself.
            .http1_only()
            .connect_timeout(Duration::from_secs(5))
            // A followed redirect would turn a POST into a GET in silence.
            .redirect(reqwest::redirect::Policy::none())
            // Common servers close an idle connection after five seconds; one
            // that is used at that very moment breaks.
            .pool_idle_timeout(Duration::from_secs(4))
            .tcp_nodelay(true)
            .no_proxy()
            .build()
            .map_err(|error| refuse(error.to_string()))?;
        let dialect = match engine.dialect() {
            engine::Dialect::Sglang => Dialect::Sglang,
            engine::Dialect::Vllm => Dialect::Vllm,
            engine::Dialect::LlamaCpp => Dialect::LlamaCpp,
            engine::Dialect::Generic => Dialect::Generic,
        };
        Ok(Self { client, engine, dialect, authorization, version: Mutex::default() })
    }

    /// Returns the version of the weights at work. The engine is asked again if
    /// what it said is older than `age`; many askers share one question.
    pub(super) async fn version(&self, age: Duration) -> Option<String> {
        let mut version = self.version.lock().await;
        if self.dialect != Dialect::Sglang {
            return version.known.clone();
        }
        if version.asked.is_some_and(|asked| asked.elapsed() < age) {
            return version.known.clone();
        }
        let answer = tokio::time::timeout(PATIENCE, self.engine.weight_version()).await;
        version.known = answer.ok().and_then(Result::ok).flatten();
        version.asked = Some(Instant::now());
        version.known.clone()
    }

    /// Takes the word of whoever pushed new weights. An engine that can be asked
    /// is asked again.
    pub(super) async fn told(&self, told: String) {
        let mut version = self.version.lock().await;
        *version = Version { known: Some(told), asked: None };
    }
}

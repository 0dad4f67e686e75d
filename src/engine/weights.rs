//! The control routes: weights, pause, health.

mod vllm;

use std::path::Path;
use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};

use crate::wire::sglang::{ModelInfo, Outcome, PauseBody, PauseMode, UpdateBody};

use super::error::told;
use super::retry::Retries;
use super::transport::Answer;
use super::{Dialect, Engine, Error, NativeCall};

/// Limit of a call that should be answered at once.
const QUICK: Duration = Duration::from_secs(10);
/// A health check of SGLang may wait 20 s for a generation.
const HEALTH: Duration = Duration::from_secs(30);

/// Where a policy comes from and what it is called.
#[derive(Debug, Clone, Copy)]
pub struct Pushed<'a> {
    /// The folder, as the server's host sees it.
    pub folder: &'a Path,
    /// The version that answers carry from then on.
    pub version: &'a str,
}

/// What a server says of the weights that are at work.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Carried {
    /// Their version.
    pub version: Option<String>,
    /// Whether the server has a route that tells it.
    pub tells: bool,
    /// Where they came from, if it tells.
    pub folder: Option<String>,
}

/// What a server says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readiness {
    /// It takes requests.
    Ready,
    /// It has no route that tells.
    Unknown,
}

impl Engine {
    /// Returns the model's folder and version, asking once and briefly.
    pub async fn model_info(&self) -> Result<ModelInfo, Error> {
        self.needs(Dialect::Sglang, "tell its weight version")?;
        match self.quick(Method::GET, "/model_info", None).await {
            Err(Error::Status { status: 404, .. }) => {
                self.quick(Method::GET, "/get_model_info", None).await?.json()
            }
            answer => answer?.json(),
        }
    }

    /// Returns what is at work, of any server that weights can be pushed to.
    pub async fn carried(&self) -> Result<Carried, Error> {
        if self.dialect() == Dialect::Vllm {
            return vllm::carried(self).await;
        }
        let ModelInfo { weight_version, model_path, .. } = self.model_info().await?;
        Ok(Carried { version: weight_version, tells: true, folder: model_path })
    }

    /// Returns the version of the weights that are at work, if the server tells.
    pub async fn weight_version(&self) -> Result<Option<String>, Error> {
        if self.dialect() != Dialect::Sglang {
            return Ok(None);
        }
        Ok(self.model_info().await?.weight_version)
    }

    /// Stops generating. New requests wait; `retract` puts running ones back
    /// into the queue.
    pub async fn pause(&self, mode: PauseMode) -> Result<(), Error> {
        if self.dialect() == Dialect::Vllm {
            return vllm::pause(self, mode).await;
        }
        self.needs(Dialect::Sglang, "pause")?;
        let body = json!(PauseBody { mode });
        did(&self.control("/pause_generation", &body).await?, false)
    }

    /// Goes on generating.
    pub async fn resume(&self) -> Result<(), Error> {
        if self.dialect() == Dialect::Vllm {
            return vllm::resume(self).await;
        }
        self.needs(Dialect::Sglang, "continue")?;
        did(&self.control("/continue_generation", &json!({})).await?, false)
    }

    /// Loads the weights of a folder. The body's own `success` decides; the
    /// status does not.
    pub async fn update_weights_from_disk(&self, pushed: Pushed<'_>) -> Result<(), Error> {
        if self.dialect() == Dialect::Vllm {
            return vllm::update(self, pushed).await;
        }
        self.needs(Dialect::Sglang, "load weights from a folder")?;
        let body = json!(UpdateBody {
            model_path: pushed.folder.display().to_string(),
            weight_version: Some(pushed.version.to_owned()),
            abort_all_requests: false,
            flush_cache: true,
        });
        let call = NativeCall {
            method: Method::POST,
            path: "/update_weights_from_disk",
            body: Some(&body),
            timeout: None,
            retries: None,
        };
        match self.native(call).await {
            Ok(answer) => did(&answer, true),
            Err(Error::Status { url, status: 400, body, .. }) => {
                Err(Error::Refused { url, message: body, tokens: None })
            }
            Err(error) => Err(error),
        }
    }

    /// Empties the prefix cache. An answer that says it was not done is an
    /// error, whatever its status.
    pub async fn flush(&self) -> Result<(), Error> {
        if self.dialect() == Dialect::Vllm {
            return vllm::flush(self).await;
        }
        self.needs(Dialect::Sglang, "flush its cache")?;
        match self.control("/flush_cache", &json!({})).await {
            Ok(answer) => did(&answer, false),
            Err(Error::Status { url, status: 400, body, .. }) => {
                Err(Error::Refused { url, message: body, tokens: None })
            }
            Err(error) => Err(error),
        }
    }

    /// Asks whether the server takes requests.
    pub async fn health(&self) -> Result<Readiness, Error> {
        for path in ["/ready", "/health"] {
            let once = Retries::none();
            let call = NativeCall {
                method: Method::GET,
                path,
                body: None,
                timeout: Some(HEALTH),
                retries: Some(&once),
            };
            match self.native(call).await {
                Ok(_) => return Ok(Readiness::Ready),
                Err(error) if error.is_wrong_path() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Readiness::Unknown)
    }

    /// Tells an oclaw proxy at this address which policy is served now, and by which
    /// name it is to be asked for, if that has changed.
    pub async fn announce(&self, pushed: Pushed<'_>, model: Option<&str>) -> Result<(), Error> {
        let mut body = json!({
            "weight_version": pushed.version,
            "model_path": pushed.folder.display().to_string(),
        });
        if let Some(model) = model {
            body["model"] = json!(model);
        }
        let answer = self.control("/oclaw/policy", &body).await?;
        did(&answer, false)?;
        let told: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
        match told.get("renamed") == Some(&Value::Bool(false)) {
            true => Err(Error::Refused {
                url: answer.url,
                message: "it hands on the name that clients ask for: start it with \
                          `--model-name`"
                    .to_owned(),
                tokens: None,
            }),
            false => Ok(()),
        }
    }

    pub(super) async fn control(&self, path: &str, body: &Value) -> Result<Answer, Error> {
        let call = NativeCall {
            method: Method::POST,
            path,
            body: Some(body),
            timeout: Some(HEALTH),
            retries: None,
        };
        self.native(call).await
    }

    pub(super) async fn quick(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Answer, Error> {
        let once = Retries::none();
        let call = NativeCall { method, path, body, timeout: Some(QUICK), retries: Some(&once) };
        self.native(call).await
    }
}

/// Reads `success` from an answer; `must_tell` refuses one that has none.
pub(super) fn did(answer: &Answer, must_tell: bool) -> Result<(), Error> {
    let outcome: Outcome = serde_json::from_slice(&answer.body).unwrap_or_default();
    match outcome.success {
        Some(true) => Ok(()),
        None if !must_tell => Ok(()),
        None => Err(answer.malformed("it does not say whether it was done")),
        Some(false) => {
            let message = told(&answer.body).message;
            Err(Error::Refused { url: answer.url.clone(), message, tokens: None })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(body: &'static str) -> Answer {
        Answer { url: "u".to_owned(), body: body.into() }
    }

    #[test]
    fn success_is_read_from_the_body() {
        assert!(did(&answer(r#"{"success":true,"message":"ok"}"#), true).is_ok());
        assert!(did(&answer("Cache flushed."), false).is_ok());
        assert!(matches!(did(&answer("done"), true), Err(Error::Malformed { .. })));
        let error =
            did(&answer(r#"{"success":false,"message":"no such folder"}"#), false).unwrap_err();
        assert_eq!(error.to_string(), "`u` refused: no such folder");
    }
}

//! Handing a policy to running servers.
//!
//! One server after the other: pause, load, check the version, flush, and go on
//! generating, whatever happened before. Only then a proxy is told. What the
//! servers cannot do together (be switched in one instant) is not hidden: each
//! answer carries the version that made it.

mod gate;
mod lock;
mod policy;
mod rollback;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::engine::Engine;
use crate::engine::Error as EngineError;
use crate::wire::sglang::PauseMode;

pub use gate::{RECEIPT, require_gate, weights_hash};
pub use lock::Lock;
pub use policy::{Policy, folder_of};
pub use rollback::{Rollback, WITHDRAWN};

/// A push that did not happen, or not wholly.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The policy folder is not there or not whole.
    #[error("cannot serve the policy `{}`: {reason}", .folder.display())]
    Policy {
        /// The folder as it was given.
        folder: PathBuf,
        /// What is missing.
        reason: String,
    },
    /// The folder's name tells no version, or the version is no version.
    #[error("cannot tell the version of `{}`: {reason}", .folder.display())]
    Version {
        /// The folder.
        folder: PathBuf,
        /// Why not.
        reason: String,
    },
    /// Another push is at work.
    #[error("another push holds `{}`", .path.display())]
    Locked {
        /// The lock file.
        path: PathBuf,
    },
    /// The lock file cannot be used.
    #[error("cannot lock `{}`: {source}", .path.display())]
    Lock {
        /// The lock file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The policy has not passed the gate.
    #[error("the receipt `{}` does not let this policy pass: {reason}", .receipt.display())]
    Gate {
        /// The receipt.
        receipt: PathBuf,
        /// Why not.
        reason: String,
    },
    /// There is no way back.
    #[error("cannot roll `{}` back: {reason}", .link.display())]
    Rollback {
        /// The `latest`.
        link: PathBuf,
        /// Why not.
        reason: String,
    },
    /// `latest` is the oldest policy there is.
    #[error(
        "cannot roll `{}` back: there is no policy before version {version} to go back to",
        .link.display()
    )]
    Oldest {
        /// The `latest`.
        link: PathBuf,
        /// Its version.
        version: String,
        /// The model that it was trained from, if its record tells.
        base: Option<PathBuf>,
    },
    /// A trainer would go on from the policy that is to be withdrawn.
    #[error("`oclaw train` is at work in `{}`", .folder.display())]
    Training {
        /// Folder of the policies.
        folder: PathBuf,
    },
    /// A server did not do its part.
    #[error("{step} failed: {source}")]
    Engine {
        /// Which part.
        step: Step,
        /// What the server said.
        source: EngineError,
    },
    /// The server says it loaded the weights, but carries another version.
    #[error("`{url}` carries version {found} after loading version `{wanted}`", found = shown(.found))]
    OtherVersion {
        /// The server.
        url: String,
        /// What was pushed.
        wanted: String,
        /// What the server says it has.
        found: Option<String>,
    },
}

fn shown(version: &Option<String>) -> String {
    version.as_ref().map_or_else(|| "none".to_owned(), |version| format!("`{version}`"))
}

/// The parts of a push, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Reading the version that is served now.
    Ask,
    /// Holding generation.
    Pause,
    /// Loading the weights.
    Update,
    /// Reading the version again.
    Verify,
    /// Emptying the prefix cache.
    Flush,
    /// Going on generating.
    Continue,
    /// Looking whether the server still takes requests.
    Health,
    /// Telling the proxy.
    Announce,
}

impl std::fmt::Display for Step {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Ask => "asking for the version",
            Self::Pause => "pause",
            Self::Update => "update",
            Self::Verify => "version check",
            Self::Flush => "flush",
            Self::Continue => "continue",
            Self::Health => "health check",
            Self::Announce => "telling the proxy",
        })
    }
}

/// One part that was tried.
#[derive(Debug, Clone)]
pub struct Tried {
    /// The server.
    pub url: String,
    /// Which part.
    pub step: Step,
    /// How long it took.
    pub took: Duration,
    /// What came of it, in words.
    pub outcome: String,
    /// Whether it worked.
    pub good: bool,
}

/// How a push goes about it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// Whether a server that carries the version already gets it again.
    pub force: bool,
}

/// Pushes a policy to each server in turn and then tells the proxies, reporting
/// each part to `watch`. The first failure ends it; servers done before keep the
/// new policy. Returns how many servers took it, not counting those that had it.
pub async fn push(
    policy: &Policy,
    engines: &[Engine],
    proxies: &[Engine],
    options: Options,
    watch: &dyn Fn(Tried),
) -> Result<usize, Error> {
    let mut pushed = 0;
    for engine in engines {
        let server = Server { engine, policy, watch };
        pushed += usize::from(server.push(options).await?);
    }
    for proxy in proxies {
        let server = Server { engine: proxy, policy, watch };
        let announced = proxy.announce(policy.pushed());
        server.step(Step::Announce, announced, |()| "told".to_owned()).await?;
    }
    Ok(pushed)
}

struct Server<'a> {
    engine: &'a Engine,
    policy: &'a Policy,
    watch: &'a dyn Fn(Tried),
}

impl Server<'_> {
    async fn push(&self, options: Options) -> Result<bool, Error> {
        let Policy { version, .. } = self.policy;
        let info = self.engine.model_info();
        let info = self
            .step(Step::Ask, info, |info| format!("serves version {}", shown(&info.weight_version)))
            .await?;
        if info.weight_version.as_ref() == Some(version) && !options.force {
            let path = info.model_path.unwrap_or_default();
            let outcome = format!("already at version `{version}` (from `{path}`)");
            self.tell(Step::Update, Duration::ZERO, outcome, true);
            return Ok(false);
        }
        let pause = self.engine.pause(PauseMode::Retract);
        let paused = self.step(Step::Pause, pause, |()| "held".to_owned()).await;
        let loaded = match paused {
            Ok(()) => self.load().await,
            Err(error) => Err(error),
        };
        // Also after a failed pause: it may have arrived all the same.
        let resumed =
            self.step(Step::Continue, self.engine.resume(), |()| "goes on".to_owned()).await;
        loaded.and(resumed)?;
        self.step(Step::Health, self.engine.health(), |found| format!("{found:?}").to_lowercase())
            .await?;
        Ok(true)
    }

    async fn load(&self) -> Result<(), Error> {
        let version = &self.policy.version;
        let update = self.engine.update_weights_from_disk(self.policy.pushed());
        self.step(Step::Update, update, |()| format!("loaded version `{version}`")).await?;
        let info = self.engine.model_info();
        let info = self
            .step(Step::Verify, info, |info| format!("carries {}", shown(&info.weight_version)))
            .await?;
        if info.weight_version.as_ref() != Some(version) {
            return Err(Error::OtherVersion {
                url: self.engine.url(),
                wanted: version.clone(),
                found: info.weight_version,
            });
        }
        self.step(Step::Flush, self.engine.flush(), |()| "emptied".to_owned()).await
    }

    async fn step<T>(
        &self,
        step: Step,
        call: impl Future<Output = Result<T, EngineError>>,
        outcome: impl FnOnce(&T) -> String,
    ) -> Result<T, Error> {
        let start = Instant::now();
        match call.await {
            Ok(value) => {
                self.tell(step, start.elapsed(), outcome(&value), true);
                Ok(value)
            }
            Err(source) => {
                self.tell(step, start.elapsed(), source.to_string(), false);
                Err(Error::Engine { step, source })
            }
        }
    }

    fn tell(&self, step: Step, took: Duration, outcome: String, good: bool) {
        (self.watch)(Tried { url: self.engine.url(), step, took, outcome, good });
    }
}

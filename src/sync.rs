//! Handing a policy to running servers.
//!
//! One server after the other: pause, load, check the version, flush, and go on
//! generating, whatever happened before. Only then a proxy is told. What the
//! servers cannot do together (be switched in one instant) is not hidden: each
//! answer carries the version that made it.

mod gate;
mod latest;
mod lock;
mod policy;
mod publish;
mod rollback;
mod server;

use std::path::PathBuf;
use std::time::Duration;

use crate::engine::Engine;
use crate::engine::Error as EngineError;

pub use gate::{RECEIPT, require_gate, weights_hash};
pub use lock::Lock;
pub use policy::{Policy, folder_of};
pub use publish::Publication;
pub use rollback::{Rollback, WITHDRAWN};
pub use server::carried;

use policy::PREFIX;
use server::Server;

/// Adapters that stay loaded beside the one that is pushed: requests on their way
/// may still ask for them.
const SPARE: usize = 2;

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
    /// The server has an adapter of this version from another folder.
    #[error("`{url}` serves `{name}` from `{folder}` already")]
    OtherAdapter {
        /// The server.
        url: String,
        /// Name of the adapter.
        name: String,
        /// Where it came from.
        folder: String,
    },
    /// A policy cannot be put into the folder of published ones.
    #[error("cannot publish `{}`: {source}", .folder.display())]
    Publish {
        /// What was to be written.
        folder: PathBuf,
        /// What the system said.
        source: std::io::Error,
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
    /// Letting go of an adapter.
    Unload,
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
            Self::Unload => "unload",
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
    let model = match proxies.first().and(engines.first()) {
        Some(engine) => asked_for(policy, engine).await?,
        None => None,
    };
    for proxy in proxies {
        let server = Server { engine: proxy, policy, watch };
        let announced = proxy.announce(policy.pushed(), model.as_deref());
        server.step(Step::Announce, announced, |()| "told".to_owned()).await?;
    }
    // Without a proxy clients choose adapters by themselves, older ones, too.
    if !proxies.is_empty() && policy.adapter.is_some() {
        for engine in engines {
            Server { engine, policy, watch }.unload_old(SPARE).await;
        }
    }
    Ok(pushed)
}

/// Returns the name by which proxies are to ask for a policy: that of its adapter; or
/// the model's own, where an adapter was asked for until now.
async fn asked_for(policy: &Policy, engine: &Engine) -> Result<Option<String>, Error> {
    if let Some(name) = policy.adapter_name() {
        return Ok(Some(name));
    }
    let listed = engine.listed().await;
    let listed = listed.map_err(|source| Error::Engine { step: Step::Ask, source })?;
    let is_ours = |name: &str| name.starts_with(PREFIX);
    let own = listed.iter().find(|listed| !is_ours(&listed.name));
    let own = own.filter(|_| listed.iter().any(|listed| is_ours(&listed.name)));
    Ok(own.map(|listed| listed.name.clone()))
}

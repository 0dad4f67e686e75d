//! How a subcommand gets an engine: the address and key that the user gave, or
//! an embedded engine inside this process.

use std::net::SocketAddr;
use std::path::Path;

use secrecy::SecretString;

use crate::common::Context;
use crate::report::Failure;

/// Reads a key: from the file, else from `OCLAW_<COMMAND>_KEY`. An empty one is
/// a mistake, not the absence of a key.
pub(crate) fn key(command: &str, file: Option<&Path>) -> anyhow::Result<Option<SecretString>> {
    let variable = format!("OCLAW_{}_KEY", command.replace('-', "_").to_uppercase());
    let (place, text) = match (file, std::env::var(&variable)) {
        (Some(file), _) => {
            let text = std::fs::read_to_string(file).map_err(|error| {
                Failure::usage(format!("cannot read the key in `{}`: {error}", file.display()))
            })?;
            (file.display().to_string(), text)
        }
        (None, Ok(text)) => (variable, text),
        (None, Err(_)) => return Ok(None),
    };
    match text.trim() {
        "" => Err(Failure::usage(format!("the key in `{place}` is empty")).into()),
        key => Ok(Some(SecretString::from(key))),
    }
}

/// An engine inside this process, on a loopback port.
#[cfg(feature = "torch")]
#[derive(Debug)]
pub(crate) struct Embedded {
    running: oclaw::serving::Running,
}

#[cfg(feature = "torch")]
impl Embedded {
    /// Loads a model folder and serves it, on any free port if no address is
    /// given, in the checkpoint's type if `dtype` is `auto`. Must be called inside
    /// `Context::block_on`.
    pub(crate) async fn start(
        context: &Context,
        model: &Path,
        listen: Option<SocketAddr>,
        dtype: &str,
    ) -> anyhow::Result<Self> {
        let mut options = oclaw::serving::Options::new(model);
        options.seed = context.seed;
        options.dtype = dtype.parse().ok();
        options.listen = listen.unwrap_or(options.listen);
        Ok(Self { running: oclaw::serving::start(options).await? })
    }

    /// Returns the engine's address.
    pub(crate) fn url(&self) -> String {
        self.running.url()
    }

    /// Lets running answers end, and stops.
    pub(crate) async fn shutdown(self) {
        self.running.shutdown().await;
    }
}

/// What stands in for the engine in a build that has none.
#[cfg(not(feature = "torch"))]
#[derive(Debug)]
pub(crate) struct Embedded {
    never: std::convert::Infallible,
}

#[cfg(not(feature = "torch"))]
impl Embedded {
    /// Says what this build lacks.
    pub(crate) async fn start(
        _: &Context,
        _: &Path,
        _: Option<SocketAddr>,
        _: &str,
    ) -> anyhow::Result<Self> {
        Err(crate::common::needs_torch("`--model`"))
    }

    /// Returns the engine's address.
    pub(crate) fn url(&self) -> String {
        match self.never {}
    }

    /// Lets running answers end, and stops.
    pub(crate) async fn shutdown(self) {
        match self.never {}
    }
}

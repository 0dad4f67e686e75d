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

/// Where a model is computed, as people type it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceName {
    /// The processor.
    Cpu,
    /// The CUDA device of this number.
    Cuda(usize),
}

impl std::str::FromStr for DeviceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = match text {
            "cpu" => return Ok(Self::Cpu),
            "cuda" => Some(0),
            _ => text.strip_prefix("cuda:").and_then(|number| number.parse().ok()),
        };
        number.map(Self::Cuda).ok_or_else(|| "wanted cpu or cuda:N".to_owned())
    }
}

#[cfg(feature = "torch")]
impl From<DeviceName> for tch::Device {
    fn from(name: DeviceName) -> Self {
        match name {
            DeviceName::Cpu => Self::Cpu,
            DeviceName::Cuda(number) => Self::Cuda(number),
        }
    }
}

/// Starts an engine. What is wrong with the model is told as of the model, so that a
/// device that is not there has its hint and its exit code.
#[cfg(feature = "torch")]
pub(crate) async fn start(
    options: oclaw::serving::Options,
) -> anyhow::Result<oclaw::serving::Running> {
    use oclaw::serving::Error;
    oclaw::serving::start(options).await.map_err(|error| match error {
        Error::Model(error) => error.into(),
        error => error.into(),
    })
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
        Self::start_on(context, model, listen, (dtype, DeviceName::Cpu)).await
    }

    /// The same on a device.
    pub(crate) async fn start_on(
        context: &Context,
        model: &Path,
        listen: Option<SocketAddr>,
        (dtype, device): (&str, DeviceName),
    ) -> anyhow::Result<Self> {
        let mut options = oclaw::serving::Options::new(model);
        options.seed = context.seed;
        options.dtype = dtype.parse().ok();
        options.device = device.into();
        options.listen = listen.unwrap_or(options.listen);
        Ok(Self { running: start(options).await? })
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

    /// Says the same.
    pub(crate) async fn start_on(
        context: &Context,
        model: &Path,
        listen: Option<SocketAddr>,
        (dtype, _): (&str, DeviceName),
    ) -> anyhow::Result<Self> {
        Self::start(context, model, listen, dtype).await
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

#[cfg(test)]
mod tests {
    use super::DeviceName;

    #[test]
    fn a_device_is_the_processor_or_has_a_number() {
        for (text, expected) in [
            ("cpu", Some(DeviceName::Cpu)),
            ("cuda", Some(DeviceName::Cuda(0))),
            ("cuda:3", Some(DeviceName::Cuda(3))),
            ("cuda:", None),
            ("cuda:-1", None),
            ("cuda:x", None),
            ("gpu", None),
            ("", None),
        ] {
            assert_eq!(text.parse::<DeviceName>().ok(), expected, "{text}");
        }
        assert_eq!("gpu".parse::<DeviceName>().unwrap_err(), "wanted cpu or cuda:N");
    }
}

//! Finding out what a server speaks.

use std::time::Duration;

use reqwest::Method;
use serde_json::Value;

use super::address::Address;
use super::retry::Retries;
use super::transport::{Call, Transport};
use super::{Dialect, Error};

/// What gives a dialect away: a route that only this server has, and a member
/// of its JSON answer.
const SIGNS: &[(&str, &[&str], Dialect)] = &[
    ("/model_info", &["model_path"], Dialect::Sglang),
    ("/get_model_info", &["model_path"], Dialect::Sglang),
    ("/version", &["version"], Dialect::Vllm),
    ("/props", &["default_generation_settings", "build_info"], Dialect::LlamaCpp),
    ("/health", &["status"], Dialect::LlamaCpp),
];

const LIMIT: Duration = Duration::from_secs(10);

/// What the probes found.
pub(super) struct Found {
    pub(super) dialect: Dialect,
    /// A probe that was refused for its key, where no other gave an answer:
    /// the server may be a gateway that answers so on every unknown path.
    pub(super) refused: Option<Error>,
    /// No answer was one of an inference server: web pages, plain text, errors
    /// of the server itself. Gateways with a web page on every unknown path do
    /// so, too; their list of models shows the difference.
    pub(super) foreign: bool,
}

impl Found {
    /// Returns what is known without a probe.
    pub(super) fn told(dialect: Dialect) -> Self {
        Self { dialect, refused: None, foreign: false }
    }
}

/// Asks for the signs in turn. No sign at all is a generic server; a server
/// that is away or overloaded is an error.
pub(super) async fn dialect(
    transport: &Transport,
    address: &Address,
    retries: &Retries,
) -> Result<Found, Error> {
    let once = Retries::none();
    let mut refused = None;
    let mut failing = None;
    let mut failures = 0;
    let mut foreign = true;
    for (path, members, dialect) in SIGNS {
        let url = address.native(path);
        let headers = Vec::new();
        let call = Call { method: Method::GET, url, body: None, headers, timeout: LIMIT };
        // What fails after all its tries would fail so on every path.
        let retries = if failing.is_some() { &once } else { retries };
        match transport.send(&call, retries).await {
            Ok(answer) => match answer.json::<Value>() {
                Ok(value) if members.iter().any(|member| value.get(member).is_some()) => {
                    return Ok(Found::told(*dialect));
                }
                Ok(_) => foreign = false,
                Err(_) => {}
            },
            Err(error @ Error::Unauthorized { .. }) => {
                foreign = false;
                refused.get_or_insert(error);
            }
            Err(error) if is_away(&error) => return Err(error),
            Err(error) if is_failing(&error) => {
                failures += 1;
                failing.get_or_insert(error);
            }
            // A gateway answers unknown paths in many ways.
            Err(error) => foreign &= error.is_web_page(),
        }
    }
    match failing {
        Some(Error::Status { status, body, .. }) if failures == SIGNS.len() => {
            Err(Error::Failing { url: address.to_string(), status, body })
        }
        _ => Ok(Found { dialect: Dialect::Generic, refused, foreign }),
    }
}

fn is_away(error: &Error) -> bool {
    match error {
        Error::Unreachable { .. } | Error::Timeout { .. } => true,
        Error::Status { status, .. } => matches!(status, 429 | 502..=504),
        _ => false,
    }
}

/// Returns whether the server itself is in trouble. 501 is a word about the path.
pub(super) fn is_failing(error: &Error) -> bool {
    matches!(error, Error::Status { status: 500 | 502..=599, .. })
}

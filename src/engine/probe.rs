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
}

/// Asks for the signs in turn. No sign at all is a generic server; a server
/// that is away or overloaded is an error.
pub(super) async fn dialect(
    transport: &Transport,
    address: &Address,
    retries: &Retries,
) -> Result<Found, Error> {
    let mut refused = None;
    for (path, members, dialect) in SIGNS {
        let url = address.native(path);
        let call = Call { method: Method::GET, url, body: None, timeout: LIMIT };
        match transport.send(&call, retries).await {
            Ok(answer) => {
                let value: Value = answer.json().unwrap_or_default();
                if members.iter().any(|member| value.get(member).is_some()) {
                    return Ok(Found { dialect: *dialect, refused: None });
                }
            }
            Err(error @ Error::Unauthorized { .. }) => {
                refused.get_or_insert(error);
            }
            Err(error) if is_away(&error) => return Err(error),
            // A gateway answers unknown paths in many ways.
            Err(_) => {}
        }
    }
    Ok(Found { dialect: Dialect::Generic, refused })
}

fn is_away(error: &Error) -> bool {
    match error {
        Error::Unreachable { .. } | Error::Timeout { .. } => true,
        Error::Status { status, .. } => matches!(status, 429 | 502..=504),
        _ => false,
    }
}

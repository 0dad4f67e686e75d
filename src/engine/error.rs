//! What can go wrong with a server.

use std::time::Duration;

use serde_json::Value;

use super::Dialect;

/// A failed call.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The address cannot be read.
    #[error("not a server's address: `{address}`: {reason}")]
    Address {
        /// As it was given.
        address: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The HTTP client, or a key, is unusable.
    #[error("cannot call `{url}`: {reason}")]
    Client {
        /// The server.
        url: String,
        /// What is wrong.
        reason: String,
    },
    /// Nobody answers there.
    #[error("cannot reach `{url}`: {reason}")]
    Unreachable {
        /// What was called.
        url: String,
        /// What the network said.
        reason: String,
    },
    /// The answer did not come in time.
    #[error("no answer from `{url}` within {} s", .after.as_secs_f64())]
    Timeout {
        /// What was called.
        url: String,
        /// The limit.
        after: Duration,
    },
    /// The server wants another key.
    #[error("`{url}` refused the key ({status}): {body}")]
    Unauthorized {
        /// What was called.
        url: String,
        /// 401 or 403.
        status: u16,
        /// What the server said, shortened.
        body: String,
    },
    /// The server answered with an error.
    #[error("`{url}` answered {status}: {body}")]
    Status {
        /// What was called.
        url: String,
        /// The HTTP status.
        status: u16,
        /// What the server said, shortened.
        body: String,
        /// The server's own word for it, if any.
        code: Option<String>,
        /// How long the server asked us to stay away.
        retry_after: Option<Duration>,
    },
    /// Whatever the server is asked, it fails.
    #[error("`{url}` answers every question with {status}: {body}")]
    Failing {
        /// The server.
        url: String,
        /// The HTTP status of the first answer.
        status: u16,
        /// What the server said, shortened.
        body: String,
    },
    /// Something else listens there: no answer was JSON.
    #[error("`{url}` is no inference server: it answers with web pages or plain text")]
    Foreign {
        /// The server.
        url: String,
    },
    /// A web page came where JSON should.
    #[error("`{url}` answered with a web page instead of JSON")]
    WebPage {
        /// What was called.
        url: String,
    },
    /// The answer is not what the route promises.
    #[error("cannot use the answer of `{url}`: {reason}")]
    Malformed {
        /// What was called.
        url: String,
        /// What is wrong with the answer.
        reason: String,
        /// Tokens of the prompt and of the answer, where it tells them all the same.
        tokens: Option<(u64, u64)>,
    },
    /// The server says that it did not do it.
    #[error("`{url}` refused: {message}")]
    Refused {
        /// What was called.
        url: String,
        /// What the server said.
        message: String,
        /// Tokens of the prompt and of the answer, where it tells them all the same.
        tokens: Option<(u64, u64)>,
    },
    /// The server has several models and none was named.
    #[error("`{url}` serves {} models: {}", .names.len(), quoted(.names))]
    SeveralModels {
        /// The server.
        url: String,
        /// Their names.
        names: Vec<String>,
    },
    /// The server names no model.
    #[error("`{url}` names no model")]
    NoModel {
        /// The server.
        url: String,
    },
    /// Servers that share the calls are not alike.
    #[error("`{url}` {has}, but `{other}` {wanted}")]
    Unlike {
        /// One server.
        url: String,
        /// What it is or has: `serves ...`.
        has: String,
        /// Another.
        other: String,
        /// What that one is or has.
        wanted: String,
    },
    /// The server tells the likeliest tokens only, and this is none of them.
    #[error("`{url}` tells the {listed} likeliest tokens only, and {id} is none of them")]
    NotListed {
        /// The server.
        url: String,
        /// The token that was asked for.
        id: i64,
        /// How many it tells.
        listed: usize,
    },
    /// Servers of this kind cannot do it.
    #[error("`{url}` speaks the {dialect} dialect, which has no way to {what}")]
    Unsupported {
        /// The server.
        url: String,
        /// What it speaks.
        dialect: Dialect,
        /// What was asked of it.
        what: &'static str,
    },
}

impl Error {
    /// Returns whether the same call may work a little later.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Timeout { .. } | Self::Failing { .. } => true,
            Self::Status { status, code, .. } => {
                let no_such_model =
                    matches!(code.as_deref(), Some("model_not_found" | "get_channel_failed"));
                matches!(status, 408 | 425 | 429 | 500 | 502 | 503 | 504 | 520..=529)
                    && !no_such_model
            }
            Self::Address { .. }
            | Self::Client { .. }
            | Self::Unauthorized { .. }
            | Self::Foreign { .. }
            | Self::WebPage { .. }
            | Self::Malformed { .. }
            | Self::Refused { .. }
            | Self::SeveralModels { .. }
            | Self::NoModel { .. }
            | Self::Unlike { .. }
            | Self::NotListed { .. }
            | Self::Unsupported { .. } => false,
        }
    }

    /// Returns a stable word for the kind, for columns and counters.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Address { .. } => "address",
            Self::Client { .. } => "client",
            Self::Unreachable { .. } => "unreachable",
            Self::Timeout { .. } => "timeout",
            Self::Unauthorized { .. } => "unauthorized",
            Self::Status { status: 429, .. } => "rate_limited",
            Self::Status { .. } | Self::Failing { .. } => "status",
            Self::Foreign { .. } | Self::WebPage { .. } | Self::Malformed { .. } => "malformed",
            Self::Refused { .. } => "refused",
            Self::SeveralModels { .. } | Self::NoModel { .. } | Self::Unlike { .. } => "model",
            Self::NotListed { .. } => "not_listed",
            Self::Unsupported { .. } => "unsupported",
        }
    }

    /// Returns whether the server did what it was asked, and only its answer is no use.
    pub fn is_answer(&self) -> bool {
        matches!(self, Self::Malformed { .. } | Self::NotListed { .. })
    }

    /// Returns what the call cost all the same: the tokens of the prompt and of the
    /// answer, where the server told them.
    pub fn tokens(&self) -> Option<(u64, u64)> {
        match self {
            Self::Malformed { tokens, .. } | Self::Refused { tokens, .. } => *tokens,
            _ => None,
        }
    }

    /// Returns how long the server asked us to stay away.
    pub(super) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Status { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// Returns whether the server does not know the path itself.
    pub(super) fn is_wrong_path(&self) -> bool {
        matches!(self, Self::WebPage { .. } | Self::Status { status: 404 | 405, .. })
    }

    /// Returns whether the answer was a web page, whatever its status.
    pub(super) fn is_web_page(&self) -> bool {
        match self {
            Self::WebPage { .. } => true,
            Self::Status { body, .. } => body == WEB_PAGE,
            _ => false,
        }
    }
}

fn quoted(names: &[String]) -> String {
    let names: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
    names.join(", ")
}

/// What an error body says, in whichever of the field's shapes.
#[derive(Debug, PartialEq)]
pub(super) struct Told {
    pub(super) message: String,
    pub(super) code: Option<String>,
}

/// What stands for a web page, which says nothing on one line.
const WEB_PAGE: &str = "(a web page)";
/// Longest piece of a body that goes into a message.
const SHOWN: usize = 300;

/// Reads an error body: OpenAI's wrapped form, SGLang's flat one, FastAPI's
/// `detail`, a gateway's `success: false`, plain text.
pub(super) fn told(body: &[u8]) -> Told {
    let text = String::from_utf8_lossy(body);
    let Ok(value) = serde_json::from_str::<Value>(&text) else {
        let message = match text.trim_start().starts_with('<') {
            true => WEB_PAGE.to_owned(),
            false => shorten(&text),
        };
        return Told { message, code: None };
    };
    let inner = value.get("error").filter(|error| !error.is_null()).unwrap_or(&value);
    let names = ["message", "error_message", "detail", "msg"];
    let message = inner
        .as_str()
        .map(str::to_owned)
        .or_else(|| names.iter().find_map(|name| Some(inner.get(name)?.as_str()?.to_owned())))
        .unwrap_or_else(|| inner.to_string());
    let code = inner.get("code").and_then(Value::as_str).filter(|code| !code.is_empty());
    Told { message: shorten(&message), code: code.map(str::to_owned) }
}

/// Puts a text on one line of bounded length.
pub(super) fn shorten(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None if line.is_empty() => "(nothing said)".to_owned(),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_of_error_body_is_read() {
        let cases = [
            (
                r#"{"object":"error","message":"too long","type":"BadRequest","param":null,"code":400}"#,
                "too long",
                None,
            ),
            (
                r#"{"error":{"message":"no key","type":"x","code":"invalid_api_key"}}"#,
                "no key",
                Some("invalid_api_key"),
            ),
            (r#"{"error":{"message":"bad","code":400}}"#, "bad", None),
            (
                r#"{"error":{"message":"无效的令牌","type":"new_api_error","param":"","code":""}}"#,
                "无效的令牌",
                None,
            ),
            (r#"{"success":false,"message":"not allowed"}"#, "not allowed", None),
            (r#"{"success":false,"error_message":"no adapter"}"#, "no adapter", None),
            (r#"{"detail":"submission paused"}"#, "submission paused", None),
            (r#"{"error":"model loading"}"#, "model loading", None),
            ("upstream\n  gone", "upstream gone", None),
            ("<html>x", "(a web page)", None),
            ("", "(nothing said)", None),
        ];
        for (body, message, code) in cases {
            let expected = Told { message: message.to_owned(), code: code.map(str::to_owned) };
            assert_eq!(told(body.as_bytes()), expected, "{body}");
        }
    }

    #[test]
    fn a_long_body_is_shortened_between_characters() {
        let told = told("é".repeat(1000).as_bytes());
        assert_eq!(told.message.chars().count(), SHOWN + 1);
    }

    #[test]
    fn a_gateways_unknown_model_is_not_tried_again() {
        let error = |status, code: Option<&str>| Error::Status {
            url: String::new(),
            status,
            body: String::new(),
            code: code.map(str::to_owned),
            retry_after: None,
        };
        assert!(error(503, None).is_transient());
        assert!(!error(503, Some("model_not_found")).is_transient());
        assert!(!error(400, None).is_transient());
        assert!(!error(501, None).is_transient());
    }
}

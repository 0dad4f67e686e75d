//! One call to the engine: which headers cross, in both directions, and what a
//! failed call answers.

use axum::http::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONNECTION, CONTENT_LENGTH, COOKIE, EXPECT, HOST, HeaderMap,
    HeaderName, HeaderValue, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use axum::http::{Method, StatusCode};
use bytes::Bytes;

use super::Shared;
use super::error::Refusal;
use super::upstream::Upstream;

/// A request for the engine.
pub(super) struct Call<'a> {
    pub(super) method: Method,
    /// Path after the version segment, with its slash.
    pub(super) path: &'a str,
    pub(super) query: Option<&'a str>,
    pub(super) headers: &'a HeaderMap,
    pub(super) body: Bytes,
}

/// Headers that belong to one connection.
const HOP: &[HeaderName] = &[CONNECTION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE];
const NAMED_HOP: &[&str] =
    &["keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"];

/// Request headers that are for us, or that we set ourselves. A client's keys
/// and cookies never cross.
const OURS: &[HeaderName] = &[HOST, CONTENT_LENGTH, ACCEPT_ENCODING, EXPECT, AUTHORIZATION, COOKIE];
const NAMED_OURS: &[&str] = &["x-api-key", "x-session-id", "x-turn-type", "x-session-done"];

/// A call that got no answer.
pub(super) struct Missed {
    pub(super) refusal: Refusal,
    /// Nothing of the request has reached the engine: another one may have it.
    pub(super) unsent: bool,
}

impl From<Refusal> for Missed {
    fn from(refusal: Refusal) -> Self {
        Self { refusal, unsent: false }
    }
}

/// Sends a request to the engine and waits until it begins to answer.
pub(super) async fn send(
    shared: &Shared,
    upstream: &Upstream,
    call: &Call<'_>,
) -> Result<reqwest::Response, Missed> {
    let mut url = upstream.engine.api_url(call.path);
    if let Some(query) = call.query {
        url.push('?');
        url.push_str(query);
    }
    let mut stop = shared.stop.subscribe();
    let mut tried = 0;
    loop {
        tried += 1;
        let request = upstream.client.request(call.method.clone(), &url);
        let headers = request_headers(shared, upstream, call.headers);
        let request = request.headers(headers).body(call.body.clone());
        let answer = tokio::time::timeout(shared.limits.answer, request.send());
        let answer = tokio::select! {
            answer = answer => answer,
            _ = stop.wait_for(|stop| *stop) => {
                return Err(Refusal::new(
                    StatusCode::SERVICE_UNAVAILABLE, "shutting_down", "the proxy is shutting down",
                ).into());
            }
        };
        match answer {
            Ok(Ok(answer)) => return Ok(answer),
            // A pooled connection may be closed by the engine at the moment it
            // is used again. No byte of an answer has come, so once more is safe.
            Ok(Err(error)) if tried == 1 && is_stale(&error) => {}
            Ok(Err(error)) => {
                let unsent = error.is_connect();
                return Err(Missed { refusal: unreachable(&error), unsent });
            }
            Err(_) => {
                let seconds = shared.limits.answer.as_secs();
                let message = format!("the engine did not answer within {seconds} s");
                let code = "upstream_timeout";
                return Err(Refusal::new(StatusCode::GATEWAY_TIMEOUT, code, message).into());
            }
        }
    }
}

/// Says that the engine is away, without its address: clients need not know it.
fn unreachable(error: &reqwest::Error) -> Refusal {
    tracing::warn!(error = with_causes(error), "cannot reach the engine");
    match error.is_timeout() {
        true => Refusal::new(
            StatusCode::GATEWAY_TIMEOUT,
            "upstream_timeout",
            "the engine cannot be reached in time",
        ),
        false => Refusal::new(
            StatusCode::BAD_GATEWAY,
            "upstream_unreachable",
            "the engine cannot be reached",
        ),
    }
}

/// Returns whether the connection closed before a byte of an answer had come.
fn is_stale(error: &reqwest::Error) -> bool {
    use std::io::ErrorKind;
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        let closed = cause.downcast_ref::<std::io::Error>().is_some_and(|cause| {
            matches!(cause.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe)
        });
        // The HTTP library has no public kind for this one.
        if closed || cause.to_string().starts_with("connection closed before message completed") {
            return !error.is_connect();
        }
        source = cause.source();
    }
    false
}

fn with_causes(error: &reqwest::Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}

fn request_headers(shared: &Shared, upstream: &Upstream, given: &HeaderMap) -> HeaderMap {
    let mut headers = without_hop(given);
    for name in OURS {
        headers.remove(name);
    }
    for name in NAMED_OURS {
        headers.remove(*name);
    }
    // What is compressed cannot be read, and could not be cut.
    headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    match (&upstream.authorization, given.get(AUTHORIZATION)) {
        (Some(own), _) => {
            headers.insert(AUTHORIZATION, own.clone());
        }
        (None, Some(clients)) if shared.forward_authorization => {
            headers.insert(AUTHORIZATION, clients.clone());
        }
        (None, _) => {}
    }
    headers
}

/// Returns the headers of an engine's answer that are for the client. The
/// length is left out where the client may get fewer bytes.
pub(super) fn answer_headers(given: &HeaderMap, unchanged: bool) -> HeaderMap {
    let mut headers = without_hop(given);
    if !unchanged {
        headers.remove(CONTENT_LENGTH);
    }
    headers
}

fn without_hop(given: &HeaderMap) -> HeaderMap {
    let mut headers = given.clone();
    let named: Vec<_> = given
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(',').map(|name| name.trim().to_owned()))
        .collect();
    for name in named.iter().map(String::as_str).chain(NAMED_HOP.iter().copied()) {
        headers.remove(name);
    }
    for name in HOP {
        headers.remove(name);
    }
    headers
}

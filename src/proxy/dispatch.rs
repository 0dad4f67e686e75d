//! Which engine gets a request, and what happens when it is not there.

use std::time::Duration;

use axum::http::{Method, StatusCode, request};
use bytes::Bytes;

use super::Shared;
use super::error::Refusal;
use super::forward::{self, Call};
use super::metrics::count;
use super::upstream::{Busy, Kind};

/// A request that an engine is wanted for.
pub(super) struct Wanted<'a> {
    pub(super) method: &'a Method,
    /// Path after the version segment, with its slash.
    pub(super) path: &'a str,
    pub(super) parts: &'a request::Parts,
    /// The body for each kind of engine.
    pub(super) bodies: &'a [(Kind, Bytes)],
    pub(super) session: Option<&'a str>,
    /// The version of the weights is wanted, too, if it is not known for so long.
    pub(super) version: Option<Duration>,
}

/// An answer that has begun.
pub(super) struct Landed {
    pub(super) answer: reqwest::Response,
    pub(super) engine: Busy,
    /// The version of the weights before the answer's first byte.
    pub(super) version: Option<String>,
    /// Which of the bodies was sent.
    pub(super) place: usize,
}

/// Sends a request to an engine. Another one is tried only if nothing of it has
/// reached the one before: a chat that two engines answer is paid for twice.
pub(super) async fn dispatch(shared: &Shared, wanted: &Wanted<'_>) -> Result<Landed, Refusal> {
    let mut tried = Vec::new();
    let mut last = None;
    while let Some(engine) = shared.fleet.choose(wanted.session, &tried) {
        let kind = engine.kind();
        let place = wanted.bodies.iter().position(|(known, _)| *known == kind).unwrap_or(0);
        let call = Call {
            method: wanted.method.clone(),
            path: wanted.path,
            query: wanted.parts.uri.query(),
            headers: &wanted.parts.headers,
            body: wanted.bodies.get(place).map(|(_, body)| body.clone()).unwrap_or_default(),
        };
        let sent = forward::send(shared, &engine, &call);
        let (answer, version) = match wanted.version {
            Some(age) => tokio::join!(sent, engine.version(age)),
            None => (sent.await, None),
        };
        let missed = match answer {
            Ok(answer) => return Ok(Landed { answer, engine, version, place }),
            Err(missed) => missed,
        };
        if !missed.unsent {
            count(&engine.failures);
            return Err(missed.refusal);
        }
        shared.fleet.lost(&engine);
        tried.push(engine.upstream().clone());
        last = Some(missed.refusal);
    }
    Err(last.unwrap_or_else(|| {
        let message = "no engine takes the request";
        Refusal::new(StatusCode::BAD_GATEWAY, "upstream_unreachable", message)
    }))
}

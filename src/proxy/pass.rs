//! Requests that are no chat, and answers that are not recorded.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderValue};
use axum::http::{Method, StatusCode, request};
use axum::response::{IntoResponse, Response};
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use futures_util::stream;

use crate::capture::{self, Dialect, Names, Prepared, StreamCapture, read_answer};
use crate::wire::openai::ChatRequest;
use crate::wire::span;

use super::dispatch::{Landed, Wanted, dispatch};
use super::encoding::{self, Coding};
use super::error::Refusal;
use super::limits::Flight;
use super::metrics::count;
use super::upstream::Kind;
use super::{Shared, body, forward, relay};

/// Passes a request on that is no chat.
pub(super) async fn pass(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    count(&shared.metrics.requests);
    match pass_on(&shared, request).await {
        Ok(response) => response,
        Err(refusal) => {
            shared.metrics.refuse(refusal.code);
            refusal.into_response()
        }
    }
}

async fn pass_on(shared: &Arc<Shared>, request: Request) -> Result<Response, Refusal> {
    let mut flight = shared.flights.begin()?;
    let (parts, body) = request.into_parts();
    let path = parts.uri.path();
    let path = path.strip_prefix("/v1").unwrap_or(path);
    let climbs = |part: &str| {
        let part = part.to_ascii_lowercase().replace("%2e", ".");
        part == "." || part == ".."
    };
    // Such a path would reach routes that are none of the client's business.
    if path.split(['/', '\\']).any(climbs) || path.to_ascii_lowercase().contains("%2f") {
        return Err(Refusal::not_found("no such route"));
    }
    let (body, waiting) = body::read(shared, body).await?;
    // Engines that take new weights still tell what they are.
    if !matches!(parts.method, Method::GET | Method::HEAD | Method::OPTIONS) {
        wait_while_held(shared).await?;
    }
    let kinds = shared.fleet.kinds().into_iter();
    let bodies: Vec<_> = kinds.map(|kind| named(&body, kind)).collect();
    let wanted = Wanted {
        method: &parts.method,
        path,
        parts: &parts,
        bodies: &bodies,
        session: None,
        version: None,
    };
    let Landed { answer, engine, .. } = dispatch(shared, &wanted).await?;
    drop(waiting);
    let names = engine.names();
    flight.engine = Some(engine);
    match names {
        None => Ok(passed(answer, None, shared, flight).await),
        Some(names) if path == "/models" && answer.status().is_success() => {
            listed(answer, &names, shared, flight).await
        }
        Some(names) => {
            let prepared = renaming(&parts, &body, &names);
            Ok(passed(answer, prepared, shared, flight).await)
        }
    }
}

/// Waits while the engines take new weights.
pub(super) async fn wait_while_held(shared: &Shared) -> Result<(), Refusal> {
    match tokio::time::timeout(shared.limits.hold, shared.fleet.released()).await {
        Ok(()) => Ok(()),
        Err(_) => Err(Refusal::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "on_hold",
            "the engine is taking new weights; try again shortly",
        )
        .retry_after(5)),
    }
}

/// Writes the engine's name for the model into a body, if the clients' is there.
fn named(body: &Bytes, kind: Kind) -> (Kind, Bytes) {
    let renamed = kind.1.as_ref().and_then(|names| {
        let place = span::value(body, 0, "model")?;
        let name: String = serde_json::from_slice(&body[place.clone()]).ok()?;
        let engine = serde_json::Value::from(names.engine.as_str()).to_string();
        (name == names.public).then(|| span::edit(body, &[(place, engine)]).into())
    });
    (kind, renamed.unwrap_or_else(|| body.clone()))
}

/// Returns how to change the model's name back in an answer, if the request had
/// the clients' name.
fn renaming(parts: &request::Parts, body: &Bytes, names: &Arc<Names>) -> Option<Prepared> {
    (parts.method == Method::POST).then_some(())?;
    let model = span::value(body, 0, "model")?;
    let model: String = serde_json::from_slice(&body[model]).ok()?;
    let mut request = ChatRequest::default();
    request.model = model;
    Some(capture::prepare_named(b"{}", &request, Dialect::Generic, Some(names)))
}

/// Passes an answer on unread; only the model's name is changed back, if it was
/// changed on the way there.
pub(super) async fn passed(
    answer: reqwest::Response,
    prepared: Option<Prepared>,
    shared: &Arc<Shared>,
    flight: Flight,
) -> Response {
    let status = answer.status();
    let readable = status.is_success() && Coding::of(answer.headers()) == Coding::Plain;
    let prepared = prepared.filter(|prepared| prepared.names.is_some() && readable);
    let headers = forward::answer_headers(answer.headers(), prepared.is_none());
    let streamed = is_event_stream(answer.headers());
    let bytes = encoding::plain(answer, Coding::Plain);
    let body = match prepared {
        None => relay::pass(bytes, shared.clone(), flight),
        Some(prepared) if streamed => {
            let mut capture = StreamCapture::new(prepared);
            capture.stop_reading();
            relay::start(bytes, None, capture, shared.clone(), (None, flight))
        }
        Some(prepared) => match held(bytes, shared).await {
            Ok(document) => {
                let renamed = read_answer(&document, &prepared).client;
                Body::from(renamed.map_or(document, Bytes::from))
            }
            Err(rest) => relay::pass(rest, shared.clone(), flight),
        },
    };
    let mut response = Response::new(body);
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

/// Passes the list of models on, with the name that clients know.
async fn listed(
    answer: reqwest::Response,
    names: &Names,
    shared: &Arc<Shared>,
    flight: Flight,
) -> Result<Response, Refusal> {
    let status = answer.status();
    let mut headers = forward::answer_headers(answer.headers(), false);
    headers.remove(CONTENT_LENGTH);
    let bytes = encoding::plain(answer, Coding::Plain);
    let body = match held(bytes, shared).await {
        Ok(list) => {
            let renamed = capture::rename_listed(&list, names);
            Body::from(renamed.map_or(list, Bytes::from))
        }
        Err(rest) => relay::pass(rest, shared.clone(), flight),
    };
    let mut response = Response::new(body);
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    Ok(response)
}

/// Reads a whole answer. One that is too large to be held, or breaks off, is
/// returned as it comes.
async fn held(mut bytes: relay::Pieces, shared: &Shared) -> Result<Bytes, relay::Pieces> {
    let mut whole = BytesMut::new();
    loop {
        match tokio::time::timeout(shared.limits.silence, bytes.next()).await {
            Ok(None) => return Ok(whole.freeze()),
            Ok(Some(Ok(piece))) if whole.len() + piece.len() <= shared.limits.answer_bytes => {
                whole.extend_from_slice(&piece);
            }
            Ok(Some(piece)) => {
                return Err(stream::iter([Ok(whole.freeze()), piece]).chain(bytes).boxed());
            }
            Err(_) => {
                let silent = Err(relay::silent(shared.limits.silence));
                return Err(stream::iter([Ok(whole.freeze()), silent]).boxed());
            }
        }
    }
}

pub(super) fn is_event_stream(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    kind.get(..17).is_some_and(|kind| kind.eq_ignore_ascii_case(b"text/event-stream"))
}

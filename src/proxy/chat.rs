//! `/v1/chat/completions`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{ConnectInfo, Extension, Request, State};
use axum::http::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderValue};
use axum::http::{Method, StatusCode, request};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;

use crate::capture::{Dialect, Prepared, StreamCapture, prepare};
use crate::session::History;
use crate::wire::openai::ChatRequest;

use super::encoding::{self, Coding};
use super::error::Refusal;
use super::exchange::{Caller, Exchange, Marks};
use super::forward::{self, Call};
use super::metrics::count;
use super::routes::Owner;
use super::{Flight, LARGE, Shared, body, relay, whole};

/// A version of the weights that was asked for so recently is good enough.
const FRESH: Duration = Duration::from_secs(1);

/// A request as it is sent on.
struct Outgoing {
    body: Bytes,
    capture: Option<(Prepared, Exchange)>,
}

/// Answers a chat request.
pub(super) async fn chat(
    State(shared): State<Arc<Shared>>,
    ConnectInfo(address): ConnectInfo<SocketAddr>,
    Extension(Owner(client)): Extension<Owner>,
    request: Request,
) -> Response {
    count(&shared.metrics.requests);
    let flight = shared.flights.begin();
    let (parts, body) = request.into_parts();
    let caller = Caller { client, address: Some(address.ip().to_string()) };
    match answer(&shared, &parts, body, caller, flight).await {
        Ok(response) => response,
        Err(refusal) => {
            shared.metrics.refuse(refusal.code);
            refusal.into_response()
        }
    }
}

async fn answer(
    shared: &Arc<Shared>,
    parts: &request::Parts,
    body: Body,
    caller: Caller,
    flight: Flight,
) -> Result<Response, Refusal> {
    let body = match body::read(body, shared.limits.body).await {
        Ok(body) => body,
        Err(refusal) => {
            shared.metrics.skip(refusal.code);
            return Err(refusal);
        }
    };
    if let Err(refusal) = wait_while_held(shared).await {
        shared.metrics.skip(refusal.code);
        return Err(refusal);
    }
    let outgoing = read(shared, parts.headers.clone(), body, caller).await;
    let call = Call {
        method: Method::POST,
        path: "/chat/completions",
        query: parts.uri.query(),
        headers: &parts.headers,
        body: outgoing.body,
    };
    let Some((prepared, exchange)) = outgoing.capture else {
        let answer = forward::send(shared, &call).await?;
        return Ok(passed(answer, shared, flight));
    };
    // Asked while the request is on its way: before the first byte.
    let (answer, version) =
        tokio::join!(forward::send(shared, &call), shared.upstream.version(FRESH));
    let answer = match answer {
        Ok(answer) => answer,
        Err(refusal) => {
            exchange.skip(refusal.code);
            return Err(refusal);
        }
    };
    captured(answer, prepared, exchange, shared, (version, flight)).await
}

/// Waits while the engine takes new weights.
async fn wait_while_held(shared: &Shared) -> Result<(), Refusal> {
    let mut held = shared.held.subscribe();
    let released = held.wait_for(|held| !held);
    match tokio::time::timeout(shared.limits.hold, released).await {
        Ok(_) => Ok(()),
        Err(_) => Err(Refusal::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "on_hold",
            "the engine is taking new weights; try again shortly",
        )
        .retry_after(5)),
    }
}

/// Reads the request and decides what is asked of the engine.
async fn read(shared: &Arc<Shared>, headers: HeaderMap, body: Bytes, caller: Caller) -> Outgoing {
    let unread = body.clone();
    let large = body.len() > LARGE;
    let shared = shared.clone();
    let work = move || read_now(&shared, &headers, &body, caller);
    let outgoing = match large {
        true => tokio::task::spawn_blocking(work).await,
        false => Ok(work()),
    };
    // A panic in there must not break the chat.
    outgoing.unwrap_or(Outgoing { body: unread, capture: None })
}

fn read_now(shared: &Arc<Shared>, headers: &HeaderMap, body: &Bytes, caller: Caller) -> Outgoing {
    let Some(request) = ChatRequest::read(body) else {
        shared.metrics.skip("unreadable_request");
        return Outgoing { body: body.clone(), capture: None };
    };
    let marks = Marks::read(headers, &request);
    if marks.side {
        shared.metrics.skip("side");
        if let Some((session_id, _)) = marks.session.filter(|_| marks.done) {
            shared.recorder.end_session(&session_id);
        }
        // Nothing is asked for, but our own fields are not the engine's.
        let prepared = prepare(body, &request, Dialect::Generic);
        return Outgoing { body: prepared.body.into(), capture: None };
    }
    let mut prepared = prepare(body, &request, shared.upstream.dialect);
    let history = History::read(&request.messages);
    let exchange = Exchange::begin(&shared.recorder, request, &history, marks, caller);
    let body = std::mem::take(&mut prepared.body).into();
    Outgoing { body, capture: Some((prepared, exchange)) }
}

/// Answers with what the engine says, and records it.
async fn captured(
    answer: reqwest::Response,
    prepared: Prepared,
    exchange: Exchange,
    shared: &Arc<Shared>,
    (version, flight): (Option<String>, Flight),
) -> Result<Response, Refusal> {
    let turn_id = exchange.arrival.id.clone();
    if !answer.status().is_success() {
        exchange.skip(status_reason(answer.status()));
        return Ok(passed(answer, shared, flight));
    }
    let coding = Coding::of(answer.headers());
    if coding == Coding::Foreign {
        exchange.skip("encoded_answer");
        return Ok(passed(answer, shared, flight));
    }
    let status = answer.status();
    let mut headers = forward::answer_headers(answer.headers(), false);
    headers.remove(CONTENT_ENCODING);
    if let Ok(turn_id) = HeaderValue::from_str(&turn_id) {
        headers.insert("x-oclaw-turn-id", turn_id);
    }
    let streamed = is_event_stream(answer.headers());
    let bytes = encoding::plain(answer, coding);
    let body = match streamed {
        true => {
            let capture = StreamCapture::new(prepared);
            relay::start(bytes, exchange, capture, shared.clone(), (version, flight))
        }
        false => whole::answer(bytes, prepared, exchange, shared, (version, flight)).await?,
    };
    let mut response = Response::new(body);
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    Ok(response)
}

/// Passes an answer on unread.
pub(super) fn passed(answer: reqwest::Response, shared: &Arc<Shared>, flight: Flight) -> Response {
    let status = answer.status();
    let headers = forward::answer_headers(answer.headers(), true);
    let bytes = encoding::plain(answer, Coding::Plain);
    let mut response = Response::new(relay::pass(bytes, shared.clone(), flight));
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

fn is_event_stream(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    kind.get(..17).is_some_and(|kind| kind.eq_ignore_ascii_case(b"text/event-stream"))
}

fn status_reason(status: StatusCode) -> &'static str {
    match status.as_u16() {
        429 => "upstream_429",
        400..=499 => "upstream_4xx",
        500..=599 => "upstream_5xx",
        _ => "upstream_other",
    }
}

//! `/v1/chat/completions`.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{ConnectInfo, Extension, Request, State};
use axum::http::header::{CONTENT_ENCODING, HeaderMap, HeaderValue};
use axum::http::{Method, StatusCode, request};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;

use crate::capture::{Dialect, Prepared, StreamCapture, prepare_named};
use crate::listener::Peer;
use crate::session::History;
use crate::wire::openai::ChatRequest;

use super::dispatch::{Landed, Wanted, dispatch};
use super::encoding::{self, Coding};
use super::error::Refusal;
use super::exchange::{Caller, Exchange, Marks};
use super::forward;
use super::limits::Flight;
use super::metrics::count;
use super::pass::{self, passed};
use super::request_log::Told;
use super::routes::Owner;
use super::upstream::Kind;
use super::{LARGE, Shared, body, relay, whole};

/// A version of the weights that was asked for so recently is good enough.
const FRESH: Duration = Duration::from_secs(1);

/// A request as it is sent on: one body for each kind of engine.
struct Outgoing {
    bodies: Vec<(Kind, Bytes)>,
    /// How the answer is read, in the order of the bodies. None if the request
    /// could not be read.
    prepared: Vec<Prepared>,
    exchange: Option<Exchange>,
    session: Option<String>,
}

/// Answers a chat request.
pub(super) async fn chat(
    State(shared): State<Arc<Shared>>,
    ConnectInfo(Peer(address)): ConnectInfo<Peer>,
    Extension(Owner(client)): Extension<Owner>,
    request: Request,
) -> Response {
    count(&shared.metrics.requests);
    let (parts, body) = request.into_parts();
    let caller = Caller { client, address: Some(address.ip().to_string()) };
    let mut rated = None;
    let mut response = match answer(&shared, &parts, body, (caller, &mut rated)).await {
        Ok(response) => response,
        Err(refusal) => {
            shared.metrics.refuse(refusal.code);
            refusal.into_response()
        }
    };
    if let Some(rated) = rated {
        response.headers_mut().insert("x-oclaw-feedback", HeaderValue::from_static(rated));
    }
    response
}

async fn answer(
    shared: &Arc<Shared>,
    parts: &request::Parts,
    body: Body,
    (caller, rated): (Caller, &mut Option<&'static str>),
) -> Result<Response, Refusal> {
    let admitted = async {
        let flight = shared.flights.begin()?;
        let (body, waiting) = body::read(shared, body).await?;
        pass::wait_while_held(shared).await?;
        Ok((flight, body, waiting))
    };
    let (mut flight, body, waiting) =
        admitted.await.inspect_err(|refusal: &Refusal| shared.metrics.skip(refusal.code))?;
    let mut outgoing = read(shared, &parts.headers, body, caller).await;
    *rated = outgoing.exchange.as_ref().and_then(|exchange| exchange.rated);
    let wanted = Wanted {
        method: &Method::POST,
        path: "/chat/completions",
        parts,
        bodies: &outgoing.bodies,
        session: outgoing.session.as_deref(),
        // Asked while the request is on its way: before the first byte.
        version: outgoing.exchange.is_some().then_some(FRESH),
    };
    let landed = match dispatch(shared, &wanted).await {
        Ok(landed) => landed,
        Err(refusal) => {
            if let Some(exchange) = outgoing.exchange.take() {
                exchange.skip(refusal.code);
            }
            return Err(refusal);
        }
    };
    drop(waiting);
    let Landed { answer, engine, version, place } = landed;
    let upstream = engine.upstream().clone();
    flight.engine = Some(engine);
    let Outgoing { mut prepared, exchange, .. } = outgoing;
    let prepared = (place < prepared.len()).then(|| prepared.swap_remove(place));
    match (prepared, exchange) {
        (Some(prepared), Some(mut exchange)) => {
            exchange.engine = Some(upstream);
            captured(answer, prepared, exchange, shared, (version, flight)).await
        }
        (prepared, _) => Ok(passed(answer, prepared, shared, flight).await),
    }
}

/// Reads the request and decides what is asked of the engine.
async fn read(shared: &Arc<Shared>, headers: &HeaderMap, body: Bytes, caller: Caller) -> Outgoing {
    if body.len() <= LARGE {
        return read_now(shared, headers, &body, caller);
    }
    let as_it_is = unread(shared, body.clone());
    let (shared, headers) = (shared.clone(), headers.clone());
    let work = move || read_now(&shared, &headers, &body, caller);
    // A panic in there must not break the chat.
    tokio::task::spawn_blocking(work).await.unwrap_or(as_it_is)
}

/// Sends a request on as it is, to whomever.
fn unread(shared: &Shared, body: Bytes) -> Outgoing {
    let bodies = shared.fleet.kinds().into_iter().map(|kind| (kind, body.clone())).collect();
    Outgoing { bodies, prepared: Vec::new(), exchange: None, session: None }
}

fn read_now(shared: &Arc<Shared>, headers: &HeaderMap, body: &Bytes, caller: Caller) -> Outgoing {
    let Some(mut request) = ChatRequest::read(body) else {
        shared.metrics.skip("unreadable_request");
        return unread(shared, body.clone());
    };
    let marks = Marks::read(headers, &request);
    let mut bodies = Vec::new();
    let mut prepared = Vec::new();
    for kind in shared.fleet.kinds() {
        // Nothing is asked for a side request, but our own fields are not the
        // engine's.
        let dialect = if marks.side { Dialect::Generic } else { kind.0 };
        let mut one = prepare_named(body, &request, dialect, kind.1.as_ref());
        bodies.push((kind, std::mem::take(&mut one.body).into()));
        prepared.push(one);
    }
    if marks.side {
        shared.metrics.skip("side");
        let session = marks.session.map(|(session, _)| session);
        let rating = std::mem::take(&mut request.rating);
        shared.recorder.rate_latest(rating, session.as_deref());
        if let Some(session) = session.as_deref().filter(|_| marks.done) {
            shared.recorder.end_session(session);
        }
        return Outgoing { bodies, prepared, exchange: None, session };
    }
    let history = History::read(&request.messages);
    let exchange = Exchange::begin(&shared.recorder, request, &history, marks, caller);
    let session = Some(exchange.arrival.session_id.clone());
    Outgoing { bodies, prepared, exchange: Some(exchange), session }
}

/// Answers with what the engine says, and records it.
async fn captured(
    answer: reqwest::Response,
    prepared: Prepared,
    exchange: Exchange,
    shared: &Arc<Shared>,
    (version, flight): (Option<String>, Flight),
) -> Result<Response, Refusal> {
    let told = Told::of(&exchange);
    if !answer.status().is_success() {
        exchange.skip(status_reason(answer.status()));
        return Ok(passed(answer, None, shared, flight).await);
    }
    let coding = Coding::of(answer.headers());
    if coding == Coding::Foreign {
        exchange.skip("encoded_answer");
        return Ok(passed(answer, None, shared, flight).await);
    }
    let status = answer.status();
    let mut headers = forward::answer_headers(answer.headers(), false);
    headers.remove(CONTENT_ENCODING);
    if let Ok(turn_id) = HeaderValue::from_str(&told.turn_id) {
        headers.insert("x-oclaw-turn-id", turn_id);
    }
    let streamed = pass::is_event_stream(answer.headers());
    let bytes = encoding::plain(answer, coding);
    let body = match streamed {
        true => {
            let capture = StreamCapture::new(prepared);
            relay::start(bytes, Some(exchange), capture, shared.clone(), (version, flight))
        }
        false => whole::answer(bytes, prepared, exchange, shared, (version, flight)).await?,
    };
    let mut response = Response::new(body);
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response.extensions_mut().insert(told);
    Ok(response)
}

fn status_reason(status: StatusCode) -> &'static str {
    match status.as_u16() {
        429 => "upstream_429",
        400..=499 => "upstream_4xx",
        500..=599 => "upstream_5xx",
        _ => "upstream_other",
    }
}

//! The routes, and the lock before every one of them.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use axum::{Extension, Json, Router};
use serde_json::{Value, json};

use super::auth::Keys;
use super::error::Refusal;
use super::forward::{self, Call};
use super::metrics::count;
use super::{Shared, body, chat, feedback};

/// Longest wait for the engine's word about itself.
const PATIENCE: Duration = Duration::from_secs(3);

/// Name of the key that a request carries.
#[derive(Debug, Clone)]
pub(super) struct Owner(pub(super) Option<String>);

/// Builds the routes.
pub(super) fn router(shared: Arc<Shared>) -> Router {
    let control = Router::new()
        .route("/oclaw/policy", post(policy))
        .route("/oclaw/pause", post(pause))
        .route("/oclaw/resume", post(resume))
        .route_layer(middleware::from_fn_with_state(shared.clone(), control_lock));
    let clients = Router::new()
        .route("/v1/chat/completions", post(chat::chat))
        .route("/chat/completions", post(chat::chat))
        .route("/v1/feedback", post(feedback::feedback))
        .route("/v1/{*path}", any(pass))
        .route("/models", get(pass))
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .fallback(nothing_here)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(shared.clone(), client_lock));
    control.merge(clients).with_state(shared)
}

async fn client_lock(State(shared): State<Arc<Shared>>, request: Request, next: Next) -> Response {
    unlock(&shared, &shared.keys, request, next).await
}

/// The control routes have a key of their own, or share the clients'.
async fn control_lock(State(shared): State<Arc<Shared>>, request: Request, next: Next) -> Response {
    let keys = if shared.control.is_empty() { &shared.keys } else { &shared.control };
    unlock(&shared, keys, request, next).await
}

async fn unlock(shared: &Shared, keys: &Keys, mut request: Request, next: Next) -> Response {
    let owner = match keys.is_empty() {
        true => None,
        false => match keys.owner(request.headers()) {
            Some(name) => Some(name.to_owned()),
            None => {
                shared.metrics.refuse("invalid_api_key");
                let message = "no valid key; send it as `Authorization: Bearer KEY`";
                return Refusal::new(StatusCode::UNAUTHORIZED, "invalid_api_key", message)
                    .into_response();
            }
        },
    };
    request.extensions_mut().insert(Owner(owner));
    next.run(request).await
}

/// Passes a request on that is no chat.
async fn pass(State(shared): State<Arc<Shared>>, request: Request) -> Response {
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
    let flight = shared.flights.begin();
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
    let body = body::read(body, shared.limits.body).await?;
    let call = Call {
        method: parts.method.clone(),
        path,
        query: parts.uri.query(),
        headers: &parts.headers,
        body,
    };
    let answer = forward::send(shared, &call).await?;
    Ok(chat::passed(answer, shared, flight))
}

async fn healthz() -> Response {
    Json(json!({ "status": "ok" })).into_response()
}

/// Ready is: the engine takes requests and the disk takes turns.
async fn readyz(State(shared): State<Arc<Shared>>) -> Response {
    let mut reasons = Vec::new();
    match tokio::time::timeout(PATIENCE, shared.upstream.engine.health()).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => reasons.push(format!("engine: {}", error.kind())),
        Err(_) => reasons.push("engine: no answer in time".to_owned()),
    }
    if !shared.recorder.counts().is_healthy() {
        reasons.push("spool: the disk does not take turns".to_owned());
    }
    if *shared.held.borrow() {
        reasons.push("on hold".to_owned());
    }
    let ready = reasons.is_empty();
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(json!({ "ready": ready, "reasons": reasons }))).into_response()
}

async fn metrics(State(shared): State<Arc<Shared>>) -> Response {
    let text = shared.metrics.text(shared.recorder.counts());
    ([(CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

/// Whoever pushed new weights says which.
async fn policy(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let body = match body::read(request.into_body(), shared.limits.body).await {
        Ok(body) => body,
        Err(refusal) => return refusal.into_response(),
    };
    let told: Option<Value> = serde_json::from_slice(&body).ok();
    let version = told.as_ref().and_then(|told| told.get("weight_version"));
    match version.and_then(Value::as_str).filter(|version| !version.trim().is_empty()) {
        Some(version) => {
            shared.upstream.told(version.to_owned()).await;
            Json(json!({ "success": true, "weight_version": version })).into_response()
        }
        None => Refusal::bad_request("bad_policy", "`weight_version` is no text").into_response(),
    }
}

async fn pause(State(shared): State<Arc<Shared>>) -> Response {
    shared.held.send_replace(true);
    Json(json!({ "success": true })).into_response()
}

async fn resume(State(shared): State<Arc<Shared>>) -> Response {
    shared.held.send_replace(false);
    Json(json!({ "success": true })).into_response()
}

async fn nothing_here(Extension(_): Extension<Owner>, _: HeaderMap) -> Response {
    Refusal::not_found("no such route").into_response()
}

async fn wrong_method() -> Response {
    let message = "this route takes another method";
    Refusal::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message).into_response()
}

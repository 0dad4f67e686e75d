//! The routes, and the lock before every one of them.
//!
//! The router is made of one table, so that a test can go through all of it.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, Method, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, any, get, post};
use axum::{Extension, Json, Router};
use serde_json::{Value, json};

use super::auth::Keys;
use super::error::Refusal;
use super::metrics::Now;
use super::{Shared, body, chat, feedback, pass, request_log};

/// Longest wait for the engine's word about itself.
const PATIENCE: Duration = Duration::from_secs(3);

/// Name of the key that a request carries.
#[derive(Debug, Clone)]
pub(super) struct Owner(pub(super) Option<String>);

/// Whose key opens a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lock {
    /// A client's.
    Client,
    /// That of whoever changes the weights; a client's if there is none.
    Control,
}

/// A route and its lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// The method; GET stands for all of a route that takes any.
    pub method: &'static Method,
    /// The path, as the router knows it.
    pub path: &'static str,
    /// Whose key opens it.
    pub lock: Lock,
}

type Handler = MethodRouter<Arc<Shared>>;

/// All routes there are.
fn table() -> Vec<(Route, Handler)> {
    const GET: &Method = &Method::GET;
    const POST: &Method = &Method::POST;
    let client =
        |method, path, handler: Handler| (Route { method, path, lock: Lock::Client }, handler);
    let control =
        |path, handler: Handler| (Route { method: POST, path, lock: Lock::Control }, handler);
    vec![
        client(POST, "/v1/chat/completions", post(chat::chat)),
        client(POST, "/chat/completions", post(chat::chat)),
        client(POST, "/v1/feedback", post(feedback::feedback)),
        client(GET, "/v1/{*path}", any(pass::pass)),
        client(GET, "/models", get(pass::pass)),
        client(GET, "/healthz", get(healthz)),
        client(GET, "/readyz", get(readyz)),
        client(GET, "/metrics", get(metrics)),
        control("/oclaw/policy", post(policy)),
        control("/oclaw/pause", post(pause)),
        control("/oclaw/resume", post(resume)),
    ]
}

/// Lists all routes there are.
pub fn routes() -> Vec<Route> {
    table().into_iter().map(|(route, _)| route).collect()
}

/// Builds the router. Every route of it goes through [`unlock`], and so does what
/// is none.
pub(super) fn router(shared: Arc<Shared>) -> Router {
    let mut control = Router::new();
    let mut clients = Router::new();
    for (route, handler) in table() {
        match route.lock {
            Lock::Client => clients = clients.route(route.path, handler),
            Lock::Control => control = control.route(route.path, handler),
        }
    }
    let control = control
        .method_not_allowed_fallback(wrong_method)
        .route_layer(middleware::from_fn_with_state(shared.clone(), control_lock));
    let clients = clients
        .fallback(nothing_here)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(shared.clone(), client_lock));
    let router = control.merge(clients);
    let router = router.layer(middleware::from_fn_with_state(shared.clone(), head_within_limit));
    let router = match &shared.log {
        None => router,
        Some(_) => {
            router.layer(middleware::from_fn_with_state(shared.clone(), request_log::follow))
        }
    };
    router.with_state(shared)
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
    let owner = Owner(owner);
    request.extensions_mut().insert(owner.clone());
    let mut response = next.run(request).await;
    response.extensions_mut().insert(owner);
    response
}

async fn head_within_limit(
    State(shared): State<Arc<Shared>>,
    request: Request,
    next: Next,
) -> Response {
    // Each header line has a colon, a space and an end.
    let of = |(name, value): (&axum::http::HeaderName, &axum::http::HeaderValue)| {
        name.as_str().len() + value.len() + 4
    };
    let path = request.uri().path_and_query().map_or(0, |path| path.as_str().len());
    let size = path + request.headers().iter().map(of).sum::<usize>();
    if size <= shared.limits.headers {
        return next.run(request).await;
    }
    shared.metrics.refuse("headers_too_large");
    let message = format!("the request's headers are larger than {} bytes", shared.limits.headers);
    let status = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
    Refusal::new(status, "headers_too_large", message).into_response()
}

async fn healthz() -> Response {
    Json(json!({ "status": "ok" })).into_response()
}

/// Ready is: an engine takes requests and the disk takes turns.
async fn readyz(State(shared): State<Arc<Shared>>) -> Response {
    let engines = shared.fleet.engines();
    let checks = engines.iter().map(|engine| async {
        match tokio::time::timeout(PATIENCE, engine.engine.health()).await {
            Ok(Ok(_)) => None,
            Ok(Err(error)) => Some(error.kind().to_string()),
            Err(_) => Some("no answer in time".to_owned()),
        }
    });
    let ill = futures_util::future::join_all(checks).await;
    let mut reasons = Vec::new();
    if ill.iter().all(Option::is_some) {
        let several = engines.len() > 1;
        let told = ill.iter().flatten().enumerate().map(|(number, reason)| match several {
            true => format!("engine {}: {reason}", number + 1),
            false => format!("engine: {reason}"),
        });
        reasons.extend(told);
    }
    if !shared.recorder.counts().is_healthy() {
        reasons.push("spool: the disk does not take turns".to_owned());
    }
    if shared.fleet.is_held() {
        reasons.push("on hold".to_owned());
    }
    let ready = reasons.is_empty();
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(json!({ "ready": ready, "reasons": reasons }))).into_response()
}

async fn metrics(State(shared): State<Arc<Shared>>) -> Response {
    let now = Now {
        running: shared.flights.flying(),
        queued: shared.queue.bytes(),
        lost_lines: shared.log.as_ref().map_or(0, |log| log.lost() as usize),
    };
    let text = shared.metrics.text(shared.recorder.counts(), &now, &shared.fleet);
    ([(CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

/// What a control request says.
struct Told(Value);

impl Told {
    async fn read(shared: &Shared, request: Request) -> Result<Self, Refusal> {
        let (body, _waiting) = body::read(shared, request.into_body()).await?;
        if body.trim_ascii().is_empty() {
            return Ok(Self(Value::Null));
        }
        let told = serde_json::from_slice(&body);
        told.map(Self).map_err(|error| {
            Refusal::bad_request("bad_control", format!("the body is no JSON: {error}"))
        })
    }

    fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).and_then(Value::as_str).filter(|text| !text.trim().is_empty())
    }

    /// Returns the address of the engine that is meant; all are if none is named.
    fn engine(&self, shared: &Shared) -> Result<Option<&str>, Refusal> {
        let engine = self.text("engine");
        match shared.fleet.named(engine).is_empty() {
            false => Ok(engine),
            true => Err(Refusal::new(
                StatusCode::NOT_FOUND,
                "no_such_engine",
                format!("no engine at `{}`", engine.unwrap_or_default()),
            )),
        }
    }
}

/// Whoever pushed new weights says which, to which engine (all if none is named),
/// and what the model is called there from now on, if that has changed.
async fn policy(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let told = async {
        let told = Told::read(&shared, request).await?;
        let engine = told.engine(&shared)?;
        let Some(version) = told.text("weight_version") else {
            return Err(Refusal::bad_request("bad_policy", "`weight_version` is no text"));
        };
        let mut answer = json!({ "success": true, "weight_version": version });
        for engine in shared.fleet.named(engine) {
            engine.told(version.to_owned());
            if let Some(name) = told.text("model") {
                answer["renamed"] = json!(engine.rename(name));
            }
        }
        Ok(Json(answer))
    };
    told.await.into_response()
}

async fn pause(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    hold(&shared, request, true).await.into_response()
}

async fn resume(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    hold(&shared, request, false).await.into_response()
}

async fn hold(shared: &Shared, request: Request, held: bool) -> Result<Json<Value>, Refusal> {
    let told = Told::read(shared, request).await?;
    let engines = shared.fleet.hold(told.engine(shared)?, held);
    Ok(Json(json!({ "success": true, "engines": engines })))
}

async fn nothing_here(Extension(_): Extension<Owner>, _: HeaderMap) -> Response {
    Refusal::not_found("no such route").into_response()
}

async fn wrong_method() -> Response {
    let message = "this route takes another method";
    Refusal::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message).into_response()
}

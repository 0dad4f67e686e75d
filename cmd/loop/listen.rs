//! The loop's own server: its state and its figures, for who may see them.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, RwLock};
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use oclaw::listener::Door;
use oclaw::pipeline::Status;
use oclaw::proxy::{self, Keys};
use serde_json::json;
use tokio::sync::watch;

use crate::report::Failure;
use crate::serve::keys;

/// How long a client may be silent, or take nothing.
const PATIENCE: Duration = Duration::from_secs(300);

type Shared = Arc<RwLock<Status>>;

/// Serves the state until the process ends. Returns where.
pub(super) async fn start(
    address: SocketAddr,
    key_file: Option<&Path>,
    status: Shared,
) -> anyhow::Result<SocketAddr> {
    let keys = keys(key_file, "status")?;
    if !address.ip().is_loopback() && keys.is_empty() {
        return Err(proxy::Error::Open { address }.into());
    }
    let listener = tokio::net::TcpListener::bind(address).await.map_err(|error| {
        Failure::failed(format!("cannot listen on {address}: {error}"))
            .hint("choose another address by `--listen`")
    })?;
    let address = listener.local_addr()?;
    let router = Router::new()
        .route("/healthz", get(|| async { Json(json!({ "status": "ok" })) }))
        .route("/status", get(state))
        .route("/metrics", get(metrics))
        .with_state(status)
        .fallback(|| async { StatusCode::NOT_FOUND })
        .layer(middleware::from_fn_with_state(Arc::new(keys), lock));
    tokio::spawn(async move {
        // Neither ever changes: it serves until the process ends.
        let (accepting, stop) = (watch::Sender::new(true), watch::Sender::new(false));
        let door = Door { listener, patience: PATIENCE, idle: PATIENCE, stop: stop.subscribe() };
        door.serve(router, accepting.subscribe()).await;
    });
    Ok(address)
}

async fn lock(State(keys): State<Arc<Keys>>, request: Request, next: Next) -> Response {
    match keys.is_empty() || keys.owner(request.headers()).is_some() {
        true => next.run(request).await,
        false => StatusCode::UNAUTHORIZED.into_response(),
    }
}

async fn state(State(status): State<Shared>) -> Response {
    match status.read() {
        Ok(status) => Json(&*status).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn metrics(State(status): State<Shared>) -> Response {
    match status.read() {
        Ok(status) => {
            ([(CONTENT_TYPE, "text/plain; version=0.0.4")], status.prometheus()).into_response()
        }
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

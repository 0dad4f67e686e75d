//! Our own errors, in OpenAI's shape.

use axum::Json;
use axum::http::StatusCode;
use axum::http::header::RETRY_AFTER;
use axum::response::{IntoResponse, Response};
use serde_json::json;

/// An error that this proxy, not the engine, answers with.
#[derive(Debug, Clone)]
pub(super) struct Refusal {
    pub(super) status: StatusCode,
    /// A stable word for programs.
    pub(super) code: &'static str,
    pub(super) message: String,
    pub(super) retry_after: Option<u64>,
}

impl Refusal {
    pub(super) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code, message: message.into(), retry_after: None }
    }

    pub(super) fn bad_request(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, code, message)
    }

    pub(super) fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found", message)
    }

    pub(super) fn retry_after(mut self, seconds: u64) -> Self {
        self.retry_after = Some(seconds);
        self
    }
}

/// Stands beside a refusal for the request log.
#[derive(Debug, Clone, Copy)]
pub(super) struct Code(pub(super) &'static str);

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let kind = match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            400..=499 => "invalid_request_error",
            _ => "server_error",
        };
        let error = json!({
            "message": self.message, "type": kind, "param": null, "code": self.code,
        });
        let mut response = (self.status, Json(json!({ "error": error }))).into_response();
        response.extensions_mut().insert(Code(self.code));
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(RETRY_AFTER, seconds.into());
        }
        response
    }
}

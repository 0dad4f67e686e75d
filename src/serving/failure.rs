//! Errors of a request, in the two shapes that SGLang gives them.

use axum::http::header::RETRY_AFTER;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// A request that gets no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(super) struct Failure {
    pub(super) status: StatusCode,
    pub(super) message: String,
    /// The member of the request that is to blame, if it is one.
    pub(super) param: Option<&'static str>,
    /// After how many seconds it may be sent again, if that could help.
    retry_after: Option<u64>,
}

impl Failure {
    /// Something is wrong that this status stands for.
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, retry_after: None }
    }

    /// The request itself is wrong.
    pub(super) fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// A member of the request is wrong.
    pub(super) fn of(member: &'static str, message: impl Into<String>) -> Self {
        Self { param: Some(member), ..Self::bad(message) }
    }

    /// The engine cannot go on.
    pub(super) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// The engine is stopping, or has stopped.
    pub(super) fn stopped() -> Self {
        let message =
            "the engine answers no more: it is shutting down, or has failed (see `/health`)";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
    }

    /// The engine has enough to do for now.
    pub(super) fn busy(message: impl Into<String>) -> Self {
        let busy = Self::new(StatusCode::SERVICE_UNAVAILABLE, message);
        Self { retry_after: Some(1), ..busy }
    }

    /// Returns the flat body of the `/v1` routes.
    pub(super) fn body(&self) -> Value {
        let kind = match self.status.as_u16() {
            400 | 405 | 408 | 413 => "BadRequestError",
            401 => "Unauthorized",
            404 => "NotFoundError",
            503 => "ServiceUnavailableError",
            _ => "InternalServerError",
        };
        json!({
            "object": "error",
            "message": self.message,
            "type": kind,
            "param": self.param,
            "code": self.status.as_u16(),
        })
    }

    /// Returns the answer of the native routes.
    pub(super) fn native(&self) -> Response {
        self.with_body(json!({"error": {"message": self.message}}))
    }

    fn with_body(&self, body: Value) -> Response {
        let mut response = (self.status, axum::Json(body)).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        self.with_body(self.body())
    }
}

/// Reads a JSON body; what is wrong with it is a bad request, as in SGLang.
pub(super) fn parse<T: serde::de::DeserializeOwned>(body: &[u8]) -> Result<T, Failure> {
    // A list could pass for an object whose members have no names.
    if body.trim_ascii_start().first().is_some_and(|first| *first != b'{') {
        return Err(Failure::bad("the body is no JSON object"));
    }
    let error = match serde_json::from_slice(body) {
        Ok(read) => return Ok(read),
        Err(error) => error,
    };
    // Half a surrogate pair, which Python lets through: a tool result cut inside
    // an emoji must not end a conversation.
    let repaired = crate::wire::json::parse(body).filter(|repaired| repaired.repaired());
    let read = repaired.and_then(|repaired| serde_json::from_value(repaired.value).ok());
    read.ok_or_else(|| Failure::bad(format!("cannot read the body: {error}")))
}

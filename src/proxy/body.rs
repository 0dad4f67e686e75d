//! Reading a request's body within its limits.

use axum::body::{Body, HttpBody};
use axum::http::StatusCode;
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;

use crate::listener::discard;

use super::Shared;
use super::error::Refusal;
use super::limits::Waiting;

/// Room that is made for a body before it has come.
const ROOM: usize = 1 << 20;

/// Reads a body within the limits of its size, of all that wait, and of the time
/// between two pieces. It counts as waiting until the second value is dropped.
pub(super) async fn read(shared: &Shared, body: Body) -> Result<(Bytes, Waiting), Refusal> {
    let limit = shared.limits.body;
    let expected = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    let mut waiting = shared.queue.begin();
    let mut stream = body.into_data_stream();
    let mut first: Option<Bytes> = None;
    let mut bytes = BytesMut::new();
    loop {
        let chunk = match tokio::time::timeout(shared.limits.silence, stream.next()).await {
            Ok(None) => break,
            Ok(Some(Ok(chunk))) => chunk,
            Ok(Some(Err(_))) => {
                let message = "the request's body broke off";
                return Err(Refusal::bad_request("incomplete_body", message));
            }
            Err(_) => {
                let message = "the request's body did not come";
                return Err(Refusal::new(StatusCode::REQUEST_TIMEOUT, "body_timeout", message));
            }
        };
        let so_far = bytes.len() + first.as_ref().map_or(0, Bytes::len);
        let refused = match so_far + chunk.len() > limit {
            true => {
                let message = format!("the request's body is larger than {limit} bytes");
                let code = "body_too_large";
                Some(Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, code, message))
            }
            false => waiting.grow(chunk.len()).err(),
        };
        if let Some(refusal) = refused {
            drop((first, bytes, waiting));
            discard(stream).await;
            return Err(refusal);
        }
        // Most bodies come in one piece, which need not be copied.
        if first.is_none() && bytes.is_empty() {
            first = Some(chunk);
            continue;
        }
        if let Some(first) = first.take() {
            bytes.reserve(expected.min(ROOM));
            bytes.extend_from_slice(&first);
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok((first.unwrap_or_else(|| bytes.freeze()), waiting))
}

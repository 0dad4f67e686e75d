//! Reading a request's body within its limit.

use std::time::Duration;

use axum::body::Body;
use axum::http::StatusCode;
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;

use super::error::Refusal;

/// How much of a body that is too large is read and dropped, so that the client
/// gets to read the refusal.
const COURTESY: usize = 256 << 20;
const COURTESY_TIME: Duration = Duration::from_secs(10);

/// Reads a body of at most `limit` bytes.
pub(super) async fn read(body: Body, limit: usize) -> Result<Bytes, Refusal> {
    let mut stream = body.into_data_stream();
    let mut bytes = BytesMut::new();
    while let Some(chunk) = stream.next().await {
        let chunk = chunk
            .map_err(|_| Refusal::bad_request("incomplete_body", "the request's body broke off"))?;
        if bytes.len() + chunk.len() > limit {
            let dropping = async {
                let mut dropped = 0;
                while let Some(Ok(chunk)) = stream.next().await {
                    dropped += chunk.len();
                    if dropped > COURTESY {
                        break;
                    }
                }
            };
            let _ = tokio::time::timeout(COURTESY_TIME, dropping).await;
            let message = format!("the request's body is larger than {limit} bytes");
            return Err(Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message));
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes.freeze())
}

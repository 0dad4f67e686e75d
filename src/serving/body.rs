//! Bodies of requests: read within limits, or counted and dropped.
//!
//! Whatever is refused, its body is read on for a while: the client is still sending, and
//! would find its connection cut off before it gets to read why.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use axum::http::header::EXPECT;
use bytes::BytesMut;
use futures_util::StreamExt;

use crate::listener::discard;

use super::failure::Failure;

/// Largest body that is read.
const LARGEST: usize = 64 << 20;
/// Longest wait for the next piece of a body, for the head of a request, and for a client
/// that takes nothing.
pub(super) const PATIENCE: Duration = Duration::from_secs(300);

/// A body, whole.
pub(super) struct Whole(pub(super) Bytes);

impl<S: Send + Sync> FromRequest<S> for Whole {
    type Rejection = Failure;

    async fn from_request(request: Request, _: &S) -> Result<Self, Failure> {
        read(request.into_body(), LARGEST, PATIENCE).await.map(Self)
    }
}

/// A body that is of no use: nothing of it is kept.
pub(super) struct Unwanted;

impl<S: Send + Sync> FromRequest<S> for Unwanted {
    type Rejection = Failure;

    async fn from_request(request: Request, _: &S) -> Result<Self, Failure> {
        drop_body(request).await;
        Ok(Self)
    }
}

/// Drops the body of a request that is answered without it.
pub(super) async fn drop_body(request: Request) {
    // Who waits for leave to send has sent nothing, and need not.
    if !request.headers().contains_key(EXPECT) {
        discard(request.into_body().into_data_stream()).await;
    }
}

async fn read(body: Body, largest: usize, patience: Duration) -> Result<Bytes, Failure> {
    let mut pieces = body.into_data_stream();
    let mut bytes = BytesMut::new();
    loop {
        let piece = match tokio::time::timeout(patience, pieces.next()).await {
            Ok(None) => return Ok(bytes.freeze()),
            Ok(Some(Ok(piece))) => piece,
            Ok(Some(Err(_))) => return Err(Failure::bad("the request's body broke off")),
            Err(_) => {
                let message = "the request's body did not come";
                return Err(Failure::new(StatusCode::REQUEST_TIMEOUT, message));
            }
        };
        if bytes.len() + piece.len() > largest {
            drop(bytes);
            discard(pieces).await;
            let message = format!("the body has more than {largest} bytes");
            return Err(Failure::new(StatusCode::PAYLOAD_TOO_LARGE, message));
        }
        bytes.extend_from_slice(&piece);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::stream;

    use super::*;

    type Piece = Result<&'static str, &'static str>;
    type Read = Result<Bytes, u16>;

    /// Reads a body of these pieces, then of silence if it `hangs`.
    async fn read_of(pieces: &[Piece], hangs: bool) -> Read {
        let failed = std::io::Error::other::<&'static str>;
        let pieces: Vec<_> = pieces.iter().map(|piece| piece.map_err(failed)).collect();
        let silence =
            if hangs { stream::pending().left_stream() } else { stream::empty().right_stream() };
        let body = Body::from_stream(stream::iter(pieces).chain(silence));
        read(body, 8, Duration::from_millis(20)).await.map_err(|failure| failure.status.as_u16())
    }

    #[tokio::test]
    async fn a_body_is_read_whole_or_refused() {
        let good = |text: &'static str| Ok(Bytes::from_static(text.as_bytes()));
        let cases: [(&[Piece], bool, Read); 6] = [
            (&[], false, good("")),
            (&[Ok("1234"), Ok("5678")], false, good("12345678")),
            (&[Ok("12345"), Ok("6789")], false, Err(413)),
            (&[Ok("123456789"), Ok("more"), Err("cut")], false, Err(413)),
            (&[Ok("1"), Err("cut")], false, Err(400)),
            (&[Ok("1")], true, Err(408)),
        ];
        for (pieces, hangs, expected) in cases {
            assert_eq!(read_of(pieces, hangs).await, expected, "{pieces:?}");
        }
    }
}

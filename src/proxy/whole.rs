//! An answer that comes as one document.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::body::Body;
use axum::http::StatusCode;
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use futures_util::stream;

use crate::capture::{Answer, Prepared, read_answer, reason};

use super::error::Refusal;
use super::exchange::Exchange;
use super::limits::Flight;
use super::{LARGE, Shared, TOO_LARGE, relay};

/// Reads a whole answer, records it, and returns the client's copy. An answer
/// that is too large to be held passes as it comes, unrecorded and uncut.
pub(super) async fn answer(
    mut engine: relay::Pieces,
    prepared: Prepared,
    exchange: Exchange,
    shared: &Arc<Shared>,
    (version, flight): (Option<String>, Flight),
) -> Result<Body, Refusal> {
    let mut held = BytesMut::new();
    loop {
        match tokio::time::timeout(shared.limits.silence, engine.next()).await {
            Ok(None) => break,
            Ok(Some(Ok(chunk))) if held.len() + chunk.len() > shared.limits.answer_bytes => {
                exchange.skip(TOO_LARGE);
                let start = stream::iter([Ok(held.freeze()), Ok(chunk)]);
                return Ok(relay::pass(start.chain(engine).boxed(), shared.clone(), flight));
            }
            Ok(Some(Ok(chunk))) => held.extend_from_slice(&chunk),
            Ok(Some(Err(_))) | Err(_) => {
                exchange.skip("answer_broke_off");
                let message = "the engine's answer broke off";
                return Err(Refusal::new(StatusCode::BAD_GATEWAY, "upstream_broken", message));
            }
        }
    }
    let bytes = held.freeze();
    shared.metrics.bytes_from_engine.fetch_add(bytes.len() as u64, Ordering::Relaxed);
    let bytes = match read(bytes.clone(), prepared).await {
        None => {
            exchange.skip(reason::UNREADABLE_ANSWER);
            bytes
        }
        Some(read) => {
            shared.metrics.skip_choices(reason::ODD_CHOICE_INDEX, read.odd_choices);
            match read.skipped {
                Some(reason) => exchange.skip(reason),
                None => {
                    // Nobody is asked for what the answer tells.
                    let told = read.captured.iter().all(|it| it.weight_version.is_some());
                    let engine = exchange.engine.clone().filter(|_| !told);
                    let (recorder, flying) = (shared.recorder.clone(), flight.another());
                    let work = async move {
                        let end = match engine {
                            Some(engine) => engine.version(relay::FRESH).await,
                            None => None,
                        };
                        recorder.record(exchange, read.captured, (version, end)).await;
                        drop(flying);
                    };
                    // In a task of its own: the client may go away meanwhile.
                    let _ = tokio::spawn(work).await;
                }
            }
            read.client.map_or(bytes, Bytes::from)
        }
    };
    shared.metrics.bytes_to_clients.fetch_add(bytes.len() as u64, Ordering::Relaxed);
    Ok(Body::from(bytes))
}

/// Reads an answer, a large one on a thread of its own. `None` after a panic in
/// there, which must not break the chat.
async fn read(bytes: Bytes, prepared: Prepared) -> Option<Answer> {
    let large = bytes.len() > LARGE;
    let work = move || read_answer(&bytes, &prepared);
    match large {
        true => tokio::task::spawn_blocking(work).await.ok(),
        false => Some(work()),
    }
}

//! One stream on its way from the engine to a client.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::capture::{Captured, Ending, Relay, StreamCapture, reason};
use crate::wire::sse::{Decoder, Event};

use super::exchange::Exchange;
use super::{Flight, LARGE, Shared, TOO_LARGE};

/// Pieces that may wait for a slow client; then the engine waits, too.
const QUEUE: usize = 16;
/// How long the engine is still read after its client has gone with a whole
/// answer: ids and counts come last.
const LINGER: Duration = Duration::from_secs(1);
/// A version of the weights that was asked for so recently is good enough.
const FRESH: Duration = Duration::from_millis(200);

/// A stream on its way.
pub(super) struct Stream {
    shared: Arc<Shared>,
    decoder: Decoder,
    capture: StreamCapture,
    /// Bytes of the engine, unpacked, so far.
    received: usize,
    /// Taken when the answer is recorded.
    exchange: Option<Exchange>,
    /// The weights' version before the first byte.
    version: Option<String>,
    version_end: Option<JoinHandle<Option<String>>>,
    client: Option<mpsc::Sender<Result<Bytes, io::Error>>>,
    _flight: Flight,
}

/// Why the engine's bytes stopped.
enum Stop {
    Ended,
    Broken(io::Error),
    Abandoned,
}

/// Passes a stream on while reading it, and returns the client's body.
pub(super) fn start(
    upstream: BoxStream<'static, io::Result<Bytes>>,
    exchange: Exchange,
    capture: StreamCapture,
    shared: Arc<Shared>,
    (version, flight): (Option<String>, Flight),
) -> Body {
    let (client, queue) = mpsc::channel(QUEUE);
    let stream = Stream {
        decoder: Decoder::with_limit(shared.limits.answer_bytes),
        shared,
        capture,
        received: 0,
        exchange: Some(exchange),
        version,
        version_end: None,
        client: Some(client),
        _flight: flight,
    };
    tokio::spawn(stream.run(upstream));
    body(queue)
}

/// Passes bytes on unread, ending both sides when the engine falls silent.
pub(super) fn pass(
    bytes: BoxStream<'static, io::Result<Bytes>>,
    shared: Arc<Shared>,
    flight: Flight,
) -> Body {
    let state = (bytes, shared, flight);
    Body::from_stream(stream::unfold(Some(state), |state| async {
        let (mut bytes, shared, flight) = state?;
        let mut stop = shared.stop.subscribe();
        let silence = shared.limits.silence;
        let next = tokio::select! {
            next = tokio::time::timeout(silence, bytes.next()) => next,
            _ = stop.wait_for(|stop| *stop) => return Some((Err(cut_off()), None)),
        };
        match next {
            Ok(None) => None,
            Ok(Some(Ok(chunk))) => Some((Ok(chunk), Some((bytes, shared, flight)))),
            Ok(Some(Err(error))) => Some((Err(error), None)),
            Err(_) => Some((Err(silent(silence)), None)),
        }
    }))
}

fn body(queue: mpsc::Receiver<Result<Bytes, io::Error>>) -> Body {
    Body::from_stream(stream::unfold(queue, |mut queue| async {
        queue.recv().await.map(|piece| (piece, queue))
    }))
}

fn silent(after: Duration) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, format!("nothing from the engine for {after:?}"))
}

fn cut_off() -> io::Error {
    io::Error::new(io::ErrorKind::Interrupted, "the proxy is shutting down")
}

impl Stream {
    async fn run(mut self, mut upstream: BoxStream<'static, io::Result<Bytes>>) {
        let stop = loop {
            let chunk = match self.next(&mut upstream).await {
                Ok(chunk) => chunk,
                Err(stop) => break stop,
            };
            let received = chunk.len() as u64;
            let counter = &self.shared.metrics.bytes_from_engine;
            counter.fetch_add(received, std::sync::atomic::Ordering::Relaxed);
            self.received = self.received.saturating_add(chunk.len());
            if self.received > self.shared.limits.answer_bytes {
                self.give_up(TOO_LARGE);
            }
            let events: Vec<_> = self.decoder.push(&chunk).map(Arc::new).collect();
            let mut out = Vec::with_capacity(chunk.len());
            for event in events {
                self.event(&event, &mut out).await;
            }
            if !self.send(Ok(out.into())).await && !self.capture.is_finished() {
                break Stop::Abandoned;
            }
        };
        // The engine's connection closes with this, whoever ended it.
        drop(upstream);
        self.end(stop).await;
    }

    /// Waits for the engine's next bytes.
    async fn next(
        &mut self,
        upstream: &mut BoxStream<'static, io::Result<Bytes>>,
    ) -> Result<Bytes, Stop> {
        let silence = self.shared.limits.silence;
        let mut stop = self.shared.stop.subscribe();
        loop {
            let patience = if self.client.is_some() { silence } else { LINGER };
            let gone = async {
                match &self.client {
                    Some(client) => client.closed().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => return Err(Stop::Abandoned),
                () = gone => {
                    self.client = None;
                    // Agents hang up on purpose once they have what they need.
                    if !self.capture.is_finished() || self.exchange.is_none() {
                        return Err(Stop::Abandoned);
                    }
                }
                next = tokio::time::timeout(patience, upstream.next()) => {
                    return match next {
                        Ok(Some(Ok(chunk))) => Ok(chunk),
                        Ok(Some(Err(error))) => Err(Stop::Broken(error)),
                        Ok(None) => Err(Stop::Ended),
                        Err(_) if self.client.is_none() => Err(Stop::Abandoned),
                        Err(_) => Err(Stop::Broken(silent(silence))),
                    };
                }
            }
        }
    }

    /// Reads an event, and appends what the client gets of it.
    async fn event(&mut self, event: &Arc<Event>, out: &mut Vec<u8>) {
        let was_finished = self.capture.is_finished();
        let relay = self.read(event).await;
        if !was_finished && self.capture.is_finished() {
            // From here on the client may go on with the conversation.
            if let Some(exchange) = &mut self.exchange {
                exchange.answered(&self.capture.messages());
            }
            let shared = self.shared.clone();
            let ask = async move { shared.upstream.version(FRESH).await };
            self.version_end = Some(tokio::spawn(ask));
        }
        if self.capture.is_done() && self.exchange.is_some() {
            self.record(Ending::Closed).await;
        }
        match relay {
            Relay::Pass => out.extend_from_slice(&event.raw),
            Relay::Edited(bytes) => out.extend_from_slice(&bytes),
            Relay::Drop => {}
        }
    }

    /// Reads an event, a large one on a thread of its own.
    async fn read(&mut self, event: &Arc<Event>) -> Relay {
        if event.raw.len() <= LARGE {
            return self.capture.event(event);
        }
        let unread = self.capture.unread();
        let mut capture = std::mem::replace(&mut self.capture, unread);
        let event = event.clone();
        let work = move || {
            let relay = capture.event(&event);
            (capture, relay)
        };
        match tokio::task::spawn_blocking(work).await {
            Ok((capture, relay)) => {
                self.capture = capture;
                relay
            }
            // A panic in there must not break the chat.
            Err(_) => {
                self.give_up(reason::UNREADABLE_ANSWER);
                Relay::Pass
            }
        }
    }

    /// Records nothing of the answer, and holds no more of it than a piece. The
    /// rest passes, cut as far as its pieces are small.
    fn give_up(&mut self, why: &'static str) {
        if let Some(exchange) = self.exchange.take() {
            exchange.skip(why);
        }
        self.capture.stop_reading();
        self.decoder.lower_limit(LARGE);
    }

    async fn end(mut self, stop: Stop) {
        let rest = std::mem::take(&mut self.decoder).finish();
        if let Some(event) = rest {
            let mut out = Vec::new();
            self.event(&Arc::new(event), &mut out).await;
            self.send(Ok(out.into())).await;
        }
        let ending = match &stop {
            Stop::Ended => Ending::Closed,
            Stop::Broken(_) => Ending::Broken,
            Stop::Abandoned => Ending::Abandoned,
        };
        self.record(ending).await;
        let whole = self.capture.is_finished() || self.capture.is_done();
        match stop {
            Stop::Ended => {}
            // A whole answer is no failure, whatever the connection did next.
            Stop::Broken(_) if whole => {}
            Stop::Broken(error) => {
                tracing::warn!(%error, "the engine's stream broke");
                self.send(Err(error)).await;
            }
            Stop::Abandoned => {
                self.send(Err(cut_off())).await;
            }
        }
    }

    /// Records the answer, once.
    async fn record(&mut self, ending: Ending) {
        let Some(exchange) = self.exchange.take() else { return };
        let end = match self.version_end.take() {
            Some(asked) => asked.await.ok().flatten(),
            None => None,
        };
        let versions = (self.version.clone(), end.or_else(|| self.version.clone()));
        let captured: Vec<Captured> = self.capture.finish(ending);
        let mut odd = self.capture.odd_choices();
        if captured.is_empty() {
            exchange.skip(reason::ODD_CHOICE_INDEX);
            odd = odd.saturating_sub(1);
            self.shared.metrics.skip_choices(reason::ODD_CHOICE_INDEX, odd);
            return;
        }
        self.shared.metrics.skip_choices(reason::ODD_CHOICE_INDEX, odd);
        self.shared.recorder.record(exchange, captured, versions).await;
    }

    /// Sends bytes to the client. Returns whether it is still there.
    async fn send(&mut self, piece: Result<Bytes, io::Error>) -> bool {
        let Some(client) = &self.client else { return false };
        let length = match &piece {
            Ok(bytes) if bytes.is_empty() => return true,
            Ok(bytes) => bytes.len() as u64,
            Err(_) => 0,
        };
        if client.send(piece).await.is_err() {
            self.client = None;
            return false;
        }
        let counter = &self.shared.metrics.bytes_to_clients;
        counter.fetch_add(length, std::sync::atomic::Ordering::Relaxed);
        true
    }
}

//! One stream on its way from the engine to a client.
//!
//! The client's connection pulls: nothing is read from the engine that the client
//! has no room for, so that a slow reader holds up its own engine stream and
//! nobody else's, and costs no queue. When the client goes away, what is left to do
//! is done by a task of its own.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, Sleep};

use crate::capture::{Captured, Ending, Relay, StreamCapture, reason};
use crate::wire::sse::{Decoder, Event};

use super::exchange::Exchange;
use super::limits::Flight;
use super::{LARGE, Shared, TOO_LARGE};

/// How long the engine is still read after its client has gone with a whole
/// answer: ids and counts come last.
const LINGER: Duration = Duration::from_secs(1);
/// A version of the weights that was asked for so recently is good enough.
pub(super) const FRESH: Duration = Duration::from_millis(200);

/// The bytes of an answer as they come.
pub(super) type Pieces = BoxStream<'static, io::Result<Bytes>>;

/// A stream on its way.
struct Stream {
    shared: Arc<Shared>,
    /// The engine's bytes. Dropped as soon as they are over.
    upstream: Option<Pieces>,
    decoder: Decoder,
    /// Events that are not read yet.
    events: VecDeque<Event>,
    /// What reads a large event, and the answer with it, on a thread of its own, and
    /// whether the answer was finished before. The client may go away meanwhile.
    reading: Option<(bool, JoinHandle<(StreamCapture, Relay)>)>,
    capture: StreamCapture,
    /// Bytes of the engine, unpacked, so far.
    received: usize,
    /// Taken when the answer is recorded.
    exchange: Option<Exchange>,
    /// The weights' version before the first byte.
    version: Option<String>,
    version_end: VersionEnd,
    /// What the client gets next.
    ready: VecDeque<io::Result<Bytes>>,
    stop: watch::Receiver<bool>,
    /// Since when the engine is waited for, and the alarm clock for that.
    since: Instant,
    alarm: Pin<Box<Sleep>>,
    flight: Flight,
}

/// The weights' version when the engine had said its last word.
#[derive(Default)]
enum VersionEnd {
    #[default]
    Unasked,
    Known(Option<String>),
    Asked(JoinHandle<Option<String>>),
}

/// Why the engine's bytes stopped.
enum Stop {
    Ended,
    Broken(io::Error),
    Abandoned,
}

/// A stream as long as its client is there.
struct Passing(Option<Box<Stream>>);

impl Drop for Passing {
    /// The client has gone, or has all of it.
    fn drop(&mut self) {
        let Some(stream) = self.0.take().filter(|stream| stream.exchange.is_some()) else {
            return;
        };
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(stream.linger());
        }
    }
}

/// Passes a stream on while reading it, and returns the client's body. Without an
/// exchange nothing is recorded, but what is to be cut is cut.
pub(super) fn start(
    upstream: Pieces,
    exchange: Option<Exchange>,
    capture: StreamCapture,
    shared: Arc<Shared>,
    (version, flight): (Option<String>, Flight),
) -> Body {
    let silence = shared.limits.silence;
    let since = Instant::now();
    let stream = Stream {
        upstream: Some(upstream),
        decoder: Decoder::with_limit(shared.limits.answer_bytes),
        events: VecDeque::new(),
        reading: None,
        capture,
        received: 0,
        exchange,
        version,
        version_end: VersionEnd::default(),
        ready: VecDeque::new(),
        stop: shared.stop.subscribe(),
        since,
        alarm: Box::pin(tokio::time::sleep_until(since + silence)),
        flight,
        shared,
    };
    let passing = Passing(Some(Box::new(stream)));
    Body::from_stream(stream::unfold(passing, |mut passing| async {
        let piece = passing.0.as_mut()?.pull().await?;
        Some((piece, passing))
    }))
}

/// Passes bytes on unread, ending both sides when the engine falls silent.
pub(super) fn pass(bytes: Pieces, shared: Arc<Shared>, flight: Flight) -> Body {
    let stop = shared.stop.subscribe();
    let state = Some((bytes, stop, shared, flight));
    Body::from_stream(stream::unfold(state, |state| async {
        let (mut bytes, mut stop, shared, flight) = state?;
        let silence = shared.limits.silence;
        let next = tokio::select! {
            next = tokio::time::timeout(silence, bytes.next()) => next,
            _ = stop.wait_for(|stop| *stop) => return Some((Err(cut_off()), None)),
        };
        match next {
            Ok(None) => None,
            Ok(Some(Ok(chunk))) => Some((Ok(chunk), Some((bytes, stop, shared, flight)))),
            Ok(Some(Err(error))) => Some((Err(error), None)),
            Err(_) => Some((Err(silent(silence)), None)),
        }
    }))
}

pub(super) fn silent(after: Duration) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, format!("nothing from the engine for {after:?}"))
}

fn cut_off() -> io::Error {
    io::Error::new(io::ErrorKind::Interrupted, "the proxy is shutting down")
}

impl Stream {
    /// Returns what the client gets next; nothing at the end.
    async fn pull(&mut self) -> Option<io::Result<Bytes>> {
        loop {
            if let Some(piece) = self.ready.pop_front() {
                let length = piece.as_ref().map_or(0, Bytes::len) as u64;
                self.shared.metrics.bytes_to_clients.fetch_add(length, Ordering::Relaxed);
                return Some(piece);
            }
            self.upstream.as_ref()?;
            match self.next().await {
                Ok(chunk) => self.take(&chunk).await,
                Err(stop) => self.end(stop).await,
            }
        }
    }

    /// Waits for the engine's next bytes.
    async fn next(&mut self) -> Result<Bytes, Stop> {
        let Some(upstream) = &mut self.upstream else { return Err(Stop::Ended) };
        if *self.stop.borrow() {
            return Err(Stop::Abandoned);
        }
        let silence = self.shared.limits.silence;
        // Only the engine's silence counts, not the client's.
        self.since = Instant::now();
        loop {
            tokio::select! {
                biased;
                next = upstream.next() => return match next {
                    Some(Ok(chunk)) => Ok(chunk),
                    Some(Err(error)) => Err(Stop::Broken(error)),
                    None => Err(Stop::Ended),
                },
                _ = self.stop.wait_for(|stop| *stop) => return Err(Stop::Abandoned),
                // The clock is set again only when it rings: tokens come often.
                () = self.alarm.as_mut() => {
                    let until = self.since + silence;
                    if Instant::now() >= until {
                        return Err(Stop::Broken(silent(silence)));
                    }
                    self.alarm.as_mut().reset(until);
                }
            }
        }
    }

    /// Reads bytes of the engine, and makes ready what the client gets of them.
    async fn take(&mut self, chunk: &Bytes) {
        let counter = &self.shared.metrics.bytes_from_engine;
        counter.fetch_add(chunk.len() as u64, Ordering::Relaxed);
        self.received = self.received.saturating_add(chunk.len());
        if self.received > self.shared.limits.answer_bytes {
            self.give_up(TOO_LARGE);
        }
        let events = self.decoder.push(chunk);
        self.events.extend(events);
        self.events(chunk.len()).await;
    }

    /// Reads the events that wait.
    async fn events(&mut self, length: usize) {
        let mut out = Vec::with_capacity(length);
        while let Some(event) = self.events.pop_front() {
            self.event(event, &mut out).await;
        }
        if !out.is_empty() {
            self.ready.push_back(Ok(out.into()));
        }
    }

    /// Reads an event, and appends what the client gets of it.
    async fn event(&mut self, event: Event, out: &mut Vec<u8>) {
        let was_finished = self.capture.is_finished();
        let (event, relay) = self.read(event).await;
        self.notice(was_finished).await;
        match relay {
            Relay::Pass => out.extend_from_slice(&event.raw),
            Relay::Edited(bytes) => out.extend_from_slice(&bytes),
            Relay::Drop => {}
        }
    }

    /// Does what the event that was read last calls for.
    async fn notice(&mut self, was_finished: bool) {
        if !was_finished && self.capture.is_finished() {
            // From here on the client may go on with the conversation.
            if let Some(exchange) = &mut self.exchange {
                exchange.answered(&self.capture.messages());
            }
            self.ask_version();
        }
        if self.capture.is_done() && self.exchange.is_some() {
            self.record(Ending::Closed).await;
        }
    }

    fn ask_version(&mut self) {
        let Some(engine) = self.exchange.as_ref().and_then(|exchange| exchange.engine.clone())
        else {
            return;
        };
        self.version_end = match engine.version_known(FRESH) {
            Some(known) => VersionEnd::Known(known),
            None => VersionEnd::Asked(tokio::spawn(async move { engine.version(FRESH).await })),
        };
    }

    /// Reads an event, a large one on a thread of its own.
    async fn read(&mut self, event: Event) -> (Event, Relay) {
        if event.raw.len() <= LARGE {
            let relay = self.capture.event(&event);
            return (event, relay);
        }
        let was_finished = self.capture.is_finished();
        let unread = self.capture.unread();
        let mut capture = std::mem::replace(&mut self.capture, unread);
        let kept = event.clone();
        let work = move || {
            let relay = capture.event(&event);
            (capture, relay)
        };
        self.reading = Some((was_finished, tokio::task::spawn_blocking(work)));
        let relay = self.read_on().await;
        (kept, relay.unwrap_or(Relay::Pass))
    }

    /// Waits for the thread that reads an event, if there is one.
    async fn read_on(&mut self) -> Option<Relay> {
        let (_, reading) = self.reading.as_mut()?;
        let read = reading.await;
        self.reading = None;
        match read {
            Ok((capture, relay)) => {
                self.capture = capture;
                Some(relay)
            }
            // A panic in there must not break the chat.
            Err(_) => {
                self.give_up(reason::UNREADABLE_ANSWER);
                None
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

    /// Makes ready what is left for the client when the engine's bytes are over.
    async fn end(&mut self, stop: Stop) {
        // The engine's connection closes with this, whoever ended it.
        self.upstream = None;
        if let Some(event) = std::mem::take(&mut self.decoder).finish() {
            let mut out = Vec::new();
            self.event(event, &mut out).await;
            if !out.is_empty() {
                self.ready.push_back(Ok(out.into()));
            }
        }
        self.record(ending(&stop)).await;
        let whole = self.capture.is_finished() || self.capture.is_done();
        match stop {
            Stop::Ended => {}
            // A whole answer is no failure, whatever the connection did next.
            Stop::Broken(_) if whole => {}
            Stop::Broken(error) => {
                tracing::warn!(%error, "the engine's stream broke");
                self.ready.push_back(Err(error));
            }
            Stop::Abandoned => self.ready.push_back(Err(cut_off())),
        }
    }

    /// Does what is left to do when the client has gone.
    async fn linger(mut self: Box<Self>) {
        let mut stop = Stop::Abandoned;
        // What had come when it went belongs to the answer.
        if let Some((was_finished, _)) = self.reading {
            self.read_on().await;
            self.notice(was_finished).await;
        }
        self.events(0).await;
        // Agents hang up on purpose once they have what they need.
        if self.capture.is_finished() {
            let rest = async {
                while self.exchange.is_some() {
                    match self.next().await {
                        Ok(chunk) => self.take(&chunk).await,
                        Err(ended) => return ended,
                    }
                }
                Stop::Ended
            };
            if let Ok(ended) = tokio::time::timeout(LINGER, rest).await {
                stop = ended;
            }
        }
        self.upstream = None;
        self.record(ending(&stop)).await;
    }

    /// Records the answer, once.
    async fn record(&mut self, ending: Ending) {
        let Some(exchange) = self.exchange.take() else { return };
        let captured: Vec<Captured> = self.capture.finish(ending);
        let mut odd = self.capture.odd_choices();
        if captured.is_empty() {
            exchange.skip(reason::ODD_CHOICE_INDEX);
            odd = odd.saturating_sub(1);
            self.shared.metrics.skip_choices(reason::ODD_CHOICE_INDEX, odd);
            return;
        }
        self.shared.metrics.skip_choices(reason::ODD_CHOICE_INDEX, odd);
        let (start, end) = (self.version.clone(), std::mem::take(&mut self.version_end));
        let recorder = self.shared.recorder.clone();
        let flight = self.flight.another();
        let work = async move {
            let end = match end {
                VersionEnd::Unasked => None,
                VersionEnd::Known(known) => known,
                VersionEnd::Asked(asked) => asked.await.ok().flatten(),
            };
            recorder.record(exchange, captured, (start, end)).await;
            drop(flight);
        };
        // In a task of its own: the client may go away meanwhile. If it panics,
        // the exchange has counted itself.
        let _ = tokio::spawn(work).await;
    }
}

fn ending(stop: &Stop) -> Ending {
    match stop {
        Stop::Ended => Ending::Closed,
        Stop::Broken(_) => Ending::Broken,
        Stop::Abandoned => Ending::Abandoned,
    }
}

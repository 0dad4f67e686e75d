//! How much of everything there may be at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::http::StatusCode;
use tokio::sync::Notify;

use super::error::Refusal;
use super::upstream::Busy;

/// The least that a connection may be idle. Clients keep connections for the next turn,
/// which a person takes a while to write, and many do not ask again when one is closed just
/// as they use it: a short silence must not close it under them.
pub const LEAST_IDLE: Duration = Duration::from_secs(120);

/// Limits of a proxy.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes of a request's body.
    pub body: usize,
    /// Bytes of a request's headers, its path included.
    pub headers: usize,
    /// Requests on their way at a time.
    pub streams: usize,
    /// Bytes of all bodies that wait for an engine at a time.
    pub queue: usize,
    /// Bytes of an answer, unpacked, that are held to record it. A larger one only
    /// passes.
    pub answer_bytes: usize,
    /// Turns that wait for their next state at a time; the oldest make room.
    pub open_turns: usize,
    /// Bytes of their rows.
    pub open_bytes: usize,
    /// Time until the engine begins to answer.
    pub answer: Duration,
    /// Time between two pieces: of a request, of an answer, and until a client
    /// takes one.
    pub silence: Duration,
    /// Time until the head of a request is there; so also how long a connection is kept
    /// without one.
    pub idle: Duration,
    /// Time that a request waits while the engines are on hold.
    pub hold: Duration,
    /// Time that running answers get at the end.
    pub drain: Duration,
    /// Time between two questions after an engine's health.
    pub health: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body: 64 << 20,
            headers: 64 << 10,
            streams: 4096,
            queue: 1 << 30,
            answer_bytes: 64 << 20,
            open_turns: 262_144,
            open_bytes: 1 << 30,
            answer: Duration::from_secs(600),
            silence: Duration::from_secs(300),
            idle: Duration::from_secs(300),
            hold: Duration::from_secs(60),
            drain: Duration::from_secs(30),
            health: Duration::from_secs(2),
        }
    }
}

/// Counts the requests on their way.
#[derive(Debug)]
pub(super) struct Flights {
    shared: Arc<Counted>,
    most: usize,
}

#[derive(Debug, Default)]
struct Counted {
    flying: AtomicUsize,
    landed: Notify,
}

impl Flights {
    pub(super) fn up_to(most: usize) -> Self {
        Self { shared: Arc::default(), most }
    }

    /// Counts a request that is on its way from now on.
    pub(super) fn begin(&self) -> Result<Flight, Refusal> {
        let before = self.shared.flying.fetch_add(1, Ordering::SeqCst);
        let flight = Flight { seat: Arc::new(Seat(self.shared.clone())), engine: None };
        match before < self.most {
            true => Ok(flight),
            false => Err(Refusal::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "too_many_streams",
                format!("{} requests are on their way; try again shortly", self.most),
            )
            .retry_after(1)),
        }
    }

    /// Returns how many are on their way.
    pub(super) fn flying(&self) -> usize {
        self.shared.flying.load(Ordering::Relaxed)
    }

    /// Waits until none is on its way.
    pub(super) async fn landed(&self) {
        loop {
            let landed = self.shared.landed.notified();
            if self.shared.flying.load(Ordering::SeqCst) == 0 {
                return;
            }
            landed.await;
        }
    }
}

/// A request on its way, and the engine that answers it.
#[derive(Debug)]
pub(super) struct Flight {
    seat: Arc<Seat>,
    pub(super) engine: Option<Busy>,
}

impl Flight {
    /// Returns what keeps the request on its way, too.
    pub(super) fn another(&self) -> Self {
        Self { seat: self.seat.clone(), engine: None }
    }
}

/// A request that is counted, once, as long as anything is to do for it.
#[derive(Debug)]
struct Seat(Arc<Counted>);

impl Drop for Seat {
    fn drop(&mut self) {
        if self.0.flying.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.landed.notify_waiters();
        }
    }
}

/// Bytes of all bodies that wait for an engine.
#[derive(Debug)]
pub(super) struct Queue {
    bytes: Arc<AtomicUsize>,
    most: usize,
}

impl Queue {
    pub(super) fn up_to(most: usize) -> Self {
        Self { bytes: Arc::default(), most }
    }

    /// Begins to count a body.
    pub(super) fn begin(&self) -> Waiting {
        Waiting { all: self.bytes.clone(), most: self.most, bytes: 0 }
    }

    /// Returns how many bytes wait.
    pub(super) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }
}

/// A body that waits.
#[derive(Debug)]
pub(super) struct Waiting {
    all: Arc<AtomicUsize>,
    most: usize,
    bytes: usize,
}

impl Waiting {
    /// Counts more bytes of it, if there is room.
    pub(super) fn grow(&mut self, bytes: usize) -> Result<(), Refusal> {
        let before = self.all.fetch_add(bytes, Ordering::Relaxed);
        self.bytes += bytes;
        match before.saturating_add(bytes) <= self.most {
            true => Ok(()),
            false => Err(Refusal::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "queue_full",
                "too many bytes wait for the engine; try again shortly",
            )
            .retry_after(1)),
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.all.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

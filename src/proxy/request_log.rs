//! One JSON line per request: who, when, what came of it. Never a word of a
//! message, and never a key.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, SyncSender};
use std::time::{Duration, Instant};

use axum::body::{Body, HttpBody};
use axum::extract::{Request, State};
use axum::http::header::CONTENT_LENGTH;
use axum::middleware::Next;
use axum::response::Response;
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use crate::listener::Peer;

use super::Shared;
use super::error::Code;
use super::exchange::Exchange;
use super::recorder::now;
use super::routes::Owner;

/// Lines that may wait for the file; beyond, they are lost and counted.
const WAITING: usize = 8192;

enum Command {
    Line(Vec<u8>),
    Flush(oneshot::Sender<()>),
}

/// Where the lines go. Cheap to clone.
#[derive(Debug, Clone)]
pub struct RequestLog {
    sender: SyncSender<Command>,
    lost: Arc<AtomicU64>,
}

impl RequestLog {
    /// Writes lines on a thread of its own. A writer that fails loses lines, which
    /// is counted, and never a chat.
    pub fn to(mut writer: Box<dyn Write + Send>) -> std::io::Result<Self> {
        let (sender, receiver) = mpsc::sync_channel(WAITING);
        let lost = Arc::new(AtomicU64::new(0));
        let counted = lost.clone();
        std::thread::Builder::new().name("request-log".to_owned()).spawn(move || {
            // Whether the file ends within a line.
            let mut torn = false;
            while let Ok(command) = receiver.recv() {
                // What has come together is written together.
                let more = std::iter::from_fn(|| receiver.try_recv().ok()).take(WAITING);
                let mut bytes = if torn { vec![b'\n'] } else { Vec::new() };
                let mut lines = 0;
                let mut waiting = Vec::new();
                for command in std::iter::once(command).chain(more) {
                    match command {
                        Command::Line(line) => {
                            bytes.extend_from_slice(&line);
                            lines += 1;
                        }
                        Command::Flush(done) => waiting.push(done),
                    }
                }
                if lines > 0 {
                    torn = writer.write_all(&bytes).and_then(|()| writer.flush()).is_err();
                    if torn {
                        counted.fetch_add(lines, Ordering::Relaxed);
                    }
                }
                for done in waiting {
                    // Nobody need wait any more.
                    let _ = done.send(());
                }
            }
        })?;
        Ok(Self { sender, lost })
    }

    /// Returns how many lines could not be written.
    pub(super) fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Waits until everything is written.
    pub(super) async fn flush(&self) {
        let (done, flushed) = oneshot::channel();
        let mut flush = Command::Flush(done);
        // Behind a full queue it waits its turn.
        while let Err(mpsc::TrySendError::Full(waiting)) = self.sender.try_send(flush) {
            flush = waiting;
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let _ = flushed.await;
    }

    fn write(&self, line: &Value) {
        let line = format!("{line}\n").into_bytes();
        if self.sender.try_send(Command::Line(line)).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// What the handler of a chat tells about it.
#[derive(Debug, Clone)]
pub(super) struct Told {
    pub(super) turn_id: String,
    session_id: String,
    engine: Option<String>,
}

impl Told {
    pub(super) fn of(exchange: &Exchange) -> Self {
        Self {
            turn_id: exchange.arrival.id.clone(),
            session_id: exchange.arrival.session_id.clone(),
            engine: exchange.engine.as_ref().map(|engine| engine.url.clone()),
        }
    }
}

/// A line that is written when its request is over, however that comes.
struct Line {
    log: RequestLog,
    fields: Value,
    start: Instant,
    first: Option<f64>,
    bytes: u64,
    /// The length that was announced.
    expected: Option<u64>,
    whole: bool,
}

impl Line {
    fn sent(&mut self, piece: &Result<Bytes, axum::Error>) {
        match piece {
            Ok(piece) => {
                self.first.get_or_insert(millis(self.start));
                self.bytes += piece.len() as u64;
            }
            Err(_) => self.whole = false,
        }
    }

    fn end(&mut self) {
        self.whole = true;
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.fields["bytes_out"] = json!(self.bytes);
        self.fields["first_ms"] = json!(self.first);
        self.fields["ms"] = json!(millis(self.start));
        self.fields["whole"] = json!(self.whole || self.expected == Some(self.bytes));
        self.log.write(&self.fields);
    }
}

/// Writes a line about a request when its answer is over.
pub(super) async fn follow(
    State(shared): State<Arc<Shared>>,
    request: Request,
    next: Next,
) -> Response {
    let Some(log) = shared.log.clone() else { return next.run(request).await };
    let start = Instant::now();
    let address = request.extensions().get::<axum::extract::ConnectInfo<Peer>>();
    // One that comes in chunks does not tell.
    let length: Option<u64> = request.body().size_hint().exact();
    let fields = json!({
        "at_us": now(),
        "address": address.map(|peer| peer.0.0.ip().to_string()),
        "method": request.method().as_str(),
        "path": request.uri().path(),
        "bytes_in": length,
    });
    let mut line = Line { log, fields, start, first: None, bytes: 0, expected: None, whole: false };
    let mut response = next.run(request).await;
    let told = response.extensions().get::<Told>();
    line.fields["client"] =
        json!(response.extensions().get::<Owner>().and_then(|it| it.0.as_ref()));
    line.fields["status"] = json!(response.status().as_u16());
    line.fields["code"] = json!(response.extensions().get::<Code>().map(|code| code.0));
    line.fields["turn_id"] = json!(told.map(|told| &told.turn_id));
    line.fields["session_id"] = json!(told.map(|told| &told.session_id));
    line.fields["engine"] = json!(told.map(|told| &told.engine));
    // The length would be lost with the wrapping.
    line.expected = response.body().size_hint().exact();
    if let Some(length) = line.expected {
        response.headers_mut().entry(CONTENT_LENGTH).or_insert(length.into());
    }
    response.map(|body| followed(body, line))
}

fn followed(body: Body, line: Line) -> Body {
    let pieces = body.into_data_stream();
    Body::from_stream(stream::unfold((pieces, line), |(mut pieces, mut line)| async {
        match pieces.next().await {
            Some(piece) => {
                line.sent(&piece);
                Some((piece, (pieces, line)))
            }
            None => {
                line.end();
                None
            }
        }
    }))
}

fn millis(since: Instant) -> f64 {
    (since.elapsed().as_secs_f64() * 1e6).round() / 1e3
}

//! The listening socket of a server: no delay on tokens, and an end of patience with a
//! client that takes nothing, or whose request does not come.
//!
//! What is asked and answered is the router's matter. Absent: keys, and any limit on how
//! many clients there are.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, BodyDataStream};
use axum::extract::{ConnectInfo, Request};
use axum::serve::Listener;
use futures_util::StreamExt;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tower_service::Service;

/// How much of a body that nobody wants is read and dropped, and how long at most.
const COURTESY: usize = 256 << 20;
const COURTESY_TIME: Duration = Duration::from_secs(10);

/// The listening socket.
#[derive(Debug)]
pub struct Door {
    /// Where clients come in.
    pub listener: TcpListener,
    /// How long a client may take nothing while there is something for it.
    pub patience: Duration,
    /// How long a client may need for the head of a request. A connection that is kept
    /// between two requests counts as one whose head does not come.
    pub idle: Duration,
    /// Becomes true when running answers must end.
    pub stop: watch::Receiver<bool>,
}

impl Door {
    async fn accept(&mut self) -> (Line, SocketAddr) {
        let (stream, address) = Listener::accept(&mut self.listener).await;
        // A token must not wait for the next one.
        let _ = stream.set_nodelay(true);
        let (patience, stop) = (self.patience, self.stop.clone());
        (Line { stream, patience, stop, stuck: None }, address)
    }

    /// Lets clients in as long as it is `accepting`, and answers each by the router. Who
    /// is inside at the end gets the answer that has begun; once the last of them has
    /// left this returns.
    pub async fn serve(mut self, router: Router, mut accepting: watch::Receiver<bool>) {
        let mut http = http1::Builder::new();
        // However it drips, a head has an end; a connection without one is closed, too.
        http.timer(TokioTimer::new()).header_read_timeout(self.idle);
        // Nothing is ever sent: it ends when all connections have dropped their side.
        let (inside, mut left) = mpsc::channel::<()>(1);
        loop {
            let (line, address) = tokio::select! {
                accepted = self.accept() => accepted,
                _ = accepting.wait_for(|accepting| !accepting) => break,
            };
            let inside = inside.clone();
            let (router, mut accepting) = (router.clone(), accepting.clone());
            let service = service_fn(move |request: hyper::Request<Incoming>| {
                let mut request: Request = request.map(Body::new);
                request.extensions_mut().insert(ConnectInfo(Peer(address)));
                router.clone().call(request)
            });
            let connection = http.serve_connection(TokioIo::new(line), service);
            tokio::spawn(async move {
                let _inside = inside;
                tokio::pin!(connection);
                tokio::select! {
                    // A client that breaks off is no matter of ours.
                    _ = connection.as_mut() => return,
                    _ = accepting.wait_for(|accepting| !accepting) => {}
                }
                connection.as_mut().graceful_shutdown();
                let _ = connection.await;
            });
        }
        // Who knocks now is turned away at once.
        drop((self.listener, inside));
        left.recv().await;
    }
}

/// Reads what is left of a body and keeps nothing, so that its sender gets to read the
/// refusal: to answer while much of it is on its way would cut the connection off before
/// the answer. Ends within bounds of bytes and time.
pub async fn discard(mut rest: BodyDataStream) {
    let dropping = async {
        let mut dropped = 0;
        while let Some(Ok(piece)) = rest.next().await {
            dropped += piece.len();
            if dropped > COURTESY {
                break;
            }
        }
    };
    // Who needs longer finds the connection cut off.
    let _ = tokio::time::timeout(COURTESY_TIME, dropping).await;
}

/// Who is at the other end.
#[derive(Debug, Clone, Copy)]
pub struct Peer(pub SocketAddr);

/// A client's connection.
struct Line {
    stream: TcpStream,
    patience: Duration,
    stop: watch::Receiver<bool>,
    /// Runs while the client takes nothing.
    stuck: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl Line {
    /// Passes on what writing came to, and ends it when it takes too long.
    fn written(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if written.is_ready() {
            self.stuck = None;
            return written;
        }
        let (patience, mut stop) = (self.patience, self.stop.clone());
        let stuck = self.stuck.get_or_insert_with(|| {
            Box::pin(async move {
                // At the end nobody is waited for: what it has not taken is recorded as
                // cut off.
                let _ = tokio::time::timeout(patience, stop.wait_for(|stop| *stop)).await;
            })
        });
        ready!(stuck.as_mut().poll(context));
        let message = "the client takes nothing";
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, message)))
    }
}

impl AsyncRead for Line {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Line {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.written(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, pieces);
        self.written(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

//! The socket of every server: whom it waits for at the end.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use oclaw::listener::Door;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};

const PATIENCE: Duration = Duration::from_secs(20);

#[tokio::test]
async fn who_is_inside_at_the_end_is_answered_and_waited_for() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (accepting, stop) = (watch::Sender::new(true), watch::Sender::new(false));
    let door = Door { listener, patience: PATIENCE, idle: PATIENCE, stop: stop.subscribe() };
    let (asked, leave) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (here, wanted) = (asked.clone(), leave.clone());
    let answer = move || async move {
        here.notify_one();
        wanted.notified().await;
        "late"
    };
    let router = Router::new().route("/", get(answer));
    let server = tokio::spawn(door.serve(router, accepting.subscribe()));
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    asked.notified().await;
    accepting.send_replace(false);
    let closed = async {
        while TcpStream::connect(address).await.is_ok() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, closed).await.unwrap();
    assert!(!server.is_finished(), "one is still inside");
    leave.notify_one();
    let mut heard = String::new();
    stream.read_to_string(&mut heard).await.unwrap();
    assert!(heard.ends_with("late"), "{heard}");
    tokio::time::timeout(PATIENCE, server).await.unwrap().unwrap();
}

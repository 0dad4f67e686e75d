//! People who chat while everything else happens.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::PATIENCE;

/// What is said, in turn: the next words judge the answer before.
const WORDS: [&str; 4] = [
    "What is the capital of France?",
    "No, that is wrong. Try again.",
    "Thanks, that is exactly right. And of Italy?",
    "No, not a list. One name only.",
];

/// Sends one request. An error is what a client's library tries again.
fn post(address: &str, session: &str, messages: &[Value]) -> Result<Value, String> {
    let body = json!({"model": "m", "messages": messages, "max_tokens": 8}).to_string();
    let length = body.len();
    let failed = |error: std::io::Error| error.to_string();
    let mut stream = TcpStream::connect(address).map_err(failed)?;
    stream.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\
         x-session-id: {session}\r\nconnection: close\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).map_err(failed)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).map_err(failed)?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or("no answer")?;
    match head.split_whitespace().nth(1) {
        Some("200") => {
            let start = body.find('{').ok_or("no JSON")?;
            let end = body.rfind('}').ok_or("no JSON")?;
            let answer: Value =
                serde_json::from_str(&body[start..=end]).map_err(|error| error.to_string())?;
            Ok(answer["choices"][0]["message"].clone())
        }
        status => Err(format!("{status:?}: {body}")),
    }
}

/// Holds a conversation of so many turns. Returns how often it had to try again.
pub(super) fn converse(address: &str, session: &str, turns: usize) -> u64 {
    let mut messages = Vec::new();
    let mut retries = 0;
    for turn in 0..turns {
        messages.push(json!({"role": "user", "content": WORDS[turn % WORDS.len()]}));
        let start = Instant::now();
        let answer = loop {
            match post(address, session, &messages) {
                Ok(answer) => break answer,
                Err(error) => {
                    retries += 1;
                    assert!(start.elapsed() < PATIENCE, "{session}: {error}");
                    std::thread::park_timeout(Duration::from_millis(100));
                }
            }
        };
        messages.push(answer);
    }
    retries
}

/// One who chats without end.
pub(super) struct Chatter {
    over: Arc<AtomicBool>,
    pub(super) turns: Arc<AtomicU64>,
    thread: JoinHandle<u64>,
}

impl Chatter {
    pub(super) fn start(address: &str) -> Self {
        let (over, turns) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let (stop, count, address) = (over.clone(), turns.clone(), address.to_owned());
        let thread = std::thread::spawn(move || {
            let mut retries = 0;
            for session in 0.. {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                retries += converse(&address, &format!("steady-{session}"), 4);
                count.fetch_add(4, Ordering::Relaxed);
            }
            retries
        });
        Self { over, turns, thread }
    }

    /// Ends after the conversation at hand. Returns the turns, and how often one had
    /// to be tried again. A chat that failed for good fails the test.
    pub(super) fn stop(self) -> (u64, u64) {
        self.over.store(true, Ordering::Relaxed);
        let retries = self.thread.join().unwrap();
        (self.turns.load(Ordering::Relaxed), retries)
    }
}

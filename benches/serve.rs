//! What `scripts/bench.sh serve` needs beside `oclaw` and its peers:
//!
//! ```text
//! serve engine                            an engine in SGLang's dialect
//! serve load URL CONNECTIONS SECONDS      chats as fast as they are answered
//! serve streams URL STREAMS               so many streams at once
//! ```
//!
//! The engine answers a chat at once, or streams 128 tokens, one each 50 ms. It
//! prints its address and runs until it is killed. The others print one JSON line.
//! All share the processors with what is measured, so they do no more than they must.

use std::error::Error;
use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// Tokens of a stream.
const TOKENS: usize = 128;
/// Time between two tokens of a stream.
const PACE: Duration = Duration::from_millis(50);

fn main() -> Result<(), Box<dyn Error>> {
    // `cargo bench` adds a flag of its own.
    let words: Vec<_> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let tasks = tokio::task::LocalSet::new();
    let found = match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["engine"] => tasks.block_on(&runtime, engine())?,
        ["load", url, connections, seconds] => {
            let seconds = Duration::from_secs_f64(seconds.parse()?);
            tasks.block_on(&runtime, load(host(url), connections.parse()?, seconds))?
        }
        ["streams", url, count] => tasks.block_on(&runtime, streams(host(url), count.parse()?))?,
        // What `cargo bench` without words comes to.
        [] => return Ok(()),
        _ => {
            return Err("words: engine | load URL CONNECTIONS SECONDS | streams URL STREAMS".into());
        }
    };
    writeln!(std::io::stdout(), "{found}")?;
    Ok(())
}

fn host(url: &str) -> String {
    url.trim_start_matches("http://").trim_end_matches('/').to_owned()
}

/// Runs the engine until it is killed.
async fn engine() -> Result<Value, Box<dyn Error>> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let mut out = std::io::stdout();
    writeln!(out, "http://{}", listener.local_addr()?)?;
    out.flush()?;
    loop {
        let (stream, _) = listener.accept().await?;
        tokio::task::spawn_local(async move {
            // A client that goes away in the middle is no matter.
            let _ = answer(stream).await;
        });
    }
}

/// Answers the requests of one connection.
async fn answer(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut held = Vec::with_capacity(1 << 13);
    loop {
        let (head, length) = loop {
            if let Some(found) = message(&held) {
                break found;
            }
            if stream.read_buf(&mut held).await? == 0 {
                return Ok(());
            }
        };
        let end = head + length.unwrap_or_default();
        while held.len() < end {
            if stream.read_buf(&mut held).await? == 0 {
                return Ok(());
            }
        }
        let wanted = Wanted::read(&held[..head], &held[head..end]);
        held.drain(..end);
        match wanted {
            Wanted::Document(status, document) => {
                let length = document.len();
                let answer = format!(
                    "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{document}"
                );
                stream.write_all(answer.as_bytes()).await?;
            }
            Wanted::Stream { exact } => tokens(&mut stream, exact).await?,
        }
    }
}

/// What a request wants.
enum Wanted {
    Document(&'static str, &'static str),
    /// Tokens, with their ids and log-probs or without.
    Stream {
        exact: bool,
    },
}

impl Wanted {
    fn read(head: &[u8], body: &[u8]) -> Self {
        let has = |text: &[u8]| body.windows(text.len()).any(|window| window == text);
        match head {
            _ if head.starts_with(b"POST /v1/chat/completions") => {
                match (has(b"\"stream\":true"), has(b"\"logprobs\":true")) {
                    (true, exact) => Self::Stream { exact },
                    (false, true) => Self::Document("200 OK", EXACT),
                    (false, false) => Self::Document("200 OK", PLAIN),
                }
            }
            _ if head.starts_with(b"GET /v1/models") => Self::Document("200 OK", MODELS),
            _ if head.starts_with(b"GET /model_info") => Self::Document("200 OK", INFO),
            _ if head.starts_with(b"GET /ready") => Self::Document("200 OK", "{}"),
            _ => Self::Document("404 Not Found", r#"{"error":{"message":"no such route"}}"#),
        }
    }
}

const MODELS: &str = r#"{"object":"list","data":[{"id":"m","object":"model"}]}"#;
const INFO: &str = r#"{"model_path":"/nowhere","is_generation":true,"weight_version":"0"}"#;
const PLAIN: &str = r#"{"id":"a","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"A short answer of eight tokens."},"logprobs":null,"finish_reason":"stop","matched_stop":9}],"usage":{"prompt_tokens":12,"completion_tokens":8,"total_tokens":20},"metadata":{"weight_version":"0"}}"#;
const EXACT: &str = r#"{"id":"a","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"A short answer of eight tokens."},"logprobs":{"content":[{"token":"A","bytes":[65],"logprob":-0.5,"top_logprobs":[]},{"token":" short","bytes":[32,115],"logprob":-0.5,"top_logprobs":[]},{"token":" answer","bytes":[32,97],"logprob":-0.5,"top_logprobs":[]},{"token":" of","bytes":[32,111],"logprob":-0.5,"top_logprobs":[]},{"token":" eight","bytes":[32,101],"logprob":-0.5,"top_logprobs":[]},{"token":" tokens","bytes":[32,116],"logprob":-0.5,"top_logprobs":[]},{"token":".","bytes":[46],"logprob":-0.5,"top_logprobs":[]},{"token":"","bytes":[],"logprob":-0.5,"top_logprobs":[]}]},"finish_reason":"stop","matched_stop":9,"prompt_token_ids":[1,2,3,4,5,6,7,8,9,10,11,12],"response_token_ids":[11,12,13,14,15,16,17,9],"meta_info":{"weight_version":"0","output_token_logprobs":[[-0.5,11,null],[-0.5,12,null],[-0.5,13,null],[-0.5,14,null],[-0.5,15,null],[-0.5,16,null],[-0.5,17,null],[-0.5,9,null]]}}],"usage":{"prompt_tokens":12,"completion_tokens":8,"total_tokens":20},"metadata":{"weight_version":"0"}}"#;

/// Streams an answer.
async fn tokens(stream: &mut TcpStream, exact: bool) -> std::io::Result<()> {
    let head =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).await?;
    let log_probs = match exact {
        true => {
            r#"{"content":[{"token":"word ","bytes":[119,111,114,100,32],"logprob":-0.5,"top_logprobs":[]}]}"#
        }
        false => "null",
    };
    let token = event(&format!(
        r#"{{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{{"index":0,"delta":{{"content":"word "}},"logprobs":{log_probs},"finish_reason":null}}]}}"#
    ));
    let mut clock = tokio::time::interval(PACE);
    clock.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    for _ in 0..TOKENS {
        clock.tick().await;
        stream.write_all(token.as_bytes()).await?;
    }
    let mut end = event(
        r#"{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","matched_stop":9}]}"#,
    );
    if exact {
        let ids = vec!["11"; TOKENS].join(",");
        end += &event(&format!(
            r#"{{"id":"c","choices":[],"sglext":{{"input_ids":[1,2,3],"output_ids":[[{ids}]]}}}}"#
        ));
        end += &event(&format!(
            r#"{{"id":"c","choices":[],"usage":{{"prompt_tokens":3,"completion_tokens":{TOKENS},"total_tokens":131}}}}"#
        ));
    }
    end += &event("[DONE]");
    stream.write_all(format!("{end}0\r\n\r\n").as_bytes()).await
}

/// Makes one event, as a chunk of its own.
fn event(data: &str) -> String {
    format!("{:x}\r\ndata: {data}\n\n\r\n", data.len() + 8)
}

/// Returns the length of a whole head, and of the body if it announces one.
fn message(held: &[u8]) -> Option<(usize, Option<usize>)> {
    let head = held.windows(4).position(|window| window == b"\r\n\r\n")? + 4;
    let mut length = None;
    for line in held[..head].split(|byte| *byte == b'\n') {
        let Some((name, value)) = line.split_at_checked(15) else { continue };
        if name.eq_ignore_ascii_case(b"content-length:") {
            length = std::str::from_utf8(value).ok().and_then(|value| value.trim().parse().ok());
        }
    }
    Some((head, length))
}

/// Makes a request; every one is a conversation of its own.
fn request(host: &str, number: u64, streamed: bool) -> Vec<u8> {
    let stream = if streamed { ",\"stream\":true" } else { "" };
    let body = format!(
        r#"{{"model":"m","messages":[{{"role":"system","content":"You are brief."}},{{"role":"user","content":"Say something short about the number {number}."}}],"temperature":0.7,"max_tokens":200{stream}}}"#
    );
    let length = body.len();
    format!("POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\nx-session-id: s{number}\r\ncontent-length: {length}\r\n\r\n{body}").into_bytes()
}

/// Chats on so many connections, each as fast as it is answered.
async fn load(host: String, connections: usize, time: Duration) -> Result<Value, Box<dyn Error>> {
    let numbers = Arc::new(AtomicU64::new(std::process::id().into()));
    let start = Instant::now();
    let tasks: Vec<_> = (0..connections)
        .map(|_| {
            let (host, numbers) = (host.clone(), numbers.clone());
            tokio::task::spawn_local(async move {
                let mut taken = Vec::new();
                let failed = chat(&host, &numbers, (start, time), &mut taken).await.is_err();
                (taken, failed)
            })
        })
        .collect();
    let (mut taken, mut failed) = (Vec::new(), 0);
    for task in tasks {
        let (times, broke) = task.await?;
        taken.extend(times);
        failed += u32::from(broke);
    }
    let seconds = start.elapsed().as_secs_f64();
    taken.sort_unstable();
    Ok(json!({
        "requests": taken.len(), "seconds": seconds, "per_second": taken.len() as f64 / seconds,
        "p50_ms": at(&taken, 0.5), "p99_ms": at(&taken, 0.99), "broken_connections": failed,
    }))
}

/// Chats on one connection until time is over.
async fn chat(
    host: &str,
    numbers: &AtomicU64,
    (start, time): (Instant, Duration),
    taken: &mut Vec<u32>,
) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(host).await?;
    stream.set_nodelay(true)?;
    let mut held = Vec::with_capacity(1 << 13);
    while start.elapsed() < time {
        let number = numbers.fetch_add(1 << 22, Ordering::Relaxed);
        let request = request(host, number, false);
        let sent = Instant::now();
        stream.write_all(&request).await?;
        held.clear();
        loop {
            if stream.read_buf(&mut held).await? == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            match message(&held) {
                Some((head, Some(length))) if held.len() >= head + length => break,
                Some((_, None)) if held.ends_with(b"0\r\n\r\n") => break,
                _ => {}
            }
        }
        if !held.starts_with(b"HTTP/1.1 200") {
            return Err(std::io::Error::other(String::from_utf8_lossy(&held).into_owned()));
        }
        taken.push(micros(sent.elapsed()));
    }
    Ok(())
}

/// Opens so many streams and times the gaps between their tokens.
async fn streams(host: String, count: usize) -> Result<Value, Box<dyn Error>> {
    let start = Instant::now();
    let first = u64::from(std::process::id());
    let tasks: Vec<_> = (0..count)
        .map(|place| {
            let host = host.clone();
            tokio::task::spawn_local(async move {
                // People do not begin at the same moment.
                let offset = PACE.mul_f64(place as f64 / count as f64) * 20;
                tokio::time::sleep(offset).await;
                let mut gaps = Vec::with_capacity(TOKENS);
                let number = first + ((place as u64) << 22);
                let whole = listen(&host, number, &mut gaps).await.unwrap_or(false);
                (gaps, whole)
            })
        })
        .collect();
    let (mut gaps, mut broken) = (Vec::new(), 0);
    for task in tasks {
        let (found, whole) = task.await?;
        broken += u32::from(!whole || found.len() != TOKENS - 1);
        gaps.extend(found);
    }
    gaps.sort_unstable();
    Ok(json!({
        "streams": count, "seconds": start.elapsed().as_secs_f64(), "broken": broken,
        "gap_p50_ms": at(&gaps, 0.5), "gap_p99_ms": at(&gaps, 0.99), "gap_max_ms": at(&gaps, 1.0),
    }))
}

/// Listens to one stream. Returns whether it came to its end.
async fn listen(host: &str, number: u64, gaps: &mut Vec<u32>) -> std::io::Result<bool> {
    let mut stream = TcpStream::connect(host).await?;
    stream.set_nodelay(true)?;
    stream.write_all(&request(host, number, true)).await?;
    let (mut held, mut read) = (Vec::with_capacity(1 << 16), 0);
    let mut last: Option<Instant> = None;
    loop {
        if stream.read_buf(&mut held).await? == 0 {
            return Ok(false);
        }
        let now = Instant::now();
        // A token is there when its line is: the rest of a line is looked at again.
        while let Some(end) = held[read..].iter().position(|byte| *byte == b'\n') {
            let line = &held[read..read + end];
            read += end + 1;
            if line.windows(10).any(|window| window == b"\"content\":") {
                gaps.extend(last.map(|last| micros(now - last)));
                last = Some(now);
            }
        }
        if held.ends_with(b"0\r\n\r\n") {
            return Ok(held.windows(6).any(|window| window == b"[DONE]"));
        }
    }
}

fn micros(time: Duration) -> u32 {
    u32::try_from(time.as_micros()).unwrap_or(u32::MAX)
}

/// Returns a quantile in milliseconds.
fn at(sorted: &[u32], share: f64) -> Option<f64> {
    let place = (sorted.len() as f64 * share) as usize;
    let found = sorted.get(place.min(sorted.len().checked_sub(1)?))?;
    Some(f64::from(*found) / 1000.0)
}

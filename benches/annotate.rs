//! What `scripts/bench.sh annotate` needs beside `oclaw` itself:
//!
//! ```text
//! annotate forge TABLE ROWS SAMPLE SAMPLE_ROWS   a table of recorded turns, and
//!                                                the first of them as JSON lines
//! annotate judge                                 a judge that answers after 50 ms
//! ```
//!
//! The judge prints its address and runs until it is killed. It reads no more of
//! a request than it must, for it shares the processors with what is measured.

use std::error::Error;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::PathBuf;
use std::time::Duration;

use oclaw::table::{Format, Provenance, Sink, Target};
use oclaw::trajectory::turn::{self, Micros};
use oclaw::trajectory::words::{
    LogProbKind, NextStateKind, SessionSource, Status, TokenSource, WeightVersionSource,
};
use oclaw::trajectory::{Sampling, Turn, Writer};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// How long the judge thinks.
const THINKING: Duration = Duration::from_millis(50);
const TURNS_PER_SESSION: u32 = 10;
const BATCH: usize = 1000;

fn main() -> Result<(), Box<dyn Error>> {
    // `cargo bench` adds a flag of its own.
    let words: Vec<_> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["forge", table, rows, sample, samples] => {
            forge(table.into(), rows.parse()?, (sample.into(), samples.parse()?))
        }
        ["judge"] => serve(),
        // What `cargo bench` without words comes to.
        [] => Ok(()),
        _ => Err("words: forge TABLE ROWS SAMPLE SAMPLE_ROWS | judge".into()),
    }
}

fn forge(table: PathBuf, rows: usize, sample: (PathBuf, usize)) -> Result<(), Box<dyn Error>> {
    let mut sampled = BufWriter::new(File::create(&sample.0)?);
    let mut sink: Option<Sink> = None;
    let mut held = Vec::new();
    let mut words = Words(1);
    let mut session = Session::default();
    for row in 0..rows {
        if row % TURNS_PER_SESSION as usize == 0 {
            session = Session::new(row, &mut words);
        }
        let turn = session.turn(&mut words);
        if row < sample.1 {
            let member = |text: &str| serde_json::from_str::<Value>(text);
            let line = json!({
                "messages": member(&turn.messages)?,
                "response": member(&turn.response)?,
                "next_state": member(turn.next_state.as_deref().unwrap_or("[]"))?,
            });
            writeln!(sampled, "{line}")?;
        }
        held.push(turn);
        if held.len() == BATCH || row + 1 == rows {
            let batch = turn::batch(&[Writer::Serve], &held)?;
            let sink = match &mut sink {
                Some(sink) => sink,
                none => none.insert(Sink::create(
                    &Target::Path(table.clone()),
                    Some(Format::Parquet),
                    batch.schema(),
                    &Provenance::default(),
                )?),
            };
            sink.write(&batch)?;
            held.clear();
        }
    }
    sampled.flush()?;
    if let Some(sink) = sink {
        sink.finish()?;
    }
    Ok(())
}

/// Made-up words and numbers, the same ones every time.
struct Words(u64);

impl Words {
    fn number(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % below
    }

    fn text(&mut self, words: u64) -> String {
        const LIST: [&str; 16] = [
            "the", "file", "returns", "a", "list", "of", "errors", "when", "it", "reads", "every",
            "line", "of", "the", "second", "table",
        ];
        (0..words).map(|_| LIST[self.number(16) as usize]).collect::<Vec<_>>().join(" ")
    }
}

/// One session as it grows.
#[derive(Default)]
struct Session {
    name: String,
    number: u32,
    messages: Vec<Value>,
    /// Tokens of the conversation so far.
    ids: Vec<i32>,
}

impl Session {
    fn new(row: usize, words: &mut Words) -> Self {
        let system = json!({"role": "system", "content": words.text(60)});
        let asked = json!({"role": "user", "content": words.text(40)});
        let ids = (0..130).map(|_| words.number(49_000) as i32).collect();
        Self { name: format!("session-{row}"), number: 0, messages: vec![system, asked], ids }
    }

    fn turn(&mut self, words: &mut Words) -> Turn {
        self.number += 1;
        let answer = json!({"role": "assistant", "content": words.text(80)});
        let is_tool = words.number(5) == 0;
        let next = match is_tool {
            true => json!({"role": "tool", "tool_call_id": "call", "content": words.text(60)}),
            false => json!({"role": "user", "content": words.text(40)}),
        };
        let response_ids: Vec<i32> = (0..100).map(|_| words.number(49_000) as i32).collect();
        let log_probs = (0..100).map(|_| Some(-(words.number(4000) as f32) / 1000.0)).collect();
        let id = |number: u32| format!("{}-turn-{number}", self.name);
        let at = 1_764_423_296_000_000 + i64::from(self.number) * 1_000_000;
        let turn = Turn {
            session_id: self.name.clone(),
            turn: self.number,
            turn_id: id(self.number),
            parent_turn_id: (self.number > 1).then(|| id(self.number - 1)),
            branch: "main".to_owned(),
            request_id: format!("{}-request-{}", self.name, self.number),
            session_source: SessionSource::Header,
            session_confidence: 1.0,
            created_at: Micros(at),
            finished_at: Micros(at + 500_000),
            model: "forged".to_owned(),
            weight_version: Some("0".to_owned()),
            weight_version_end: Some("0".to_owned()),
            weight_version_source: WeightVersionSource::Answer,
            sampling: Sampling {
                temperature: Some(0.7),
                log_prob_kind: LogProbKind::Raw,
                ..Sampling::default()
            },
            messages: Value::from(self.messages.clone()).to_string(),
            response: answer.to_string(),
            finish_reason: Some("stop".to_owned()),
            ends_with_stop_token: Some(true),
            status: Status::Complete,
            usage_completion_tokens: Some(100),
            prompt_ids: Some(self.ids.clone()),
            response_ids: Some(response_ids.clone()),
            rollout_log_probs: Some(log_probs),
            token_source: TokenSource::Engine,
            next_state: Some(json!([next]).to_string()),
            next_state_kind: if is_tool { NextStateKind::Tool } else { NextStateKind::User },
            ..Turn::default()
        };
        self.messages.extend([answer, next]);
        self.ids.extend(response_ids);
        self.ids.extend((0..60).map(|_| words.number(49_000) as i32));
        turn
    }
}

fn serve() -> Result<(), Box<dyn Error>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let mut out = std::io::stdout();
        writeln!(out, "http://{}", listener.local_addr()?)?;
        out.flush()?;
        let tasks = tokio::task::LocalSet::new();
        tasks
            .run_until(async {
                loop {
                    let (stream, _) = listener.accept().await?;
                    tokio::task::spawn_local(async move {
                        // A client that goes away in the middle is no matter.
                        let _ = answer(stream).await;
                    });
                }
            })
            .await
    })
}

/// Answers the calls of one connection.
async fn answer(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut held = Vec::with_capacity(1 << 15);
    loop {
        let (head, length) = loop {
            if let Some(found) = request(&held) {
                break found;
            }
            if stream.read_buf(&mut held).await? == 0 {
                return Ok(());
            }
        };
        let is_chat = held.starts_with(b"POST") && held[..head].windows(5).any(|w| w == b"/chat");
        let is_models = held.starts_with(b"GET /v1/models");
        while held.len() < head + length {
            if stream.read_buf(&mut held).await? == 0 {
                return Ok(());
            }
        }
        held.drain(..head + length);
        let (status, body) = match (is_chat, is_models) {
            (true, _) => {
                tokio::time::sleep(THINKING).await;
                ("200 OK", VERDICT)
            }
            (_, true) => {
                ("200 OK", r#"{"object":"list","data":[{"id":"judge","object":"model"}]}"#)
            }
            _ => ("404 Not Found", r#"{"error":{"message":"no such route"}}"#),
        };
        let answer = format!(
            "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(answer.as_bytes()).await?;
    }
}

const VERDICT: &str = r#"{"id":"1","object":"chat.completion","created":1,"model":"judge","choices":[{"index":0,"message":{"role":"assistant","content":"The next message goes on with the task; nothing is asked to be done over.\n\\boxed{1}"},"finish_reason":"stop"}],"usage":{"prompt_tokens":400,"completion_tokens":20,"total_tokens":420}}"#;

/// Returns the lengths of a whole head and of the body that it announces.
fn request(held: &[u8]) -> Option<(usize, usize)> {
    let head = held.windows(4).position(|window| window == b"\r\n\r\n")? + 4;
    let text = String::from_utf8_lossy(&held[..head]).to_ascii_lowercase();
    let length = text.split("content-length:").nth(1).and_then(|rest| rest.lines().next());
    Some((head, length.and_then(|length| length.trim().parse().ok()).unwrap_or_default()))
}

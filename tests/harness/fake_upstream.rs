//! An inference server that answers with scripted bytes: it sends, holds until
//! it is released, ends well or breaks off, and writes down what it saw.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// Longest wait for anything in here; a test that needs it has failed.
const PATIENCE: Duration = Duration::from_secs(30);

/// A request as it came in.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seen {
    pub(crate) method: String,
    /// Path and query.
    pub(crate) target: String,
    /// Names in lower case.
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    /// Whether the peer has closed the connection while its answer was held.
    pub(crate) closed: bool,
}

impl Seen {
    /// Returns the value of a header.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    /// Returns the body as text.
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// Returns whether this is a chat.
    pub(crate) fn is_chat(&self) -> bool {
        self.target.starts_with("/v1/chat/completions")
    }
}

/// One step of an answer.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    /// The status line and headers; the body follows in chunks.
    Head(u16, Vec<(&'static str, String)>),
    /// One chunk of the body.
    Send(Vec<u8>),
    /// Wait until the gate is opened.
    Hold(Gate),
    /// Wait until the peer closes.
    UntilClosed,
    /// End the body well.
    End,
    /// Close the connection here.
    Break,
}

/// Something to wait for.
#[derive(Debug, Clone, Default)]
pub(crate) struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    /// Lets everybody through.
    pub(crate) fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    fn wait(&self) {
        let open = self.0.0.lock().unwrap();
        drop(self.0.1.wait_timeout_while(open, PATIENCE, |open| !*open).unwrap());
    }
}

/// Makes the steps of a whole answer.
pub(crate) fn json(status: u16, body: &str) -> Vec<Step> {
    let head = Step::Head(status, vec![("content-type", "application/json".to_owned())]);
    vec![head, Step::Send(body.as_bytes().to_vec()), Step::End]
}

/// Makes the head of a stream.
pub(crate) fn stream_head() -> Step {
    Step::Head(200, vec![("content-type", "text/event-stream; charset=utf-8".to_owned())])
}

/// Makes one event.
pub(crate) fn event(document: &serde_json::Value) -> Step {
    Step::Send(format!("data: {document}\n\n").into_bytes())
}

/// Makes the event that ends a stream.
pub(crate) fn done() -> Step {
    Step::Send(b"data: [DONE]\n\n".to_vec())
}

/// Which probes the server answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Speaks {
    /// SGLang's.
    Sglang,
    /// None.
    Generic,
}

type Script = dyn Fn(&Seen) -> Vec<Step> + Send + Sync;

struct Inner {
    speaks: Speaks,
    script: Box<Script>,
    seen: Mutex<Vec<Seen>>,
    changed: Condvar,
    version: Mutex<String>,
    stopped: AtomicBool,
    port: u16,
}

/// A scripted server on a port of its own.
pub(crate) struct FakeUpstream(Arc<Inner>);

impl FakeUpstream {
    /// Starts a server that answers chats and other routes by a script.
    pub(crate) fn start(
        speaks: Speaks,
        script: impl Fn(&Seen) -> Vec<Step> + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let inner = Arc::new(Inner {
            speaks,
            script: Box::new(script),
            seen: Mutex::default(),
            changed: Condvar::new(),
            version: Mutex::new("7".to_owned()),
            stopped: AtomicBool::new(false),
            port: listener.local_addr().unwrap().port(),
        });
        let server = inner.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if server.stopped.load(Ordering::SeqCst) {
                    return;
                }
                let (server, stream) = (server.clone(), stream.unwrap());
                std::thread::spawn(move || server.serve(stream));
            }
        });
        Self(inner)
    }

    /// Returns the server's address.
    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.0.port)
    }

    /// Says which weights are at work from now on.
    pub(crate) fn set_version(&self, version: &str) {
        *self.0.version.lock().unwrap() = version.to_owned();
    }

    /// Returns the chats seen so far.
    pub(crate) fn chats(&self) -> Vec<Seen> {
        self.0.seen.lock().unwrap().iter().filter(|seen| seen.is_chat()).cloned().collect()
    }

    /// Returns every request seen so far.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.0.seen.lock().unwrap().clone()
    }

    /// Waits until what was seen is as wanted.
    pub(crate) fn wait(&self, wanted: impl Fn(&[Seen]) -> bool) {
        let seen = self.0.seen.lock().unwrap();
        let waiting = self.0.changed.wait_timeout_while(seen, PATIENCE, |seen| !wanted(seen));
        let (seen, waited) = waiting.unwrap();
        let shown: Vec<_> = seen.iter().map(|seen| (&seen.target, seen.closed)).collect();
        assert!(!waited.timed_out(), "the upstream never saw it, but {shown:?}");
    }

    /// Waits until so many chats were hung up on. Only chats count: a question
    /// about the weights that was on its way ends with the chat that asked it,
    /// and whether one was depends on the clock.
    pub(crate) fn wait_for_hang_ups(&self, wanted: usize) {
        self.wait(|seen| {
            seen.iter().filter(|seen| seen.is_chat() && seen.closed).count() == wanted
        });
    }

    /// Stops answering: connections are refused from now on.
    pub(crate) fn stop(&self) {
        self.0.stopped.store(true, Ordering::SeqCst);
        // Wakes the thread that waits for connections.
        drop(TcpStream::connect(("127.0.0.1", self.0.port)));
    }
}

impl Drop for FakeUpstream {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Inner {
    fn serve(&self, stream: TcpStream) {
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        while let Some(seen) = read_request(&mut reader) {
            if self.stopped.load(Ordering::SeqCst) {
                return;
            }
            let steps = self.answer(&seen);
            let number = {
                let mut log = self.seen.lock().unwrap();
                log.push(seen);
                log.len() - 1
            };
            self.changed.notify_all();
            if !self.play(&steps, &stream, &mut reader, number) {
                let _ = stream.shutdown(Shutdown::Both);
                return;
            }
        }
    }

    fn answer(&self, seen: &Seen) -> Vec<Step> {
        let version = self.version.lock().unwrap().clone();
        match (seen.target.as_str(), self.speaks) {
            ("/model_info" | "/get_model_info", Speaks::Sglang) => json(
                200,
                &format!(
                    r#"{{"model_path":"/nowhere","is_generation":true,"weight_version":"{version}"}}"#
                ),
            ),
            ("/ready" | "/health", Speaks::Sglang) => json(200, ""),
            ("/v1/models", _) => json(
                200,
                r#"{"object":"list","data":[{"id":"m1","object":"model","created":1,"owned_by":"x"}]}"#,
            ),
            (target, _) if target.starts_with("/v1/") => (self.script)(seen),
            _ => json(404, r#"{"error":{"message":"no such route"}}"#),
        }
    }

    /// Plays an answer. Returns whether the connection may be used again.
    fn play(
        &self,
        steps: &[Step],
        mut stream: &TcpStream,
        reader: &mut impl Read,
        number: usize,
    ) -> bool {
        for step in steps {
            let sent = match step {
                Step::Head(status, headers) => {
                    let mut head =
                        format!("HTTP/1.1 {status} Scripted\r\ntransfer-encoding: chunked\r\n");
                    for (name, value) in headers {
                        head.push_str(&format!("{name}: {value}\r\n"));
                    }
                    stream.write_all(format!("{head}\r\n").as_bytes())
                }
                Step::Send(bytes) if bytes.is_empty() => Ok(()),
                Step::Send(bytes) => {
                    let mut chunk = format!("{:x}\r\n", bytes.len()).into_bytes();
                    chunk.extend_from_slice(bytes);
                    chunk.extend_from_slice(b"\r\n");
                    stream.write_all(&chunk)
                }
                Step::Hold(gate) => {
                    gate.wait();
                    Ok(())
                }
                Step::UntilClosed => {
                    let mut rest = [0; 64];
                    while matches!(reader.read(&mut rest), Ok(count) if count > 0) {}
                    self.seen.lock().unwrap()[number].closed = true;
                    self.changed.notify_all();
                    return false;
                }
                Step::End => stream.write_all(b"0\r\n\r\n"),
                Step::Break => return false,
            };
            if sent.is_err() {
                self.seen.lock().unwrap()[number].closed = true;
                self.changed.notify_all();
                return false;
            }
        }
        true
    }
}

fn read_request(reader: &mut impl BufRead) -> Option<Seen> {
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|count| *count > 0)?;
    let mut words = line.split_whitespace();
    let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    let mut seen = Seen { method, target, headers, ..Seen::default() };
    let length = seen.header("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
    seen.body = vec![0; length];
    reader.read_exact(&mut seen.body).ok()?;
    Some(seen)
}

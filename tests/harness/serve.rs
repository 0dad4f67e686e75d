//! The real `oclaw serve`, and what its rows are.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use oclaw::table::read_turns;
use oclaw::trajectory::Turn;
use serde_json::{Value, json};

use super::PATIENCE;
use super::fake_upstream::{Seen, Step, json as whole};

/// A running `oclaw serve`.
pub(crate) struct Serve {
    child: Child,
    talk: BufReader<std::process::ChildStderr>,
    /// Where it listens, without a scheme.
    pub(crate) address: String,
}

impl Serve {
    /// Starts it; it has nothing to say but that it is ready.
    pub(crate) fn start(spool: &Path, arguments: &[&str]) -> Self {
        let (serve, said) = Self::start_saying(spool, arguments);
        assert_eq!(said, "", "{arguments:?}");
        serve
    }

    /// Starts it; returns what it said before it was ready, too.
    pub(crate) fn start_saying(spool: &Path, arguments: &[&str]) -> (Self, String) {
        Self::start_by(Command::new(env!("CARGO_BIN_EXE_oclaw")), spool, arguments)
    }

    /// Starts it by a command that runs the program it is given the words of.
    pub(crate) fn start_by(
        mut command: Command,
        spool: &Path,
        arguments: &[&str],
    ) -> (Self, String) {
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("OCLAW_") {
                command.env_remove(name);
            }
        }
        command.args(["serve", "--listen", "127.0.0.1:0", "--spool"]).arg(spool).args(arguments);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut talk = BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        let address = loop {
            let mut line = String::new();
            assert_ne!(talk.read_line(&mut line).unwrap(), 0, "{said}");
            if let Some(rest) = line.strip_prefix("ready: http://") {
                break rest.split('/').next().unwrap().to_owned();
            }
            said.push_str(&line);
        };
        (Self { child, talk, address }, said)
    }

    /// Sends it a signal.
    pub(crate) fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.child.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    }

    /// Waits for the end: exit code and last words.
    pub(crate) fn end(mut self) -> (Option<i32>, String) {
        let mut words = String::new();
        self.talk.read_to_string(&mut words).unwrap();
        let code = self.child.wait().unwrap().code();
        let mut data = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut data).unwrap();
        assert_eq!(data, "", "stdout is data only");
        (code, words)
    }

    /// Tells it to end, and waits for that: exit code and last words.
    pub(crate) fn stop(self) -> (Option<i32>, String) {
        self.signal("TERM");
        self.end()
    }

    /// Returns its process id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a chat; its answer is to be read.
    pub(crate) fn connect(&self, body: &Value, headers: &str) -> TcpStream {
        self.try_connect(body, headers).unwrap()
    }

    /// The same of one that may be gone.
    pub(crate) fn try_connect(&self, body: &Value, headers: &str) -> Option<TcpStream> {
        self.send("POST", "/v1/chat/completions", headers, &body.to_string())
    }

    /// Asks for a page and returns the whole answer.
    pub(crate) fn get(&self, path: &str) -> String {
        self.ask("GET", path, "", "")
    }

    /// Sends a request and returns the whole answer; as much of it as came if the
    /// connection broke.
    pub(crate) fn ask(&self, method: &str, path: &str, headers: &str, body: &str) -> String {
        let mut answer = Vec::new();
        let mut stream = self.send(method, path, headers, body).unwrap();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    fn send(&self, method: &str, path: &str, headers: &str, body: &str) -> Option<TcpStream> {
        let mut stream = TcpStream::connect(&self.address).ok()?;
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\nconnection: close\r\n{headers}\r\n{body}"
        );
        stream.write_all(request.as_bytes()).ok()?;
        Some(stream)
    }

    /// Chats and returns the whole answer; empty if the connection broke, or if there
    /// was none: a server may be gone at any moment.
    pub(crate) fn chat(&self, body: &Value, headers: &str) -> String {
        let mut answer = String::new();
        let Some(mut stream) = self.try_connect(body, headers) else {
            return answer;
        };
        match stream.read_to_string(&mut answer) {
            Ok(_) => answer,
            Err(_) => String::new(),
        }
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        let _ = self.child.kill();
    }
}

/// Reads the rows of a spool folder; none if it has no shard.
pub(crate) fn rows(spool: &Path) -> Vec<Turn> {
    let entries = std::fs::read_dir(spool).unwrap().map(|entry| entry.unwrap().path());
    let any = entries.into_iter().any(|path| path.extension().is_some_and(|end| end == "parquet"));
    if any { read_turns(&[spool.to_owned()]).unwrap() } else { Vec::new() }
}

/// Makes a chat of one message.
pub(crate) fn ask(text: &str) -> Value {
    json!({"model": "m1", "temperature": 0.5, "messages": [{"role": "user", "content": text}]})
}

/// An engine that answers with the last message, in SGLang's way.
pub(crate) fn echo(seen: &Seen) -> Vec<Step> {
    let asked: Value = serde_json::from_slice(&seen.body).unwrap();
    let last = asked["messages"].as_array().unwrap().last().unwrap()["content"].clone();
    let answer = json!({"metadata": {"weight_version": "7"}, "choices": [{"index": 0,
        "message": {"role": "assistant", "content": last}, "finish_reason": "stop", "matched_stop": 9,
        "prompt_token_ids": [1], "response_token_ids": [8, 9],
        "meta_info": {"output_token_logprobs": [[-0.5, 8, null], [-0.25, 9, null]]}}],
        "usage": {"completion_tokens": 2}});
    whole(200, &answer.to_string())
}

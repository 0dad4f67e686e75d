//! One chat completion as a stream.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use reqwest::{Method, Response};
use serde_json::{Value, json};

use crate::wire::sse;

use super::address::hide;
use super::error::told;
use super::transport::Call;
use super::{Engine, Error};

/// A piece of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delta {
    /// Text to be appended.
    Text(String),
    /// Text to be appended to what was thought.
    Thought(String),
    /// Why the answer ended; more may come.
    End(String),
}

/// An answer on its way. Dropping it hangs up.
#[derive(Debug)]
pub struct ChatStream {
    url: String,
    response: Response,
    decoder: Option<sse::Decoder>,
    ready: VecDeque<Delta>,
    /// Longest silence.
    timeout: Duration,
    finished: bool,
    over: bool,
}

impl Engine {
    /// Asks for one answer, which comes piece by piece. `body` is sent with the name of
    /// the model, once: what began is not begun again.
    pub async fn chat_stream(&self, mut body: Value) -> Result<ChatStream, Error> {
        if self.inner.base.load(Ordering::Relaxed) == usize::MAX {
            // Finds the base that works; one that lists no models may chat all the same.
            let _ = self.models().await;
        }
        body["stream"] = json!(true);
        if let Some(model) = self.model() {
            body["model"] = json!(model);
        }
        let timeout = self.inner.timeout;
        let url = self.api_url("/chat/completions");
        let body = Some(Bytes::from(body.to_string()));
        let call = Call { method: Method::POST, url, body, headers: Vec::new(), timeout };
        let response = self.inner.transport.open(&call).await?;
        Ok(ChatStream {
            url: hide(&call.url),
            response,
            decoder: Some(sse::Decoder::default()),
            ready: VecDeque::new(),
            timeout,
            finished: false,
            over: false,
        })
    }
}

impl ChatStream {
    /// Waits for the next piece; nothing once the answer is whole.
    pub async fn next(&mut self) -> Result<Option<Delta>, Error> {
        loop {
            if let Some(delta) = self.ready.pop_front() {
                return Ok(Some(delta));
            }
            if self.over {
                return match self.finished {
                    true => Ok(None),
                    false => Err(self.malformed("the stream ended before the answer did")),
                };
            }
            let (url, after) = (self.url.clone(), self.timeout);
            let piece = tokio::time::timeout(after, self.response.chunk()).await;
            let piece = piece.map_err(|_| Error::Timeout { url, after })?;
            let piece = piece.map_err(|error| Error::Unreachable {
                url: self.url.clone(),
                reason: error.without_url().to_string(),
            })?;
            let events: Vec<_> = match (piece, &mut self.decoder) {
                (Some(piece), Some(decoder)) => decoder.push(&piece).collect(),
                _ => {
                    self.over = true;
                    self.decoder.take().and_then(sse::Decoder::finish).into_iter().collect()
                }
            };
            for data in events.into_iter().filter_map(|event| event.data) {
                self.take(&data)?;
            }
        }
    }

    fn take(&mut self, data: &[u8]) -> Result<(), Error> {
        if data == b"[DONE]" {
            (self.over, self.finished) = (true, true);
            return Ok(());
        }
        let chunk: Value = serde_json::from_slice(data)
            .map_err(|error| self.malformed(&format!("an event is no JSON: {error}")))?;
        if chunk.get("error").is_some_and(|error| !error.is_null()) {
            let message = told(data).message;
            return Err(Error::Refused { url: self.url.clone(), message, tokens: None });
        }
        let choices = chunk.get("choices").and_then(Value::as_array);
        let first = |choice: &&Value| choice["index"].as_u64().unwrap_or_default() == 0;
        for choice in choices.into_iter().flatten().filter(first) {
            let delta = &choice["delta"];
            let text = |name: &str| {
                delta[name].as_str().filter(|text| !text.is_empty()).map(str::to_owned)
            };
            let thought = text("reasoning_content").or_else(|| text("reasoning"));
            self.ready.extend(thought.map(Delta::Thought));
            self.ready.extend(text("content").map(Delta::Text));
            if let Some(reason) = choice["finish_reason"].as_str() {
                self.finished = true;
                self.ready.push_back(Delta::End(reason.to_owned()));
            }
        }
        Ok(())
    }

    fn malformed(&self, reason: &str) -> Error {
        Error::Malformed { url: self.url.clone(), reason: reason.to_owned(), tokens: None }
    }
}

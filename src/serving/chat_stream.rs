//! The streamed form of a chat: one event per piece, as SGLang orders them.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;

use axum::body::Body;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde_json::{Value, json};

use super::answer::log_prob_entries;
use super::chat::call;
use super::extras::{Wanted, usage};
use super::failure::Failure;
use super::generation::Generation;
use super::routes::Served;
use super::text::Part;

/// Answers with events. Dropping the body, as a client does that goes away,
/// drops the generation with it.
pub(super) fn respond(generation: Generation, wanted: Wanted, served: Arc<Served>) -> Response {
    let mut stream = ChatStream {
        // Log-probs that wait for an event of their answer.
        told: vec![0; generation.answers.len()],
        calls: vec![0; generation.answers.len()],
        created: served.now(),
        ready: VecDeque::new(),
        ended: false,
        generation,
        wanted,
        served,
    };
    stream.open();
    events(futures_util::stream::unfold(stream, |mut stream| async move {
        let event = stream.next().await?;
        Some((Ok::<_, Infallible>(event), stream))
    }))
}

/// Returns an event stream.
pub(super) fn events(
    stream: impl futures_util::Stream<Item = Result<Bytes, Infallible>> + Send + 'static,
) -> Response {
    let headers = [(CONTENT_TYPE, "text/event-stream"), (CACHE_CONTROL, "no-cache")];
    (headers, Body::from_stream(stream)).into_response()
}

/// Returns one event.
pub(super) fn event(value: &Value) -> Bytes {
    Bytes::from(format!("data: {value}\n\n"))
}

/// Returns the event that ends a stream.
pub(super) fn done() -> Bytes {
    Bytes::from_static(b"data: [DONE]\n\n")
}

/// Where in the stream of its answer an event stands.
#[derive(Clone, Copy, PartialEq)]
enum Place {
    First,
    Middle,
    Last,
}

struct ChatStream {
    generation: Generation,
    wanted: Wanted,
    served: Arc<Served>,
    created: u64,
    /// Per answer: the number of tokens whose log-probs have been told.
    told: Vec<usize>,
    /// Per answer: the number of tool calls so far.
    calls: Vec<usize>,
    ready: VecDeque<Bytes>,
    ended: bool,
}

impl ChatStream {
    fn open(&mut self) {
        for index in 0..self.generation.answers.len() {
            let delta = json!({"role": "assistant", "content": "", "reasoning_content": null});
            self.chunk(index, delta, Place::First);
        }
    }

    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            if self.ended {
                return None;
            }
            match self.generation.next().await {
                Ok(Some((index, parts))) => self.take(index, parts),
                Ok(None) => self.close(),
                Err(failure) => self.fail(&failure),
            }
        }
    }

    fn take(&mut self, index: usize, parts: Vec<Part>) {
        for part in parts {
            let delta = match part {
                Part::Text(text) => json!({"content": text, "reasoning_content": null}),
                Part::Thought(text) => json!({"content": null, "reasoning_content": text}),
                Part::Call { name, arguments } => {
                    let call = call(self.calls[index], &name, &arguments);
                    self.calls[index] += 1;
                    json!({"content": null, "reasoning_content": null, "tool_calls": [call]})
                }
            };
            self.chunk(index, delta, Place::Middle);
        }
        if self.generation.answers[index].finish.is_some() {
            self.chunk(index, json!({"reasoning_content": null}), Place::Last);
        }
    }

    /// Makes an event of one answer. Log-probs go out with the first event after
    /// their token; those of tokens without text wait for the next one.
    fn chunk(&mut self, index: usize, delta: Value, place: Place) {
        let answer = &self.generation.answers[index];
        let untold = &answer.tokens[self.told[index]..];
        let log_probs = if self.wanted.log_probs && place != Place::First && !untold.is_empty() {
            let entries = log_prob_entries(untold, &self.served.chat.tokenizer);
            self.told[index] = answer.tokens.len();
            json!({"content": entries})
        } else {
            Value::Null
        };
        let (finish_reason, matched) = match place {
            Place::Last => (answer.finish_reason(), answer.matched()),
            Place::First | Place::Middle => (None, Value::Null),
        };
        let choice = json!({
            "index": index,
            "delta": delta,
            "logprobs": log_probs,
            "finish_reason": finish_reason,
            "matched_stop": matched,
        });
        let chunk = self.envelope(json!([choice]));
        self.ready.push_back(event(&chunk));
    }

    fn envelope(&self, choices: Value) -> Value {
        json!({
            "id": &*self.generation.rid,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.wanted.model,
            "choices": choices,
            "usage": null,
        })
    }

    fn close(&mut self) {
        let generations = std::slice::from_ref(&self.generation);
        if let Some(ext) = self.wanted.ext(generations) {
            let mut chunk = self.envelope(json!([]));
            chunk["sglext"] = ext;
            self.ready.push_back(event(&chunk));
        }
        if self.wanted.usage {
            let mut chunk = self.envelope(json!([]));
            chunk["usage"] = usage(std::slice::from_ref(&self.generation));
            self.ready.push_back(event(&chunk));
        }
        self.end();
    }

    fn fail(&mut self, failure: &Failure) {
        self.ready.push_back(event(&json!({"error": failure.body()})));
        self.end();
    }

    fn end(&mut self) {
        self.ready.push_back(done());
        self.ended = true;
    }
}

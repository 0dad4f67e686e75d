//! A main-line request between its arrival and its record.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::http::HeaderMap;
use serde_json::Value;
use uuid::Uuid;

use crate::session::{Arrival, History, Incoming, Key, Source};
use crate::wire::openai::{ChatRequest, Settings, is_truthy};

use super::recorder::{Recorder, now};
use super::upstream::Upstream;

/// A main-line request between its arrival and its record. Dropped before its
/// record (the client went away), it is counted and its session goes on.
#[derive(Debug)]
pub(super) struct Exchange {
    pub(super) arrival: Arrival,
    pub(super) asked: Asked,
    pub(super) finished: bool,
    /// Who answers.
    pub(super) engine: Option<Arc<Upstream>>,
    /// What became of the words about the answer before.
    pub(super) rated: Option<&'static str>,
    turn_ids: BTreeMap<u8, String>,
    recorder: Arc<Recorder>,
}

/// What the request was.
#[derive(Debug, Clone, Default)]
pub(super) struct Asked {
    pub(super) model: String,
    pub(super) messages: String,
    pub(super) tools: Option<String>,
    pub(super) settings: Settings,
    pub(super) client: Option<String>,
    pub(super) address: Option<String>,
    pub(super) system: Key,
    pub(super) created_at: i64,
}

/// Who sent a request.
#[derive(Debug, Clone)]
pub(super) struct Caller {
    /// Name of the key.
    pub(super) client: Option<String>,
    /// The address, without the port.
    pub(super) address: Option<String>,
}

/// What a request says about its session.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Marks {
    pub(super) session: Option<(String, Source)>,
    pub(super) side: bool,
    pub(super) done: bool,
    pub(super) resent: bool,
}

impl Marks {
    /// Reads the headers, and the body's fields where there is no header.
    pub(super) fn read(headers: &HeaderMap, request: &ChatRequest) -> Self {
        let header = |name: &str| {
            let value = String::from_utf8_lossy(headers.get(name)?.as_bytes()).trim().to_owned();
            (!value.is_empty()).then_some(value)
        };
        let fields = &request.session;
        let affinity = || header("x-session-affinity").or_else(|| header("session_id"));
        // Applications set a cache key per person or program; only one with a
        // generation number is a session's.
        let cache_key = || fields.cache_key.as_deref().and_then(generation);
        let session = header("x-session-id")
            .map(|id| (id, Source::Header))
            .or_else(|| fields.id.clone().map(|id| (id, Source::Body)))
            .or_else(|| {
                let id = affinity()?;
                Some((generation(&id).unwrap_or(&id).to_owned(), Source::Affinity))
            })
            .or_else(|| cache_key().map(|id| (id.to_owned(), Source::Body)));
        let kind = header("x-turn-type").or_else(|| fields.turn_type.clone());
        let done = header("x-session-done").map_or(fields.done, |word| is_truthy(&word));
        let resent = header("x-stainless-retry-count").is_some_and(|times| times != "0");
        Self {
            session,
            side: kind.is_some_and(|kind| kind.trim().eq_ignore_ascii_case("side")),
            done,
            resent,
        }
    }
}

/// Returns the session of `SESSION:GENERATION`.
fn generation(id: &str) -> Option<&str> {
    let (session, number) = id.rsplit_once(':')?;
    let numbered = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    (numbered && !session.is_empty()).then_some(session)
}

impl Exchange {
    /// Places a request.
    pub(super) fn begin(
        recorder: &Arc<Recorder>,
        mut request: ChatRequest,
        history: &History,
        marks: Marks,
        caller: Caller,
    ) -> Self {
        let created_at = now();
        let id = Uuid::now_v7().to_string();
        let rating = std::mem::take(&mut request.rating);
        let incoming = Incoming {
            id: id.clone(),
            messages: &request.messages,
            history,
            session: marks.session,
            client: caller.client.clone(),
            address: caller.address.clone(),
            done: marks.done,
            resent: marks.resent,
            at: created_at,
        };
        let (arrival, rated) = recorder.arrive(&incoming, rating);
        let asked = Asked {
            model: request.model,
            messages: request.messages_text,
            tools: request.tools_text,
            settings: request.settings,
            client: caller.client,
            address: caller.address,
            system: history.system,
            created_at,
        };
        let turn_ids = BTreeMap::from([(0, id)]);
        Self {
            arrival,
            asked,
            finished: false,
            engine: None,
            rated,
            turn_ids,
            recorder: recorder.clone(),
        }
    }

    /// Returns the id of a choice's turn.
    pub(super) fn turn_id(&mut self, choice: u8) -> String {
        self.turn_ids.entry(choice).or_insert_with(|| Uuid::now_v7().to_string()).clone()
    }

    /// Makes answers known that the client may go on with.
    pub(super) fn answered(&mut self, messages: &[(u8, Value)]) {
        let recorder = self.recorder.clone();
        for (choice, message) in messages {
            recorder.answered(self, *choice, message);
        }
    }

    /// Ends the request unrecorded.
    pub(super) fn skip(mut self, reason: &'static str) {
        self.finished = true;
        self.recorder.abandon(&self.arrival.id, reason);
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        if !std::mem::replace(&mut self.finished, true) {
            self.recorder.abandon(&self.arrival.id, "client_gone");
        }
    }
}

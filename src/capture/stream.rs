//! An answer that came as a stream of events.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use crate::wire::json::parse;
use crate::wire::sse::Event;

use super::answer::versions;
use super::cut;
use super::grow::{append, merge};
use super::reason;
use super::request::Prepared;
use super::settle::{Captured, Evidence, Outcome, Whole, completion_tokens, ids, index, settle};

/// What the client gets of an event.
#[derive(Debug, PartialEq)]
pub enum Relay {
    /// The event as it came.
    Pass,
    /// These bytes instead.
    Edited(Vec<u8>),
    /// Nothing: it held only what the client did not ask for.
    Drop,
}

/// How a stream ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The engine closed it.
    Closed,
    /// The connection to the engine broke, or went silent.
    Broken,
    /// The client went away, or the proxy is being stopped.
    Abandoned,
}

/// Reads a stream while it passes.
#[derive(Debug)]
pub struct StreamCapture {
    prepared: Prepared,
    /// Boxed, for a map makes room for eleven of what it holds, and a stream has one.
    choices: BTreeMap<u8, Box<Choice>>,
    /// What stood where a choice's index should, and is none.
    odd_indices: BTreeSet<String>,
    prompt_ids: Option<Vec<i32>>,
    odd_prompt: bool,
    completion_tokens: Option<u32>,
    versions: (Option<String>, Option<String>),
    failed: bool,
    damaged: Option<&'static str>,
    done: bool,
    /// Whether chunks are only cut, and no longer read.
    closed: bool,
}

#[derive(Debug, Clone, Default)]
struct Choice {
    evidence: Evidence,
    message: Map<String, Value>,
    calls: Vec<Value>,
    /// Ids told chunk by chunk; a chunk without any spoils them.
    told_ids: Vec<i32>,
}

impl StreamCapture {
    /// Begins to read the answer of a request.
    pub fn new(prepared: Prepared) -> Self {
        Self {
            prepared,
            choices: BTreeMap::new(),
            odd_indices: BTreeSet::new(),
            prompt_ids: None,
            odd_prompt: false,
            completion_tokens: None,
            versions: (None, None),
            failed: false,
            damaged: None,
            done: false,
            closed: false,
        }
    }

    /// Returns a reader of the same answer that has read nothing yet.
    pub fn unread(&self) -> Self {
        Self::new(self.prepared.clone())
    }

    /// Forgets what was read, and reads no more. Events are still cut.
    pub fn stop_reading(&mut self) {
        if !self.closed {
            *self = Self { closed: true, done: self.done, ..self.unread() };
        }
    }

    /// Reads one event and says what the client gets of it.
    pub fn event(&mut self, event: &Event) -> Relay {
        if event.oversized {
            self.damaged = Some(reason::UNREADABLE_ANSWER);
        }
        let Some(data) = event.data.as_deref() else { return Relay::Pass };
        if data.trim_ascii() == b"[DONE]" {
            self.done = true;
            return Relay::Pass;
        }
        if let Some(document) = parse(data) {
            return self.document(event, data, document.repaired(), &document.value);
        }
        self.lines(event, data)
    }

    /// Returns whether the engine has said that the answer is over.
    pub fn is_done(&self) -> bool {
        self.done
    }

    /// Returns whether every choice seen so far has its finish reason.
    pub fn is_finished(&self) -> bool {
        self.choices.len() >= self.prepared.choices as usize
            && self.choices.values().all(|choice| choice.evidence.finish_reason.is_some())
    }

    /// Returns how many choices are not recorded: their index is none.
    pub fn odd_choices(&self) -> usize {
        self.odd_indices.len()
    }

    /// Returns the messages as far as they have come, by choice.
    pub fn messages(&self) -> Vec<(u8, Value)> {
        let message = |choice: &Choice| (choice.evidence.index, choice.message());
        self.choices.values().map(|choice| message(choice)).collect()
    }

    /// Decides what is recorded of the stream as it has come, given how it
    /// ended: nothing if no choice has an index. What comes afterwards is still
    /// passed on.
    pub fn finish(&self, ending: Ending) -> Vec<Captured> {
        let broken = match ending {
            _ if self.failed => (Outcome::Failed, reason::UPSTREAM_ERROR),
            Ending::Abandoned => (Outcome::Aborted, reason::ABORTED),
            Ending::Closed | Ending::Broken => (Outcome::Failed, reason::INCOMPLETE_STREAM),
        };
        let mut choices = self.choices.clone();
        // An error may come before the first word; that is a turn, too.
        if choices.is_empty() && self.odd_indices.is_empty() {
            choices.insert(0, Box::default());
        }
        let whole = Whole {
            completion_tokens: self.completion_tokens,
            left_out: !self.odd_indices.is_empty(),
            broken: Some(broken),
        };
        let found = choices.into_values().map(|choice| {
            let choice = *choice;
            let mut evidence = Evidence { response: choice.message(), ..choice.evidence };
            evidence.prompt_ids = evidence.prompt_ids.take().or_else(|| self.prompt_ids.clone());
            evidence.odd_prompt |= self.odd_prompt;
            if !choice.told_ids.is_empty() {
                evidence.response_ids = evidence.response_ids.or(Some(choice.told_ids));
            }
            evidence.damaged = evidence.damaged.or(self.damaged);
            (evidence.weight_version, evidence.weight_version_end) = self.versions.clone();
            evidence
        });
        settle(&self.prepared, found.collect(), whole)
    }

    fn document(&mut self, event: &Event, data: &[u8], repaired: bool, chunk: &Value) -> Relay {
        if repaired {
            self.damaged = Some(reason::NOT_QUITE_JSON);
        }
        self.read(chunk);
        let cuts = cut::find(data, &self.prepared);
        if cuts.substantial && cut::holds_nothing_else(chunk, &self.prepared) {
            return Relay::Drop;
        }
        match cuts.edits.is_empty() {
            true => Relay::Pass,
            false => Relay::Edited(event.edited(&cuts.edits)),
        }
    }

    /// Reads events that were glued together by a server that forgot the blank
    /// line between them.
    fn lines(&mut self, event: &Event, data: &[u8]) -> Relay {
        let mut cuts = Vec::new();
        let mut at = 0;
        for line in data.split(|byte| *byte == b'\n') {
            if line.trim_ascii() == b"[DONE]" {
                self.done = true;
            } else if let Some(document) = parse(line) {
                self.read(&document.value);
                let found = cut::find(line, &self.prepared).edits.into_iter();
                cuts.extend(found.map(|(range, text)| (range.start + at..range.end + at, text)));
            } else if !line.trim_ascii().is_empty() {
                self.damaged = Some(reason::UNREADABLE_ANSWER);
            }
            at += line.len() + 1;
        }
        if cuts.is_empty() { Relay::Pass } else { Relay::Edited(event.edited(&cuts)) }
    }

    fn read(&mut self, chunk: &Value) {
        if self.closed {
            return;
        }
        if chunk.get("error").is_some_and(|error| !error.is_null()) {
            self.failed = true;
        }
        if let Some(counted) = completion_tokens(chunk.get("usage")) {
            self.completion_tokens = Some(counted);
        }
        self.read_prompt(chunk.get("prompt_token_ids"));
        let (start, end) = versions(chunk.get("metadata"));
        self.versions.0 = self.versions.0.take().or(start);
        self.versions.1 = end.or(self.versions.1.take());
        let mut seen = BTreeSet::new();
        for (place, choice) in array(chunk.get("choices")).iter().enumerate() {
            let Some(index) = index(choice, place) else {
                let odd = choice.get("index").map_or_else(|| place.to_string(), Value::to_string);
                self.odd_indices.insert(odd);
                continue;
            };
            let known = self.choices.entry(index).or_default();
            known.evidence.index = index;
            known.read(choice, &self.prepared);
            // Two choices would grow into one.
            if !seen.insert(index) {
                known.evidence.damaged = Some(reason::ODD_CHOICE_INDEX);
            }
        }
        if let Some(extension) = chunk.get("sglext").filter(|extension| extension.is_object()) {
            self.read_extension(extension);
        }
    }

    /// Reads SGLang's late chunk of ids.
    fn read_extension(&mut self, extension: &Value) {
        // Newer servers give one list of lists, one per choice, here too.
        let input = extension.get("input_ids");
        self.read_prompt(
            input.and_then(|lists| lists.get(0)).filter(|list| list.is_array()).or(input),
        );
        let output = extension.get("output_ids");
        match output {
            Some(Value::Array(lists)) if lists.iter().any(Value::is_array) => {
                lists.iter().enumerate().for_each(|(place, list)| self.read_output(place, list));
            }
            Some(Value::Array(none)) if none.is_empty() => {}
            Some(only) => self.read_output(0, only),
            None => {}
        }
    }

    fn read_prompt(&mut self, told: Option<&Value>) {
        match ids(told) {
            Ok(None) => {}
            Ok(prompt) => self.prompt_ids = prompt,
            Err(_) => self.odd_prompt = true,
        }
    }

    /// Reads the ids of the choice with that index.
    fn read_output(&mut self, place: usize, list: &Value) {
        if list.is_null() {
            return;
        }
        let asked = place < self.prepared.choices as usize;
        let index = u8::try_from(place).ok();
        match index.filter(|index| asked || self.choices.contains_key(index)) {
            Some(index) => self.choice(index).evidence.read_ids(list),
            // Ids of a choice that there is not.
            None if list.as_array().is_some_and(Vec::is_empty) => {}
            None => {
                self.odd_indices.insert(place.to_string());
            }
        }
    }

    fn choice(&mut self, index: u8) -> &mut Choice {
        let known = self.choices.entry(index).or_default();
        known.evidence.index = index;
        known
    }
}

impl Evidence {
    fn read_ids(&mut self, list: &Value) {
        match ids(Some(list)) {
            Ok(None) => {}
            Ok(told) => self.response_ids = told,
            Err(_) => self.odd_ids = true,
        }
    }
}

impl Choice {
    fn read(&mut self, choice: &Value, prepared: &Prepared) {
        self.evidence.read_choice(choice, prepared.dialect);
        match ids(choice.get("token_ids")) {
            Ok(told) => self.told_ids.extend(told.into_iter().flatten()),
            Err(_) => self.evidence.odd_ids = true,
        }
        let Some(delta) = choice.get("delta").and_then(Value::as_object) else { return };
        for (name, value) in delta {
            match (name.as_str(), value) {
                (_, Value::Null) => {}
                ("tool_calls", Value::Array(calls)) => {
                    calls.iter().for_each(|call| self.call(call))
                }
                ("role", value) => {
                    self.message.insert(name.clone(), value.clone());
                }
                ("function_call", value) => {
                    let known = self.message.entry(name.clone()).or_insert_with(|| json!({}));
                    merge(known, value);
                }
                (_, value) => match self.message.get_mut(name) {
                    Some(known) => append(known, value),
                    None => {
                        self.message.insert(name.clone(), value.clone());
                    }
                },
            }
        }
    }

    /// Joins a fragment of a tool call: by its index, else by its id, else it
    /// goes on with the latest call.
    fn call(&mut self, fragment: &Value) {
        let index = fragment.get("index").and_then(Value::as_u64);
        let id = fragment.get("id").and_then(Value::as_str).filter(|id| !id.is_empty());
        let same_index = |call: &Value| call.get("index").and_then(Value::as_u64) == index;
        let same_id = |call: &Value| call.get("id").and_then(Value::as_str) == id;
        let known = match (index, id) {
            (Some(_), _) => self.calls.iter().position(same_index),
            (None, Some(_)) => self.calls.iter().position(same_id),
            (None, None) => self.calls.len().checked_sub(1),
        };
        match known.and_then(|known| self.calls.get_mut(known)) {
            Some(known) => merge(known, fragment),
            None => self.calls.push(fragment.clone()),
        }
    }

    fn message(&self) -> Value {
        let mut message = Map::new();
        message.insert("role".to_owned(), json!("assistant"));
        message.insert("content".to_owned(), Value::Null);
        message.extend(self.message.iter().map(|(name, value)| (name.clone(), value.clone())));
        if !self.calls.is_empty() {
            let mut calls = self.calls.clone();
            calls.sort_by_key(|call| call.get("index").and_then(Value::as_u64));
            for call in calls.iter_mut().filter_map(Value::as_object_mut) {
                // The index belongs to the stream, not to the message.
                call.shift_remove("index");
            }
            message.insert("tool_calls".to_owned(), Value::from(calls));
        }
        Value::Object(message)
    }
}

fn array(value: Option<&Value>) -> &[Value] {
    match value {
        Some(Value::Array(items)) => items,
        _ => &[],
    }
}

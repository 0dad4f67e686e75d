//! What a judge is shown of a turn.

use std::collections::HashMap;

use serde_json::{Value, json};

use crate::template::{is_envelope, last_request, person_text};
use crate::trajectory::Turn;
use crate::trajectory::words::NextStateKind;

use super::quote::LEAST;
use super::{Error, Quoting, quote};

/// A request, its answer, and what came after.
#[derive(Debug, Clone, PartialEq)]
pub struct Exchange {
    /// What the person had asked.
    pub request: String,
    /// The answer's text.
    pub answer: String,
    /// The answer's tool calls, as `name(arguments)`.
    pub calls: Vec<String>,
    /// Why the answer ended.
    pub finish_reason: Option<String>,
    /// Whether a person or tools came next.
    pub kind: NextStateKind,
    /// The messages that came next.
    pub next: Vec<Shown>,
    /// How much of it all is shown.
    pub quoting: Quoting,
}

/// One message of the next state.
#[derive(Debug, Clone, PartialEq)]
pub struct Shown {
    /// Who speaks.
    pub role: String,
    /// Name of the tool, if it is known.
    pub tool: Option<String>,
    /// The words.
    pub text: String,
    /// The message itself.
    pub message: Value,
}

impl Exchange {
    /// Reads a turn that has a next state.
    pub fn of(turn: &Turn, quoting: Quoting) -> Result<Self, Error> {
        let exchange = Self::so_far(turn, quoting)?;
        match exchange.next.is_empty() {
            true => Err(unusable(turn, "next_state", "no message in it")),
            false => Ok(exchange),
        }
    }

    /// Reads a turn whether or not anything came next.
    pub fn so_far(turn: &Turn, quoting: Quoting) -> Result<Self, Error> {
        let messages = list(turn, "messages", &turn.messages)?;
        let response: Value = parse(turn, "response", &turn.response)?;
        let next_state = turn.next_state.as_deref().unwrap_or("[]");
        let calls = response["tool_calls"].as_array().cloned().unwrap_or_default();
        let made = Made::of(&calls);
        let next: Vec<_> = list(turn, "next_state", next_state)?
            .into_iter()
            .filter(|message| !is_envelope(message))
            .map(|message| Shown::of(message, &made))
            .collect();
        Ok(Self {
            request: last_request(&messages).map_or_else(String::new, |at| words(&messages[at])),
            answer: words(&response),
            calls: calls.iter().map(call).collect(),
            finish_reason: turn.finish_reason.clone(),
            kind: turn.next_state_kind,
            next,
            quoting,
        })
    }

    /// Writes the sections of the judge's question. Of more messages than the limit
    /// has room for, the first two thirds and the last third are shown, and how many
    /// are left out between.
    pub fn sections(&self) -> String {
        let Quoting { request, answer, next_state } = self.quoting;
        let mut text = section("REQUEST", &self.request, request);
        text.push_str(&section("ANSWER", &self.answer, answer));
        if !self.calls.is_empty() {
            let calls = self.calls.join("\n");
            text.push_str(&section("TOOL CALLS OF THE ANSWER", &calls, answer));
        }
        let total = self.next.len();
        // The last one is shown as well, however little room there is.
        let shown = total.min((next_state / LEAST).max(2));
        let share = (next_state / shown.max(1)).max(LEAST);
        let left_out = total - shown;
        let head = if left_out > 0 { shown * 2 / 3 } else { total };
        for (index, message) in self.next.iter().enumerate() {
            if index < head || index >= head + left_out {
                let place =
                    if total > 1 { format!(" {} of {total}", index + 1) } else { String::new() };
                text.push_str(&section(&message.heading(&place), &message.text, share));
            } else if index == head {
                text.push_str(&format!("({left_out} messages left out)\n\n"));
            }
        }
        text
    }
}

fn section(heading: &str, body: &str, limit: usize) -> String {
    format!("=== {heading} ===\n{}\n", quote(body, limit))
}

impl Shown {
    fn of(message: Value, made: &Made<'_>) -> Self {
        let text_of = |key: &str| message.get(key).and_then(Value::as_str).map(str::to_owned);
        Self {
            role: text_of("role").unwrap_or_default(),
            tool: text_of("name").or_else(|| made.name(message["tool_call_id"].as_str())),
            text: words(&message),
            message,
        }
    }

    fn heading(&self, place: &str) -> String {
        match (self.role.as_str(), &self.tool) {
            ("tool", Some(tool)) => format!("TOOL RESULT{place} ({})", one_line(tool)),
            ("tool" | "function", _) => format!("TOOL RESULT{place}"),
            _ => format!("NEXT MESSAGE OF THE USER{place}"),
        }
    }
}

/// The calls of an answer, by their ids.
struct Made<'a> {
    by_id: HashMap<Option<String>, &'a Value>,
    lone: Option<&'a Value>,
}

impl<'a> Made<'a> {
    fn of(calls: &'a [Value]) -> Self {
        let mut by_id = HashMap::new();
        for call in calls {
            by_id.entry(call["id"].as_str().map(letters)).or_insert(call);
        }
        Self { by_id, lone: calls.first().filter(|_| calls.len() == 1) }
    }

    /// Returns the name of the tool that was called. Clients rewrite the ids of calls;
    /// a lone call needs none.
    fn name(&self, id: Option<&str>) -> Option<String> {
        let call = self.by_id.get(&id.map(letters)).copied().or(self.lone)?;
        call["function"]["name"].as_str().map(str::to_owned)
    }
}

fn letters(id: &str) -> String {
    id.chars().filter(|character| character.is_ascii_alphanumeric()).collect()
}

/// Keeps a name that a client chose from looking like a heading.
fn one_line(name: &str) -> String {
    name.chars().filter(|c| c.is_alphanumeric() || "._-:".contains(*c)).take(60).collect()
}

fn call(call: &Value) -> String {
    let function = call.get("function").unwrap_or(call);
    let name = function["name"].as_str().unwrap_or("?");
    match &function["arguments"] {
        Value::String(text) => format!("{name}({text})"),
        Value::Null => format!("{name}()"),
        other => format!("{name}({other})"),
    }
}

/// The words of a message, without client stamps. A part that is no text is
/// named in its place.
fn words(message: &Value) -> String {
    let content = match message.get("content") {
        Some(Value::Array(parts)) => {
            let part = |part: &Value| match part["text"].as_str() {
                Some(text) => text.to_owned(),
                None => format!("({}, not shown)", part["type"].as_str().unwrap_or("no text")),
            };
            Value::String(parts.iter().map(part).collect::<Vec<_>>().join(" "))
        }
        Some(content) => content.clone(),
        None => Value::Null,
    };
    person_text(&json!({"content": content})).unwrap_or_default()
}

fn list(turn: &Turn, column: &'static str, text: &str) -> Result<Vec<Value>, Error> {
    match parse(turn, column, text)? {
        Value::Array(items) => Ok(items),
        _ => Err(unusable(turn, column, "no list")),
    }
}

fn parse(turn: &Turn, column: &'static str, text: &str) -> Result<Value, Error> {
    serde_json::from_str(text).map_err(|error| unusable(turn, column, &error.to_string()))
}

fn unusable(turn: &Turn, column: &'static str, message: &str) -> Error {
    Error::Turn { turn: turn.turn_id.clone(), column, message: message.to_owned() }
}

//! What makes two message lists the same conversation.
//!
//! A message counts by its role, its flattened trimmed text and its tool calls
//! (name, arguments as JSON, id without what is not alphanumeric, because
//! clients rewrite ids). Reasoning does not count: clients drop or keep it as
//! they like. A client's envelopes are not part of the conversation, and neither
//! are the leading system messages, which clients rewrite between turns.

use std::borrow::Cow;
use std::fmt;

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::wire::json::canonical;

const ENVELOPE_BEGIN: &str = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>";
const ENVELOPE_END: &str = "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>";

/// Identity of a list of messages.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Key([u8; 16]);

impl Key {
    /// Returns the identity of this list with one more message.
    fn then(self, said: &Said<'_>) -> Self {
        let mut digest = Sha256::new().chain_update(self.0);
        // Each part after its length, so that no other message has these bytes.
        let parts = [said.role, &said.text].into_iter();
        for part in parts.chain(said.calls.iter().map(String::as_str)) {
            digest.update((part.len() as u64).to_le_bytes());
            digest.update(part);
        }
        let digest = digest.finalize();
        let mut key = [0; 16];
        key.copy_from_slice(&digest[..16]);
        Self(key)
    }

    /// Returns the identity of this list with an assistant's answer at its end.
    /// `None` if the answer is empty and so leaves no trace.
    pub fn answered(self, response: &Value) -> Option<Self> {
        let said = Said::read(response)?;
        (!said.is_empty()).then(|| self.then(&said))
    }

    /// Reads what `Display` wrote.
    pub fn parse(text: &str) -> Option<Self> {
        u128::from_str_radix(text, 16).ok().map(|number| Self(number.to_be_bytes()))
    }
}

impl fmt::Display for Key {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

/// A request's messages, as a chain of identities.
#[derive(Debug, Clone, PartialEq)]
pub struct History {
    /// Identity of the leading system messages.
    pub system: Key,
    /// The messages that count, in order.
    pub steps: Vec<Step>,
}

/// One message that counts.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// Whether the assistant said it.
    pub assistant: bool,
    /// Whether it is the result of a tool.
    pub tool: bool,
    /// Identity of the list up to and with this message.
    pub key: Key,
    /// Place in the request's list.
    pub index: usize,
}

impl History {
    /// Reads a request's messages.
    pub fn read(messages: &[Value]) -> Self {
        let mut system = Key::default();
        let mut key = Key::default();
        let mut steps: Vec<Step> = Vec::new();
        for (index, message) in messages.iter().enumerate() {
            let Some(said) = Said::read(message) else { continue };
            if steps.is_empty() && said.role == "system" {
                system = system.then(&said);
                continue;
            }
            let assistant = said.role == "assistant";
            // An aborted answer may or may not stay in the client's history.
            if assistant && said.is_empty() {
                continue;
            }
            key = key.then(&said);
            steps.push(Step { assistant, tool: said.role == "tool", key, index });
        }
        Self { system, steps }
    }

    /// Returns the identity of the whole list.
    pub fn key(&self) -> Key {
        self.steps.last().map_or_else(Key::default, |step| step.key)
    }

    /// Returns the steps between the assistant's message at step `after` and
    /// its next one.
    pub fn following(&self, after: usize) -> &[Step] {
        let rest = self.steps.get(after + 1..).unwrap_or_default();
        let end = rest.iter().position(|step| step.assistant).unwrap_or(rest.len());
        &rest[..end]
    }
}

/// Returns a message without the client's envelope. `None` if nothing else was
/// in it.
pub fn without_envelope(message: &Value) -> Option<Value> {
    bare(message).map(Cow::into_owned)
}

fn bare(message: &Value) -> Option<Cow<'_, Value>> {
    let Some(content) = message.get("content") else { return Some(Cow::Borrowed(message)) };
    let stripped = match content {
        Value::String(text) => strip(text).map(|text| match text.is_empty() {
            true => Value::Null,
            false => Value::from(text),
        }),
        Value::Array(parts) => strip_parts(parts).map(|parts| match parts.is_empty() {
            true => Value::Null,
            false => Value::from(parts),
        }),
        _ => None,
    };
    match stripped {
        None => Some(Cow::Borrowed(message)),
        Some(Value::Null) => None,
        Some(content) => {
            let mut message = message.clone();
            message["content"] = content;
            Some(Cow::Owned(message))
        }
    }
}

/// Returns whether a message is a client's envelope and nothing else.
pub fn is_envelope(message: &Value) -> bool {
    bare(message).is_none()
}

fn strip_parts(parts: &[Value]) -> Option<Vec<Value>> {
    let text = |part: &Value| part.get("text").and_then(Value::as_str).and_then(strip);
    parts.iter().any(|part| text(part).is_some()).then_some(())?;
    let kept = parts.iter().filter_map(|part| match text(part) {
        None => Some(part.clone()),
        Some(rest) if rest.is_empty() => None,
        Some(rest) => {
            let mut part = part.clone();
            part["text"] = Value::from(rest);
            Some(part)
        }
    });
    Some(kept.collect())
}

/// Cuts every envelope out of a text. `None` if there is none.
fn strip(text: &str) -> Option<String> {
    text.contains(ENVELOPE_BEGIN).then_some(())?;
    let mut kept = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(ENVELOPE_BEGIN) {
        kept.push_str(before);
        // An envelope without an end is an envelope to the end.
        rest = after.split_once(ENVELOPE_END).map_or("", |(_, rest)| rest);
    }
    kept.push_str(rest);
    Some(kept.trim().to_owned())
}

/// What a message says, as far as it counts.
#[derive(Debug, PartialEq)]
struct Said<'a> {
    role: &'static str,
    text: Cow<'a, str>,
    calls: Vec<String>,
}

impl<'a> Said<'a> {
    /// Reads a message. `None` if it is an envelope or no message at all.
    fn read(message: &'a Value) -> Option<Self> {
        let role = match message.get("role").and_then(Value::as_str)? {
            "system" | "developer" => "system",
            "assistant" => "assistant",
            "tool" | "function" => "tool",
            _ => "user",
        };
        let content = |message: &'a Value| message.get("content").map(flatten).unwrap_or_default();
        let text = match role {
            // Some servers leave the thoughts in the text; clients cut them.
            "assistant" => within(content(message), |text| {
                text.rsplit("</think>").next().unwrap_or_default().trim()
            }),
            "tool" => within(content(message), str::trim),
            _ => match bare(message)? {
                Cow::Borrowed(message) => within(content(message), str::trim),
                Cow::Owned(message) => {
                    let text = message.get("content").map(flatten).unwrap_or_default();
                    Cow::Owned(text.trim().to_owned())
                }
            },
        };
        let mut calls: Vec<_> = match message.get("tool_calls") {
            Some(Value::Array(calls)) => calls.iter().map(call).collect(),
            _ => Vec::new(),
        };
        calls.extend(message.get("function_call").and_then(Value::as_object).map(function));
        calls.extend(message.get("tool_call_id").and_then(Value::as_str).map(alphanumeric));
        Some(Self { role, text, calls })
    }

    fn is_empty(&self) -> bool {
        self.text.is_empty() && self.calls.is_empty()
    }
}

/// Takes a part of a text, without a copy where there is none yet.
fn within<'a>(text: Cow<'a, str>, part: impl Fn(&str) -> &str) -> Cow<'a, str> {
    match text {
        Cow::Borrowed(text) => Cow::Borrowed(part(text)),
        Cow::Owned(text) => Cow::Owned(part(&text).to_owned()),
    }
}

fn call(call: &Value) -> String {
    let id = call.get("id").and_then(Value::as_str).map(alphanumeric).unwrap_or_default();
    let empty = Map::new();
    let inner = call.get("function").and_then(Value::as_object).unwrap_or(&empty);
    format!("{id} {}", function(inner))
}

fn function(function: &Map<String, Value>) -> String {
    let name = function.get("name").and_then(Value::as_str).unwrap_or_default();
    let arguments = match function.get("arguments") {
        Some(Value::String(text)) => match serde_json::from_str::<Value>(text) {
            Ok(value) => canonical(&value),
            Err(_) => text.trim().to_owned(),
        },
        Some(value) => canonical(value),
        None => String::new(),
    };
    format!("{name} {arguments}")
}

fn alphanumeric(id: &str) -> String {
    id.chars().filter(char::is_ascii_alphanumeric).collect()
}

/// Flattens content: text parts joined with one space, other parts as JSON.
fn flatten(content: &Value) -> Cow<'_, str> {
    match content {
        Value::Null => Cow::Borrowed(""),
        Value::String(text) => Cow::Borrowed(text),
        Value::Array(parts) => {
            let parts: Vec<_> = parts.iter().map(part).collect();
            Cow::Owned(parts.join(" "))
        }
        other => Cow::Owned(canonical(other)),
    }
}

fn part(part: &Value) -> Cow<'_, str> {
    match (part, part.get("text")) {
        (Value::String(text), _) | (_, Some(Value::String(text))) => Cow::Borrowed(text),
        _ => Cow::Owned(canonical(part)),
    }
}

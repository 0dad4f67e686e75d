//! Messages as clients send them, and what templates and judges need of them.

use std::sync::OnceLock;

use regex::Regex;
use serde_json::{Value, json};

use super::Error;
use super::python::{str_of, strip};

/// Head of a hint in an enhanced prompt.
const HINT_HEAD: &str = "[user's hint / instruction]";
/// What OpenClaw puts around the message that it adds to every request.
const ENVELOPE: (&str, &str) =
    ("<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>", "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>");

/// Returns the text of a message's content: parts joined with one space, null
/// as nothing, other values as Python prints them. A part that is no text is
/// an error, never left out.
pub fn flatten_content(content: &Value) -> Result<String, Error> {
    match content {
        Value::Null => Ok(String::new()),
        Value::Array(parts) => {
            let texts: Vec<_> = parts.iter().map(part_text).collect::<Result<_, _>>()?;
            Ok(texts.join(" "))
        }
        other => Ok(str_of(other)),
    }
}

fn part_text(part: &Value) -> Result<&str, Error> {
    let kind = part.get("type").and_then(Value::as_str);
    match (kind, part.get("text").and_then(Value::as_str)) {
        (Some("text" | "input_text" | "output_text"), Some(text)) => Ok(text),
        _ => Err(Error::UnsupportedContent { part: kind.unwrap_or("unknown").to_owned() }),
    }
}

/// Returns messages as most templates want them: `developer` is `system`, and
/// content is text (or null, or absent, as it was).
pub fn normalize_messages(messages: &[Value]) -> Result<Vec<Value>, Error> {
    let mut normalized = flatten_messages(messages)?;
    for message in &mut normalized {
        if message.get("role").and_then(Value::as_str) == Some("developer") {
            message["role"] = json!("system");
        }
    }
    Ok(normalized)
}

pub(super) fn flatten_messages(messages: &[Value]) -> Result<Vec<Value>, Error> {
    let flatten = |(index, message): (usize, &Value)| {
        let mut message = message.clone();
        let members = message.as_object_mut().ok_or(Error::NotAMessage { message: index })?;
        if let Some(content) = members.get_mut("content")
            && !content.is_null()
        {
            *content = Value::String(flatten_content(content)?);
        }
        Ok(message)
    };
    messages.iter().enumerate().map(flatten).collect()
}

/// Replaces the arguments of tool calls that are the JSON text of an object by
/// that object, as servers do before rendering. Any other text stays as it is:
/// a template that takes text prints it, one that needs an object fails with
/// [`Error::ToolArguments`].
pub fn parse_arguments(messages: &mut [Value]) {
    for message in messages {
        let Some(Value::Array(calls)) = message.get_mut("tool_calls") else {
            continue;
        };
        for call in calls {
            let function =
                if call.get("function").is_some() { &mut call["function"] } else { call };
            let Some(Value::String(text)) = function.get("arguments") else {
                continue;
            };
            if let Ok(Value::Object(arguments)) = serde_json::from_str(text) {
                function["arguments"] = Value::Object(arguments);
            }
        }
    }
}

/// Names the first tool call whose arguments are still no object.
pub(super) fn unparsed_arguments(messages: &[Value]) -> Option<Error> {
    for (index, message) in messages.iter().enumerate() {
        let calls = message.get("tool_calls").and_then(Value::as_array);
        for call in calls.into_iter().flatten() {
            let function = call.get("function").unwrap_or(call);
            let arguments = function.get("arguments").unwrap_or(&Value::Null);
            if !arguments.is_object() {
                let name = function.get("name").and_then(Value::as_str).unwrap_or_default();
                return Some(Error::ToolArguments {
                    message: index,
                    tool: name.to_owned(),
                    found: str_of(arguments).chars().take(80).collect(),
                });
            }
        }
    }
    None
}

/// Tells whether a message is a client's own addition that nobody said and that
/// does not stay in the history.
pub fn is_envelope(message: &Value) -> bool {
    if message.get("role").and_then(Value::as_str) != Some("user") {
        return false;
    }
    let content = message.get("content").unwrap_or(&Value::Null);
    flatten_content(content).is_ok_and(|text| {
        let text = strip(&text);
        text.starts_with(ENVELOPE.0) && text.ends_with(ENVELOPE.1)
    })
}

/// Returns what a person wrote: the text of a message without the stamp and
/// the runtime line that the client put around it.
pub fn person_text(message: &Value) -> Result<String, Error> {
    static STAMPS: OnceLock<Option<(Regex, Regex)>> = OnceLock::new();
    let text = flatten_content(message.get("content").unwrap_or(&Value::Null))?;
    let stamps = STAMPS.get_or_init(|| {
        let stamp =
            r"^\s*\[(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) \d{4}-\d{2}-\d{2} \d{2}:\d{2}[^\]\n]{0,40}\] ?";
        let runtime = r"\n\s*Runtime: [^\n]*\|[^\n]*\s*$";
        Some((Regex::new(stamp).ok()?, Regex::new(runtime).ok()?))
    });
    let Some((stamp, runtime)) = stamps else {
        return Ok(text);
    };
    let text = stamp.replace(&text, "");
    Ok(strip(&runtime.replace(&text, "")).to_owned())
}

/// Finds the message that a person would call the last request: the last user
/// message that is no envelope.
pub fn last_request(messages: &[Value]) -> Option<usize> {
    let is_request = |message: &Value| {
        message.get("role").and_then(Value::as_str) == Some("user") && !is_envelope(message)
    };
    messages.iter().rposition(is_request)
}

/// Returns the messages with a hint at the end of the last request (of the last
/// message if there is none).
pub fn enhanced_messages(messages: &[Value], hint: &str) -> Result<Vec<Value>, Error> {
    if messages.is_empty() {
        return Ok(vec![json!({"role": "user", "content": format!("{HINT_HEAD}\n{hint}")})]);
    }
    let mut enhanced = messages.to_vec();
    let target = last_request(messages).unwrap_or(messages.len() - 1);
    let message = enhanced[target].as_object_mut().ok_or(Error::NotAMessage { message: target })?;
    let text = flatten_content(message.get("content").unwrap_or(&Value::Null))?;
    let text = format!("{}\n\n{HINT_HEAD}\n{}", strip(&text), strip(hint));
    message.insert("content".to_owned(), Value::String(strip(&text).to_owned()));
    Ok(enhanced)
}

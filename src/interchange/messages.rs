//! Whether messages are such, and what is made of them.

use serde_json::Value;

use crate::session::identity::without_envelope;
use crate::trajectory::words::NextStateKind;

const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

/// Reads a list of chat messages, or says which of them is none.
pub(super) fn list(value: Option<&Value>, name: &str) -> Result<Vec<Value>, String> {
    let Some(Value::Array(messages)) = value else {
        return Err(format!("`{name}` is no list"));
    };
    if messages.is_empty() {
        return Err(format!("`{name}` is empty"));
    }
    for (index, message) in messages.iter().enumerate() {
        check(message).map_err(|what| format!("`{name}[{index}]`: {what}"))?;
    }
    Ok(messages.clone())
}

/// Says what a message lacks.
pub(super) fn check(message: &Value) -> Result<(), String> {
    if !message.is_object() {
        return Err("no object".to_owned());
    }
    let Some(role) = message.get("role").and_then(Value::as_str) else {
        return Err("no role".to_owned());
    };
    if !ROLES.contains(&role) {
        return Err(format!("unknown role `{}`", shortened(role)));
    }
    match message.get("content") {
        Some(Value::String(_) | Value::Array(_)) => Ok(()),
        None | Some(Value::Null) if role == "assistant" => match has_calls(message) {
            true => Ok(()),
            false => Err("an assistant's message with neither content nor tool calls".to_owned()),
        },
        None | Some(Value::Null) => Err("no content".to_owned()),
        Some(_) => Err("`content` is neither text nor a list of parts".to_owned()),
    }
}

fn has_calls(message: &Value) -> bool {
    let calls = message.get("tool_calls").and_then(Value::as_array);
    calls.is_some_and(|calls| !calls.is_empty())
        || message.get("function_call").is_some_and(Value::is_object)
        || message.get("refusal").is_some_and(Value::is_string)
        || message.get("audio").is_some_and(Value::is_object)
}

/// Reads tool definitions: a list of objects, or the JSON text of one. A bare
/// function is wrapped as chat requests have it.
pub(super) fn tools(value: Option<&Value>) -> Result<Option<Vec<Value>>, String> {
    let parsed;
    let value = match value {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(text)) if text.trim().is_empty() => return Ok(None),
        Some(Value::String(text)) => {
            parsed = serde_json::from_str(text).map_err(|error| format!("`tools`: {error}"))?;
            &parsed
        }
        Some(value) => value,
    };
    let Value::Array(tools) = value else { return Err("`tools` is no list".to_owned()) };
    if !tools.iter().all(Value::is_object) {
        return Err("`tools` holds something that is no object".to_owned());
    }
    let wrapped = |tool: &Value| match tool.get("type").is_none() && tool.get("name").is_some() {
        true => serde_json::json!({"type": "function", "function": tool}),
        false => tool.clone(),
    };
    Ok((!tools.is_empty()).then(|| tools.iter().map(wrapped).collect()))
}

/// Returns what came after an answer, as `serve` keeps it: without envelopes, and
/// without what is neither a person's nor a tool's.
pub(super) fn next_state<'a>(
    after: impl Iterator<Item = &'a Value>,
) -> Option<(Vec<Value>, NextStateKind)> {
    let role = |message: &Value| message["role"].as_str().unwrap_or_default().to_owned();
    let until_assistant = after.take_while(|message| role(message) != "assistant");
    let kept: Vec<Value> = until_assistant.filter_map(without_envelope).collect();
    let spoken = |wanted: &[&str]| kept.iter().any(|one| wanted.contains(&role(one).as_str()));
    let kind = match (spoken(&["tool", "function"]), spoken(&["user"])) {
        (true, _) => NextStateKind::Tool,
        (false, true) => NextStateKind::User,
        (false, false) => return None,
    };
    Some((kept, kind))
}

/// Returns the first characters of a text that is shown in a message.
pub(super) fn shortened(text: &str) -> String {
    let mut short: String = text.chars().take(40).flat_map(char::escape_debug).collect();
    if text.chars().count() > 40 {
        short.push('…');
    }
    short
}

/// Returns the first of some members that is a text.
pub(super) fn text_of<'a>(value: &'a Value, names: &[&str]) -> Option<&'a str> {
    let mut texts = names.iter().filter_map(|name| value.get(name)?.as_str());
    texts.find(|text| !text.trim().is_empty())
}

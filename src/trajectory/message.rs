//! What a recorded message says to a reader.

use serde_json::Value;

/// Reads a column of JSON; what is none is a text.
pub fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()))
}

/// Returns what a message says: its text, and the calls it makes.
pub fn words(message: &Value) -> String {
    let mut parts = Vec::new();
    match message.get("content").unwrap_or(message) {
        Value::String(text) => parts.push(text.clone()),
        Value::Array(items) => {
            parts.extend(items.iter().filter_map(|item| item["text"].as_str()).map(str::to_owned));
        }
        _ => {}
    }
    for call in message["tool_calls"].as_array().into_iter().flatten() {
        let function = &call["function"];
        let name = function["name"].as_str().unwrap_or_default();
        parts.push(format!("{name}({})", function["arguments"].as_str().unwrap_or_default()));
    }
    parts.join(" ")
}

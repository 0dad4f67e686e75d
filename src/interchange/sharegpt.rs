//! ShareGPT: `{"id", "conversations": [{"from", "value"}, …]}`, with the members
//! that its many writers added: `system`, `tools`, calls and observations.

use serde_json::{Value, json};

use super::instant;
use super::line::{Conversation, Line};
use super::messages::{shortened, text_of, tools};
use super::request::session_of_conversation;

pub(super) fn read(value: &Value) -> Result<Line, String> {
    let Some(Value::Array(parts)) = value.get("conversations") else {
        return Err("`conversations` is no list".to_owned());
    };
    if parts.is_empty() {
        return Err("`conversations` is empty".to_owned());
    }
    let mut messages = Vec::new();
    if let Some(system) = text_of(value, &["system", "system_prompt"]) {
        messages.push(json!({"role": "system", "content": system}));
    }
    let mut calls = Calls::default();
    for (index, part) in parts.iter().enumerate() {
        let message =
            calls.message(part).map_err(|what| format!("`conversations[{index}]`: {what}"))?;
        messages.push(message);
    }
    if !messages.iter().any(|message| message["role"] == "assistant") {
        return Err("nothing is from an assistant".to_owned());
    }
    Ok(Line::Conversation(Conversation {
        session: session_of_conversation(value),
        messages,
        tools: tools(value.get("tools"))?,
        model: text_of(value, &["model"]).map(str::to_owned),
        at: instant::of(value, &["created_at", "timestamp", "time"]),
    }))
}

/// Calls that wait for their observation, and how many there were.
#[derive(Default)]
struct Calls {
    waiting: std::collections::VecDeque<String>,
    made: usize,
}

impl Calls {
    fn message(&mut self, part: &Value) -> Result<Value, String> {
        let Some(from) = text_of(part, &["from", "role"]) else {
            return Err("it does not say who it is `from`".to_owned());
        };
        let Some(said) = ["value", "content"].iter().find_map(|name| part.get(name)?.as_str())
        else {
            return Err("its `value` is no text".to_owned());
        };
        let role = match from.to_lowercase().as_str() {
            "human" | "user" => "user",
            "gpt" | "assistant" | "chatgpt" | "bot" | "model" | "bing" | "bard" => "assistant",
            "system" => "system",
            "tool" | "observation" | "function" | "function_response" => {
                let mut message = json!({"role": "tool", "content": said});
                if let Some(id) = self.waiting.pop_front() {
                    message["tool_call_id"] = Value::from(id);
                }
                return Ok(message);
            }
            "function_call" | "tool_call" => return self.call(said),
            _ => return Err(format!("unknown speaker `{}`", shortened(from))),
        };
        Ok(json!({"role": role, "content": said}))
    }

    /// Reads a call, or a list of them, written as JSON.
    fn call(&mut self, said: &str) -> Result<Value, String> {
        let parsed: Value =
            serde_json::from_str(said).map_err(|error| format!("the call is no JSON: {error}"))?;
        let listed = match parsed {
            Value::Array(calls) => calls,
            call => vec![call],
        };
        let mut calls = Vec::new();
        for call in &listed {
            let Some(name) = text_of(call, &["name"]) else {
                return Err("the call names no function".to_owned());
            };
            let arguments = match call.get("arguments").or_else(|| call.get("parameters")) {
                Some(Value::String(text)) => text.clone(),
                Some(arguments) => arguments.to_string(),
                None => "{}".to_owned(),
            };
            self.made += 1;
            let id = format!("call_{}", self.made);
            self.waiting.push_back(id.clone());
            let function = json!({"name": name, "arguments": arguments});
            calls.push(json!({"id": id, "type": "function", "function": function}));
        }
        match calls.is_empty() {
            true => Err("the list of calls is empty".to_owned()),
            false => Ok(json!({"role": "assistant", "content": null, "tool_calls": calls})),
        }
    }
}

//! The record file of OpenClaw-RL's proxy: one line per main-line turn with
//! `session_id`, `turn`, `timestamp`, `messages`, `prompt_text`, `response_text`,
//! `tool_calls` and `next_state` (the last message of the next request, or null
//! when the session was done).
//!
//! Its answers are text that a chat template rendered. The template's end mark is
//! cut off, thoughts become `reasoning_content`, and rendered tool calls give way
//! to the record's own `tool_calls`.

use serde_json::{Value, json};

use super::instant;
use super::line::{Answer, Exchange, Line};
use super::messages::{check, list, text_of, tools};

/// What templates put after an answer.
const ENDS: [&str; 8] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end|>",
    "<end_of_turn>",
    "</s>",
    "<｜end▁of▁sentence｜>",
];

pub(super) fn read(value: &Value) -> Result<Line, String> {
    if value.get("messages").is_none() && value.get("votes").is_some() {
        return Err("a judge's record, which holds no turn".to_owned());
    }
    let Some(session) = text_of(value, &["session_id"]) else {
        return Err("no `session_id`".to_owned());
    };
    if value.get("turn").and_then(Value::as_u64).is_none_or(|turn| turn == 0) {
        return Err("`turn` is no number from 1".to_owned());
    }
    let Some(response) = value.get("response_text").and_then(Value::as_str) else {
        return Err("`response_text` is no text".to_owned());
    };
    let calls = match value.get("tool_calls") {
        None | Some(Value::Null) => None,
        Some(Value::Array(calls)) => (!calls.is_empty()).then(|| calls.clone()),
        Some(_) => return Err("`tool_calls` is no list".to_owned()),
    };
    let next = value.get("next_state").filter(|next| !next.is_null());
    if let Some(next) = next {
        check(next).map_err(|what| format!("`next_state`: {what}"))?;
    }
    let rendered = value.get("prompt_text").and_then(Value::as_str);
    let tool_calls = calls.is_some();
    Ok(Line::Exchange(Box::new(Exchange {
        session: Some(session.to_owned()),
        messages: list(value.get("messages"), "messages")?,
        tools: tools(value.get("tools"))?,
        answers: vec![Answer {
            message: message(response, calls),
            finish_reason: tool_calls.then(|| "tool_calls".to_owned()),
            ..Answer::default()
        }],
        at: instant::of(value, &["timestamp"]),
        next: next.cloned(),
        done: next.is_none(),
        rendered: rendered.map(|prompt| (prompt.to_owned(), response.to_owned())),
        ..Exchange::default()
    })))
}

/// Makes an assistant's message of a rendered answer.
fn message(rendered: &str, calls: Option<Vec<Value>>) -> Value {
    let mut text = rendered.trim();
    while let Some(rest) = ENDS.iter().find_map(|end| text.strip_suffix(end)) {
        text = rest.trim_end();
    }
    let mut thoughts = None;
    if let Some((before, after)) = text.split_once("</think>") {
        let before = before.trim_start().trim_start_matches("<think>").trim();
        thoughts = Some(before).filter(|thoughts| !thoughts.is_empty());
        text = after.trim();
    }
    if calls.is_some() {
        text = text.split("<tool_call>").next().unwrap_or_default().trim();
    }
    let mut message = json!({"role": "assistant", "content": text});
    if let Some(thoughts) = thoughts {
        message["reasoning_content"] = Value::from(thoughts);
    }
    if let Some(calls) = calls {
        message["tool_calls"] = Value::from(calls);
    }
    message
}

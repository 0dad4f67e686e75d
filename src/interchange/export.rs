//! What all outputs share, and fine-tuning lines.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::trajectory::Turn;
use crate::trajectory::words::Status;

/// How many rows were left out, by reason.
pub type Left = BTreeMap<&'static str, u64>;

/// Returns what a turn was worth: the resolved reward, else what somebody stated,
/// else the judge's majority.
pub fn worth(turn: &Turn) -> Option<f32> {
    turn.reward.or(turn.reward_explicit).or(turn.score)
}

/// The words of a turn.
#[derive(Debug, Clone)]
pub(super) struct Told {
    pub(super) messages: Vec<Value>,
    pub(super) tools: Option<Value>,
    pub(super) response: Value,
}

/// Reads the words of a complete turn, or says why there is nothing to learn from.
pub(super) fn told(turn: &Turn) -> Result<Told, &'static str> {
    if turn.status != Status::Complete {
        return Err("not_complete");
    }
    let parsed = |text: &str| serde_json::from_str::<Value>(text).map_err(|_| "unreadable");
    let Value::Array(messages) = parsed(&turn.messages)? else { return Err("unreadable") };
    let response = parsed(&turn.response)?;
    let said = response["content"].as_str().is_some_and(|text| !text.trim().is_empty())
        || response["content"].as_array().is_some_and(|parts| !parts.is_empty());
    let called = response["tool_calls"].as_array().is_some_and(|calls| !calls.is_empty());
    if !said && !called {
        return Err("empty_answer");
    }
    let tools = turn.tools.as_deref().map(parsed).transpose()?;
    Ok(Told { messages, tools, response })
}

/// Returns a fine-tuning line, `{"messages", "tools"?}` with the answer last, or why
/// there is none: a reward above 0 is wanted, or one that reaches `least`.
pub fn sft(turn: &Turn, least: Option<f32>) -> Result<Value, &'static str> {
    let worth = worth(turn).ok_or("no_reward")?;
    let enough = least.map_or(worth > 0.0, |least| worth >= least);
    if !enough {
        return Err("reward_too_low");
    }
    let Told { mut messages, tools, response } = told(turn)?;
    messages.push(response);
    let mut line = json!({"messages": messages});
    if let Some(tools) = tools {
        line["tools"] = tools;
    }
    Ok(line)
}

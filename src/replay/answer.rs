//! What a recorded answer and a new one have in common.

use serde_json::{Value, json};

use crate::capture::{Captured, Outcome};
use crate::template::flatten_content;
use crate::trajectory::words::{Status, UNTOLD_FINISH_REASON};
use crate::trajectory::{Sampling, Turn};

/// An answer, as far as it is compared.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Answer {
    /// The assistant message.
    pub message: Value,
    /// Its text.
    pub text: String,
    /// Its tool calls.
    pub calls: Vec<Call>,
    /// Why it ended, in the server's word; nothing if that was not recorded.
    pub finish_reason: Option<String>,
    /// Ids of the prompt as the server rendered it.
    pub prompt_ids: Option<Vec<i32>>,
    /// Ids of the answer as sampled.
    pub ids: Option<Vec<i32>>,
    /// One slot per id.
    pub log_probs: Option<Vec<Option<f32>>>,
    /// What a new answer's row says besides.
    pub facts: Facts,
}

/// What is known of a new answer besides what is compared: what was asked, and what
/// the server told, as `serve` would have recorded it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Facts {
    /// Name of the model that was asked for; nothing if none was named.
    pub model: String,
    /// The request's messages where they are not the recorded ones, JSON.
    pub messages: Option<String>,
    /// The settings that were sent, and what the log-probs are of.
    pub sampling: Sampling,
    /// When it was asked for and when it was there, in microseconds since 1970.
    pub times: (i64, i64),
    /// Stop string or id that ended it.
    pub matched_stop: Option<String>,
    /// Whether the last of the ids is an end or stop token.
    pub ends_with_stop_token: Option<bool>,
    /// Completion tokens as the server counted them.
    pub completion_tokens: Option<u32>,
    /// Policy step at the start of generation, if the answer names it.
    pub weight_version: Option<String>,
    /// Policy step at its end.
    pub weight_version_end: Option<String>,
    /// Why it must not be trained on.
    pub untrainable_reason: Option<&'static str>,
}

/// A tool call: who calls is the same if this is.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// Name of the function.
    pub name: String,
    /// Its arguments: JSON if they are, else the text.
    pub arguments: Value,
}

impl Answer {
    /// Reads the answer of a recorded turn, or says why it cannot be compared.
    pub fn recorded(turn: &Turn) -> Result<Self, String> {
        match turn.status {
            Status::Complete | Status::Truncated => {}
            status => return Err(format!("recorded as {status}")),
        }
        let message: Value = serde_json::from_str(&turn.response)
            .map_err(|error| format!("`response` is not usable: {error}"))?;
        let mut answer = Self::of_message(message)?;
        let told = turn.finish_reason.as_deref().filter(|told| *told != UNTOLD_FINISH_REASON);
        answer.finish_reason = told.map(str::to_owned);
        answer.prompt_ids = turn.prompt_ids.clone();
        answer.ids = turn.response_ids.clone();
        answer.log_probs = turn.rollout_log_probs.clone();
        Ok(answer)
    }

    /// Reads a new answer, or says why it is none.
    pub fn replayed(captured: Captured) -> Result<Self, String> {
        match captured.outcome {
            Outcome::Complete | Outcome::Truncated => {}
            Outcome::Aborted => return Err("the engine gave up on it".to_owned()),
            Outcome::Failed => {
                return Err("the answer broke off, or holds an error".to_owned());
            }
        }
        let mut answer = Self::of_message(captured.response)?;
        answer.finish_reason = captured.finish_reason;
        answer.prompt_ids = captured.prompt_ids;
        answer.ids = captured.response_ids;
        answer.log_probs = captured.log_probs;
        answer.facts = Facts {
            matched_stop: captured.matched_stop,
            ends_with_stop_token: captured.ends_with_stop_token,
            completion_tokens: captured.completion_tokens,
            weight_version: captured.weight_version,
            weight_version_end: captured.weight_version_end,
            untrainable_reason: captured.untrainable_reason,
            ..Facts::default()
        };
        Ok(answer)
    }

    /// Reads an assistant message.
    pub fn of_message(message: Value) -> Result<Self, String> {
        let content = message.get("content").unwrap_or(&Value::Null);
        let text = flatten_content(content).map_err(|error| error.to_string())?;
        let calls = message.get("tool_calls").and_then(Value::as_array);
        let calls = calls.into_iter().flatten().map(Call::read).collect();
        Ok(Self { text, calls, message, ..Self::default() })
    }

    /// Returns a turn as if this had been its answer.
    pub fn instead(&self, turn: &Turn) -> Turn {
        Turn {
            response: self.message.to_string(),
            finish_reason: self.finish_reason.clone(),
            ..turn.clone()
        }
    }
}

impl Call {
    fn read(call: &Value) -> Self {
        let function = call.get("function").unwrap_or(call);
        let arguments = match function.get("arguments") {
            Some(Value::String(text)) => serde_json::from_str(text).unwrap_or_else(|_| json!(text)),
            Some(other) => other.clone(),
            None => Value::Null,
        };
        let name = function.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
        Self { name, arguments }
    }
}

//! Samples as slime's trainer takes them: the fields of its `Sample`, one JSON
//! object a line. Nothing is padded; a row that lacks what a sample needs is left
//! out under its reason.

use serde_json::{Value, json};

use super::export::worth;
use crate::trajectory::Turn;
use crate::trajectory::words::Status;

/// What samples shall hold. slime looks at the first sample of a batch to decide
/// which optional fields there are, so all samples of a file have the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Slime {
    /// Log-probs of the teacher; rows without are left out.
    pub teacher: bool,
}

impl Slime {
    /// Returns a row as a sample, or why it is none. `index` numbers the sample,
    /// `group` the request.
    pub fn sample(&self, turn: &Turn, index: u64, group: u64) -> Result<Value, &'static str> {
        let (Some(prompt_ids), Some(response_ids)) = (&turn.prompt_ids, &turn.response_ids) else {
            return Err("no_token_ids");
        };
        if turn.untrainable_reason.is_some() {
            return Err("untrainable");
        }
        if response_ids.is_empty() {
            return Err("empty_answer");
        }
        let reward = worth(turn).ok_or("no_reward")?;
        let reward = number(reward).ok_or("reward_not_finite")?;
        let length = response_ids.len();
        let log_probs = turn.rollout_log_probs.as_ref().ok_or("no_log_probs")?;
        let log_probs: Vec<f32> =
            log_probs.iter().copied().collect::<Option<_>>().ok_or("log_prob_gap")?;
        if log_probs.len() != length {
            return Err("log_probs_misaligned");
        }
        let log_probs = numbers(&log_probs).ok_or("log_prob_not_finite")?;
        // Without an opinion of `advantage` every token counts, as slime has it.
        let mask = turn.loss_mask.clone().unwrap_or_else(|| vec![1; length]);
        if mask.len() != length {
            return Err("loss_mask_misaligned");
        }
        let parsed = |text: &str| serde_json::from_str::<Value>(text).map_err(|_| "unreadable");
        let (messages, response) = (parsed(&turn.messages)?, parsed(&turn.response)?);
        let text = match response.as_object().ok_or("unreadable")?.get("content") {
            // An answer of tool calls alone has no text.
            None | Some(Value::Null) => "",
            Some(Value::String(text)) => text,
            Some(_) => return Err("no_text_answer"),
        };
        let tokens: Vec<i32> = prompt_ids.iter().chain(response_ids).copied().collect();
        let mut sample = json!({
            "group_index": group,
            "index": index,
            "prompt": messages,
            "tokens": tokens,
            "response": text,
            "response_length": length,
            "label": null,
            "reward": {"score": reward},
            "loss_mask": mask,
            "weight_versions": turn.weight_version.iter().collect::<Vec<_>>(),
            "rollout_log_probs": log_probs,
            "status": status(turn.status),
            "remove_sample": false,
            "session_id": turn.session_id,
            "metadata": {
                "turn_id": turn.turn_id,
                "session_id": turn.session_id,
                "turn": turn.turn,
                "request_id": turn.request_id,
                "choice": turn.choice,
                "model": turn.model,
                "tools": turn.tools.as_deref().map(parsed).transpose()?,
            },
        });
        if self.teacher {
            let log_probs = teacher_candidate(turn).and_then(numbers).ok_or("no_teacher")?;
            sample["teacher_log_probs"] = log_probs.into();
        }
        Ok(sample)
    }
}

/// Returns the teacher's log-probs under the first usable hint, the one that
/// `advantage` takes: one finite number for each response id.
pub fn teacher_candidate(turn: &Turn) -> Option<&[f32]> {
    let length = turn.response_ids.as_ref().map(Vec::len);
    let mut candidates = turn.teacher_log_probs.iter().flatten().flatten();
    let usable = candidates.find(|candidate| {
        Some(candidate.len()) == length && candidate.iter().all(|value| value.is_finite())
    });
    usable.map(Vec::as_slice)
}

/// The shortest decimal of an `f32`, not the long one of its `f64`. JSON has no
/// number for what is not finite.
fn number(value: f32) -> Option<Value> {
    let decimal = value.to_string().parse::<f64>().ok()?;
    serde_json::Number::from_f64(decimal).map(Value::from)
}

fn numbers(values: &[f32]) -> Option<Vec<Value>> {
    values.iter().copied().map(number).collect()
}

fn status(status: Status) -> &'static str {
    match status {
        Status::Complete => "completed",
        Status::Truncated => "truncated",
        Status::Aborted => "aborted",
        Status::Failed => "failed",
    }
}

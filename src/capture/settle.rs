//! From what an answer showed to what is recorded: do ids, log-probs and the
//! server's own count agree? In doubt the row is kept and marked.

use serde_json::Value;

use super::reason;
use super::request::{Dialect, Prepared};

/// How an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The model ended it, or a stop string did.
    Complete,
    /// The token limit ended it.
    Truncated,
    /// The client, or the engine, gave up on it.
    Aborted,
    /// The engine reported an error, or broke off.
    Failed,
}

/// One choice of an answer, ready to be recorded.
#[derive(Debug, Clone, PartialEq)]
pub struct Captured {
    /// Index among the choices.
    pub choice: u8,
    /// The assistant message.
    pub response: Value,
    /// Ids of the prompt as the server rendered it.
    pub prompt_ids: Option<Vec<i32>>,
    /// Ids of the answer as sampled.
    pub response_ids: Option<Vec<i32>>,
    /// One slot per id of the answer.
    pub log_probs: Option<Vec<Option<f32>>>,
    /// Why the answer ended, in the server's word.
    pub finish_reason: Option<String>,
    /// The stop string or id that ended it.
    pub matched_stop: Option<String>,
    /// Whether the last id is an end or stop token, if that is known.
    pub ends_with_stop_token: Option<bool>,
    /// The server's count of the answer's tokens.
    pub completion_tokens: Option<u32>,
    /// Version of the weights at the start, if the answer tells.
    pub weight_version: Option<String>,
    /// Version of the weights at the end, if the answer tells.
    pub weight_version_end: Option<String>,
    /// How the answer ended.
    pub outcome: Outcome,
    /// Why the row must not be trained on.
    pub untrainable_reason: Option<&'static str>,
}

impl Captured {
    /// Returns whether the assistant said nothing at all.
    pub fn is_empty(&self) -> bool {
        let Some(message) = self.response.as_object() else { return true };
        let silent = |value: &Value| match value {
            Value::Null => true,
            Value::String(text) => text.is_empty(),
            Value::Array(items) => items.is_empty(),
            _ => false,
        };
        message.iter().all(|(key, value)| key == "role" || silent(value))
    }
}

/// A log-prob as it arrived.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Row {
    pub(super) id: Option<i32>,
    pub(super) log_prob: Option<f32>,
    /// It names an id that cannot be one.
    pub(super) odd: bool,
}

impl Row {
    pub(super) fn read(id: Option<&Value>, log_prob: Option<&Value>) -> Self {
        let named = id.filter(|id| !id.is_null());
        let id = named.and_then(one_id);
        Self {
            id,
            log_prob: log_prob.and_then(Value::as_f64).map(|value| value as f32),
            odd: named.is_some() && id.is_none(),
        }
    }
}

/// What one choice of an answer showed.
#[derive(Debug, Clone, Default)]
pub(super) struct Evidence {
    pub(super) index: u8,
    pub(super) response: Value,
    pub(super) prompt_ids: Option<Vec<i32>>,
    pub(super) response_ids: Option<Vec<i32>>,
    pub(super) rows: Vec<Row>,
    /// The server told ids of the answer that cannot be any: then none is known.
    pub(super) odd_ids: bool,
    /// So with the ids of the prompt.
    pub(super) odd_prompt: bool,
    pub(super) finish_reason: Option<String>,
    pub(super) matched_stop: Option<Value>,
    /// Whether the server speaks of what stopped it (null = its own end token).
    pub(super) names_stop: bool,
    pub(super) completion_tokens: Option<u32>,
    pub(super) weight_version: Option<String>,
    pub(super) weight_version_end: Option<String>,
    /// Some part of it could not be read.
    pub(super) damaged: Option<&'static str>,
}

/// What is known of the answer as a whole.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Whole {
    /// The server's count, of all choices together.
    pub(super) completion_tokens: Option<u32>,
    /// Choices were left out, whose tokens are in that count.
    pub(super) left_out: bool,
    /// How it ended where it did not end well.
    pub(super) broken: Option<(Outcome, &'static str)>,
}

/// Decides what is recorded of each choice.
pub(super) fn settle(prepared: &Prepared, choices: Vec<Evidence>, whole: Whole) -> Vec<Captured> {
    let mut choices: Vec<_> = choices.into_iter().map(with_ids_of_rows).collect();
    let counted = choices.iter().filter_map(|choice| choice.response_ids.as_ref()).map(Vec::len);
    let total: usize = counted.sum();
    let agrees = whole.completion_tokens.is_none_or(|counted| counted as usize == total);
    if let [choice] = choices.as_mut_slice()
        && !whole.left_out
    {
        choice.completion_tokens = choice.completion_tokens.or(whole.completion_tokens);
    }
    choices.into_iter().map(|choice| captured(prepared, choice, whole.broken, agrees)).collect()
}

/// Takes the ids from the log-probs where the dialect puts them there. Never in
/// the place of ids that cannot be any: one of the two accounts is wrong.
fn with_ids_of_rows(mut choice: Evidence) -> Evidence {
    if choice.odd_prompt {
        choice.prompt_ids = None;
    }
    if choice.odd_ids {
        choice.response_ids = None;
        return choice;
    }
    if choice.response_ids.is_none() && !choice.rows.is_empty() {
        choice.response_ids = choice.rows.iter().map(|row| row.id).collect();
    }
    choice
}

fn captured(
    prepared: &Prepared,
    choice: Evidence,
    broken: Option<(Outcome, &'static str)>,
    total_agrees: bool,
) -> Captured {
    // A seen finish reason is a whole answer, whatever came after it.
    let (outcome, ended) = match (choice.finish_reason.as_deref(), broken) {
        (Some("abort"), _) => (Outcome::Aborted, Some(reason::ABORTED)),
        (Some("length"), _) => (Outcome::Truncated, None),
        (Some(_), _) => (Outcome::Complete, None),
        (None, Some((outcome, why))) => (outcome, Some(why)),
        (None, None) => (Outcome::Failed, Some(reason::INCOMPLETE_STREAM)),
    };
    let own_count = choice.completion_tokens;
    let (log_probs, fault) = match &choice.response_ids {
        Some(ids) => align(ids, &choice),
        None if choice.odd_ids || choice.rows.iter().any(|row| row.odd) => {
            (None, Some(reason::LOG_PROBS_MISALIGNED))
        }
        None => (None, Some(reason::NO_TOKEN_IDS)),
    };
    let miscounted = choice.response_ids.as_ref().is_some_and(|ids| {
        !total_agrees || own_count.is_some_and(|counted| counted as usize != ids.len())
    });
    let miscounted = miscounted.then_some(reason::USAGE_MISMATCH);
    let no_prompt = choice.prompt_ids.is_none().then_some(reason::NO_PROMPT_IDS);
    let (odd, unavailable) = (prepared.odd, prepared.unavailable);
    let assistant = choice.response.get("role").is_some_and(|role| role == "assistant");
    let stranger = (!assistant).then_some(reason::ODD_ANSWER);
    let reasons = [ended, choice.damaged, odd, stranger, unavailable, miscounted, fault, no_prompt];
    Captured {
        choice: choice.index,
        ends_with_stop_token: ends_with_stop_token(&choice),
        matched_stop: choice.matched_stop.as_ref().and_then(|stop| match stop {
            Value::Null => None,
            Value::String(text) => Some(text.clone()),
            other => Some(other.to_string()),
        }),
        response: choice.response,
        prompt_ids: choice.prompt_ids,
        response_ids: choice.response_ids,
        log_probs,
        finish_reason: choice.finish_reason,
        completion_tokens: own_count,
        weight_version: choice.weight_version,
        weight_version_end: choice.weight_version_end,
        outcome,
        untrainable_reason: reasons.into_iter().flatten().next(),
    }
}

/// Lays log-probs beside ids. One gap is known and allowed: the last id, when
/// it is the end or stop token. Any other gap makes the whole column null.
fn align(ids: &[i32], choice: &Evidence) -> (Option<Vec<Option<f32>>>, Option<&'static str>) {
    let misaligned = (None, Some(reason::LOG_PROBS_MISALIGNED));
    if choice.rows.is_empty() && !ids.is_empty() {
        return (None, Some(reason::NO_LOG_PROBS));
    }
    let stopped = !matches!(choice.finish_reason.as_deref(), None | Some("length" | "abort"));
    let short = choice.rows.len() + 1 == ids.len();
    if choice.rows.len() != ids.len() && !(short && stopped) {
        return misaligned;
    }
    let same = |(row, id): (&Row, &i32)| !row.odd && row.id.is_none_or(|named| named == *id);
    if !choice.rows.iter().zip(ids).all(same) {
        return misaligned;
    }
    let mut log_probs: Vec<_> = choice.rows.iter().map(|row| row.log_prob).collect();
    log_probs.resize(ids.len(), None);
    let (last, before) = match log_probs.split_last() {
        Some((last, before)) => (*last, before),
        None => (Some(0.0), &[][..]),
    };
    // 1e-3 leaves room for a server that works in half precision.
    let sound = |log_prob: &Option<f32>| log_prob.is_some_and(|lp| lp.is_finite() && lp <= 1e-3);
    let last_fits = match last {
        None => stopped,
        some => sound(&some),
    };
    match last_fits && before.iter().all(sound) {
        true => (Some(log_probs), None),
        false => misaligned,
    }
}

fn ends_with_stop_token(choice: &Evidence) -> Option<bool> {
    let last = choice.response_ids.as_ref()?.last()?;
    match (choice.finish_reason.as_deref()?, choice.matched_stop.as_ref()) {
        ("length" | "abort", _) => Some(false),
        (_, Some(Value::Number(id))) => Some(id.as_i64() == Some(i64::from(*last))),
        (_, Some(Value::String(_))) => Some(false),
        // vLLM names what stopped it unless that was the model's own end token.
        ("stop", _) if choice.names_stop => Some(true),
        _ => None,
    }
}

impl Evidence {
    /// Reads the members of a choice that stand alike in whole answers and in
    /// chunks.
    pub(super) fn read_choice(&mut self, choice: &Value, dialect: Dialect) {
        if let Some(finish) = choice.get("finish_reason").and_then(Value::as_str) {
            self.finish_reason = Some(finish.to_owned());
        }
        for name in ["matched_stop", "stop_reason"] {
            if let Some(stop) = choice.get(name).filter(|stop| !stop.is_null()) {
                self.matched_stop = Some(stop.clone());
            }
        }
        self.names_stop |= dialect == Dialect::Vllm && choice.get("stop_reason").is_some();
        let rows = choice.get("logprobs").and_then(|log_probs| log_probs.get("content"));
        for row in rows.and_then(Value::as_array).into_iter().flatten() {
            self.rows.push(Row::read(row.get("id"), row.get("logprob")));
        }
    }
}

/// Something stands where ids should, and is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OddIds;

/// Reads a list of token ids. Nothing is told by no member, or by null.
pub(super) fn ids(value: Option<&Value>) -> Result<Option<Vec<i32>>, OddIds> {
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Array(items)) => {
            items.iter().map(one_id).collect::<Option<_>>().map(Some).ok_or(OddIds)
        }
        Some(_) => Err(OddIds),
    }
}

fn one_id(value: &Value) -> Option<i32> {
    value.as_i64().and_then(|id| i32::try_from(id).ok()).filter(|id| *id >= 0)
}

/// Reads a choice's index; its place counts where there is none. `None` if what
/// stands there is no index.
pub(super) fn index(choice: &Value, place: usize) -> Option<u8> {
    match choice.get("index") {
        None | Some(Value::Null) => u8::try_from(place).ok(),
        Some(index) => index.as_u64().and_then(|index| u8::try_from(index).ok()),
    }
}

/// Reads the server's count of the answer's tokens. Gateways send 0 for
/// "not counted".
pub(super) fn completion_tokens(usage: Option<&Value>) -> Option<u32> {
    let counted = usage?.get("completion_tokens")?.as_u64()?;
    u32::try_from(counted).ok().filter(|counted| *counted > 0)
}

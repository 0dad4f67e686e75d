//! Token ids made again from text, for rows that came without. Such a row says so
//! and is never trained on: what was sampled may have been other tokens.

use serde_json::{Map, Value};

use super::import::{Counts, Row};
use super::line::LogProbs;
use crate::template::{Chat, Error, Rendering};
use crate::trajectory::words::TokenSource;

/// Gives a row ids, and the log-probs of the log if there is one for each. Errors
/// with the reason if there can be no ids.
pub(super) fn retokenize(chat: &Chat, row: &mut Row, counts: &mut Counts) -> Result<(), String> {
    let logged = std::mem::take(&mut row.log_probs);
    let made = match &row.rendered {
        Some((prompt, response)) => as_rendered(chat, prompt, response),
        None => by_template(chat, row),
    };
    let turn = &mut row.turn;
    let (prompt_ids, response_ids) = made.inspect_err(|_| {
        turn.untrainable_reason = Some("template_failed".to_owned());
        counts.log_probs_dropped += u64::from(logged != LogProbs::Absent);
    })?;
    counts.retokenized += 1;
    turn.token_source = TokenSource::Retokenized;
    turn.untrainable_reason = Some("retokenized".to_owned());
    let fits = |logged: &[f32]| {
        logged.len() == response_ids.len()
            && logged.iter().all(|value| value.is_finite() && *value <= 0.0)
    };
    match logged {
        LogProbs::Absent => {}
        LogProbs::Whole(logged) if fits(&logged) => {
            turn.rollout_log_probs = Some(logged.into_iter().map(Some).collect());
        }
        LogProbs::Whole(_) | LogProbs::Incomplete => {
            turn.untrainable_reason = Some("log_probs_misaligned".to_owned());
            counts.log_probs_dropped += 1;
        }
    }
    turn.prompt_ids = Some(prompt_ids);
    turn.response_ids = Some(response_ids);
    Ok(())
}

/// Ids of the prompt and of the answer, or why there are none.
type Ids = Result<(Vec<i32>, Vec<i32>), String>;

fn told(error: Error) -> String {
    error.to_string()
}

fn answered(prompt_ids: Vec<i32>, response_ids: Vec<i32>) -> Ids {
    match response_ids.is_empty() {
        true => Err("the answer is no token".to_owned()),
        false => Ok((prompt_ids, response_ids)),
    }
}

fn as_rendered(chat: &Chat, prompt: &str, response: &str) -> Ids {
    let encode = |text: &str| chat.tokenizer.encode(text).map_err(told);
    let response_ids = without_tail(chat, encode(response)?).map_err(told)?;
    answered(encode(prompt)?, response_ids)
}

/// Renders the request alone and with its answer; the answer is the difference.
fn by_template(chat: &Chat, row: &Row) -> Ids {
    let read = |text: &str| serde_json::from_str::<Value>(text).unwrap_or_default();
    let list = |text: &str| match read(text) {
        Value::Array(items) => items,
        _ => Vec::new(),
    };
    let mut messages = list(&row.turn.messages);
    let tools = row.turn.tools.as_deref().map(list);
    let extra = Map::new();
    let render = |messages: &[Value], add_generation_prompt: bool| {
        let tools = tools.as_deref();
        let rendering = Rendering { messages, tools, add_generation_prompt, extra: &extra };
        chat.prompt_ids(&rendering).map_err(told)
    };
    let prompt_ids = render(&messages, true)?;
    messages.push(read(&row.turn.response));
    let whole = render(&messages, false)?;
    let Some(response_ids) = whole.strip_prefix(prompt_ids.as_slice()) else {
        return Err("with the answer, the template writes the request in another way".to_owned());
    };
    let response_ids = without_tail(chat, response_ids.to_vec()).map_err(told)?;
    answered(prompt_ids, response_ids)
}

/// Cuts the white space that a template puts behind the end token: no model
/// samples it.
fn without_tail(chat: &Chat, mut ids: Vec<i32>) -> Result<Vec<i32>, Error> {
    let end = ids.iter().rposition(|id| chat.tokenizer.is_special(*id));
    if let Some(end) = end
        && chat.tokenizer.decode(&ids[end + 1..], false)?.trim().is_empty()
    {
        ids.truncate(end + 1);
    }
    Ok(ids)
}

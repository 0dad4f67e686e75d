//! Invariants of the columns that `serve` writes.

use serde_json::Value;

use super::{Fault, Rule, bad_log_prob, bad_temperature};
use crate::trajectory::Turn;
use crate::trajectory::words::{NextStateKind, Status, TokenSource, WeightVersionSource};

pub(super) const RULES: &[Rule] = &[
    Rule { says: "a turn has an id", check: turn_id },
    Rule { says: "turns count from 1, and only turn 1 has no parent", check: position },
    Rule { says: "a session's confidence is between 0 and 1", check: confidence },
    Rule { says: "an answer ends after its request came", check: times },
    Rule { says: "a weight version has a source", check: weight_version },
    Rule { says: "sampling settings are numbers in their ranges", check: sampling },
    Rule { says: "messages are a list of objects with a role", check: messages },
    Rule { says: "tools are a list of objects", check: tools },
    Rule { says: "the response is an object of the assistant", check: response },
    Rule { says: "a complete answer has a finish reason, and is not cut", check: finish_reason },
    Rule { says: "token ids are there when they have a source, and not negative", check: ids },
    Rule { says: "log-probs match the response ids", check: log_probs },
    Rule { says: "a row that cannot be trained on says why", check: untrainable },
    Rule { says: "the next state goes with its kind", check: next_state },
    Rule { says: "an explicit reward is between -1 and 1", check: reward_explicit },
];

fn turn_id(turn: &Turn) -> Vec<Fault> {
    unless(!turn.turn_id.is_empty(), "turn_id", || "empty".to_owned())
}

fn position(turn: &Turn) -> Vec<Fault> {
    let mut faults = Vec::new();
    if turn.turn == 0 {
        faults.push(Fault::new("turn", "0, but turns count from 1"));
    }
    match (turn.turn, &turn.parent_turn_id) {
        (1, Some(_)) => faults.push(Fault::new("parent_turn_id", "turn 1 has a parent")),
        (2.., None) => faults.push(Fault::new("parent_turn_id", "null in a later turn than 1")),
        _ => {}
    }
    if turn.parent_turn_id.as_ref() == Some(&turn.turn_id) {
        faults.push(Fault::new("parent_turn_id", "the turn is its own parent"));
    }
    faults
}

fn confidence(turn: &Turn) -> Vec<Fault> {
    unless((0.0..=1.0).contains(&turn.session_confidence), "session_confidence", || {
        format!("{}, wanted 0 to 1", turn.session_confidence)
    })
}

fn times(turn: &Turn) -> Vec<Fault> {
    unless(turn.created_at <= turn.finished_at, "finished_at", || {
        "earlier than created_at".to_owned()
    })
}

fn weight_version(turn: &Turn) -> Vec<Fault> {
    let known = turn.weight_version_source != WeightVersionSource::None;
    unless(known == turn.weight_version.is_some(), "weight_version_source", || {
        let version = turn.weight_version.as_deref().unwrap_or("null");
        format!("`{}` with weight_version {version}", turn.weight_version_source)
    })
}

fn sampling(turn: &Turn) -> Vec<Fault> {
    let sampling = &turn.sampling;
    let mut faults = Vec::new();
    // 0 is greedy.
    if let Some(value) = sampling.temperature.filter(|value| *value != 0.0)
        && bad_temperature(value)
    {
        faults.push(Fault::new("sampling", format!("temperature is {value:?}")));
    }
    for (name, value) in [("top_p", sampling.top_p), ("min_p", sampling.min_p)] {
        if let Some(value) = value.filter(|value| !(0.0..=1.0).contains(value)) {
            faults.push(Fault::new("sampling", format!("{name} is {value}")));
        }
    }
    faults
}

fn messages(turn: &Turn) -> Vec<Fault> {
    list_of_messages("messages", &turn.messages)
}

fn tools(turn: &Turn) -> Vec<Fault> {
    let Some(tools) = &turn.tools else { return Vec::new() };
    match serde_json::from_str::<Value>(tools) {
        Ok(Value::Array(tools)) if tools.iter().all(Value::is_object) => Vec::new(),
        Ok(_) => vec![Fault::new("tools", "no list of objects")],
        Err(error) => vec![Fault::new("tools", format!("no JSON: {error}"))],
    }
}

fn response(turn: &Turn) -> Vec<Fault> {
    match serde_json::from_str::<Value>(&turn.response) {
        Ok(message) if message["role"] == "assistant" => Vec::new(),
        Ok(_) => vec![Fault::new("response", "no object with role `assistant`")],
        Err(error) => vec![Fault::new("response", format!("no JSON: {error}"))],
    }
}

fn finish_reason(turn: &Turn) -> Vec<Fault> {
    let what = match (turn.status, turn.finish_reason.as_deref()) {
        (Status::Complete, None) => "null in a complete answer",
        (Status::Complete, Some("length")) => "`length` in a complete answer",
        _ => return Vec::new(),
    };
    vec![Fault::new("finish_reason", what)]
}

fn ids(turn: &Turn) -> Vec<Fault> {
    let mut faults = Vec::new();
    let sourced = turn.token_source != TokenSource::None;
    if sourced != turn.response_ids.is_some() {
        let there = if turn.response_ids.is_some() { "there" } else { "null" };
        let what = format!("`{}`, but response_ids are {there}", turn.token_source);
        faults.push(Fault::new("token_source", what));
    }
    for (column, ids) in [("prompt_ids", &turn.prompt_ids), ("response_ids", &turn.response_ids)] {
        if let Some(id) = ids.iter().flatten().find(|id| **id < 0) {
            faults.push(Fault::new(column, format!("id {id} is negative")));
        }
    }
    faults
}

fn log_probs(turn: &Turn) -> Vec<Fault> {
    let column = "rollout_log_probs";
    let Some(log_probs) = &turn.rollout_log_probs else { return Vec::new() };
    let Some(ids) = &turn.response_ids else {
        return vec![Fault::new(column, "there without response_ids")];
    };
    let mut faults = Vec::new();
    if ids.len() != log_probs.len() {
        let what = format!("{} values for {} response ids", log_probs.len(), ids.len());
        faults.push(Fault::new(column, what));
    }
    let gap = log_probs.iter().position(Option::is_none);
    if let Some(gap) = gap
        && gap + 1 != log_probs.len()
    {
        faults.push(Fault::new(column, format!("null at {gap}; only the last may be null")));
    }
    if let Some(value) = log_probs.iter().flatten().find(|value| bad_log_prob(**value)) {
        faults.push(Fault::new(column, format!("{value} is no log-prob")));
    }
    faults
}

fn untrainable(turn: &Turn) -> Vec<Fault> {
    let why = if turn.response_ids.is_none() || turn.prompt_ids.is_none() {
        "token ids are null"
    } else if turn.prompt_ids.as_ref().is_some_and(Vec::is_empty) {
        "prompt_ids are empty"
    } else if turn.token_source == TokenSource::Retokenized {
        "token ids were made again from the text"
    } else if matches!(turn.status, Status::Failed | Status::Aborted) {
        "the answer did not end by itself"
    } else {
        return Vec::new();
    };
    unless(turn.untrainable_reason.is_some(), "untrainable_reason", || {
        format!("null, though {why}")
    })
}

fn next_state(turn: &Turn) -> Vec<Fault> {
    let wanted = matches!(turn.next_state_kind, NextStateKind::User | NextStateKind::Tool);
    match &turn.next_state {
        Some(_) if !wanted => {
            vec![Fault::new("next_state", format!("there, of kind `{}`", turn.next_state_kind))]
        }
        None if wanted => {
            vec![Fault::new("next_state", format!("null, of kind `{}`", turn.next_state_kind))]
        }
        Some(messages) => list_of_messages("next_state", messages),
        None => Vec::new(),
    }
}

fn reward_explicit(turn: &Turn) -> Vec<Fault> {
    let reward = turn.reward_explicit.unwrap_or_default();
    unless((-1.0..=1.0).contains(&reward), "reward_explicit", || {
        format!("{reward}, wanted -1 to 1")
    })
}

/// Compares the engine's own count with the ids. No rule of its own: a server
/// counts all choices of a request together.
pub(super) fn token_count(turn: &Turn) -> Option<Fault> {
    let (count, ids) = (turn.usage_completion_tokens?, turn.response_ids.as_ref()?);
    let differs = turn.token_source == TokenSource::Engine && count as usize != ids.len();
    // A row that is set aside for it says so itself.
    (differs && turn.untrainable_reason.is_none()).then(|| {
        Fault::new("usage_completion_tokens", format!("{count}, with {} response ids", ids.len()))
    })
}

fn list_of_messages(column: &'static str, text: &str) -> Vec<Fault> {
    let messages = match serde_json::from_str::<Value>(text) {
        Ok(Value::Array(messages)) => messages,
        Ok(_) => return vec![Fault::new(column, "no list")],
        Err(error) => return vec![Fault::new(column, format!("no JSON: {error}"))],
    };
    if messages.is_empty() {
        return vec![Fault::new(column, "an empty list")];
    }
    let odd = messages.iter().position(|message| !message["role"].is_string());
    let fault = odd.map(|odd| Fault::new(column, format!("message {odd} has no role")));
    fault.into_iter().collect()
}

fn unless(sound: bool, column: &'static str, what: impl FnOnce() -> String) -> Vec<Fault> {
    match sound {
        true => Vec::new(),
        false => vec![Fault::new(column, what())],
    }
}

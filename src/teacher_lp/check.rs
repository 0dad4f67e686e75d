//! Whether scores are what was asked for. Nothing is mended: what does not fit
//! is no signal at all.

use super::{ScoreRequest, Scores};

/// Slack for a log-prob that rounding lifted above 0.
const ABOVE_ZERO: f32 = 1e-4;
/// Most by which a token's own log-prob may differ from the same in the top-k
/// list: both come from the same logits.
const SAME: f32 = 1e-2;

/// Holds scores against their request and the number of ids there are.
pub fn checked(
    scores: Scores,
    request: &ScoreRequest,
    vocabulary: usize,
) -> Result<Scores, String> {
    let response = request.ids.get(request.start..).unwrap_or_default();
    let (rows, k) = (response.len(), request.top_k);
    counted(scores.log_probs.len(), rows, "log-probs")?;
    counted(scores.top_ids.len(), rows * k, "top-k ids")?;
    counted(scores.top_log_probs.len(), rows * k, "top-k log-probs")?;
    counted(scores.chosen_log_probs.len(), request.chosen.len(), "log-probs of the student's ids")?;
    log_probs(&scores.log_probs, "log-prob")?;
    log_probs(&scores.top_log_probs, "top-k log-prob")?;
    log_probs(&scores.chosen_log_probs, "log-prob of the student's id")?;
    let lists = scores.top_ids.chunks(k.max(1)).zip(scores.top_log_probs.chunks(k.max(1)));
    for (position, ((ids, values), own)) in lists.zip(response).enumerate() {
        list(ids, values, vocabulary).map_err(|what| format!("{what} at token {position}"))?;
        if !agrees((*own, scores.log_probs[position]), ids, values) {
            let value = scores.log_probs[position];
            return Err(format!("log-prob {position} is {value}, its top-k list says otherwise"));
        }
    }
    Ok(scores)
}

fn counted(found: usize, wanted: usize, what: &str) -> Result<(), String> {
    match found == wanted {
        true => Ok(()),
        // The tokens of a response are what most people will count.
        false if what == "log-probs" => Err(format!("{found} log-probs for {wanted} tokens")),
        false => Err(format!("{found} {what}, wanted {wanted}")),
    }
}

fn log_probs(values: &[f32], what: &str) -> Result<(), String> {
    let is_none = |value: &f32| !value.is_finite() || *value > ABOVE_ZERO;
    match values.iter().position(is_none) {
        Some(position) => Err(format!("{what} {position} is {}", values[position])),
        None => Ok(()),
    }
}

/// The likeliest tokens of one position: ids of the vocabulary, each once,
/// likeliest first.
fn list(ids: &[i32], values: &[f32], vocabulary: usize) -> Result<(), String> {
    for (place, id) in ids.iter().enumerate() {
        if usize::try_from(*id).map_or(true, |id| id >= vocabulary) {
            return Err(format!("top-k id {id} is outside the vocabulary of {vocabulary}"));
        }
        if ids[..place].contains(id) {
            return Err(format!("top-k id {id} is there twice"));
        }
    }
    match values.is_sorted_by(|left, right| left >= right) {
        true => Ok(()),
        false => Err("the top-k is not in order".to_owned()),
    }
}

/// Whether a token's own log-prob fits the list of the likeliest: the same if it
/// is there, else below all.
fn agrees((own, value): (i32, f32), ids: &[i32], values: &[f32]) -> bool {
    match (ids.iter().position(|id| *id == own), values.last()) {
        (Some(place), _) => (values[place] - value).abs() <= SAME,
        (None, Some(last)) => value <= last + SAME,
        (None, None) => true,
    }
}

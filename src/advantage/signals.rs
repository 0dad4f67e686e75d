//! What one row offers a learner: its reward, its usable teacher, its kind and
//! the tokens that may be trained.

use super::{Refusal, Shaped};
use crate::trajectory::Turn;
use crate::trajectory::lint::bad_log_prob;
use crate::trajectory::words::{NextStateKind, RewardSource, SampleKind, Status, TokenSource};

/// The reason of a promoted turn that has nothing to learn from.
pub const NO_SIGNAL_PROMOTED: &str = "promoted_without_signal";

/// The signals of one row.
#[derive(Debug, Clone, PartialEq)]
pub struct Signals {
    /// The reward; `None` if nobody gave one.
    pub reward: Option<f32>,
    /// Where the reward came from.
    pub reward_source: Option<RewardSource>,
    /// Index of the first usable candidate in `teacher_log_probs`.
    pub teacher: Option<usize>,
    /// Which signals there are.
    pub kind: SampleKind,
    /// Why there are none, why no token may be trained, or why a candidate was
    /// passed over.
    pub reason: Option<String>,
    /// 1 for each response token that may be trained; `None` without ids.
    pub mask: Option<Vec<i8>>,
}

impl Signals {
    /// Returns the log-probs of the usable candidate.
    pub fn teacher_log_probs<'a>(&self, turn: &'a Turn) -> Option<&'a [f32]> {
        turn.teacher_log_probs.as_ref()?.get(self.teacher?)?.as_deref()
    }

    /// Returns whether any token may be trained.
    pub fn trainable(&self) -> bool {
        self.mask.as_ref().is_some_and(|mask| mask.contains(&1))
    }
}

/// Finds the signals of a row, or says by which column it contradicts itself.
pub fn resolve(turn: &Turn) -> Result<Signals, Refusal> {
    resolve_shaped(turn, None)
}

/// Finds them likewise, with a reward that may be made of several.
pub fn resolve_shaped(turn: &Turn, shaped: Option<Shaped>) -> Result<Signals, Refusal> {
    check_ids(turn)?;
    let untrainable = untrainable(turn);
    let mask = structural_mask(turn);
    check_log_probs(turn, untrainable.is_none())?;
    let (reward, reward_source) = match shaped {
        Some(shaped) => shaped_reward(turn, shaped)?.unzip(),
        None => reward(turn)?.unzip(),
    };
    let (teacher, passed_over) = usable_candidate(turn, untrainable.is_none())?;
    let kind = match (teacher.is_some(), reward.is_some_and(|reward| reward != 0.0)) {
        (true, true) => SampleKind::OpdRl,
        (true, false) => SampleKind::Opd,
        (false, true) => SampleKind::Rl,
        (false, false) => SampleKind::None,
    };
    let reason = untrainable
        .or_else(|| (kind == SampleKind::None).then(|| silence(turn, reward_source)))
        .or(passed_over);
    Ok(Signals { reward, reward_source, teacher, kind, reason, mask })
}

/// Returns the log-probs of the usable candidate of a row that has been noted: its kind
/// tells whether there is one.
pub(super) fn noted_teacher(turn: &Turn) -> Option<&[f32]> {
    if !matches!(turn.sample_kind, Some(SampleKind::Opd | SampleKind::OpdRl)) {
        return None;
    }
    let candidates = turn.teacher_log_probs.as_ref()?;
    let mut spoken = candidates.iter().flatten().filter(|log_probs| !log_probs.is_empty());
    match (spoken.next(), spoken.next()) {
        // It must be this one: its numbers need not be checked again.
        (only, None) => only.map(Vec::as_slice),
        _ => candidates.get(usable_candidate(turn, true).ok()?.0?)?.as_deref(),
    }
}

/// Returns the reward of a row: what a person or program stated, else the
/// judge's score.
pub fn reward(turn: &Turn) -> Result<Option<(f32, RewardSource)>, Refusal> {
    let (column, value, source) = match (turn.reward_explicit, turn.score) {
        (Some(value), _) => ("reward_explicit", value, RewardSource::Explicit),
        (None, Some(value)) => ("score", value, RewardSource::Judged),
        (None, None) => return Ok(None),
    };
    check_reward(column, value)?;
    Ok(Some((value, source)))
}

/// Adds what there is of each source, weighted. One source alone is the reward's only if
/// the reward is its very value.
fn shaped_reward(
    turn: &Turn,
    Shaped { weights, outcome }: Shaped,
) -> Result<Option<(f32, RewardSource)>, Refusal> {
    let (mut sum, mut found) = (0.0, Vec::new());
    for (column, value, weight, source) in [
        ("reward_explicit", turn.reward_explicit, weights.explicit, RewardSource::Explicit),
        ("score", turn.score, weights.judged, RewardSource::Judged),
        ("the outcome of its session", outcome, weights.outcome, RewardSource::Outcome),
    ] {
        let Some(value) = value.filter(|_| weight != 0.0) else { continue };
        check_reward(column, value)?;
        sum += f64::from(weight) * f64::from(value);
        found.push((weight, source));
    }
    let source = match found[..] {
        [] => return Ok(None),
        [(_, RewardSource::Outcome)] => RewardSource::Outcome,
        [(1.0, source)] => source,
        _ => RewardSource::Mixed,
    };
    // Weights that add up to 1 may do so but for a rounding error.
    Ok(Some(((sum as f32).clamp(-1.0, 1.0), source)))
}

fn check_reward(column: &'static str, value: f32) -> Result<(), Refusal> {
    match (-1.0..=1.0).contains(&value) {
        true => Ok(()),
        false if value.is_finite() => Err(Refusal::RewardRange { column, value }),
        false => Err(Refusal::Reward { column, value }),
    }
}

/// Marks the response tokens that may be trained, whatever the signals: all of
/// a row whose ids are those that were sampled, none of any other.
pub fn structural_mask(turn: &Turn) -> Option<Vec<i8>> {
    let allowed = i8::from(untrainable(turn).is_none());
    turn.response_ids.as_ref().map(|ids| vec![allowed; ids.len()])
}

/// Returns why no token of the row may be trained.
pub fn untrainable(turn: &Turn) -> Option<String> {
    if let Some(reason) = &turn.untrainable_reason {
        return Some(reason.clone());
    }
    let reason = match (turn.status, turn.token_source) {
        (Status::Failed, _) => "failed",
        // Half an answer that nobody let finish.
        (Status::Aborted, _) => "aborted",
        (_, TokenSource::Retokenized) => "retokenized",
        (_, TokenSource::None) => "no_token_ids",
        (_, TokenSource::Engine) => match (&turn.prompt_ids, &turn.response_ids) {
            (Some(prompt), Some(response)) if !prompt.is_empty() && !response.is_empty() => {
                return None;
            }
            (Some(prompt), Some(_)) if !prompt.is_empty() => "empty_response",
            _ => "no_token_ids",
        },
    };
    Some(reason.to_owned())
}

/// Says why a row has neither a reward nor a teacher.
fn silence(turn: &Turn, reward: Option<RewardSource>) -> String {
    let mut reasons = vec![match reward {
        Some(RewardSource::Explicit) => "stated_neutral",
        Some(RewardSource::Judged) => "judged_neutral",
        Some(RewardSource::Outcome) => "neutral_outcome",
        Some(RewardSource::Mixed) => "neutral_in_sum",
        None if turn.next_state_kind == NextStateKind::None => "no_next_state",
        None if turn.judge_error.is_some() => "judge_failed",
        None if turn.votes.is_some() => "no_valid_vote",
        None => "not_judged",
    }];
    let hinted = turn.hints.as_ref().is_some_and(|hints| !hints.is_empty());
    match hinted {
        true if turn.teacher_log_probs.is_none() && turn.teacher_error.is_none() => {
            reasons.push("no_teacher");
        }
        true => reasons.push("teacher_failed"),
        false if turn.hint_error.is_some() => reasons.push("hint_failed"),
        false => reasons.push("no_hint"),
    }
    reasons.join(", ")
}

fn check_ids(turn: &Turn) -> Result<(), Refusal> {
    for (column, ids) in [("prompt_ids", &turn.prompt_ids), ("response_ids", &turn.response_ids)] {
        let Some(ids) = ids else { continue };
        // Prompts are long: all at once, and which one it is only if there is one.
        if ids.iter().fold(0, |all, id| all | id) >= 0 {
            continue;
        }
        if let Some((token, id)) = ids.iter().enumerate().find(|(_, id)| **id < 0) {
            return Err(Refusal::NegativeId { column, token, id: *id });
        }
    }
    Ok(())
}

fn check_log_probs(turn: &Turn, trainable: bool) -> Result<(), Refusal> {
    let Some(log_probs) = &turn.rollout_log_probs else { return Ok(()) };
    let column = "rollout_log_probs";
    check_length(column, log_probs.len(), responses(turn), "response ids")?;
    match odd(column, log_probs.iter().copied()) {
        Some(refusal) if trainable => Err(refusal),
        _ => Ok(()),
    }
}

/// Finds the first number that is no log-prob.
fn odd(column: &str, log_probs: impl Iterator<Item = Option<f32>> + Clone) -> Option<Refusal> {
    let bad = |value: Option<f32>| value.is_some_and(bad_log_prob);
    if !log_probs.clone().fold(false, |any, value| any | bad(value)) {
        return None;
    }
    let found =
        |(token, value): (usize, Option<f32>)| Some((token, value.filter(|it| bad_log_prob(*it))?));
    let (token, value) = log_probs.enumerate().find_map(found)?;
    let column = column.to_owned();
    Some(match value.is_finite() {
        true => Refusal::AboveZero { column, token, value },
        false => Refusal::NotFinite { column, token },
    })
}

/// Returns the first candidate that has a log-prob for every response token, and
/// which one before it has numbers that are none. If no other can take that one's
/// place, a row that may be trained contradicts itself.
fn usable_candidate(
    turn: &Turn,
    trainable: bool,
) -> Result<(Option<usize>, Option<String>), Refusal> {
    let Some(candidates) = &turn.teacher_log_probs else { return Ok((None, None)) };
    if let Some(hints) = &turn.hints {
        let column = "teacher_log_probs";
        check_length(column, candidates.len(), hints.len(), "hints")?;
    }
    let (mut usable, mut broken) = (None, None);
    for (candidate, log_probs) in candidates.iter().enumerate() {
        let Some(log_probs) = log_probs else { continue };
        let column = format!("teacher_log_probs[{candidate}]");
        check_length(&column, log_probs.len(), responses(turn), "response ids")?;
        match odd(&column, log_probs.iter().copied().map(Some)) {
            Some(refusal) if usable.is_none() => broken = broken.or(Some(refusal)),
            None if !log_probs.is_empty() => usable = usable.or(Some(candidate)),
            _ => {}
        }
    }
    match (usable, broken) {
        (None, Some(refusal)) if trainable => Err(refusal),
        (Some(teacher), Some(refusal)) => {
            Ok((usable, Some(format!("{refusal}: candidate {teacher} teaches"))))
        }
        _ => Ok((usable, None)),
    }
}

fn responses(turn: &Turn) -> usize {
    turn.response_ids.as_ref().map_or(0, Vec::len)
}

fn check_length(
    column: &str,
    found: usize,
    wanted: usize,
    of: &'static str,
) -> Result<(), Refusal> {
    match found == wanted {
        true => Ok(()),
        false => Err(Refusal::Length { column: column.to_owned(), found, wanted, of }),
    }
}

//! The at-least-one rule: a session that so far taught nothing keeps its first
//! neutral turn.

use std::collections::HashMap;
use std::collections::HashSet;

use super::signals::resolve_shaped;
use super::{Shaped, Signals};
use crate::trajectory::Turn;
use crate::trajectory::words::SampleKind;

/// What the rule has to know of a turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// The session.
    pub session_id: String,
    /// The turn's place in it.
    pub turn: u32,
    /// When the request came, for turns of one place (branches, choices).
    pub created_at: i64,
    /// The turn's own id.
    pub turn_id: String,
    /// Whether the row has any signal on tokens that may be trained.
    pub signal: bool,
    /// Whether the judge said 0 about tokens that may be trained, and the reward is 0.
    pub judged_neutral: bool,
}

/// Reads a turn's outcome. A row that contradicts itself has no signal.
pub fn outcome(turn: &Turn, shaped: Option<Shaped>) -> Outcome {
    Outcome::of(turn, resolve_shaped(turn, shaped).ok().as_ref(), shaped)
}

impl Outcome {
    /// Reads the outcome of a turn whose signals have been found: none if it contradicts
    /// itself.
    pub fn of(turn: &Turn, signals: Option<&Signals>, shaped: Option<Shaped>) -> Self {
        let signals = signals.filter(|signals| signals.trainable());
        Self {
            session_id: turn.session_id.clone(),
            turn: turn.turn,
            created_at: turn.created_at.0,
            turn_id: turn.turn_id.clone(),
            signal: signals.is_some_and(|signals| signals.kind != SampleKind::None),
            judged_neutral: signals
                .is_some_and(|signals| signals.reward == Some(0.0) && judged_zero(turn, shaped)),
        }
    }
}

/// Whether the judge said 0, and has a say in the reward.
fn judged_zero(turn: &Turn, shaped: Option<Shaped>) -> bool {
    let heard = match shaped {
        Some(shaped) => shaped.weights.judged != 0.0,
        // What somebody stated takes the place of the judge's word.
        None => turn.reward_explicit.is_none(),
    };
    heard && turn.score == Some(0.0)
}

/// Returns the ids of the promoted turns: per session the first turn judged 0,
/// if no earlier turn had any signal. Never more than one of a session. Where rewards
/// are sums, one judged 0 of which the other sources say nothing, or cancel out.
pub fn promoted(outcomes: &[Outcome]) -> HashSet<String> {
    let mut sessions = HashMap::<&str, Vec<&Outcome>>::new();
    for outcome in outcomes {
        sessions.entry(&outcome.session_id).or_default().push(outcome);
    }
    let first = |turns: &mut Vec<&Outcome>| {
        turns.sort_by_key(|turn| (turn.turn, turn.created_at, &turn.turn_id));
        turns
            .iter()
            // A neutral turn with a hint has a signal and is still the first.
            .find(|turn| turn.judged_neutral || turn.signal)
            .filter(|turn| turn.judged_neutral)
            .map(|turn| turn.turn_id.clone())
    };
    sessions.values_mut().filter_map(first).collect()
}

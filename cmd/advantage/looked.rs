//! What is kept of each row until all are known.

use oclaw::advantage::{Member, Outcome, Shaped, Signals};
use oclaw::trajectory::Turn;

use super::peers::Peers;

/// The columns that the signals of a row, its group and its session are read from.
pub(super) const READS: &[&str] = &[
    "session_id",
    "turn",
    "turn_id",
    "parent_turn_id",
    "branch",
    "choice",
    "created_at",
    "status",
    "prompt_ids",
    "response_ids",
    "rollout_log_probs",
    "token_source",
    "untrainable_reason",
    "next_state_kind",
    "reward_explicit",
    "score",
    "votes",
    "judge_error",
    "hints",
    "hint_error",
    "teacher_log_probs",
    "teacher_error",
];

/// The light ones, from which the others can be supposed.
pub(super) const PEEKS: &[&str] = &[
    "session_id",
    "turn",
    "turn_id",
    "parent_turn_id",
    "branch",
    "choice",
    "created_at",
    "status",
    "token_source",
    "untrainable_reason",
    "reward_explicit",
    "score",
    "teacher",
    "teacher_error",
];

/// Supposes the lists of a turn that has only [`PEEKS`]: that they are there, and hold
/// what they should. A table that was made by the stages is so, row for row but for rows
/// that contradict themselves; which is found out when the lists are read.
pub(super) fn supposed(turn: Turn) -> Turn {
    let candidates = match (&turn.teacher_error, &turn.teacher) {
        (Some(errors), _) => {
            Some(errors.iter().map(|error| error.is_none().then(|| vec![0.0])).collect())
        }
        (None, Some(_)) => Some(vec![Some(vec![0.0])]),
        (None, None) => None,
    };
    let one = || Some(vec![0]);
    Turn { prompt_ids: one(), response_ids: one(), teacher_log_probs: candidates, ..turn }
}

/// What is kept of each row until all are known.
pub(super) struct Looked {
    /// Whether somebody stated a reward.
    pub(super) stated: bool,
    outcome: Outcome,
    member: Option<Member>,
}

impl Looked {
    /// Looks at a row whose signals have been found: none if it contradicts itself. Its
    /// group and what was expected of it are not in the turn.
    pub(super) fn of(
        turn: &Turn,
        signals: Option<&Signals>,
        (shaped, grouped): (Option<Shaped>, bool),
    ) -> Self {
        Self {
            stated: turn.reward_explicit.is_some(),
            outcome: Outcome::of(turn, signals, shaped),
            member: grouped.then(|| Member::of(turn, signals)),
        }
    }
}

/// Returns the outcomes of the rows, and the members of groups with their places.
pub(super) fn split(looked: Vec<Looked>, peers: &Peers) -> (Vec<Outcome>, Vec<Member>) {
    let (mut outcomes, mut members) = (Vec::new(), Vec::new());
    for (row, looked) in looked.into_iter().enumerate() {
        outcomes.push(looked.outcome);
        let placed = |member| Member { group: peers.group(row), value: peers.value(row), ..member };
        members.extend(looked.member.map(placed));
    }
    (outcomes, members)
}

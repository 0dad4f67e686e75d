//! What the first pass over a table keeps of each row.

use oclaw::advantage::{self, Member, Outcome, Shaped};
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

/// What is kept of each row until all are known.
pub(super) struct Looked {
    /// Whether somebody stated a reward.
    pub(super) stated: bool,
    outcome: Outcome,
    member: Option<Member>,
}

impl Looked {
    /// Looks at a row. Its group and what was expected of it are not in the turn.
    pub(super) fn of(turn: &Turn, shaped: Option<Shaped>, grouped: bool) -> Self {
        Self {
            stated: turn.reward_explicit.is_some(),
            outcome: advantage::outcome(turn, shaped),
            member: grouped.then(|| advantage::member(turn, shaped, None, 0.0)),
        }
    }
}

/// Returns the outcomes of all rows, and the members of groups with their places.
pub(super) fn split(looked: Vec<Looked>, peers: &Peers) -> (Vec<Outcome>, Vec<Member>) {
    let (mut outcomes, mut members) = (Vec::new(), Vec::new());
    for (row, looked) in looked.into_iter().enumerate() {
        outcomes.push(looked.outcome);
        let placed = |member| Member { group: peers.group(row), value: peers.value(row), ..member };
        members.extend(looked.member.map(placed));
    }
    (outcomes, members)
}

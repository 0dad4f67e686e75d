//! What the first pass over a table keeps of each row.

use std::collections::HashMap;

use oclaw::advantage::{self, Member, Outcome, Shaped};
use oclaw::trajectory::Turn;

use super::peers::Peers;

/// The columns that the signals of a row, its group and its session are read from, beside
/// [`LOOKS`].
pub(super) const READS: &[&str] = &[
    "session_id",
    "turn",
    "turn_id",
    "parent_turn_id",
    "branch",
    "choice",
    "created_at",
    "status",
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

/// What is looked at once: prompts are the heaviest column of all.
pub(super) const LOOKS: &[&str] = &["prompt_ids"];

/// What is wrong with a prompt, of which a note asks no more.
#[derive(Debug, Clone, Copy)]
pub(super) enum OddPrompt {
    /// It is not known.
    Unknown,
    /// It has no ids.
    Empty,
    /// It has an id below 0 at this place.
    Negative(usize, i32),
}

impl OddPrompt {
    /// Looks at a prompt. A sound one gives nothing.
    fn of(prompt: Option<&[i32]>) -> Option<Self> {
        let Some(ids) = prompt else { return Some(Self::Unknown) };
        if ids.is_empty() {
            return Some(Self::Empty);
        }
        // All at once, and which one it is only if there is one.
        if ids.iter().fold(0, |all, id| all | id) >= 0 {
            return None;
        }
        let place = ids.iter().position(|id| *id < 0)?;
        Some(Self::Negative(place, ids[place]))
    }
}

/// Returns a prompt that a note takes for the one that was looked at.
pub(super) fn stand_in(odd: Option<&OddPrompt>) -> Option<Vec<i32>> {
    match odd {
        None => Some(vec![0]),
        Some(OddPrompt::Unknown) => None,
        Some(OddPrompt::Empty) => Some(Vec::new()),
        Some(OddPrompt::Negative(place, id)) => {
            let mut ids = vec![0; *place];
            ids.push(*id);
            Some(ids)
        }
    }
}

/// What is kept of each row until all are known.
pub(super) struct Looked {
    /// Whether somebody stated a reward.
    pub(super) stated: bool,
    outcome: Outcome,
    member: Option<Member>,
    prompt: Option<OddPrompt>,
}

impl Looked {
    /// Looks at a row. Its group and what was expected of it are not in the turn.
    pub(super) fn of(turn: &Turn, shaped: Option<Shaped>, grouped: bool) -> Self {
        Self {
            stated: turn.reward_explicit.is_some(),
            outcome: advantage::outcome(turn, shaped),
            member: grouped.then(|| advantage::member(turn, shaped, None, 0.0)),
            prompt: OddPrompt::of(turn.prompt_ids.as_deref()),
        }
    }
}

/// The rows, by what is to be known of all of them.
pub(super) struct Rows {
    pub(super) outcomes: Vec<Outcome>,
    /// The members of groups, with their places.
    pub(super) members: Vec<Member>,
    /// By turn.
    pub(super) prompts: HashMap<String, OddPrompt>,
}

pub(super) fn split(looked: Vec<Looked>, peers: &Peers) -> Rows {
    let (mut outcomes, mut members) = (Vec::new(), Vec::new());
    let mut prompts = HashMap::new();
    for (row, looked) in looked.into_iter().enumerate() {
        prompts.extend(looked.prompt.map(|odd| (looked.outcome.turn_id.clone(), odd)));
        outcomes.push(looked.outcome);
        let placed = |member| Member { group: peers.group(row), value: peers.value(row), ..member };
        members.extend(looked.member.map(placed));
    }
    Rows { outcomes, members, prompts }
}

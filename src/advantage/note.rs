//! Fills the advantage columns of one row.

use super::signals::{NO_SIGNAL_PROMOTED, resolve};
use super::{Evidence, Method, advantages, grpo};
use crate::trajectory::Turn;
use crate::trajectory::words::SampleKind;

/// Returns the turn with every column of this stage filled. `promoted` tells
/// whether the at-least-one rule keeps it.
///
/// `advantages` takes the server's log-probs for the old policy's. A row in
/// which a token has none (servers give none for the end token) gets no
/// `advantages` here: `train` has log-probs of its own.
pub fn note(mut turn: Turn, promoted: bool, method: &Method) -> Turn {
    let signals = match resolve(&turn) {
        Ok(signals) => signals,
        Err(refusal) => return refuse(turn, refusal.to_string()),
    };
    let silent = signals.kind == SampleKind::None;
    let without_signal = promoted && silent;
    let mask = signals.mask.clone().map(|mask| match silent {
        true => vec![0; mask.len()],
        false => mask,
    });
    let trainable = mask.as_ref().is_some_and(|mask| mask.contains(&1));
    let old = behaviour(&turn);
    turn.advantages = old.filter(|_| trainable).and_then(|old| {
        let evidence = Evidence {
            reward: signals.reward,
            teacher: signals.teacher_log_probs(&turn),
            old: &old,
            promoted,
        };
        advantages(method, &evidence)
    });
    turn.rl_advantages = match (&mask, signals.reward) {
        // A taught row without a reward has a reward term of exactly 0.
        (Some(mask), reward) if !silent => Some(grpo(reward.unwrap_or(0.0), mask.len())),
        (Some(mask), Some(reward)) => Some(grpo(reward, mask.len())),
        _ => None,
    };
    turn.reward = signals.reward;
    turn.reward_source = signals.reward_source;
    turn.sample_kind = Some(signals.kind);
    turn.sample_reason = match without_signal && signals.trainable() {
        true => Some(NO_SIGNAL_PROMOTED.to_owned()),
        false => signals.reason,
    };
    turn.promoted = Some(promoted);
    turn.loss_mask = mask;
    turn.advantage_error = None;
    turn
}

/// Returns the server's log-probs, if every token has one.
fn behaviour(turn: &Turn) -> Option<Vec<f32>> {
    turn.rollout_log_probs.as_ref()?.iter().copied().collect()
}

fn refuse(mut turn: Turn, error: String) -> Turn {
    turn.reward = None;
    turn.reward_source = None;
    turn.sample_kind = Some(SampleKind::None);
    turn.sample_reason = Some("refused".to_owned());
    turn.promoted = Some(false);
    turn.loss_mask = turn.response_ids.as_ref().map(|ids| vec![0; ids.len()]);
    turn.rl_advantages = None;
    turn.advantages = None;
    turn.advantage_error = Some(error);
    turn
}

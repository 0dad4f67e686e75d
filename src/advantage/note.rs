//! Fills the advantage columns of one row.

use super::signals::{NO_SIGNAL_PROMOTED, resolve};
use super::{Evidence, Method, advantages, grpo};
use crate::trajectory::Turn;
use crate::trajectory::words::SampleKind;

/// Returns the turn with every column of this stage filled. `promoted` tells
/// whether the at-least-one rule keeps it.
///
/// `advantages` takes the server's log-probs for the old policy's. Where one is
/// missing that the estimator needs (servers give none for the end token), the
/// row gets no `advantages` here: `train` has log-probs of its own.
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
    let evidence = Evidence {
        reward: signals.reward,
        teacher: signals.teacher_log_probs(&turn),
        old: &old,
        promoted,
    };
    turn.advantages = advantages(method, &evidence)
        .filter(|values| trainable && values.iter().all(|value| value.is_finite()));
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

/// Returns the server's log-probs, NaN where it gave none: what is computed
/// from those shows.
fn behaviour(turn: &Turn) -> Vec<f32> {
    let tokens = turn.response_ids.as_ref().map_or(0, Vec::len);
    match &turn.rollout_log_probs {
        Some(log_probs) => log_probs.iter().map(|value| value.unwrap_or(f32::NAN)).collect(),
        None => vec![f32::NAN; tokens],
    }
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

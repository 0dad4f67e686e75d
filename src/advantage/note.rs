//! Fills the advantage columns of one row.

use super::signals::{NO_SIGNAL_PROMOTED, resolve_shaped};
use super::{
    Estimator, Evidence, Method, Refusal, Shaped, Signals, advantages, grpo, reinforce_plus_plus,
};
use crate::trajectory::Turn;
use crate::trajectory::words::SampleKind;

/// What other rows make of a row.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Standing {
    /// Whether the at-least-one rule keeps it.
    pub promoted: bool,
    /// What its reward comes to in its group or session.
    pub share: Option<f32>,
    /// How its reward is made, if it is not just what was said of it.
    pub shaped: Option<Shaped>,
}

/// Returns the turn, seen by itself, with every column of this stage filled.
/// `promoted` tells whether the at-least-one rule keeps it.
pub fn note(turn: Turn, promoted: bool, method: &Method) -> Turn {
    note_among(turn, Standing { promoted, ..Standing::default() }, method)
}

/// Returns the turn with every column of this stage filled.
///
/// `advantages` takes the server's log-probs for the old policy's. Where one is
/// missing that the estimator needs (servers give none for the end token), the
/// row gets no `advantages` here: `train` has log-probs of its own. None has any under
/// `topk-kl`.
pub fn note_among(mut turn: Turn, standing: Standing, method: &Method) -> Turn {
    let signals = resolve_shaped(&turn, standing.shaped);
    note_signals(&mut turn, signals, standing, method);
    turn
}

/// Fills every column of this stage in a turn whose signals have been found.
pub fn note_signals(
    turn: &mut Turn,
    signals: Result<Signals, Refusal>,
    standing: Standing,
    method: &Method,
) {
    let promoted = standing.promoted;
    let mut signals = match signals {
        Ok(signals) => signals,
        Err(refusal) => return refuse(turn, refusal.to_string()),
    };
    let silent = signals.kind == SampleKind::None;
    let without_signal = promoted && silent && signals.trainable();
    let mask = signals.mask.take().map(|mut mask| {
        if silent {
            mask.fill(0);
        }
        mask
    });
    let trainable = mask.as_ref().is_some_and(|mask| mask.contains(&1));
    let old = behaviour(turn);
    let reward_part = reward_part(&signals, mask.as_deref(), standing.share, method);
    let evidence = Evidence {
        reward: signals.reward,
        reward_part: reward_part.as_deref(),
        teacher: signals.teacher_log_probs(turn),
        old: &old,
        promoted,
    };
    turn.advantages = advantages(method, &evidence)
        .filter(|_| trainable && method.estimator.has_advantages())
        .filter(|values| values.iter().all(|value| value.is_finite()));
    turn.rl_advantages = reward_part;
    turn.reward = signals.reward;
    turn.reward_source = signals.reward_source;
    turn.sample_kind = Some(signals.kind);
    turn.sample_reason = match without_signal {
        true => Some(NO_SIGNAL_PROMOTED.to_owned()),
        false => signals.reason,
    };
    turn.promoted = Some(promoted);
    turn.loss_mask = mask;
    turn.advantage_error = None;
}

/// Returns the reward part of the advantage per response token. A taught row
/// without a reward has one of exactly 0.
fn reward_part(
    signals: &Signals,
    mask: Option<&[i8]>,
    share: Option<f32>,
    method: &Method,
) -> Option<Vec<f32>> {
    let mask = mask?;
    let reward = match (share.or(signals.reward), signals.kind) {
        (None, SampleKind::None) => return None,
        (reward, _) => reward.unwrap_or(0.0),
    };
    match method.estimator {
        Estimator::ReinforcePlusPlus => {
            let mask: Vec<bool> = mask.iter().map(|flag| *flag == 1).collect();
            let no_kl = vec![0.0; mask.len()];
            Some(reinforce_plus_plus(reward, &no_kl, &mask, 0.0, method.gamma))
        }
        _ => Some(grpo(reward, mask.len())),
    }
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

fn refuse(turn: &mut Turn, error: String) {
    turn.reward = None;
    turn.reward_source = None;
    turn.sample_kind = Some(SampleKind::None);
    turn.sample_reason = Some("refused".to_owned());
    turn.promoted = Some(false);
    turn.loss_mask = turn.response_ids.as_ref().map(|ids| vec![0; ids.len()]);
    turn.rl_advantages = None;
    turn.advantages = None;
    turn.advantage_error = Some(error);
}

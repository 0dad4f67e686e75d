//! One step of training, as its metrics tell it.

use serde::{Deserialize, Serialize};

/// The metrics of a step: a line of `oclaw train --metrics`, or the `metrics` of a
/// policy's record. `None` is not known; without its number it is no step.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Step {
    /// Policy step that the numbers lead to.
    pub step: u64,
    /// Turns trained.
    pub turns: Option<u64>,
    /// Response tokens trained.
    pub tokens: Option<u64>,
    /// The loss before the first update.
    pub loss: Option<f64>,
    /// KL to the reference policy.
    pub reference_kl: Option<f64>,
    /// Entropy at the trained tokens, nats.
    pub entropy: Option<f64>,
    /// Share of tokens where the clip decided.
    pub clip_fraction: Option<f64>,
    /// Mean of `lo - lc` in the last update.
    pub approximate_kl: Option<f64>,
    /// Mean of `|trainer - server|` log-probs.
    pub log_prob_gap: Option<f64>,
    /// Norm of the gradient before clipping.
    pub gradient_norm: Option<f64>,
    /// Share of served weights that are other numbers now.
    pub weights_changed: Option<f64>,
    /// Mean reward of the turns that have one.
    pub reward: Option<f64>,
    /// Standard deviation of the advantages.
    pub advantage_std: Option<f64>,
    /// The smallest advantage.
    pub advantage_min: Option<f64>,
    /// Share of advantages that are exactly 0.
    pub advantage_zero: Option<f64>,
    /// How far the hinted teacher is from the old policy, where top-k distillation
    /// is at work.
    pub distill_gap: Option<f64>,
    /// Mean age of the turns' policies, in steps.
    pub staleness: Option<f64>,
    /// Updates skipped because they were not finite.
    pub skipped_updates: Option<u64>,
}

impl Step {
    /// Returns the trained tokens per turn.
    pub fn tokens_per_turn(&self) -> Option<f64> {
        match (self.tokens, self.turns) {
            (Some(tokens), Some(turns)) if turns > 0 => Some(tokens as f64 / turns as f64),
            _ => None,
        }
    }
}

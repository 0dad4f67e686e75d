//! What is told of a step. Each field is a key of the metrics file.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::advantage::Spread;

use super::adamw::Update;
use super::distil::Distilled;
use super::objective::{Measures, Prepared};
use super::sample::{OldLogProbs, Sample};

/// Numbers of one step. `None` is "not known", never 0.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Metrics {
    /// Policy step that these numbers lead to.
    pub step: u64,
    /// Turns trained.
    pub turns: u64,
    /// Response tokens trained.
    pub tokens: u64,
    /// Tokens that went through the model, prompts included.
    pub input_tokens: u64,
    /// The loss before the first update.
    pub loss: Option<f64>,
    /// Its policy term.
    pub policy_loss: Option<f64>,
    /// Its top-k distillation term.
    pub distill_loss: Option<f64>,
    /// KL to the reference policy.
    pub reference_kl: Option<f64>,
    /// Entropy of the policy at the trained tokens, nats.
    pub entropy: Option<f64>,
    /// Share of tokens where the clip decided, in the last update.
    pub clip_fraction: Option<f64>,
    /// Share of tokens that OPSM dropped, in the last update.
    pub opsm_dropped: Option<f64>,
    /// Mean of `lo - lc` in the last update.
    pub approximate_kl: Option<f64>,
    /// Mean of `|trainer - server|` log-probs, by a forward pass of the trainer.
    pub log_prob_gap: Option<f64>,
    /// Mean importance weight.
    pub importance: Option<f64>,
    /// Norm of the gradient before clipping, in the last update.
    pub gradient_norm: Option<f64>,
    /// Factor that clipping put on it.
    pub clip_coefficient: Option<f64>,
    /// Mean of `|new - old|` log-probs of trained answer tokens after the step,
    /// on the sequences that are looked at.
    pub moved: Option<f64>,
    /// Learning rate of the last update.
    pub learning_rate: f64,
    /// Share of served weights that are other numbers now: as they are written, where
    /// that rounds them.
    pub weights_changed: Option<f64>,
    /// Mean reward of the turns that have one.
    pub reward: Option<f64>,
    /// Mean of the advantages.
    pub advantage_mean: Option<f64>,
    /// Their standard deviation.
    pub advantage_std: Option<f64>,
    /// The smallest.
    pub advantage_min: Option<f64>,
    /// The largest.
    pub advantage_max: Option<f64>,
    /// Share of advantages that are exactly 0.
    pub advantage_zero: Option<f64>,
    /// Share of taught ids where the clip decided, in the last update.
    pub distill_clip_fraction: Option<f64>,
    /// Mean of `Σ_v w_v |d_v|` over the tokens that a hint teaches: how far the
    /// teacher is from the old policy.
    pub distill_gap: Option<f64>,
    /// Mean number of ids taught at such a token.
    pub subset_size: Option<f64>,
    /// Mean number of ids that the chosen hint shares with the student there.
    pub overlap: Option<f64>,
    /// Tokens at which the chosen hint had a value that is not finite.
    pub unusable: u64,
    /// Mean age of the turns' policies, in steps.
    pub staleness: Option<f64>,
    /// Oldest age.
    pub staleness_max: u64,
    /// Rows refused so far in this run, by reason.
    pub refused: BTreeMap<String, u64>,
    /// Updates skipped because loss or gradient was not finite.
    pub skipped_updates: u64,
    /// Seconds that the step took, without writing it.
    pub seconds: f64,
}

/// What the updates on one batch measured.
#[derive(Debug, Default)]
pub(super) struct Updates {
    pub(super) first: Option<Measures>,
    pub(super) last: Option<Measures>,
    pub(super) update: Option<Update>,
    pub(super) changed: u64,
    pub(super) skipped: u64,
}

impl Metrics {
    /// Puts a step's numbers together.
    pub(super) fn new(
        step: u64,
        batch: &[Prepared],
        updates: &Updates,
        old_log_probs: OldLogProbs,
        learning_rate: f64,
    ) -> Self {
        let mut advantages = Spread::default();
        let (mut rewards, mut stale) = (Spread::default(), Spread::default());
        let (mut tokens, mut input_tokens) = (0, 0);
        let mut taught = Taught::default();
        for prepared in batch {
            let sample = &prepared.sample;
            sample.trained().for_each(|token| advantages.add(prepared.advantages[token]));
            prepared.distilled.iter().for_each(|distilled| taught.add(sample, distilled));
            sample.reward.iter().for_each(|reward| rewards.add(*reward));
            stale.add(sample.staleness as f32);
            tokens += sample.trained().count() as u64;
            input_tokens += sample.input_length() as u64;
        }
        let first = |value: fn(&Measures) -> f64| updates.first.as_ref().map(value).and_then(known);
        let last = |value: fn(&Measures) -> f64| updates.last.as_ref().map(value).and_then(known);
        let update = updates.update;
        Self {
            step,
            turns: batch.len() as u64,
            tokens,
            input_tokens,
            loss: first(|measures| measures.loss),
            policy_loss: first(|measures| measures.policy_loss),
            distill_loss: updates.first.and_then(|measures| measures.distill_loss).and_then(known),
            reference_kl: updates.first.and_then(|measures| measures.reference_kl).and_then(known),
            entropy: first(|measures| measures.entropy),
            clip_fraction: last(|measures| measures.clip_fraction),
            opsm_dropped: updates.last.and_then(|measures| measures.dropped).and_then(known),
            approximate_kl: last(|measures| measures.approximate_kl),
            log_prob_gap: match old_log_probs {
                OldLogProbs::Recompute => first(|measures| measures.log_prob_gap),
                OldLogProbs::Rollout => first(|measures| measures.current_gap),
            },
            importance: first(|measures| measures.importance),
            gradient_norm: update.map(|update| update.gradient_norm),
            clip_coefficient: update.map(|update| update.clip_coefficient),
            moved: None,
            learning_rate,
            weights_changed: update
                .map(|update| updates.changed as f64 / update.weights as f64)
                .and_then(known),
            reward: rewards.mean(),
            advantage_mean: advantages.mean().and_then(known),
            advantage_std: advantages.std().and_then(known),
            advantage_min: (advantages.count > 0).then_some(advantages.min),
            advantage_max: (advantages.count > 0).then_some(advantages.max),
            advantage_zero: advantages.share_zero(),
            distill_clip_fraction: updates
                .last
                .and_then(|measures| measures.distill_clip_fraction)
                .and_then(known),
            distill_gap: taught.gaps.mean(),
            subset_size: taught.sizes.mean(),
            overlap: taught.overlaps.mean(),
            unusable: taught.unusable,
            staleness: stale.mean(),
            staleness_max: batch
                .iter()
                .map(|prepared| prepared.sample.staleness)
                .max()
                .unwrap_or(0),
            refused: BTreeMap::new(),
            skipped_updates: updates.skipped,
            seconds: 0.0,
        }
    }
}

impl Metrics {
    /// Takes out the advantages of a loss that has none.
    pub(super) fn without_advantages(self) -> Self {
        Self {
            advantage_mean: None,
            advantage_std: None,
            advantage_min: None,
            advantage_max: None,
            advantage_zero: None,
            ..self
        }
    }
}

/// The tokens that hints teach.
#[derive(Default)]
struct Taught {
    gaps: Spread,
    sizes: Spread,
    overlaps: Spread,
    unusable: u64,
}

impl Taught {
    fn add(&mut self, sample: &Sample, distilled: &Distilled) {
        for token in sample.trained() {
            self.gaps.add(distilled.gaps[token]);
            self.sizes.add(distilled.size(token) as f32);
            self.overlaps.add(distilled.overlaps[token]);
            self.unusable += u64::from(distilled.unusable[token]);
        }
    }
}

fn known(value: f64) -> Option<f64> {
    value.is_finite().then_some(value)
}

//! Whether a step left the policy whole. A learning rate that is far too large
//! gives finite weights and a finite loss, and a model that says nothing any more:
//! such a policy must not be published.

use crate::model::Model;

use super::objective::{Prepared, sample_log_probs};
use super::sample::Sample;

/// Largest mean fall of log-probs, in nats, that one step may come to. Clipping
/// ends what pushes an answer down long before; a ruined model is off by dozens.
/// What rises is no ruin by itself, and does not make up for what falls.
const MOST_FALL: f64 = 5.0;

/// Tokens that are looked at: whole sequences from the start of the batch up to
/// this number, and at least one.
const TOKENS: usize = 2048;

/// How a step broke a policy.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Ruin {
    /// A weight is infinite or not a number.
    #[error("the weights of `{tensor}` are not finite after it")]
    Weights {
        /// Name of the tensor.
        tensor: String,
    },
    /// A token that had a log-prob has none.
    #[error("a token of the batch's {part} has no finite log-prob after it")]
    LogProb {
        /// Which tokens.
        part: &'static str,
    },
    /// The log-probs are somewhere else altogether.
    #[error(
        "the log-probs of the batch's {part} fell by {nats:.1} nats on average, and at most \
         {MOST_FALL} is sound"
    )]
    Fell {
        /// Which tokens.
        part: &'static str,
        /// Mean of `old - new`, where it is above 0, over all of them.
        nats: f64,
    },
}

/// Some sequences of a batch with their log-probs before the step. The prompts'
/// tokens count too: nothing in the loss pulls at them, so that a model which
/// only repeats what was praised is seen.
#[derive(Debug)]
pub(super) struct Probe {
    sequences: Vec<Sequence>,
    budget: usize,
}

#[derive(Debug)]
struct Sequence {
    /// The whole sequence as one answer to its first token.
    whole: Sample,
    /// Tokens of the prompt among its answer.
    prompt: usize,
    /// Which of the real answer's tokens are trained.
    mask: Vec<bool>,
    before: Vec<f32>,
}

impl Probe {
    /// Looks at the model before the step.
    pub(super) fn new(model: &Model, batch: &[Prepared], budget: usize) -> Self {
        let mut sequences = Vec::new();
        let mut tokens = 0;
        for prepared in batch {
            let sequence = Sequence::of(&prepared.sample);
            tokens += sequence.whole.response_ids.len();
            if tokens > TOKENS && !sequences.is_empty() {
                break;
            }
            sequences.push(sequence);
        }
        let mut probe = Self { sequences, budget };
        let before = probe.log_probs(model);
        for (sequence, before) in probe.sequences.iter_mut().zip(before) {
            sequence.before = before;
        }
        probe
    }

    fn log_probs(&self, model: &Model) -> Vec<Vec<f32>> {
        let wholes: Vec<&Sample> = self.sequences.iter().map(|sequence| &sequence.whole).collect();
        let found = sample_log_probs(model, &wholes, self.budget);
        found.into_iter().map(|values| values.own).collect()
    }

    /// Looks at it after the step. Returns how far the answers' tokens moved.
    pub(super) fn check(&self, model: &Model) -> Result<f64, Ruin> {
        for (tensor, weights) in model.trained() {
            if weights.isfinite().all().int64_value(&[]) == 0 {
                return Err(Ruin::Weights { tensor: tensor.clone() });
            }
        }
        let (mut answers, mut prompts) = (Moved::default(), Moved::default());
        for (sequence, after) in self.sequences.iter().zip(self.log_probs(model)) {
            for (place, (before, after)) in sequence.before.iter().zip(&after).enumerate() {
                match place.checked_sub(sequence.prompt).map(|token| sequence.mask[token]) {
                    None => prompts.add(*before, *after),
                    Some(true) => answers.add(*before, *after),
                    Some(false) => {}
                }
            }
        }
        let moved = answers.judge("answers")?;
        prompts.judge("prompts")?;
        Ok(moved)
    }
}

impl Sequence {
    fn of(sample: &Sample) -> Self {
        let (first, prompt) = sample.prompt_ids.split_at(1.min(sample.prompt_ids.len()));
        let response_ids = [prompt, &sample.response_ids].concat();
        let length = response_ids.len();
        Self {
            prompt: prompt.len(),
            mask: sample.mask.clone(),
            before: Vec::new(),
            whole: Sample {
                turn_id: sample.turn_id.clone(),
                prompt_ids: first.to_vec(),
                response_ids,
                mask: vec![true; length],
                rollout: vec![None; length],
                temperature: 1.0,
                reward: None,
                reward_part: None,
                teacher: None,
                topk: None,
                teacher_temperature: 1.0,
                promoted: false,
                staleness: 0,
            },
        }
    }
}

/// How far log-probs moved.
#[derive(Default)]
struct Moved {
    way: f64,
    fall: f64,
    count: u64,
    lost: bool,
}

impl Moved {
    fn add(&mut self, before: f32, after: f32) {
        // What had no log-prob before the step cannot lose it.
        if before.is_finite() {
            self.way += f64::from((after - before).abs());
            self.fall += f64::from((before - after).max(0.0));
            self.count += 1;
            self.lost |= !after.is_finite();
        }
    }

    fn judge(&self, part: &'static str) -> Result<f64, Ruin> {
        let count = self.count.max(1) as f64;
        let nats = self.fall / count;
        match (self.lost, nats > MOST_FALL) {
            (true, _) => Err(Ruin::LogProb { part }),
            (false, true) => Err(Ruin::Fell { part, nats }),
            (false, false) => Ok(self.way / count),
        }
    }
}

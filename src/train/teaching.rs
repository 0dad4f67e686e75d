//! The term of top-k distillation: what is done with the ids that a hint teaches.

use tch::Tensor;

use super::distil::Distilled;
use super::head::Chunk;
use super::objective::{Prepared, Terms};
use super::pack::Pack;
use crate::loss;

/// A log-prob of what cannot happen: `exp` of it is exactly 0, and it is finite.
const NOWHERE: f64 = -1e4;

/// What is minimised over the ids.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Teaching {
    /// The clipped surrogate, by what each is worth.
    Surrogate,
    /// Reverse KL from the teacher over the ids and a bin for all others, at the
    /// teacher's temperature.
    Kl {
        /// Its weight.
        weight: f64,
    },
}

/// The constants of a pass's trained tokens, `[N, k]` each.
pub(super) struct Columns {
    inside: Tensor,
    advantages: Tensor,
    old: Tensor,
    teacher: Tensor,
}

impl Columns {
    pub(super) fn new(pack: &Pack<'_>, batch: &[Prepared], k: usize) -> Self {
        let collect = |value: fn(&Distilled, usize) -> f32| {
            pack.columns(k, |sample, token, place| match &batch[sample].distilled {
                Some(distilled) if place < distilled.k => {
                    value(distilled, token * distilled.k + place)
                }
                _ => 0.0,
            })
        };
        Self {
            inside: collect(|distilled, at| f32::from(u8::from(distilled.inside[at]))).gt(0.0),
            advantages: collect(|distilled, at| distilled.advantages[at]),
            old: collect(|distilled, at| distilled.old_log_probs[at]),
            teacher: collect(|distilled, at| distilled.teacher[at]),
        }
    }

    /// Returns the term of some of the tokens, and where the clip decided in it.
    pub(super) fn loss(&self, chunk: &Chunk<'_>, terms: &Terms) -> (Tensor, Option<Tensor>) {
        let part = |column: &Tensor| column.narrow(0, chunk.start, chunk.length);
        let inside = part(&self.inside);
        match terms.teaching {
            Teaching::Surrogate => {
                let ratio = loss::log_ratio(chunk.further, &part(&self.old));
                let advantages = part(&self.advantages);
                let found = loss::topk_surrogate(&ratio, &advantages, &inside, &terms.policy.clip);
                (found.loss, Some(found.clipped))
            }
            Teaching::Kl { weight } => {
                // An id outside adds nothing to a sum; a token without ids has a KL of 0.
                let kept = |values: &Tensor| values.where_self(&inside, &values.full_like(NOWHERE));
                let (student, teacher) = (kept(chunk.further), kept(&part(&self.teacher)));
                (loss::topk_kl(&student, &teacher).kl * weight, None)
            }
        }
    }
}

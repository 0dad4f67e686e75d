//! The constants of a step's loss.

use tch::Tensor;

use super::super::distil::{self, Distilled, Further};
use super::super::objective::{LogProbs, Prepared, log_probs_at, rollout, sample_log_probs};
use super::super::sample::{OldLogProbs, Refusal, Sample, check_advantages};
use super::Trainer;
use crate::advantage::{self, Estimator, Evidence};
use crate::loss::{self, Subset};

impl Trainer {
    /// Computes the constants of the loss: old and reference log-probs,
    /// advantages.
    pub(super) fn prepare(&mut self, samples: Vec<Sample>) -> Vec<Prepared> {
        let budget = self.options.tokens_per_pass;
        let method = self.options.admission.method.clone();
        let (samples, subsets): (Vec<_>, Vec<_>) = self.subsets(samples).into_iter().unzip();
        let borrowed: Vec<&Sample> = samples.iter().collect();
        let old = self.old_log_probs(&borrowed, &subsets);
        let reference =
            self.reference.as_ref().map(|model| sample_log_probs(model, &borrowed, budget));
        let mut reference = reference.map(Vec::into_iter);
        let mut batch = Vec::new();
        let weights = self.options.admission.distillation().weights;
        for ((sample, subset), old) in samples.into_iter().zip(subsets).zip(old) {
            let reference = reference.as_mut().and_then(Iterator::next).map(|values| values.own);
            if let Some(token) = sample.trained().find(|token| !old.is_finite(*token)) {
                let fault = format!("the model gives response token {token} no finite log-prob");
                self.refuse(&sample.turn_id, Refusal::broken("log_prob_not_finite", fault));
                continue;
            }
            let evidence = Evidence {
                reward: sample.reward,
                reward_part: sample.reward_part.as_deref(),
                teacher: sample.teacher.as_deref(),
                old: &old.teacher,
                promoted: sample.promoted,
            };
            let advantages = advantage::advantages(&method, &evidence);
            let values = advantages.iter().flat_map(|it| sample.trained().map(|at| (at, it[at])));
            if let Err(refusal) = check_advantages("the advantage", values) {
                self.refuse(&sample.turn_id, refusal);
                continue;
            }
            match advantages {
                Some(advantages) => batch.push(Prepared {
                    sample,
                    reference_log_probs: reference,
                    advantages,
                    distilled: subset.map(|subset| {
                        let like_teacher = &old.further_teacher;
                        Distilled::new(&subset, old.further, like_teacher, weights, &method)
                    }),
                    old_log_probs: old.own,
                }),
                None => self.refuse(&sample.turn_id, Refusal::sound("no_signal_for_estimator")),
            }
        }
        if method.estimator == Estimator::ReinforcePlusPlus {
            whiten(&mut batch);
        }
        batch
    }

    /// Chooses who teaches what in each sample that is distilled; refuses those
    /// in which that cannot be said.
    fn subsets(&mut self, samples: Vec<Sample>) -> Vec<(Sample, Option<Subset>)> {
        let how = self.options.admission.distillation();
        let mut kept = Vec::new();
        for sample in samples {
            let chosen = sample.topk.as_ref().map(|topk| distil::choose(topk, how)).transpose();
            match chosen {
                Ok(subset) => kept.push((sample, subset)),
                Err(error) => {
                    let refusal = Refusal::broken("contradictory", error.to_string());
                    self.refuse(&sample.turn_id, refusal);
                }
            }
        }
        kept
    }

    /// Returns the old policy's log-probs. The server gives none of the ids of a
    /// subset: those are always the trainer's.
    fn old_log_probs(&self, samples: &[&Sample], subsets: &[Option<Subset>]) -> Vec<LogProbs> {
        let recompute = self.options.admission.old_log_probs == OldLogProbs::Recompute;
        if !recompute && subsets.iter().all(Option::is_none) {
            return samples.iter().map(|sample| rollout(sample)).collect();
        }
        let of = |subset: &Subset| (subset.ids.size()[1] as usize, distil::ids(subset));
        let ids: Vec<_> = subsets.iter().map(|subset| subset.as_ref().map(of)).collect();
        let budget = self.options.tokens_per_pass;
        let found = log_probs_at(&self.model, samples, Further::of(&ids), budget);
        match recompute {
            true => found,
            false => {
                let own = |(sample, found): (&&Sample, LogProbs)| {
                    let LogProbs { own, teacher, .. } = rollout(sample);
                    LogProbs { own, teacher, ..found }
                };
                samples.iter().zip(found).map(own).collect()
            }
        }
    }
}

/// Whitens the advantages of the batch's trained tokens.
fn whiten(batch: &mut [Prepared]) {
    let trained = |prepared: &Prepared| {
        prepared.sample.trained().map(|token| prepared.advantages[token]).collect::<Vec<_>>()
    };
    let all: Vec<f32> = batch.iter().flat_map(trained).collect();
    let whitened = loss::whiten(&Tensor::from_slice(&all));
    let mut values = vec![0.0; all.len()];
    whitened.copy_data(&mut values, all.len());
    let mut values = values.into_iter();
    for prepared in batch {
        let Prepared { sample, advantages, .. } = prepared;
        sample.trained().zip(&mut values).for_each(|(token, value)| advantages[token] = value);
    }
}

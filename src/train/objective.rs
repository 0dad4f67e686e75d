//! The loss of a step, put together from the formulas of `loss`.

use tch::{Kind, Tensor};

use crate::loss::{self, KlKind, Reduction};
use crate::model::Model;

use super::distil::{Distilled, Further};
use super::head::{self, Chunk};
use super::pack::{Pack, packs};
use super::sample::Sample;
use super::surrogate::{Answers, Policy, Term, Tokens};
use super::teaching::{self, Teaching};

/// A sample with all that its loss needs. Every list has one entry per response
/// token; those of masked tokens are never read.
#[derive(Debug, Clone)]
pub struct Prepared {
    /// The sample.
    pub sample: Sample,
    /// The old policy's log-probs at the sample's temperature.
    pub old_log_probs: Vec<f32>,
    /// The reference policy's, if the loss has a KL term.
    pub reference_log_probs: Option<Vec<f32>>,
    /// The advantages.
    pub advantages: Vec<f32>,
    /// What top-k distillation needs, if a hint teaches the sample.
    pub distilled: Option<Distilled>,
}

/// What is done about the server's probabilities not being the trainer's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Importance {
    /// Nothing.
    Off,
    /// Weight the policy loss by the ratio, cut at both bounds.
    Truncated {
        /// Lower bound.
        low: f64,
        /// Upper bound.
        high: f64,
    },
    /// Weight it by the ratio, and by 0 outside the bounds.
    IcePop {
        /// Lower bound.
        low: f64,
        /// Upper bound.
        high: f64,
    },
}

/// The terms of the loss.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Terms {
    /// The policy term.
    pub policy: Policy,
    /// The term of top-k distillation.
    pub teaching: Teaching,
    /// Correction for the server's probabilities.
    pub importance: Importance,
    /// Form of the KL to the reference policy.
    pub kl: KlKind,
    /// Whether it is weighted by the ratio to the old policy, which makes it and its
    /// gradient unbiased where the samples are the old policy's.
    pub kl_unbiased: bool,
    /// Its weight; 0 leaves it out.
    pub kl_coefficient: f64,
    /// Weight of the entropy, which is to be large.
    pub entropy_coefficient: f64,
    /// How the losses of tokens become one.
    pub reduction: Reduction,
}

/// What a pass over the batch measured, each reduced as the loss is.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Measures {
    /// The loss.
    pub loss: f64,
    /// Its policy term.
    pub policy_loss: f64,
    /// KL to the reference policy, if there is one.
    pub reference_kl: Option<f64>,
    /// Entropy of the policy.
    pub entropy: f64,
    /// Share of tokens where the clip decided.
    pub clip_fraction: f64,
    /// Share of tokens that OPSM dropped, if it is on.
    pub dropped: Option<f64>,
    /// Mean of `lo - lc`.
    pub approximate_kl: f64,
    /// Mean of `|lo - lb|` over the tokens of which the server gave `lb`; NaN
    /// if it gave none.
    pub log_prob_gap: f64,
    /// The same with `lc` in place of `lo`.
    pub current_gap: f64,
    /// Mean importance weight.
    pub importance: f64,
    /// The top-k distillation term, if there is one.
    pub distill_loss: Option<f64>,
    /// Share of a token's ids where the clip decided in that term.
    pub distill_clip_fraction: Option<f64>,
}

/// The constants of a pass's trained tokens.
struct Columns {
    old: Tensor,
    advantages: Tensor,
    reference: Option<Tensor>,
    importance: Tensor,
    rollout: Tensor,
    /// 1 where the server gave a log-prob.
    known: Tensor,
    weights: Tensor,
    distilled: Option<teaching::Columns>,
    answers: Option<Answers>,
}

impl Columns {
    fn new(pack: &Pack<'_>, batch: &[Prepared], terms: &Terms, weights: &[Vec<f32>]) -> Self {
        let old = pack.column(|sample, token| batch[sample].old_log_probs[token]);
        // Without a log-prob of the server's there is nothing to correct.
        let rollout = pack.column(|sample, token| {
            let prepared = &batch[sample];
            prepared.sample.rollout[token].unwrap_or(prepared.old_log_probs[token])
        });
        let importance = match terms.importance {
            Importance::Off => old.ones_like(),
            Importance::Truncated { low, high } => {
                loss::truncated_importance(&old, &rollout, low, high)
            }
            Importance::IcePop { low, high } => loss::icepop_importance(&old, &rollout, low, high),
        };
        let reference = (terms.kl_coefficient != 0.0).then(|| {
            pack.column(|sample, token| match &batch[sample].reference_log_probs {
                Some(reference) => reference[token],
                None => f32::NAN,
            })
        });
        Self {
            known: pack.column(|sample, token| {
                f32::from(u8::from(batch[sample].sample.rollout[token].is_some()))
            }),
            advantages: pack.column(|sample, token| batch[sample].advantages[token]),
            weights: pack.column(|sample, token| weights[sample][token]),
            old,
            rollout,
            reference,
            importance,
            distilled: None,
            answers: None,
        }
    }

    /// Computes what a policy term needs of whole answers.
    fn whole(&mut self, policy: &Policy, pack: &Pack<'_>, log_probs: &Tensor) {
        let tokens = Tokens { log_probs, old: &self.old, advantages: &self.advantages };
        let weights = &self.weights * &self.importance;
        self.answers = Some(Answers::new(policy, pack, &tokens, &weights));
    }

    /// Returns the weight of all tokens of which the server gave a log-prob.
    fn known_weight(&self) -> f64 {
        loss::reduce(&self.known, &self.weights).double_value(&[])
    }

    /// Returns the loss of some of the tokens, and measures.
    fn loss(&self, chunk: &Chunk<'_>, terms: &Terms, measures: &mut Measures) -> Tensor {
        let part = |column: &Tensor| column.narrow(0, chunk.start, chunk.length);
        let weights = part(&self.weights);
        let sum = |values: &Tensor| loss::reduce(values, &weights);
        let old = part(&self.old);
        let policy = match &self.answers {
            Some(answers) => answers.part(chunk.start, chunk.log_probs),
            None => {
                let advantages = &part(&self.advantages);
                let tokens = Tokens { log_probs: chunk.log_probs, old: &old, advantages };
                Term::of_tokens(&terms.policy, &tokens, &(&weights * part(&self.importance)))
            }
        };
        let mut total = policy.loss.shallow_clone();
        if terms.entropy_coefficient != 0.0 {
            total = &total - sum(chunk.entropy) * terms.entropy_coefficient;
        }
        if let Some(reference) = &self.reference {
            let ratio = terms.kl_unbiased.then(|| loss::log_ratio(chunk.log_probs, &old).exp());
            let reference = part(reference);
            let kl = loss::approximate_kl(terms.kl, chunk.log_probs, &reference, ratio.as_ref());
            let kl = sum(&kl);
            *measures.reference_kl.get_or_insert(0.0) += kl.double_value(&[]);
            total = &total + kl * terms.kl_coefficient;
        }
        if let Some(distilled) = &self.distilled {
            let (term, clipped) = distilled.loss(chunk, terms);
            let term = sum(&term);
            *measures.distill_loss.get_or_insert(0.0) += term.double_value(&[]);
            if let Some(clipped) = clipped {
                *measures.distill_clip_fraction.get_or_insert(0.0) +=
                    sum(&clipped).double_value(&[]);
            }
            total = &total + term;
        }
        measures.loss += total.double_value(&[]);
        measures.policy_loss += policy.loss.double_value(&[]);
        tch::no_grad(|| {
            let mean = |values: &Tensor| sum(values).double_value(&[]);
            measures.entropy += mean(chunk.entropy);
            measures.clip_fraction += mean(&policy.clipped);
            if terms.policy.drift.is_some() {
                *measures.dropped.get_or_insert(0.0) += mean(&(1.0 - policy.kept));
            }
            measures.approximate_kl += mean(&(&old - chunk.log_probs));
            let (rollout, known) = (part(&self.rollout), part(&self.known));
            measures.log_prob_gap += mean(&((old - &rollout).abs() * &known));
            measures.current_gap += mean(&((chunk.log_probs - rollout).abs() * known));
            measures.importance += mean(&part(&self.importance));
        });
        total
    }
}

/// Runs the batch in passes of at most `budget` tokens and adds the gradient of
/// its loss to the weights'.
pub fn gradients(model: &Model, batch: &[Prepared], terms: &Terms, budget: usize) -> Measures {
    let samples: Vec<&Sample> = batch.iter().map(|prepared| &prepared.sample).collect();
    let weights = token_weights(&samples, terms.reduction);
    let mut measures = Measures::default();
    let mut known = 0.0;
    let distilled = batch.iter().map(|prepared| prepared.distilled.as_ref());
    let ids: Vec<_> =
        distilled.map(|distilled| distilled.map(|it| (it.k, it.ids.clone()))).collect();
    let further = Further::of(&ids);
    for pack in packs(&samples, further, budget, model.device()) {
        let mut columns = Columns::new(&pack, batch, terms, &weights);
        columns.distilled =
            (further.k > 0).then(|| teaching::Columns::new(&pack, batch, further.k));
        known += columns.known_weight();
        let temperature = pack.column(|sample, _| samples[sample].temperature as f32);
        let of_further = match terms.teaching {
            Teaching::Surrogate => temperature.shallow_clone(),
            Teaching::Kl { .. } => {
                pack.column(|sample, _| samples[sample].teacher_temperature as f32)
            }
        };
        let pass = model.pass(&pack.ids, &pack.lengths);
        if terms.policy.needs_answers() {
            let own = head::log_probs_of(model, &pack, pass.hidden(), &[&temperature]);
            columns.whole(&terms.policy, &pack, &own[0].select(1, 0));
        }
        head::backward(model, &pack, pass, [&temperature, &of_further], |chunk| {
            columns.loss(chunk, terms, &mut measures)
        });
    }
    // 0 / 0 where the server gave none: not known.
    measures.log_prob_gap /= known;
    measures.current_gap /= known;
    measures
}

/// Returns the weight of each response token in the loss; masked ones get 0.
fn token_weights(samples: &[&Sample], reduction: Reduction) -> Vec<Vec<f32>> {
    let lengths: Vec<usize> = samples.iter().map(|sample| sample.trained().count()).collect();
    let mut weights = loss::weights(&lengths, reduction).into_iter();
    let deal = |sample: &&Sample| {
        let of = |flag: &bool| if *flag { weights.next().unwrap_or_default() } else { 0.0 };
        sample.mask.iter().map(of).collect()
    };
    samples.iter().map(deal).collect()
}

/// Returns each sample's log-probs at its own temperature, `None` at masked
/// tokens, and beside them those at the teacher's temperature where it differs.
pub fn sample_log_probs(model: &Model, samples: &[&Sample], budget: usize) -> Vec<LogProbs> {
    log_probs_at(model, samples, Further::NONE, budget)
}

/// Returns the same, and the log-probs of further ids.
pub(super) fn log_probs_at(
    model: &Model,
    samples: &[&Sample],
    further: Further<'_>,
    budget: usize,
) -> Vec<LogProbs> {
    let empty = |(index, sample): (usize, &&Sample)| {
        let tokens = sample.mask.len();
        let ids = further.count(index) * tokens;
        LogProbs {
            own: vec![f32::NAN; tokens],
            teacher: vec![f32::NAN; tokens],
            further: vec![f32::NAN; ids],
            further_teacher: vec![f32::NAN; ids],
        }
    };
    let mut all: Vec<LogProbs> = samples.iter().enumerate().map(empty).collect();
    let width = 1 + further.k;
    for pack in packs(samples, further, budget, model.device()) {
        let own = pack.column(|sample, _| samples[sample].temperature as f32);
        let teacher = pack.column(|sample, _| samples[sample].teacher_temperature as f32);
        let columns = match own.equal(&teacher) {
            true => head::log_probs(model, &pack, &[&own]),
            false => head::log_probs(model, &pack, &[&own, &teacher]),
        };
        let values: Vec<Vec<f32>> = columns.iter().map(numbers).collect();
        for (at, (sample, token)) in pack.tokens().enumerate() {
            let (own, teacher) =
                (&values[0][at * width..], &values[values.len() - 1][at * width..]);
            all[sample].own[token] = own[0];
            all[sample].teacher[token] = teacher[0];
            let k = further.count(sample);
            all[sample].further[token * k..][..k].copy_from_slice(&own[1..=k]);
            all[sample].further_teacher[token * k..][..k].copy_from_slice(&teacher[1..=k]);
        }
    }
    all
}

/// Log-probs of one answer's tokens; NaN at masked ones.
#[derive(Debug, Clone, PartialEq)]
pub struct LogProbs {
    /// At the temperature of the server's log-probs.
    pub own: Vec<f32>,
    /// At the temperature of the teacher's log-probs.
    pub teacher: Vec<f32>,
    /// Those of the further ids, row-major, at the former temperature.
    pub further: Vec<f32>,
    /// And at the latter.
    pub further_teacher: Vec<f32>,
}

impl LogProbs {
    /// Returns whether a token's own log-prob and those of its further ids are.
    pub(super) fn is_finite(&self, token: usize) -> bool {
        let k = self.further.len() / self.own.len().max(1);
        self.own[token].is_finite()
            && self.further[token * k..][..k].iter().all(|value| value.is_finite())
    }
}

pub(super) fn numbers(tensor: &Tensor) -> Vec<f32> {
    let plain = tensor.to_device(tch::Device::Cpu).to_kind(Kind::Float).contiguous();
    let mut values = vec![0.0; plain.numel()];
    plain.copy_data(&mut values, plain.numel());
    values
}

/// Takes the server's log-probs for the old policy's.
pub(super) fn rollout(sample: &Sample) -> LogProbs {
    let own: Vec<f32> = sample.rollout.iter().map(|value| value.unwrap_or(f32::NAN)).collect();
    LogProbs { teacher: own.clone(), own, further: Vec::new(), further_teacher: Vec::new() }
}

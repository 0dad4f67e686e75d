//! Losses, one pure function per formula.
//!
//! Every tensor here has one entry per *trained* response token, the tokens of
//! a sample one after the other. A mask has no place in these functions: masked
//! tokens are selected out before (so that NaN at a masked place changes
//! nothing), and [`weights`] holds what the reduction needs. Advantages, old,
//! rollout and reference log-probs are constants; gradients flow through
//! `log_probs` (and the entropy) only. Absent on purpose: settings, models,
//! names of losses.

mod hybrid;

use tch::{Kind, Tensor};

pub use hybrid::{
    Candidates, DistillWeights, HintSelection, Subset, SubsetIds, TopkAdvantages, TopkError,
    select_subset, topk_advantages, topk_overlap, topk_surrogate,
};

/// Log-ratios are clamped to this on both sides before `exp`, without gradient
/// beyond: `exp` must not overflow.
pub const LOG_RATIO_LIMIT: f64 = 20.0;

/// `low_var_kl` clamps its value to this on both sides, without gradient beyond.
pub const LOW_VAR_KL_LIMIT: f64 = 10.0;

/// Bounds of the probability ratio.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Clip {
    /// The ratio counts as at least `1 - low`.
    pub low: f64,
    /// The ratio counts as at most `1 + high`.
    pub high: f64,
    /// Dual clip: where the advantage is negative the loss is at most this
    /// times its size.
    pub dual: Option<f64>,
}

/// A loss per token.
#[derive(Debug)]
pub struct Surrogate {
    /// The loss.
    pub loss: Tensor,
    /// 1 where the clip decided, else 0.
    pub clipped: Tensor,
}

/// Returns the log-prob of one id per row of logits. The logits are already
/// divided by the temperature.
pub fn log_probs(logits: &Tensor, ids: &Tensor) -> Tensor {
    let chosen = logits.gather(-1, &ids.unsqueeze(-1), false).squeeze_dim(-1);
    chosen - logits.logsumexp([-1i64], false)
}

/// Returns the entropy of each row's distribution, in nats.
pub fn entropy(logits: &Tensor) -> Tensor {
    let log_probs = logits.log_softmax(-1, logits.kind());
    -(log_probs.exp() * log_probs).sum_dim_intlist(&[-1i64][..], false, logits.kind())
}

/// Returns `clamp(lc - lo, ±20)`.
pub fn log_ratio(log_probs: &Tensor, old: &Tensor) -> Tensor {
    (log_probs - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
}

/// PPO's clipped surrogate (Schulman et al. 2017) with separate bounds (DAPO,
/// Yu et al. 2025) and dual clip (Ye et al. 2020):
/// `max(-ρ A, -clip(ρ, 1 - low, 1 + high) A)`, and `min(that, -c A)` for A < 0.
pub fn ppo_clip(log_ratio: &Tensor, advantages: &Tensor, clip: &Clip) -> Surrogate {
    let ratio = log_ratio.exp();
    let plain = -(&ratio * advantages);
    let bounded = -(ratio.clamp(1.0 - clip.low, 1.0 + clip.high) * advantages);
    let clipped = bounded.gt_tensor(&plain).to_kind(Kind::Float);
    let mut loss = plain.maximum(&bounded);
    if let Some(limit) = clip.dual {
        let limited = loss.minimum(&(advantages * -limit));
        loss = limited.where_self(&advantages.lt(0.0), &loss);
    }
    Surrogate { loss, clipped }
}

/// CISPO (MiniMax-M1, 2025): the clipped ratio is a constant weight of the
/// log-prob, `-sg(clip(ρ, 1 - low, 1 + high)) A lc`.
pub fn cispo(log_probs: &Tensor, old: &Tensor, advantages: &Tensor, clip: &Clip) -> Surrogate {
    let ratio = log_ratio(log_probs, old).exp().detach();
    let weight = ratio.clamp(1.0 - clip.low, 1.0 + clip.high);
    let clipped = weight.ne_tensor(&ratio).to_kind(Kind::Float);
    Surrogate { loss: -(weight * advantages * log_probs), clipped }
}

/// Returns each sample's mean, at each of its tokens. With log-ratios it makes
/// PPO's loss GSPO's (Zheng et al. 2025): `ρ = exp(mean (lc - lo))`.
pub fn sequence_mean(values: &Tensor, lengths: &[i64]) -> Tensor {
    let samples = values.split_with_sizes(lengths, 0);
    let means = samples.iter().zip(lengths).filter(|(_, length)| **length > 0);
    let expanded: Vec<_> =
        means.map(|(sample, length)| sample.mean(values.kind()).expand([*length], false)).collect();
    match expanded.is_empty() {
        true => values.shallow_clone(),
        false => Tensor::cat(&expanded, 0),
    }
}

/// OPSM: 0 where the advantage is negative and the sample's mean of `lo - lc`
/// is above `delta`, else 1. A constant.
pub fn opsm_keep(log_ratio: &Tensor, advantages: &Tensor, lengths: &[i64], delta: f64) -> Tensor {
    let drift = -sequence_mean(&log_ratio.detach(), lengths);
    let dropped = advantages.lt(0.0).logical_and(&drift.gt(delta));
    dropped.logical_not().to_kind(Kind::Float)
}

/// TIS (Yao et al. 2025): `clamp(exp(lo - lb), low, high)`, what the trainer's
/// probability of a token is of the server's. A constant.
pub fn truncated_importance(old: &Tensor, rollout: &Tensor, low: f64, high: f64) -> Tensor {
    log_ratio(old, rollout).exp().clamp(low, high).detach()
}

/// IcePop (Ring-1T, 2025): the same weight, but 0 outside `[low, high]`.
pub fn icepop_importance(old: &Tensor, rollout: &Tensor, low: f64, high: f64) -> Tensor {
    let weight = log_ratio(old, rollout).exp().detach();
    let inside = weight.ge(low).logical_and(&weight.le(high));
    weight.where_self(&inside, &weight.zeros_like())
}

/// Estimators of the KL divergence from a reference policy (Schulman 2020).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KlKind {
    /// `x`, with `x = lc - lref`.
    K1,
    /// `x² / 2`.
    K2,
    /// `exp(-x) - 1 + x`.
    K3,
    /// `k3` with its value clamped to ±10.
    LowVar,
}

/// Estimates the KL divergence from the reference, per token. `ratio` is the
/// importance ratio `exp(lc - lo)` of the unbiased form; gradients flow through
/// it too.
pub fn approximate_kl(
    kind: KlKind,
    log_probs: &Tensor,
    reference: &Tensor,
    ratio: Option<&Tensor>,
) -> Tensor {
    let x = log_probs - reference;
    let kl = match kind {
        KlKind::K1 => x,
        KlKind::K2 => x.square() * 0.5,
        KlKind::K3 | KlKind::LowVar => {
            let x = x.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT);
            x.neg().exp() - 1.0 + x
        }
    };
    let kl = match ratio {
        Some(ratio) => kl * ratio,
        None => kl,
    };
    match kind {
        KlKind::LowVar => kl.clamp(-LOW_VAR_KL_LIMIT, LOW_VAR_KL_LIMIT),
        KlKind::K1 | KlKind::K2 | KlKind::K3 => kl,
    }
}

/// The two terms of top-k distillation, per token.
#[derive(Debug)]
pub struct TopkKl {
    /// Reverse KL over the k ids and the tail.
    pub kl: Tensor,
    /// Entropy of the student over the same k + 1 bins.
    pub entropy: Tensor,
}

/// Reverse KL from the teacher over the teacher's top-k ids plus one bin for
/// all others (SDFT, SDPO): student and teacher log-probs `[N, k]` at those ids.
pub fn topk_kl(student: &Tensor, teacher: &Tensor) -> TopkKl {
    let student = with_tail(student);
    let teacher = with_tail(teacher);
    let probs = student.exp();
    let sum = |terms: Tensor| terms.sum_dim_intlist(&[-1i64][..], false, student.kind());
    TopkKl { kl: sum(&probs * (&student - teacher)), entropy: -sum(&probs * &student) }
}

/// Appends the log of the probability that the k bins leave. Where they leave
/// (nearly) none the tail is a constant.
fn with_tail(log_probs: &Tensor) -> Tensor {
    let inside = log_probs.logsumexp([-1i64], true).clamp_max(-1e-7);
    let tail = (-inside.expm1()).log();
    Tensor::cat(&[log_probs, &tail], -1)
}

/// Whitens values: `(A - μ) rsqrt(σ² + 1e-8)` with the unbiased variance. One
/// value alone has no variance and becomes 0.
pub fn whiten(values: &Tensor) -> Tensor {
    let centred = values - values.mean(values.kind());
    match values.numel() {
        0 | 1 => centred,
        _ => &centred * (values.var(true) + 1e-8).rsqrt(),
    }
}

/// How the losses of tokens become one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduction {
    /// Mean over a sample's tokens, then over the samples.
    Sample,
    /// Mean over all tokens.
    Token,
}

/// Returns the weight of each trained token in the loss; `lengths` counts the
/// trained tokens of each sample. A sample without any still counts as one.
pub fn weights(lengths: &[usize], reduction: Reduction) -> Vec<f32> {
    let samples = lengths.len() as f64;
    let tokens: usize = lengths.iter().map(|length| (*length).max(1)).sum();
    let weight = |length: usize| match reduction {
        Reduction::Sample => 1.0 / (length as f64 * samples),
        Reduction::Token => 1.0 / tokens as f64,
    };
    lengths.iter().flat_map(|length| std::iter::repeat_n(weight(*length) as f32, *length)).collect()
}

/// Returns the weighted sum: the loss.
pub fn reduce(values: &Tensor, weights: &Tensor) -> Tensor {
    (values * weights).sum(values.kind())
}

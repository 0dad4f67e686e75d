//! The policy term of the loss: which surrogate, and what of it needs whole answers.
//!
//! Log-probs come a few tokens at a time (see `head`), but GSPO's ratio and OPSM's
//! drift are means over an answer. Where either is asked for, the term is computed
//! over all answers of a pass from log-probs without a graph; its derivative by each
//! log-prob then stands for it in the backward pass.

use tch::{Kind, Tensor};

use super::pack::Pack;
use crate::loss::{self, Clip, Surrogate};

/// Which surrogate is minimised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Form {
    /// PPO's clipped ratio of each token (Schulman et al. 2017).
    #[default]
    Ppo,
    /// GSPO's clipped ratio of the whole answer (Zheng et al. 2025).
    Gspo,
    /// CISPO's clipped ratio as a constant weight (MiniMax-M1, 2025).
    Cispo,
}

/// The policy term.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Policy {
    /// The surrogate.
    pub form: Form,
    /// Bounds of the ratio.
    pub clip: Clip,
    /// OPSM: tokens of negative advantage are dropped in answers whose mean of
    /// `lo - lc` is above this.
    pub drift: Option<f64>,
}

impl Policy {
    /// Returns whether a token's loss depends on other tokens of its answer.
    pub(super) fn needs_answers(&self) -> bool {
        self.form == Form::Gspo || self.drift.is_some()
    }

    /// Returns the term of tokens of whole answers, `lengths` tokens each, and which
    /// of them are kept.
    fn surrogate(&self, tokens: &Tokens<'_>, lengths: &[i64]) -> (Surrogate, Tensor) {
        let Tokens { log_probs, old, advantages } = tokens;
        let ratio = loss::log_ratio(log_probs, old);
        let surrogate = match self.form {
            Form::Ppo => loss::ppo_clip(&ratio, advantages, &self.clip),
            Form::Gspo => {
                loss::ppo_clip(&loss::sequence_mean(&ratio, lengths), advantages, &self.clip)
            }
            Form::Cispo => loss::cispo(log_probs, old, advantages, &self.clip),
        };
        let kept = match self.drift {
            Some(drift) => loss::opsm_keep(&ratio, advantages, lengths, drift),
            None => advantages.ones_like(),
        };
        (Surrogate { loss: surrogate.loss * &kept, ..surrogate }, kept)
    }
}

/// What the term is made of, one number per token each.
pub(super) struct Tokens<'a> {
    pub(super) log_probs: &'a Tensor,
    pub(super) old: &'a Tensor,
    pub(super) advantages: &'a Tensor,
}

/// The policy term of some tokens.
pub(super) struct Term {
    /// Their part of the reduced loss.
    pub(super) loss: Tensor,
    /// 1 where the clip decided.
    pub(super) clipped: Tensor,
    /// 0 where OPSM dropped the token.
    pub(super) kept: Tensor,
}

impl Term {
    /// Returns the term of tokens that stand for themselves. `weights` are those of
    /// the reduction, times the importance weights.
    pub(super) fn of_tokens(policy: &Policy, tokens: &Tokens<'_>, weights: &Tensor) -> Self {
        let (surrogate, kept) = policy.surrogate(tokens, &[]);
        Self { loss: loss::reduce(&surrogate.loss, weights), clipped: surrogate.clipped, kept }
    }
}

/// The policy term over the whole answers of a pass.
pub(super) struct Answers {
    /// Weighted loss of each token.
    losses: Tensor,
    /// Derivative of their sum by each log-prob.
    gradient: Tensor,
    clipped: Tensor,
    kept: Tensor,
}

impl Answers {
    pub(super) fn new(
        policy: &Policy,
        pack: &Pack<'_>,
        tokens: &Tokens<'_>,
        weights: &Tensor,
    ) -> Self {
        let log_probs = tokens.log_probs.detach().set_requires_grad(true);
        let leaf = Tokens { log_probs: &log_probs, ..*tokens };
        let (surrogate, kept) = policy.surrogate(&leaf, &pack.trained_lengths());
        let losses = surrogate.loss * weights;
        losses.sum(Kind::Float).backward();
        Self {
            losses: losses.detach(),
            gradient: log_probs.grad(),
            clipped: surrogate.clipped.detach(),
            kept,
        }
    }

    /// Returns the term of some of the tokens, whose log-probs have the graph.
    pub(super) fn part(&self, start: i64, log_probs: &Tensor) -> Term {
        let part = |column: &Tensor| column.narrow(0, start, log_probs.numel() as i64);
        // 0, with the derivative that is known.
        let pull = ((log_probs - log_probs.detach()) * part(&self.gradient)).sum(Kind::Float);
        Term {
            loss: part(&self.losses).sum(Kind::Float) + pull,
            clipped: part(&self.clipped),
            kept: part(&self.kept),
        }
    }
}

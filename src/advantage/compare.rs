//! Estimators side by side: what each makes of the same tokens.

use super::signals::resolve;
use super::{Method, Spread};
use crate::trajectory::Turn;

/// What one estimator makes of a table. A token counts if it may be trained and
/// the estimator gives it an advantage.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Side {
    /// Rows with advantages.
    pub rows: u64,
    /// Rows that contradict themselves.
    pub refused: u64,
    /// The advantages.
    pub advantages: Spread,
    /// Their sizes, `|A|`.
    pub sizes: Spread,
    /// Tokens with a distillation advantage `lt_t - lo_t`; 0 where the estimator
    /// has no such term.
    pub taught: u64,
    /// Those of them that its limit cut.
    pub clipped: u64,
}

impl Side {
    /// Returns the tokens that move the policy: those whose advantage is not 0.
    pub fn effective_tokens(&self) -> u64 {
        self.advantages.count - self.advantages.zeros
    }

    /// Returns the share of distillation advantages that the limit cut, or nothing of
    /// nothing.
    pub fn clip_share(&self) -> Option<f64> {
        (self.taught > 0).then(|| self.clipped as f64 / self.taught as f64)
    }
}

/// Two estimators, token by token.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Agreement {
    /// Tokens to which both give an advantage other than 0.
    pub both: u64,
    /// Those of them that both push the same way.
    pub same: u64,
}

impl Agreement {
    /// Returns the share of tokens that both push the same way, or nothing if they
    /// have no token in common.
    pub fn share(&self) -> Option<f64> {
        (self.both > 0).then(|| self.same as f64 / self.both as f64)
    }
}

/// Several estimators on one table.
#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    methods: Vec<Method>,
    sides: Vec<Side>,
    /// Of each pair, the earlier estimator first.
    agreements: Vec<Vec<Agreement>>,
}

impl Comparison {
    /// Begins a comparison.
    pub fn new(methods: Vec<Method>) -> Self {
        let count = methods.len();
        Self {
            methods,
            sides: vec![Side::default(); count],
            agreements: vec![vec![Agreement::default(); count]; count],
        }
    }

    /// Counts one row as each estimator has noted it, in the order of the methods.
    pub fn add(&mut self, noted: &[Turn]) {
        for ((side, method), turn) in self.sides.iter_mut().zip(&self.methods).zip(noted) {
            side.refused += u64::from(turn.advantage_error.is_some());
            let Some(advantages) = &turn.advantages else { continue };
            side.rows += 1;
            for token in trained(turn) {
                side.advantages.add(advantages[token]);
                side.sizes.add(advantages[token].abs());
            }
            if method.estimator.reads_teacher() {
                side.count_clipped(turn, method);
            }
        }
        for (first, one) in noted.iter().enumerate() {
            for (second, other) in noted.iter().enumerate().skip(first + 1) {
                self.agreements[first][second].count(one, other);
            }
        }
    }

    /// Returns what was made of the table, estimator by estimator.
    pub fn sides(&self) -> impl Iterator<Item = (&Method, &Side)> {
        self.methods.iter().zip(&self.sides)
    }

    /// Returns how far two estimators agree, by their places.
    pub fn agreement(&self, one: usize, other: usize) -> Agreement {
        self.agreements[one.min(other)][one.max(other)]
    }
}

impl Side {
    fn count_clipped(&mut self, turn: &Turn, method: &Method) {
        let Some(old) = &turn.rollout_log_probs else { return };
        let Ok(signals) = resolve(turn) else { return };
        let Some(teacher) = signals.teacher_log_probs(turn) else { return };
        let limit = method.distill_clip.unwrap_or(f32::INFINITY);
        for token in trained(turn) {
            if let Some(old) = old[token] {
                self.taught += 1;
                self.clipped += u64::from((teacher[token] - old).abs() > limit);
            }
        }
    }
}

impl Agreement {
    fn count(&mut self, one: &Turn, other: &Turn) {
        let (Some(ones), Some(others)) = (&one.advantages, &other.advantages) else { return };
        for token in trained(one) {
            let (one, other) = (ones[token], others[token]);
            if one != 0.0 && other != 0.0 {
                self.both += 1;
                self.same += u64::from((one > 0.0) == (other > 0.0));
            }
        }
    }
}

/// Returns the tokens that may be trained.
fn trained(turn: &Turn) -> impl Iterator<Item = usize> {
    let mask = turn.loss_mask.as_deref().unwrap_or_default();
    mask.iter().enumerate().filter(|(_, flag)| **flag == 1).map(|(token, _)| token)
}

//! From judged and taught turns to one number per response token: which reward
//! counts, which signals a row carries, which tokens may be trained, and the
//! estimators.
//!
//! Pure arithmetic on `f32` slices: no files, no clock, no tensors. `train`
//! calls the same functions with log-probs of its own. Absent on purpose: the
//! KL terms and the whitening of a whole batch, for which only `train` has the
//! numbers.

mod note;
mod promotion;
mod signals;
mod summary;

pub use note::note;
pub use promotion::{Outcome, outcome, promoted};
pub use signals::{NO_SIGNAL_PROMOTED, Signals, resolve, reward, structural_mask};
pub use summary::{Spread, Summary};

use std::fmt;

/// How the signals of a row become advantages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Estimator {
    /// `A_t = r`.
    Grpo,
    /// `A_t = lt_t - lo_t`: on-policy distillation towards the hinted teacher.
    Opd,
    /// `A_t = w_opd (lt_t - lo_t) + w_rl r`.
    Combine,
}

impl Estimator {
    /// Every estimator, in the order of the documentation.
    pub const ALL: [Self; 3] = [Self::Grpo, Self::Opd, Self::Combine];

    /// Returns the name on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Grpo => "grpo",
            Self::Opd => "opd",
            Self::Combine => "combine",
        }
    }

    /// Returns whether it reads rewards.
    pub fn reads_rewards(self) -> bool {
        self != Self::Opd
    }

    /// Returns whether it reads the teacher's log-probs. (`grpo` does for
    /// promoted turns, but runs well without.)
    pub fn reads_teacher(self) -> bool {
        self != Self::Grpo
    }
}

impl fmt::Display for Estimator {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

/// An estimator with its numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct Method {
    /// The estimator.
    pub estimator: Estimator,
    /// Weight of the reward term in `combine`.
    pub reward_weight: f32,
    /// Weight of the distillation term in `combine`.
    pub distill_weight: f32,
    /// Limit on the size of `lt_t - lo_t`, if there is one.
    pub distill_clip: Option<f32>,
}

impl Method {
    /// Returns an estimator with weights 1 and 1 and no limit.
    pub fn new(estimator: Estimator) -> Self {
        Self { estimator, reward_weight: 1.0, distill_weight: 1.0, distill_clip: None }
    }
}

/// What an estimator reads of one row. The log-probs are those of the response
/// tokens, one each.
#[derive(Debug, Clone, Copy)]
pub struct Evidence<'a> {
    /// The resolved reward.
    pub reward: Option<f32>,
    /// The teacher's log-probs, if a candidate is usable.
    pub teacher: Option<&'a [f32]>,
    /// The old policy's log-probs at the teacher's temperature.
    pub old: &'a [f32],
    /// Whether the at-least-one rule kept the row.
    pub promoted: bool,
}

/// Computes a row's advantages, or nothing if the row carries no signal that
/// the estimator uses.
///
/// A row without a usable hint has no distillation term (the reference distils
/// it towards the teacher without a hint).
pub fn advantages(method: &Method, evidence: &Evidence<'_>) -> Option<Vec<f32>> {
    let Evidence { teacher, old, promoted, .. } = *evidence;
    let reward = evidence.reward.filter(|reward| *reward != 0.0);
    let distilled = || teacher.map(|teacher| opd(teacher, old, method.distill_clip));
    match method.estimator {
        Estimator::Grpo => match reward {
            Some(reward) => Some(grpo(reward, old.len())),
            // Without this a promoted turn would be promoted to nothing.
            None if promoted => distilled(),
            None => None,
        },
        Estimator::Opd => distilled(),
        Estimator::Combine => match (distilled(), reward) {
            (Some(distilled), reward) => Some(combine(method, &distilled, reward.unwrap_or(0.0))),
            (None, Some(reward)) => Some(grpo(method.reward_weight * reward, old.len())),
            (None, None) => None,
        },
    }
}

/// Gives every token the reward of its turn.
pub fn grpo(reward: f32, tokens: usize) -> Vec<f32> {
    vec![reward; tokens]
}

/// On-policy distillation: `lt_t - lo_t`, limited to `clip` on both sides.
pub fn opd(teacher: &[f32], old: &[f32], clip: Option<f32>) -> Vec<f32> {
    let limit = clip.unwrap_or(f32::INFINITY);
    teacher.iter().zip(old).map(|(teacher, old)| (teacher - old).clamp(-limit, limit)).collect()
}

/// Adds the weighted terms: `w_opd d_t + w_rl r`.
pub fn combine(method: &Method, distilled: &[f32], reward: f32) -> Vec<f32> {
    let broadcast = method.reward_weight * reward;
    distilled.iter().map(|distilled| method.distill_weight * distilled + broadcast).collect()
}

/// How rewards of one group are made comparable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// `r - mean`.
    Mean,
    /// `(r - mean) / (std + 1e-6)`, std unbiased.
    Std,
}

/// Normalises rewards within their groups. Rewards that are not finite do not
/// count and stay as they are; a group of one, or of equal rewards, gives 0.
pub fn normalize_groups<G: Eq + std::hash::Hash>(
    rewards: &[f32],
    groups: &[G],
    scale: Scale,
) -> Vec<f32> {
    let mut members = std::collections::HashMap::<&G, Vec<usize>>::new();
    for (row, group) in groups.iter().enumerate() {
        if rewards[row].is_finite() {
            members.entry(group).or_default().push(row);
        }
    }
    let mut normalized = rewards.to_vec();
    for rows in members.values() {
        let count = rows.len() as f64;
        let mean = rows.iter().map(|row| f64::from(rewards[*row])).sum::<f64>() / count;
        let squares = rows.iter().map(|row| (f64::from(rewards[*row]) - mean).powi(2)).sum::<f64>();
        let equal = rows.iter().all(|row| rewards[*row] == rewards[rows[0]]);
        let divisor = match scale {
            Scale::Mean => 1.0,
            Scale::Std => (squares / (count - 1.0).max(1.0)).sqrt() + 1e-6,
        };
        for row in rows {
            // Equal rewards may miss their own mean by a rounding error.
            normalized[*row] = match equal {
                true => 0.0,
                false => ((f64::from(rewards[*row]) - mean) / divisor) as f32,
            };
        }
    }
    normalized
}

/// Why one row has no advantages although it should: it contradicts itself.
/// The other rows go on.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Refusal {
    /// Two columns of the row disagree on its length.
    #[error("{column} has {found} values for {wanted} {of}")]
    Length {
        /// The column, with the candidate where there are several.
        column: String,
        /// Its length.
        found: usize,
        /// The length it should have.
        wanted: usize,
        /// What it should be as long as.
        of: &'static str,
    },
    /// A number is NaN or infinite where it would be trained on.
    #[error("{column} is not finite at token {token}")]
    NotFinite {
        /// The column.
        column: &'static str,
        /// The token, counted from 0.
        token: usize,
    },
    /// A token id below 0.
    #[error("{column} has id {id} at token {token}")]
    NegativeId {
        /// The column.
        column: &'static str,
        /// The token, counted from 0.
        token: usize,
        /// The id.
        id: i32,
    },
    /// The reward is NaN or infinite.
    #[error("{column} is {value}")]
    Reward {
        /// The column.
        column: &'static str,
        /// Its value.
        value: f32,
    },
}

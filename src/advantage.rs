//! From judged and taught turns to one number per response token: which reward
//! counts, which signals a row carries, which tokens may be trained, and the
//! estimators.
//!
//! Pure arithmetic on `f32` slices: no files, no clock, no tensors. `train`
//! calls the same functions with log-probs of its own. Absent on purpose: the
//! KL terms and the whitening of a whole batch, for which only `train` has the
//! numbers.

mod compare;
mod groups;
mod note;
mod promotion;
mod returns;
mod shaping;
mod shares;
mod signals;
mod summary;

pub use compare::{Agreement, Comparison, Side};
pub use groups::{Scale, normalize_groups, rloo};
pub use note::{Standing, note, note_among, note_signals};
pub use promotion::{Outcome, outcome, promoted};
pub use returns::{gae, reinforce_plus_plus, reinforce_plus_plus_baseline};
pub use shaping::{Shaped, Weights};
pub use shares::{Member, member, shares};
pub use signals::{
    NO_SIGNAL_PROMOTED, Signals, resolve, resolve_shaped, reward, structural_mask, untrainable,
};
pub use summary::{Spread, Summary};

use std::borrow::Cow;
use std::fmt;

/// How the signals of a row become advantages. `r` is the reward part: the
/// turn's own reward, or what it comes to in its group or session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Estimator {
    /// `A_t = r`, normalised by mean and deviation where rows are grouped.
    Grpo,
    /// `A_t = r`, less the mean of the others in the group.
    Rloo,
    /// The reward at the last token, discounted backwards.
    ReinforcePlusPlus,
    /// `A_t = r`, less the mean of the group.
    ReinforcePlusPlusBaseline,
    /// Generalised advantage estimation over the turns of a session.
    Gae,
    /// `A_t = lt_t - lo_t`: on-policy distillation towards the hinted teacher.
    Opd,
    /// `A_t = w_opd (lt_t - lo_t) + w_rl r`.
    Combine,
    /// `A_t = r` beside a second loss, top-k distillation, which is `train`'s.
    Hybrid,
    /// No advantages: the loss is the KL from the teacher, which is `train`'s.
    TopkKl,
}

impl Estimator {
    /// Every estimator, in the order of the documentation.
    pub const ALL: [Self; 9] = [
        Self::Grpo,
        Self::Rloo,
        Self::ReinforcePlusPlus,
        Self::ReinforcePlusPlusBaseline,
        Self::Gae,
        Self::Opd,
        Self::Combine,
        Self::Hybrid,
        Self::TopkKl,
    ];

    /// Returns the name on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Grpo => "grpo",
            Self::Rloo => "rloo",
            Self::ReinforcePlusPlus => "reinforce++",
            Self::ReinforcePlusPlusBaseline => "reinforce++-baseline",
            Self::Gae => "gae",
            Self::Opd => "opd",
            Self::Combine => "combine",
            Self::Hybrid => "hybrid",
            Self::TopkKl => "topk-kl",
        }
    }

    /// Returns whether it reads rewards.
    pub fn reads_rewards(self) -> bool {
        !matches!(self, Self::Opd | Self::TopkKl)
    }

    /// Returns whether it reads the teacher's log-probs. (The others do for
    /// promoted turns, but run well without.)
    pub fn reads_teacher(self) -> bool {
        matches!(self, Self::Opd | Self::Combine) || self.reads_topk()
    }

    /// Returns whether it reads the likeliest tokens of the teacher.
    pub fn reads_topk(self) -> bool {
        matches!(self, Self::Hybrid | Self::TopkKl)
    }

    /// Returns whether its reward part is another number than the reward even
    /// without groups: then only a table made for it will do.
    pub fn shapes_rewards(self) -> bool {
        matches!(
            self,
            Self::Rloo | Self::ReinforcePlusPlus | Self::ReinforcePlusPlusBaseline | Self::Gae
        )
    }

    /// Returns whether its loss is one of advantages.
    pub fn has_advantages(self) -> bool {
        self != Self::TopkKl
    }

    /// Returns whether rows can be grouped under it.
    pub fn can_group(self) -> bool {
        !matches!(self, Self::Opd | Self::TopkKl | Self::ReinforcePlusPlus | Self::Gae)
    }

    /// Returns whether rows must be grouped under it.
    pub fn must_group(self) -> bool {
        matches!(self, Self::Rloo | Self::ReinforcePlusPlusBaseline)
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
    /// Weight of the reward term in `combine` and `hybrid`.
    pub reward_weight: f32,
    /// Weight of the distillation term in `combine`, `hybrid` and `topk-kl`.
    pub distill_weight: f32,
    /// Limit on the size of `lt_t - lo_t`, if there is one.
    pub distill_clip: Option<f32>,
    /// Discount of `gae` (per turn) and `reinforce++` (per token).
    pub gamma: f32,
    /// How far `gae` looks ahead.
    pub lambda: f32,
}

impl Method {
    /// Returns an estimator with weights 1 and 1, no limit, no discount and a
    /// `lambda` of 0.95.
    pub fn new(estimator: Estimator) -> Self {
        Self {
            estimator,
            reward_weight: 1.0,
            distill_weight: 1.0,
            distill_clip: None,
            gamma: 1.0,
            lambda: 0.95,
        }
    }
}

/// What an estimator reads of one row. The log-probs are those of the response
/// tokens, one each.
#[derive(Debug, Clone, Copy)]
pub struct Evidence<'a> {
    /// The resolved reward.
    pub reward: Option<f32>,
    /// The reward part per response token, where it is not just the reward.
    pub reward_part: Option<&'a [f32]>,
    /// The teacher's log-probs, if a candidate is usable.
    pub teacher: Option<&'a [f32]>,
    /// The old policy's log-probs at the teacher's temperature.
    pub old: &'a [f32],
    /// Whether the at-least-one rule kept the row.
    pub promoted: bool,
}

impl Evidence<'_> {
    /// Returns the reward part, if there is anything in it.
    fn rewarded(&self) -> Option<Cow<'_, [f32]>> {
        let rewarded = self.reward.is_some_and(|reward| reward != 0.0);
        match self.reward_part {
            Some(part) => {
                let any = rewarded || part.iter().any(|value| *value != 0.0);
                any.then_some(Cow::Borrowed(part))
            }
            None => {
                let reward = self.reward.filter(|_| rewarded)?;
                Some(Cow::Owned(grpo(reward, self.old.len())))
            }
        }
    }
}

/// Computes a row's advantages, or nothing if the row carries no signal that
/// the estimator uses.
///
/// A row without a usable hint has no distillation term (the reference distils
/// it towards the teacher without a hint). Of `hybrid` this is the reward part,
/// weighted; 0 where there is only a hint, as under `topk-kl` everywhere.
pub fn advantages(method: &Method, evidence: &Evidence<'_>) -> Option<Vec<f32>> {
    let Evidence { teacher, old, promoted, .. } = *evidence;
    let distilled = || teacher.map(|teacher| opd(teacher, old, method.distill_clip));
    match method.estimator {
        Estimator::Grpo
        | Estimator::Rloo
        | Estimator::ReinforcePlusPlus
        | Estimator::ReinforcePlusPlusBaseline
        | Estimator::Gae => match evidence.rewarded() {
            Some(part) => Some(part.into_owned()),
            // Without this a promoted turn would be promoted to nothing.
            None if promoted => distilled(),
            None => None,
        },
        Estimator::Opd => distilled(),
        Estimator::Combine => match (distilled(), evidence.rewarded()) {
            (Some(distilled), part) => Some(combine(method, &distilled, part.as_deref())),
            (None, Some(part)) => Some(weighted(method.reward_weight, &part)),
            (None, None) => None,
        },
        Estimator::Hybrid => match (evidence.rewarded(), teacher) {
            (Some(part), _) => Some(weighted(method.reward_weight, &part)),
            (None, Some(_)) => Some(vec![0.0; old.len()]),
            (None, None) => None,
        },
        Estimator::TopkKl => teacher.map(|_| vec![0.0; old.len()]),
    }
}

/// Gives every token the reward of its turn.
pub fn grpo(reward: f32, tokens: usize) -> Vec<f32> {
    vec![reward; tokens]
}

/// On-policy distillation: `lt_t - lo_t`, limited to `clip` on both sides.
pub fn opd(teacher: &[f32], old: &[f32], clip: Option<f32>) -> Vec<f32> {
    teacher.iter().zip(old).map(|(teacher, old)| opd_at(*teacher, *old, clip)).collect()
}

/// The same of one token.
fn opd_at(teacher: f32, old: f32, clip: Option<f32>) -> f32 {
    let limit = clip.unwrap_or(f32::INFINITY);
    (teacher - old).clamp(-limit, limit)
}

/// Adds the weighted terms: `w_opd d_t + w_rl r`.
pub fn combine(method: &Method, distilled: &[f32], reward_part: Option<&[f32]>) -> Vec<f32> {
    let (distill, reward) = (method.distill_weight, method.reward_weight);
    let sum = |(distilled, part): (&f32, &f32)| distill * distilled + reward * part;
    match reward_part {
        Some(part) => distilled.iter().zip(part).map(sum).collect(),
        None => weighted(distill, distilled),
    }
}

fn weighted(weight: f32, values: &[f32]) -> Vec<f32> {
    values.iter().map(|value| weight * value).collect()
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
        /// The column, with the candidate where there are several.
        column: String,
        /// The token, counted from 0.
        token: usize,
    },
    /// A log-prob above 0 where it would be trained on.
    #[error("{column} is {value} at token {token}, above 0")]
    AboveZero {
        /// The column, with the candidate where there are several.
        column: String,
        /// The token, counted from 0.
        token: usize,
        /// The value.
        value: f32,
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
    /// The reward is none.
    #[error("{column} is {value:?}, wanted -1 to 1")]
    RewardRange {
        /// The column.
        column: &'static str,
        /// Its value.
        value: f32,
    },
}

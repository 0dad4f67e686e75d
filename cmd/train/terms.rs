//! The flags of the loss and of the way of the learning rate.

use clap::ValueEnum;

use super::{dual, not_negative, share};
use crate::reduction::ReductionName;

/// The terms of the loss.
#[derive(clap::Args, Debug)]
pub(super) struct LossArgs {
    /// Loss of the policy term
    #[arg(long, value_enum, value_name = "FORM", default_value_t)]
    pub(super) loss: LossName,
    /// The ratio counts as at least 1 - X
    #[arg(long, value_name = "X", default_value_t = 0.2, value_parser = share)]
    pub(super) clip_low: f64,
    /// The ratio counts as at most 1 + X
    #[arg(long, value_name = "X", default_value_t = 0.28, value_parser = not_negative)]
    pub(super) clip_high: f64,
    /// Bound, in advantages, of the loss of negative ones; 0 is none [default: 3; 0 with cispo]
    #[arg(long, value_name = "C", value_parser = dual)]
    pub(super) dual_clip: Option<f64>,
    /// OPSM: drop what is blamed in answers whose mean of lo - lc is above X [default: off]
    #[arg(long, value_name = "X", value_parser = not_negative)]
    pub(super) opsm_delta: Option<f64>,
    /// Weight of the KL to the start model
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = not_negative)]
    pub(super) kl_coef: f64,
    /// Form of that KL (Schulman 2020)
    #[arg(long, value_enum, value_name = "FORM", default_value_t = KlName::LowVarKl)]
    pub(super) kl: KlName,
    /// Weight that KL by the ratio, so that it and its gradient are unbiased
    #[arg(long)]
    pub(super) kl_unbiased: bool,
    /// Weight of the entropy
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = not_negative)]
    pub(super) entropy_coef: f64,
    /// Correction for the server's probabilities
    #[arg(long, value_enum, value_name = "FORM", default_value_t = ImportanceName::Tis)]
    pub(super) importance: ImportanceName,
    /// Lower bound of the importance weight
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = not_negative)]
    pub(super) importance_low: f64,
    /// Upper bound of the importance weight
    #[arg(long, value_name = "X", default_value_t = 2.0, value_parser = not_negative)]
    pub(super) importance_high: f64,
    /// How the losses of tokens become one
    #[arg(long, value_enum, value_name = "HOW", default_value_t)]
    pub(super) reduction: ReductionName,
}

/// The way of the learning rate.
#[derive(clap::Args, Debug)]
pub(super) struct ScheduleArgs {
    /// Updates until the learning rate is whole
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) warmup: u64,
    /// How the learning rate goes from there
    #[arg(long, value_enum, value_name = "HOW", default_value_t)]
    pub(super) schedule: ScheduleName,
    /// Updates in all that a falling rate is spread over, those of the warm-up among them
    #[arg(long, value_name = "N")]
    pub(super) total_steps: Option<u64>,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum LossName {
    /// PPO: the ratio of each token, clipped (Schulman et al. 2017)
    #[default]
    Ppo,
    /// GSPO: the ratio of the whole answer, clipped (Zheng et al. 2025)
    Gspo,
    /// CISPO: the clipped ratio as a constant weight (MiniMax-M1, 2025)
    Cispo,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum ScheduleName {
    /// It stays
    #[default]
    Constant,
    /// It falls in a straight line
    Linear,
    /// It falls along half a cosine (Loshchilov & Hutter 2017)
    Cosine,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KlName {
    /// x
    K1,
    /// x squared, halved
    K2,
    /// exp(-x) - 1 + x
    K3,
    /// k3, its value at most 10
    #[value(name = "low_var_kl")]
    LowVarKl,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ImportanceName {
    /// Weight cut at both bounds (TIS, Yao et al. 2025)
    Tis,
    /// Weight 0 outside the bounds (IcePop, 2025)
    Icepop,
    /// None
    Off,
}

#[cfg(feature = "torch")]
mod settled {
    use oclaw::advantage::{Estimator, Method};
    use oclaw::loss::{Clip, KlKind, Reduction};
    use oclaw::train::{Form, Importance, Policy, Schedule, Shape, Teaching, Terms};

    use super::{ImportanceName, KlName, LossArgs, LossName, ScheduleArgs, ScheduleName};
    use crate::reduction::ReductionName;
    use crate::report::Failure;

    impl LossArgs {
        /// Refuses flags that would do nothing.
        pub(in crate::train) fn check(&self) -> Result<(), Failure> {
            let dual = self.dual_clip.is_some_and(|bound| bound > 0.0);
            let problem = match dual && self.loss == LossName::Cispo {
                true => "`--dual-clip` bounds a ratio times an advantage: `--loss cispo` has none",
                false if self.kl_unbiased && self.kl_coef == 0.0 => {
                    "`--kl-unbiased` weights a KL that counts nothing: give `--kl-coef`"
                }
                false => return Ok(()),
            };
            Err(Failure::usage(problem))
        }

        /// Returns whether the server's probabilities are not corrected for.
        pub(in crate::train) fn importance_is_off(&self) -> bool {
            self.importance == ImportanceName::Off
        }

        /// Returns the bound of the dual clip, 0 for none.
        pub(in crate::train) fn dual_bound(&self) -> f64 {
            let own = if self.loss == LossName::Cispo { 0.0 } else { 3.0 };
            self.dual_clip.unwrap_or(own)
        }

        /// Returns the terms.
        pub(in crate::train) fn terms(&self, method: &Method) -> Terms {
            let (low, high) = (self.importance_low, self.importance_high);
            let dual = Some(self.dual_bound()).filter(|bound| *bound > 0.0);
            Terms {
                policy: Policy {
                    form: match self.loss {
                        LossName::Ppo => Form::Ppo,
                        LossName::Gspo => Form::Gspo,
                        LossName::Cispo => Form::Cispo,
                    },
                    clip: Clip { low: self.clip_low, high: self.clip_high, dual },
                    drift: self.opsm_delta,
                },
                teaching: match method.estimator {
                    Estimator::TopkKl => Teaching::Kl { weight: method.distill_weight.into() },
                    _ => Teaching::Surrogate,
                },
                importance: match self.importance {
                    ImportanceName::Tis => Importance::Truncated { low, high },
                    ImportanceName::Icepop => Importance::IcePop { low, high },
                    ImportanceName::Off => Importance::Off,
                },
                kl: match self.kl {
                    KlName::K1 => KlKind::K1,
                    KlName::K2 => KlKind::K2,
                    KlName::K3 => KlKind::K3,
                    KlName::LowVarKl => KlKind::LowVar,
                },
                kl_unbiased: self.kl_unbiased,
                kl_coefficient: self.kl_coef,
                entropy_coefficient: self.entropy_coef,
                reduction: match self.reduction {
                    ReductionName::Sample => Reduction::Sample,
                    ReductionName::Token => Reduction::Token,
                },
            }
        }
    }

    impl ScheduleArgs {
        /// Refuses a warm-up that outlasts the schedule, and an end of what has none.
        pub(in crate::train) fn check(&self) -> Result<(), Failure> {
            let problem: String = match (self.schedule, self.total_steps) {
                (ScheduleName::Constant, Some(_)) => {
                    "`--total-steps` is for a rate that falls: `--schedule` linear or cosine".into()
                }
                (ScheduleName::Linear | ScheduleName::Cosine, None) => {
                    "a rate that falls needs `--total-steps`: until when".into()
                }
                (_, Some(total)) if total <= self.warmup => {
                    let warmup = self.warmup;
                    format!("`--total-steps` is {total}, no more than the {warmup} of `--warmup`")
                }
                _ => return Ok(()),
            };
            Err(Failure::usage(problem))
        }

        /// Returns the schedule.
        pub(in crate::train) fn schedule(&self) -> Schedule {
            Schedule {
                warmup: self.warmup,
                shape: match self.schedule {
                    ScheduleName::Constant => Shape::Constant,
                    ScheduleName::Linear => Shape::Linear,
                    ScheduleName::Cosine => Shape::Cosine,
                },
                total: self.total_steps.unwrap_or(0),
            }
        }
    }
}

//! How the losses of tokens become one: the same words wherever it is asked.

use clap::ValueEnum;
use serde::Serialize;

/// How the losses of tokens become one.
#[derive(ValueEnum, Serialize, Debug, Clone, Copy, PartialEq, Eq, Default)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ReductionName {
    /// Mean over a turn's tokens, then over the turns
    #[default]
    Sample,
    /// Mean over all tokens
    Token,
}

//! Training: a batch of turns makes the next policy.
//!
//! The way of a batch: [`admit`] turns rows into samples or says why not, a
//! forward pass gives the old log-probs, `advantage` the advantages,
//! [`gradients`] packs the samples and runs the loss through the model,
//! [`AdamW`] moves the weights, and the new policy is written as one unit with
//! the optimiser's state and the ledger of turns.

mod adamw;
mod average;
mod checkpoint;
mod distil;
mod head;
mod health;
mod hold;
mod ledger;
mod metrics;
mod objective;
mod pack;
mod policies;
mod rounding;
mod sample;
mod schedule;
mod start;
mod surrogate;
mod teaching;
mod trainer;

use std::io;
use std::path::{Path, PathBuf};

use crate::model;
use crate::tensors;

pub use adamw::{AdamW, Moments, Rates, Update, gradient_norm, zero_gradients};
pub use checkpoint::{Base, Record, read_record};
pub use distil::{Distillation, Distilled, Topk};
pub use health::Ruin;
pub use hold::discard_unfinished;
pub use ledger::{Entry, Ledger};
pub use metrics::Metrics;
pub use objective::{Importance, LogProbs, Measures, Prepared, Terms, gradients, sample_log_probs};
pub use rounding::{Draw, Rounding, round};
pub use sample::{Admission, OldLogProbs, Refusal, Sample, admit};
pub use schedule::{Schedule, Shape};
pub use start::{Compute, Options};
pub use surrogate::{Form, Policy};
pub use teaching::Teaching;
pub use trainer::{Fault, Trained, Trainer};

/// What ends a run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or folder cannot be read.
    #[error("`{}`: cannot be read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's own message.
        source: io::Error,
    },
    /// A file or folder cannot be written.
    #[error("`{}`: cannot be written: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's own message.
        source: io::Error,
    },
    /// The model cannot be loaded or saved.
    #[error(transparent)]
    Model(#[from] model::Error),
    /// The optimiser's file is broken.
    #[error(transparent)]
    Tensors(#[from] tensors::Error),
    /// Neither a model nor a policy to start from.
    #[error("`{}`: holds no policy yet, and no start model is given", out.display())]
    NoModel {
        /// The folder of policies.
        out: PathBuf,
    },
    /// The model given is not the one that the policies come from.
    #[error(
        "`{}`: its policies come from `{}`, not from `{}`",
        out.display(), recorded.display(), given.display()
    )]
    OtherBase {
        /// The folder of policies.
        out: PathBuf,
        /// The model they come from.
        recorded: PathBuf,
        /// The model given.
        given: PathBuf,
    },
    /// The policies train something else than was asked for.
    #[error("`{}`: trains {found}, and {given} is asked for", policy.display())]
    OtherForm {
        /// The latest policy.
        policy: PathBuf,
        /// What it trains.
        found: String,
        /// What was asked for.
        given: String,
    },
    /// Another trainer is at work on the folder.
    #[error("`{}`: another trainer is writing here", folder.display())]
    Locked {
        /// The folder.
        folder: PathBuf,
    },
    /// `latest` points nowhere.
    #[error("`{}`: {problem}", path.display())]
    Latest {
        /// The link.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A policy's record is not readable.
    #[error("`{}`: {problem}", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The optimiser's state does not fit the model.
    #[error("`{}`: {problem}", path.display())]
    State {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A ledger is not readable or writable.
    #[error("`{}`: {problem}", path.display())]
    Ledger {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// Updates failed one after the other.
    #[error("{updates} updates in a row were not finite: the run stops, `latest` is untouched")]
    NotFinite {
        /// How many.
        updates: u64,
    },
    /// The step would make a policy that is broken.
    #[error("step {step}: {ruin}: nothing is written, `latest` is untouched")]
    Ruined {
        /// The step.
        step: u64,
        /// What the step did to the policy.
        ruin: Ruin,
    },
}

impl Error {
    fn read(path: &Path, source: io::Error) -> Self {
        Self::Read { path: path.to_owned(), source }
    }

    fn write(path: &Path, source: io::Error) -> Self {
        Self::Write { path: path.to_owned(), source }
    }
}

//! How a run is set up: its options, the model it starts from, the state it
//! takes up again.

use std::path::{Path, PathBuf};

use super::Error;
use super::adamw::{AdamW, Rates};
use super::checkpoint::{self, Base, OPTIMIZER, Record};
use super::objective::Terms;
use super::sample::Admission;
use crate::model::{Dtype, LoadOptions, Model};

/// Parameters from which on a policy is served in its base's own type.
const LARGE: u64 = 1_000_000_000;

/// How a run trains.
#[derive(Debug, Clone)]
pub struct Options {
    /// The start model; needed where there is no policy yet.
    pub model: Option<PathBuf>,
    /// Folder of the policies.
    pub out: PathBuf,
    /// Which rows are trained.
    pub admission: Admission,
    /// The loss.
    pub terms: Terms,
    /// The optimiser's constants.
    pub rates: Rates,
    /// Updates on each batch.
    pub epochs: u32,
    /// Tokens that go through the model at once.
    pub tokens_per_pass: usize,
    /// Type of the weights written; f32 below a billion weights, else the
    /// base's, if not given.
    pub dtype: Option<Dtype>,
    /// Policies kept.
    pub keep: u64,
    /// Seed, for the record: no part of a step draws random numbers yet.
    pub seed: u64,
    /// The command's settings, for the record.
    pub settings: serde_json::Value,
}

/// Finds the model that the line of policies starts from.
pub(super) fn base(options: &Options, record: Option<&Record>) -> Result<Base, Error> {
    let given = options.model.as_deref().map(Base::of).transpose()?;
    match (given, record) {
        (Some(given), None) => Ok(given),
        (None, None) => Err(Error::NoModel { out: options.out.clone() }),
        (None, Some(record)) => Ok(record.base.clone()),
        (Some(given), Some(record)) if given.sha256 == record.base.sha256 => Ok(given),
        (Some(given), Some(record)) => Err(Error::OtherBase {
            out: options.out.clone(),
            recorded: record.base.folder.clone(),
            given: given.folder,
        }),
    }
}

/// Returns the type that a policy is served in unless told otherwise.
pub(super) fn default_dtype(base: &Path, weights: u64) -> Result<Dtype, Error> {
    match weights < LARGE {
        true => Ok(Dtype::F32),
        // The type of the checkpoint is known only once it is read.
        false => Ok(Model::load(base, &LoadOptions::default())?.dtype()),
    }
}

/// Takes up the optimiser's state of a policy.
pub(super) fn resume(
    policy: &Path,
    record: &Record,
    model: &Model,
    optimizer: &mut AdamW,
    notes: &mut Vec<String>,
) -> Result<(), Error> {
    let state = policy.join(OPTIMIZER);
    if !state.exists() {
        notes.push(format!(
            "`{}` is not there: the optimiser starts anew, its running means at 0",
            state.display()
        ));
        optimizer.updates = 0;
        return Ok(());
    }
    let dtype = record
        .dtype
        .parse()
        .map_err(|problem| Error::Record { path: policy.to_owned(), problem })?;
    checkpoint::read_optimizer(&state, optimizer, model, dtype)
}

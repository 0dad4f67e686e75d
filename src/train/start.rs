//! How a run is set up: its options, the model it starts from, the state it
//! takes up again.

use std::path::{Path, PathBuf};

use tch::Device;

use super::Error;
use super::adamw::{AdamW, Rates};
use super::checkpoint::{self, ADAPTER, Base, OPTIMIZER, Record};
use super::objective::Terms;
use super::rounding::Rounding;
use super::sample::Admission;
use super::schedule::Schedule;
use crate::model::{Adapter, Dtype, LoadOptions, Lora, Model, adapter};

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
    /// What a moving average of the policies keeps of itself at each update, if there
    /// is to be one.
    pub average: Option<f64>,
    /// The way of the learning rate.
    pub schedule: Schedule,
    /// How often each batch is gone through.
    pub epochs: u32,
    /// Parts that a batch is cut into, each with an update of its own.
    pub parts: u32,
    /// Tokens that go through the model at once.
    pub tokens_per_pass: usize,
    /// Type of the weights written; f32 below a billion weights, else the
    /// base's, if not given.
    pub dtype: Option<Dtype>,
    /// How all weights become that type, where it is bf16. The adapters' sum with the
    /// base is rounded to the nearest.
    pub rounding: Rounding,
    /// What is trained, and how it is computed.
    pub compute: Compute,
    /// Policies kept.
    pub keep: u64,
    /// Seed of a new adapter, and of rounding by chance.
    pub seed: u64,
    /// The command's settings, for the record.
    pub settings: serde_json::Value,
}

/// What is trained, and how it is computed.
#[derive(Debug, Clone, Copy)]
pub struct Compute {
    /// Adapters that are trained in place of the weights.
    pub lora: Option<Lora>,
    /// Type of the products. What is trained is f32 all the same.
    pub dtype: Dtype,
    /// Where.
    pub device: Device,
    /// Whether layers are run again on the way back, for less memory.
    pub checkpoint_activations: bool,
}

impl Default for Compute {
    fn default() -> Self {
        Self { lora: None, dtype: Dtype::F32, device: Device::Cpu, checkpoint_activations: false }
    }
}

impl Compute {
    pub(super) fn load(&self, trainable: bool) -> LoadOptions {
        LoadOptions {
            dtype: Some(self.dtype),
            device: self.device,
            trainable,
            narrow: false,
            checkpoint_activations: self.checkpoint_activations,
        }
    }
}

/// Loads the model to be trained: all weights of the latest policy, or the start
/// model with the latest policy's adapter, or with a new one.
pub(super) fn load(options: &Options, base: &Base, latest: Option<&Path>) -> Result<Model, Error> {
    let compute = &options.compute;
    let written = latest.map(|policy| policy.join(ADAPTER)).filter(|folder| folder.exists());
    if let Some(policy) = latest {
        let found = match &written {
            Some(folder) => Some(adapter::settings(folder)?.1),
            None => None,
        };
        if found != compute.lora {
            let named = |lora: Option<Lora>| match lora {
                Some(lora) => format!("an adapter ({lora})"),
                None => "all weights".to_owned(),
            };
            return Err(Error::OtherForm {
                policy: policy.to_owned(),
                found: named(found),
                given: named(compute.lora),
            });
        }
    }
    let Some(lora) = compute.lora else {
        return Ok(Model::load(latest.unwrap_or(&base.folder), &compute.load(true))?);
    };
    let model = Model::load(&base.folder, &compute.load(false))?;
    let adapter = match written {
        Some(folder) => Adapter::read(&folder, &model.config, compute.device)?,
        None => Adapter::new(&model.config, lora, options.seed, compute.device),
    };
    Ok(model.with_adapter(adapter)?)
}

/// Returns the type in which a policy's folder holds what is trained: an adapter
/// lies there whole, whatever becomes of the weights it is added to.
pub(super) fn held(model: &Model, dtype: Dtype) -> Dtype {
    match model.adapter() {
        Some(_) => Dtype::F32,
        None => dtype,
    }
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
    checkpoint::read_optimizer(&state, optimizer, model, held(model, dtype))
}

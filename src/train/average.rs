//! The moving average of the policies: a teacher that changes slowly.

use std::path::Path;

use tch::{Kind, Tensor};

use super::Error;
use super::checkpoint::{ADAPTER, AVERAGE};
use crate::model::{Adapter, Dtype, LoadOptions, Model};

/// `average ← decay average + (1 - decay) weights` after every update, in f32.
#[derive(Debug)]
pub(super) struct Average {
    decay: f64,
    /// In the order of what the model trains.
    weights: Vec<(String, Tensor)>,
}

impl Average {
    /// Takes up the average of the latest policy, or begins at the model. Nothing, if
    /// none is wanted.
    pub(super) fn open(
        decay: Option<f64>,
        latest: Option<&Path>,
        model: &Model,
        notes: &mut Vec<String>,
    ) -> Result<Option<Self>, Error> {
        let folder = latest.map(|policy| policy.join(AVERAGE));
        let written = folder.as_deref().filter(|folder| folder.exists());
        let Some(decay) = decay else {
            if let Some(folder) = written {
                notes.push(format!("`{}` is not carried on without `--ema`", folder.display()));
            }
            return Ok(None);
        };
        let weights = match written {
            Some(folder) => read(folder, model)?,
            None => {
                if let Some(folder) = &folder {
                    notes.push(format!(
                        "`{}` is not there: the average begins at the policy as it is",
                        folder.display()
                    ));
                }
                let copy = |(name, weight): &(String, Tensor)| {
                    (name.clone(), weight.detach().to_kind(Kind::Float).copy())
                };
                model.trained().iter().map(copy).collect()
            }
        };
        Ok(Some(Self { decay, weights }))
    }

    /// Moves it towards the weights.
    pub(super) fn follow(&mut self, model: &Model) {
        tch::no_grad(|| {
            for ((_, average), (_, weight)) in self.weights.iter_mut().zip(model.trained()) {
                let _ = average.lerp_(&weight.detach(), 1.0 - self.decay);
            }
        });
    }

    /// Writes it as a model folder into a policy's. All weights lie there in f32: the
    /// type that policies are served in would swallow how little they move. `pattern`
    /// and `base` are as for the policy itself.
    pub(super) fn write(
        &self,
        model: &Model,
        [pattern, base]: [&Path; 2],
        policy: &Path,
        served: Dtype,
    ) -> Result<(), Error> {
        let folder = policy.join(AVERAGE);
        let adapter = model.adapter().map(|adapter| adapter.with(&self.weights));
        let dtype = if adapter.is_some() { served } else { Dtype::F32 };
        model.save_with(&self.weights, pattern, &folder, Some(dtype))?;
        match adapter {
            Some(adapter) => Ok(adapter.write(base, &folder.join(ADAPTER))?),
            None => Ok(()),
        }
    }
}

/// Reads the average in a policy's folder: that of the adapters, or of all weights.
fn read(folder: &Path, model: &Model) -> Result<Vec<(String, Tensor)>, Error> {
    let device = model.device();
    if model.adapter().is_some() {
        let adapter = Adapter::read(&folder.join(ADAPTER), &model.config, device)?;
        return Ok(adapter.into_tensors());
    }
    let options = LoadOptions { dtype: Some(Dtype::F32), device, ..LoadOptions::default() };
    let written = Model::load(folder, &options)?;
    let shared = |(name, weight): &(String, Tensor)| (name.clone(), weight.shallow_clone());
    Ok(written.parameters().iter().map(shared).collect())
}

//! What lies in a policy's folder beside the weights: where it came from, the
//! optimiser's state, the ledger.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tch::Tensor;

use crate::model::{Dtype, Model};
use crate::tensors::{self, Reader, Writer};

use super::Error;
use super::adamw::{self, AdamW, Moments};

/// Folder of our own files inside a policy.
pub(super) const OURS: &str = "oclaw";
/// The optimiser's state, from the policy's folder.
pub(super) const OPTIMIZER: &str = "oclaw/optimizer.safetensors";
/// The ledger, from the policy's folder.
pub(super) const LEDGER: &str = "oclaw/ledger.parquet";
/// The adapter that was trained, as a folder of `peft`, from the policy's folder.
pub(super) const ADAPTER: &str = "adapter";
/// The moving average of the policies, a model folder, from the policy's folder.
pub(super) const AVERAGE: &str = "ema";
const TRAIN: &str = "oclaw/train.json";

/// What `train.json` says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The policy step.
    pub step: u64,
    /// Optimiser steps taken so far.
    pub updates: u64,
    /// The model this line of policies started from.
    pub base: Base,
    /// Type of the weights in this folder.
    pub dtype: String,
    /// Seed of the run.
    pub seed: u64,
    /// Version of the program.
    pub oclaw: String,
    /// Settings of the run, for people.
    pub settings: serde_json::Value,
    /// Metrics of the step.
    pub metrics: serde_json::Value,
}

/// The model a line of policies started from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Base {
    /// Where it was.
    pub folder: PathBuf,
    /// SHA-256 over its settings and weights.
    pub sha256: String,
}

impl Base {
    /// Reads what identifies a model folder.
    pub fn of(folder: &Path) -> Result<Self, Error> {
        let mut names: Vec<String> = fs::read_dir(folder)
            .map_err(|source| Error::read(folder, source))?
            .flatten()
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .filter(|name| name == "config.json" || name.ends_with(".safetensors"))
            .collect();
        names.sort();
        let mut digest = Sha256::new();
        for name in names {
            let path = folder.join(&name);
            digest.update(name.as_bytes());
            let mut file = fs::File::open(&path).map_err(|source| Error::read(&path, source))?;
            let length = std::io::copy(&mut file, &mut digest)
                .map_err(|source| Error::read(&path, source))?;
            digest.update(length.to_le_bytes());
        }
        let folder = folder.canonicalize().map_err(|source| Error::read(folder, source))?;
        let sha256 = digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Self { folder, sha256 })
    }
}

/// Writes the record of a policy.
pub(super) fn write_record(policy: &Path, record: &Record) -> Result<(), Error> {
    let path = policy.join(TRAIN);
    let mut text = serde_json::to_vec_pretty(record)
        .map_err(|error| Error::Record { path: path.clone(), problem: error.to_string() })?;
    text.push(b'\n');
    fs::write(&path, text).map_err(|source| Error::write(&path, source))
}

/// Reads the record of a policy.
pub fn read_record(policy: &Path) -> Result<Record, Error> {
    let path = policy.join(TRAIN);
    let text = fs::read(&path).map_err(|source| Error::read(&path, source))?;
    serde_json::from_slice(&text)
        .map_err(|error| Error::Record { path, problem: error.to_string() })
}

/// Writes the optimiser's state. Where the weights beside it are rounded
/// (`dtype` is not f32), the state holds the whole ones too.
pub(super) fn write_optimizer(
    path: &Path,
    optimizer: &AdamW,
    parameters: &[(String, Tensor)],
    dtype: Dtype,
) -> Result<(), Error> {
    let masters = dtype != Dtype::F32;
    let mut heads = Vec::new();
    for (name, tensor) in parameters {
        let shape: Vec<usize> = tensor.size().iter().map(|length| *length as usize).collect();
        for part in parts(masters) {
            heads.push((format!("{part}.{name}"), tensors::Dtype::F32, shape.clone()));
        }
    }
    let mut writer = Writer::create(path, heads)?;
    for ((_, tensor), moments) in parameters.iter().zip(&optimizer.moments) {
        writer.write(&bytes(&moments.mean))?;
        writer.write(&bytes(&moments.square))?;
        if masters {
            writer.write(&bytes(&adamw::values(tensor)))?;
        }
    }
    Ok(writer.finish()?)
}

/// Reads the optimiser's state, and the whole weights where the policy's own
/// are rounded.
pub(super) fn read_optimizer(
    path: &Path,
    optimizer: &mut AdamW,
    model: &Model,
    dtype: Dtype,
) -> Result<(), Error> {
    let reader = Reader::open(path)?;
    let find = |name: String, length: usize| {
        let entry = reader.entries().iter().find(|entry| entry.name == name);
        let problem = |problem: &str| Error::State {
            path: path.to_owned(),
            problem: format!("tensor `{name}` {problem}"),
        };
        let entry = entry.ok_or_else(|| problem("is missing"))?;
        let values = numbers(&reader.read(entry)?);
        match values.len() == length && entry.dtype == tensors::Dtype::F32 {
            true => Ok(values),
            false => Err(problem("has another shape")),
        }
    };
    for ((name, tensor), moments) in model.trained().iter().zip(&mut optimizer.moments) {
        let length = tensor.numel();
        *moments = Moments {
            mean: find(format!("mean.{name}"), length)?,
            square: find(format!("square.{name}"), length)?,
        };
        if dtype != Dtype::F32 {
            adamw::write(tensor, &find(format!("weight.{name}"), length)?);
        }
    }
    Ok(())
}

fn parts(masters: bool) -> &'static [&'static str] {
    match masters {
        true => &["mean", "square", "weight"],
        false => &["mean", "square"],
    }
}

fn bytes(values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; size_of_val(values)];
    let (words, _) = bytes.as_chunks_mut::<4>();
    for (word, value) in words.iter_mut().zip(values) {
        *word = value.to_le_bytes();
    }
    bytes
}

fn numbers(bytes: &[u8]) -> Vec<f32> {
    let (words, _) = bytes.as_chunks::<4>();
    words.iter().map(|word| f32::from_le_bytes(*word)).collect()
}

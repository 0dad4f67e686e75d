//! LoRA (Hu et al. 2021) adapters in the form of the `peft` library: two small
//! matrices beside each weight, W + alpha / rank * B A, in a folder of their own.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use super::checkpoint;
use super::config::Config;
use super::decoder::Decoder;
use super::linear::LowRank;
use super::sampler::{GOLDEN, mix};
use super::{Dtype, Error, Model};
use crate::tensors::{self, Reader, Writer};

/// Settings of an adapter, as `peft` names the file.
pub const SETTINGS: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
/// What `peft` puts before the name of a module.
const PREFIX: &str = "base_model.model.";

/// The weights of a layer that may have an adapter, by their place in it.
const MODULES: [(&str, &str); 7] = [
    ("q_proj", "self_attn.q_proj"),
    ("k_proj", "self_attn.k_proj"),
    ("v_proj", "self_attn.v_proj"),
    ("o_proj", "self_attn.o_proj"),
    ("gate_proj", "mlp.gate_proj"),
    ("up_proj", "mlp.up_proj"),
    ("down_proj", "mlp.down_proj"),
];

/// Which weights of every layer have an adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Targets([bool; MODULES.len()]);

impl Targets {
    /// All of them.
    pub const ALL: Self = Self([true; MODULES.len()]);

    /// Returns their names.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        MODULES.iter().zip(self.0).filter(|(_, chosen)| *chosen).map(|((name, _), _)| *name)
    }

    fn paths(self) -> impl Iterator<Item = &'static str> {
        MODULES.iter().zip(self.0).filter(|(_, chosen)| *chosen).map(|((_, path), _)| *path)
    }
}

impl std::str::FromStr for Targets {
    type Err = String;

    /// Reads names with commas between them, or `all-linear`.
    fn from_str(text: &str) -> Result<Self, String> {
        if text == "all-linear" {
            return Ok(Self::ALL);
        }
        let mut targets = Self([false; MODULES.len()]);
        for word in text.split(',') {
            let place = MODULES.iter().position(|(name, _)| *name == word.trim());
            let known: Vec<_> = Self::ALL.names().collect();
            let place = place
                .ok_or_else(|| format!("`{word}` is none of {} or all-linear", known.join(", ")))?;
            targets.0[place] = true;
        }
        Ok(targets)
    }
}

/// The form of an adapter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lora {
    /// Rows of A, columns of B.
    pub rank: i64,
    /// Over the rank, the factor on B A.
    pub alpha: f64,
    /// The weights that have one.
    pub targets: Targets,
}

impl std::fmt::Display for Lora {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let targets: Vec<_> = self.targets.names().collect();
        write!(formatter, "rank {}, alpha {}, {}", self.rank, self.alpha, targets.join(","))
    }
}

/// `adapter_config.json`; what is not here makes no difference to the numbers.
#[derive(Deserialize)]
struct Settings {
    peft_type: Option<String>,
    base_model_name_or_path: Option<String>,
    r: Option<i64>,
    lora_alpha: Option<f64>,
    target_modules: Option<Value>,
    bias: Option<String>,
    #[serde(flatten)]
    others: serde_json::Map<String, Value>,
}

/// Settings that change what an adapter computes, and are not computed here.
const FOREIGN: [&str; 9] = [
    "use_rslora",
    "use_dora",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layers_to_transform",
    "trainable_token_indices",
    "target_parameters",
];

/// An adapter with its weights, f32.
#[derive(Debug)]
pub struct Adapter {
    /// Its form.
    pub lora: Lora,
    /// A and B of each module, one after the other, by the names of the file.
    tensors: Vec<(String, Tensor)>,
}

impl Adapter {
    /// Makes one that changes nothing yet: A is uniform in ±1/sqrt(in), as `peft`
    /// begins, B is 0.
    pub fn new(config: &Config, lora: Lora, seed: u64, device: Device) -> Self {
        let mut state = seed;
        let mut tensors = Vec::new();
        for (name, shape) in shapes(config, lora) {
            let count = shape.iter().product::<i64>() as usize;
            let bound = 1.0 / (shape[1] as f64).sqrt();
            let values: Vec<f32> = match name.ends_with("lora_A.weight") {
                true => (0..count).map(|_| (uniform(&mut state) * bound) as f32).collect(),
                false => vec![0.0; count],
            };
            let tensor = Tensor::from_slice(&values).view(shape.as_slice()).to_device(device);
            tensors.push((name, tensor));
        }
        Self { lora, tensors }
    }

    /// Reads the folder of an adapter for a model.
    pub fn read(folder: &Path, config: &Config, device: Device) -> Result<Self, Error> {
        let lora = settings(folder)?.1;
        let reader = Reader::open(&folder.join(WEIGHTS))?;
        let mut tensors = Vec::new();
        let mut rest: Vec<_> = reader.entries().iter().collect();
        for (name, wanted) in shapes(config, lora) {
            let folder = || folder.to_owned();
            let Some(place) = rest.iter().position(|entry| entry.name == name) else {
                return Err(Error::MissingTensor { folder: folder(), name, wanted });
            };
            let entry = rest.remove(place);
            let found: Vec<i64> = entry.shape.iter().map(|&length| length as i64).collect();
            if found != wanted {
                return Err(Error::WrongShape { folder: folder(), name, found, wanted });
            }
            let tensor = checkpoint::tensor(folder(), &reader, entry, Kind::Float, device)?;
            if tensor.isfinite().all().int64_value(&[]) == 0 {
                return Err(Error::BrokenWeight { folder: folder(), name });
            }
            tensors.push((name, tensor));
        }
        match rest.first() {
            Some(entry) => Err(Error::ExtraTensor {
                folder: folder.to_owned(),
                name: entry.name.clone(),
                found: entry.shape.iter().map(|&length| length as i64).collect(),
            }),
            None => Ok(Self { lora, tensors }),
        }
    }

    /// Writes the folder, for `peft` to load upon the model in `base`.
    pub fn write(&self, base: &Path, folder: &Path) -> Result<(), Error> {
        let failed = |source| Error::Write { path: folder.to_owned(), source };
        std::fs::create_dir_all(folder).map_err(failed)?;
        let shape = |tensor: &Tensor| tensor.size().iter().map(|&length| length as usize).collect();
        let heads = self
            .tensors
            .iter()
            .map(|(name, tensor)| (name.clone(), tensors::Dtype::F32, shape(tensor)));
        let mut writer = Writer::create(&folder.join(WEIGHTS), heads)?;
        for (_, tensor) in &self.tensors {
            writer.write(&checkpoint::bytes(tensor, Kind::Float)?)?;
        }
        writer.finish()?;
        let settings = json!({
            "base_model_name_or_path": base.display().to_string(),
            "bias": "none",
            "fan_in_fan_out": false,
            "inference_mode": true,
            "lora_alpha": self.lora.alpha,
            "lora_dropout": 0.0,
            "peft_type": "LORA",
            "r": self.lora.rank,
            "target_modules": self.lora.targets.names().collect::<Vec<_>>(),
            "task_type": "CAUSAL_LM",
        });
        let path = folder.join(SETTINGS);
        std::fs::write(&path, format!("{settings:#}\n"))
            .map_err(|source| Error::Write { path, source })
    }

    /// Returns one of the same form with other weights, in the order of its own.
    pub fn with(&self, tensors: &[(String, Tensor)]) -> Self {
        let shared = |(name, tensor): &(String, Tensor)| (name.clone(), tensor.shallow_clone());
        Self { lora: self.lora, tensors: tensors.iter().map(shared).collect() }
    }

    /// Returns its weights by their names in the file.
    pub fn into_tensors(self) -> Vec<(String, Tensor)> {
        self.tensors
    }

    /// Returns another handle of the same weights.
    fn share(&self) -> Self {
        self.with(&self.tensors)
    }

    /// Lets gradients reach it.
    pub(super) fn train(&mut self) {
        for (_, tensor) in &mut self.tensors {
            *tensor = tensor.set_requires_grad(true);
        }
    }

    /// Returns its weights by their names in the file.
    pub(super) fn tensors(&self) -> &[(String, Tensor)] {
        &self.tensors
    }

    /// Returns the pair beside a weight, if it has one.
    pub(super) fn beside(&self, module: &str) -> Option<LowRank> {
        let find = |part: &str| {
            let name = format!("{PREFIX}{module}.{part}.weight");
            let found = self.tensors.iter().find(|(known, _)| *known == name);
            found.map(|(_, tensor)| tensor.shallow_clone())
        };
        let scale = self.lora.alpha / self.lora.rank as f64;
        Some(LowRank { down: find("lora_A")?, up: find("lora_B")?, scale })
    }

    /// Returns a weight with the adapter's part added, in f32.
    pub(super) fn merged(&self, name: &str, weight: &Tensor) -> Tensor {
        match name.strip_suffix(".weight").and_then(|module| self.beside(module)) {
            Some(LowRank { down, up, scale }) => {
                tch::no_grad(|| weight.to_kind(Kind::Float) + up.matmul(&down) * scale)
            }
            None => weight.shallow_clone(),
        }
    }
}

impl Model {
    /// Returns the model with an adapter on top. Both share the weights, of which there
    /// stays one copy; neither is trained.
    pub fn beside(&self, adapter: &Adapter) -> Result<Self, Error> {
        let share = |(name, tensor): &(String, Tensor)| (name.clone(), tensor.shallow_clone());
        let parameters: Vec<_> = self.parameters.iter().map(share).collect();
        let place = (self.dtype.kind(), self.device);
        Ok(Self {
            config: self.config.clone(),
            decoder: Decoder::new(&self.config, &parameters, Some(adapter), place)?,
            parameters,
            adapter: Some(adapter.share()),
            device: self.device,
            dtype: self.dtype,
            checkpoint_activations: self.checkpoint_activations,
        })
    }
}

/// Returns the folder of the model that an adapter is for, and its form.
pub fn settings(folder: &Path) -> Result<(PathBuf, Lora), Error> {
    let path = folder.join(SETTINGS);
    let text = std::fs::read(&path).map_err(|source| Error::Read { path: path.clone(), source })?;
    let wrong = |problem: String| Error::Config { path: path.clone(), problem };
    let read: Settings = serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
    let foreign = |value: &Value| match value {
        Value::Null | Value::Bool(false) => false,
        Value::Object(map) => !map.is_empty(),
        Value::Array(list) => !list.is_empty(),
        _ => true,
    };
    if read.peft_type.as_deref() != Some("LORA") {
        return Err(wrong("`peft_type` is not LORA".to_owned()));
    }
    if let Some(bias) = read.bias.filter(|bias| bias != "none") {
        return Err(wrong(format!("`bias` is {bias}, supported: none")));
    }
    if let Some(key) = FOREIGN.iter().find(|key| read.others.get(**key).is_some_and(foreign)) {
        return Err(wrong(format!("`{key}` is set, which is not supported")));
    }
    let rank = read.r.filter(|rank| *rank > 0);
    let rank = rank.ok_or_else(|| wrong("`r` is no positive number".to_owned()))?;
    let alpha = read.lora_alpha.ok_or_else(|| wrong("`lora_alpha` is missing".to_owned()))?;
    let words = match &read.target_modules {
        Some(Value::String(all)) => all.clone(),
        Some(Value::Array(names)) => {
            let names: Option<Vec<_>> = names.iter().map(Value::as_str).collect();
            let names =
                names.ok_or_else(|| wrong("`target_modules` names no modules".to_owned()))?;
            names.join(",")
        }
        _ => return Err(wrong("`target_modules` is missing".to_owned())),
    };
    let targets = words.parse().map_err(|problem| wrong(format!("`target_modules`: {problem}")))?;
    let base = read.base_model_name_or_path;
    let base = base.ok_or_else(|| wrong("`base_model_name_or_path` is missing".to_owned()))?;
    Ok((PathBuf::from(base), Lora { rank, alpha, targets }))
}

/// Writes the model in `base` with an adapter's part added, as a plain folder.
/// Products and sums are f32; `dtype`, else the base's type, is what is written.
pub fn merge(folder: &Path, base: &Path, out: &Path, dtype: Option<Dtype>) -> Result<(), Error> {
    let options = super::LoadOptions { dtype: Some(Dtype::F32), ..Default::default() };
    let model = super::Model::load(base, &options)?;
    let adapter = Adapter::read(folder, &model.config, Device::Cpu)?;
    model.with_adapter(adapter)?.save(base, out, dtype)
}

/// Returns the names of the file's tensors with their shapes.
fn shapes(config: &Config, lora: Lora) -> Vec<(String, Vec<i64>)> {
    let wanted = checkpoint::wanted_tensors(config);
    let mut shapes = Vec::new();
    for layer in 0..config.num_hidden_layers {
        for path in lora.targets.paths() {
            let module = format!("model.layers.{layer}.{path}");
            let Some(size) = wanted.get(&format!("{module}.weight")) else { continue };
            let name = |part: &str| format!("{PREFIX}{module}.{part}.weight");
            shapes.push((name("lora_A"), vec![lora.rank, size[1]]));
            shapes.push((name("lora_B"), vec![size[0], lora.rank]));
        }
    }
    shapes
}

/// Returns the next number from -1 to 1.
fn uniform(state: &mut u64) -> f64 {
    *state = state.wrapping_add(GOLDEN);
    (mix(*state) >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
}

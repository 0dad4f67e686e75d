//! What is trained, and how it is computed.

#[cfg(feature = "torch")]
use oclaw::model::{Dtype, Lora, Targets};
#[cfg(feature = "torch")]
use oclaw::train::Compute;

use super::{DtypeName, positive};
#[cfg(feature = "torch")]
use crate::report::Failure;

/// Learning rate of all weights, and of adapters.
#[cfg(feature = "torch")]
const RATES: (f64, f64) = (1e-5, 1e-4);

/// What is trained, and how it is computed.
#[derive(clap::Args, Debug)]
pub(super) struct ComputeArgs {
    /// Train LoRA adapters of this rank in place of the weights
    #[arg(long, value_name = "R", value_parser = clap::value_parser!(u32).range(1..=4096))]
    lora_rank: Option<u32>,
    /// Over the rank, the factor on what an adapter adds [default: twice the rank]
    #[arg(long, value_name = "A", value_parser = positive, requires = "lora_rank")]
    lora_alpha: Option<f64>,
    /// Weights of each layer that have an adapter [default: all-linear]
    #[arg(long, value_name = "NAME,…", requires = "lora_rank")]
    lora_targets: Option<String>,
    /// Type of the products; what is trained is f32 all the same
    #[arg(long, value_enum, value_name = "TYPE", default_value_t = DtypeName::F32)]
    train_dtype: DtypeName,
    /// Run each layer again on the way back: less memory, a third more time
    #[arg(long)]
    checkpoint_activations: bool,
    /// Where to compute: cpu, or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "cpu", value_parser = device)]
    device: String,
}

/// Reads the number of a CUDA device; nothing stands for the CPU.
fn number(text: &str) -> Option<Option<usize>> {
    match text {
        "cpu" => Some(None),
        "cuda" => Some(Some(0)),
        _ => Some(Some(text.strip_prefix("cuda:")?.parse().ok()?)),
    }
}

fn device(text: &str) -> Result<String, String> {
    number(text).map(|_| text.to_owned()).ok_or_else(|| "wanted cpu or cuda:N".to_owned())
}

#[cfg(feature = "torch")]
impl ComputeArgs {
    pub(super) fn compute(&self) -> anyhow::Result<Compute> {
        let device = match number(&self.device).flatten() {
            Some(number) => tch::Device::Cuda(number),
            None => tch::Device::Cpu,
        };
        Ok(Compute {
            lora: self.lora()?,
            dtype: match self.train_dtype {
                DtypeName::F32 => Dtype::F32,
                DtypeName::Bf16 => Dtype::Bf16,
            },
            device,
            checkpoint_activations: self.checkpoint_activations,
        })
    }

    fn lora(&self) -> Result<Option<Lora>, Failure> {
        let Some(rank) = self.lora_rank else { return Ok(None) };
        let targets = match &self.lora_targets {
            Some(names) => names
                .parse()
                .map_err(|problem| Failure::usage(format!("--lora-targets: {problem}")))?,
            None => Targets::ALL,
        };
        let alpha = self.lora_alpha.unwrap_or(2.0 * f64::from(rank));
        Ok(Some(Lora { rank: i64::from(rank), alpha, targets }))
    }

    /// Returns whether adapters are trained, and not all weights.
    pub(super) fn trains_adapters(&self) -> bool {
        self.lora_rank.is_some()
    }

    /// Returns the learning rate, given the one that was asked for.
    pub(super) fn learning_rate(&self, asked: Option<f64>) -> f64 {
        let (all, adapters) = RATES;
        asked.unwrap_or(if self.lora_rank.is_some() { adapters } else { all })
    }

    /// What the record of a run says.
    pub(super) fn settings(&self) -> serde_json::Value {
        serde_json::json!({
            "lora_rank": self.lora_rank,
            "lora_alpha": self.lora_rank.map(|rank| self.lora_alpha.unwrap_or(2.0 * f64::from(rank))),
            "lora_targets": self.lora_targets,
            "train_dtype": format!("{:?}", self.train_dtype).to_lowercase(),
            "checkpoint_activations": self.checkpoint_activations,
            "device": self.device,
        })
    }
}

//! Rotary position embedding in the half-split form (not interleaved).

use std::f64::consts::PI;

use tch::{Device, Kind, Tensor};

use super::config::{Config, RopeScaling};

/// The frequencies of one model.
#[derive(Debug)]
pub(super) struct Rotary {
    /// f32 `[head_dim / 2]`.
    frequencies: Tensor,
}

/// Cosines and sines of some positions, f32 `[T, 1, head_dim]` each.
pub(super) struct Rotation {
    cosine: Tensor,
    sine: Tensor,
}

impl Rotary {
    pub(super) fn new(config: &Config, device: Device) -> Self {
        let frequencies: Vec<f32> = (0..config.head_dim / 2)
            .map(|pair| {
                let exponent = (2 * pair) as f64 / config.head_dim as f64;
                // Rounded to f32 before it is stretched, as transformers does.
                let frequency = f64::from((1.0 / config.rope_theta.powf(exponent)) as f32);
                stretched(frequency, config.rope_scaling) as f32
            })
            .collect();
        Self { frequencies: Tensor::from_slice(&frequencies).to_device(device) }
    }

    /// Returns the rotation for i64 positions `[T]`.
    pub(super) fn at(&self, positions: &Tensor) -> Rotation {
        let angles = positions.to_kind(Kind::Float).outer(&self.frequencies);
        let angles = Tensor::cat(&[&angles, &angles], 1).unsqueeze(1);
        Rotation { cosine: angles.cos(), sine: angles.sin() }
    }
}

impl Rotation {
    /// Rotates `[T, heads, head_dim]`.
    pub(super) fn apply(&self, x: &Tensor) -> Tensor {
        let halves = x.chunk(2, 2);
        let turned = Tensor::cat(&[&-&halves[1], &halves[0]], 2);
        x * &self.cosine + turned * &self.sine
    }
}

fn stretched(frequency: f64, scaling: RopeScaling) -> f64 {
    let RopeScaling::Llama3 {
        factor,
        low_freq_factor,
        high_freq_factor,
        original_max_position_embeddings,
    } = scaling
    else {
        return frequency;
    };
    let wave_length = 2.0 * PI / frequency;
    if wave_length < original_max_position_embeddings / high_freq_factor {
        return frequency;
    }
    if wave_length > original_max_position_embeddings / low_freq_factor {
        return frequency / factor;
    }
    let smooth = (original_max_position_embeddings / wave_length - low_freq_factor)
        / (high_freq_factor - low_freq_factor);
    (1.0 - smooth) * frequency / factor + smooth * frequency
}

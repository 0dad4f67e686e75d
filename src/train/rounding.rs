//! From f32 weights to the bf16 that a policy is served in.
//!
//! A small step moves few weights to another number of bf16's grid: rounded to the
//! nearest, the others stay where they were, step after step. Rounded by chance, the
//! nearer neighbour the likelier, a weight is on average what it is.

use half::bf16;
use tch::{Kind, Tensor};

use super::adamw;
use crate::model::Model;

/// 2^64 over the golden ratio.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Which neighbour in bf16 a weight becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Rounding {
    /// The nearest.
    Nearest,
    /// One of the two by chance, so that the mean is the weight itself (Gupta et al.
    /// 2015).
    #[default]
    Stochastic,
}

/// All that chance depends on: a step that is made again gives the same bits.
#[derive(Debug, Clone, Copy)]
pub struct Draw<'a> {
    /// Seed of the run.
    pub seed: u64,
    /// Step of the policy.
    pub step: u64,
    /// Name of the tensor.
    pub tensor: &'a str,
}

impl Draw<'_> {
    fn start(self) -> u64 {
        let seed = mix(self.seed.wrapping_add(GOLDEN));
        let step = mix(seed.wrapping_add(self.step.wrapping_mul(GOLDEN)));
        self.tensor.bytes().fold(step, |state, byte| mix(state ^ u64::from(byte)))
    }
}

/// Rounds the weights of a tensor.
pub fn round(values: &[f32], rounding: Rounding, draw: Draw<'_>) -> Vec<bf16> {
    match rounding {
        Rounding::Nearest => values.iter().map(|value| bf16::from_f32(*value)).collect(),
        Rounding::Stochastic => {
            let start = draw.start();
            let one = |(place, value): (u64, &f32)| {
                let drawn = mix(start.wrapping_add(place.wrapping_mul(GOLDEN)));
                by_chance(*value, (drawn >> 48) as u16)
            };
            (1..).zip(values).map(one).collect()
        }
    }
}

/// Adds what was drawn to the 16 bits for which bf16 has no room, and cuts those off:
/// the carry rounds up, as often as they are of 2^16.
fn by_chance(value: f32, drawn: u16) -> bf16 {
    let cut = |bits: u32| bf16::from_bits((bits >> 16) as u16);
    let bits = value.to_bits();
    let rounded = cut(bits.wrapping_add(u32::from(drawn)));
    match (value.is_finite(), rounded.is_finite()) {
        (true, true) => rounded,
        // The largest number has no neighbour above.
        (true, false) => cut(bits),
        (false, _) => bf16::from_f32(value),
    }
}

/// A step of SplitMix64 (Steele et al. 2014).
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Makes a tensor of numbers by way of f32, which holds each: what tch makes of a slice of
/// `bf16` takes their bits for those of `f16`.
fn tensor(numbers: &[bf16]) -> Tensor {
    let wide: Vec<f32> = numbers.iter().map(|number| number.to_f32()).collect();
    Tensor::from_slice(&wide).to_kind(Kind::BFloat16)
}

/// The weights as the newest policy is served, where they are rounded for that.
#[derive(Debug)]
pub(super) struct Served {
    rounding: Rounding,
    seed: u64,
    /// In the order of what the model trains.
    weights: Vec<Vec<bf16>>,
}

impl Served {
    /// Takes the weights of a policy's own files. What the optimiser's state holds of
    /// them has more digits: look before that is taken up.
    pub(super) fn new(model: &Model, rounding: Rounding, seed: u64) -> Self {
        let nearest = |(_, weight): &(String, Tensor)| {
            adamw::values(weight).iter().map(|value| bf16::from_f32(*value)).collect()
        };
        Self { rounding, seed, weights: model.trained().iter().map(nearest).collect() }
    }

    /// Rounds the weights for the policy of a step. Returns what share of them are
    /// other numbers than in the policy before, and the tensors to write.
    pub(super) fn round(&mut self, model: &Model, step: u64) -> (f64, Vec<(String, Tensor)>) {
        let (mut changed, mut all) = (0_usize, 0_usize);
        let mut tensors = Vec::new();
        for ((name, weight), before) in model.trained().iter().zip(&mut self.weights) {
            let draw = Draw { seed: self.seed, step, tensor: name };
            let now = round(&adamw::values(weight), self.rounding, draw);
            changed += before.iter().zip(&now).filter(|(before, now)| before != now).count();
            all += now.len();
            tensors.push((name.clone(), tensor(&now).view(weight.size().as_slice())));
            *before = now;
        }
        (changed as f64 / all.max(1) as f64, tensors)
    }
}

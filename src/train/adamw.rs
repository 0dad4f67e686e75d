//! AdamW (Loshchilov & Hutter 2019) as one plain pass over each weight.

use half::bf16;
use tch::{Device, Kind, Tensor};

use crate::model::Dtype;

/// The optimiser's constants.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Learning rate.
    pub learning_rate: f64,
    /// Decay of the mean and of the mean square of the gradients.
    pub betas: (f64, f64),
    /// Keeps the division finite.
    pub epsilon: f64,
    /// Share of a weight taken away per step, times the learning rate.
    pub weight_decay: f64,
    /// Whether norms and biases decay too.
    pub decay_all: bool,
    /// Largest norm of the whole gradient.
    pub clip_norm: f64,
}

impl Default for Rates {
    fn default() -> Self {
        Self {
            learning_rate: 1e-5,
            betas: (0.9, 0.98),
            epsilon: 1e-8,
            weight_decay: 0.1,
            decay_all: false,
            clip_norm: 1.0,
        }
    }
}

/// Running means of one weight's gradients.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Moments {
    /// Mean of the gradients.
    pub mean: Vec<f32>,
    /// Mean of their squares.
    pub square: Vec<f32>,
}

/// The optimiser with its state.
#[derive(Debug, Clone, PartialEq)]
pub struct AdamW {
    /// The constants.
    pub rates: Rates,
    /// Steps taken.
    pub updates: u64,
    /// State of each weight, in the model's order.
    pub moments: Vec<Moments>,
}

/// What one step did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Update {
    /// Norm of the whole gradient before clipping.
    pub gradient_norm: f64,
    /// Factor that clipping put on it.
    pub clip_coefficient: f64,
    /// Weights whose served form is another number now.
    pub changed: u64,
    /// All weights.
    pub weights: u64,
}

impl AdamW {
    /// Returns an optimiser that has taken no step.
    pub fn new(rates: Rates, parameters: &[(String, Tensor)]) -> Self {
        let zeros = |(_, tensor): &(String, Tensor)| Moments {
            mean: vec![0.0; tensor.numel()],
            square: vec![0.0; tensor.numel()],
        };
        Self { rates, updates: 0, moments: parameters.iter().map(zeros).collect() }
    }

    /// Moves the weights against their gradients. Returns nothing, and changes
    /// nothing, if the gradient is not finite. `served` is the type in which a
    /// change has to survive to count.
    pub fn step(&mut self, parameters: &[(String, Tensor)], served: Dtype) -> Option<Update> {
        let gradient_norm = gradient_norm(parameters);
        if !gradient_norm.is_finite() {
            return None;
        }
        let rates = self.rates;
        let clip_coefficient = (rates.clip_norm / (gradient_norm + 1e-6)).min(1.0);
        self.updates += 1;
        let steps = self.updates as i32;
        let mut update = Update { gradient_norm, clip_coefficient, changed: 0, weights: 0 };
        for ((_, tensor), moments) in parameters.iter().zip(&mut self.moments) {
            let gradient = tensor.grad();
            update.weights += tensor.numel() as u64;
            if !gradient.defined() {
                continue;
            }
            let decays = rates.decay_all || tensor.dim() > 1;
            let pass = Pass {
                gradient_scale: clip_coefficient as f32,
                keep: (1.0 - rates.learning_rate * if decays { rates.weight_decay } else { 0.0 })
                    as f32,
                betas: (rates.betas.0 as f32, rates.betas.1 as f32),
                rest: ((1.0 - rates.betas.0) as f32, (1.0 - rates.betas.1) as f32),
                rate: (rates.learning_rate / (1.0 - rates.betas.0.powi(steps))) as f32,
                square_scale: (1.0 - rates.betas.1.powi(steps)).sqrt() as f32,
                epsilon: rates.epsilon as f32,
            };
            update.changed += match (in_place(tensor), in_place(&gradient)) {
                (Some(values), Some(gradient)) => pass.run(values, gradient, moments, served),
                _ => {
                    let mut values = read(tensor);
                    let changed = pass.run(&mut values, &read(&gradient), moments, served);
                    write(tensor, &values);
                    changed
                }
            };
        }
        Some(update)
    }
}

/// Sets every gradient to 0.
pub fn zero_gradients(parameters: &[(String, Tensor)]) {
    for (_, tensor) in parameters {
        let mut gradient = tensor.grad();
        if gradient.defined() {
            let _ = gradient.zero_();
        }
    }
}

/// Returns the norm of the gradients of all weights together.
pub fn gradient_norm(parameters: &[(String, Tensor)]) -> f64 {
    let gradients = parameters.iter().map(|(_, tensor)| tensor.grad());
    let squares =
        gradients.filter(Tensor::defined).map(|gradient| gradient.norm().double_value(&[]).powi(2));
    squares.sum::<f64>().sqrt()
}

/// The numbers of one pass over one weight.
struct Pass {
    gradient_scale: f32,
    keep: f32,
    betas: (f32, f32),
    /// What the betas leave of 1.
    rest: (f32, f32),
    rate: f32,
    square_scale: f32,
    epsilon: f32,
}

impl Pass {
    /// Moves the values; returns how many are other numbers once stored as `served`.
    fn run(
        &self,
        values: &mut [f32],
        gradient: &[f32],
        moments: &mut Moments,
        served: Dtype,
    ) -> u64 {
        match served {
            Dtype::F32 => self.pass(values, gradient, moments, f32::to_bits),
            Dtype::Bf16 => {
                let stored = |value| u32::from(bf16::from_f32(value).to_bits());
                self.pass(values, gradient, moments, stored)
            }
        }
    }

    fn pass(
        &self,
        values: &mut [f32],
        gradient: &[f32],
        moments: &mut Moments,
        stored: impl Fn(f32) -> u32,
    ) -> u64 {
        let mut changed = 0;
        let state = moments.mean.iter_mut().zip(&mut moments.square);
        for ((value, gradient), (mean, square)) in values.iter_mut().zip(gradient).zip(state) {
            let gradient = gradient * self.gradient_scale;
            *mean = self.betas.0 * *mean + self.rest.0 * gradient;
            *square = self.betas.1 * *square + self.rest.1 * gradient * gradient;
            let root = square.sqrt() / self.square_scale + self.epsilon;
            let moved = *value * self.keep - self.rate * (*mean / root);
            changed += u64::from(stored(*value) != stored(moved));
            *value = moved;
        }
        changed
    }
}

/// Returns a tensor's numbers where they lie, if they lie here, one after another, as f32.
#[expect(
    unsafe_code,
    clippy::mut_from_ref,
    reason = "tch gives no slice of a tensor, which is a handle"
)]
fn in_place(tensor: &Tensor) -> Option<&mut [f32]> {
    let plain = tensor.device() == Device::Cpu
        && tensor.kind() == Kind::Float
        && tensor.is_contiguous()
        && tensor.numel() > 0;
    // SAFETY: as many numbers lie there, and live as long as the tensor. Nobody else reads
    // or writes them meanwhile: the optimiser runs between two passes.
    plain.then(|| unsafe {
        std::slice::from_raw_parts_mut(tensor.data_ptr().cast::<f32>(), tensor.numel())
    })
}

fn read(tensor: &Tensor) -> Vec<f32> {
    let plain = tensor.detach().to_device(Device::Cpu).to_kind(Kind::Float).contiguous();
    let mut values = vec![0.0; plain.numel()];
    plain.copy_data(&mut values, plain.numel());
    values
}

/// Puts numbers into a weight in place: everyone who holds it sees them.
pub(super) fn write(tensor: &Tensor, values: &[f32]) {
    tch::no_grad(|| {
        let shaped = Tensor::from_slice(values).view(tensor.size().as_slice());
        tensor.detach().copy_(&shaped);
    });
}

/// Returns a weight's numbers.
pub(super) fn values(tensor: &Tensor) -> Vec<f32> {
    read(tensor)
}

//! One more token of each of a few sequences, on a CPU and without libtorch between the
//! products: at this size its operations take longer to begin than to do, and its threads
//! would want the same cores as ours.
//!
//! The numbers are those of [`Layer::run`] but for the order of sums.

use tch::{Device, Kind, Tensor};

use super::{Decoder, Layer, Norm};
use crate::model::cache::Cache;
use crate::model::linear::Linear;
use crate::model::rows::attention::{Past, attend};
use crate::model::rows::{self, Matrix, pointwise};

/// A linear layer without an adapter.
struct Affine<'a> {
    matrix: Matrix<'a>,
    bias: Option<&'a [f32]>,
}

impl<'a> Affine<'a> {
    /// Returns nothing if there is more to it, or the weight would have to be rounded.
    fn of(linear: &'a Linear) -> Option<Self> {
        let rounded = linear.kind == Kind::BFloat16 && linear.weight.kind() != linear.kind;
        if linear.low_rank.is_some() || rounded {
            return None;
        }
        let bias = match &linear.bias {
            Some(bias) => Some(rows::numbers(bias)?),
            None => None,
        };
        Some(Self { matrix: Matrix::of(&linear.weight)?, bias })
    }

    /// Returns the weight of a layer that has no bias.
    fn bare(linear: &'a Linear) -> Option<Matrix<'a>> {
        Self::of(linear).filter(|affine| affine.bias.is_none()).map(|affine| affine.matrix)
    }
}

/// A norm whose weight is at hand.
struct Scale<'a> {
    weight: &'a [f32],
    eps: f64,
}

impl<'a> Scale<'a> {
    fn of(norm: &'a Norm) -> Option<Self> {
        Some(Self { weight: rows::numbers(&norm.weight)?, eps: norm.eps })
    }

    fn apply(&self, rows: &mut [f32]) {
        pointwise::rms_norm(rows, self.weight, self.eps);
    }
}

/// A layer whose weights are at hand.
struct Plain<'a> {
    input_norm: Scale<'a>,
    query: Affine<'a>,
    key: Affine<'a>,
    value: Affine<'a>,
    query_norm: Option<Scale<'a>>,
    key_norm: Option<Scale<'a>>,
    output: Affine<'a>,
    mlp_norm: Scale<'a>,
    gate: Matrix<'a>,
    up: Matrix<'a>,
    down: Affine<'a>,
}

impl<'a> Plain<'a> {
    fn of(layer: &'a Layer) -> Option<Self> {
        let Layer { input_layernorm, self_attn, post_attention_layernorm, mlp } = layer;
        let head_norm = |norm: &'a Option<Norm>| match norm {
            Some(norm) => Scale::of(norm).map(Some),
            None => Some(None),
        };
        Some(Self {
            input_norm: Scale::of(input_layernorm)?,
            query: Affine::of(&self_attn.q_proj)?,
            key: Affine::of(&self_attn.k_proj)?,
            value: Affine::of(&self_attn.v_proj)?,
            query_norm: head_norm(&self_attn.q_norm)?,
            key_norm: head_norm(&self_attn.k_norm)?,
            output: Affine::of(&self_attn.o_proj)?,
            mlp_norm: Scale::of(post_attention_layernorm)?,
            gate: Affine::bare(&mlp.gate_proj)?,
            up: Affine::bare(&mlp.up_proj)?,
            down: Affine::of(&mlp.down_proj)?,
        })
    }

    /// Makes rotated queries, rotated keys and values of the new tokens.
    fn project(&self, step: &Step, state: &mut State) {
        let State { x, normed, queries, keys, values, .. } = state;
        let (keys, values) = (rows::values_mut(keys), rows::values_mut(values));
        normed.copy_from_slice(x);
        self.input_norm.apply(normed);
        let places = [&mut queries[..], &mut keys[..], &mut values[..]];
        step.products(normed, [&self.query, &self.key, &self.value], places);
        let both = [(&mut queries[..], &self.query_norm), (&mut keys[..], &self.key_norm)];
        for (heads, norm) in both {
            if let Some(norm) = norm {
                norm.apply(heads);
            }
            pointwise::rotate(heads, &step.turns, step.head_dim);
        }
    }

    /// Adds to `x` what the layer makes of the attention.
    fn finish(&self, step: &Step, state: &mut State) {
        let State { x, normed, attended, gated, upper, .. } = state;
        step.products(attended, [&self.output], [&mut normed[..]]);
        pointwise::add(x, normed);
        normed.copy_from_slice(x);
        self.mlp_norm.apply(normed);
        step.round(normed);
        let places = [&mut gated[..], &mut upper[..]];
        rows::gated(normed, step.rows, [self.gate, self.up], step.narrow, places);
        step.products(gated, [&self.down], [&mut normed[..]]);
        pointwise::add(x, normed);
    }
}

/// What all layers are told.
struct Step {
    rows: usize,
    head_dim: usize,
    /// Cosines and sines of each row's position.
    turns: Vec<f32>,
    /// Whether products are in bf16.
    narrow: bool,
}

impl Step {
    fn round(&self, x: &mut [f32]) {
        if self.narrow {
            pointwise::round_to_bf16(x);
        }
    }

    /// Multiplies `x` with the weights of some layers, as [`Linear::apply`] does.
    fn products<const N: usize>(
        &self,
        x: &mut [f32],
        layers: [&Affine<'_>; N],
        mut out: [&mut [f32]; N],
    ) {
        self.round(x);
        let places = out.each_mut().map(|out| &mut **out);
        rows::multiply(x, self.rows, layers.map(|layer| layer.matrix), places);
        for (layer, out) in layers.into_iter().zip(out) {
            self.round(out);
            if let Some(bias) = layer.bias {
                pointwise::add_to_rows(out, bias);
            }
        }
    }
}

/// What goes from layer to layer, row after row, and room for what comes between.
struct State {
    x: Vec<f32>,
    normed: Vec<f32>,
    queries: Vec<f32>,
    /// `[T, key heads, D]`, like the values.
    keys: Tensor,
    values: Tensor,
    attended: Vec<f32>,
    gated: Vec<f32>,
    upper: Vec<f32>,
}

impl State {
    /// All layers are of the same form.
    fn new(x: Vec<f32>, step: &Step, layer: &Plain<'_>) -> Self {
        let room = |width: usize| vec![0.0; step.rows * width];
        let heads = |matrix: &Matrix<'_>| {
            let count = matrix.outputs / step.head_dim;
            let size = [step.rows, count, step.head_dim].map(|length| length as i64);
            Tensor::zeros(size, (Kind::Float, Device::Cpu))
        };
        Self {
            normed: room(x.len() / step.rows),
            x,
            queries: room(layer.query.matrix.outputs),
            keys: heads(&layer.key.matrix),
            values: heads(&layer.value.matrix),
            attended: room(layer.output.matrix.inner),
            gated: room(layer.gate.outputs),
            upper: room(layer.up.outputs),
        }
    }
}

impl Decoder {
    /// Feeds each sequence its next token and returns the states after the last norm,
    /// `[T, H]`; nothing, and nothing is done, if one has more tokens, or there are too many
    /// sequences, or the weights are others than can be multiplied here.
    pub(super) fn single(&self, batch: &mut [(&[i64], &mut Cache)]) -> Option<Tensor> {
        let few =
            !batch.is_empty() && rows::fits(batch.len(), self.device, self.embed_tokens.kind());
        if !few || batch.iter().any(|(tokens, _)| tokens.len() != 1) {
            return None;
        }
        let layers = self.layers.iter().map(Plain::of).collect::<Option<Vec<_>>>()?;
        let norm = Scale::of(&self.norm)?;
        let ids: Vec<i64> = batch.iter().map(|(tokens, _)| tokens[0]).collect();
        let x = rows::numbers(&self.embedded(&Tensor::from_slice(&ids)))?.to_vec();
        let positions: Vec<i64> = batch.iter().map(|(_, cache)| cache.length()).collect();
        let head_dim = self.layers.first()?.self_attn.head_dim as usize;
        let turns = self.turns(&positions, head_dim)?;
        let narrow = self.kind == Kind::BFloat16;
        let step = Step { rows: batch.len(), head_dim, turns, narrow };
        let mut state = State::new(x, &step, layers.first()?);
        // Each sequence's part of the new keys and values: the memory stays the same.
        let part = |x: &Tensor, row: usize| x.narrow(0, row as i64, 1);
        let new: Vec<_> =
            (0..step.rows).map(|row| (part(&state.keys, row), part(&state.values, row))).collect();
        batch.iter_mut().for_each(|(_, cache)| cache.reserve(1));
        for (index, layer) in layers.iter().enumerate() {
            layer.project(&step, &mut state);
            let sequences = batch.iter_mut().zip(&new);
            let held: Vec<_> = sequences
                .map(|((_, cache), (keys, values))| cache.extend(index, keys, values))
                .collect();
            let pasts: Vec<_> = held.iter().map(|(keys, values)| Past::of(keys, values)).collect();
            attend(&state.queries, &pasts, &mut state.attended);
            layer.finish(&step, &mut state);
        }
        batch.iter_mut().for_each(|(_, cache)| cache.advance(1));
        norm.apply(&mut state.x);
        Some(Tensor::from_slice(&state.x).view([step.rows as i64, -1]))
    }

    /// Returns the cosines of each position, then its sines: what (1, 0) is turned to. One
    /// by one, for libtorch takes the last of many another way, to other last bits.
    fn turns(&self, positions: &[i64], head_dim: usize) -> Option<Vec<f32>> {
        let half = |number: f32| vec![number; head_dim / 2];
        let unit = Tensor::from_slice(&[half(1.0), half(0.0)].concat()).view([1, 1, -1]);
        let mut turns = Vec::new();
        for position in positions {
            let turned = self.rotary.at(&Tensor::from_slice(&[*position])).apply(&unit);
            turns.extend_from_slice(rows::numbers(&turned.contiguous())?);
        }
        Some(turns)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::model::{Adapter, Dtype, LoadOptions, Lora, Model, Targets};

    fn load(name: &str, dtype: Dtype) -> Model {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models").join(name);
        Model::load(&folder, &LoadOptions { dtype: Some(dtype), ..Default::default() }).unwrap()
    }

    fn is_taken(model: &Model, tokens: &[&[i64]]) -> bool {
        let mut caches: Vec<_> = tokens.iter().map(|_| model.cache()).collect();
        let mut batch: Vec<_> = tokens.iter().copied().zip(&mut caches).collect();
        let taken = model.decoder.single(&mut batch).is_some();
        assert!(caches.iter().all(|cache| cache.len() == usize::from(taken)));
        taken
    }

    /// What is slower is no other number: nobody would see that nothing is taken.
    #[test]
    fn a_token_each_is_taken_of_every_family_and_type() {
        for name in ["tiny-llama", "tiny-qwen2", "tiny-qwen3"] {
            for dtype in [Dtype::F32, Dtype::Bf16] {
                assert!(is_taken(&load(name, dtype), &[&[5], &[6]]), "{name} {dtype}");
            }
        }
    }

    #[test]
    fn so_is_one_of_weights_in_bf16_for_products_in_f32() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models/tiny-qwen3");
        let narrow = tempfile::tempdir().unwrap();
        let wide = load("tiny-qwen3", Dtype::F32);
        wide.save(&folder, narrow.path(), Some(Dtype::Bf16)).unwrap();
        let options =
            LoadOptions { dtype: Some(Dtype::F32), narrow: true, ..LoadOptions::default() };
        let model = Model::load(narrow.path(), &options).unwrap();
        let one: &[i64] = &[5];
        assert!(is_taken(&model, &[one; 16]));
        assert_eq!(is_taken(&model, &[one; 17]), rows::unit_takes(64, 64));
    }

    #[test]
    fn what_it_cannot_do_is_left_as_it_is() {
        let model = load("tiny-qwen3", Dtype::F32);
        let one: &[i64] = &[5];
        assert!(is_taken(&model, &[one; 16]));
        assert!(!is_taken(&model, &[one; 17]));
        assert!(!is_taken(&model, &[one, &[5, 6]]));
        assert!(!is_taken(&model, &[]));
        let lora = Lora { rank: 2, alpha: 4.0, targets: Targets::ALL };
        let adapter = Adapter::new(&model.config, lora, 0, Device::Cpu);
        assert!(!is_taken(&model.with_adapter(adapter).unwrap(), &[one]));
    }
}

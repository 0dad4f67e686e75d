//! The decoder of all three families, top to bottom: linear, attention, MLP,
//! layer, model. Field names are checkpoint names. Shapes: T tokens of all
//! sequences one after another, H hidden, D head width.

mod single;

use std::collections::HashMap;

use tch::{Device, Kind, Tensor};

use super::adapter::Adapter;
use super::attention::{Back, Mask, attend};
use super::cache::Cache;
use super::config::Config;
use super::linear::{Linear, Way, apply_all};
use super::prefix::Forest;
use super::rotary::{Rotary, Rotation};
use super::rows;
use super::{Error, Family};

/// An f32 product of fewer rows takes another path in libtorch and differs in
/// the last bits; padded to this, a row does not depend on its neighbours.
const STEADY_ROWS: i64 = 8;

/// The weights by name while the layers take theirs.
struct Weights<'a> {
    by_name: HashMap<&'a str, &'a Tensor>,
    adapter: Option<&'a Adapter>,
    kind: Kind,
}

impl Weights<'_> {
    fn take(&self, name: &str) -> Result<Tensor, Error> {
        // The loader has compared the names with the configuration already.
        self.by_name.get(name).map(|tensor| tensor.shallow_clone()).ok_or_else(|| {
            Error::MissingTensor {
                folder: Default::default(),
                name: name.to_owned(),
                wanted: vec![],
            }
        })
    }

    fn linear(&self, name: &str, bias: bool) -> Result<Linear, Error> {
        let weight = self.take(&format!("{name}.weight"))?;
        let bias = bias.then(|| self.take(&format!("{name}.bias"))).transpose()?;
        let low_rank = self.adapter.and_then(|adapter| adapter.beside(name));
        Ok(Linear { weight, bias, low_rank, kind: self.kind })
    }
}

#[derive(Debug)]
struct Norm {
    weight: Tensor,
    eps: f64,
}

impl Norm {
    fn apply(&self, x: &Tensor) -> Tensor {
        x.rms_norm(self.weight.size(), Some(&self.weight), self.eps)
    }
}

#[derive(Debug)]
struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    /// Qwen3 only.
    q_norm: Option<Norm>,
    /// Qwen3 only.
    k_norm: Option<Norm>,
    head_dim: i64,
}

impl Attention {
    /// Returns rotated queries `[T, heads, D]`, rotated keys and values
    /// `[T, key heads, D]`.
    fn project(&self, x: &Tensor, input: &Input) -> (Tensor, Tensor, Tensor) {
        let (rotation, way) = (&input.rotation, input.way);
        let heads = |flat: Tensor| flat.view([flat.size()[0], -1, self.head_dim]);
        let normed = |x: Tensor, norm: &Option<Norm>| match norm {
            Some(norm) => norm.apply(&x),
            None => x,
        };
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj];
        let [queries, keys, values] = apply_all(projections, x, way).map(heads);
        let (queries, keys) = (normed(queries, &self.q_norm), normed(keys, &self.k_norm));
        (rotation.apply(&queries), rotation.apply(&keys), values)
    }
}

#[derive(Debug)]
struct Mlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

impl Mlp {
    fn apply(&self, x: &Tensor, way: Way) -> Tensor {
        let gated = self.gate_proj.apply(x, way).silu() * self.up_proj.apply_narrow(x, way);
        self.down_proj.apply(&gated, way)
    }
}

#[derive(Debug)]
struct Layer {
    input_layernorm: Norm,
    self_attn: Attention,
    post_attention_layernorm: Norm,
    mlp: Mlp,
}

impl Layer {
    fn new(config: &Config, weights: &Weights<'_>, index: i64) -> Result<Self, Error> {
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let norm = |part: &str| -> Result<Norm, Error> {
            let weight = weights.take(&name(&format!("{part}.weight")))?;
            Ok(Norm { weight, eps: config.rms_norm_eps })
        };
        let linear = |part: &str, bias: bool| weights.linear(&name(part), bias);
        let head_norm = |part: &str| match config.family {
            Family::Qwen3 => norm(part).map(Some),
            Family::Llama | Family::Qwen2 => Ok(None),
        };
        Ok(Self {
            input_layernorm: norm("input_layernorm")?,
            self_attn: Attention {
                q_proj: linear("self_attn.q_proj", config.attention_bias)?,
                k_proj: linear("self_attn.k_proj", config.attention_bias)?,
                v_proj: linear("self_attn.v_proj", config.attention_bias)?,
                o_proj: linear("self_attn.o_proj", config.output_bias)?,
                q_norm: head_norm("self_attn.q_norm")?,
                k_norm: head_norm("self_attn.k_norm")?,
                head_dim: config.head_dim,
            },
            post_attention_layernorm: norm("post_attention_layernorm")?,
            mlp: Mlp {
                gate_proj: linear("mlp.gate_proj", config.mlp_bias)?,
                up_proj: linear("mlp.up_proj", config.mlp_bias)?,
                down_proj: linear("mlp.down_proj", config.mlp_bias)?,
            },
        })
    }

    /// Adds what the layer makes of `x`. `attention` gets queries `[T, heads, D]`,
    /// keys and values, and returns one `[L, heads * D]` per sequence, in order.
    fn run(
        &self,
        x: &Tensor,
        input: &Input,
        attention: impl FnOnce(&Tensor, &Tensor, &Tensor) -> Vec<Tensor>,
    ) -> Tensor {
        let normed = self.input_layernorm.apply(x);
        let (queries, keys, values) = self.self_attn.project(&normed, input);
        let outputs = attention(&queries, &keys, &values);
        let attended = pad_rows(&Tensor::cat(&outputs, 0), input.padding);
        let x = x + self.self_attn.o_proj.apply(&attended, input.way);
        &x + self.mlp.apply(&self.post_attention_layernorm.apply(&x), input.way)
    }
}

/// What goes through the layers beside the states.
struct Input {
    /// Padded.
    ids: Tensor,
    rotation: Rotation,
    /// Rows without the padding.
    rows: i64,
    padding: i64,
    way: Way,
}

/// Packed sequences without a cache.
pub(super) struct Packed<'a> {
    input: Input,
    lengths: &'a [i64],
}

impl<'a> Packed<'a> {
    /// Lays out sequences, one after another in `ids`.
    pub(super) fn new(decoder: &Decoder, ids: &Tensor, lengths: &'a [i64]) -> Self {
        let positions: Vec<i64> = lengths.iter().flat_map(|&length| 0..length).collect();
        Self { input: decoder.input(ids, &positions, Way::Libtorch), lengths }
    }
}

/// Packed sequences, of which the beginnings may be shared, on their way through the
/// layers.
pub(super) struct Walk {
    backs: Vec<Back>,
    input: Input,
    x: Tensor,
    /// Layers that are behind it.
    done: usize,
}

/// The network without its head's sampling and without its files.
#[derive(Debug)]
pub(super) struct Decoder {
    embed_tokens: Tensor,
    layers: Vec<Layer>,
    norm: Norm,
    pub(super) lm_head: Linear,
    rotary: Rotary,
    device: Device,
    /// Type of the products; that of the weights may be another.
    kind: Kind,
}

impl Decoder {
    pub(super) fn new(
        config: &Config,
        parameters: &[(String, Tensor)],
        adapter: Option<&Adapter>,
        (kind, device): (Kind, Device),
    ) -> Result<Self, Error> {
        let by_name = parameters.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let weights = Weights { by_name, adapter, kind };
        let embed_tokens = weights.take("model.embed_tokens.weight")?;
        let lm_head = match config.tie_word_embeddings {
            true => weights.linear("model.embed_tokens", false)?,
            false => weights.linear("lm_head", false)?,
        };
        let layers = (0..config.num_hidden_layers).map(|index| Layer::new(config, &weights, index));
        Ok(Self {
            embed_tokens,
            layers: layers.collect::<Result<_, _>>()?,
            norm: Norm { weight: weights.take("model.norm.weight")?, eps: config.rms_norm_eps },
            lm_head,
            rotary: Rotary::new(config, device),
            device,
            kind,
        })
    }

    /// Runs packed sequences without a cache.
    pub(super) fn hidden(&self, ids: &Tensor, lengths: &[i64]) -> Tensor {
        let packed = Packed::new(self, ids, lengths);
        let mut x = self.embed(&packed);
        for layer in 0..self.layers() {
            x = self.layer(layer, &x, &packed);
        }
        self.last_norm(&x, &packed)
    }

    /// Returns how many layers there are.
    pub(super) fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Returns the input of the first layer.
    pub(super) fn embed(&self, packed: &Packed<'_>) -> Tensor {
        self.embedded(&packed.input.ids)
    }

    /// Runs one layer over packed sequences.
    pub(super) fn layer(&self, layer: usize, x: &Tensor, packed: &Packed<'_>) -> Tensor {
        let attention = |queries: &Tensor, keys: &Tensor, values: &Tensor| {
            let mut start = 0;
            let outputs = packed.lengths.iter().map(|&length| {
                // [L, heads, D] -> [1, heads, L, D]
                let part = |x: &Tensor| x.narrow(0, start, length).transpose(0, 1).unsqueeze(0);
                let output = attend(&part(queries), &part(keys), &part(values), &Mask::Causal);
                start += length;
                output
            });
            outputs.collect()
        };
        self.layers[layer].run(x, &packed.input, attention)
    }

    /// Turns the last layer's output into the states.
    pub(super) fn last_norm(&self, x: &Tensor, packed: &Packed<'_>) -> Tensor {
        self.norm.apply(x).narrow(0, 0, packed.input.rows)
    }

    /// Runs packed sequences of which the beginnings may be shared.
    pub(super) fn shared(&self, forest: &Forest) -> Tensor {
        let mut walk = self.begin(forest);
        while self.go_on(&mut walk) {}
        self.end(&walk)
    }

    /// Lays out packed sequences before the first layer.
    pub(super) fn begin(&self, forest: &Forest) -> Walk {
        let backs = forest.segments.iter().map(|segment| Back::new(segment, self.device)).collect();
        let input = self.input(&Tensor::from_slice(&forest.ids), &forest.positions, Way::Libtorch);
        let x = self.embedded(&input.ids);
        Walk { backs, input, x, done: 0 }
    }

    /// Runs the next layer; returns whether one is left after it.
    pub(super) fn go_on(&self, walk: &mut Walk) -> bool {
        let Walk { backs, input, x, done } = walk;
        let Some(layer) = self.layers.get(*done) else { return false };
        let attention = |queries: &Tensor, keys: &Tensor, values: &Tensor| {
            backs.iter().map(|back| back.attend(queries, keys, values)).collect()
        };
        *x = layer.run(x, input, attention);
        *done += 1;
        *done < self.layers.len()
    }

    /// Returns the states behind the last layer.
    pub(super) fn end(&self, walk: &Walk) -> Tensor {
        self.norm.apply(&walk.x).narrow(0, 0, walk.input.rows)
    }

    /// Returns the logits of hidden states.
    pub(super) fn head(&self, hidden: &Tensor) -> Tensor {
        self.head_by(hidden, Way::Libtorch)
    }

    /// Whether libtorch has to widen the head's weights before it multiplies.
    pub(super) fn widens_head(&self) -> bool {
        self.kind == Kind::Float && self.lm_head.weight.kind() != Kind::Float
    }

    fn head_by(&self, hidden: &Tensor, way: Way) -> Tensor {
        let rows = hidden.size()[0];
        let padded = pad_rows(hidden, self.padding(rows, way));
        self.lm_head.apply(&padded, way).narrow(0, 0, rows)
    }

    /// Feeds each sequence its next tokens; returns the logits after the last.
    pub(super) fn step(&self, batch: &mut [(&[i64], &mut Cache)]) -> Tensor {
        if let Some(hidden) = self.single(batch) {
            return self.head_by(&hidden, Way::Own);
        }
        let mut ids = Vec::new();
        let mut positions = Vec::new();
        let mut last_rows = Vec::new();
        let mut masks = Vec::new();
        for (tokens, cache) in batch.iter_mut() {
            let (past, added) = (cache.length(), tokens.len() as i64);
            cache.reserve(added);
            ids.extend_from_slice(tokens);
            positions.extend(past..past + added);
            last_rows.push(ids.len() as i64 - 1);
            masks.push(Mask::of(past, added, self.device));
        }
        let ids = Tensor::from_slice(&ids).to_device(self.device);
        let input = self.input(&ids, &positions, Way::Own);
        let hidden = self.run(&input, |layer, queries, keys, values| {
            let mut start = 0;
            let sequences = batch.iter_mut().zip(&masks);
            let outputs = sequences.map(|((tokens, cache), mask)| {
                let length = tokens.len() as i64;
                let part = |x: &Tensor| x.narrow(0, start, length);
                let (keys, values) = cache.extend(layer, &part(keys), &part(values));
                let queries = part(queries).transpose(0, 1).unsqueeze(0);
                start += length;
                attend(&queries, &keys, &values, mask)
            });
            outputs.collect()
        });
        for (tokens, cache) in batch.iter_mut() {
            cache.advance(tokens.len() as i64);
        }
        let last_rows = Tensor::from_slice(&last_rows).to_device(self.device);
        self.head_by(&hidden.index_select(0, &last_rows), Way::Own)
    }

    /// Runs all layers. `attention` gets the layer's number, queries
    /// `[T, heads, D]`, keys and values, and returns one `[L, heads * D]` per
    /// sequence, in order.
    fn run(
        &self,
        input: &Input,
        mut attention: impl FnMut(usize, &Tensor, &Tensor, &Tensor) -> Vec<Tensor>,
    ) -> Tensor {
        let mut x = self.embedded(&input.ids);
        for (index, layer) in self.layers.iter().enumerate() {
            x = layer
                .run(&x, input, |queries, keys, values| attention(index, queries, keys, values));
        }
        self.norm.apply(&x).narrow(0, 0, input.rows)
    }

    fn input(&self, ids: &Tensor, positions: &[i64], way: Way) -> Input {
        let rows = positions.len() as i64;
        let padding = self.padding(rows, way);
        let positions = Tensor::from_slice(positions).to_device(self.device);
        let rotation = self.rotary.at(&pad_rows(&positions, padding));
        let ids = pad_rows(&ids.to_device(self.device), padding);
        Input { ids, rotation, rows, padding, way }
    }

    /// Returns the embeddings as the products' type has them.
    fn embedded(&self, ids: &Tensor) -> Tensor {
        let rows = Tensor::embedding(&self.embed_tokens, ids, -1, false, false);
        rows.to_kind(self.kind).to_kind(Kind::Float)
    }

    /// Returns the rows to add so that a product of libtorch is steady. bf16 products
    /// are so for any number of rows, and so are our own.
    fn padding(&self, rows: i64, way: Way) -> i64 {
        let held = self.embed_tokens.kind();
        let own = way == Way::Own && rows::fits(rows as usize, self.device, held);
        match self.kind {
            Kind::Float if !own => (STEADY_ROWS - rows).max(0),
            _ => 0,
        }
    }
}

fn pad_rows(x: &Tensor, rows: i64) -> Tensor {
    if rows == 0 {
        return x.shallow_clone();
    }
    let mut size = x.size();
    size[0] = rows;
    Tensor::cat(&[x, &Tensor::zeros(&size, (x.kind(), x.device()))], 0)
}

//! What `config.json` and `generation_config.json` say, in the spelling of
//! transformers 4 and of transformers 5. What this build cannot compute is
//! refused here, by key, so that nothing behind has to ask.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::Error;

/// More layers than any model has: a wrong number must not become an endless
/// list of names.
const MOST_LAYERS: i64 = 4096;

/// The architectures this build computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Llama 2 and 3, SmolLM2 and others of that plan.
    Llama,
    /// Biases on q, k and v, always.
    Qwen2,
    /// RMS norms over each head's q and k, before the rotation.
    Qwen3,
}

/// How rotary frequencies are stretched.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    Default,
    /// Low frequencies by a factor, middle ones by part of it.
    Llama3 {
        /// By how much the low frequencies shrink.
        factor: f64,
        /// Wave lengths above the context over this are low.
        low_freq_factor: f64,
        /// Wave lengths below the context over this are high.
        high_freq_factor: f64,
        /// The context before stretching.
        original_max_position_embeddings: f64,
    },
}

/// The defaults of generation that the folder recommends.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Generation {
    /// Divides the logits.
    pub temperature: Option<f32>,
    /// How many of the likeliest tokens are kept.
    pub top_k: Option<i64>,
    /// Share of probability that is kept.
    pub top_p: Option<f32>,
    /// Share of the likeliest token's probability that a kept token has.
    pub min_p: Option<f32>,
    /// Divides the positive logits of tokens that stand in the text already, and
    /// multiplies the others. Nothing here applies it.
    pub repetition_penalty: Option<f32>,
    eos_token_id: Option<Ids>,
}

/// What the folder says about the model. Names as in `config.json`.
#[derive(Debug, Clone)]
pub struct Config {
    /// The architecture.
    pub family: Family,
    /// Rows of the embedding.
    pub vocab_size: i64,
    /// Width of the residual stream.
    pub hidden_size: i64,
    /// Width of the MLP.
    pub intermediate_size: i64,
    /// Number of layers.
    pub num_hidden_layers: i64,
    /// Query heads.
    pub num_attention_heads: i64,
    /// Key and value heads.
    pub num_key_value_heads: i64,
    /// Width of one head.
    pub head_dim: i64,
    /// Added to the mean square in a norm.
    pub rms_norm_eps: f64,
    /// Longest sequence the model was made for.
    pub max_position_embeddings: i64,
    /// Whether the head is the embedding.
    pub tie_word_embeddings: bool,
    /// Whether q, k and v have biases.
    pub attention_bias: bool,
    /// Whether the attention's output has a bias.
    pub output_bias: bool,
    /// Whether the MLP has biases.
    pub mlp_bias: bool,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// How they are stretched.
    pub rope_scaling: RopeScaling,
    /// First token of a text, if the model has one.
    pub bos_token_id: Option<i32>,
    /// Tokens that end an answer; those of `generation_config.json` if it names any.
    pub eos_token_ids: Vec<i32>,
    /// The token for padding, if there is one.
    pub pad_token_id: Option<i32>,
    /// Defaults of generation.
    pub generation: Generation,
}

/// One id or a list of them.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum Ids {
    One(i32),
    Many(Vec<i32>),
}

impl Ids {
    fn into_vec(self) -> Vec<i32> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
}

/// `config.json` as it stands there; null is the same as absent.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Raw {
    model_type: Option<String>,
    architectures: Option<Vec<String>>,
    vocab_size: Option<i64>,
    hidden_size: Option<i64>,
    intermediate_size: Option<i64>,
    num_hidden_layers: Option<i64>,
    num_attention_heads: Option<i64>,
    num_key_value_heads: Option<i64>,
    head_dim: Option<i64>,
    rms_norm_eps: Option<f64>,
    max_position_embeddings: Option<i64>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    hidden_act: Option<String>,
    rope_theta: Option<f64>,
    rope_scaling: Option<Map<String, Value>>,
    rope_parameters: Option<Map<String, Value>>,
    use_sliding_window: Option<bool>,
    sliding_window: Option<i64>,
    max_window_layers: Option<i64>,
    layer_types: Option<Vec<String>>,
    quantization_config: Option<Value>,
    bos_token_id: Option<i32>,
    eos_token_id: Option<Ids>,
    pad_token_id: Option<i32>,
}

impl Config {
    /// Reads `config.json` and, if it is there, `generation_config.json`.
    pub fn read(folder: &Path) -> Result<Self, Error> {
        let path = folder.join("config.json");
        let raw: Raw = read_json(&path)?;
        let defaults = folder.join("generation_config.json");
        let generation = match defaults.exists() {
            true => read_json(&defaults)?,
            false => Generation::default(),
        };
        Reading { path: &path, raw }.config(generation)
    }
}

fn read_json<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<T, Error> {
    let text =
        std::fs::read(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
    serde_json::from_slice(&text)
        .map_err(|error| Error::Config { path: path.to_owned(), problem: error.to_string() })
}

/// A file being understood; knows its path for the messages.
struct Reading<'a> {
    path: &'a Path,
    raw: Raw,
}

impl Reading<'_> {
    fn config(self, mut generation: Generation) -> Result<Config, Error> {
        let family = self.family()?;
        self.refuse_unsupported()?;
        let raw = &self.raw;
        let hidden_size = self.positive("hidden_size", raw.hidden_size)?;
        let num_attention_heads = self.positive("num_attention_heads", raw.num_attention_heads)?;
        let key_value_heads = raw.num_key_value_heads.or(Some(num_attention_heads));
        let num_key_value_heads = self.positive("num_key_value_heads", key_value_heads)?;
        let head_dim = match family {
            Family::Qwen3 => raw.head_dim.or(Some(128)),
            Family::Llama | Family::Qwen2 => {
                raw.head_dim.or(Some(hidden_size / num_attention_heads))
            }
        };
        let head_dim = self.positive("head_dim", head_dim)?;
        if num_attention_heads % num_key_value_heads != 0 || head_dim % 2 != 0 {
            let problem = format!(
                "{num_attention_heads} heads over {num_key_value_heads} key heads of width {head_dim} cannot be"
            );
            return Err(self.wrong(problem));
        }
        let declared_bias = raw.attention_bias.unwrap_or(false);
        let eos = generation.eos_token_id.take().or_else(|| raw.eos_token_id.clone());
        let (rope_theta, rope_scaling) = self.rope()?;
        Ok(Config {
            family,
            vocab_size: self.positive("vocab_size", raw.vocab_size)?,
            hidden_size,
            intermediate_size: self.positive("intermediate_size", raw.intermediate_size)?,
            num_hidden_layers: self.layers(raw.num_hidden_layers)?,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            rms_norm_eps: raw.rms_norm_eps.unwrap_or(1e-6),
            max_position_embeddings: self
                .positive("max_position_embeddings", raw.max_position_embeddings.or(Some(2048)))?,
            tie_word_embeddings: raw.tie_word_embeddings.unwrap_or(false),
            attention_bias: family == Family::Qwen2 || declared_bias,
            output_bias: family != Family::Qwen2 && declared_bias,
            mlp_bias: family == Family::Llama && raw.mlp_bias.unwrap_or(false),
            rope_theta,
            rope_scaling,
            bos_token_id: raw.bos_token_id,
            eos_token_ids: eos.map(Ids::into_vec).unwrap_or_default(),
            pad_token_id: raw.pad_token_id,
            generation,
        })
    }

    fn family(&self) -> Result<Family, Error> {
        let model_type = self.raw.model_type.as_deref().unwrap_or("absent");
        let (family, architecture) = match model_type {
            "llama" => (Family::Llama, "LlamaForCausalLM"),
            "qwen2" => (Family::Qwen2, "Qwen2ForCausalLM"),
            "qwen3" => (Family::Qwen3, "Qwen3ForCausalLM"),
            _ => return Err(self.unsupported("model_type", model_type, "llama, qwen2, qwen3")),
        };
        match self.raw.architectures.as_deref() {
            Some([found, ..]) if found != architecture => Err(self.unsupported(
                "architectures",
                found,
                "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
            )),
            _ => Ok(family),
        }
    }

    fn refuse_unsupported(&self) -> Result<(), Error> {
        let raw = &self.raw;
        let activation = raw.hidden_act.as_deref().unwrap_or("silu");
        if activation != "silu" {
            return Err(self.unsupported("hidden_act", activation, "silu"));
        }
        if let Some(quantization) = &raw.quantization_config {
            let method = quantization.get("quant_method").unwrap_or(quantization).to_string();
            return Err(self.unsupported(
                "quantization_config",
                &method,
                "no quantisation (F32, F16, BF16 weights)",
            ));
        }
        let layers = raw.num_hidden_layers.unwrap_or_default();
        let sliding_by_flag = raw.use_sliding_window == Some(true)
            && raw.sliding_window.is_some()
            && raw.max_window_layers.is_none_or(|first| first < layers);
        let other_layer = raw.layer_types.iter().flatten().find(|kind| *kind != "full_attention");
        match other_layer {
            Some(kind) => Err(self.unsupported("layer_types", kind, "full_attention")),
            None if sliding_by_flag => {
                Err(self.unsupported("use_sliding_window", "true", "full attention in every layer"))
            }
            None => Ok(()),
        }
    }

    /// Reads the rotary settings: `rope_parameters`, else `rope_scaling`, with
    /// the base inside or beside them.
    fn rope(&self) -> Result<(f64, RopeScaling), Error> {
        let empty = Map::new();
        let settings = self.raw.rope_parameters.as_ref().or(self.raw.rope_scaling.as_ref());
        let settings = settings.unwrap_or(&empty);
        // transformers 5 may nest them by the kind of layer.
        let settings =
            settings.get("full_attention").and_then(Value::as_object).unwrap_or(settings);
        let number = |key: &str| settings.get(key).and_then(Value::as_f64);
        let theta = number("rope_theta").or(self.raw.rope_theta).unwrap_or(10_000.0);
        if number("partial_rotary_factor").is_some_and(|share| share != 1.0) {
            return Err(self.unsupported("rope partial_rotary_factor", "not 1", "1"));
        }
        let kind = settings.get("rope_type").or_else(|| settings.get("type"));
        let needed = |key: &'static str| {
            number(key).ok_or_else(|| self.wrong(format!("the llama3 rope has no number `{key}`")))
        };
        match kind.and_then(Value::as_str).unwrap_or("default") {
            "default" => Ok((theta, RopeScaling::Default)),
            "llama3" => Ok((
                theta,
                RopeScaling::Llama3 {
                    factor: needed("factor")?,
                    low_freq_factor: needed("low_freq_factor")?,
                    high_freq_factor: needed("high_freq_factor")?,
                    original_max_position_embeddings: needed("original_max_position_embeddings")?,
                },
            )),
            other => Err(self.unsupported("rope_type", other, "default, llama3")),
        }
    }

    fn positive(&self, key: &str, value: Option<i64>) -> Result<i64, Error> {
        match value {
            Some(value) if value > 0 => Ok(value),
            Some(value) => Err(self.wrong(format!("`{key}` is {value}"))),
            None => Err(self.wrong(format!("no `{key}`"))),
        }
    }

    /// Bounds the number of layers, for each of which names are made.
    fn layers(&self, value: Option<i64>) -> Result<i64, Error> {
        match self.positive("num_hidden_layers", value)? {
            layers if layers <= MOST_LAYERS => Ok(layers),
            layers => {
                Err(self.wrong(format!("`num_hidden_layers` is {layers}, at most {MOST_LAYERS}")))
            }
        }
    }

    fn wrong(&self, problem: String) -> Error {
        Error::Config { path: self.path.to_owned(), problem }
    }

    fn unsupported(&self, key: &'static str, found: &str, supported: &'static str) -> Error {
        Error::Unsupported {
            path: self.path.to_owned(),
            key,
            found: format!("`{found}`"),
            supported,
        }
    }
}

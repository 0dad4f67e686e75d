//! From one GGUF file to a Hugging Face folder of the Llama family.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use half::bf16;
use serde_json::{Map, Value as Json, json};

use super::Error;
use super::folder::whole_folder;
use super::reader::{Gguf, TensorInfo};
use super::tokenizer::{Tokenizer, tokenizer};
use crate::tensors;
use crate::tensors::Writer;

/// Type of the weights written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// Exactly what the blocks say.
    F32,
    /// Rounded to the nearest bf16, ties to even.
    Bf16,
}

/// How to convert.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Type of the weights written.
    pub dtype: Dtype,
    /// Whether an existing folder is replaced.
    pub replace: bool,
}

/// What a conversion wrote.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Converted {
    /// Number of tensors.
    pub tensors: usize,
    /// Number of weights.
    pub weights: usize,
}

/// The numbers that the shapes follow from.
struct Plan {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    layers: usize,
    heads: usize,
    key_value_heads: usize,
    head_dim: usize,
}

/// One tensor to write: where it comes from, its shape, and the heads whose rows
/// llama.cpp has interleaved (0: none).
struct Source<'a> {
    tensor: &'a TensorInfo,
    interleaved_heads: usize,
}

/// Makes a Hugging Face folder of a GGUF file. The folder is written aside and
/// renamed: it is there as a whole or not at all.
pub fn convert(gguf: &Path, out: &Path, options: &Options) -> Result<Converted, Error> {
    if out.symlink_metadata().is_ok() && !options.replace {
        return Err(Error::Exists { folder: out.to_owned() });
    }
    let gguf = Gguf::open(gguf)?;
    let tokenizer = tokenizer(&gguf)?;
    let plan = plan(&gguf, tokenizer.vocab_size)?;
    let sources = sources(&gguf, &plan)?;

    let failed = |source| Error::Write { path: out.to_owned(), source };
    let weights = whole_folder(out, failed, |aside| {
        write_settings(&gguf, &plan, &tokenizer, options.dtype, aside)
            .and_then(|()| write_weights(&gguf, &plan, &sources, options.dtype, aside))
            .map_err(|error| under(error, aside, out))
    })?;
    Ok(Converted { tensors: sources.len(), weights })
}

/// Names the file that was to be, not the one it was written as.
fn under(error: Error, aside: &Path, out: &Path) -> Error {
    let named = |path: PathBuf| match path.strip_prefix(aside) {
        Ok(file) => out.join(file),
        Err(_) => path,
    };
    match error {
        Error::Write { path, source } => Error::Write { path: named(path), source },
        Error::Tensors(tensors::Error::Write { path, source }) => {
            Error::Tensors(tensors::Error::Write { path: named(path), source })
        }
        error => error,
    }
}

fn plan(gguf: &Gguf, vocab_size: usize) -> Result<Plan, Error> {
    let unsupported = |what: &str, found: String, supported| {
        let (path, what) = (gguf.path().to_owned(), format!("`{what}`"));
        Err(Error::Unsupported { path, what, found, supported })
    };
    let architecture = gguf.text("general.architecture")?;
    if architecture != "llama" {
        return unsupported("general.architecture", architecture.to_owned(), "llama");
    }
    let experts = gguf.count("llama.expert_count").unwrap_or(0);
    if experts > 0 {
        return unsupported("llama.expert_count", experts.to_string(), "dense models");
    }
    if let Ok(scaling) = gguf.text("llama.rope.scaling.type")
        && scaling != "none"
    {
        return unsupported("llama.rope.scaling.type", scaling.to_owned(), "none");
    }
    let hidden_size = gguf.count("llama.embedding_length")?;
    let heads = gguf.count("llama.attention.head_count")?;
    let key_value_heads = gguf.count("llama.attention.head_count_kv").unwrap_or(heads);
    let head_dim = match gguf.value("llama.attention.key_length") {
        Some(_) => gguf.count("llama.attention.key_length")?,
        None => hidden_size / heads.max(1),
    };
    let rotated = gguf.count("llama.rope.dimension_count").unwrap_or(head_dim);
    if rotated != head_dim || head_dim % 2 != 0 || head_dim == 0 {
        return unsupported(
            "llama.rope.dimension_count",
            rotated.to_string(),
            "the even head width",
        );
    }
    Ok(Plan {
        vocab_size,
        hidden_size,
        intermediate_size: gguf.count("llama.feed_forward_length")?,
        layers: gguf.count("llama.block_count")?,
        heads,
        key_value_heads,
        head_dim,
    })
}

/// Finds every tensor of the architecture by its Hugging Face name, and refuses
/// what is missing, of another shape, or has no place.
fn sources<'a>(gguf: &'a Gguf, plan: &Plan) -> Result<BTreeMap<String, Source<'a>>, Error> {
    let path = || gguf.path().to_owned();
    let mut there: HashMap<&str, &TensorInfo> =
        gguf.tensors().iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
    let mut sources = BTreeMap::new();
    let mut take = |from: String, to: String, wanted: Vec<usize>, interleaved_heads: usize| {
        let Some(tensor) = there.remove(from.as_str()) else {
            return Err(Error::MissingTensor { path: path(), name: from });
        };
        if tensor.shape != wanted {
            let found = tensor.shape.clone();
            return Err(Error::WrongShape { path: path(), name: from, found, wanted });
        }
        sources.insert(to, Source { tensor, interleaved_heads });
        Ok(())
    };
    let Plan { vocab_size, hidden_size: hidden, intermediate_size: wide, .. } = *plan;
    let queries = plan.heads * plan.head_dim;
    let keys = plan.key_value_heads * plan.head_dim;
    let top = |from: &str, to: &str| (format!("{from}.weight"), format!("{to}.weight"));
    let (from, to) = top("token_embd", "model.embed_tokens");
    take(from, to, vec![vocab_size, hidden], 0)?;
    let (from, to) = top("output_norm", "model.norm");
    take(from, to, vec![hidden], 0)?;
    for layer in 0..plan.layers {
        for (from, to, wanted, interleaved_heads) in [
            ("attn_norm", "input_layernorm", vec![hidden], 0),
            ("ffn_norm", "post_attention_layernorm", vec![hidden], 0),
            ("attn_q", "self_attn.q_proj", vec![queries, hidden], plan.heads),
            ("attn_k", "self_attn.k_proj", vec![keys, hidden], plan.key_value_heads),
            ("attn_v", "self_attn.v_proj", vec![keys, hidden], 0),
            ("attn_output", "self_attn.o_proj", vec![hidden, queries], 0),
            ("ffn_gate", "mlp.gate_proj", vec![wide, hidden], 0),
            ("ffn_up", "mlp.up_proj", vec![wide, hidden], 0),
            ("ffn_down", "mlp.down_proj", vec![hidden, wide], 0),
        ] {
            let from = format!("blk.{layer}.{from}.weight");
            let to = format!("model.layers.{layer}.{to}.weight");
            take(from, to, wanted, interleaved_heads)?;
        }
    }
    if gguf.tensors().iter().any(|tensor| tensor.name == "output.weight") {
        let (from, to) = top("output", "lm_head");
        take(from, to, vec![vocab_size, hidden], 0)?;
    }
    match there.into_keys().min() {
        Some(name) => Err(Error::Unsupported {
            path: path(),
            what: "a tensor".to_owned(),
            found: name.to_owned(),
            supported: "those of a plain Llama (no biases, no rope factors)",
        }),
        None => Ok(sources),
    }
}

fn write_weights(
    gguf: &Gguf,
    plan: &Plan,
    sources: &BTreeMap<String, Source<'_>>,
    dtype: Dtype,
    folder: &Path,
) -> Result<usize, Error> {
    let stored = match dtype {
        Dtype::F32 => tensors::Dtype::F32,
        Dtype::Bf16 => tensors::Dtype::BF16,
    };
    let heads =
        sources.iter().map(|(name, source)| (name.clone(), stored, source.tensor.shape.clone()));
    let mut writer = Writer::create(&folder.join("model.safetensors"), heads)?;
    let mut weights = 0;
    for source in sources.values() {
        let mut numbers = gguf.read(source.tensor)?;
        if source.interleaved_heads > 0 {
            numbers = deinterleave(&numbers, source.interleaved_heads, plan);
        }
        weights += numbers.len();
        let bytes = match dtype {
            Dtype::F32 => to_bytes(&numbers, f32::to_le_bytes),
            Dtype::Bf16 => to_bytes(&numbers, |number| bf16::from_f32(number).to_le_bytes()),
        };
        writer.write(&bytes)?;
    }
    writer.finish()?;
    Ok(weights)
}

fn to_bytes<const N: usize>(numbers: &[f32], bytes_of: impl Fn(f32) -> [u8; N]) -> Vec<u8> {
    let mut bytes = vec![0; numbers.len() * N];
    for (place, &number) in bytes.chunks_exact_mut(N).zip(numbers) {
        place.copy_from_slice(&bytes_of(number));
    }
    bytes
}

/// Puts the rows of each head back in the half-split order: llama.cpp stores row
/// `2 j + s` where Hugging Face has row `s head_dim / 2 + j`.
fn deinterleave(numbers: &[f32], heads: usize, plan: &Plan) -> Vec<f32> {
    let (width, half) = (plan.hidden_size, plan.head_dim / 2);
    let mut rows = Vec::with_capacity(numbers.len());
    for head in 0..heads {
        for side in 0..2 {
            for pair in 0..half {
                let row = head * plan.head_dim + 2 * pair + side;
                rows.extend_from_slice(&numbers[row * width..(row + 1) * width]);
            }
        }
    }
    rows
}

fn write_settings(
    gguf: &Gguf,
    plan: &Plan,
    tokenizer: &Tokenizer,
    dtype: Dtype,
    folder: &Path,
) -> Result<(), Error> {
    let tied = !gguf.tensors().iter().any(|tensor| tensor.name == "output.weight");
    let mut ids = Map::new();
    for (name, id) in [("bos", tokenizer.bos), ("eos", tokenizer.eos), ("pad", tokenizer.pad)] {
        ids.insert(format!("{name}_token_id"), id.into());
    }
    let mut config = json!({
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": false,
        "head_dim": plan.head_dim,
        "hidden_act": "silu",
        "hidden_size": plan.hidden_size,
        "intermediate_size": plan.intermediate_size,
        "max_position_embeddings": gguf.count("llama.context_length")?,
        "mlp_bias": false,
        "model_type": "llama",
        "num_attention_heads": plan.heads,
        "num_hidden_layers": plan.layers,
        "num_key_value_heads": plan.key_value_heads,
        "rms_norm_eps": gguf.number("llama.attention.layer_norm_rms_epsilon")?,
        "rope_scaling": null,
        "rope_theta": gguf.number("llama.rope.freq_base").unwrap_or(10_000.0),
        "tie_word_embeddings": tied,
        "torch_dtype": match dtype { Dtype::F32 => "float32", Dtype::Bf16 => "bfloat16" },
        "vocab_size": plan.vocab_size,
    });
    if let Some(config) = config.as_object_mut() {
        config.extend(ids.clone());
    }
    ids.retain(|_, id| !id.is_null());
    for (name, json) in [
        ("config.json", &config),
        ("generation_config.json", &Json::Object(ids)),
        ("tokenizer.json", &tokenizer.tokenizer),
        ("tokenizer_config.json", &tokenizer.tokenizer_config),
        ("special_tokens_map.json", &tokenizer.special_tokens_map),
    ] {
        write_json(folder.join(name), json)?;
    }
    Ok(())
}

fn write_json(path: PathBuf, json: &Json) -> Result<(), Error> {
    let write = || {
        let mut text = serde_json::to_vec_pretty(json)?;
        text.push(b'\n');
        let mut file = File::create(&path)?;
        file.write_all(&text)?;
        file.sync_all()
    };
    write().map_err(|source| Error::Write { path: path.clone(), source })
}

//! Weights in a Hugging Face folder: one file or shards with an index, checked
//! against the configuration, loaded, and written again in the same form.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use super::adapter::Adapter;
use super::arena::Arena;
use super::config::{Config, Family};
use super::{Dtype, Error, rows};
use crate::tensors;
use crate::tensors::{Entry, Reader, Writer};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";
/// Buffers that old Llama checkpoints carry; they follow from the configuration.
const DERIVED: &str = ".self_attn.rotary_emb.inv_freq";

/// What besides the weights makes a model folder.
const COMPANIONS: &[&str] = &[
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
    "vocab.json",
    "merges.txt",
];

/// How weights are held in memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Held {
    pub(super) dtype: Dtype,
    /// Whether those that a file has in bf16, and that the matrix unit takes, stay so,
    /// whatever `dtype` is.
    pub(super) narrow: bool,
    /// Whether each is to be a tensor for itself.
    pub(super) apart: bool,
    pub(super) device: Device,
}

impl Held {
    /// Returns the type that a weight is held in. Norms and biases are always f32: they are
    /// added and multiplied in f32 and weigh nothing.
    fn kind(&self, entry: &Entry) -> Kind {
        match entry.dtype {
            _ if entry.shape.len() == 1 => Kind::Float,
            tensors::Dtype::BF16 if self.narrow && suits_unit(&entry.shape) => Kind::BFloat16,
            _ => self.dtype.kind(),
        }
    }
}

fn suits_unit(shape: &[usize]) -> bool {
    matches!(*shape, [outputs, inner] if rows::unit_takes(inner, outputs))
}

/// The opened weight files of a folder.
#[derive(Debug)]
pub(super) struct Checkpoint {
    folder: PathBuf,
    shards: Vec<(String, Reader)>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: serde_json::Map<String, Value>,
}

impl Checkpoint {
    /// Opens the single file, or every shard that the index names.
    pub(super) fn open(folder: &Path) -> Result<Self, Error> {
        let names = if folder.join(SINGLE).exists() {
            vec![SINGLE.to_owned()]
        } else if folder.join(INDEX).exists() {
            shard_names(&folder.join(INDEX))?
        } else {
            return Err(Error::NoWeights { folder: folder.to_owned() });
        };
        let open = |name: String| -> Result<(String, Reader), Error> {
            let reader = Reader::open(&folder.join(&name))?;
            Ok((name, reader))
        };
        let shards = names.into_iter().map(open).collect::<Result<_, _>>()?;
        Ok(Self { folder: folder.to_owned(), shards })
    }

    fn entries(&self) -> impl Iterator<Item = (&Reader, &Entry)> {
        self.shards
            .iter()
            .flat_map(|(_, reader)| reader.entries().iter().map(move |entry| (reader, entry)))
    }

    /// Compares names, shapes and types with what the configuration calls for.
    pub(super) fn check(&self, config: &Config) -> Result<(), Error> {
        let folder = || self.folder.clone();
        let mut wanted = wanted_tensors(config);
        for (_, entry) in self.entries() {
            if entry.name.ends_with(DERIVED) {
                continue;
            }
            let (name, found) = (entry.name.clone(), shape(entry));
            let place = match wanted.remove(&entry.name) {
                None if config.tie_word_embeddings && entry.name == HEAD => {
                    Some(vec![config.vocab_size, config.hidden_size])
                }
                place => place,
            };
            match place {
                None => return Err(Error::ExtraTensor { folder: folder(), name, found }),
                Some(wanted) if wanted != found => {
                    return Err(Error::WrongShape { folder: folder(), name, found, wanted });
                }
                Some(_) => {}
            }
            if kind_of(entry.dtype).is_none() {
                let found = format!("{:?}", entry.dtype);
                return Err(Error::WrongType { folder: folder(), name, found });
            }
        }
        // The first by name, so that the message is the same every time.
        match wanted.into_iter().min() {
            Some((name, wanted)) => Err(Error::MissingTensor { folder: folder(), name, wanted }),
            None => Ok(()),
        }
    }

    /// Returns the type to compute in: bf16 if the embedding is bf16.
    pub(super) fn dtype(&self) -> Dtype {
        let embedding = self.entries().find(|(_, entry)| entry.name == EMBEDDING);
        match embedding.map(|(_, entry)| entry.dtype) {
            Some(tensors::Dtype::BF16) => Dtype::Bf16,
            _ => Dtype::F32,
        }
    }

    /// Loads the weights in the order of the files.
    pub(super) fn load(&self, config: &Config, held: Held) -> Result<Vec<(String, Tensor)>, Error> {
        let mut loaded = Vec::new();
        let mut spare_head = None;
        let is_spare = |entry: &Entry| config.tie_word_embeddings && entry.name == HEAD;
        let mut arenas = match held.apart || held.device != Device::Cpu {
            true => vec![],
            false => self.arenas(held, is_spare)?,
        };
        for (reader, entry) in self.entries() {
            if entry.name.ends_with(DERIVED) {
                continue;
            }
            let kind = held.kind(entry);
            let of_type = |kind| tensor(self.folder.clone(), reader, entry, kind, held.device);
            if is_spare(entry) {
                spare_head = Some(of_type(kind)?);
                continue;
            }
            let arena = arenas.iter_mut().find(|(of, _)| *of == kind && entry.shape.len() > 1);
            let tensor = match (arena, kind_of(entry.dtype)) {
                (Some((_, arena)), Some(stored)) if stored == kind => arena
                    .read(&shape(entry), |place| Ok::<_, Error>(reader.read_into(entry, place)?))?,
                (Some((_, arena)), Some(stored)) => arena.hold(&of_type(stored)?)?,
                (_, _) => of_type(kind)?,
            };
            loaded.push((entry.name.clone(), tensor));
        }
        if let Some(head) = spare_head
            && !loaded.iter().any(|(name, tensor)| name == EMBEDDING && *tensor == head)
        {
            return Err(Error::UntiedHead { folder: self.folder.clone() });
        }
        Ok(loaded)
    }

    /// Takes room for the matrices of each type.
    fn arenas(
        &self,
        held: Held,
        is_spare: impl Fn(&Entry) -> bool,
    ) -> Result<Vec<(Kind, Arena)>, Error> {
        let matrices = || {
            self.entries().map(|(_, entry)| entry).filter(|entry| {
                entry.shape.len() > 1 && !entry.name.ends_with(DERIVED) && !is_spare(entry)
            })
        };
        let arena = |kind: Kind| -> Result<(Kind, Arena), Error> {
            let counts = matrices().filter(|entry| held.kind(entry) == kind);
            let counts = counts.map(|entry| entry.shape.iter().product());
            Ok((kind, Arena::new(kind, counts)?))
        };
        [Kind::Float, Kind::BFloat16].map(arena).into_iter().collect()
    }
}

fn shape(entry: &Entry) -> Vec<i64> {
    entry.shape.iter().map(|&length| length as i64).collect()
}

/// Reads one tensor of a file.
pub(super) fn tensor(
    folder: PathBuf,
    reader: &Reader,
    entry: &Entry,
    kind: Kind,
    device: Device,
) -> Result<Tensor, Error> {
    let Some(stored) = kind_of(entry.dtype) else {
        let (name, found) = (entry.name.clone(), format!("{:?}", entry.dtype));
        return Err(Error::WrongType { folder, name, found });
    };
    let plain = Tensor::f_from_data_size(&reader.read(entry)?, &shape(entry), stored)?;
    Ok(plain.f_to_kind(kind)?.f_to_device(device)?)
}

/// Returns the bytes of a tensor as a file has them.
pub(super) fn bytes(tensor: &Tensor, kind: Kind) -> Result<Vec<u8>, Error> {
    let plain = tensor.detach().f_to_device(Device::Cpu)?.f_to_kind(kind)?.f_contiguous()?;
    let mut bytes = vec![0; plain.numel() * kind.elt_size_in_bytes()];
    plain.f_copy_data_u8(&mut bytes, plain.numel())?;
    Ok(bytes)
}

fn shard_names(path: &Path) -> Result<Vec<String>, Error> {
    let wrong = |problem: String| Error::Config { path: path.to_owned(), problem };
    let text =
        std::fs::read(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
    let index: Index = serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
    let mut names: Vec<String> = Vec::new();
    for (tensor, file) in &index.weight_map {
        let Some(file) = file.as_str().filter(|file| !file.contains('/')) else {
            return Err(wrong(format!("the file of tensor `{tensor}` is {file}")));
        };
        names.push(file.to_owned());
    }
    names.sort();
    names.dedup();
    Ok(names)
}

fn kind_of(dtype: tensors::Dtype) -> Option<Kind> {
    match dtype {
        tensors::Dtype::F32 => Some(Kind::Float),
        tensors::Dtype::F16 => Some(Kind::Half),
        tensors::Dtype::BF16 => Some(Kind::BFloat16),
        _ => None,
    }
}

/// Returns every tensor of the architecture with its shape.
pub(super) fn wanted_tensors(config: &Config) -> HashMap<String, Vec<i64>> {
    let Config { vocab_size, hidden_size: hidden, intermediate_size: wide, head_dim, .. } = *config;
    let queries = config.num_attention_heads * head_dim;
    let keys = config.num_key_value_heads * head_dim;
    let mut wanted = HashMap::new();
    let mut add = |name: String, shape: &[i64]| {
        wanted.insert(name, shape.to_vec());
    };
    add(EMBEDDING.to_owned(), &[vocab_size, hidden]);
    add("model.norm.weight".to_owned(), &[hidden]);
    if !config.tie_word_embeddings {
        add(HEAD.to_owned(), &[vocab_size, hidden]);
    }
    for index in 0..config.num_hidden_layers {
        let layer = format!("model.layers.{index}");
        let attention = config.attention_bias;
        for (part, rows, columns, bias) in [
            ("self_attn.q_proj", queries, hidden, attention),
            ("self_attn.k_proj", keys, hidden, attention),
            ("self_attn.v_proj", keys, hidden, attention),
            ("self_attn.o_proj", hidden, queries, config.output_bias),
            ("mlp.gate_proj", wide, hidden, config.mlp_bias),
            ("mlp.up_proj", wide, hidden, config.mlp_bias),
            ("mlp.down_proj", hidden, wide, config.mlp_bias),
        ] {
            add(format!("{layer}.{part}.weight"), &[rows, columns]);
            if bias {
                add(format!("{layer}.{part}.bias"), &[rows]);
            }
        }
        add(format!("{layer}.input_layernorm.weight"), &[hidden]);
        add(format!("{layer}.post_attention_layernorm.weight"), &[hidden]);
        if config.family == Family::Qwen3 {
            add(format!("{layer}.self_attn.q_norm.weight"), &[head_dim]);
            add(format!("{layer}.self_attn.k_norm.weight"), &[head_dim]);
        }
    }
    wanted
}

/// Writes weights, and what an adapter adds to them, in the form of the folder
/// `base`.
pub(super) fn save(
    (parameters, adapter): (&[(String, Tensor)], Option<&Adapter>),
    base: &Path,
    out: &Path,
    dtype: Option<Dtype>,
) -> Result<(), Error> {
    std::fs::create_dir_all(out).map_err(|source| Error::Write { path: out.to_owned(), source })?;
    let checkpoint = Checkpoint::open(base)?;
    let by_name: HashMap<&str, &Tensor> =
        parameters.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let mut total_size = 0;
    for (file, reader) in &checkpoint.shards {
        let typed = |entry: &Entry| match dtype {
            Some(dtype) if !entry.name.ends_with(DERIVED) => dtype.stored(),
            _ => entry.dtype,
        };
        let heads = reader
            .entries()
            .iter()
            .map(|entry| (entry.name.clone(), typed(entry), entry.shape.clone()));
        let mut writer = Writer::create(&out.join(file), heads)?;
        for entry in reader.entries() {
            let bytes = match entry.name.ends_with(DERIVED) {
                true => reader.read(entry)?,
                false => tensor_bytes(base, (&by_name, adapter), entry, typed(entry))?,
            };
            total_size += bytes.len();
            writer.write(&bytes)?;
        }
        writer.finish()?;
    }
    copy_companions(base, out, dtype, total_size)
}

/// Returns the bytes of a tensor as the base's file wants it.
fn tensor_bytes(
    base: &Path,
    (by_name, adapter): (&HashMap<&str, &Tensor>, Option<&Adapter>),
    entry: &Entry,
    stored: tensors::Dtype,
) -> Result<Vec<u8>, Error> {
    let folder = || base.to_owned();
    let name = || entry.name.clone();
    let wanted: Vec<i64> = entry.shape.iter().map(|&length| length as i64).collect();
    // A tied head that the base's file repeats is the embedding.
    let tensor = by_name.get(entry.name.as_str());
    let tensor = tensor.or_else(|| by_name.get(EMBEDDING).filter(|_| entry.name == HEAD));
    let Some(tensor) = tensor else {
        let found = wanted;
        return Err(Error::ExtraTensor { folder: folder(), name: name(), found });
    };
    if tensor.size() != wanted {
        let found = tensor.size();
        return Err(Error::WrongShape { folder: folder(), name: name(), found, wanted });
    }
    let Some(kind) = kind_of(stored) else {
        let found = format!("{stored:?}");
        return Err(Error::WrongType { folder: folder(), name: name(), found });
    };
    let merged = adapter.map(|adapter| adapter.merged(&entry.name, tensor));
    bytes(merged.as_ref().unwrap_or(tensor), kind)
}

fn copy_companions(
    base: &Path,
    out: &Path,
    dtype: Option<Dtype>,
    total_size: usize,
) -> Result<(), Error> {
    let read = |path: &Path| {
        let path = path.to_owned();
        move |source| Error::Read { path, source }
    };
    for entry in std::fs::read_dir(base).map_err(read(base))? {
        let entry = entry.map_err(read(base))?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if COMPANIONS.contains(&name.as_ref()) || name.starts_with("tokenizer") {
            copy(&entry.path(), &out.join(name.as_ref()))?;
        }
    }
    let index = base.join(INDEX);
    if index.exists() && !base.join(SINGLE).exists() {
        rewrite(&index, &out.join(INDEX), |json| {
            json["metadata"]["total_size"] = total_size.into();
        })?;
    }
    let Some(dtype) = dtype else { return Ok(()) };
    let config = out.join("config.json");
    rewrite(&config, &config, |json| {
        let key = if json.get("dtype").is_some() { "dtype" } else { "torch_dtype" };
        json[key] = dtype.config_name().into();
    })
}

/// Copies a file, or a folder of files.
fn copy(from: &Path, to: &Path) -> Result<(), Error> {
    if !from.is_dir() {
        std::fs::copy(from, to).map_err(|source| Error::Write { path: to.to_owned(), source })?;
        return Ok(());
    }
    std::fs::create_dir_all(to).map_err(|source| Error::Write { path: to.to_owned(), source })?;
    let failed = |source| Error::Read { path: from.to_owned(), source };
    for entry in std::fs::read_dir(from).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        copy(&entry.path(), &to.join(entry.file_name()))?;
    }
    Ok(())
}

/// Changes a JSON object and keeps the order of its keys.
fn rewrite(from: &Path, to: &Path, change: impl FnOnce(&mut Value)) -> Result<(), Error> {
    let text =
        std::fs::read(from).map_err(|source| Error::Read { path: from.to_owned(), source })?;
    let wrong = |problem: String| Error::Config { path: from.to_owned(), problem };
    let mut json: Value =
        serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
    if !json.is_object() {
        return Err(wrong("is no JSON object".to_owned()));
    }
    let before = json.clone();
    change(&mut json);
    let text = match json == before {
        true => text,
        false => serde_json::to_vec_pretty(&json).map_err(|error| wrong(error.to_string()))?,
    };
    std::fs::write(to, text).map_err(|source| Error::Write { path: to.to_owned(), source })
}

//! Language models: Llama, Qwen2 and Qwen3 from Hugging Face folders.
//!
//! One decoder serves all three; what differs stands in [`Config`]. Training
//! and scoring run packed sequences through [`Model::hidden`], generation runs
//! [`Model::step`] over [`Cache`]s. Products are in the model's type, all else
//! (residuals, norms, attention, logits) in f32.
//!
//! A model belongs to one compute thread at a time (`Send`, not `Sync`). New
//! weights are a new `Model`. Absent on purpose: optimisers, losses, stop rules,
//! chat templates, atomic files (the caller writes aside and renames).

pub mod adapter;
mod arena;
mod attention;
mod cache;
mod checkpoint;
pub mod config;
mod decoder;
mod head;
mod linear;
mod pass;
mod prefix;
mod rows;
mod rotary;
pub mod sampler;
mod score;
mod scoring;

use std::io;
use std::path::{Path, PathBuf};

use tch::{Device, Kind, Tensor};

use crate::tensors;

pub use adapter::{Adapter, Lora, Targets};
pub use cache::{Cache, Piece};
pub use config::{Config, Family};
pub use head::{Ahead, Head};
pub use pass::Pass;
pub use sampler::{Sampled, Sampler, SamplingParams};
pub use score::{Score, Scored};
pub use scoring::Scoring;

use decoder::Decoder;

/// Type of the numbers a model computes its products in, or is saved in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// 32-bit floats.
    F32,
    /// 16-bit floats with the exponent of f32.
    Bf16,
}

impl Dtype {
    /// Returns the name that `config.json` uses.
    pub fn config_name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
        }
    }

    fn kind(self) -> Kind {
        match self {
            Self::F32 => Kind::Float,
            Self::Bf16 => Kind::BFloat16,
        }
    }

    fn stored(self) -> tensors::Dtype {
        match self {
            Self::F32 => tensors::Dtype::F32,
            Self::Bf16 => tensors::Dtype::BF16,
        }
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        })
    }
}

impl std::str::FromStr for Dtype {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "f32" | "float32" => Ok(Self::F32),
            "bf16" | "bfloat16" => Ok(Self::Bf16),
            _ => Err(format!("`{text}` is neither f32 nor bf16")),
        }
    }
}

/// How a model is loaded.
#[derive(Debug, Clone, Copy)]
pub struct LoadOptions {
    /// Type of the products; the checkpoint's own if not given (f32 for f16
    /// checkpoints and for training).
    pub dtype: Option<Dtype>,
    /// Where the weights live.
    pub device: Device,
    /// Whether gradients reach the weights. Those are f32 then, whatever the type
    /// of the products: small steps must not be lost.
    pub trainable: bool,
    /// Whether matrices that the checkpoint has in bf16 are held so, whatever the type of
    /// the products, if this processor's matrix unit takes them: the same numbers in half
    /// the memory, which is read for each token. libtorch has to widen them first, as for
    /// scores. On a CPU only, and not for training.
    pub narrow: bool,
    /// Whether a pass keeps each layer's input alone for the way back, and runs the
    /// layer again there: less memory, a third more time, the same gradients.
    pub checkpoint_activations: bool,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            dtype: None,
            device: Device::Cpu,
            trainable: false,
            narrow: false,
            checkpoint_activations: false,
        }
    }
}

/// What can be wrong with a model folder, or with what a model is asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or folder cannot be read.
    #[error("`{}`: cannot be read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's own message.
        source: io::Error,
    },
    /// A file or folder cannot be written.
    #[error("`{}`: cannot be written: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's own message.
        source: io::Error,
    },
    /// A settings file is no JSON, or lacks a key, or has a wrong value.
    #[error("`{}`: {problem}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The model uses something that this build cannot compute.
    #[error("`{}`: `{key}` is {found}, supported: {supported}", path.display())]
    Unsupported {
        /// The file that says so.
        path: PathBuf,
        /// The key.
        key: &'static str,
        /// What it says.
        found: String,
        /// What would do.
        supported: &'static str,
    },
    /// A folder holds no weights.
    #[error("`{}`: holds neither `model.safetensors` nor `model.safetensors.index.json`", folder.display())]
    NoWeights {
        /// The folder.
        folder: PathBuf,
    },
    /// A weight file is broken.
    #[error(transparent)]
    Tensors(#[from] tensors::Error),
    /// A tensor that the configuration calls for is not there.
    #[error("`{}`: tensor `{name}` {wanted:?} is missing", folder.display())]
    MissingTensor {
        /// The folder.
        folder: PathBuf,
        /// Name of the tensor.
        name: String,
        /// Its shape by the configuration.
        wanted: Vec<i64>,
    },
    /// A tensor is there that the configuration has no place for.
    #[error("`{}`: tensor `{name}` {found:?} has no place in this model", folder.display())]
    ExtraTensor {
        /// The folder.
        folder: PathBuf,
        /// Name of the tensor.
        name: String,
        /// Its shape in the file.
        found: Vec<i64>,
    },
    /// A tensor has another shape than the configuration says.
    #[error("`{}`: tensor `{name}` has shape {found:?}, wanted {wanted:?}", folder.display())]
    WrongShape {
        /// The folder.
        folder: PathBuf,
        /// Name of the tensor.
        name: String,
        /// Its shape in the file.
        found: Vec<i64>,
        /// Its shape by the configuration.
        wanted: Vec<i64>,
    },
    /// A tensor is of a type that is no weight.
    #[error("`{}`: tensor `{name}` is {found}, supported: F32, F16, BF16", folder.display())]
    WrongType {
        /// The folder.
        folder: PathBuf,
        /// Name of the tensor.
        name: String,
        /// Its type in the file.
        found: String,
    },
    /// A weight is NaN or infinite: nothing could be computed with it.
    #[error("`{}`: tensor `{name}` holds values that are not finite", folder.display())]
    BrokenWeight {
        /// The folder.
        folder: PathBuf,
        /// Name of the tensor.
        name: String,
    },
    /// A file with tied embeddings has a head of its own that differs.
    #[error("`{}`: `tie_word_embeddings` is true, but `lm_head.weight` differs from `model.embed_tokens.weight`", folder.display())]
    UntiedHead {
        /// The folder.
        folder: PathBuf,
    },
    /// The device asked for is not there.
    #[error("device {wanted:?} is not available (this libtorch sees {cuda_devices} CUDA devices)")]
    NoDevice {
        /// The device.
        wanted: Device,
        /// How many there are.
        cuda_devices: i64,
    },
    /// A token id that the model has no embedding for.
    #[error("token id {id} at position {position} is outside the vocabulary of {vocab_size}")]
    TokenOutOfRange {
        /// The id.
        id: i64,
        /// Its place in the list.
        position: usize,
        /// How many ids there are.
        vocab_size: i64,
    },
    /// Logits that are no numbers: nothing can be sampled.
    #[error("logit {logit} of token {id} is not finite")]
    NotFinite {
        /// The token.
        id: usize,
        /// Its logit.
        logit: f32,
    },
    /// Sampling settings that mean nothing.
    #[error("`{name}` is {found}, wanted {wanted}")]
    Sampling {
        /// The setting.
        name: &'static str,
        /// Its value.
        found: f64,
        /// What would do.
        wanted: &'static str,
    },
    /// libtorch refused.
    #[error("libtorch: {0}")]
    Torch(#[from] tch::TchError),
}

/// A model with its weights.
#[derive(Debug)]
pub struct Model {
    /// What the folder says about the model.
    pub config: Config,
    parameters: Vec<(String, Tensor)>,
    adapter: Option<Adapter>,
    decoder: Decoder,
    device: Device,
    dtype: Dtype,
    checkpoint_activations: bool,
}

impl Model {
    /// Loads a Hugging Face folder.
    pub fn load(folder: &Path, options: &LoadOptions) -> Result<Self, Error> {
        check_device(options.device)?;
        let config = Config::read(folder)?;
        let checkpoint = checkpoint::Checkpoint::open(folder)?;
        checkpoint.check(&config)?;
        let dtype = options.dtype.unwrap_or_else(|| match options.trainable {
            true => Dtype::F32,
            false => checkpoint.dtype(),
        });
        let held = checkpoint::Held {
            dtype: if options.trainable { Dtype::F32 } else { dtype },
            narrow: options.narrow && !options.trainable && options.device == Device::Cpu,
            apart: options.trainable,
            device: options.device,
        };
        let mut parameters = checkpoint.load(&config, held)?;
        for (name, tensor) in &parameters {
            if tensor.isfinite().all().int64_value(&[]) == 0 {
                return Err(Error::BrokenWeight { folder: folder.to_owned(), name: name.clone() });
            }
        }
        if options.trainable {
            for (_, tensor) in &mut parameters {
                *tensor = tensor.set_requires_grad(true);
            }
        }
        let (device, checkpoint_activations) = (options.device, options.checkpoint_activations);
        let decoder = Decoder::new(&config, &parameters, None, (dtype.kind(), device))?;
        Ok(Self {
            config,
            parameters,
            adapter: None,
            decoder,
            device,
            dtype,
            checkpoint_activations,
        })
    }

    /// Puts an adapter on the model, which alone is trained from then on. Load the
    /// model as not trainable.
    pub fn with_adapter(mut self, mut adapter: Adapter) -> Result<Self, Error> {
        adapter.train();
        let place = (self.dtype.kind(), self.device);
        self.decoder = Decoder::new(&self.config, &self.parameters, Some(&adapter), place)?;
        self.adapter = Some(adapter);
        Ok(self)
    }

    /// Returns the adapter, if there is one.
    pub fn adapter(&self) -> Option<&Adapter> {
        self.adapter.as_ref()
    }

    /// Returns the weights that training moves: the adapter's, else all.
    pub fn trained(&self) -> &[(String, Tensor)] {
        self.adapter.as_ref().map_or(&self.parameters, Adapter::tensors)
    }

    /// Returns the weights by their checkpoint names, in the order of the files.
    /// Tied embeddings stand once.
    pub fn parameters(&self) -> &[(String, Tensor)] {
        &self.parameters
    }

    /// Returns where the weights live.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Returns the type of the products.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Refuses ids that the model has no embedding for. [`Model::hidden`],
    /// [`Model::step`] and [`Model::score`] panic on such ids: check first.
    pub fn check_ids(&self, ids: impl IntoIterator<Item = i64>) -> Result<(), Error> {
        let vocab_size = self.config.vocab_size;
        for (position, id) in ids.into_iter().enumerate() {
            if id < 0 || id >= vocab_size {
                return Err(Error::TokenOutOfRange { id, position, vocab_size });
            }
        }
        Ok(())
    }

    /// Runs packed sequences: `ids` is i64 `[T]`, one sequence after another,
    /// `lengths` says how long each is. Returns f32 `[T, H]` after the last norm.
    pub fn hidden(&self, ids: &Tensor, lengths: &[i64]) -> Tensor {
        self.decoder.hidden(ids, lengths)
    }

    /// Runs packed sequences, as [`Model::hidden`] does, to go back through them.
    pub fn pass<'a>(&'a self, ids: &Tensor, lengths: &'a [i64]) -> Pass<'a> {
        match self.checkpoint_activations {
            true => Pass::recomputed(&self.decoder, ids, lengths),
            false => Pass::whole(&self.decoder, ids, lengths),
        }
    }

    /// Returns the f32 logits `[N, V]` of hidden states `[N, H]`.
    pub fn head(&self, hidden: &Tensor) -> Tensor {
        self.decoder.head(hidden)
    }

    /// Returns the head, to go through it with the rows of a pass and back.
    pub fn head_pass(&self) -> Head<'_> {
        Head::new(&self.decoder)
    }

    /// Returns an empty cache for one sequence of this model.
    pub fn cache(&self) -> Cache {
        Cache::new(&self.config, self.device)
    }

    /// Feeds each sequence its next tokens (a whole prompt, or one token) and
    /// returns the f32 logits `[B, V]` after the last token of each. No gradient.
    pub fn step(&self, batch: &mut [(&[i64], &mut Cache)]) -> Tensor {
        tch::no_grad(|| self.decoder.step(batch))
    }

    /// Returns log-probs of tokens that are already there. No gradient.
    pub fn score(&self, requests: &[Score]) -> Vec<Scored> {
        tch::no_grad(|| score::score(&self.decoder, requests))
    }

    /// Goes on with scores for about as long as a pass over so many tokens takes; returns
    /// whether they are done. The numbers are those of [`Model::score`], to the bit. No
    /// gradient.
    pub fn score_on(&self, scoring: &mut Scoring, tokens: usize) -> bool {
        tch::no_grad(|| scoring.go_on(&self.decoder, tokens))
    }

    /// Runs sequences and calls `take` with the place of each and what
    /// [`Model::read`] needs to know of it from a position on. A beginning that
    /// several share is computed once. They come in any order, as soon as they are
    /// there; whoever keeps some had better copy them. Returns how many tokens were
    /// computed. No gradient.
    pub fn each_states(
        &self,
        sequences: &[(&[i64], usize)],
        take: impl FnMut(usize, Tensor),
    ) -> usize {
        tch::no_grad(|| score::each_states(&self.decoder, sequences, take))
    }

    /// Scores a sequence by its states, as [`Model::score`] does.
    pub fn read(&self, states: &Tensor, request: &Score) -> Scored {
        tch::no_grad(|| score::read(&self.decoder, states, request))
    }

    /// Writes the weights, an adapter's part added to them in f32, into `out` with the
    /// tensor names, shapes, files and, unless `dtype` is given, types of the folder
    /// `base`, and copies its settings and tokenizer. Not atomic.
    pub fn save(&self, base: &Path, out: &Path, dtype: Option<Dtype>) -> Result<(), Error> {
        checkpoint::save((&self.parameters, self.adapter.as_ref()), base, out, dtype)
    }

    /// Writes the same with other numbers in place of what is trained, in the order of
    /// [`Model::trained`].
    pub fn save_with(
        &self,
        trained: &[(String, Tensor)],
        base: &Path,
        out: &Path,
        dtype: Option<Dtype>,
    ) -> Result<(), Error> {
        let adapter = self.adapter.as_ref().map(|adapter| adapter.with(trained));
        let parameters = if adapter.is_some() { self.parameters.as_slice() } else { trained };
        checkpoint::save((parameters, adapter.as_ref()), base, out, dtype)
    }
}

fn check_device(wanted: Device) -> Result<(), Error> {
    let cuda_devices = tch::Cuda::device_count();
    match wanted {
        Device::Cpu => Ok(()),
        Device::Cuda(index) if (index as i64) < cuda_devices => Ok(()),
        _ => Err(Error::NoDevice { wanted, cuda_devices }),
    }
}

//! GGUF files, the form in which llama.cpp's models travel: read, and made into
//! Hugging Face folders.
//!
//! Every count and length in a file is checked before it is believed. Block
//! types other than F32, F16, BF16, Q4_0, Q4_1 and Q8_0 are refused by name.
//! Absent on purpose: writing GGUF, running a model.

pub mod blocks;
mod convert;
mod folder;
mod reader;
mod tokenizer;

use std::io;
use std::path::PathBuf;

pub use convert::{Converted, Dtype, Options, convert};
pub use folder::whole_folder;
pub use reader::{Gguf, TensorInfo, Value};

use crate::tensors;

/// What can be wrong with a GGUF file, or with making a folder of it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be opened or read.
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
    /// The weight file cannot be written.
    #[error(transparent)]
    Tensors(#[from] tensors::Error),
    /// The file is no GGUF, or is cut, or contradicts itself.
    #[error("`{}`: not a GGUF file that can be read ({problem})", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A key that the conversion needs is not there, or of another type.
    #[error("`{}`: no {wanted} under the key `{key}`", path.display())]
    MissingKey {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// What should be there.
        wanted: &'static str,
    },
    /// The file uses something that this build does not convert.
    #[error("`{}`: {what} is `{found}`, supported: {supported}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The key or tensor.
        what: String,
        /// What it is.
        found: String,
        /// What would do.
        supported: &'static str,
    },
    /// A tensor of the architecture is not there.
    #[error("`{}`: tensor `{name}` is missing", path.display())]
    MissingTensor {
        /// The file.
        path: PathBuf,
        /// Name of the tensor.
        name: String,
    },
    /// A tensor has another shape than the keys say.
    #[error("`{}`: tensor `{name}` has shape {found:?}, wanted {wanted:?}", path.display())]
    WrongShape {
        /// The file.
        path: PathBuf,
        /// Name of the tensor.
        name: String,
        /// Its shape, row-major.
        found: Vec<usize>,
        /// Its shape by the keys.
        wanted: Vec<usize>,
    },
    /// The folder to write exists.
    #[error("`{}`: exists already", folder.display())]
    Exists {
        /// The folder.
        folder: PathBuf,
    },
}

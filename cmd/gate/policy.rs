//! A policy as it is named on the command line.

use std::path::{Path, PathBuf};

use oclaw::sync::{self, weights_hash};

use crate::report::Failure;

/// A policy that is compared.
#[derive(Debug)]
pub(super) enum Contender {
    /// A server that has it loaded.
    Server {
        /// Its address.
        url: String,
    },
    /// A model folder.
    Folder {
        /// The folder itself, links resolved.
        folder: PathBuf,
        /// Hash of its settings and weights.
        weights: String,
    },
}

impl Contender {
    /// Reads an address or a folder.
    pub(super) fn read(given: &str) -> anyhow::Result<Self> {
        if given.contains("://") {
            return Ok(Self::Server { url: given.to_owned() });
        }
        let folder = sync::folder_of(Path::new(given))?;
        if !folder.is_dir() {
            return Err(Failure::failed(format!("`{given}` is no model folder")).into());
        }
        let weights = weights_hash(&folder)?;
        Ok(Self::Folder { folder, weights })
    }
}

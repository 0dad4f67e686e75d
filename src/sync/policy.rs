//! The folder that is pushed, and the version it stands for.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::engine::Pushed;

use super::Error;

/// A whole policy folder and its version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// The folder itself, links resolved once.
    pub folder: PathBuf,
    /// The version as a decimal step.
    pub version: String,
    /// Folder of the adapter that is pushed, where the weights themselves are not.
    pub adapter: Option<PathBuf>,
}

/// Settings of an adapter, in the form of the `peft` library.
const ADAPTER: &str = "adapter_config.json";
/// What the names of adapters that were pushed begin with.
pub(super) const PREFIX: &str = "oclaw-v";

impl Policy {
    /// Resolves a policy: a folder, a link to one (`latest`), or a one-line text
    /// file that names one beside it. The version is read from the name
    /// (`step-000007` is `7`) unless one is given. A folder of the `peft` library is
    /// pushed as an adapter.
    pub fn resolve(given: &Path, version: Option<&str>) -> Result<Self, Error> {
        let folder = folder_of(given)?;
        let adapter = folder.join(ADAPTER).is_file().then(|| folder.clone());
        let checked = match &adapter {
            Some(_) => whole_adapter(&folder),
            None => whole(&folder),
        };
        checked.map_err(|reason| Error::Policy { folder: folder.clone(), reason })?;
        let version = match version {
            Some(version) => stated(version),
            None => named(&folder),
        };
        let version =
            version.map_err(|reason| Error::Version { folder: folder.clone(), reason })?;
        Ok(Self { folder, version, adapter })
    }

    /// Chooses the adapter of a policy, which lies in its folder, instead of the
    /// weights that it was added to.
    pub fn as_adapter(self) -> Result<Self, Error> {
        if self.adapter.is_some() {
            return Ok(self);
        }
        let inside = self.folder.join("adapter");
        match whole_adapter(&inside) {
            Ok(()) => Ok(Self { adapter: Some(inside), ..self }),
            Err(reason) => {
                let reason = format!("of its `adapter/`: {reason}");
                Err(Error::Policy { folder: self.folder, reason })
            }
        }
    }

    /// Returns the name under which servers get its adapter: a new one per version,
    /// so that no cache and no running request mistakes one for another.
    pub fn adapter_name(&self) -> Option<String> {
        self.adapter.as_ref().map(|_| format!("{PREFIX}{}", self.version))
    }

    /// Returns what is told to a server.
    pub(super) fn pushed(&self) -> Pushed<'_> {
        let folder = self.adapter.as_ref().unwrap_or(&self.folder);
        Pushed { folder, version: &self.version }
    }
}

/// Resolves a folder, a link to one, or a one-line text file that names one
/// beside it.
pub fn folder_of(given: &Path) -> Result<PathBuf, Error> {
    let refuse = |reason: String| Error::Policy { folder: given.to_owned(), reason };
    let found = given.canonicalize().map_err(|error| refuse(error.to_string()))?;
    match found.is_file() {
        true => pointed(&found).map_err(refuse),
        false => Ok(found),
    }
}

/// Reads the text form of `latest`.
fn pointed(file: &Path) -> Result<PathBuf, String> {
    const LONGEST: u64 = 4096;
    let length = file.metadata().map_err(|error| error.to_string())?.len();
    if length > LONGEST {
        return Err("it is a file, not a folder".to_owned());
    }
    let text = std::fs::read_to_string(file).map_err(|error| error.to_string())?;
    let name = text.trim();
    if name.is_empty() || name.lines().count() != 1 {
        return Err("it is a file, not a folder, and names none".to_owned());
    }
    let beside = file.parent().unwrap_or(Path::new(".")).join(name);
    let folder = beside.canonicalize().map_err(|error| format!("it names `{name}`: {error}"))?;
    match folder.is_dir() {
        true => Ok(folder),
        false => Err(format!("it names `{name}`, which is no folder")),
    }
}

/// Checks that a server would find what it loads.
fn whole(folder: &Path) -> Result<(), String> {
    if !folder.join("config.json").is_file() {
        return Err("it has no `config.json`".to_owned());
    }
    let index = folder.join("model.safetensors.index.json");
    if !index.is_file() {
        return match folder.join("model.safetensors").is_file() {
            true => Ok(()),
            false => Err("it has no `model.safetensors`".to_owned()),
        };
    }
    let text = std::fs::read(&index).map_err(|error| error.to_string())?;
    let index: Value = serde_json::from_slice(&text)
        .map_err(|error| format!("its `model.safetensors.index.json`: {error}"))?;
    let files = index.get("weight_map").and_then(Value::as_object);
    for file in files.into_iter().flat_map(|map| map.values()).filter_map(Value::as_str) {
        if !folder.join(file).is_file() {
            return Err(format!("it has no `{file}`, which its index names"));
        }
    }
    Ok(())
}

/// The same of an adapter.
fn whole_adapter(folder: &Path) -> Result<(), String> {
    for name in [ADAPTER, "adapter_model.safetensors"] {
        if !folder.join(name).is_file() {
            return Err(format!("it has no `{name}`"));
        }
    }
    Ok(())
}

fn stated(version: &str) -> Result<String, String> {
    match version.is_empty() || version.chars().any(char::is_whitespace) {
        true => Err(format!("`{version}` is no version")),
        false => Ok(version.to_owned()),
    }
}

fn named(folder: &Path) -> Result<String, String> {
    let name = folder.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    let step = name.strip_prefix("step-").and_then(|digits| digits.parse::<u64>().ok());
    match step {
        Some(step) => Ok(step.to_string()),
        None => Err(format!("`{name}` is not named like `step-000007`")),
    }
}

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
}

impl Policy {
    /// Resolves a policy: a folder, a link to one (`latest`), or a one-line text
    /// file that names one beside it. The version is read from the name
    /// (`step-000007` is `7`) unless one is given.
    pub fn resolve(given: &Path, version: Option<&str>) -> Result<Self, Error> {
        let folder = folder_of(given)?;
        whole(&folder).map_err(|reason| Error::Policy { folder: folder.clone(), reason })?;
        let version = match version {
            Some(version) => stated(version),
            None => named(&folder),
        };
        let version =
            version.map_err(|reason| Error::Version { folder: folder.clone(), reason })?;
        Ok(Self { folder, version })
    }

    /// Returns what is told to a server.
    pub(super) fn pushed(&self) -> Pushed<'_> {
        Pushed { folder: &self.folder, version: &self.version }
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

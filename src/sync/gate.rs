//! Whether a policy has passed `oclaw gate`.

use std::fs::File;
use std::path::Path;

use serde_json::Value;
use sha2::{Digest, Sha256};

use super::{Error, Policy};

/// Place of the receipt inside a policy's folder.
pub const RECEIPT: &str = "oclaw/gate.json";

/// Returns the hash of what a model folder is: its settings and weights, by name.
/// What lies in `oclaw/` is not part of it.
pub fn weights_hash(folder: &Path) -> Result<String, Error> {
    let failed = |path: &Path, error: std::io::Error| Error::Policy {
        folder: folder.to_owned(),
        reason: format!("`{}`: {error}", path.display()),
    };
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(|error| failed(folder, error))? {
        let name = entry.map_err(|error| failed(folder, error))?.file_name();
        let name = name.to_string_lossy().into_owned();
        if name == "config.json" || name == "adapter_config.json" || name.ends_with(".safetensors")
        {
            names.push(name);
        }
    }
    names.sort();
    if !names.iter().any(|name| name.ends_with(".safetensors")) {
        let reason = "it has no weights".to_owned();
        return Err(Error::Policy { folder: folder.to_owned(), reason });
    }
    let mut digest = Sha256::new();
    for name in names {
        let path = folder.join(&name);
        digest.update(name.as_bytes());
        let mut file = File::open(&path).map_err(|error| failed(&path, error))?;
        let length = std::io::copy(&mut file, &mut digest).map_err(|error| failed(&path, error))?;
        digest.update(length.to_le_bytes());
    }
    Ok(digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Errors unless a receipt says that exactly these weights may be promoted.
pub fn require_gate(policy: &Policy, receipt: Option<&Path>) -> Result<(), Error> {
    let path = receipt.map_or_else(|| policy.folder.join(RECEIPT), Path::to_owned);
    let refuse = |reason: String| Error::Gate { receipt: path.clone(), reason };
    let text = std::fs::read(&path).map_err(|error| refuse(format!("cannot read it: {error}")))?;
    let found: Value = serde_json::from_slice(&text)
        .map_err(|error| refuse(format!("it is no receipt: {error}")))?;
    let told = |pointer: &str| found.pointer(pointer).and_then(Value::as_str);
    let verdict = told("/verdict").ok_or_else(|| refuse("it tells no verdict".to_owned()))?;
    if verdict != "promote" {
        return Err(refuse(format!("its verdict is `{verdict}`")));
    }
    let gated = told("/candidate/weights_sha256")
        .ok_or_else(|| refuse("it does not tell which weights passed".to_owned()))?;
    match gated == weights_hash(&policy.folder)? {
        true => Ok(()),
        false => Err(refuse("it is about other weights".to_owned())),
    }
}

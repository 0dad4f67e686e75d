//! `oclaw/files.json`: which files a policy has, and where they are. It is put last,
//! and what it does not vouch for is nobody's policy.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::Error;

/// Its name in the folder of the policy.
pub(super) const MANIFEST: &str = "oclaw/files.json";
/// What only the next step of training needs.
pub(super) const STATE: &str = "oclaw/optimizer.safetensors";
/// The moving average of the policies, which nobody serves.
const AVERAGE: &str = "ema/";
/// Bytes of the digest in a folder's name.
const DIGEST: usize = 16;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Manifest {
    /// The folder in that of the policy which has the files. It is named by what is in
    /// them, so that two trainers with one number for two policies never put a file
    /// into the other's. Policies from before it was so have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) folder: Option<String>,
    pub(super) files: Vec<Listed>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Listed {
    pub(super) name: String,
    pub(super) size: u64,
    pub(super) sha256: String,
}

impl Listed {
    pub(super) fn is_state(&self) -> bool {
        self.name == STATE || self.name.starts_with(AVERAGE)
    }
}

impl Manifest {
    /// Lists the files of a folder, sorted by name.
    pub(super) fn of(folder: &Path) -> Result<Self, Error> {
        let mut files = Vec::new();
        walk(folder, "", &mut files)?;
        files.sort_by(|one: &Listed, other| one.name.cmp(&other.name));
        let mut digest = Sha256::new();
        for Listed { name, size, sha256 } in &files {
            digest.update(format!("{name}\n{size}\n{sha256}\n"));
        }
        Ok(Self { folder: Some(hex(&digest.finalize()[..DIGEST])), files })
    }

    /// Reads one. Nothing if the bytes are none.
    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let manifest: Self = serde_json::from_slice(bytes).ok()?;
        // A name may not lead out of the folder.
        let inside = |name: &str| name.split('/').all(|part| !matches!(part, "" | "." | ".."));
        let folder = manifest.folder.as_deref().is_none_or(inside);
        (folder && manifest.files.iter().all(|listed| inside(&listed.name))).then_some(manifest)
    }

    /// Returns whether a folder has a name such as files are put below.
    pub(super) fn may_name(folder: &str) -> bool {
        folder.len() == 2 * DIGEST && folder.bytes().all(|byte| byte.is_ascii_hexdigit())
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        serde_json::to_vec_pretty(self).unwrap_or_default()
    }
}

fn walk(folder: &Path, inside: &str, files: &mut Vec<Listed>) -> Result<(), Error> {
    let failed = |path: &Path, source| Error::File { path: path.to_owned(), source };
    for entry in fs::read_dir(folder).map_err(|source| failed(folder, source))? {
        let entry = entry.map_err(|source| failed(folder, source))?;
        let (path, name) = (entry.path(), entry.file_name());
        let Some(name) = name.to_str() else { continue };
        let name = format!("{inside}{name}");
        if path.is_dir() {
            walk(&path, &format!("{name}/"), files)?;
        } else if name != MANIFEST {
            let (size, sha256) = sum(&path).map_err(|source| failed(&path, source))?;
            files.push(Listed { name, size, sha256 });
        }
    }
    Ok(())
}

/// Returns the size of a file and the SHA-256 of its bytes.
pub(super) fn sum(path: &Path) -> io::Result<(u64, String)> {
    let mut file = File::open(path)?;
    let mut digest = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut size = 0;
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            read => {
                size += read as u64;
                digest.update(&buffer[..read]);
            }
        }
    }
    Ok((size, hex(&digest.finalize())))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

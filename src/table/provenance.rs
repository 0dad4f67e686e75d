//! What a file says about itself: schema version, tokenizer, and one line per
//! stage it went through. It lives in the schema's metadata, so that Parquet and
//! Arrow streams carry it alike.

use arrow::datatypes::Metadata;

use serde::{Deserialize, Serialize};

use super::Error;
use crate::trajectory::SCHEMA_VERSION;

const VERSION: &str = "oclaw.schema_version";
const LINES: &str = "oclaw.provenance";
const TOKENIZER: &str = "oclaw.tokenizer_hash";
const TEMPLATE: &str = "oclaw.chat_template_hash";

/// One stage that a table went through.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StageLine {
    /// Subcommand.
    pub command: String,
    /// Version of oclaw.
    pub version: String,
    /// Command line, without secrets.
    pub argv: Vec<String>,
    /// Seed of everything random.
    pub seed: Option<u64>,
    /// Each input: its name and the SHA-256 of its bytes.
    pub inputs: Vec<String>,
}

/// Where a table came from.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Provenance {
    /// The stages, oldest first.
    pub lines: Vec<StageLine>,
    /// Hash of the tokenizer of the ids. Of a table that was put together from
    /// several, all different ones, joined by commas: equal to none of them.
    pub tokenizer_hash: Option<String>,
    /// Hash of the chat template that rendered the prompts, likewise.
    pub chat_template_hash: Option<String>,
}

impl Provenance {
    /// Reads what a schema's metadata says. Errors if the file was written for a
    /// schema that this build does not know.
    pub(super) fn read(name: &str, metadata: &Metadata) -> Result<Self, Error> {
        if let Some(found) = metadata.get(VERSION) {
            let known = found.parse().is_ok_and(|version: u32| version <= SCHEMA_VERSION);
            if !known {
                let (name, found) = (name.to_owned(), found.clone());
                return Err(Error::NewerSchema { name, found, known: SCHEMA_VERSION });
            }
        }
        let lines = match metadata.get(LINES) {
            None => Vec::new(),
            Some(text) => serde_json::from_str(text).map_err(|error| Error::Damaged {
                name: name.to_owned(),
                reason: format!("metadata `{LINES}`: {error}"),
            })?,
        };
        Ok(Self {
            lines,
            tokenizer_hash: metadata.get(TOKENIZER).cloned(),
            chat_template_hash: metadata.get(TEMPLATE).cloned(),
        })
    }

    /// Adds this to a schema's metadata; what stood there of ours is replaced.
    pub(super) fn write(&self, metadata: &mut Metadata) {
        metadata.insert(VERSION.to_owned(), SCHEMA_VERSION.to_string());
        let lines = serde_json::to_string(&self.lines).unwrap_or_default();
        let entries = [
            (LINES, (!self.lines.is_empty()).then_some(lines)),
            (TOKENIZER, self.tokenizer_hash.clone()),
            (TEMPLATE, self.chat_template_hash.clone()),
        ];
        for (key, value) in entries {
            match value {
                Some(value) => metadata.insert(key.to_owned(), value),
                None => metadata.remove(key),
            };
        }
    }

    /// Adds what another input of the same run says.
    pub(super) fn merge(&mut self, other: Self) {
        for line in other.lines {
            if !self.lines.contains(&line) {
                self.lines.push(line);
            }
        }
        join(&mut self.tokenizer_hash, other.tokenizer_hash);
        join(&mut self.chat_template_hash, other.chat_template_hash);
    }
}

fn join(known: &mut Option<String>, other: Option<String>) {
    let Some(other) = other else { return };
    match known {
        None => *known = Some(other),
        Some(hashes) if hashes.split(',').any(|hash| hash == other) => {}
        Some(hashes) => {
            hashes.push(',');
            hashes.push_str(&other);
        }
    }
}

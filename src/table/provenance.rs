//! What a file says about itself: schema version, tokenizer, and one line per
//! stage it went through. It lives in the schema's metadata, so that Parquet and
//! Arrow streams carry it alike.

use arrow::datatypes::Metadata;

use serde::{Deserialize, Serialize};

use super::Error;
use crate::trajectory::SCHEMA_VERSION;

const VERSION: &str = "oclaw.schema_version";
const LINES: &str = "oclaw.provenance";
/// What the last stage used: known only when all rows are written, so it stands
/// beside the lines and joins the last of them when it is read.
pub(super) const USAGE: &str = "oclaw.usage";
const TOKENIZER: &str = "oclaw.tokenizer_hash";
const TEMPLATE: &str = "oclaw.chat_template_hash";

/// One stage that a table went through.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
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
    /// What it asked of others. A stream, whose head is written before anything is
    /// asked, does not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
}

/// What a stage asked of others.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Usage {
    /// Calls made.
    pub calls: u64,
    /// Answers that had been paid for before.
    pub cache_hits: u64,
    /// Tokens of the prompts, as the servers counted them.
    pub prompt_tokens: u64,
    /// Tokens of the answers, as the servers counted them.
    pub completion_tokens: u64,
    /// Answered calls whose tokens nobody counted.
    pub uncounted: u64,
    /// What the tokens cost; none if prices or counts are not known.
    pub cost: Option<f64>,
}

/// Where a table came from.
#[derive(Debug, Clone, PartialEq, Default)]
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
            let (name, found) = (name.to_owned(), found.clone());
            let digits = !found.is_empty() && found.bytes().all(|byte| byte.is_ascii_digit());
            match found.parse::<u32>() {
                Ok(1..=SCHEMA_VERSION) => {}
                // One that does not even fit is a later one.
                _ if digits && found.bytes().any(|byte| byte != b'0') => {
                    return Err(Error::NewerSchema { name, found, known: SCHEMA_VERSION });
                }
                _ => return Err(Error::OddSchema { name, found }),
            }
        }
        let damaged = |key: &str, error: serde_json::Error| Error::Damaged {
            name: name.to_owned(),
            reason: format!("metadata `{key}`: {error}"),
        };
        let mut lines: Vec<StageLine> = match metadata.get(LINES) {
            None => Vec::new(),
            Some(text) => serde_json::from_str(text).map_err(|error| damaged(LINES, error))?,
        };
        if let (Some(last), Some(text)) = (lines.last_mut(), metadata.get(USAGE)) {
            last.usage = serde_json::from_str(text).map_err(|error| damaged(USAGE, error))?;
        }
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
            // Of the stage before, and in its line by now.
            (USAGE, None),
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

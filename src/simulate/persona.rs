//! A persona: who talks, what they want and what they say.

use std::path::Path;

use serde::Deserialize;

use super::Error;
use super::rule::{Rule, Written};
use super::shuffle::pick;

/// Somebody with a wish.
#[derive(Debug, Clone)]
pub struct Persona {
    /// A short name.
    pub name: String,
    /// The wish in words: for a reader, and for an engine that gives them words.
    pub wish: String,
    /// Most answers of a session that they wait for.
    pub turns: u32,
    /// Longest answer, in tokens.
    pub max_tokens: u32,
    /// What an answer must be.
    pub rule: Rule,
    broken: Vec<String>,
    holds: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    name: String,
    wish: String,
    #[serde(default = "two")]
    turns: u32,
    #[serde(default = "short")]
    max_tokens: u32,
    rule: Written,
    says: Says,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Says {
    broken: Vec<String>,
    holds: Vec<String>,
}

fn two() -> u32 {
    2
}

fn short() -> u32 {
    64
}

impl Persona {
    /// Reads a file.
    pub fn load(path: &Path) -> Result<Self, Error> {
        let place = format!("persona `{}`", path.display());
        let text = std::fs::read_to_string(path).map_err(|error| Error::Persona {
            place: place.clone(),
            message: format!("cannot read it: {error}"),
        })?;
        Self::parse(&text, &place)
    }

    /// Reads the text of a file, which errors call `place`.
    pub fn parse(text: &str, place: &str) -> Result<Self, Error> {
        let fault = |message: String| Error::Persona { place: place.to_owned(), message };
        let file: File =
            toml::from_str(text).map_err(|error| fault(error.to_string().trim_end().to_owned()))?;
        for (name, value) in [("turns", file.turns), ("max-tokens", file.max_tokens)] {
            if value == 0 {
                return Err(fault(format!("`{name}` is 0, wanted 1 or more")));
            }
        }
        for (name, texts) in [("broken", &file.says.broken), ("holds", &file.says.holds)] {
            if texts.is_empty() || texts.iter().any(|text| text.trim().is_empty()) {
                return Err(fault(format!("`says.{name}` needs a text, and none may be empty")));
            }
        }
        let rule = file.rule.compile("rule").map_err(fault)?;
        let File { name, wish, turns, max_tokens, says: Says { broken, holds }, .. } = file;
        Ok(Self { name, wish, turns, max_tokens, rule, broken, holds })
    }

    /// Returns what the person says of an answer: one of their phrasings, which the
    /// parts decide.
    pub fn words(&self, obeyed: bool, parts: &[u64]) -> &str {
        pick(self.phrasings(obeyed), parts)
    }

    /// Returns all that the person says of answers that obey, or do not.
    pub fn phrasings(&self, obeyed: bool) -> &[String] {
        if obeyed { &self.holds } else { &self.broken }
    }
}

//! What people open with.

use std::path::Path;

use serde_json::Value;

use super::Error;
use super::shuffle::mix;

/// Questions, in the order in which they are asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Questions {
    asked: Vec<String>,
}

impl Questions {
    /// Reads files of JSON or JSON Lines, whose objects have a `question`, in an order
    /// that the seed decides.
    pub fn load(paths: &[impl AsRef<Path>], seed: u64) -> Result<Self, Error> {
        let mut asked = Vec::new();
        for path in paths {
            asked.extend(read(path.as_ref())?);
        }
        for last in (1..asked.len()).rev() {
            asked.swap(last, (mix(&[seed, last as u64]) % (last as u64 + 1)) as usize);
        }
        Ok(Self { asked })
    }

    /// Returns the question of a session. After the last comes the first again.
    pub fn of(&self, session: usize) -> &str {
        self.asked.get(session % self.asked.len().max(1)).map_or("", String::as_str)
    }

    /// Returns how many different ones there are.
    pub fn count(&self) -> usize {
        self.asked.len()
    }
}

fn read(path: &Path) -> Result<Vec<String>, Error> {
    let fault = |message: String| Error::Questions { path: path.to_owned(), message };
    let text =
        std::fs::read_to_string(path).map_err(|error| fault(format!("cannot read it: {error}")))?;
    let mut found = Vec::new();
    for (number, value) in serde_json::Deserializer::from_str(&text).into_iter().enumerate() {
        let value: Value = value.map_err(|error| fault(error.to_string()))?;
        let rows = match value {
            Value::Array(rows) => rows,
            row => vec![row],
        };
        for row in rows {
            match row.get("question").and_then(Value::as_str).map(str::trim) {
                Some(question) if !question.is_empty() => found.push(question.to_owned()),
                _ => return Err(fault(format!("value {} has no `question`", number + 1))),
            }
        }
    }
    match found.is_empty() {
        true => Err(fault("no question in it".to_owned())),
        false => Ok(found),
    }
}

//! What an answer is found by.

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

/// A question, hashed up to the number of the vote.
#[derive(Debug, Clone)]
pub struct Question {
    digest: Sha256,
}

impl Question {
    /// Hashes a question: its kind, who is asked, and everything that the answer
    /// depends on. The order of an object's members makes no difference.
    pub fn new(kind: &str, engine: &Value, request: &Value) -> Self {
        let mut text = String::new();
        write(&Value::from(kind), &mut text);
        text.push('\n');
        write(engine, &mut text);
        text.push('\n');
        write(request, &mut text);
        text.push('\n');
        Self { digest: Sha256::new_with_prefix(text) }
    }

    /// Returns the key of one of several answers to the question.
    pub fn vote(&self, number: u32) -> Key {
        let mut digest = self.digest.clone();
        digest.update(number.to_string());
        Key(digest.finalize().into())
    }
}

/// A SHA-256 of a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key([u8; 32]);

impl Key {
    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Writes JSON with the members of objects in the order of their names. A newline
/// never stands in it, so newlines can part several values.
fn write(value: &Value, text: &mut String) {
    match value {
        Value::Object(members) => {
            text.push('{');
            for (index, (name, value)) in sorted(members).into_iter().enumerate() {
                if index > 0 {
                    text.push(',');
                }
                write(&Value::from(name.as_str()), text);
                text.push(':');
                write(value, text);
            }
            text.push('}');
        }
        Value::Array(values) => {
            text.push('[');
            for (index, value) in values.iter().enumerate() {
                if index > 0 {
                    text.push(',');
                }
                write(value, text);
            }
            text.push(']');
        }
        plain => text.push_str(&plain.to_string()),
    }
}

fn sorted(members: &Map<String, Value>) -> Vec<(&String, &Value)> {
    let mut members: Vec<_> = members.iter().collect();
    members.sort_by_key(|(name, _)| name.as_str());
    members
}

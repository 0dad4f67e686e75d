//! JSON as it really arrives: Python writes half surrogate pairs and `NaN`,
//! clients cut strings inside a character. `serde_json` refuses all of these;
//! here they are read with a visible replacement, and the caller is told.

use std::borrow::Cow;

use serde_json::Value;

/// A document that was read, perhaps after a repair.
#[derive(Debug, Clone, PartialEq)]
pub struct Lenient<'a> {
    /// What was read.
    pub value: Value,
    /// The bytes it was read from: the ones given unless they had to be
    /// repaired. Valid JSON.
    pub text: Cow<'a, [u8]>,
}

impl Lenient<'_> {
    /// Returns whether something had to be replaced.
    pub fn repaired(&self) -> bool {
        matches!(self.text, Cow::Owned(_))
    }
}

/// Parses a document, repairing what Python would have let through.
pub fn parse(bytes: &[u8]) -> Option<Lenient<'_>> {
    if let Ok(value) = serde_json::from_slice(bytes) {
        return Some(Lenient { value, text: Cow::Borrowed(bytes) });
    }
    let repaired = repair(&String::from_utf8_lossy(bytes));
    let value = serde_json::from_str(&repaired).ok()?;
    Some(Lenient { value, text: Cow::Owned(repaired.into_bytes()) })
}

/// Replaces half surrogate pairs by U+FFFD inside strings, and the numbers that
/// JSON does not have by `null` outside.
fn repair(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    let mut in_string = false;
    while let Some(first) = rest.chars().next() {
        let taken = match (in_string, first) {
            (true, '\\') => {
                let (escape, length) = escape(rest);
                out.push_str(escape);
                length
            }
            (_, '"') => {
                in_string = !in_string;
                out.push('"');
                1
            }
            (false, 'N' | 'I' | '-') => match not_a_number(rest) {
                Some(length) => {
                    out.push_str("null");
                    length
                }
                None => {
                    out.push(first);
                    1
                }
            },
            _ => {
                out.push(first);
                first.len_utf8()
            }
        };
        rest = &rest[taken..];
    }
    out
}

fn not_a_number(text: &str) -> Option<usize> {
    ["NaN", "Infinity", "-Infinity"].iter().find(|word| text.starts_with(**word)).map(|w| w.len())
}

/// Returns the escape at the start of `text` as it may stand, and how many
/// bytes of `text` it replaces.
fn escape(text: &str) -> (&str, usize) {
    let unit = |at: usize| -> Option<u16> {
        let digits = text.get(at..at + 6)?.strip_prefix("\\u")?;
        u16::from_str_radix(digits, 16).ok()
    };
    match unit(0) {
        Some(0xd800..=0xdbff) => match unit(6) {
            Some(0xdc00..=0xdfff) => (&text[..12], 12),
            _ => ("\\ufffd", 6),
        },
        Some(0xdc00..=0xdfff) => ("\\ufffd", 6),
        _ => {
            let length = text.chars().take(2).map(char::len_utf8).sum();
            (&text[..length], length)
        }
    }
}

/// Writes a value with its object keys sorted, so that two writers of the same
/// value agree.
pub fn canonical(value: &Value) -> String {
    match value {
        Value::Object(members) => {
            let mut keys: Vec<_> = members.iter().collect();
            keys.sort_by_key(|(key, _)| *key);
            let members: Vec<_> = keys
                .into_iter()
                .map(|(key, value)| format!("{}:{}", Value::from(key.as_str()), canonical(value)))
                .collect();
            format!("{{{}}}", members.join(","))
        }
        Value::Array(items) => {
            let items: Vec<_> = items.iter().map(canonical).collect();
            format!("[{}]", items.join(","))
        }
        scalar => scalar.to_string(),
    }
}

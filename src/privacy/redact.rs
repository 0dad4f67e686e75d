//! Words replaced: in plain text, in JSON, in JSON inside JSON.

use std::collections::{BTreeMap, HashMap};

use serde_json::{Map, Value};

use super::Error;
use super::patterns::{is_secret_member, usual};
use super::spans::{Pattern, find, mark, replace};
use super::told::is_phone_member;

/// JSON is looked for inside texts so many levels deep.
const DEEPEST: usize = 8;
/// Kind of what a member's name gives away.
const MEMBER: &str = "secret";
const PHONE: &str = "phone";
const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

/// How often each kind was found.
pub type Counts = BTreeMap<String, u64>;

/// A text that was changed, and what was found in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Redacted {
    /// The text without it.
    pub text: String,
    /// What it was.
    pub counts: Counts,
}

/// Replaces what must not be kept by `[redacted:KIND]`.
#[derive(Debug)]
pub struct Redactor {
    patterns: Vec<Pattern>,
    /// What was found in ids and names, numbered: two persons stay two.
    numbers: HashMap<String, usize>,
}

impl Redactor {
    /// Makes a redactor of the caller's patterns and the usual ones.
    pub fn new(own: Vec<Pattern>, addresses: bool) -> Result<Self, Error> {
        let mut patterns = own;
        patterns.extend(usual(addresses)?);
        Ok(Self { patterns, numbers: HashMap::new() })
    }

    /// Redacts plain text, which may also be JSON. `None` if it may stay as it is.
    pub fn text(&self, text: &str) -> Option<Redacted> {
        let mut counts = Counts::new();
        let text = self.string(text, 0, &mut counts)?;
        Some(Redacted { text, counts })
    }

    /// Redacts JSON by its values and the names of members, not by its bytes.
    pub fn json(&self, text: &str) -> Option<Redacted> {
        let Ok(mut value) = serde_json::from_str::<Value>(text) else { return self.text(text) };
        let mut counts = Counts::new();
        let changed = self.value(&mut value, 0, &mut counts);
        changed.then(|| Redacted { text: value.to_string(), counts })
    }

    /// Redacts an id or a name, in which numbers are only numbers. Equal ones stay
    /// equal, different ones different.
    pub fn id(&mut self, text: &str) -> Option<Redacted> {
        let spans = find(&self.patterns, text, true);
        if spans.is_empty() {
            return None;
        }
        let mut counts = Counts::new();
        let (patterns, numbers) = (&self.patterns, &mut self.numbers);
        let text = replace(text, &spans, |span| {
            let name = &patterns[span.pattern].name;
            *counts.entry(name.clone()).or_default() += 1;
            let next = numbers.len() + 1;
            let number = *numbers.entry(text[span.range.clone()].to_owned()).or_insert(next);
            mark(name, Some(number))
        });
        Some(Redacted { text, counts })
    }

    fn string(&self, text: &str, depth: usize, counts: &mut Counts) -> Option<String> {
        let nested = depth < DEEPEST && text.trim_start().starts_with(['{', '[']);
        if nested && let Ok(mut value) = serde_json::from_str::<Value>(text) {
            let changed = self.value(&mut value, depth + 1, counts);
            return changed.then(|| value.to_string());
        }
        let spans = find(&self.patterns, text, false);
        (!spans.is_empty()).then(|| {
            replace(text, &spans, |span| {
                let name = &self.patterns[span.pattern].name;
                *counts.entry(name.clone()).or_default() += 1;
                mark(name, None)
            })
        })
    }

    /// Redacts a value in place and tells whether it changed.
    fn value(&self, value: &mut Value, depth: usize, counts: &mut Counts) -> bool {
        match value {
            Value::String(text) => match self.string(text, depth, counts) {
                Some(redacted) => {
                    *text = redacted;
                    true
                }
                None => false,
            },
            Value::Number(number) => match self.string(&number.to_string(), DEEPEST, counts) {
                Some(redacted) => {
                    *value = Value::String(redacted);
                    true
                }
                None => false,
            },
            Value::Array(items) => {
                let mut changed = false;
                for item in items {
                    changed |= self.value(item, depth, counts);
                }
                changed
            }
            Value::Object(members) => self.members(members, depth, counts),
            Value::Null | Value::Bool(_) => false,
        }
    }

    fn members(&self, members: &mut Map<String, Value>, depth: usize, counts: &mut Counts) -> bool {
        let mut changed = false;
        for (name, value) in members.iter_mut() {
            match value {
                // A pattern of the caller's must not make a message nobody's.
                Value::String(role) if name == "role" && ROLES.contains(&role.as_str()) => {}
                Value::String(text)
                    if is_secret_member(name, text) && !text.starts_with("[redacted:") =>
                {
                    *counts.entry(MEMBER.to_owned()).or_default() += 1;
                    *text = mark(MEMBER, None);
                    changed = true;
                }
                Value::String(text) if is_phone_member(name, text) => {
                    *counts.entry(PHONE.to_owned()).or_default() += 1;
                    *text = mark(PHONE, None);
                    changed = true;
                }
                value => changed |= self.value(value, depth, counts),
            }
        }
        let named =
            members.keys().any(|name| self.string(name, DEEPEST, &mut Counts::new()).is_some());
        if named {
            let old = std::mem::take(members);
            for (name, value) in old {
                let mut name = self.string(&name, DEEPEST, counts).unwrap_or(name);
                while members.contains_key(&name) {
                    name.push('_');
                }
                members.insert(name, value);
            }
        }
        changed || named
    }
}

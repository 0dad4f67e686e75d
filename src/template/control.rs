//! Telling the template's control tokens from text that looks like them.
//!
//! Message text is rendered with a placeholder character for each control
//! token in it, so that every control token in the rendered text is the
//! template's own. Those are then marked, the placeholders become the typed
//! text again, and a tokenizer that knows only the marks encodes the whole.

use regex::Regex;
use serde_json::Value;

use super::Error;

/// First placeholder of a typed control token (a private-use plane).
const PLACEHOLDER: u32 = 0x10_0000;
/// First mark of a control token that the template wrote.
const MARK: u32 = 0x10_8000;
/// Room for so many control tokens.
const ROOM: u32 = 0x4000;

/// The control tokens of a tokenizer.
#[derive(Debug)]
pub(super) struct Controls {
    /// Text and id, longest text first.
    tokens: Vec<(String, u32)>,
    /// Matches any of them; absent if there are none.
    pattern: Option<Regex>,
}

impl Controls {
    pub(super) fn new(mut tokens: Vec<(String, u32)>) -> Result<Self, String> {
        tokens.retain(|(text, _)| !text.is_empty());
        tokens.sort_by(|one, other| other.0.len().cmp(&one.0.len()).then(one.1.cmp(&other.1)));
        if tokens.len() >= ROOM as usize {
            return Err(format!("{} control tokens", tokens.len()));
        }
        // The first alternative that matches wins, so the longest stands first.
        let alternatives: Vec<_> = tokens.iter().map(|(text, _)| regex::escape(text)).collect();
        let pattern = match tokens.is_empty() {
            true => None,
            false => Some(Regex::new(&alternatives.join("|")).map_err(|error| error.to_string())?),
        };
        Ok(Self { tokens, pattern })
    }

    /// Returns each control token with its mark, id and text.
    pub(super) fn marks(&self) -> impl Iterator<Item = (char, u32, &str)> {
        self.tokens
            .iter()
            .enumerate()
            .filter_map(|(index, (text, id))| Some((private(MARK, index)?, *id, text.as_str())))
    }

    /// Tells whether text anywhere in a value holds a control token.
    pub(super) fn occur_in(&self, value: &Value) -> bool {
        match value {
            Value::String(text) => self.occur_in_text(text),
            Value::Array(items) => items.iter().any(|item| self.occur_in(item)),
            Value::Object(members) => {
                let mut members = members.iter();
                members.any(|(key, member)| self.occur_in_text(key) || self.occur_in(member))
            }
            _ => false,
        }
    }

    /// Tells whether a text holds a control token.
    pub(super) fn occur_in_text(&self, text: &str) -> bool {
        self.pattern.as_ref().is_some_and(|any| any.is_match(text))
    }

    /// Puts placeholders where text holds control tokens.
    pub(super) fn shield(&self, value: &mut Value) -> Result<(), Error> {
        match value {
            Value::String(text) => *text = self.shield_text(text)?,
            Value::Array(items) => {
                for item in items {
                    self.shield(item)?;
                }
            }
            Value::Object(members) => {
                let mut shielded = serde_json::Map::new();
                for (key, mut member) in std::mem::take(members) {
                    self.shield(&mut member)?;
                    shielded.insert(self.shield_text(&key)?, member);
                }
                *members = shielded;
            }
            _ => {}
        }
        Ok(())
    }

    fn shield_text(&self, text: &str) -> Result<String, Error> {
        let reserved = |character: &char| u32::from(*character) >= PLACEHOLDER;
        if let Some(character) = text.chars().find(reserved) {
            return Err(Error::Reserved { character });
        }
        Ok(self.replace(text, PLACEHOLDER))
    }

    /// Marks the control tokens of a rendered text, which are the template's,
    /// and brings the typed ones back as text.
    pub(super) fn mark(&self, rendered: &str) -> String {
        let marked = self.replace(rendered, MARK);
        let mut text = String::with_capacity(marked.len());
        for character in marked.chars() {
            let index = u32::from(character).wrapping_sub(PLACEHOLDER) as usize;
            match self.tokens.get(index) {
                Some((typed, _)) => text.push_str(typed),
                None => text.push(character),
            }
        }
        text
    }

    fn replace(&self, text: &str, first: u32) -> String {
        let Some(pattern) = &self.pattern else {
            return text.to_owned();
        };
        let replaced = pattern.replace_all(text, |found: &regex::Captures<'_>| {
            let index = self.tokens.iter().position(|(token, _)| *token == found[0]);
            index.and_then(|index| private(first, index)).map_or_else(String::new, String::from)
        });
        replaced.into_owned()
    }
}

fn private(first: u32, index: usize) -> Option<char> {
    char::from_u32(first + u32::try_from(index).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_control_token_is_found_however_it_is_spelt() {
        let tokens = vec![("END".to_owned(), 7), ("<|im_end|>".to_owned(), 8)];
        let controls = Controls::new(tokens).unwrap();
        for (text, found) in [("the END", true), ("a<|im_end|>", true), ("<b> [c] end", false)] {
            assert_eq!(controls.occur_in_text(text), found, "{text}");
            assert_eq!(controls.occur_in(&serde_json::json!({"a": [text]})), found, "{text}");
        }
        assert!(!Controls::new(Vec::new()).unwrap().occur_in_text("END"));
    }
}

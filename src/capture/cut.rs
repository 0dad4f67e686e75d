//! Which bytes of an answer are not for the client.

use std::ops::Range;

use serde_json::{Map, Value};

use crate::wire::span;

use super::request::Prepared;

/// What to do with one document of an answer.
#[derive(Debug, PartialEq)]
pub(super) struct Cuts {
    /// Ranges to leave out, in order.
    pub(super) ranges: Vec<Range<usize>>,
    /// Whether something with a value is left out.
    pub(super) substantial: bool,
}

/// Finds the members of a document that only we asked for.
pub(super) fn find(bytes: &[u8], prepared: &Prepared) -> Cuts {
    let mut found = Cuts { ranges: Vec::new(), substantial: false };
    if prepared.hidden_on_top.is_empty() && prepared.hidden_in_choice.is_empty() {
        return found;
    }
    let Some(top) = span::members(bytes, 0) else { return found };
    found.add(bytes, &top, &prepared.hidden_on_top);
    let choices = top.iter().filter(|member| member.is(bytes, "choices"));
    for choice in choices.filter_map(|choices| span::items(bytes, choices.value.start)).flatten() {
        if let Some(members) = span::members(bytes, choice.start) {
            found.add(bytes, &members, &prepared.hidden_in_choice);
        }
    }
    found.ranges.sort_by_key(|range| range.start);
    found
}

impl Cuts {
    fn add(&mut self, bytes: &[u8], members: &[span::Member], hidden: &[&str]) {
        let null = |member: &span::Member| &bytes[member.value.clone()] == b"null";
        let doomed = |number: usize| {
            let member = &members[number];
            // A null `logprobs` is what a client gets who asked for none.
            let kept = null(member) && member.is(bytes, "logprobs");
            !kept && hidden.iter().any(|name| member.is(bytes, name))
        };
        self.substantial |=
            (0..members.len()).any(|number| doomed(number) && !null(&members[number]));
        self.ranges.extend(span::cuts(members, doomed));
    }
}

/// Returns whether a chunk holds nothing for the client besides what is cut.
pub(super) fn holds_nothing_else(chunk: &Value, prepared: &Prepared) -> bool {
    const FRAME: &[&str] =
        &["id", "object", "created", "model", "system_fingerprint", "service_tier", "choices"];
    let Some(top) = chunk.as_object() else { return false };
    let choices = match top.get("choices") {
        Some(Value::Array(choices)) => choices.as_slice(),
        _ => &[],
    };
    only(top, &[FRAME, &prepared.hidden_on_top])
        && choices.iter().all(|choice| {
            choice.as_object().is_some_and(|choice| {
                only(choice, &[&["index", "delta"], &prepared.hidden_in_choice])
                    && match choice.get("delta") {
                        Some(Value::Object(delta)) => only(delta, &[]),
                        delta => delta.is_none_or(Value::is_null),
                    }
            })
        })
}

/// Returns whether every member with a value is one of those named.
fn only(object: &Map<String, Value>, names: &[&[&str]]) -> bool {
    object.iter().all(|(key, value)| {
        value.is_null() || names.iter().any(|names| names.contains(&key.as_str()))
    })
}

//! Which bytes of an answer are not for the client.

use std::ops::Range;

use serde_json::{Map, Value};

use crate::wire::span;

use super::request::{Names, Prepared};

/// What to do with one document of an answer.
#[derive(Debug, PartialEq)]
pub(super) struct Cuts {
    /// Ranges to leave out, or to say otherwise, in order.
    pub(super) edits: Vec<(Range<usize>, String)>,
    /// Whether something with a value is left out.
    pub(super) substantial: bool,
}

/// Finds the members of a document that only we asked for.
pub(super) fn find(bytes: &[u8], prepared: &Prepared) -> Cuts {
    let mut found = Cuts { edits: Vec::new(), substantial: false };
    let hides_in_choice = !prepared.hidden_in_choice.is_empty();
    if prepared.hidden_on_top.is_empty() && !hides_in_choice && prepared.names.is_none() {
        return found;
    }
    let Some(top) = span::members(bytes, 0) else { return found };
    found.add(bytes, &top, &prepared.hidden_on_top);
    if let Some(names) = &prepared.names {
        found.rename(bytes, &top, ("model", names));
    }
    let choices = top.iter().filter(|member| hides_in_choice && member.is(bytes, "choices"));
    for choice in choices.filter_map(|choices| span::items(bytes, choices.value.start)).flatten() {
        if let Some(members) = span::members(bytes, choice.start) {
            found.add(bytes, &members, &prepared.hidden_in_choice);
        }
    }
    found.edits.sort_by_key(|(range, _)| range.start);
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
        let cuts = span::cuts(members, doomed).into_iter();
        self.edits.extend(cuts.map(|range| (range, String::new())));
    }

    /// Gives the engine's name back as the one that clients know.
    fn rename(&mut self, bytes: &[u8], members: &[span::Member], (key, names): (&str, &Names)) {
        for member in members.iter().filter(|member| member.is(bytes, key)) {
            let name = serde_json::from_slice::<String>(&bytes[member.value.clone()]);
            if name.is_ok_and(|name| name == names.engine) {
                let public = Value::from(names.public.as_str()).to_string();
                self.edits.push((member.value.clone(), public));
            }
        }
    }
}

/// Gives the engine's name in a list of models back as the one that clients know.
/// `None` if it is not there.
pub fn rename_listed(bytes: &[u8], names: &Names) -> Option<Vec<u8>> {
    let mut found = Cuts { edits: Vec::new(), substantial: false };
    let models = span::value(bytes, 0, "data")?;
    for model in span::items(bytes, models.start)? {
        found.rename(bytes, &span::members(bytes, model.start)?, ("id", names));
    }
    (!found.edits.is_empty()).then(|| span::edit(bytes, &found.edits))
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

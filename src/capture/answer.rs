//! An answer that came as one document.

use serde_json::Value;

use crate::wire::json;
use crate::wire::span;

use super::cut;
use super::reason;
use super::request::{Dialect, Prepared};
use super::settle::{
    Captured, Evidence, Outcome, Row, Whole, completion_tokens, ids, index, settle,
};

/// What an answer holds, and the client's copy of it.
#[derive(Debug, PartialEq)]
pub struct Answer {
    /// The client's bytes, if they differ from the engine's.
    pub client: Option<Vec<u8>>,
    /// The choices. Empty if the answer has none or cannot be read.
    pub captured: Vec<Captured>,
    /// Why nothing was captured.
    pub skipped: Option<&'static str>,
    /// Choices besides those captured, whose index is none or another's.
    pub odd_choices: usize,
}

/// Reads a whole answer with a good status.
pub fn read_answer(body: &[u8], prepared: &Prepared) -> Answer {
    let Some(lenient) = json::parse(body) else {
        return Answer {
            client: None,
            captured: Vec::new(),
            skipped: Some(reason::UNREADABLE_ANSWER),
            odd_choices: 0,
        };
    };
    let edits = cut::find(body, prepared).edits;
    let client = (!edits.is_empty()).then(|| span::edit(body, &edits));
    let repaired = lenient.repaired();
    let mut document = lenient.value;
    let failed = document.get("error").is_some_and(|error| !error.is_null());
    let broken = failed.then_some((Outcome::Failed, reason::UPSTREAM_ERROR));
    let completion_tokens = completion_tokens(document.get("usage"));
    let shared_prompt = ids(document.get("prompt_token_ids"));
    let versions = versions(document.get("metadata"));
    let choices = match document.get_mut("choices").map(Value::take) {
        Some(Value::Array(choices)) => choices,
        _ => Vec::new(),
    };
    let mut found: Vec<Evidence> = Vec::new();
    let mut odd_choices = 0;
    for (position, choice) in choices.into_iter().enumerate() {
        let index = index(&choice, position);
        let free = |index: &u8| found.iter().all(|known| known.index != *index);
        let Some(index) = index.filter(free) else {
            odd_choices += 1;
            continue;
        };
        let mut evidence = Evidence::of_choice(choice, index, prepared.dialect);
        match &shared_prompt {
            Ok(shared) => evidence.prompt_ids = evidence.prompt_ids.or_else(|| shared.clone()),
            Err(_) => evidence.odd_prompt = true,
        }
        if evidence.weight_version.is_none() {
            (evidence.weight_version, evidence.weight_version_end) = versions.clone();
        }
        evidence.damaged = repaired.then_some(reason::NOT_QUITE_JSON);
        found.push(evidence);
    }
    let whole = Whole { completion_tokens, left_out: odd_choices > 0, broken };
    let skipped = match (found.is_empty(), failed) {
        (false, _) => None,
        (true, true) => Some(reason::UPSTREAM_ERROR),
        (true, false) if odd_choices > 0 => {
            // The answer itself is counted under this word.
            odd_choices -= 1;
            Some(reason::ODD_CHOICE_INDEX)
        }
        (true, false) => Some("no_choices"),
    };
    Answer { client, captured: settle(prepared, found, whole), skipped, odd_choices }
}

impl Evidence {
    fn of_choice(mut choice: Value, index: u8, dialect: Dialect) -> Self {
        let mut evidence = Self { index, ..Self::default() };
        evidence.read_choice(&choice, dialect);
        match ids(choice.get("prompt_token_ids")) {
            Ok(told) => evidence.prompt_ids = told,
            Err(_) => evidence.odd_prompt = true,
        }
        for name in ["response_token_ids", "token_ids"] {
            match ids(choice.get(name)) {
                Ok(told) => evidence.response_ids = evidence.response_ids.or(told),
                Err(_) => evidence.odd_ids = true,
            }
        }
        if let Some(meta) = choice.get("meta_info") {
            evidence.read_meta(meta);
        }
        evidence.response = choice.get_mut("message").map(Value::take).unwrap_or_default();
        if evidence.response.is_null() {
            evidence.response = serde_json::json!({"role": "assistant", "content": null});
        }
        // Who leaves the role out means the only one that can be.
        if let Some(message) = evidence.response.as_object_mut() {
            message.entry("role").or_insert_with(|| Value::from("assistant"));
        }
        evidence
    }

    /// Reads SGLang's native account of the answer: log-probs with their ids.
    fn read_meta(&mut self, meta: &Value) {
        if let Some(triples) = meta.get("output_token_logprobs").and_then(Value::as_array) {
            self.rows =
                triples.iter().map(|triple| Row::read(triple.get(1), triple.get(0))).collect();
        }
        self.completion_tokens = completion_tokens(Some(meta));
        (self.weight_version, self.weight_version_end) = versions(Some(meta));
    }
}

/// Reads the versions of the weights at the start and the end.
pub(super) fn versions(metadata: Option<&Value>) -> (Option<String>, Option<String>) {
    let word = |value: &Value| match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    };
    let spans = metadata.and_then(|metadata| metadata.get("weight_versions"));
    if let Some(spans) = spans.and_then(Value::as_array).filter(|spans| !spans.is_empty()) {
        let version =
            |span: Option<&Value>| span.and_then(|span| span.get("version")).and_then(word);
        return (version(spans.first()), version(spans.last()));
    }
    let one = metadata.and_then(|metadata| metadata.get("weight_version")).and_then(word);
    (one.clone(), one)
}

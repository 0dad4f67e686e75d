//! An answer that came as one document.

use serde_json::Value;

use crate::wire::json;
use crate::wire::span;

use super::cut;
use super::reason;
use super::request::{Dialect, Prepared};
use super::settle::{Captured, Evidence, Outcome, Row, Whole, completion_tokens, ids, settle};

/// What an answer holds, and the client's copy of it.
#[derive(Debug, PartialEq)]
pub struct Answer {
    /// The client's bytes, if they differ from the engine's.
    pub client: Option<Vec<u8>>,
    /// The choices. Empty if the answer has none or cannot be read.
    pub captured: Vec<Captured>,
    /// Why nothing was captured.
    pub skipped: Option<&'static str>,
}

/// Reads a whole answer with a good status.
pub fn read_answer(body: &[u8], prepared: &Prepared) -> Answer {
    let Some(lenient) = json::parse(body) else {
        return Answer {
            client: None,
            captured: Vec::new(),
            skipped: Some(reason::UNREADABLE_ANSWER),
        };
    };
    let cuts = cut::find(body, prepared).ranges;
    let edits: Vec<_> = cuts.into_iter().map(|range| (range, String::new())).collect();
    let client = (!edits.is_empty()).then(|| span::edit(body, &edits));
    let repaired = lenient.repaired();
    let mut document = lenient.value;
    let failed = document.get("error").is_some_and(|error| !error.is_null());
    let whole = Whole {
        completion_tokens: completion_tokens(document.get("usage")),
        broken: failed.then_some((Outcome::Failed, reason::UPSTREAM_ERROR)),
    };
    let shared_prompt = ids(document.get("prompt_token_ids"));
    let versions = versions(document.get("metadata"));
    let choices = match document.get_mut("choices").map(Value::take) {
        Some(Value::Array(choices)) => choices,
        _ => Vec::new(),
    };
    let mut found = Vec::new();
    for (position, choice) in choices.into_iter().enumerate() {
        let mut evidence = Evidence::of_choice(choice, position, prepared.dialect);
        evidence.prompt_ids = evidence.prompt_ids.take().or_else(|| shared_prompt.clone());
        if evidence.weight_version.is_none() {
            (evidence.weight_version, evidence.weight_version_end) = versions.clone();
        }
        evidence.damaged = repaired.then_some(reason::NOT_QUITE_JSON);
        found.push(evidence);
    }
    let skipped = match (found.is_empty(), failed) {
        (false, _) => None,
        (true, true) => Some(reason::UPSTREAM_ERROR),
        (true, false) => Some("no_choices"),
    };
    Answer { client, captured: settle(prepared, found, whole), skipped }
}

impl Evidence {
    fn of_choice(mut choice: Value, position: usize, dialect: Dialect) -> Self {
        let index = choice.get("index").and_then(Value::as_u64).unwrap_or(position as u64);
        let mut evidence = Self { index: index as u8, ..Self::default() };
        evidence.read_choice(&choice, dialect);
        evidence.prompt_ids = ids(choice.get("prompt_token_ids"));
        evidence.response_ids =
            ids(choice.get("response_token_ids")).or_else(|| ids(choice.get("token_ids")));
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
            self.rows = triples
                .iter()
                .map(|triple| Row {
                    id: triple.get(1).and_then(Value::as_i64).and_then(|id| i32::try_from(id).ok()),
                    log_prob: triple.get(0).and_then(Value::as_f64).map(|value| value as f32),
                })
                .collect();
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

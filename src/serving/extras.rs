//! What the answers of the `/v1` routes carry besides their text.

use axum::http::HeaderMap;
use serde_json::{Map, Value, json};

use crate::wire::sglang::ChatBody;

use super::answer::{Answer, triple};
use super::failure::Failure;
use super::generation::Generation;
use super::request::check_name;
use super::routes::Served;

/// What a request asks for.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    pub(super) model: String,
    pub(super) log_probs: bool,
    prompt_ids: bool,
    response_ids: bool,
    meta_info: bool,
    ext_input: bool,
    ext_output: bool,
    pub(super) usage: bool,
}

impl Wanted {
    /// Reads it off a body and its headers.
    pub(super) fn of(
        body: &ChatBody,
        headers: &HeaderMap,
        served: &Served,
    ) -> Result<Self, Failure> {
        check_name("model", body.model.as_deref())?;
        check_name("rid", body.rid.as_deref())?;
        let asked = |flag: Option<bool>| flag == Some(true);
        let header = |name: &str| headers.get(name).is_some_and(|value| value.as_bytes() == b"1");
        let options = body.stream_options.clone().unwrap_or_default();
        let (input, output) = (body.return_input_ids_in_sglext, body.return_output_ids_in_sglext);
        let wanted = Self {
            model: body.model.clone().unwrap_or_else(|| served.name.clone()),
            log_probs: asked(body.logprobs),
            prompt_ids: asked(body.return_token_ids) || asked(body.return_prompt_token_ids),
            response_ids: asked(body.return_token_ids),
            meta_info: asked(body.return_meta_info),
            ext_input: asked(input) || header("x-sglext-return-input-ids"),
            ext_output: asked(output) || header("x-sglext-return-output-ids"),
            usage: asked(options.include_usage),
        };
        if asked(body.stream) && (wanted.prompt_ids || wanted.response_ids || wanted.meta_info) {
            return Err(Failure::bad(
                "`return_token_ids`, `return_prompt_token_ids` and `return_meta_info` do not go \
                 with `stream`; use `return_input_ids_in_sglext` and `return_output_ids_in_sglext`",
            ));
        }
        Ok(wanted)
    }

    /// Adds to a choice what was asked for.
    pub(super) fn add(
        &self,
        choice: &mut Value,
        answer: &Answer,
        generation: &Generation,
        served: &Served,
    ) {
        if self.prompt_ids {
            choice["prompt_token_ids"] = json!(&*generation.prompt);
        }
        if self.response_ids {
            choice["response_token_ids"] = json!(answer.ids());
        }
        if self.meta_info {
            let mut meta = meta_info(answer, generation, served);
            if self.log_probs {
                let tokenizer = Some(&served.chat.tokenizer);
                let triples = answer
                    .tokens
                    .iter()
                    .map(|token| triple(Some(token.log_prob), i64::from(token.id), tokenizer));
                meta["output_token_logprobs"] = triples.collect();
            }
            choice["meta_info"] = meta;
        }
    }

    /// Returns the `sglext` of a request, if any of it was asked for. The prompts of
    /// several stand in a list.
    pub(super) fn ext(&self, generations: &[Generation]) -> Option<Value> {
        let mut ext = Map::new();
        if self.ext_input {
            let ids = match generations {
                [one] => json!(&*one.prompt),
                several => several.iter().map(|one| json!(&*one.prompt)).collect(),
            };
            ext.insert("input_ids".to_owned(), ids);
        }
        if self.ext_output {
            let answers = generations.iter().flat_map(|generation| &generation.answers);
            let ids: Vec<_> = answers.map(Answer::ids).collect();
            ext.insert("output_ids".to_owned(), json!(ids));
        }
        (!ext.is_empty()).then_some(Value::Object(ext))
    }
}

/// Returns the `meta_info` that every answer has.
pub(super) fn meta_info(answer: &Answer, generation: &Generation, served: &Served) -> Value {
    let (version, spans) = answer.versions(&served.compute.status().version);
    let mut meta = json!({
        "id": &*generation.rid,
        "finish_reason": answer.native_finish(),
        "prompt_tokens": generation.prompt.len(),
        "completion_tokens": answer.tokens.len(),
        "cached_tokens": answer.cached,
        "reasoning_tokens": answer.thought,
        "weight_version": &*version,
    });
    if let Some(spans) = spans {
        meta["weight_versions"] = spans;
    }
    meta
}

/// Returns the `metadata` of a request, which tells the versions of its first answer.
pub(super) fn metadata(generations: &[Generation], served: &Served) -> Value {
    let Some(first) = generations.iter().find_map(|generation| generation.answers.first()) else {
        return Value::Null;
    };
    let (version, spans) = first.versions(&served.compute.status().version);
    let mut metadata = json!({"weight_version": &*version});
    if let Some(spans) = spans {
        metadata["weight_versions"] = spans;
    }
    metadata
}

/// Returns the `usage` of a request. Its prompts count once for all their answers, and so
/// do the tokens of them that were not computed: those of the first answer.
pub(super) fn usage(generations: &[Generation]) -> Value {
    let sum = |count: fn(&Generation) -> usize| generations.iter().map(count).sum::<usize>();
    let prompt = sum(|generation| generation.prompt.len());
    let completion = sum(Generation::completion_tokens);
    let cached = sum(|generation| generation.answers.first().map_or(0, |answer| answer.cached));
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "reasoning_tokens": sum(Generation::thought_tokens),
    })
}

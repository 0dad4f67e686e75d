//! `POST /v1/chat/completions`: from the body to an order, and the whole answer.

use std::collections::BTreeMap;

use axum::Json;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use crate::template::Rendering;
use crate::wire::sglang::ChatBody;

use super::answer::{Answer, log_prob_entries, triple};
use super::chat_stream;
use super::failure::{Failure, parse};
use super::generation::{Generation, Order};
use super::request::{Wishes, checked};
use super::routes::Served;
use super::text::{Part, Tools, tool_names};

/// What the answer of a chat carries besides the text.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    pub(super) model: String,
    pub(super) log_probs: bool,
    pub(super) prompt_ids: bool,
    pub(super) response_ids: bool,
    pub(super) meta_info: bool,
    pub(super) ext_input: bool,
    pub(super) ext_output: bool,
    pub(super) usage: bool,
}

/// Answers a chat.
pub(super) async fn complete(
    served: &std::sync::Arc<Served>,
    headers: &HeaderMap,
    body: &[u8],
) -> Result<Response, Failure> {
    let body: ChatBody = parse(body)?;
    let streamed = body.stream == Some(true);
    let wanted = wanted(&body, headers, served);
    if streamed && (wanted.prompt_ids || wanted.response_ids || wanted.meta_info) {
        return Err(Failure::bad(
            "`return_token_ids`, `return_prompt_token_ids` and `return_meta_info` do not go with \
             `stream`; use `return_input_ids_in_sglext` and `return_output_ids_in_sglext`",
        ));
    }
    let order = order(&body, served)?;
    let generation = Generation::start(order, &served.compute, &served.chat.tokenizer)?;
    if streamed {
        return Ok(chat_stream::respond(generation, wanted, served.clone()));
    }
    whole(generation, &wanted, served).await
}

fn wanted(body: &ChatBody, headers: &HeaderMap, served: &Served) -> Wanted {
    let asked = |flag: Option<bool>| flag == Some(true);
    let header = |name: &str| headers.get(name).is_some_and(|value| value.as_bytes() == b"1");
    let options = body.stream_options.clone().unwrap_or_default();
    Wanted {
        model: body.model.clone().unwrap_or_else(|| served.name.clone()),
        log_probs: asked(body.logprobs),
        prompt_ids: asked(body.return_token_ids) || asked(body.return_prompt_token_ids),
        response_ids: asked(body.return_token_ids),
        meta_info: asked(body.return_meta_info),
        ext_input: asked(body.return_input_ids_in_sglext) || header("x-sglext-return-input-ids"),
        ext_output: asked(body.return_output_ids_in_sglext) || header("x-sglext-return-output-ids"),
        usage: asked(options.include_usage),
    }
}

fn order(body: &ChatBody, served: &Served) -> Result<Order, Failure> {
    let (tools, choice) = tools(body)?;
    let mut ids = match &body.input_ids {
        Some(ids) => ids.clone(),
        None => render(&body.messages, tools, body.chat_template_kwargs.as_ref(), served)?,
    };
    if let Some(opening) = choice.opening() {
        let opening = served.chat.tokenizer.encode(&opening);
        let opening = opening.map_err(|error| Failure::bad(error.to_string()))?;
        ids.extend(opening.into_iter().map(i64::from));
    }
    let config = &served.config;
    let prompt = checked(ids, config)?;
    let wishes = Wishes::of_chat(body)?;
    Ok(Order {
        rid: served.rid(body.rid.as_deref()),
        plan: wishes.plan(config, prompt.len(), served.seed())?,
        prompt: prompt.into(),
        answers: wishes.answers()?,
        stops: wishes.stops()?,
        keep_stop: body.no_stop_trim == Some(true),
        skip_special: body.skip_special_tokens != Some(false),
        tools: choice,
    })
}

/// Returns the tools to show to the model, and what becomes of calls. A call
/// that `tool_choice` demands is begun in the prompt: nothing that was not
/// sampled stands among the answer's ids.
fn tools(body: &ChatBody) -> Result<(Option<&[Value]>, Tools), Failure> {
    let tools = body.tools.as_deref().filter(|tools| !tools.is_empty());
    let names = tools.map(tool_names).unwrap_or_default();
    let named = |choice: &Value| choice.pointer("/function/name")?.as_str().map(str::to_owned);
    match (&body.tool_choice, tools) {
        (None | Some(Value::Null), None) => Ok((None, Tools::None)),
        (None | Some(Value::Null), Some(_)) => Ok((tools, Tools::Offered(names))),
        (Some(Value::String(word)), _) => match (word.as_str(), names.as_slice()) {
            ("none", _) | ("auto", []) => Ok((None, Tools::None)),
            ("auto", _) => Ok((tools, Tools::Offered(names))),
            ("required", [name]) => Ok((tools, Tools::Forced(name.clone()))),
            ("required", []) => {
                Err(Failure::bad("`tool_choice` is `required`, but there are no tools"))
            }
            ("required", _) => Err(Failure::bad(
                "`tool_choice` `required` is supported with one tool; name the tool to call",
            )),
            _ => Err(Failure::bad(format!(
                "`tool_choice` is `{word}`, wanted `none`, `auto`, `required` or a function"
            ))),
        },
        (Some(choice), _) => match named(choice) {
            Some(name) if names.contains(&name) => Ok((tools, Tools::Forced(name))),
            Some(name) => Err(Failure::bad(format!(
                "`tool_choice` names `{name}`, which is not among the tools"
            ))),
            None => Err(Failure::bad("`tool_choice` is neither a word nor a function")),
        },
    }
}

/// Renders messages as the model was trained on them.
pub(super) fn render(
    messages: &[Value],
    tools: Option<&[Value]>,
    extra: Option<&Map<String, Value>>,
    served: &Served,
) -> Result<Vec<i64>, Failure> {
    check_messages(messages)?;
    let none = Map::new();
    let rendering =
        Rendering { messages, tools, add_generation_prompt: true, extra: extra.unwrap_or(&none) };
    let ids =
        served.chat.prompt_ids(&rendering).map_err(|error| Failure::bad(error.to_string()))?;
    Ok(ids.into_iter().map(i64::from).collect())
}

/// Refuses what is no conversation, whatever a template would make of it.
pub(super) fn check_messages(messages: &[Value]) -> Result<(), Failure> {
    if messages.is_empty() {
        return Err(Failure::of("messages", "`messages` is empty"));
    }
    for (place, message) in messages.iter().enumerate() {
        if message.get("role").and_then(Value::as_str).is_none() {
            let message = format!("`messages[{place}]` has no `role`");
            return Err(Failure::of("messages", message));
        }
        let content = message.get("content").unwrap_or(&Value::Null);
        if !(content.is_null() || content.is_string() || content.is_array()) {
            let message =
                format!("`messages[{place}].content` is neither text nor a list of parts");
            return Err(Failure::of("messages", message));
        }
    }
    Ok(())
}

async fn whole(
    mut generation: Generation,
    wanted: &Wanted,
    served: &Served,
) -> Result<Response, Failure> {
    let mut contents: BTreeMap<usize, (String, Vec<Value>)> = BTreeMap::new();
    while let Some((index, parts)) = generation.next().await? {
        let (content, calls) = contents.entry(index).or_default();
        for part in parts {
            match part {
                Part::Text(text) => content.push_str(&text),
                Part::Call { name, arguments } => calls.push(call(calls.len(), &name, &arguments)),
            }
        }
    }
    let choice = |(index, answer): (usize, &Answer)| {
        let (content, calls) = contents.remove(&index).unwrap_or_default();
        choice(Choice { index, answer, content, calls }, &generation, wanted, served)
    };
    let choices: Vec<_> = generation.answers.iter().enumerate().map(choice).collect();
    let mut body = json!({
        "id": &*generation.rid,
        "object": "chat.completion",
        "created": served.now(),
        "model": wanted.model,
        "choices": choices,
        "usage": usage(&generation),
        "metadata": metadata(&generation, served),
    });
    if let Some(ext) = ext(&generation, wanted) {
        body["sglext"] = ext;
    }
    Ok(Json(body).into_response())
}

struct Choice<'a> {
    index: usize,
    answer: &'a Answer,
    content: String,
    calls: Vec<Value>,
}

fn choice(choice: Choice<'_>, generation: &Generation, wanted: &Wanted, served: &Served) -> Value {
    let Choice { index, answer, content, calls } = choice;
    let mut message = json!({"role": "assistant", "content": content, "reasoning_content": null});
    message["tool_calls"] = if calls.is_empty() { Value::Null } else { Value::Array(calls) };
    let tokenizer = &served.chat.tokenizer;
    let log_probs =
        wanted.log_probs.then(|| json!({"content": log_prob_entries(&answer.tokens, tokenizer)}));
    let mut choice = json!({
        "index": index,
        "message": message,
        "logprobs": log_probs,
        "finish_reason": answer.finish_reason(),
        "matched_stop": answer.matched(),
    });
    if wanted.prompt_ids {
        choice["prompt_token_ids"] = json!(&*generation.prompt);
    }
    if wanted.response_ids {
        choice["response_token_ids"] = json!(answer.ids());
    }
    if wanted.meta_info {
        let mut meta = meta_info(answer, generation, served);
        if wanted.log_probs {
            meta["output_token_logprobs"] = answer
                .tokens
                .iter()
                .map(|token| triple(Some(token.log_prob), i64::from(token.id), Some(tokenizer)))
                .collect();
        }
        choice["meta_info"] = meta;
    }
    choice
}

/// Returns the `meta_info` that every answer has.
pub(super) fn meta_info(answer: &Answer, generation: &Generation, served: &Served) -> Value {
    let (version, spans) = answer.versions(&served.compute.status().version);
    let mut meta = json!({
        "id": &*generation.rid,
        "finish_reason": answer.native_finish(),
        "prompt_tokens": generation.prompt.len(),
        "completion_tokens": answer.tokens.len(),
        "cached_tokens": 0,
        "weight_version": &*version,
    });
    if let Some(spans) = spans {
        meta["weight_versions"] = spans;
    }
    meta
}

fn metadata(generation: &Generation, served: &Served) -> Value {
    let Some(first) = generation.answers.first() else {
        return Value::Null;
    };
    let (version, spans) = first.versions(&served.compute.status().version);
    let mut metadata = json!({"weight_version": &*version});
    if let Some(spans) = spans {
        metadata["weight_versions"] = spans;
    }
    metadata
}

/// Returns the `usage` of a request.
pub(super) fn usage(generation: &Generation) -> Value {
    let (prompt, completion) = (generation.prompt.len(), generation.completion_tokens());
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": null,
        "reasoning_tokens": 0,
    })
}

/// Returns the `sglext` of a request, if any of it was asked for.
pub(super) fn ext(generation: &Generation, wanted: &Wanted) -> Option<Value> {
    let mut ext = Map::new();
    if wanted.ext_input {
        ext.insert("input_ids".to_owned(), json!(&*generation.prompt));
    }
    if wanted.ext_output {
        let ids: Vec<_> = generation.answers.iter().map(Answer::ids).collect();
        ext.insert("output_ids".to_owned(), json!(ids));
    }
    (!ext.is_empty()).then_some(Value::Object(ext))
}

/// Returns a tool call as OpenAI writes it.
pub(super) fn call(index: usize, name: &str, arguments: &str) -> Value {
    let id: String = uuid::Uuid::now_v7().simple().to_string().chars().rev().take(24).collect();
    json!({
        "id": format!("call_{id}"),
        "index": index,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    })
}

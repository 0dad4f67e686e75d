//! `POST /v1/chat/completions`: from the body to an order, and the whole answer.

use axum::Json;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use crate::template::{Error, Rendering, Tokenizer};
use crate::wire::sglang::ChatBody;

use super::answer::log_prob_entries;
use super::chat_stream;
use super::extras::{Wanted, metadata, usage};
use super::failure::{Failure, parse};
use super::generation::{Generation, Order};
use super::request::{Wishes, checked};
use super::routes::Served;
use super::text::{Form, Part, THINK_CLOSE, THINK_OPEN, Think, Tools, tool_names};

/// Answers a chat.
pub(super) async fn complete(
    served: &std::sync::Arc<Served>,
    headers: &HeaderMap,
    body: &[u8],
) -> Result<Response, Failure> {
    let body: ChatBody = parse(body)?;
    let wanted = Wanted::of(&body, headers, served)?;
    let mut order = order(&body, served)?;
    order.ticket = Some(served.gate.enter(order.answers)?);
    let generation = Generation::start(order, &served.compute, &served.chat.tokenizer)?;
    if body.stream == Some(true) {
        return Ok(chat_stream::respond(generation, wanted, served.clone()));
    }
    whole(generation, &wanted, served).await
}

fn order(body: &ChatBody, served: &Served) -> Result<Order, Failure> {
    let (tools, choice) = tools(body, Form::of(&served.chat.tokenizer))?;
    let mut ids = match &body.input_ids {
        Some(ids) => ids.clone(),
        None => render(&body.messages, tools, body.chat_template_kwargs.as_ref(), served)?,
    };
    if let Some(opening) = choice.opening() {
        let opening = opening_ids(&opening, &served.chat.tokenizer);
        let opening = opening.map_err(|error| Failure::bad(error.to_string()))?;
        ids.extend(opening.into_iter().map(i64::from));
    }
    let config = &served.config;
    let prompt = checked(ids, config)?;
    let wishes = Wishes::of_chat(body)?;
    let think = match choice {
        // The prompt ends inside a call.
        Tools::Forced(..) => None,
        _ => think(body, &prompt, &served.chat.tokenizer),
    };
    Ok(Order {
        rid: served.rid(body.rid.as_deref()),
        plan: wishes.plan(served, prompt.len())?,
        prompt: prompt.into(),
        adapter: served.adapter(body)?,
        answers: wishes.answers()?,
        stops: wishes.stops()?,
        keep_stop: body.no_stop_trim == Some(true),
        skip_special: body.skip_special_tokens != Some(false),
        think,
        tools: choice,
        ticket: None,
    })
}

/// Returns what splits thoughts from answers: of models whose vocabulary has the
/// marks, unless the request wants both as one text.
fn think(body: &ChatBody, prompt: &[i64], tokenizer: &Tokenizer) -> Option<Think> {
    if body.separate_reasoning == Some(false) || !thinks(tokenizer) {
        return None;
    }
    let end: Vec<_> =
        prompt[prompt.len().saturating_sub(8)..].iter().map(|id| *id as i32).collect();
    let end = tokenizer.decode(&end, false).unwrap_or_default();
    Some(Think::new(end.trim_end().ends_with(THINK_OPEN), body.stream_reasoning != Some(false)))
}

/// Whether a vocabulary is made for thinking.
pub(super) fn thinks(tokenizer: &Tokenizer) -> bool {
    [THINK_OPEN, THINK_CLOSE].iter().all(|mark| tokenizer.id_of(mark).is_some())
}

/// Returns the tools to show to the model, and what becomes of calls. A call
/// that `tool_choice` demands is begun in the prompt: nothing that was not
/// sampled stands among the answer's ids.
fn tools(body: &ChatBody, form: Form) -> Result<(Option<&[Value]>, Tools), Failure> {
    let tools = body.tools.as_deref().filter(|tools| !tools.is_empty());
    let names = tools.map(tool_names).unwrap_or_default();
    let named = |choice: &Value| choice.pointer("/function/name")?.as_str().map(str::to_owned);
    match (&body.tool_choice, tools) {
        (None | Some(Value::Null), None) => Ok((None, Tools::None)),
        (None | Some(Value::Null), Some(_)) => Ok((tools, Tools::Offered(names.into()))),
        (Some(Value::String(word)), _) => match (word.as_str(), names.as_slice()) {
            ("none", _) | ("auto", []) => Ok((None, Tools::None)),
            ("auto", _) => Ok((tools, Tools::Offered(names.into()))),
            ("required", [name]) => Ok((tools, Tools::Forced(name.clone(), form))),
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
            Some(name) if names.contains(&name) => Ok((tools, Tools::Forced(name, form))),
            Some(name) => Err(Failure::bad(format!(
                "`tool_choice` names `{name}`, which is not among the tools"
            ))),
            None => Err(Failure::bad("`tool_choice` is neither a word nor a function")),
        },
    }
}

/// Returns the ids of what a demanded call is begun with. The mark before the object is the
/// model's own; a name in it that spells a control token is text, as where the template
/// shows the tools.
fn opening_ids(opening: &str, tokenizer: &Tokenizer) -> Result<Vec<i32>, Error> {
    let (mark, call) = opening.split_at(opening.find('{').unwrap_or_default());
    // To know control tokens for text takes another tokenizer, which few names are worth.
    if !tokenizer.has_control(call) {
        return tokenizer.encode(opening);
    }
    Ok([tokenizer.encode(mark)?, tokenizer.encode_text(call)?].concat())
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
    let mut messages = vec![Message::default(); generation.answers.len()];
    while let Some((index, parts)) = generation.next().await? {
        for part in parts {
            messages[index].add(part);
        }
    }
    let generations = std::slice::from_ref(&generation);
    let choices: Vec<_> = messages
        .into_iter()
        .enumerate()
        .map(|(index, message)| choice(index, message, &generation, wanted, served))
        .collect();
    let mut body = json!({
        "id": &*generation.rid,
        "object": "chat.completion",
        "created": served.now(),
        "model": wanted.model,
        "choices": choices,
        "usage": usage(generations),
        "metadata": metadata(generations, served),
    });
    if let Some(ext) = wanted.ext(generations) {
        body["sglext"] = ext;
    }
    Ok(Json(body).into_response())
}

/// The parts of an answer, put together.
#[derive(Debug, Clone, Default)]
struct Message {
    content: String,
    thought: String,
    calls: Vec<Value>,
}

impl Message {
    fn add(&mut self, part: Part) {
        match part {
            Part::Text(text) => self.content.push_str(&text),
            Part::Thought(text) => self.thought.push_str(&text),
            Part::Call { name, arguments } => {
                self.calls.push(call(self.calls.len(), &name, &arguments));
            }
        }
    }
}

fn choice(
    index: usize,
    Message { content, thought, calls }: Message,
    generation: &Generation,
    wanted: &Wanted,
    served: &Served,
) -> Value {
    let answer = &generation.answers[index];
    let entries = || json!({"content": log_prob_entries(&answer.tokens, &served.chat.tokenizer)});
    let mut choice = json!({
        "index": index,
        "message": {
            "role": "assistant",
            "content": content,
            "reasoning_content": (!thought.is_empty()).then_some(thought),
            "tool_calls": (!calls.is_empty()).then_some(calls),
        },
        "logprobs": wanted.log_probs.then(entries),
        "finish_reason": answer.finish_reason(),
        "matched_stop": answer.matched(),
    });
    wanted.add(&mut choice, answer, generation, served);
    choice
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

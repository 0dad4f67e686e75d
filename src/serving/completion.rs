//! `POST /v1/completions`: OpenAI's older form, prompts in place of messages.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::Json;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde_json::{Map, Value, json};

use crate::template::Tokenizer;
use crate::wire::sglang::CompletionBody;

use super::answer::{decimal, spelled};
use super::chat_stream::{done, event, events};
use super::compute::Token;
use super::extras::{Wanted, metadata, usage};
use super::failure::{Failure, parse};
use super::generation::{Generation, Order, append};
use super::request::{Wishes, check_prompts, checked};
use super::routes::Served;
use super::text::{Part, Tools};

/// Answers a completion: all answers to the first prompt, then those to the next.
pub(super) async fn complete(
    served: &Arc<Served>,
    headers: &HeaderMap,
    body: &[u8],
) -> Result<Response, Failure> {
    let body: CompletionBody = parse(body)?;
    let mut wanted = Wanted::of(&body.chat, headers, served)?;
    wanted.log_probs = body.logprobs.is_some();
    let mut orders = orders(&body, served)?;
    let ticket = served.gate.enter(orders.iter().map(|order| order.answers).sum())?;
    orders.iter_mut().for_each(|order| order.ticket = Some(ticket.clone()));
    let start = |order| Generation::start(order, &served.compute, &served.chat.tokenizer);
    let generations = orders.into_iter().map(start).collect::<Result<Vec<_>, _>>()?;
    match body.chat.stream {
        Some(true) => Ok(CompletionStream::respond(generations, wanted, served.clone())),
        _ => whole(generations, &wanted, served).await,
    }
}

fn orders(body: &CompletionBody, served: &Served) -> Result<Vec<Order>, Failure> {
    let wishes = Wishes::of_completion(body)?;
    let rid = served.rid(body.chat.rid.as_deref());
    let adapter = served.adapter(&body.chat)?;
    let (answers, stops) = (wishes.answers()?, wishes.stops()?);
    let order = |ids| {
        let prompt = checked(ids, &served.config)?;
        Ok(Order {
            rid: rid.clone(),
            plan: wishes.plan(served, prompt.len())?,
            prompt: prompt.into(),
            adapter,
            answers,
            stops: stops.clone(),
            keep_stop: body.chat.no_stop_trim == Some(true),
            skip_special: body.chat.skip_special_tokens != Some(false),
            think: None,
            tools: Tools::None,
            ticket: None,
        })
    };
    prompts(&body.prompt, answers, &served.chat.tokenizer)?.into_iter().map(order).collect()
}

/// Returns the ids of each prompt; `answers` are wanted to each.
fn prompts(
    prompt: &Value,
    answers: usize,
    tokenizer: &Tokenizer,
) -> Result<Vec<Vec<i64>>, Failure> {
    let wrong = || {
        let forms = "a text, a list of texts, a list of ids nor a list of such lists";
        Failure::of("prompt", format!("`prompt` is neither {forms}"))
    };
    let one = |prompt: &Value| match prompt {
        Value::String(text) => {
            let ids = tokenizer.encode(text).map_err(|error| Failure::bad(error.to_string()))?;
            Ok(ids.into_iter().map(i64::from).collect())
        }
        Value::Array(ids) => ids.iter().map(|id| id.as_i64().ok_or_else(wrong)).collect(),
        _ => Err(wrong()),
    };
    match prompt {
        Value::Array(all) if all.is_empty() => Err(Failure::of("prompt", "`prompt` is empty")),
        Value::Array(all) if !all.iter().any(Value::is_number) => {
            check_prompts(all.len(), answers)?;
            all.iter().map(one).collect()
        }
        prompt => Ok(vec![one(prompt)?]),
    }
}

async fn whole(
    mut generations: Vec<Generation>,
    wanted: &Wanted,
    served: &Served,
) -> Result<Response, Failure> {
    let texts =
        futures_util::future::try_join_all(generations.iter_mut().map(Generation::texts)).await?;
    let mut choices = Vec::new();
    for (generation, texts) in generations.iter().zip(texts) {
        for (answer, text) in generation.answers.iter().zip(texts) {
            let log_probs = || listed(&answer.tokens, &mut 0, &served.chat.tokenizer);
            let mut choice = json!({
                "index": choices.len(),
                "text": text,
                "logprobs": wanted.log_probs.then(log_probs),
                "finish_reason": answer.finish_reason(),
                "matched_stop": answer.matched(),
            });
            wanted.add(&mut choice, answer, generation, served);
            choices.push(choice);
        }
    }
    let mut body = json!({
        "id": rid(&generations),
        "object": "text_completion",
        "created": served.now(),
        "model": wanted.model,
        "choices": choices,
        "usage": usage(&generations),
        "metadata": metadata(&generations, served),
    });
    if let Some(ext) = wanted.ext(&generations) {
        body["sglext"] = ext;
    }
    Ok(Json(body).into_response())
}

/// Returns the handle, which all generations of a request share.
fn rid(generations: &[Generation]) -> Value {
    generations.first().map_or(Value::Null, |first| json!(&*first.rid))
}

/// Returns log-probs in OpenAI's older form: a list for each fact. Alternatives stand
/// under their text, and of several with one text the likeliest. `offset`, in
/// characters of the tokens' texts, goes on behind the last.
fn listed(tokens: &[Token], offset: &mut usize, tokenizer: &Tokenizer) -> Value {
    let text = |id: i32| spelled(id, tokenizer).0;
    let (mut texts, mut log_probs, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
    for token in tokens {
        let own = text(token.id);
        offsets.push(*offset);
        *offset += own.chars().count();
        let mut top = Map::new();
        for (id, log_prob) in &token.top {
            top.entry(text(*id)).or_insert_with(|| json!(decimal(*log_prob)));
        }
        if !token.top.is_empty() {
            // The sampled one is always told, among the likeliest or not.
            top.entry(own.clone()).or_insert_with(|| json!(decimal(token.log_prob)));
        }
        tops.push(if top.is_empty() { Value::Null } else { Value::Object(top) });
        log_probs.push(decimal(token.log_prob));
        texts.push(own);
    }
    json!({
        "tokens": texts, "token_logprobs": log_probs, "top_logprobs": tops, "text_offset": offsets,
    })
}

/// What the stream has told of an answer.
#[derive(Debug, Clone, Copy, Default)]
struct Told {
    /// Tokens whose log-probs are out.
    tokens: usize,
    /// Characters of their texts.
    offset: usize,
}

struct CompletionStream {
    generations: Vec<Generation>,
    told: Vec<Vec<Told>>,
    wanted: Wanted,
    served: Arc<Served>,
    created: u64,
    ready: VecDeque<Bytes>,
    ended: bool,
}

/// Which generation, which of its answers, and what came.
type News = (usize, usize, Vec<Part>);

impl CompletionStream {
    fn respond(generations: Vec<Generation>, wanted: Wanted, served: Arc<Served>) -> Response {
        let told = |generation: &Generation| vec![Told::default(); generation.answers.len()];
        let stream = Self {
            told: generations.iter().map(told).collect(),
            created: served.now(),
            ready: VecDeque::new(),
            ended: false,
            generations,
            wanted,
            served,
        };
        events(futures_util::stream::unfold(stream, |mut stream| async move {
            let event = stream.next().await?;
            Some((Ok::<_, Infallible>(event), stream))
        }))
    }

    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            if self.ended {
                return None;
            }
            match poll_fn(|context| self.poll(context)).await {
                Ok(Some(news)) => self.take(news),
                Ok(None) => self.close(),
                Err(failure) => {
                    self.ready.push_back(event(&json!({"error": failure.body()})));
                    self.end();
                }
            }
        }
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<News>, Failure>> {
        let mut open = false;
        for (place, generation) in self.generations.iter_mut().enumerate() {
            match generation.poll_next(context) {
                Poll::Ready(Ok(None)) => {}
                Poll::Ready(Ok(Some((index, parts)))) => {
                    return Poll::Ready(Ok(Some((place, index, parts))));
                }
                Poll::Ready(Err(failure)) => return Poll::Ready(Err(failure)),
                Poll::Pending => open = true,
            }
        }
        if open { Poll::Pending } else { Poll::Ready(Ok(None)) }
    }

    fn take(&mut self, (place, index, parts): News) {
        let mut text = String::new();
        append(&mut text, parts);
        let before: usize = self.generations[..place].iter().map(|one| one.answers.len()).sum();
        let answer = &self.generations[place].answers[index];
        let over = answer.finish.is_some();
        if text.is_empty() && !over {
            return;
        }
        let told = &mut self.told[place][index];
        let untold = &answer.tokens[told.tokens..];
        let log_probs = self.wanted.log_probs && !untold.is_empty();
        let log_probs =
            log_probs.then(|| listed(untold, &mut told.offset, &self.served.chat.tokenizer));
        told.tokens = answer.tokens.len();
        let choice = json!({
            "index": before + index,
            "text": text,
            "logprobs": log_probs,
            "finish_reason": answer.finish_reason(),
            "matched_stop": answer.matched(),
        });
        let chunk = self.envelope(json!([choice]));
        self.ready.push_back(event(&chunk));
    }

    fn envelope(&self, choices: Value) -> Value {
        json!({
            "id": rid(&self.generations),
            "object": "text_completion",
            "created": self.created,
            "model": self.wanted.model,
            "choices": choices,
            "usage": null,
        })
    }

    fn close(&mut self) {
        if let Some(ext) = self.wanted.ext(&self.generations) {
            let mut chunk = self.envelope(json!([]));
            chunk["sglext"] = ext;
            self.ready.push_back(event(&chunk));
        }
        if self.wanted.usage {
            let mut chunk = self.envelope(json!([]));
            chunk["usage"] = usage(&self.generations);
            self.ready.push_back(event(&chunk));
        }
        self.end();
    }

    fn end(&mut self) {
        self.ready.push_back(done());
        self.ended = true;
    }
}

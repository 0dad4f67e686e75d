//! `POST /generate`: ids or text in, ids, text and log-probs out; with
//! `max_new_tokens` 0 it only scores.

use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde_json::{Value, json};

use crate::model::Score;
use crate::wire::sglang::GenerateBody;

use super::adapters::AdapterId;
use super::answer::{aborted, triple};
use super::chat_stream::{done, event, events};
use super::compute::{Plan, Token};
use super::extras::meta_info;
use super::failure::{Failure, parse};
use super::generation::{Generation, Order, append};
use super::request::{Wishes, check_chosen, check_name, check_prompts, checked};
use super::routes::Served;
use super::text::{Stops, Tools};

/// One prompt of a request.
struct Task {
    order: Order,
    wants: Wants,
}

impl Task {
    /// Returns how many tokens may have log-probs told of them, at least 1.
    fn positions(&self) -> usize {
        let Order { prompt, plan, answers, .. } = &self.order;
        let scored = self.wants.start.map_or(0, |start| prompt.len() - start);
        (scored + answers * plan.max_new).max(1)
    }
}

/// What the `meta_info` of an answer carries.
#[derive(Debug, Clone)]
struct Wants {
    log_probs: bool,
    /// First prompt position whose log-prob is wanted.
    start: Option<usize>,
    top: usize,
    chosen: Vec<i64>,
    texts: bool,
    prompt_ids: bool,
}

/// Answers a request.
pub(super) async fn generate(served: &Arc<Served>, body: &[u8]) -> Result<Response, Failure> {
    let body: GenerateBody = parse(body)?;
    let wishes = Wishes::of_generate(&body)?;
    let answers = wishes.answers()?;
    let (prompts, single) = prompts(&body, answers, served)?;
    let count = prompts.len();
    let batch = Batch { body: &body, count, answers, stops: wishes.stops()?, wishes, served };
    let (mut tasks, mut positions) = (Vec::new(), 0);
    for (place, prompt) in prompts.into_iter().enumerate() {
        let task = batch.task(place, prompt)?;
        positions += task.positions();
        check_chosen(batch.wishes.chosen.len(), positions)?;
        tasks.push(task);
    }
    let ticket = served.gate.enter(count * answers)?;
    tasks.iter_mut().for_each(|task| task.order.ticket = Some(ticket.clone()));
    let single = single && answers == 1;
    if body.stream == Some(true) {
        return match tasks.pop() {
            Some(task) if single => stream(task, served.clone()).await,
            _ => Err(Failure::bad("`stream` goes with one prompt and one answer")),
        };
    }
    // All are in the compute thread before the first is waited for.
    let values =
        futures_util::future::try_join_all(tasks.into_iter().map(|task| run(task, served)));
    let mut values: Vec<Value> = values.await?.into_iter().flatten().collect();
    let value = if single { values.pop().unwrap_or_default() } else { Value::Array(values) };
    Ok(Json(value).into_response())
}

/// Returns the prompts, each of which has so many answers, and whether there is just one
/// that is no list.
fn prompts(
    body: &GenerateBody,
    answers: usize,
    served: &Served,
) -> Result<(Vec<Vec<i64>>, bool), Failure> {
    let encode = |text: &Value| {
        let text = text
            .as_str()
            .ok_or_else(|| Failure::bad("`text` is neither a string nor a list of strings"))?;
        let ids =
            served.chat.tokenizer.encode(text).map_err(|error| Failure::bad(error.to_string()))?;
        Ok(ids.into_iter().map(i64::from).collect())
    };
    let ids = |value: &Value| {
        let ids: Option<Vec<i64>> =
            value.as_array().and_then(|ids| ids.iter().map(Value::as_i64).collect());
        ids.ok_or_else(|| {
            Failure::bad("`input_ids` is neither a list of ids nor a list of such lists")
        })
    };
    match (&body.text, &body.input_ids) {
        (Some(Value::Array(texts)), None) if texts.is_empty() => {
            Err(Failure::of("text", "`text` is empty"))
        }
        (Some(Value::Array(texts)), None) => {
            check_prompts(texts.len(), answers)?;
            Ok((texts.iter().map(encode).collect::<Result<_, _>>()?, false))
        }
        (Some(text), None) => Ok((vec![encode(text)?], true)),
        (None, Some(Value::Array(lists))) if lists.first().is_some_and(Value::is_array) => {
            check_prompts(lists.len(), answers)?;
            Ok((lists.iter().map(ids).collect::<Result<_, _>>()?, false))
        }
        (None, Some(list)) => Ok((vec![ids(list)?], true)),
        _ => Err(Failure::bad("give exactly one of `text` and `input_ids`")),
    }
}

/// A request, as far as its prompts share it.
struct Batch<'a> {
    body: &'a GenerateBody,
    /// How many prompts there are.
    count: usize,
    /// How many answers each of them has.
    answers: usize,
    stops: Stops,
    wishes: Wishes,
    served: &'a Served,
}

impl Batch<'_> {
    fn task(&self, place: usize, prompt: Vec<i64>) -> Result<Task, Failure> {
        let Self { body, answers, served, .. } = *self;
        let prompt = checked(prompt, &served.config)?;
        let plan = self.wishes.plan(served, prompt.len())?;
        if plan.max_new == 0 && answers > 1 {
            let message =
                format!("`n` is {answers}, but with `max_new_tokens` 0 there is no answer");
            return Err(Failure::of("n", format!("{message}: leave `n` out")));
        }
        let wants = self.wants(&prompt, &plan)?;
        let rid = self.of_place("rid", body.rid.as_ref(), place)?;
        let adapter = self.of_place("lora_path", body.lora_path.as_ref(), place)?;
        let adapter = served.compute.status().adapters.of_path(adapter)?;
        let sampling = &self.wishes.body;
        let order = Order {
            rid: served.rid(rid),
            plan,
            prompt: prompt.into(),
            adapter,
            answers,
            stops: self.stops.clone(),
            keep_stop: sampling.no_stop_trim == Some(true),
            skip_special: sampling.skip_special_tokens != Some(false),
            think: None,
            tools: Tools::None,
            ticket: None,
        };
        Ok(Task { order, wants })
    }

    fn wants(&self, prompt: &[i64], plan: &Plan) -> Result<Wants, Failure> {
        let body = self.body;
        let log_probs = body.return_logprob == Some(true);
        let length = prompt.len();
        let start = match body.logprob_start_len.filter(|_| log_probs).unwrap_or(-1) {
            -1 => None,
            start if (0..=length as i64).contains(&start) => Some(start as usize),
            start => {
                return Err(Failure::bad(format!(
                    "`logprob_start_len` is {start}; the input has {length} tokens"
                )));
            }
        };
        Ok(Wants {
            log_probs,
            start,
            top: plan.top,
            chosen: plan.chosen.clone(),
            texts: body.return_text_in_logprobs == Some(true),
            prompt_ids: body.return_prompt_token_ids == Some(true),
        })
    }

    /// Returns the string of one of several prompts: each has its own, or all the same.
    fn of_place<'a>(
        &self,
        member: &'static str,
        value: Option<&'a Value>,
        place: usize,
    ) -> Result<Option<&'a str>, Failure> {
        let count = self.count;
        let one = match value {
            Some(Value::Array(texts)) if texts.len() != count => {
                let entries = texts.len();
                let message = format!(
                    "`{member}` has {entries} entries for {count} prompts: give each its own, or \
                     one string for all"
                );
                return Err(Failure::of(member, message));
            }
            Some(Value::Array(texts)) => texts.get(place),
            value => value,
        };
        match one {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => {
                check_name(member, Some(text))?;
                Ok(Some(text))
            }
            Some(_) => {
                let message = format!("`{member}` is neither a string nor a list of strings");
                Err(Failure::of(member, message))
            }
        }
    }
}

async fn run(task: Task, served: &Arc<Served>) -> Result<Vec<Value>, Failure> {
    let Task { order, wants } = task;
    if order.plan.max_new == 0 {
        return Ok(vec![score_only(&order, &wants, served).await?]);
    }
    let whose = Whose::of(&order);
    // Before its prompt is scored: who aborts it meanwhile means this.
    let mut generation = Generation::start(order, &served.compute, &served.chat.tokenizer)?;
    let (input, texts) = tokio::try_join!(input(&whose, &wants, served), generation.texts())?;
    if input.aborted {
        generation.cut_off();
    }
    let input = &input.value;
    let common = Common { generation: &generation, wants: &wants, input, served };
    let value = |(place, text): (usize, String)| whole(place, &text, &common);
    Ok(texts.into_iter().enumerate().map(value).collect())
}

async fn stream(task: Task, served: Arc<Served>) -> Result<Response, Failure> {
    let Task { order, wants } = task;
    if order.plan.max_new == 0 {
        let value = score_only(&order, &wants, &served).await?;
        let both = [event(&value), done()].map(Ok);
        return Ok(events(futures_util::stream::iter(both)));
    }
    let whose = Whose::of(&order);
    // Before its prompt is scored: who aborts it meanwhile means this.
    let generation = Generation::start(order, &served.compute, &served.chat.tokenizer)?;
    let Input { value: input, aborted, .. } = input(&whose, &wants, &served).await?;
    let start = (Some(generation), String::new());
    Ok(events(futures_util::stream::unfold(start, move |(generation, mut text)| {
        let (wants, input, served) = (wants.clone(), input.clone(), served.clone());
        async move {
            let mut generation = generation?;
            match generation.next().await {
                Ok(Some((_, parts))) => {
                    append(&mut text, parts);
                    if aborted {
                        generation.cut_off();
                    }
                    let (generation_now, served) = (&generation, &*served);
                    let (wants, input) = (&wants, &input);
                    let common = Common { generation: generation_now, wants, input, served };
                    let value = whole(0, &text, &common);
                    Some((Ok(event(&value)), (Some(generation), text)))
                }
                Ok(None) => Some((Ok(done()), (None, text))),
                Err(failure) => {
                    let error = event(&json!({"error": {"message": failure.message}}));
                    let both = Bytes::from([error, done()].concat());
                    Some((Ok(both), (None, text)))
                }
            }
        }
    })))
}

async fn score_only(order: &Order, wants: &Wants, served: &Served) -> Result<Value, Failure> {
    served.compute.metrics.prompt(order.prompt.len());
    let input = input(&Whose::of(order), wants, served).await?;
    let version = input.version.unwrap_or_else(|| served.compute.status().version);
    let finish = match input.aborted {
        true => aborted(),
        false => json!({"type": "length", "length": 0}),
    };
    let mut meta = json!({
        "id": &*order.rid,
        "finish_reason": finish,
        "prompt_tokens": order.prompt.len(),
        "completion_tokens": 0,
        "cached_tokens": 0,
        "reasoning_tokens": 0,
        "weight_version": &*version,
    });
    if wants.log_probs {
        merge(&mut meta, &input.value);
        merge(&mut meta, &output(&[], wants, served));
    }
    let mut value = json!({"text": "", "output_ids": [], "meta_info": meta});
    if wants.prompt_ids {
        value["prompt_token_ids"] = json!(&*order.prompt);
    }
    Ok(value)
}

/// What all answers to one prompt share.
struct Common<'a> {
    generation: &'a Generation,
    wants: &'a Wants,
    input: &'a Value,
    served: &'a Served,
}

fn whole(place: usize, text: &str, common: &Common<'_>) -> Value {
    let Common { generation, wants, input, served } = *common;
    let answer = &generation.answers[place];
    let mut meta = meta_info(answer, generation, served);
    if wants.log_probs {
        merge(&mut meta, input);
        merge(&mut meta, &output(&answer.tokens, wants, served));
    }
    let mut value = json!({"text": text, "output_ids": answer.ids(), "meta_info": meta});
    if wants.prompt_ids {
        value["prompt_token_ids"] = json!(&*generation.prompt);
    }
    value
}

fn merge(into: &mut Value, from: &Value) {
    if let (Some(into), Some(from)) = (into.as_object_mut(), from.as_object()) {
        into.extend(from.clone());
    }
}

/// Returns the log-probs of the answer.
fn output(tokens: &[Token], wants: &Wants, served: &Served) -> Value {
    let tokenizer = wants.texts.then_some(&served.chat.tokenizer);
    let own = |token: &Token| triple(Some(token.log_prob), i64::from(token.id), tokenizer);
    let top = |token: &Token| -> Value {
        token
            .top
            .iter()
            .map(|(id, score)| triple(Some(*score), i64::from(*id), tokenizer))
            .collect()
    };
    let chosen = |token: &Token| -> Value {
        token.chosen.iter().map(|(id, score)| triple(Some(*score), *id, tokenizer)).collect()
    };
    let mut value = json!({
        "output_token_logprobs": tokens.iter().map(own).collect::<Vec<_>>(),
        "output_token_logprobs_length": tokens.len(),
    });
    if wants.top > 0 {
        value["output_top_logprobs"] = tokens.iter().map(top).collect();
    }
    if !wants.chosen.is_empty() {
        value["output_token_ids_logprobs"] = tokens.iter().map(chosen).collect();
    }
    value
}

/// A prompt, by whom it is scored, and the request it belongs to.
struct Whose {
    rid: Arc<str>,
    prompt: Arc<[i64]>,
    adapter: Option<AdapterId>,
}

impl Whose {
    fn of(order: &Order) -> Self {
        Self { rid: order.rid.clone(), prompt: order.prompt.clone(), adapter: order.adapter }
    }
}

/// Log-probs of a prompt, and the version of the weights that made them.
struct Input {
    value: Value,
    version: Option<Arc<str>>,
    /// Whether the request was aborted before they were there.
    aborted: bool,
}

impl Input {
    /// Returns that no position has a log-prob.
    fn none(aborted: bool) -> Self {
        Self { value: json!({"input_token_logprobs": []}), version: None, aborted }
    }
}

/// Returns the log-probs of the prompt from the start asked for. The first entry
/// is null, for the position before it was not scored.
async fn input(whose: &Whose, wants: &Wants, served: &Served) -> Result<Input, Failure> {
    let Some(start) = wants.start else {
        return Ok(Input::none(false));
    };
    let Whose { rid, prompt, adapter } = whose;
    let tokenizer = wants.texts.then_some(&served.chat.tokenizer);
    let wanted = &prompt[start..];
    let (scored, version) = match wanted.len() {
        0 | 1 => (crate::model::Scored::default(), None),
        count => {
            let request = Score {
                ids: prompt.to_vec(),
                start: start + 1,
                temperature: 1.0,
                top_k: wants.top,
                chosen: wants.chosen.repeat(count - 1),
                entropy: false,
            };
            match served.compute.score(rid.clone(), request, *adapter).await? {
                Some(scores) => (scores.scored, Some(scores.version)),
                None => return Ok(Input::none(true)),
            }
        }
    };
    let head = || std::iter::once(Value::Null).take(usize::from(!wanted.is_empty()));
    let own = wanted.iter().enumerate().map(|(place, id)| {
        let score = place.checked_sub(1).and_then(|place| scored.log_probs.get(place).copied());
        triple(score, *id, tokenizer)
    });
    let list = |(ids, scores): (&[i64], &[f32])| -> Value {
        ids.iter().zip(scores).map(|(id, score)| triple(Some(*score), *id, tokenizer)).collect()
    };
    let mut value = json!({"input_token_logprobs": own.collect::<Vec<_>>()});
    if wants.top > 0 {
        let rows = scored.top_ids.chunks(wants.top).zip(scored.top_log_probs.chunks(wants.top));
        value["input_top_logprobs"] = head().chain(rows.map(list)).collect();
    }
    if !wants.chosen.is_empty() {
        let rows = scored.chosen_log_probs.chunks(wants.chosen.len());
        let rows = rows.map(|scores| list((&wants.chosen, scores)));
        value["input_token_ids_logprobs"] = head().chain(rows).collect();
    }
    Ok(Input { value, version, aborted: false })
}

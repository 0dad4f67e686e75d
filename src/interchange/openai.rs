//! OpenAI's shapes: a conversation per line (the fine-tuning format), or a
//! chat-completions request with its response, bare or as batch files wrap them.

use serde_json::Value;

use super::instant;
use super::line::{Answer, Conversation, Exchange, Line, LogProbs};
use super::messages::{check, list, text_of, tools};
use super::request::{sampling, session_of, session_of_conversation};

const TIMES: &[&str] = &["created_at", "timestamp", "time", "created"];

pub(super) fn read(value: &Value) -> Result<Line, String> {
    match (value.get("request"), value.get("response")) {
        (Some(request), Some(response)) => exchange(value, request, response),
        (Some(_), None) => Err("a `request` without a `response`".to_owned()),
        // A log that adds the response to the request's own members.
        (None, Some(response)) if value.get("messages").is_some() => {
            exchange(value, value, response)
        }
        _ => conversation(value),
    }
}

fn conversation(value: &Value) -> Result<Line, String> {
    let messages = list(value.get("messages"), "messages")?;
    let answered = messages.iter().any(|message| message["role"] == "assistant");
    if !answered {
        return Err("no message of an assistant".to_owned());
    }
    Ok(Line::Conversation(Conversation {
        session: session_of_conversation(value),
        messages,
        tools: tools(value.get("tools"))?,
        model: text_of(value, &["model"]).map(str::to_owned),
        at: instant::of(value, TIMES),
    }))
}

fn exchange(line: &Value, request: &Value, response: &Value) -> Result<Line, String> {
    let (request, response) = (unwrapped(request)?, unwrapped(response)?);
    let messages = list(request.get("messages"), "messages")?;
    let failed = response.is_null() || response.get("error").is_some_and(|error| !error.is_null());
    if failed {
        return Ok(Line::Unanswered);
    }
    let Some(Value::Array(choices)) = response.get("choices") else {
        return Err("the response has no list of `choices`".to_owned());
    };
    let answers: Vec<Answer> =
        choices.iter().enumerate().map(answer).collect::<Result<_, String>>()?;
    if answers.is_empty() {
        return Ok(Line::Unanswered);
    }
    Ok(Line::Exchange(Box::new(Exchange {
        session: session_of(line).or_else(|| session_of(request)),
        messages,
        tools: tools(request.get("tools"))?,
        answers,
        model: text_of(request, &["model"])
            .or_else(|| text_of(response, &["model"]))
            .map(str::to_owned),
        sampling: sampling(request)?,
        at: instant::of(line, &TIMES[..3]).or_else(|| instant::of(response, &["created"])),
        ..Exchange::default()
    })))
}

/// Batch files have the body beside a status, some loggers as text.
fn unwrapped(value: &Value) -> Result<&Value, String> {
    match value.get("body") {
        Some(body) if body.is_object() => Ok(body),
        _ if value.is_object() || value.is_null() => Ok(value),
        _ => Err("`request` and `response` must be objects".to_owned()),
    }
}

fn answer((place, choice): (usize, &Value)) -> Result<Answer, String> {
    let named = |what: String| format!("`choices[{place}]`: {what}");
    let Some(message) = choice.get("message") else {
        return Err(named("no message (a chunk of a stream?)".to_owned()));
    };
    let mut message = message.clone();
    if let Some(members) = message.as_object_mut() {
        members.entry("role").or_insert_with(|| Value::from("assistant"));
    }
    check(&message).map_err(named)?;
    if message["role"] != "assistant" {
        return Err(named("the message is not the assistant's".to_owned()));
    }
    let index = choice.get("index").and_then(Value::as_u64).unwrap_or(place as u64);
    Ok(Answer {
        choice: u8::try_from(index).map_err(|_| named(format!("index {index} is too large")))?,
        message,
        finish_reason: text_of(choice, &["finish_reason"]).map(str::to_owned),
        log_probs: log_probs(choice),
    })
}

/// Returns the log-prob of every token, if there is one for every token.
fn log_probs(choice: &Value) -> LogProbs {
    let content = choice.get("logprobs").and_then(|log_probs| log_probs.get("content"));
    let number = |token: &Value| Some(token.get("logprob")?.as_f64()? as f32);
    let whole = match content {
        None | Some(Value::Null) => return LogProbs::Absent,
        Some(Value::Array(tokens)) => tokens.iter().map(number).collect(),
        Some(_) => None,
    };
    whole.map_or(LogProbs::Incomplete, LogProbs::Whole)
}

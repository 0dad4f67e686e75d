//! Asking a model about turns: the flags that `judge` and `hint` share, the
//! calls, and the count of them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use comfy_table::Table;
use comfy_table::presets::NOTHING;
use futures_util::future::join_all;
use oclaw::engine::{ChatRequest, Engine, EngineOptions, Error};
use oclaw::judge::{Fault, Reply};
use serde_json::Value;
use tokio::sync::Semaphore;

use crate::common::Context;
use crate::embedded::{self, Embedded};
use crate::report::Failure;

/// Whom to ask, and how.
#[derive(clap::Args, Debug)]
pub(crate) struct Asking {
    /// Address of the server to ask
    #[arg(long, value_name = "URL")]
    pub(crate) engine: Option<String>,
    /// Name of the model there, if it has several
    #[arg(long, value_name = "NAME", requires = "engine")]
    engine_model: Option<String>,
    /// File with the server's key
    #[arg(long, value_name = "FILE", requires = "engine")]
    engine_key_file: Option<PathBuf>,
    /// Folder of a model to ask, run in this process
    #[arg(long, value_name = "DIR", conflicts_with = "engine")]
    pub(crate) model: Option<PathBuf>,
    /// Calls per turn
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=99))]
    pub(crate) votes: u32,
    /// Sampling temperature
    #[arg(long, value_name = "T", default_value_t = 0.6, value_parser = temperature)]
    temperature: f64,
    /// Longest answer, in tokens, thinking included
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// Limit of one call, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 120.0, value_parser = seconds)]
    timeout: f64,
    /// Further tries of a call that failed for a passing reason
    #[arg(long, value_name = "N", default_value_t = 2)]
    retries: u32,
    /// Calls under way at once
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) at_once: u32,
    /// File with another instruction to the model
    #[arg(long, value_name = "FILE")]
    prompt: Option<PathBuf>,
}

fn temperature(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err("wanted a number from 0 on".to_owned()),
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value < 1e9 => Ok(value),
        _ => Err("wanted a number above 0".to_owned()),
    }
}

impl Asking {
    /// Tells whether there is anybody to ask.
    pub(crate) fn anybody(&self) -> bool {
        self.engine.is_some() || self.model.is_some()
    }

    /// Reads the instruction, which must say how to answer.
    pub(crate) fn prompt(&self, built_in: &str) -> anyhow::Result<String> {
        let Some(path) = &self.prompt else {
            return Ok(built_in.to_owned());
        };
        let text = std::fs::read_to_string(path).map_err(|error| {
            Failure::usage(format!("cannot read the prompt `{}`: {error}", path.display()))
        })?;
        match text.contains("\\boxed") {
            true => Ok(text),
            false => {
                let place = path.display().to_string();
                Err(oclaw::judge::Error::Prompt { place }.into())
            }
        }
    }

    /// Connects to whom is to be asked.
    pub(crate) async fn connect(&self, context: &Context) -> anyhow::Result<Asker<'_>> {
        let (engine, embedded) = match (&self.engine, &self.model) {
            (Some(url), _) => {
                let key = embedded::key(&context.command, self.engine_key_file.as_deref())?;
                let options = EngineOptions {
                    key,
                    model: self.engine_model.clone(),
                    ..self.options(url.clone())
                };
                (Engine::connect(options).await?, None)
            }
            (None, Some(folder)) => {
                let embedded = Embedded::start(context, folder, None, "auto").await?;
                let engine = Engine::connect(self.options(embedded.url())).await?;
                (engine, Some(embedded))
            }
            (None, None) => return Err(Failure::usage("nobody to ask").into()),
        };
        Ok(Asker {
            asking: self,
            engine,
            embedded,
            seed: context.seed,
            places: Semaphore::new(self.at_once as usize),
            calls: RefCell::default(),
        })
    }

    fn options(&self, url: String) -> EngineOptions {
        let mut options = EngineOptions::new(url);
        options.timeout = Duration::from_secs_f64(self.timeout);
        options.retries.tries = self.retries.saturating_add(1);
        options
    }
}

/// A connection with its count of calls.
pub(crate) struct Asker<'a> {
    asking: &'a Asking,
    engine: Engine,
    embedded: Option<Embedded>,
    seed: u64,
    places: Semaphore,
    calls: RefCell<Calls>,
}

/// What the calls came to.
#[derive(Debug, Clone, Default)]
pub(crate) struct Calls {
    made: u64,
    prompt_tokens: u64,
    completion_tokens: u64,
    /// Whether some answer did not say its tokens.
    uncounted: u64,
    faults: BTreeMap<String, u64>,
}

impl Asker<'_> {
    /// Asks the same as often as there are votes, all at once as far as places
    /// are free. Votes differ in their seed only.
    pub(crate) async fn ask(&self, messages: &[Value]) -> Vec<Result<Reply, Fault>> {
        let call = |number: u32| self.call(messages, number);
        join_all((0..self.asking.votes).map(call)).await
    }

    async fn call(&self, messages: &[Value], number: u32) -> Result<Reply, Fault> {
        // The semaphore is never closed.
        let _place = self.places.acquire().await.map_err(|_| Fault::failed("closed"))?;
        let request = ChatRequest {
            messages: messages.to_vec(),
            temperature: Some(self.asking.temperature),
            max_tokens: Some(self.asking.max_tokens),
            seed: Some(self.seed.wrapping_add(u64::from(number))),
            ..ChatRequest::default()
        };
        self.calls.borrow_mut().made += 1;
        match self.engine.chat(&request).await {
            Ok(reply) => {
                let mut calls = self.calls.borrow_mut();
                match (reply.prompt_tokens, reply.completion_tokens) {
                    (Some(prompt), Some(completion)) => {
                        calls.prompt_tokens += prompt;
                        calls.completion_tokens += completion;
                    }
                    _ => calls.uncounted += 1,
                }
                Ok(Reply { text: reply.content, finish_reason: reply.finish_reason })
            }
            Err(error) => {
                tracing::warn!(%error, "call failed");
                Err(Fault::failed(few_words(&error)))
            }
        }
    }

    /// Counts a call that came to nothing.
    pub(crate) fn count_fault(&self, fault: &Fault) {
        *self.calls.borrow_mut().faults.entry(fault.to_string()).or_default() += 1;
    }

    /// Ends the connection and returns the count.
    pub(crate) async fn finish(self) -> Calls {
        if let Some(embedded) = self.embedded {
            embedded.shutdown().await;
        }
        self.calls.into_inner()
    }
}

/// Why a call failed, in words that can be counted.
fn few_words(error: &Error) -> String {
    match error {
        Error::Timeout { .. } => "timeout".to_owned(),
        Error::Unreachable { .. } => "unreachable".to_owned(),
        Error::Unauthorized { status, .. } => format!("key refused ({status})"),
        Error::Status { status, body, .. } => {
            let body = body.to_lowercase();
            let long =
                ["context length", "context_length", "too long", "maximum context", "exceed"];
            match *status == 400 && long.iter().any(|words| body.contains(words)) {
                true => "context length".to_owned(),
                false => format!("status {status}"),
            }
        }
        Error::Malformed { .. } | Error::WebPage { .. } => "malformed answer".to_owned(),
        Error::Refused { message, .. } => {
            format!("refused: {}", message.chars().take(80).collect::<String>())
        }
        other => other.to_string(),
    }
}

impl Calls {
    /// Adds the calls to a closing table.
    pub(crate) fn rows(&self, table: &mut Table) {
        for (reason, count) in &self.faults {
            table.add_row([format!("calls without a verdict: {reason}"), count.to_string()]);
        }
        table.add_row(["calls".to_owned(), self.made.to_string()]);
        table.add_row(["prompt tokens".to_owned(), self.prompt_tokens.to_string()]);
        table.add_row(["answer tokens".to_owned(), self.completion_tokens.to_string()]);
        if self.uncounted > 0 {
            let text = "calls whose tokens nobody counted".to_owned();
            table.add_row([text, self.uncounted.to_string()]);
        }
    }
}

/// Returns an empty closing table.
pub(crate) fn closing_table() -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING);
    table
}

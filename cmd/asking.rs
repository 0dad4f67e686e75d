//! Asking a model about turns: the flags that `judge` and `hint` share, the
//! calls, and the count of them.

mod absent;
mod following;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use comfy_table::Table;
use comfy_table::presets::NOTHING;
use futures_util::future::join_all;
use oclaw::cache::Key;
use oclaw::engine::{ChatReply, ChatRequest, Engine, EngineOptions, Error};
use oclaw::judge::{Fault, Reply};
use oclaw::stage::Plan;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::{Semaphore, SemaphorePermit};

use absent::Absent;

use crate::answers::{Answers, Keeping};
use crate::away::Away;
use crate::common::Context;
use crate::embedded::{self, Embedded};
use crate::forecast::Forecast;
use crate::report::Failure;
use crate::spending::{Budget, Meter, Spent, Tokens, guess};
use crate::units;
use crate::visible::visible;

/// Type of a model's products in this process: that of its checkpoint.
const DTYPE: &str = "auto";

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
    #[arg(long, value_name = "T", default_value_t = 0.6, value_parser = units::temperature)]
    temperature: f64,
    /// Longest answer, in tokens, thinking included
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_tokens: u32,
    /// Limit of one call, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 120.0, value_parser = units::seconds)]
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
    #[command(flatten)]
    keeping: Keeping,
    #[command(flatten)]
    pub(crate) budget: Budget,
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

    /// Connects to whom is to be asked. A server that is not there is taken for whom
    /// it was when it was last asked, if `kept` answers may do.
    pub(crate) async fn connect(&self, context: &Context, kept: bool) -> anyhow::Result<Asker<'_>> {
        let answers = Answers::open(&self.keeping, &context.command)?;
        let mut absent = None;
        let (engine, embedded) = match (&self.engine, &self.model) {
            (Some(url), _) => {
                let key = embedded::key(&context.command, self.engine_key_file.as_deref())?;
                let options = EngineOptions {
                    key,
                    model: self.engine_model.clone(),
                    ..self.options(url.clone())
                };
                let engine = match Engine::connect(options.clone()).await {
                    Err(error) if kept && error.is_transient() => {
                        let typed = (url.as_str(), self.engine_model.as_deref());
                        let met = absent::last_met(options, &answers, typed).await;
                        let Some((engine, whom)) = met else { return Err(error.into()) };
                        let model = visible(engine.model().unwrap_or_default());
                        context.say(format!(
                            "{error}: only answers kept of `{model}`, met there before, are used"
                        ));
                        absent = Some((error, whom));
                        engine
                    }
                    connected => connected?,
                };
                (engine, None)
            }
            (None, Some(folder)) => {
                let embedded = Embedded::start(context, folder, None, DTYPE).await?;
                let engine = Engine::connect(self.options(embedded.url())).await?;
                (engine, Some(embedded))
            }
            (None, None) => return Err(Failure::usage("nobody to ask").into()),
        };
        let (absent, met) = absent.unzip();
        let whom = match (met, &self.engine, &self.model) {
            (Some(met), ..) => met,
            (None, Some(url), _) => {
                answers.of_engine(&engine, (url, self.engine_model.as_deref())).await
            }
            (None, None, Some(folder)) => answers.of_folder(folder, DTYPE).await?,
            (None, None, None) => Value::Null,
        };
        Ok(Asker {
            asking: self,
            engine,
            embedded,
            answers,
            whom: RefCell::new(whom),
            seed: context.seed,
            places: Semaphore::new(self.at_once as usize),
            meter: Meter::new(&self.budget),
            faults: RefCell::default(),
            away: Away::default(),
            absent: Absent::new(absent),
        })
    }

    /// Prepares to foretell what asking would come to.
    pub(crate) async fn forecast(&self, context: &Context) -> anyhow::Result<Forecast<'_>> {
        let answers = Answers::peek(&self.keeping, &context.command)?;
        let whom = match (&self.model, &self.engine) {
            (Some(folder), _) if answers.any() => Some(answers.of_folder(folder, DTYPE).await?),
            (None, Some(url)) => answers.last_met((url, self.engine_model.as_deref())),
            _ => None,
        };
        Ok(Forecast::new(self, answers, whom, context.seed))
    }

    /// Returns what an answer depends on, besides who gives it.
    pub(crate) fn request(&self, messages: &[Value], seed: u64) -> Value {
        json!({
            "messages": messages,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "seed": seed,
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
    answers: Answers,
    whom: RefCell<Value>,
    seed: u64,
    places: Semaphore,
    meter: Meter,
    faults: RefCell<BTreeMap<String, u64>>,
    away: Away,
    absent: Absent,
}

/// A reply as it is kept: what was paid for, and what it cost.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Kept {
    text: String,
    finish_reason: Option<String>,
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
}

impl Asker<'_> {
    /// Counts the usage into the line of a plan.
    pub(crate) fn count_into(&self, plan: &mut Plan) {
        plan.usage = Some(self.meter.usage());
    }

    /// Asks the same as often as there are votes, all at once as far as places
    /// are free. Votes differ in their seed only. What was answered before is not
    /// asked again; if the rest is more than the budget allows, none of it is.
    pub(crate) async fn ask(&self, messages: &[Value]) -> Result<Vec<Result<Reply, Fault>>, Spent> {
        let request = self.asking.request(messages, self.seed);
        let question = self.answers.question(&self.whom.borrow(), &request);
        let keys: Vec<Key> = (0..self.asking.votes).map(|vote| question.vote(vote)).collect();
        let kept: Vec<Option<Kept>> = keys.iter().map(|key| self.answers.find(key)).collect();
        let missing = kept.iter().filter(|kept| kept.is_none()).count() as u64;
        let mut place = None;
        if missing > 0 {
            self.absent.hold().await;
            // The turn's calls begin with the first free place; not before that
            // is it known what the calls before them came to.
            place = self.places.acquire().await.ok();
            self.meter.grant(missing)?;
        }
        self.meter.hits(keys.len() as u64 - missing);
        let replies = (0..).zip(keys).zip(kept).map(|((vote, key), kept)| {
            let place = if kept.is_none() { place.take() } else { None };
            async move {
                match kept {
                    Some(Kept { text, finish_reason, .. }) => Ok(Reply { text, finish_reason }),
                    None => self.call(messages, (vote, key), place).await,
                }
            }
        });
        Ok(join_all(replies).await)
    }

    async fn call(
        &self,
        messages: &[Value],
        (vote, key): (u32, Key),
        place: Option<SemaphorePermit<'_>>,
    ) -> Result<Reply, Fault> {
        // Held until the answer is kept: a call that is made finds all before it
        // paid for and stored.
        let _place = match place {
            Some(place) => place,
            // The semaphore is never closed.
            None => self.places.acquire().await.map_err(|_| Fault::failed("closed"))?,
        };
        let request = ChatRequest {
            messages: messages.to_vec(),
            temperature: Some(self.asking.temperature),
            max_tokens: Some(self.asking.max_tokens),
            seed: Some(self.seed.wrapping_add(u64::from(vote))),
            ..ChatRequest::default()
        };
        self.meter.call();
        match self.engine.chat(&request).await {
            Ok(reply) => {
                let prompt = guess(characters(messages));
                let answer = guess(reply.content.chars().count());
                self.meter.tokens(Tokens {
                    counted: reply.prompt_tokens.zip(reply.completion_tokens),
                    guessed: (prompt, answer),
                });
                self.keep(key, &reply).await;
                Ok(Reply { text: reply.content, finish_reason: reply.finish_reason })
            }
            Err(error) => {
                self.away.weigh(&error, self.ping()).await;
                tracing::warn!(%error, "call failed");
                Err(Fault::failed(few_words(&error)))
            }
        }
    }

    /// Keeps a reply, whatever can be read in it: asking the same again would buy
    /// the same. What the server broke off or left empty is no answer, and what
    /// other weights said is no answer of these.
    async fn keep(&self, key: Key, reply: &ChatReply) {
        let whole = match reply.finish_reason.as_deref() {
            Some("length") => true,
            Some("abort" | "content_filter" | "error") => false,
            _ => !reply.content.trim().is_empty(),
        };
        let same = match (self.whom.borrow()["weights"].as_str(), reply.weight_version.as_deref()) {
            (Some(known), Some(told)) => known == told,
            _ => true,
        };
        if whole && same {
            let kept = Kept {
                text: reply.content.clone(),
                finish_reason: reply.finish_reason.clone(),
                prompt_tokens: reply.prompt_tokens,
                completion_tokens: reply.completion_tokens,
            };
            self.answers.keep(key, &kept).await;
        }
    }

    /// Counts a call that came to nothing.
    pub(crate) fn count_fault(&self, fault: &Fault) {
        *self.faults.borrow_mut().entry(fault.to_string()).or_default() += 1;
    }

    /// Ends the connection and returns the count.
    pub(crate) async fn finish(self) -> Calls {
        if let Some(embedded) = self.embedded {
            embedded.shutdown().await;
        }
        Calls { faults: self.faults.into_inner(), meter: self.meter }
    }
}

/// Counts the characters that a model is shown.
pub(crate) fn characters(messages: &[Value]) -> usize {
    let content = |message: &Value| match message.get("content") {
        Some(Value::String(text)) => text.chars().count(),
        _ => 0,
    };
    messages.iter().map(content).sum()
}

/// What the calls came to.
pub(crate) struct Calls {
    faults: BTreeMap<String, u64>,
    meter: Meter,
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
            let reason = visible(reason);
            table.add_row([format!("calls without a verdict: {reason}"), count.to_string()]);
        }
        self.meter.rows(table);
    }
}

/// Returns an empty closing table.
pub(crate) fn closing_table() -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING);
    table
}

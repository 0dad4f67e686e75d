//! The calls: which of them are needed, what becomes of each, and the count.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use comfy_table::Table;
use futures_util::future::join_all;
use oclaw::cache::Key;
use oclaw::engine::{Account, ChatReply, ChatRequest, Engine, Error, Pool};
use oclaw::judge::{Fault, Reply};
use oclaw::stage::Plan;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::{Semaphore, SemaphorePermit};

use super::absent::{Absent, is_lost};
use super::{Asking, MOST_REASONS};
use crate::answers::Answers;
use crate::away::Away;
use crate::embedded::Embedded;
use crate::servers;
use crate::spending::{Meter, Spent, Tokens, guess};
use crate::visible::visible;

/// A connection with its count of calls.
pub(crate) struct Asker<'a> {
    pub(super) asking: &'a Asking,
    pub(super) pool: Pool,
    pub(super) embedded: Option<Embedded>,
    answers: Answers,
    pub(super) whom: RefCell<Value>,
    seed: u64,
    /// Calls that may be under way at once.
    pub(crate) at_once: usize,
    places: Semaphore,
    pub(super) meter: Meter,
    faults: RefCell<BTreeMap<String, u64>>,
    /// Kinds of failures that were told.
    told: RefCell<BTreeSet<String>>,
    pub(super) away: Away,
    pub(crate) absent: Absent,
}

/// A reply as it is kept: what was paid for, and what it cost.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Kept {
    text: String,
    finish_reason: Option<String>,
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
}

impl<'a> Asker<'a> {
    /// Begins to ask.
    pub(super) fn new(
        asking: &'a Asking,
        (pool, answers, whom): (Pool, Answers, Value),
        seed: u64,
    ) -> Self {
        let at_once = asking.at_once(&pool);
        Self {
            asking,
            pool,
            embedded: None,
            answers,
            whom: RefCell::new(whom),
            seed,
            at_once,
            places: Semaphore::new(at_once),
            meter: Meter::new(&asking.budget),
            faults: RefCell::default(),
            told: RefCell::default(),
            away: Away::default(),
            absent: Absent::default(),
        }
    }

    /// Owns the engine that is asked.
    pub(super) fn inside(self, embedded: Embedded) -> Self {
        Self { embedded: Some(embedded), ..self }
    }

    /// Has only kept answers, for this reason.
    pub(super) fn without(self, error: Error) -> Self {
        Self { absent: Absent::new(error), ..self }
    }

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
        let kept: Vec<Option<Kept>> = self.answers.find_all(&keys);
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
        match self.pool.call(async |engine: &Engine| engine.chat(&request).await).await {
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
                // An answer that is no use was paid for all the same.
                if error.is_answer() || error.tokens().is_some() {
                    let guessed = (guess(characters(messages)), 0);
                    self.meter.tokens(Tokens { counted: error.tokens(), guessed });
                }
                self.away.weigh(&error, self.ping()).await;
                let error = self.end_if_gone(error).await;
                let reason = few_words(&error);
                self.tell(&error, &reason);
                Err(Fault::failed(reason))
            }
        }
    }

    /// Tells of a failed call, if it is the first of its kind: where one fails, a
    /// hundred thousand may.
    fn tell(&self, error: &Error, reason: &str) {
        let mut told = self.told.borrow_mut();
        if told.len() < MOST_REASONS && told.insert(reason.to_owned()) {
            tracing::warn!(%error, "call failed; more of its kind are counted, and told with -v");
        } else {
            tracing::info!(%error, "call failed");
        }
    }

    /// Ends the stage if asking on would only blame every row that is left.
    async fn end_if_gone(&self, error: Error) -> Error {
        let ping = async || self.ping().await;
        match !self.away.waits() && is_lost(&self.pool, &error, ping).await {
            true => match self.absent.gone(error).await {},
            false => error,
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
        super::count_reason(&mut self.faults.borrow_mut(), fault.to_string());
    }

    /// Ends the connection and returns the count.
    pub(crate) async fn finish(self) -> Calls {
        if let Some(embedded) = self.embedded {
            embedded.shutdown().await;
        }
        let accounts = self.pool.accounts();
        Calls { faults: self.faults.into_inner(), meter: self.meter, accounts }
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
    accounts: Vec<Account>,
}

impl Calls {
    /// Adds the calls to a closing table: with several servers, also what each did.
    pub(crate) fn rows(&self, table: &mut Table) {
        for (reason, count) in &self.faults {
            let reason = visible(reason);
            table.add_row([format!("calls without a verdict: {reason}"), count.to_string()]);
        }
        self.meter.rows(table);
        servers::rows(&self.accounts, table);
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

//! Asking a model about turns: the flags that `judge` and `hint` share, and whom
//! they lead to.

pub(crate) mod absent;
mod asker;
mod following;
mod prompts;
pub(crate) mod stage;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use comfy_table::Table;
use comfy_table::presets::NOTHING;
use oclaw::engine::{Dialect, EngineOptions, Pool};
use serde_json::{Value, json};

pub(crate) use asker::{Asker, Calls, characters};
pub(crate) use prompts::{Needed, PromptFlags, Prompts};

use crate::answers::{Answers, Keeping};
use crate::common::Context;
use crate::embedded::Embedded;
use crate::forecast::Forecast;
use crate::report::Failure;
use crate::servers::{self, Servers};
use crate::spending::Budget;
use crate::units;
use crate::visible::visible;

/// Type of a model's products in this process: that of its checkpoint.
const DTYPE: &str = "auto";

/// Calls under way at once. A stage cannot do more of them in the time that one
/// takes, and what batches its requests is hardly slower for so many.
const AT_ONCE: u32 = 64;
/// The same for what answers a few at a time: the others would wait there, within the
/// limit of their call.
const FEW_AT_ONCE: u32 = 16;

/// Whom to ask, and how.
#[derive(clap::Args, Debug)]
pub(crate) struct Asking {
    #[command(flatten)]
    servers: Servers,
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
    /// Calls under way at once, at all servers together [default: 64; 16 for llama.cpp and --model]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    at_once: Option<u32>,
    #[command(flatten)]
    pub(crate) prompts: PromptFlags,
    #[command(flatten)]
    keeping: Keeping,
    #[command(flatten)]
    pub(crate) budget: Budget,
}

impl Asking {
    /// Tells whether there is anybody to ask.
    pub(crate) fn anybody(&self) -> bool {
        self.servers.any() || self.model.is_some()
    }

    /// Connects to whom is to be asked. Servers that are not there are taken for whom
    /// they were when last asked, if `kept` answers may do.
    pub(crate) async fn connect(&self, context: &Context, kept: bool) -> anyhow::Result<Asker<'_>> {
        let answers = Answers::open(&self.keeping, &context.command)?;
        if let Some(folder) = &self.model {
            let embedded = Embedded::start(context, folder, None, DTYPE).await?;
            let options = vec![self.options(embedded.url())];
            let pool = Pool::connect(options, servers::teller(context)).await?;
            let whom = answers.of_folder(folder, DTYPE).await?;
            let asker = Asker::new(self, (pool, answers, whom), context.seed);
            return Ok(asker.inside(embedded));
        }
        if !self.servers.any() {
            return Err(Failure::usage("nobody to ask").into());
        }
        let options = self.servers.options(context, |url| self.options(url))?;
        match Pool::connect(options.clone(), servers::teller(context)).await {
            Ok(pool) => {
                let whom = answers.of_pool(&pool, self.servers.typed()).await?;
                say_limits(&pool, context);
                Ok(Asker::new(self, (pool, answers, whom), context.seed))
            }
            Err(error) if kept && error.is_transient() => {
                let Some(whom) = answers.last_met(self.servers.typed()) else {
                    return Err(error.into());
                };
                let model = visible(whom["model"].as_str().unwrap_or_default());
                context.say(format!(
                    "{error}: only answers kept of `{model}`, met there before, are used"
                ));
                let pool = Pool::unconnected(options, servers::teller(context));
                Ok(Asker::new(self, (pool, answers, whom), context.seed).without(error))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Prepares to foretell what asking would come to.
    pub(crate) async fn forecast(&self, context: &Context) -> anyhow::Result<Forecast<'_>> {
        let answers = Answers::peek(&self.keeping, &context.command)?;
        let whom = match &self.model {
            Some(folder) if answers.any() => Some(answers.of_folder(folder, DTYPE).await?),
            Some(_) => None,
            None => answers.last_met(self.servers.typed()),
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

    /// Returns how many calls may be under way at once.
    fn at_once(&self, pool: &Pool) -> usize {
        let few = self.model.is_some() || pool.dialects().contains(&Dialect::LlamaCpp);
        self.at_once.unwrap_or(if few { FEW_AT_ONCE } else { AT_ONCE }) as usize
    }

    fn options(&self, url: String) -> EngineOptions {
        let mut options = EngineOptions::new(url);
        options.timeout = Duration::from_secs_f64(self.timeout);
        options.retries.tries = self.retries.saturating_add(1);
        options
    }
}

/// Says in a line for each kind of server what it cannot do.
fn say_limits(pool: &Pool, context: &Context) {
    let engines = pool.engines();
    for dialect in pool.dialects() {
        let alike: Vec<_> = engines.iter().filter(|engine| engine.dialect() == dialect).collect();
        let Some(cannot) = alike.first().and_then(|engine| engine.cannot()) else { continue };
        let urls: Vec<_> = alike.iter().map(|engine| format!("`{}`", engine.url())).collect();
        let urls = urls.join(", ");
        context.say(format!(
            "{urls} ({dialect}) {cannot}: kept answers do not notice other weights under the same name"
        ));
    }
}

/// Most different reasons that are counted one by one: a server may name each request
/// in its own.
const MOST_REASONS: usize = 100;

/// Counts a failure by its reason.
pub(crate) fn count_reason(counts: &mut BTreeMap<String, u64>, reason: String) {
    let known = counts.len() < MOST_REASONS || counts.contains_key(&reason);
    let reason = if known { reason } else { "other reasons".to_owned() };
    *counts.entry(reason).or_default() += 1;
}

/// Returns an empty closing table.
pub(crate) fn closing_table() -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING);
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_that_are_all_different_are_not_all_kept() {
        let mut counts = BTreeMap::new();
        for number in 0..1000 {
            count_reason(&mut counts, format!("request {number}"));
            count_reason(&mut counts, "timeout".to_owned());
        }
        assert_eq!(counts.len(), MOST_REASONS + 1);
        assert_eq!(counts["timeout"], 1000);
        assert_eq!(counts["other reasons"], 1000 - (MOST_REASONS as u64 - 1));
    }
}

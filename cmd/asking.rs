//! Asking a model about turns: the flags that `judge` and `hint` share, and whom
//! they lead to.

pub(crate) mod absent;
mod asker;
mod following;
mod prompts;
pub(crate) mod stage;

use std::path::PathBuf;
use std::time::Duration;

use comfy_table::Table;
use comfy_table::presets::NOTHING;
use oclaw::engine::{EngineOptions, Pool};
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
    /// Calls under way at once, at all servers together
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) at_once: u32,
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

/// Returns an empty closing table.
pub(crate) fn closing_table() -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING);
    table
}

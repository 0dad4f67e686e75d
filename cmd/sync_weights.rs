//! `oclaw sync-weights`.

use std::cell::RefCell;
use std::path::PathBuf;
use std::time::Duration;

use comfy_table::Table;
use comfy_table::presets::NOTHING;
use oclaw::engine::{Engine, EngineOptions};
use oclaw::sync::{self, Lock, Policy, Rollback, Tried};

use crate::common::Context;
use crate::embedded;
use crate::report::Exit;
use crate::units;
use crate::visible::visible;

/// Hand a policy to running servers.
///
/// POLICY is a policy folder, or `latest` beside it, which is resolved once.
/// Each server in turn is paused (its running requests are held, not ended),
/// loads the folder, has its version checked and its cache emptied, and goes on
/// generating, whatever happened before. Servers must be able to read the folder
/// under the same path, and must speak SGLang's dialect. Each `--proxy` is told
/// at the end.
///
/// A server that carries the version already is left alone. Two pushes of
/// policies in one folder do not overlap: the second waits up to `--wait` for
/// the lock file `.sync.lock` beside the policy.
///
/// `--require-gate` pushes only what `oclaw gate` let pass: the receipt must say
/// `promote` for exactly these weights, else nothing is sent and the exit code is 2.
///
/// `--rollback` goes back: POLICY is a `latest` (or the folder that holds it), the
/// servers get the policy before it, then `latest` moves there and the newer one is
/// marked as withdrawn (`oclaw/withdrawn` in its folder). A push that fails moves
/// nothing, so that the same command can be given again. The next `oclaw train`
/// resumes from the older policy, its optimiser and its ledger: turns that only the
/// withdrawn one had trained may be trained again, and its number is not used again.
/// While a trainer is at work there, nothing is rolled back.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Folder of the policy, or its `latest`
    #[arg(value_name = "POLICY")]
    policy: PathBuf,
    /// Address of a server; may be given several times
    #[arg(long, value_name = "URL", required = true)]
    engine: Vec<String>,
    /// File with the servers' key
    #[arg(long, value_name = "FILE")]
    engine_key_file: Option<PathBuf>,
    /// Address of an `oclaw serve` to tell afterwards; may be given several times
    #[arg(long, value_name = "URL")]
    proxy: Vec<String>,
    /// File with the proxies' key
    #[arg(long, value_name = "FILE")]
    proxy_key_file: Option<PathBuf>,
    /// Version to send instead of the one in the folder's name
    #[arg(long, value_name = "VERSION")]
    version: Option<String>,
    /// Push only with a receipt of `oclaw gate` for these weights
    #[arg(long)]
    require_gate: bool,
    /// File of that receipt [default: POLICY/oclaw/gate.json]
    #[arg(long, value_name = "FILE", requires = "require_gate")]
    receipt: Option<PathBuf>,
    /// Push the policy before `latest`, and move `latest` back to it
    #[arg(long, conflicts_with_all = ["require_gate", "version"])]
    rollback: bool,
    /// Push even to a server that carries the version already
    #[arg(long)]
    force: bool,
    /// Limit of loading the weights, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=units::YEAR))]
    timeout: u64,
    /// Tries of each call
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    tries: u32,
    /// How long to wait for another push to end, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(..=units::YEAR))]
    wait: u64,
}

/// Pushes the policy.
pub(crate) fn run(args: Args, context: &Context) -> anyhow::Result<Exit> {
    let back = match args.rollback {
        true => Some(Rollback::plan(&args.policy)?),
        false => None,
    };
    let policy = match &back {
        Some(back) => back.to.clone(),
        None => Policy::resolve(&args.policy, args.version.as_deref())?,
    };
    if args.require_gate {
        sync::require_gate(&policy, args.receipt.as_deref())?;
    }
    let tried = RefCell::new(Vec::new());
    let outcome = context.block_on(push(&args, context, (&policy, back.as_ref()), &|part| {
        tried.borrow_mut().push(part);
    }));
    if !tried.borrow().is_empty() {
        context.conclude(table(&tried.borrow()));
    }
    let pushed = outcome?;
    let version = &policy.version;
    context.say(match pushed {
        0 => format!("nothing to push: version {version} is served already"),
        _ => format!("version {version} pushed to {pushed} of {}", args.engine.len()),
    });
    if let Some(back) = back {
        context.say(format!("version {} is withdrawn; `latest` is {version}", back.from.version));
    }
    Ok(Exit::Done)
}

async fn push(
    args: &Args,
    context: &Context,
    (policy, back): (&Policy, Option<&Rollback>),
    watch: &dyn Fn(Tried),
) -> anyhow::Result<usize> {
    let engine_key = embedded::key(&context.command, args.engine_key_file.as_deref())?;
    let proxy_key = embedded::key("sync-weights-proxy", args.proxy_key_file.as_deref())?;
    let options = |url: &String, key| {
        let mut options = EngineOptions::new(url);
        options.key = key;
        options.timeout = Duration::from_secs(args.timeout);
        options.retries.tries = args.tries;
        options
    };
    let mut engines = Vec::new();
    for url in &args.engine {
        engines.push(Engine::attach(options(url, engine_key.clone())).await?);
    }
    let mut proxies = Vec::new();
    for url in &args.proxy {
        let mut options = options(url, proxy_key.clone());
        // A proxy is no server of weights; nothing has to be probed.
        options.dialect = Some(oclaw::engine::Dialect::Generic);
        proxies.push(Engine::attach(options).await?);
    }
    // The lock file is made once everybody has been found.
    let _lock = Lock::take(policy, Duration::from_secs(args.wait)).await?;
    let options = sync::Options { force: args.force };
    let pushed = sync::push(policy, &engines, &proxies, options, watch).await?;
    if let Some(back) = back {
        // Under the same lock: no other push comes between.
        back.commit()?;
    }
    Ok(pushed)
}

fn table(tried: &[Tried]) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING).set_header(["server", "step", "seconds", "outcome"]);
    for Tried { url, step, took, outcome, good } in tried {
        let outcome = visible(outcome);
        let outcome = if *good { outcome } else { format!("failed: {outcome}") };
        table.add_row([
            visible(url),
            step.to_string(),
            format!("{:.2}", took.as_secs_f64()),
            outcome,
        ]);
    }
    table
}

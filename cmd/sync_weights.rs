//! `oclaw sync-weights`.

mod follow;
mod shelf;

use std::cell::RefCell;
use std::path::PathBuf;
use std::time::Duration;

use comfy_table::Table;
use comfy_table::presets::NOTHING;
use oclaw::engine::{Engine, EngineOptions};
use oclaw::sync::{self, Lock, Policy, Publication, Rollback, Tried};

use crate::common::Context;
use crate::embedded;
use crate::follow::interval;
use crate::report::{Exit, Failure};
use crate::serve::key_lines;
use crate::stores;
use crate::units;
use crate::visible::visible;

/// Hand a policy to running servers.
///
/// POLICY is a policy folder, or `latest` beside it, which is resolved once.
/// Each server in turn is paused (its running requests are held, not ended),
/// loads the folder, has its version checked and its cache emptied, and goes on
/// generating, whatever happened before. Servers must be able to read the folder
/// under the same path. Each `--proxy` is told at the end.
///
/// Servers are `oclaw engine`, SGLang, and vLLM if it was started with
/// `VLLM_SERVER_DEV_MODE=1`; a vLLM that tells no version of its weights is taken on
/// its word, and the table says so. An address that is SGLang's router stands for its
/// workers, which get the policy one by one: while one of them holds its requests
/// they wait there, so it need not be taken out of the router. With `--follow` its workers
/// are asked for at each look.
///
/// `--adapter` loads the policy's `adapter/` (see `oclaw train --lora-rank`) beside the
/// model, as `oclaw-vVERSION`, and nothing is held; a folder of the `peft` library given
/// as POLICY is loaded so, too. SGLang must run with `--enable-lora`, vLLM with
/// `--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`; `oclaw engine` takes them
/// as it is. Each `--proxy` (started with
/// `--model-name`) asks for the new name from then on, and adapters older than the two
/// before are let go of; without one, clients choose by name and all of them stay.
///
/// `--publish FOLDER` puts the policy into a plain folder first: `step-000007` there is
/// whole as soon as it is seen (without the state that training goes on from), the
/// servers get that one, and then `latest` there moves to it. No server need be named;
/// `--force`, `--proxy` and the key files are then refused.
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
/// resumes from the older policy and its ledger, and from its optimiser if it is one
/// of the two newest (else that starts anew): turns that only the withdrawn one had
/// trained may be trained again, and its number is not used again.
/// While a trainer is at work there, nothing is rolled back. Before the first policy
/// is none but the model it began from: `oclaw sync-weights BASE --version 0` pushes
/// that, and `latest` stays.
///
/// `--follow RUN/policy` looks at the folder's `latest` every `--poll`, and at the
/// servers: a policy that one of them lacks is pushed, also after it was started
/// anew; with `--every N` only if that server is N steps behind, or ahead. A server that is away is waited for. A policy that is refused twice is
/// named and skipped until `latest` moves. The first signal ends the run, after
/// the push at hand, with exit code 0. With `--require-gate` the receipt of each
/// policy is waited for.
///
/// A policy of an object store (`s3://BUCKET/policy/latest`, `--follow
/// s3://BUCKET/policy`) is copied to `--object-cache`, every file checked against
/// the policy's list, and the copy is pushed: the servers must be able to read that
/// folder. The two newest copies stay.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Folder of the policy, or its `latest`
    #[arg(value_name = "POLICY", required_unless_present = "follow")]
    policy: Option<PathBuf>,
    /// Push what `latest` of this folder names, whenever it moves, until a signal
    // That it stands beside no POLICY is said below: what goes with it alone would else
    // pass beside a POLICY.
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["version", "receipt", "rollback", "force", "wait"])]
    follow: Option<PathBuf>,
    /// How often to look; what failed waits twice as long each time, a minute at most
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = interval, requires = "follow")]
    poll: Duration,
    /// Push a policy that is so many steps ahead of what a server has
    #[arg(long, value_name = "N", default_value_t = 1, requires = "follow", value_parser = clap::value_parser!(u64).range(1..))]
    every: u64,
    /// Address of a server, or of SGLang's router; may be given several times
    #[arg(long, value_name = "URL", required_unless_present = "publish")]
    engine: Vec<String>,
    /// Put the policy into this folder, and move `latest` there to it
    #[arg(long, value_name = "FOLDER")]
    publish: Option<PathBuf>,
    /// Load the policy's adapter, under a name of its own, instead of its weights
    #[arg(long)]
    adapter: bool,
    /// File with the servers' key
    #[arg(long, value_name = "FILE")]
    engine_key_file: Option<PathBuf>,
    /// Address of an `oclaw serve` to tell afterwards; may be given several times
    #[arg(long, value_name = "URL")]
    proxy: Vec<String>,
    /// File with the proxies' key, as `oclaw serve` reads it
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
    args.refuse_idle()?;
    let given = match (&args.follow, &args.policy) {
        (Some(folder), None) => return context.block_on(follow::follow(&args, context, folder)),
        (None, Some(policy)) => policy,
        // The parser lets both of them through.
        _ => return Err(Failure::usage("give either POLICY or `--follow FOLDER`").into()),
    };
    if args.rollback {
        let what = "`--rollback` moves `latest` of a folder of this machine";
        // A trainer publishes again what it has beyond `latest`.
        let hint = "end its trainer, delete the later policies there and `policies` in that \
                    one's `--object-cache`, then put the name of the one before into `latest`";
        stores::refuse(given, what, hint)?;
    }
    let brought = context.block_on(shelf::bring(given, context))?;
    let given = &brought;
    let back = match args.rollback {
        true => Some(Rollback::plan(given)?),
        false => None,
    };
    let policy = match &back {
        Some(back) => back.to.clone(),
        None => Policy::resolve(given, args.version.as_deref())?,
    };
    let policy = if args.adapter { policy.as_adapter()? } else { policy };
    if args.require_gate {
        sync::require_gate(&policy, args.receipt.as_deref())?;
    }
    let tried = RefCell::new(Vec::new());
    let outcome = context.block_on(async {
        let servers = connect(&args, context).await?;
        // The lock file is made once everybody has been found.
        let _lock = Lock::take(&policy, Duration::from_secs(args.wait)).await?;
        let pushed =
            push(args.force, &policy, &servers, &|part| tried.borrow_mut().push(part)).await?;
        if let Some(back) = &back {
            // Under the same lock: no other push comes between.
            back.commit()?;
        }
        anyhow::Ok((pushed, servers.engines.len()))
    });
    if !tried.borrow().is_empty() {
        context.conclude(table(&tried.borrow()));
    }
    let (pushed, servers) = outcome?;
    let version = &policy.version;
    if let Some(folder) = &args.publish {
        context.say(format!("version {version} is `latest` of `{}`", folder.display()));
    }
    match (pushed, servers) {
        (_, 0) => {}
        (0, _) => context.say(format!("nothing to push: version {version} is served already")),
        _ => context.say(format!("version {version} pushed to {pushed} of {servers}")),
    }
    if let Some(name) = policy.adapter_name().filter(|_| servers > 0 && args.proxy.is_empty()) {
        context.say(format!("its adapter is the model `{name}`"));
    }
    if let Some(back) = back {
        context.say(format!("version {} is withdrawn; `latest` is {version}", back.from.version));
    }
    Ok(Exit::Done)
}

impl Args {
    /// Refuses what is about servers where none is named: the policy goes into a folder.
    fn refuse_idle(&self) -> Result<(), Failure> {
        if !self.engine.is_empty() {
            return Ok(());
        }
        let idle = [
            ("force", self.force),
            ("proxy", !self.proxy.is_empty()),
            ("engine-key-file", self.engine_key_file.is_some()),
            ("proxy-key-file", self.proxy_key_file.is_some()),
        ];
        match idle.into_iter().find(|(_, given)| *given) {
            Some((name, _)) => {
                let problem = format!("`--{name}` is about servers, and none is named");
                let hint = format!("give `--engine URL`, or leave `--{name}` out");
                Err(Failure::usage(problem).hint(hint))
            }
            None => Ok(()),
        }
    }
}

/// Whom a policy is handed to, and who is told.
struct Servers {
    engines: Vec<Engine>,
    /// Whether some of them are a router's workers, which come and go.
    routed: bool,
    proxies: Vec<Engine>,
    publication: Option<Publication>,
}

impl Servers {
    /// Returns whether one of them carries another version, so many steps behind or
    /// any other that is not just a little older. Of a server that tells none, what it
    /// was given last counts.
    async fn lack(
        &self,
        policy: &Policy,
        every: u64,
        given: Option<&String>,
    ) -> anyhow::Result<bool> {
        if let Some(publication) = &self.publication
            && is_due(publication.version().as_deref(), &policy.version, every)
        {
            return Ok(true);
        }
        for engine in &self.engines {
            let found = sync::carried(engine, policy).await?;
            let carried = if found.tells { found.version } else { given.cloned() };
            if is_due(carried.as_deref(), &policy.version, every) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Returns whether a server with one version needs another.
fn is_due(carried: Option<&str>, wanted: &str, every: u64) -> bool {
    if carried == Some(wanted) {
        return false;
    }
    let step = |version: &str| version.parse::<u64>().ok();
    match (carried.and_then(step), step(wanted)) {
        (Some(carried), Some(wanted)) if carried < wanted => wanted - carried >= every,
        _ => true,
    }
}

/// Finds the servers.
async fn connect(args: &Args, context: &Context) -> anyhow::Result<Servers> {
    let engine_key = embedded::key(&context.command, args.engine_key_file.as_deref())?;
    let proxy_key = match &args.proxy_key_file {
        // It may be the one that `oclaw serve` reads: any key of it will do.
        Some(file) => key_lines(file, "proxy")?.into_iter().next().map(|(_, key)| key),
        None => embedded::key("sync-weights-proxy", None)?,
    };
    let options = |url: &String, key| {
        let mut options = EngineOptions::new(url);
        options.key = key;
        options.timeout = Duration::from_secs(args.timeout);
        options.retries.tries = args.tries;
        options
    };
    let (mut engines, mut routed) = (Vec::new(), false);
    for url in &args.engine {
        let engine = Engine::attach(options(url, engine_key.clone())).await?;
        let Some(workers) = engine.workers().await? else {
            engines.push(engine);
            continue;
        };
        if workers.is_empty() {
            let problem = format!("the router `{}` has no workers", engine.url());
            return Err(Failure::engine(problem).into());
        }
        routed = true;
        for worker in workers {
            engines.push(Engine::attach(options(&worker, engine_key.clone())).await?);
        }
    }
    let mut proxies = Vec::new();
    for url in &args.proxy {
        let mut options = options(url, proxy_key.clone());
        // A proxy is no server of weights; nothing has to be probed.
        options.dialect = Some(oclaw::engine::Dialect::Generic);
        proxies.push(Engine::attach(options).await?);
    }
    let publication = args.publish.as_deref().map(Publication::new);
    Ok(Servers { engines, routed, proxies, publication })
}

/// Publishes and pushes a policy. The caller holds the lock.
async fn push(
    force: bool,
    policy: &Policy,
    Servers { engines, proxies, publication, .. }: &Servers,
    watch: &dyn Fn(Tried),
) -> anyhow::Result<usize> {
    let options = sync::Options { force };
    let Some(publication) = publication else {
        return Ok(sync::push(policy, engines, proxies, options, watch).await?);
    };
    let published = publication.put(policy)?;
    let pushed = sync::push(&published, engines, proxies, options, watch).await?;
    publication.point(&published)?;
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

#[cfg(test)]
mod tests {
    use super::is_due;

    #[test]
    fn a_policy_is_due_by_its_distance() {
        for (carried, wanted, every, due) in [
            (Some("0"), "1", 1, true),
            (Some("1"), "1", 1, false),
            (Some("0"), "3", 4, false),
            (Some("0"), "4", 4, true),
            // Started anew long after the first push.
            (Some("0"), "9", 4, true),
            (Some("8"), "9", 4, false),
            // Rolled back, foreign, silent.
            (Some("9"), "8", 4, true),
            (Some("default"), "1", 4, true),
            (None, "1", 4, true),
        ] {
            assert_eq!(is_due(carried, wanted, every), due, "{carried:?} {wanted} {every}");
        }
    }
}

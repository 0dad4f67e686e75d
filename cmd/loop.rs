//! `oclaw loop`.

mod claim;
mod keys;
mod listen;
mod looks;
mod show;
mod wanted;
mod watch;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::common::Context;
use crate::follow::interval;
use crate::report::Exit;
use crate::units;

/// Run the whole loop: serve, capture, judge, train, hand the weights back.
///
/// FILE is the one configuration (`--config` is the same, and `oclaw.toml` here needs
/// not be named): a section per
/// subcommand whose keys are its flags, and `[loop]` for the flags here. Every
/// stage is its own `oclaw` process with `--follow`; they meet in the folders of
/// `--run` alone: `turns`, `judged`, `hinted`, `taught`, `ready`, `policy`,
/// `metrics.jsonl`. With `--store s3://BUCKET/FOLDER` (or `gs://`, `az://`) shards and
/// policies are folders of an object store instead, under the same names: `serve`
/// ships the finished shards of its spool there. Spool, logs, metrics and copies of
/// objects (`objects`) stay in the run folder. Keys come from the environment of
/// each process: the loop's own goes to children of this machine and to Slurm's jobs;
/// on Ray, `env` of a section is passed on. The loop adds what connects them (folders, addresses, the
/// start model, the key file of `serve`), starts them, watches them and starts them again.
///
/// `[engines.NAME]` is an inference server: `model = DIR` runs `oclaw engine`,
/// `command = [...]` with `url` runs any other, `url` alone is somebody else's.
/// `serves` is `policy` (default), `judge` or `teacher`; `ready-timeout` is how
/// long it may load. One with `model` that serves the policy begins with the newest, if
/// there is one; with a store, `require-gate`, `adapter` or `engine` of `[sync-weights]`, or
/// a `weight-version` of its own it begins with the model, until weights are pushed. Without one, `[serve] model = DIR` answers inside `oclaw
/// serve`. Engines, and the section of any stage, take `gpus = [4, 5]` and
/// `env = { NAME = "value" }`; a device given twice, or not there, is refused.
/// Who has no `gpus` where others have sees none.
///
/// Engines come first, then `serve` when those it needs answer, then the stages. Chats fail
/// (502, 503) while the only engine is started again.
/// What ends is started again after `--restart-wait`, twice as long each time up
/// to `--restart-longest`, and from the beginning once it has run for a minute.
/// Exit codes 2 (settings) and 101 (a bug), 1 of a server that never was ready, and a
/// program that is not there,
/// `--give-up` times without a good minute between, are not tried again: if chats
/// depend on it the loop ends, else the others go on and the exit code is 3. A stage whose budget is spent (exit
/// code 3) is left ended. What ends otherwise as often in a row is `failing`: it is
/// tried for ever, since a full disk or a lost engine may come back, told hourly, and
/// shown with its last words; a loop that ends meanwhile does so with exit code 3.
///
/// A killed loop loses nothing: the same command goes on. Engines and `serve`
/// outlive it and are taken up if their settings are the same; stages end with
/// it, and with what they have published. One loop per run folder, and per folder of a
/// store: `loop.claim` there says who has it, and is anybody's five minutes after a loop
/// was killed elsewhere. What a process
/// says is in RUN/logs/NAME.log, cut at `--log-size` (4 old ones are kept).
///
/// The first SIGINT or SIGTERM drains: `serve` takes no more and ends its answers,
/// stages end as they do on a signal, engines go last, each of the three within
/// `--grace`; exit code 0. The second ends everything at once.
///
/// On a terminal the state is shown as it changes. `--status RUN` gives it once,
/// and to whom is no terminal as JSON: processes, queues (shards and rows that
/// wait, age of the oldest, rows per minute, shards given up), policies (published,
/// served, steps behind, health of the last step), and the account of turns:
/// captured = trained + refused (by reason) + pending (by stage). A store is looked at
/// beside all that, as long as it takes: what is shown is as it told of it last, with
/// its age, and nothing (`null`) before it has. `--listen` serves
/// the same at `/status`, for Prometheus at `/metrics`, and `/healthz`.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The configuration [default: that of --config, or oclaw.toml]
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    /// Folder of the run
    #[arg(long, value_name = "RUN", default_value = "run")]
    run: PathBuf,
    /// Object store by which the stages meet, as in `s3://BUCKET/FOLDER` [default: none]
    #[arg(long, value_name = "URL")]
    store: Option<String>,
    /// Say how the loop of a run folder is, and stop
    #[arg(long, value_name = "RUN")]
    status: Option<PathBuf>,
    /// Say whether all of it could run here, as `oclaw check` does, and stop
    #[arg(long, conflicts_with = "status")]
    dry_run: bool,
    /// Do without this stage, as in `hint`; may be given several times
    #[arg(long, value_name = "STAGE")]
    without: Vec<String>,
    /// Push weights every N steps
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    weight_sync_interval: u64,
    /// Train only when nobody has chatted for so long. Turns that wait have one version:
    /// set `[train] max-staleness` to the steps of a window, or the rest is refused as stale
    #[arg(long, value_name = "TIME", value_parser = time_text)]
    train_when_idle: Option<String>,
    /// Train only in these hours, as in `22:00-06:00`; may be given several times. Turns that
    /// wait have one version: set `[train] max-staleness` to the steps of a window, or the rest
    /// is refused as stale
    #[arg(long, value_name = "FROM-TO", value_parser = hours_text)]
    train_hours: Vec<String>,
    /// Address for status and metrics [default: none]
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<SocketAddr>,
    /// File with the keys of those who may ask there
    #[arg(long, value_name = "FILE", requires = "listen")]
    key_file: Option<PathBuf>,
    /// First wait before a process is started again
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = interval)]
    restart_wait: Duration,
    /// Longest wait before a process is started again
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = interval)]
    restart_longest: Duration,
    /// Ends in a row after which a process is failing, or, by its own fault, given up
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    give_up: u32,
    /// Time that serve, stages and engines each get to end
    #[arg(long, value_name = "TIME", default_value = "2m", value_parser = units::duration)]
    grace: Duration,
    /// Longest log of a process, at least 4KiB
    #[arg(long, value_name = "SIZE", default_value = "16MiB", value_parser = log_size)]
    log_size: usize,
    /// Number of GPUs, instead of counting them
    #[arg(long, value_name = "N")]
    devices: Option<u32>,
}

/// Runs the loop until a signal.
pub(crate) fn run(args: Args, context: &Context) -> anyhow::Result<Exit> {
    if let Some(run) = &args.status {
        return show::status(run, context);
    }
    if args.dry_run {
        let config = crate::check::place(args.file.clone(), context);
        let wishes = wanted::wishes(&args, "oclaw".to_owned(), config.display().to_string());
        let listen = args.listen.map(|address| address.to_string());
        return crate::check::of_loop((&config, args.devices), (wishes, listen), context);
    }
    let wanted = wanted::Wanted::of(&args, context)?;
    // Children end with the thread that starts them: this one.
    context.block_on(watch::watch(&args, context, wanted))
}

/// Reads a size that a few lines fit into.
fn log_size(text: &str) -> Result<usize, String> {
    match units::bytes(text)? {
        size if size < 4096 => Err("wanted at least 4KiB".to_owned()),
        size => Ok(size),
    }
}

/// Checks a time that is passed on as it is.
fn time_text(text: &str) -> Result<String, String> {
    interval(text).map(|_| text.to_owned())
}

/// Checks hours that are passed on as they are.
fn hours_text(text: &str) -> Result<String, String> {
    crate::hours::Hours::parse(text).map(|_| text.to_owned())
}

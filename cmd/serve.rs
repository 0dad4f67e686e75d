//! `oclaw serve`.

mod backends;
mod flags;
mod ship;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use oclaw::journal::{self, Roll, Sync};
use oclaw::proxy::{self, Backend, Keys, RequestLog, Summary};
use oclaw::table::{Provenance, StageLine};
use secrecy::SecretString;

use crate::common::Context;
use crate::report::{Exit, Failure};
use crate::units;
use flags::LimitFlags;
use ship::Shipping;

/// How many idle times a session is remembered for, so that a late next message
/// still finds it.
const RETENTION: u32 = 24;
/// The journal is written anew when it has grown by so many bytes.
const COMPACT: u64 = 64 << 20;

/// Let people chat through an OpenAI-compatible server, and record what it sampled.
///
/// Chats pass through byte by byte to `--engine`, or to an engine inside this
/// process (`--model`). Of several engines a session stays with the one that began
/// it, a new one goes to the one with the fewest requests, and one that is away or
/// on hold is left out; a request goes to a second engine only if nothing of it has
/// reached the first. What the engine is asked beyond the client's request
/// (token ids, log-probs, counts) is cut out of the client's copy again. An answer
/// beyond `--max-answer` passes without being held, is not recorded and is counted
/// as `answer_too_large`. If it is no stream it is not cut either; of a stream only
/// events above 256 KiB are not.
///
/// A turn becomes a row when its next state is known: the messages that a later
/// request of the same conversation appends to it. Conversations are told apart
/// by `X-Session-Id`, by the body's `session_id`, by OpenClaw's affinity headers
/// or cache key, else by the messages themselves. `X-Turn-Type: side` marks a
/// request that is not recorded, `X-Session-Done: 1` the last one of a session.
/// The body's `reward` (-1 to 1) and `feedback` (words) are about the answer that
/// the request goes on from; they are taken out before the engine sees it, and
/// words that are none are counted and told in `x-oclaw-feedback`, never refused.
/// Turns that nothing follows become rows after `--session-idle`.
///
/// Rows are Parquet files in `--spool`. A turn is in the journal there before
/// its client sees the end of the answer, and survives a kill; turns that are
/// open at the end are taken up by the next start. One process per spool folder.
///
/// `--ship s3://BUCKET/turns` copies each finished shard to an object store, under
/// its name, if nothing has that name there. The journal and the shards stay here. A
/// store that is away is waited for while chats go on.
///
/// `--key-file` holds the clients' keys, one `NAME KEY` a line; without it only
/// this machine may listen. A client's `Authorization`, cookies and keys never
/// reach the engine (but see `--forward-authorization`); the engine's own key
/// comes from `--engine-key-file` or `OCLAW_SERVE_KEY`.
///
/// Clients may know the model by a name of its own (`--model-name`): it is changed
/// to the engine's on the way there and back on the way home.
///
/// Also served: `/v1/models` and every other `/v1/` route (passed on, not
/// recorded), `/v1/feedback`, `/healthz`, `/readyz`, `/metrics`, and for whoever
/// changes the weights `/oclaw/policy`, `/oclaw/pause`, `/oclaw/resume`
/// (for one of several engines with its address as `engine` in the body). The
/// first SIGINT or SIGTERM lets running answers end (`--drain`), the second one
/// does not.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Address of the engine; a dialect may stand before it (`sglang+http://…`); several (given again, or with commas) share the chats
    #[arg(long, value_name = "URL", value_delimiter = ',', conflicts_with = "model")]
    engine: Vec<String>,
    /// Folder of a model to serve from inside this process
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Address of the engine inside this process, for `sync-weights`
    #[arg(long, value_name = "ADDRESS", conflicts_with = "engine")]
    engine_listen: Option<SocketAddr>,
    /// Type of that engine's products: auto (the checkpoint's), f32 or bf16
    #[arg(long, value_name = "TYPE", default_value = "auto", value_parser = ["auto", "f32", "bf16"], conflicts_with = "engine")]
    dtype: String,
    /// File with the engine's key, or that of all of them
    #[arg(long, value_name = "FILE")]
    engine_key_file: Option<PathBuf>,
    /// Name by which clients know the model [default: the engine's own]
    #[arg(long, value_name = "NAME")]
    model_name: Option<String>,
    /// Name of the model at the engine, if it has several
    #[arg(long, value_name = "NAME", requires = "model_name")]
    engine_model: Option<String>,
    /// Hand a client's own `Authorization` to the engine
    #[arg(long, conflicts_with_all = ["key_file", "engine_key_file"])]
    forward_authorization: bool,
    /// Folder that takes the rows
    #[arg(long, value_name = "DIR")]
    spool: PathBuf,
    /// Copy each finished shard to this folder of an object store (s3://…)
    #[arg(long, value_name = "URL")]
    ship: Option<PathBuf>,
    /// Address to listen on
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:30000")]
    listen: SocketAddr,
    /// File with the clients' keys
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// File with the key of the control routes [default: the clients' keys]
    #[arg(long, value_name = "FILE")]
    control_key_file: Option<PathBuf>,
    /// A session without a request for so long is over
    #[arg(long, value_name = "TIME", default_value = "30m", value_parser = units::duration)]
    session_idle: Duration,
    /// Make rows of turns that are still open at the end
    #[arg(long)]
    flush_open: bool,
    /// Begin a new shard after so many rows
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = rows)]
    shard_rows: usize,
    /// Begin a new shard after rows of so many bytes
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = units::bytes)]
    shard_bytes: usize,
    /// Write a shard when a row has waited for so long
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = units::duration)]
    shard_age: Duration,
    /// When the journal reaches the disk itself: `always`, or a time
    #[arg(long, value_name = "WHEN", default_value = "50ms", value_parser = sync)]
    journal_sync: Sync,
    #[command(flatten)]
    limits: LimitFlags,
    /// Write a JSON line about each request, without its words, to this file (`-`: standard output)
    #[arg(long, value_name = "FILE")]
    request_log: Option<PathBuf>,
}

/// Serves until a signal comes.
pub(crate) fn run(args: Args, context: &Context) -> anyhow::Result<Exit> {
    let keys = keys(args.key_file.as_deref(), "client")?;
    let control = keys_of_control(&args)?;
    if !args.listen.ip().is_loopback() && keys.is_empty() {
        // Said before a model is loaded for nothing.
        return Err(proxy::Error::Open { address: args.listen }.into());
    }
    let log = request_log(args.request_log.as_deref())?;
    let mut shipping = Shipping::open(args.ship.as_deref(), &args.spool, context)?;
    context.block_on(async {
        let (backends, inside) = backends::all(&args, context).await?;
        let engines = backends::told(&backends);
        let options = options(&args, context, backends, (keys, control, log));
        let running = proxy::start(options).await?;
        // Until now there was nothing to drain: a signal ended the process.
        let mut signal = context.drain_on_signal();
        context.say(format!(
            "ready: http://{}/v1 in front of {engines}, rows in {}",
            running.address,
            args.spool.display()
        ));
        // The sender lives as long as the context.
        tokio::select! {
            _ = signal.wait_for(|signalled| *signalled) => {}
            () = shipped(&mut shipping) => {}
        }
        let summary = running.shutdown().await;
        if let Some(shipping) = shipping {
            shipping.finish().await;
        }
        if let Some(inside) = inside {
            inside.shutdown().await;
        }
        context.say(told(&summary?));
        Ok(Exit::Done)
    })
}

/// Ships shards for ever, or waits as long if none are to be shipped.
async fn shipped(shipping: &mut Option<Shipping<'_>>) {
    match shipping {
        Some(shipping) => shipping.run().await,
        None => std::future::pending().await,
    }
}

fn options(
    args: &Args,
    context: &Context,
    engines: Vec<Backend>,
    (keys, control, request_log): (Keys, Keys, Option<RequestLog>),
) -> proxy::Options {
    let lines = context.provenance.then(|| StageLine {
        command: context.command.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        argv: std::env::args().skip(1).collect(),
        seed: Some(context.seed),
        inputs: Vec::new(),
        usage: None,
    });
    let retention = args.session_idle.saturating_mul(RETENTION).as_micros();
    proxy::Options {
        listen: args.listen,
        engines,
        forward_authorization: args.forward_authorization,
        keys,
        control,
        journal: journal::Options {
            spool: args.spool.clone(),
            sync: args.journal_sync,
            roll: Roll { rows: args.shard_rows, bytes: args.shard_bytes, age: args.shard_age },
            retention: i64::try_from(retention).unwrap_or(i64::MAX),
            // Whatever may be open can be rated.
            remembered: REMEMBERED.max(args.limits.limits().open_turns),
            compact: COMPACT,
            provenance: Provenance { lines: lines.into_iter().collect(), ..Provenance::default() },
        },
        session_idle: args.session_idle,
        flush_open: args.flush_open,
        limits: args.limits.limits(),
        request_log,
    }
}

/// Turns remembered for pairing and ratings, at least.
const REMEMBERED: usize = 65_536;

/// Opens the file of the request log, to go on at its end.
fn request_log(file: Option<&Path>) -> anyhow::Result<Option<RequestLog>> {
    let Some(file) = file else { return Ok(None) };
    let failed = |error: std::io::Error| {
        Failure::failed(format!("cannot write the request log `{}`: {error}", file.display()))
    };
    let writer: Box<dyn std::io::Write + Send> = match file == Path::new("-") {
        true => Box::new(std::io::stdout()),
        false => Box::new(
            std::fs::OpenOptions::new().create(true).append(true).open(file).map_err(failed)?,
        ),
    };
    Ok(Some(RequestLog::to(writer).map_err(failed)?))
}

fn keys_of_control(args: &Args) -> anyhow::Result<Keys> {
    keys(args.control_key_file.as_deref(), "control")
}

/// Reads a file of keys.
pub(crate) fn keys(file: Option<&Path>, name: &str) -> anyhow::Result<Keys> {
    match file {
        Some(file) => Ok(Keys::new(key_lines(file, name)?)),
        None => Ok(Keys::default()),
    }
}

/// Reads the names and keys of a file: `NAME KEY` or just `KEY` a line, one at least.
/// Messages never show a line: it may be a key.
pub(crate) fn key_lines(file: &Path, name: &str) -> anyhow::Result<Vec<(String, SecretString)>> {
    let place = file.display();
    let text = std::fs::read_to_string(file)
        .map_err(|error| Failure::usage(format!("cannot read the keys in `{place}`: {error}")))?;
    let mut found = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let words: Vec<_> = line.split_whitespace().collect();
        let (name, key) = match words.as_slice() {
            [] => continue,
            [first, ..] if first.starts_with('#') => continue,
            [key] => (name, *key),
            [name, key] => (*name, *key),
            _ => {
                let message = format!("`{place}` line {}: not `NAME KEY`", number + 1);
                return Err(Failure::usage(message).into());
            }
        };
        found.push((name.to_owned(), SecretString::from(key)));
    }
    match found.is_empty() {
        true => Err(Failure::usage(format!("no key in `{place}`")).into()),
        false => Ok(found),
    }
}

fn told(summary: &Summary) -> String {
    let list = |label: &str, counts: &[(&'static str, u64)]| {
        let counts: Vec<_> = counts.iter().map(|(word, count)| format!("{word} {count}")).collect();
        match counts.is_empty() {
            true => String::new(),
            false => format!("\n{label}: {}", counts.join(", ")),
        }
    };
    let Summary { turns, no_session, rows, open, skipped, untrainable } = summary;
    format!(
        "captured {turns} turns ({no_session} without a session), wrote {rows} rows, \
         {open} turns stay open{}{}",
        list("not captured", skipped),
        list("not for training", untrainable),
    )
}

fn sync(text: &str) -> Result<Sync, String> {
    match text {
        "always" => Ok(Sync::Always),
        time => units::duration(time).map(Sync::Every),
    }
}

fn rows(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("not a number of rows".to_owned()),
        Ok(rows) => Ok(rows),
    }
}

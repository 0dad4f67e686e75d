//! `oclaw serve`.

mod ship;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use oclaw::engine::{self, Dialect, Engine, EngineOptions};
use oclaw::journal::{self, Roll, Sync};
use oclaw::proxy::{self, Keys, Limits, Summary};
use oclaw::table::{Provenance, StageLine};
use oclaw::template::{Template, Tokenizer};
use secrecy::SecretString;

use crate::common::Context;
use crate::embedded::{self, Embedded};
use crate::report::{Exit, Failure};
use crate::units;
use ship::Shipping;

/// How many idle times a session is remembered for, so that a late next message
/// still finds it.
const RETENTION: u32 = 24;
/// The journal is written anew when it has grown by so many bytes.
const COMPACT: u64 = 64 << 20;

/// Let people chat through an OpenAI-compatible server, and record what it sampled.
///
/// Chats pass through byte by byte to `--engine`, or to an engine inside this
/// process (`--model`). What the engine is asked beyond the client's request
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
/// Also served: `/v1/models` and every other `/v1/` route (passed on, not
/// recorded), `/v1/feedback`, `/healthz`, `/readyz`, `/metrics`, and for whoever
/// changes the weights `/oclaw/policy`, `/oclaw/pause`, `/oclaw/resume`. The
/// first SIGINT or SIGTERM lets running answers end (`--drain`), the second one
/// does not.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Address of the engine; a dialect may stand before it (`sglang+http://…`)
    #[arg(long, value_name = "URL", conflicts_with = "model")]
    engine: Option<String>,
    /// Folder of a model to serve from inside this process
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Address of the engine inside this process, for `sync-weights`
    #[arg(long, value_name = "ADDRESS", conflicts_with = "engine")]
    engine_listen: Option<SocketAddr>,
    /// Type of that engine's products: auto (the checkpoint's), f32 or bf16
    #[arg(long, value_name = "TYPE", default_value = "auto", value_parser = ["auto", "f32", "bf16"], requires = "model")]
    dtype: String,
    /// File with the engine's key
    #[arg(long, value_name = "FILE")]
    engine_key_file: Option<PathBuf>,
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
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = at_least_one)]
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
    /// Largest body of a request
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = units::bytes)]
    max_body: usize,
    /// Largest answer that is recorded, unpacked; a larger one only passes
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = units::bytes)]
    max_answer: usize,
    /// Longest wait for the engine to begin its answer
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = units::duration)]
    answer_timeout: Duration,
    /// Longest silence of the engine inside an answer
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = units::duration)]
    silence: Duration,
    /// Longest wait of a request while the engine is on hold
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = units::duration)]
    hold: Duration,
    /// Time that running answers get at the end
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = units::duration)]
    drain: Duration,
}

/// Serves until a signal comes.
pub(crate) fn run(args: Args, context: &Context) -> anyhow::Result<Exit> {
    let keys = keys(args.key_file.as_deref(), "client")?;
    let control = keys_of_control(&args)?;
    if !args.listen.ip().is_loopback() && keys.is_empty() {
        // Said before a model is loaded for nothing.
        return Err(proxy::Error::Open { address: args.listen }.into());
    }
    let mut shipping = Shipping::open(args.ship.as_deref(), &args.spool, context)?;
    context.block_on(async {
        let (engine, key, inside) = upstream(&args, context).await?;
        let options = options(&args, context, (engine.clone(), key), (keys, control)).await;
        let running = proxy::start(options).await?;
        // Until now there was nothing to drain: a signal ended the process.
        let mut signal = context.drain_on_signal();
        context.say(format!(
            "ready: http://{}/v1 in front of {} ({}), rows in {}",
            running.address,
            engine.url(),
            engine.dialect(),
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

/// Returns the engine to serve, its key, and the engine itself if it runs
/// inside this process.
async fn upstream(
    args: &Args,
    context: &Context,
) -> anyhow::Result<(Engine, Option<SecretString>, Option<Embedded>)> {
    if let Some(model) = &args.model {
        let inside = Embedded::start(context, model, args.engine_listen, &args.dtype).await?;
        return Ok((attach(&inside.url(), None).await?, None, Some(inside)));
    }
    let Some(url) = &args.engine else {
        let failure = Failure::usage("nobody to answer the chats");
        return Err(failure.hint("give `--engine URL` or `--model DIR`").into());
    };
    let key = embedded::key("serve", args.engine_key_file.as_deref())?;
    Ok((attach(url, key.clone()).await?, key, None))
}

/// Finds out what the engine speaks and where its routes are.
async fn attach(url: &str, key: Option<SecretString>) -> anyhow::Result<Engine> {
    let mut options = EngineOptions::new(url);
    options.key = key;
    let engine = Engine::attach(options).await?;
    match engine.models().await {
        Ok(_) => {}
        Err(
            error @ (engine::Error::Unreachable { .. }
            | engine::Error::Timeout { .. }
            | engine::Error::Unauthorized { .. }),
        ) => return Err(error.into()),
        // Not every server lists its models.
        Err(error) => tracing::warn!(%error, "cannot list the engine's models"),
    }
    Ok(engine)
}

async fn options(
    args: &Args,
    context: &Context,
    (engine, engine_key): (Engine, Option<SecretString>),
    (keys, control): (Keys, Keys),
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
    let origin = origin(args.model.as_deref(), &engine).await;
    proxy::Options {
        listen: args.listen,
        temperature: default_temperature(&engine).await,
        engine,
        engine_key,
        forward_authorization: args.forward_authorization,
        keys,
        control,
        journal: journal::Options {
            spool: args.spool.clone(),
            sync: args.journal_sync,
            roll: Roll { rows: args.shard_rows, bytes: args.shard_bytes, age: args.shard_age },
            retention: i64::try_from(retention).unwrap_or(i64::MAX),
            compact: COMPACT,
            provenance: Provenance { lines: lines.into_iter().collect(), ..origin },
        },
        session_idle: args.session_idle,
        flush_open: args.flush_open,
        limits: Limits {
            body: args.max_body,
            answer_bytes: args.max_answer,
            answer: args.answer_timeout,
            silence: args.silence,
            hold: args.hold,
            drain: args.drain,
        },
    }
}

/// Finds the temperature that SGLang takes where a request states none: that of
/// the model's `generation_config.json`, if the folder is on this machine.
async fn default_temperature(engine: &Engine) -> Option<f32> {
    if engine.dialect() != Dialect::Sglang {
        return None;
    }
    let folder = PathBuf::from(engine.model_info().await.ok()?.model_path?);
    if !folder.join("config.json").is_file() {
        return None;
    }
    let Ok(text) = std::fs::read_to_string(folder.join("generation_config.json")) else {
        return Some(1.0);
    };
    let config: serde_json::Value = serde_json::from_str(&text).ok()?;
    match config.get("temperature") {
        None | Some(serde_json::Value::Null) => Some(1.0),
        Some(temperature) => temperature.as_f64().map(|temperature| temperature as f32),
    }
}

/// Finds the tokenizer and the chat template that make the ids: in the model's
/// folder, or in the one that SGLang names, if that is on this machine. Another
/// server's ids are nobody's that we know.
async fn origin(model: Option<&Path>, engine: &Engine) -> Provenance {
    let folder = match model {
        Some(model) => Some(model.to_owned()),
        None if engine.dialect() == Dialect::Sglang => {
            let info = engine.model_info().await.unwrap_or_default();
            // A relative path, or a hub name, is relative to the server.
            let named = info.tokenizer_path.or(info.model_path).map(PathBuf::from);
            named.filter(|folder| folder.is_absolute())
        }
        None => None,
    };
    let Some(folder) = folder else { return Provenance::default() };
    Provenance {
        tokenizer_hash: Tokenizer::hash_of(&folder).ok(),
        chat_template_hash: Template::load(&folder).ok().map(|template| template.hash()),
        ..Provenance::default()
    }
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

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("not a number of rows".to_owned()),
        Ok(rows) => Ok(rows),
    }
}

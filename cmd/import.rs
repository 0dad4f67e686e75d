//! `oclaw import`: recorded chats of other programs become turns.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use oclaw::interchange::{Imported, Importer, Shape};
use oclaw::table::{Format, Provenance, Sink, Target, write_shard};
use oclaw::template::Chat;
use oclaw::trajectory::{Turn, Writer, turn};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::asking;
use crate::common::Context;
use crate::files::{FormatName, stage_line_of};
use crate::report::{Exit, Failure};
use crate::visible::visible;

/// Rows that are made a batch at once.
const TOGETHER: usize = 256;
const WRITERS: &[Writer] = &[Writer::Serve];

/// Make a table of chats that other programs recorded
///
/// Reads JSON lines (or one JSON list) of these shapes, each line recognised by
/// itself unless `--from` says what it is:
///
///     openai       {"messages": […], "tools"?: […]}, the fine-tuning format, or
///                  {"request": {…}, "response": {…}}, logged chat completions
///     openclaw-rl  the record file of OpenClaw-RL's proxy
///     sharegpt     {"conversations": [{"from", "value"}, …]}
///
/// Every assistant's message becomes a row with the messages before it and what
/// came next. Requests are put together to sessions as `serve` does it live.
/// Session and turn ids are the same in every import of the same line; a turn
/// that was told already is counted and told once.
///
/// What a log does not say stays unknown: no time is 1970, no finish reason is
/// `imported`, no model `unknown`. Rows have no token ids and cannot be trained
/// on by log-prob; `--tokenizer` makes ids again from the text, marked
/// `retokenized`, for looking and for teachers.
///
/// A malformed line is one finding, `FILE:LINE: what`, on standard error. If
/// there is one, nothing is written and the exit code is 1; with `--skip-bad`
/// the others are written and it is 3.
#[derive(clap::Args, Debug)]
#[command(verbatim_doc_comment)]
pub(crate) struct Args {
    /// Files of recorded chats; `-` is standard input
    #[arg(value_name = "FILE", required = true)]
    inputs: Vec<PathBuf>,
    /// Shape of the lines
    #[arg(long, value_name = "SHAPE", value_enum, default_value_t = From::Auto)]
    from: From,
    /// File to write, or a folder, which gets a new shard [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Format of the output [default: Parquet for files, Arrow IPC for pipes]
    #[arg(long, value_enum, value_name = "FORMAT")]
    format: Option<FormatName>,
    /// Model folder whose tokenizer and chat template make token ids of the text
    #[arg(long, value_name = "DIR")]
    tokenizer: Option<PathBuf>,
    /// Leave malformed lines out instead of stopping at them
    #[arg(long)]
    skip_bad: bool,
}

#[derive(clap::ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum From {
    Auto,
    Openai,
    #[value(name = "openclaw-rl")]
    OpenclawRl,
    Sharegpt,
}

pub(crate) fn run(args: Args, context: &Context) -> anyhow::Result<Exit> {
    let shape = match args.from {
        From::Auto => None,
        From::Openai => Some(Shape::OpenAi),
        From::OpenclawRl => Some(Shape::Record),
        From::Sharegpt => Some(Shape::ShareGpt),
    };
    let into_folder = args.output.as_deref().is_some_and(Path::is_dir);
    if into_folder && args.format == Some(FormatName::Ipc) {
        return Err(Failure::usage("a folder gets a shard, which is Parquet")
            .hint("leave `--format` out, or name a file by `-o FILE`")
            .into());
    }
    let chat = args.tokenizer.as_deref().map(Chat::load).transpose()?;
    let mut importer = Importer::new(shape);
    let mut inputs = Vec::new();
    let mut bad = 0;
    for path in &args.inputs {
        let (name, bytes) = load(path)?;
        bad += read(&name, &bytes, &mut importer)?;
        inputs.push(format!("{name} {}", digest(&bytes)));
    }
    if bad > 0 && !args.skip_bad {
        let message = format!("{bad} malformed lines; nothing was written");
        return Err(Failure::failed(message).hint("`--skip-bad` leaves them out").into());
    }
    let imported = importer.finish(chat.as_ref());
    let mut provenance = Provenance::default();
    provenance.lines.extend(stage_line_of(context, inputs));
    if let Some(chat) = &chat {
        provenance.tokenizer_hash = Some(chat.tokenizer.hash());
        provenance.chat_template_hash = Some(chat.template_hash());
    }
    let written = write(&args, &imported.turns, &provenance)?;
    report(context, &imported, bad, &written);
    Ok(if bad > 0 { Exit::Partial } else { Exit::Done })
}

fn load(path: &Path) -> anyhow::Result<(String, Vec<u8>)> {
    if path.as_os_str() != "-" {
        let name = path.display().to_string();
        let bytes = fs::read(path).with_context(|| format!("cannot read `{name}`"))?;
        return Ok((name, bytes));
    }
    let mut bytes = Vec::new();
    std::io::stdin().lock().read_to_end(&mut bytes).context("cannot read standard input")?;
    Ok(("standard input".to_owned(), bytes))
}

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Takes a file's lines, says which are malformed and returns how many.
fn read(name: &str, bytes: &[u8], importer: &mut Importer) -> anyhow::Result<u64> {
    let bytes = bytes.strip_prefix("\u{feff}".as_bytes()).unwrap_or(bytes);
    let mut findings = Vec::new();
    if bytes.trim_ascii_start().starts_with(b"[") {
        match serde_json::from_slice::<Vec<Value>>(bytes) {
            Err(error) => findings.push(format!("{name}:{}: no JSON: {error}", error.line())),
            Ok(items) => {
                for (number, item) in items.iter().enumerate() {
                    if let Err(what) = importer.value(item) {
                        findings.push(format!("{name}: item {}: {what}", number + 1));
                    }
                }
            }
        }
    } else {
        for (number, line) in bytes.split(|byte| *byte == b'\n').enumerate() {
            if !line.trim_ascii().is_empty()
                && let Err(what) = importer.line(line)
            {
                findings.push(format!("{name}:{}: {what}", number + 1));
            }
        }
    }
    let mut out = std::io::stderr().lock();
    for finding in &findings {
        writeln!(out, "{finding}")?;
    }
    Ok(findings.len() as u64)
}

/// Writes the rows and returns where they are.
fn write(args: &Args, turns: &[Turn], provenance: &Provenance) -> anyhow::Result<String> {
    let format = args.format.map(|format| match format {
        FormatName::Parquet => Format::Parquet,
        FormatName::Ipc => Format::Ipc,
    });
    let target = match args.output.as_deref() {
        Some(folder) if folder.is_dir() => {
            if turns.is_empty() {
                return Ok("nothing".to_owned());
            }
            let shard = write_shard(folder, WRITERS, turns, provenance)?;
            return Ok(shard.display().to_string());
        }
        Some(path) if path.as_os_str() != "-" => Target::Path(path.to_owned()),
        _ => Target::Stdout,
    };
    let schema = turn::batch(WRITERS, &[])?.schema();
    let mut sink = Sink::create(&target, format, schema, provenance)?;
    for chunk in turns.chunks(TOGETHER) {
        sink.write(&turn::batch(WRITERS, chunk)?)?;
    }
    sink.finish()?;
    Ok(match target {
        Target::Path(path) | Target::Shard(path) => path.display().to_string(),
        Target::Stdout => "standard output".to_owned(),
    })
}

fn report(context: &Context, imported: &Imported, bad: u64, written: &str) {
    let counts = &imported.counts;
    let mut table = asking::closing_table();
    table.add_row(["written to", written]);
    for (name, count, always) in [
        ("lines", counts.lines, true),
        ("rows", counts.rows, true),
        ("malformed lines left out", bad, false),
        ("lines read with replacements", counts.repaired, false),
        ("turns told before", counts.repeated, false),
        ("requests without an answer", counts.unanswered, false),
        ("greetings, which are no turns", counts.greetings, false),
        ("rows with ids made again", counts.retokenized, false),
        ("rows of which no ids could be made", counts.not_retokenized, false),
        ("rows whose log-probs were dropped", counts.log_probs_dropped, false),
    ] {
        if always || count > 0 {
            table.add_row([name, &count.to_string()]);
        }
    }
    if let Some(reason) = &imported.failure {
        table.add_row(["the first of them", &visible(reason)]);
    }
    context.conclude(table);
}

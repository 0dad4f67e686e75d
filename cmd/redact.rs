//! `oclaw redact`: secrets and persons out of a table's words.

use std::collections::BTreeMap;
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;

use oclaw::privacy::{Counts, Pattern, Redactor, Rows};
use oclaw::table::{Format, Provenance, Sink, Target};

use crate::asking;
use crate::common::Context;
use crate::files::{FormatName, Inputs, stage_line};
use crate::report::Exit;
use crate::visible::visible;

/// Replace secrets, addresses and numbers of persons in the words of turns
///
/// Finds private keys, JSON web tokens, API keys of the well-known shapes, AWS
/// keys, bearer tokens, passwords in URLs and whatever looks random behind a word
/// like `token`; passwords with a digit or a mark in them behind `password`,
/// `passwort`, `pwd`; cookies; e-mail addresses; payment card numbers; telephone
/// numbers in an international form, others behind `tel`, `phone`, `mobile`, `call
/// me at`; and the caller's own patterns. Each becomes `[redacted:KIND]`, in every
/// text column, in JSON by its values and names, also in JSON inside JSON, and
/// behind the escapes of JSON, URLs and HTML (`\u0040`, `%40`, `&#64;`). In ids
/// and names the mark is numbered, so that different ones stay different.
///
/// Token ids would still spell what the words no longer do: where the prompt, the
/// answer or a hint changes, the row loses its ids and all that is counted by them
/// (log-probs, teacher columns, masks, advantages) and cannot be trained on any
/// more, with the reason `redacted`. The numbers of other rows stay.
///
/// Not found: names of persons, postal addresses, dates of birth, telephone numbers
/// that no word announces, passwords that are plain words or stand in prose (`my
/// password, by the way, is …`), passwords of several words, a secret that is split
/// over two messages or two parts of a content, or encoded in other ways (base64).
/// Look at the result, and name what else there is by `--pattern`.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    inputs: Inputs,
    /// File to write, whole or not at all [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Format of the output [default: Parquet for files, Arrow IPC for pipes]
    #[arg(long, value_enum, value_name = "FORMAT")]
    format: Option<FormatName>,
    /// Something else to find; with a group in it, only the group is replaced
    #[arg(long = "pattern", value_name = "NAME=REGEX")]
    pattern: Vec<String>,
    /// TOML file of such patterns, one `NAME = 'REGEX'` a line
    #[arg(long, value_name = "FILE")]
    patterns: Option<PathBuf>,
    /// Replace addresses of machines, too
    #[arg(long)]
    ip: bool,
    /// Only list what would be replaced, never the words themselves
    #[arg(long)]
    dry_run: bool,
}

pub(crate) fn run(args: Args, context: &Context) -> anyhow::Result<Exit> {
    let mut source = args.inputs.open(context)?;
    let mut own = Vec::new();
    for text in &args.pattern {
        own.push(Pattern::parse(text)?);
    }
    if let Some(path) = &args.patterns {
        own.extend(Pattern::read(path)?);
    }
    let mut rows = Rows::new(&source.schema(), Redactor::new(own, args.ip)?)?;
    let mut sink = match args.dry_run {
        true => None,
        false => Some(open(&args, context, &source, &mut rows)?),
    };
    let mut out = BufWriter::new(io::stdout().lock());
    let mut totals: BTreeMap<String, (Counts, u64)> = BTreeMap::new();
    while let Some(batch) = source.next_batch()? {
        let turns = source.read(&batch)?;
        let places: Vec<_> = match args.dry_run {
            true => turns.iter().map(|turn| (turn.session_id.clone(), turn.turn)).collect(),
            false => Vec::new(),
        };
        let (redacted, spots) = rows.redact(&batch, turns)?;
        let (name, first) = source.place();
        let (counts, unaligned) = totals.entry(name.to_owned()).or_default();
        let mut last = None;
        for spot in &spots {
            spot.counts.iter().for_each(|(kind, n)| *counts.entry(kind.clone()).or_default() += n);
            if spot.unaligned && last != Some(spot.row) {
                *unaligned += 1;
                last = Some(spot.row);
            }
            if let Some((session, turn)) = places.get(spot.row) {
                let session =
                    rows.redactor().id(session).map_or(session.clone(), |hidden| hidden.text);
                for (kind, count) in &spot.counts {
                    writeln!(
                        out,
                        "{}: row {} (session {}, turn {turn}): {}: {kind} ({count})",
                        visible(name),
                        first + spot.row as u64,
                        visible(&session),
                        visible(&spot.column),
                    )?;
                }
            }
        }
        if let Some(sink) = &mut sink {
            sink.write(&redacted)?;
        }
    }
    out.flush()?;
    if let Some(sink) = sink {
        sink.finish()?;
    }
    report(context, &totals);
    Ok(Exit::Done)
}

/// Opens the output. What the inputs say about themselves may hold secrets too, and
/// so may the patterns on this command line.
fn open(
    args: &Args,
    context: &Context,
    source: &oclaw::table::Source,
    rows: &mut Rows,
) -> anyhow::Result<Sink> {
    let target = match &args.output {
        Some(path) if path.as_os_str() != "-" => Target::Path(path.clone()),
        _ => Target::Stdout,
    };
    let format = args.format.map(|format| match format {
        FormatName::Parquet => Format::Parquet,
        FormatName::Ipc => Format::Ipc,
    });
    let mut provenance: Provenance = source.provenance().clone();
    if let Some(mut line) = stage_line(context, source)? {
        line.argv = without_patterns(line.argv);
        provenance.lines.push(line);
    }
    for line in &mut provenance.lines {
        for text in line.argv.iter_mut().chain(&mut line.inputs) {
            if let Some(redacted) = rows.redactor().text(text) {
                *text = redacted.text;
            }
        }
    }
    Ok(Sink::create(&target, format, rows.schema(), &provenance)?)
}

fn without_patterns(argv: Vec<String>) -> Vec<String> {
    let name = |text: &str| match text.split_once('=') {
        Some((name, _)) => format!("{name}=…"),
        None => "…".to_owned(),
    };
    let mut next = false;
    let mut kept = Vec::new();
    for word in argv {
        let hidden = match word.strip_prefix("--pattern=") {
            Some(text) => format!("--pattern={}", name(text)),
            None if next => name(&word),
            None => word.clone(),
        };
        next = word == "--pattern";
        kept.push(hidden);
    }
    kept
}

fn report(context: &Context, totals: &BTreeMap<String, (Counts, u64)>) {
    let mut table = asking::closing_table();
    for (name, (counts, unaligned)) in totals {
        let kinds: Vec<_> = counts.iter().map(|(kind, count)| format!("{kind} {count}")).collect();
        let found = if kinds.is_empty() { "nothing".to_owned() } else { kinds.join(", ") };
        table.add_row([name.clone(), found]);
        if *unaligned > 0 {
            table.add_row([String::new(), format!("{unaligned} rows lose their token ids")]);
        }
    }
    context.conclude(table);
}

#[cfg(test)]
mod tests {
    use super::without_patterns;

    #[test]
    fn patterns_stay_out_of_files() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let argv = words("redact a --pattern=x=s3cr3t --pattern y=s3cr3t -o b");
        assert_eq!(without_patterns(argv), words("redact a --pattern=x=… --pattern y=… -o b"));
    }
}

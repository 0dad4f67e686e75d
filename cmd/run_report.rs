//! `oclaw report`: what a run learned, as one page.

use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::Context as _;
use oclaw::report::{Journey, Report, Series, StageRow};
use oclaw::table::row_json::instant;
use oclaw::table::{StageLine, Usage};

use crate::common::Context;
use crate::files::{Inputs, write_whole};
use crate::report::Exit;
use crate::run_folder::Subject;
use crate::stores::Here;

/// Tell what a run learned, as one page.
///
/// One HTML file that needs nothing else, no network and no script: rewards per
/// session and shard, sessions to adapt (the reward of each session's first reply,
/// and the first three right ones in a row), scores, the three health questions,
/// the curves of training, answers to the same prompt before and after, every
/// figure, and the stages that the tables went through. A part for which there is
/// no data says so.
///
/// IN are the folder of one run, or tables, as in `oclaw stats`. Whatever was said
/// in a chat is text on the page, never markup.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    inputs: Inputs,
    /// File to write, whole or not at all [default: standard output, unless --csv]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Write every series into this folder, one CSV file each
    #[arg(long, value_name = "FOLDER")]
    csv: Option<PathBuf>,
    /// Metrics that `oclaw train --metrics` wrote, beside those of a run
    #[arg(long, value_name = "FILE")]
    metrics: Option<PathBuf>,
    /// Heading of the page [default: from the name of IN]
    #[arg(long, value_name = "TEXT")]
    title: Option<String>,
}

pub(crate) fn run(args: Args, context: &Context) -> anyhow::Result<Exit> {
    let inputs = Here::bring(&args.inputs.inputs, context)?.paths(context);
    let subject = Subject::open(&inputs, args.metrics.as_deref())?;
    let mut report =
        Report { title: title(&args), steps: subject.steps.clone(), ..Report::default() };
    read(&subject, &mut report)?;
    if let Some(folder) = &args.csv {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("cannot make `{}`", folder.display()))?;
        for series in report.series() {
            let path = folder.join(format!("{}.csv", series.name));
            write_whole(&path, &csv(&series)?)?;
        }
        context.say(format!("series in {}", folder.display()));
    }
    match &args.output {
        Some(path) if path.as_os_str() != "-" => {
            write_whole(path, report.html().as_bytes())?;
            context.say(format!("page in {}", path.display()));
        }
        None if args.csv.is_some() => {}
        _ => {
            let mut out = io::stdout().lock();
            out.write_all(report.html().as_bytes())?;
            out.flush()?;
        }
    }
    Ok(Exit::Done)
}

fn title(args: &Args) -> String {
    match (&args.title, args.inputs.inputs.as_slice()) {
        (Some(title), _) => title.clone(),
        (None, [input]) => {
            let whole = input.canonicalize().unwrap_or_else(|_| input.clone());
            let name = whole.file_name().unwrap_or_default().to_string_lossy().into_owned();
            format!("oclaw report: {name}")
        }
        (None, _) => "oclaw report".to_owned(),
    }
}

fn read(subject: &Subject, report: &mut Report) -> anyhow::Result<()> {
    let mut journey = Journey::default();
    let mut period = None;
    let provenance = subject.read(&mut |shard, turns| {
        for turn in turns {
            journey.add(shard, turn);
            report.survey.add(turn);
            if let Some(at) = turn.asked_at() {
                let (first, last) = period.unwrap_or((at, at));
                period = Some((at.min(first), at.max(last)));
            }
        }
    })?;
    report.stages = provenance.lines.iter().map(stage_row).collect();
    report.journey = journey;
    report.period = period.map(|(first, last)| (minute(first), minute(last)));
    Ok(())
}

/// Writes an instant to the minute.
fn minute(micros: i64) -> String {
    let text = instant(micros);
    match text.rsplit_once(':') {
        Some((minutes, _)) => format!("{} UTC", minutes.replacen('T', " ", 1)),
        None => text,
    }
}

fn stage_row(line: &StageLine) -> StageRow {
    StageRow {
        command: line.command.clone(),
        version: line.version.clone(),
        arguments: line.argv.join(" "),
        seed: line.seed,
        inputs: line.inputs.clone(),
        usage: line.usage.as_ref().map(usage).unwrap_or_default(),
    }
}

fn usage(usage: &Usage) -> String {
    let Usage { calls, cache_hits, prompt_tokens, completion_tokens, .. } = usage;
    format!(
        "{calls} calls, {cache_hits} answers kept from before, {prompt_tokens} + \
         {completion_tokens} tokens"
    )
}

fn csv(series: &Series) -> anyhow::Result<Vec<u8>> {
    let mut csv = csv::Writer::from_writer(Vec::new());
    csv.write_record(&series.header)?;
    series.rows.iter().try_for_each(|row| csv.write_record(row))?;
    csv.into_inner().map_err(|error| error.into_error().into())
}

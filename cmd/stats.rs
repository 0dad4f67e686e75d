//! `oclaw stats`: figures of tables and runs, and the three health questions.

mod live;
mod show;

use std::io::{self, BufWriter, Write};
use std::path::PathBuf;
use std::time::Duration;

use oclaw::health::{self, Evidence, Survey, Verdict};

use crate::common::Context;
use crate::files::Inputs;
use crate::report::Exit;
use crate::run_folder::Subject;
use crate::stores::Here;
use crate::units;

/// Tell how well a table or a run is.
///
/// Three questions, each with a verdict, the figure that it rests on and what to
/// do: is exploration collapsing, is the signal alive, is it drifting off policy.
/// The worst figure counts. `unknown` means that no figure that could decide is
/// known: no data is never `healthy`. `--bounds` prints every figure with its
/// bounds and where these come from.
///
/// IN are tables, as in `view`, or the folder of one run: its stages' folders
/// (`turns`, `judged`, `hinted`, `taught`, `ready`), tables beside them, and the
/// training metrics (`policy/step-…/oclaw/train.json`, `metrics.jsonl`). Every turn
/// of a run counts once, from the tables with the most columns that have it. What
/// only training knows (entropy, clip, trainer against server) comes from the
/// metrics.
///
/// `--live` shows the folder again and again, new shards as they come, until
/// Ctrl-C; of a run only the tables with the most columns.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    inputs: Inputs,
    /// Metrics that `oclaw train --metrics` wrote, beside those of a run
    #[arg(long, value_name = "FILE")]
    metrics: Option<PathBuf>,
    /// One JSON object, per shard too with `--per-shard`, or per look with `--live`
    #[arg(long, conflicts_with = "csv")]
    json: bool,
    /// Comma-separated values: input, group, name, value
    #[arg(long)]
    csv: bool,
    /// Tell each shard by itself before all of them
    #[arg(long)]
    per_shard: bool,
    /// Keep looking until Ctrl-C
    #[arg(long, conflicts_with_all = ["csv", "per_shard", "strict"])]
    live: bool,
    /// Time between two looks
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = pause)]
    every: Duration,
    /// End with 3 if a verdict is `ill`
    #[arg(long)]
    strict: bool,
    /// Print every figure with its bounds and their source, and stop
    #[arg(long)]
    bounds: bool,
}

fn pause(text: &str) -> Result<Duration, String> {
    match units::duration(text)? {
        time if time < Duration::from_millis(10) => Err("wanted 10ms or more".to_owned()),
        time => Ok(time),
    }
}

/// What is told of some tables.
struct Look {
    /// The shard, or nothing for all of them.
    input: Option<String>,
    survey: Survey,
}

pub(crate) fn run(args: Args, context: &Context) -> anyhow::Result<Exit> {
    let mut out = BufWriter::new(io::stdout().lock());
    if args.bounds {
        show::bounds(&mut out)?;
        out.flush()?;
        return Ok(Exit::Done);
    }
    if args.live {
        return live::run(&args, context, &mut out);
    }
    let inputs = Here::bring(&args.inputs.inputs, context)?.paths(context);
    let subject = Subject::open(&inputs, args.metrics.as_deref())?;
    let looks = looks(&args, &subject)?;
    show::looks(&mut out, &args, &subject, &looks)?;
    out.flush()?;
    let ill = |look: &Look| {
        let evidence = Evidence { survey: &look.survey, steps: &subject.steps };
        health::answers(&evidence).iter().any(|answer| answer.verdict == Verdict::Ill)
    };
    Ok(if args.strict && looks.last().is_some_and(ill) { Exit::Partial } else { Exit::Done })
}

/// Counts every shard by itself, if wanted, and all of them.
fn looks(args: &Args, subject: &Subject) -> anyhow::Result<Vec<Look>> {
    let mut all = Survey::default();
    let mut shards: Vec<Look> = Vec::new();
    subject.read(&mut |shard, turns| {
        turns.iter().for_each(|turn| all.add(turn));
        if args.per_shard && !turns.is_empty() {
            if shards.last().and_then(|look| look.input.as_deref()) != Some(shard) {
                shards.push(Look { input: Some(shard.to_owned()), survey: Survey::default() });
            }
            if let Some(look) = shards.last_mut() {
                turns.iter().for_each(|turn| look.survey.add(turn));
            }
        }
    })?;
    shards.push(Look { input: None, survey: all });
    Ok(shards)
}

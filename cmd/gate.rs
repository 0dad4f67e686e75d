//! `oclaw gate`.

mod policy;
mod receipt;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::ValueEnum;
use oclaw::engine::{Engine, EngineOptions};
use oclaw::replay::gate::{self, Figures, Rule, Verdict};
use oclaw::replay::{self, Away, Measure, Overrides, Scores, Session, Trial};
use oclaw::table::read_turns;

use crate::asking::closing_table;
use crate::common::Context;
use crate::embedded;
use crate::progress;
use crate::replay::asked;
use crate::report::{Exit, Failure};
use crate::units;

use policy::Contender;
use receipt::Receipt;

/// Decide whether a new policy may take the place of the present one.
///
/// SUITE is a table of recorded turns that stays as it is: a frozen suite. Each
/// turn is an item, scored once under either policy, a model folder or the address
/// of a server:
///   log-prob  mean log-prob per token of the recorded answer, if it was praised
///             (explicit reward, else `score`, above 0); other turns are left out.
///   rules     the policy answers the recorded messages, rules about answers score
///             it -1, 0 or 1 (`--rules FILE`, see `oclaw replay`).
///   judge     the policy answers, `--judge-engine` scores it -1, 0 or 1 by the
///             recorded next state, which answers the recorded response.
/// Answers are greedy unless `--temperature` says otherwise. With a temperature the
/// item numbered n, from 0, is sampled with the seed `--seed` + n under either policy
/// (common random numbers): luck that both share does not look like a difference, and
/// another `--seed` is another draw.
///
/// The rule: let d be the mean of candidate minus current over the items both have
/// a score of, and its interval the 95 % percentile bootstrap over whole sessions
/// (`--resamples`, `--seed`). A difference of at most 0.00002 is rounding and counts
/// as 0.
///   reject     the interval lies below 0: the candidate is worse.
///   promote    else, if the interval lies above -MARGIN: a loss larger than the
///              margin can be ruled out.
///   undecided  else, and always with fewer than `--min-items` items or 5 sessions,
///              or if either policy has no score of more than one in twenty of the
///              items that fit, because its engine or the judge refused them.
/// Exit code 0 is promote, 3 reject or undecided, 4 an engine that is not there.
///
/// The receipt (`--receipt`, else CANDIDATE/oclaw/gate.json) holds the hashes of
/// the suite and of the weights, the figures and the verdict. `oclaw sync-weights
/// --require-gate` wants one that says promote for exactly those weights.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Table of recorded turns
    #[arg(long, value_name = "FILE", required = true)]
    suite: PathBuf,
    /// Policy on trial: a model folder, a `latest`, or the address of a server
    #[arg(long, value_name = "POLICY", required = true)]
    candidate: String,
    /// Policy to compare with, likewise
    #[arg(long, value_name = "POLICY", required = true)]
    current: String,
    /// File with the servers' key
    #[arg(long, value_name = "FILE")]
    engine_key_file: Option<PathBuf>,
    /// Type of the products of a model in this process: auto, f32 or bf16
    #[arg(long, value_name = "TYPE", default_value = "auto", value_parser = ["auto", "f32", "bf16"])]
    dtype: String,
    /// How items are scored
    #[arg(long, value_enum, value_name = "WAY", default_value = "log-prob")]
    by: MeasureName,
    /// File of rules for `--by rules`
    #[arg(long, value_name = "FILE")]
    rules: Option<PathBuf>,
    #[command(flatten)]
    judge: asked::Judge,
    /// Temperature of the answers, of which `--by log-prob` asks none [default: 0]
    #[arg(long, value_name = "T", value_parser = asked::not_negative)]
    temperature: Option<f64>,
    /// Largest loss of the mean score that may stay unseen
    #[arg(long, value_name = "LOSS", default_value_t = 0.1, value_parser = asked::not_negative)]
    margin: f64,
    /// Items below which nothing is decided
    #[arg(long, value_name = "N", default_value_t = 20)]
    min_items: usize,
    /// Times that the suite is drawn anew for the interval
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(100..=10_000_000))]
    resamples: u32,
    /// Requests under way at once
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=4096))]
    concurrency: u16,
    /// Limit of one request
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = units::duration)]
    timeout: Duration,
    /// Further tries of a request that failed for a passing reason
    #[arg(long, value_name = "N", default_value_t = 2)]
    retries: u32,
    /// File for the receipt [default: CANDIDATE/oclaw/gate.json]
    #[arg(long, value_name = "FILE")]
    receipt: Option<PathBuf>,
}

impl Args {
    fn temperature(&self) -> f64 {
        self.temperature.unwrap_or_default()
    }
}

/// A way to score items.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum MeasureName {
    /// By rules about answers
    Rules,
    /// By a judge
    Judge,
    /// By the log-probs of praised answers
    LogProb,
}

/// Compares two policies.
pub(crate) fn run(args: Args, context: &Context) -> anyhow::Result<Exit> {
    args.judge.only_for(args.by == MeasureName::Judge)?;
    asked::rules_only_for(args.by == MeasureName::Rules, args.rules.as_deref())?;
    if args.by == MeasureName::LogProb && args.temperature.is_some() {
        let problem = "`--temperature` says nothing with `--by log-prob`, which asks for no answer";
        return Err(Failure::usage(problem).hint("leave it out").into());
    }
    let candidate = Contender::read(&args.candidate)?;
    let current = Contender::read(&args.current)?;
    let receipt = receipt::place(args.receipt.as_deref(), &candidate)?;
    let suite = crate::files::hash(&args.suite)?;
    let sessions = replay::sessions(read_turns(std::slice::from_ref(&args.suite))?);
    if sessions.is_empty() {
        return Err(Failure::failed(format!("no turns in `{}`", args.suite.display())).into());
    }
    let (measure, scores) = context.block_on(async {
        let measure = measure(&args, context).await?;
        let new = scores(&args, context, (&candidate, "candidate"), (&measure, &sessions)).await?;
        let old = scores(&args, context, (&current, "current"), (&measure, &sessions)).await?;
        anyhow::Ok((measure, (new, old)))
    })?;
    let rule = Rule {
        margin: args.margin,
        least_items: args.min_items,
        resamples: args.resamples as usize,
        seed: context.seed,
    };
    let mut figures = gate::compare(&gate::pairs(&scores.0.of, &scores.1.of), &rule);
    if let Some(figures) = &mut figures
        && [&scores.0, &scores.1].into_iter().any(Scores::is_refused_too_often)
    {
        figures.verdict = Verdict::Undecided;
    }
    let written = Receipt {
        suite: (&args.suite, suite),
        candidate: &candidate,
        current: &current,
        measure: measure.as_str(),
        temperature: args.temperature(),
        scores: (&scores.0, &scores.1),
        rule: &rule,
        figures: figures.as_ref(),
    };
    written.write(&receipt)?;
    context.conclude(table(figures.as_ref(), &scores));
    let verdict = figures.map_or(Verdict::Undecided, |figures| figures.verdict);
    context.say(format!("{}: receipt in `{}`", verdict.as_str(), receipt.display()));
    Ok(if verdict == Verdict::Promote { Exit::Done } else { Exit::Partial })
}

async fn measure(args: &Args, context: &Context) -> anyhow::Result<Measure> {
    Ok(match args.by {
        MeasureName::LogProb => Measure::LogProb,
        MeasureName::Rules => Measure::Rules(asked::rules(args.rules.as_deref())?),
        MeasureName::Judge => {
            Measure::Judge(args.judge.jury(context, |url| options(args, url)).await?)
        }
    })
}

fn options(args: &Args, url: &str) -> EngineOptions {
    let mut options = EngineOptions::new(url);
    options.timeout = args.timeout;
    options.retries.tries = args.retries.saturating_add(1);
    options
}

/// Scores one policy. One after the other: two models need not fit into memory.
async fn scores(
    args: &Args,
    context: &Context,
    (contender, name): (&Contender, &'static str),
    (measure, sessions): (&Measure, &[Session]),
) -> anyhow::Result<Scores> {
    let (url, key, inside) = match contender {
        Contender::Server { url } => {
            (url.clone(), embedded::key(&context.command, args.engine_key_file.as_deref())?, None)
        }
        Contender::Folder { folder, .. } => {
            let inside = embedded::Embedded::start(context, folder, None, &args.dtype).await?;
            (inside.url(), None, Some(inside))
        }
    };
    let options = EngineOptions { key, ..options(args, &url) };
    let engine = Engine::connect(options).await.with_context(|| format!("the {name}"))?;
    let trial = Trial {
        engine: &engine,
        measure,
        overrides: Overrides {
            temperature: Some(args.temperature()),
            seed: (args.temperature() > 0.0).then_some(context.seed.cast_signed()),
            ..Overrides::default()
        },
        at_once: usize::from(args.concurrency),
    };
    let bar = progress::bar(context, name, Some(gate::items(sessions) as u64));
    let scores = trial.run(sessions, &|| bar.inc(1)).await;
    bar.finish_and_clear();
    if let Some(inside) = inside {
        inside.shutdown().await;
    }
    scores.map_err(|away| match away {
        Away::Policy(error) => anyhow::Error::from(error).context(format!("the {name}")),
        Away::Judge(error) => anyhow::Error::from(error).context("the judge"),
    })
}

fn table(figures: Option<&Figures>, (new, old): &(Scores, Scores)) -> comfy_table::Table {
    let mut table = closing_table();
    let mut row = |label: String, value: String| {
        table.add_row([label, value]);
    };
    match figures {
        None => row("items".to_owned(), "0".to_owned()),
        Some(figures) => {
            let Figures { interval: (lower, upper), .. } = figures;
            row("items".to_owned(), figures.items.to_string());
            row("sessions".to_owned(), figures.sessions.to_string());
            row("candidate, mean".to_owned(), format!("{:.4}", figures.candidate));
            row("current, mean".to_owned(), format!("{:.4}", figures.current));
            row("difference, mean".to_owned(), format!("{:+.4}", figures.difference));
            row("  95 % interval".to_owned(), format!("{lower:+.4} to {upper:+.4}"));
        }
    }
    for (reason, count) in &new.left_out {
        row(format!("left out: {reason}"), count.to_string());
    }
    for (name, scores) in [("candidate", new), ("current", old)] {
        for (reason, count) in &scores.failed {
            row(format!("{name} failed: {reason}"), count.to_string());
        }
    }
    table
}

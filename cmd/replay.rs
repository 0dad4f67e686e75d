//! `oclaw replay`.

pub(crate) mod asked;
mod saved;
mod shown;
mod stages;

use std::path::PathBuf;
use std::time::Duration;

use oclaw::engine::{Engine, EngineOptions};
use oclaw::judge::Rules;
use oclaw::replay::report::Tally;
use oclaw::replay::{self, By, Options, Outcome, Overrides, Player};
use oclaw::table::read_turns;

use crate::common::Context;
use crate::embedded::{self, Embedded};
use crate::progress;
use crate::report::{Exit, Failure};
use crate::units;

use asked::{Allowed, ByName, HistoryName, Layout, Pace};

/// What says how turns are sent and compared, which stages are not.
const OF_TURNS: [&str; 18] = [
    "recorded",
    "engine",
    "model",
    "save",
    "history",
    "pace",
    "speed",
    "concurrency",
    "temperature",
    "sampling_seed",
    "max_tokens",
    "by",
    "rules",
    "judge_engine",
    "judge_votes",
    "allow",
    "timeout",
    "retries",
];

/// Send recorded sessions again and compare the answers: a recorded session is
/// a regression test.
///
/// RECORDED are tables that `oclaw serve` wrote: files, spool folders, patterns.
/// Sessions are sent in parallel, the turns of each in order, with the sampling
/// settings that their requests stated (stop strings and `tool_choice` are not in
/// the table; of the stop strings the one that was met is sent). Greedy is
/// `--temperature 0`.
///
/// With `--history fixed` each turn is asked after its own recorded messages. With
/// `on-policy` the new answers stand in them, what the person and the tools said
/// stays as recorded; when an answer calls other tools than the recorded one did,
/// the recorded results answer nothing, and the turns after it are not compared
/// (`diverged`).
///
/// `--by` says how answers are compared:
///   exact     text, tool calls (name and arguments as JSON), finish reason if it
///             was recorded (an import may not know), and where both sides have
///             them the token ids.
///   rules     rules score the new answer no lower than the recorded one. Without
///             `--rules FILE` they look at the answer alone (control tokens, cut,
///             empty). A rule of FILE may also look at the recorded next state;
///             rules that look at nothing else say the same of any answer and are
///             left out.
///   judge     `--judge-engine` scores the new answer no lower than the recorded
///             one (whose `score` counts if it has one). Mind that the next state
///             which the judge sees answers the recorded response, not the new one.
///   log-prob  the engine scores the recorded ids; no log-prob may move by more
///             than `--tolerance`. Recorded log-probs that are tempered are compared
///             with the new answer's own if it has the same ids, else not at all.
///
/// A turn that cannot be compared is counted with the reason, never as the same. A
/// way that compares no turn at all fails the replay.
/// Standard output, or `-o`, gets the turns as a table, as lines of JSON with the
/// summary last, or as JUnit XML. `--save` keeps the new turns as a table for the
/// other stages; a next state goes with an answer only if that is the recorded one.
///
/// `--stages RUN` looks at stages instead of an engine: it takes `judged`,
/// `hinted`, `taught` and `ready` in RUN, each a folder of tables or one
/// `.parquet` file, runs each stage again by the command line that its table tells
/// (in the present folder; answers in the cache cost nothing), and compares the
/// columns that the stage writes, by turn id, numbers within `--tolerance`. A stage
/// without a table of its own is taken from a later one. One whose engine is away
/// is told as not rerun.
///
/// Exit code 0 if all compared turns are the same (or no more than `--allow` are
/// not), 3 if they differ, if requests failed or if a way compared nothing at all,
/// 4 if the engine, or the judge, is not there.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Recorded tables: files, spool folders, patterns; `-` or nothing is standard input
    #[arg(value_name = "RECORDED")]
    recorded: Vec<PathBuf>,
    /// Folder of recorded stage outputs to make again
    #[arg(long, value_name = "RUN", conflicts_with_all = OF_TURNS)]
    stages: Option<PathBuf>,
    /// Address of the server to ask
    #[arg(long, value_name = "URL", required_unless_present_any = ["model", "stages"])]
    engine: Option<String>,
    /// Name of the model there, if it has several
    #[arg(long, value_name = "NAME", requires = "engine", conflicts_with = "model")]
    engine_model: Option<String>,
    /// File with the server's key
    #[arg(long, value_name = "FILE", requires = "engine", conflicts_with = "model")]
    engine_key_file: Option<PathBuf>,
    /// Folder of a model to ask, run in this process
    #[arg(long, value_name = "DIR", conflicts_with = "engine")]
    model: Option<PathBuf>,
    /// Type of that model's products: auto (the checkpoint's), f32 or bf16
    #[arg(long, value_name = "TYPE", default_value = "auto", value_parser = ["auto", "f32", "bf16"], conflicts_with = "engine")]
    dtype: String,
    /// Conversation before each question
    #[arg(long, value_enum, value_name = "HISTORY", default_value = "fixed")]
    history: HistoryName,
    /// When to ask: as fast as possible, or with the recorded pauses
    #[arg(long, value_enum, value_name = "PACE", default_value = "fast")]
    pace: Pace,
    /// So many times the recorded speed
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = asked::positive)]
    speed: f64,
    /// Requests under way at once
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=4096))]
    concurrency: u16,
    /// Temperature instead of the recorded ones
    #[arg(long, value_name = "T", value_parser = asked::not_negative)]
    temperature: Option<f64>,
    /// Seed of the requests instead of the recorded ones
    #[arg(long, value_name = "N")]
    sampling_seed: Option<i64>,
    /// Longest answer, in tokens, instead of the recorded limits
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: Option<u32>,
    /// Comparisons, joined by commas
    #[arg(long, value_enum, value_name = "WAYS", value_delimiter = ',', default_value = "exact")]
    by: Vec<ByName>,
    /// File of rules for `--by rules`
    #[arg(long, value_name = "FILE")]
    rules: Option<PathBuf>,
    #[command(flatten)]
    judge: asked::Judge,
    /// Largest difference of a number that is none, in nats for log-probs
    #[arg(long, value_name = "NATS", default_value_t = 1e-3, value_parser = asked::not_negative)]
    tolerance: f64,
    /// How many turns may differ or fail: a number, or a share like `5%`
    #[arg(long, value_name = "N", default_value = "0", value_parser = Allowed::parse)]
    allow: Allowed,
    /// Limit of one request
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = units::duration)]
    timeout: Duration,
    /// Further tries of a request that failed for a passing reason
    #[arg(long, value_name = "N", default_value_t = 2)]
    retries: u32,
    /// Layout of the output
    #[arg(long, value_enum, value_name = "LAYOUT", default_value = "table")]
    output_format: Layout,
    /// File to write instead of standard output
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Table to write the new turns to
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
}

/// Replays.
pub(crate) fn run(args: Args, context: &Context) -> anyhow::Result<Exit> {
    if let Some(folder) = &args.stages {
        return stages::run(folder, &args, context);
    }
    let by = asked::ways(&args.by);
    let rules = match by.contains(&By::Rules) {
        true => Some(asked::rules(args.rules.as_deref())?),
        false => None,
    };
    if by.contains(&By::Judge) {
        args.judge.wanted()?;
    }
    args.judge.only_for(by.contains(&By::Judge))?;
    asked::rules_only_for(by.contains(&By::Rules), args.rules.as_deref())?;
    let turns = read_turns(&args.recorded)?;
    if turns.is_empty() {
        return Err(Failure::failed("no turns to replay").into());
    }
    let sessions = replay::sessions(turns);
    let undated =
        sessions.iter().flat_map(|session| &session.turns).filter(|turn| turn.asked_at().is_none());
    if args.pace == Pace::Recorded
        && let undated @ 1.. = undated.count()
    {
        context.say(format!("{undated} turns have no recorded time and are sent without a pause"));
    }
    let outcome = context.block_on(play(&args, context, (by, rules), &sessions))?;
    let tally = Tally::of(&outcome.sessions);
    let allowed = args.allow.of(tally.compared());
    let verdict = shown::verdict(&tally, allowed, outcome.away.is_some());
    shown::write(&args, &outcome, (&tally, verdict))?;
    if let Some(path) = &args.save {
        saved::write(path, context, &sessions, &outcome)?;
    }
    context.conclude(shown::table(&tally));
    if let Some(error) = outcome.away {
        return Err(error.into());
    }
    if let Some(word) = shown::word(&tally, allowed) {
        context.say(word);
    }
    Ok(if verdict { Exit::Done } else { Exit::Partial })
}

async fn play(
    args: &Args,
    context: &Context,
    (by, rules): (Vec<By>, Option<Rules>),
    sessions: &[replay::Session],
) -> anyhow::Result<Outcome> {
    let jury = match by.contains(&By::Judge) {
        true => Some(args.judge.jury(context, |url| options(args, url)).await?),
        false => None,
    };
    let options = Options {
        history: args.history.into(),
        overrides: Overrides {
            temperature: args.temperature,
            seed: args.sampling_seed,
            max_tokens: args.max_tokens,
        },
        speed: (args.pace == Pace::Recorded).then_some(args.speed),
        at_once: usize::from(args.concurrency),
        by,
        rules,
        jury,
        tolerance: args.tolerance,
    };
    let (engine, inside) = engine(args, context).await?;
    let total = sessions.iter().map(|session| session.turns.len() as u64).sum();
    let bar = progress::bar(context, "replay", Some(total));
    let outcome = Player::new(&engine, &options).play(sessions, &|_| bar.inc(1)).await;
    bar.finish_and_clear();
    if let Some(inside) = inside {
        inside.shutdown().await;
    }
    Ok(outcome)
}

/// Returns the engine to ask, and the engine itself if it runs in this process.
async fn engine(args: &Args, context: &Context) -> anyhow::Result<(Engine, Option<Embedded>)> {
    let options = |url: &str| options(args, url);
    match (&args.engine, &args.model) {
        (Some(url), _) => {
            let key = embedded::key(&context.command, args.engine_key_file.as_deref())?;
            let options = EngineOptions { key, model: args.engine_model.clone(), ..options(url) };
            Ok((Engine::connect(options).await?, None))
        }
        (None, Some(folder)) => {
            let inside = Embedded::start(context, folder, None, &args.dtype).await?;
            Ok((Engine::connect(options(&inside.url())).await?, Some(inside)))
        }
        (None, None) => Err(Failure::usage("nobody to ask").into()),
    }
}

/// How an engine is to be asked.
fn options(args: &Args, url: &str) -> EngineOptions {
    let mut options = EngineOptions::new(url);
    options.timeout = args.timeout;
    options.retries.tries = args.retries.saturating_add(1);
    options
}

impl From<HistoryName> for replay::History {
    fn from(name: HistoryName) -> Self {
        match name {
            HistoryName::Fixed => Self::Fixed,
            HistoryName::OnPolicy => Self::OnPolicy,
        }
    }
}

impl ByName {
    fn way(self) -> By {
        match self {
            Self::Exact => By::Exact,
            Self::Rules => By::Rules,
            Self::Judge => By::Judge,
            Self::LogProb => By::LogProb,
        }
    }
}

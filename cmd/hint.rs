//! `oclaw hint`.

use std::cell::RefCell;
use std::collections::BTreeMap;

use clap::ValueEnum;
use comfy_table::Table;
use oclaw::hint::{self, Found, Keep};
use oclaw::judge::{Exchange, Quoting};
use oclaw::stage::{self, Output, Tally};
use oclaw::table::Source;
use oclaw::trajectory::{Turn, Writer};

use crate::asking::{self, Asker, Asking, Calls};
use crate::common::Context;
use crate::files::Files;
use crate::follow::{Counting, Worked};
use crate::progress;
use crate::report::{Exit, Failure};
use crate::spending::{BUDGET, Spent};

/// Say what each answer should have been told beforehand.
///
/// Fills `hints`, `hint_votes` and `hint_error`. A model (`--engine` or
/// `--model`) is asked `--votes` times whether the next state reveals something
/// that would have helped: `\boxed{1}` with the hint between `[HINT_START]` and
/// `[HINT_END]`, or `\boxed{-1}`. A hint is accepted if it has more than 10
/// characters, no more than `--max-hint-chars`, and nothing that looks like a
/// control token. Of the accepted ones each is kept once, the shortest first,
/// three at most. None accepted is null, never an empty hint.
///
/// `--from-feedback` asks nobody: where the reward (explicit, else the score) is
/// negative, the hint is the feedback text, else what the user wrote next,
/// without the client's stamps.
///
/// Answers are kept in a file (`--cache`), so that the same run asks nothing twice;
/// a spent budget leaves the other turns with the error `budget`; `--dry-run` says
/// what there is to ask. All of it is as in `oclaw judge`, and so is `--follow`.
///
/// Exit code 3 means that some turn was tried and no call gave a verdict, or a
/// hint had to be refused, or that the budget left a turn out.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    files: Files,
    #[command(flatten)]
    asking: Asking,
    /// Take the person's own words instead of asking a model
    #[arg(long, conflicts_with_all = ["engine", "model"])]
    from_feedback: bool,
    /// Only turns with a negative reward or with feedback
    #[arg(long)]
    only_negative: bool,
    /// Which accepted hints to keep
    #[arg(long, value_enum, value_name = "WHICH", default_value_t = KeepName::All)]
    keep: KeepName,
    /// Longest hint, in characters
    #[arg(long, value_name = "N", default_value_t = 2000)]
    max_hint_chars: usize,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum KeepName {
    /// Up to three, shortest first
    All,
    /// The longest alone
    Longest,
}

/// Finds hints for a table.
pub(crate) fn run(args: Args, context: &Context) -> anyhow::Result<Exit> {
    if !args.from_feedback && !args.asking.anybody() {
        return Err(Failure::usage("nobody to ask for hints")
            .hint("give `--engine URL`, `--model DIR` or `--from-feedback`")
            .into());
    }
    let prompt = args.asking.prompt(hint::PROMPT)?;
    if args.asking.budget.dry_run {
        return context.block_on(foretell(&args, context, &prompt));
    }
    let counts = RefCell::default();
    context.block_on(async {
        let files = &args.files;
        let Some(route) = files.route(context)? else {
            let source = files.open()?;
            let asker = match args.from_feedback {
                true => None,
                false => Some(args.asking.connect(context, true).await?),
            };
            let by = By { args: &args, context, asker, prompt, counts };
            let output = files.output();
            let table = by.table(source, &output);
            let done = match &by.asker {
                Some(asker) => asker.with_what_is_kept(table).await,
                None => table.await,
            };
            let table = by.finish().await;
            let tally = done?;
            context.conclude(table(&tally));
            return Ok(if tally.failed > 0 { Exit::Partial } else { Exit::Done });
        };
        let asker = match args.from_feedback {
            true => None,
            false => match args.asking.connect_for(&route, context).await? {
                None => return Ok(Exit::Done),
                asker => asker,
            },
        };
        let by = By { args: &args, context, asker, prompt, counts };
        let shard = async |source, output: &Output| by.shard(source, output).await;
        let spent = || by.asker.as_ref().is_some_and(Asker::is_spent);
        let followed = route.run(shard, spent).await;
        let table = by.finish().await;
        let followed = followed?;
        let table = table(&followed.tally);
        route.conclude(followed, table)
    })
}

/// Says what asking for hints would come to.
async fn foretell(args: &Args, context: &Context, prompt: &str) -> anyhow::Result<Exit> {
    let source = args.files.open_to_look()?;
    let plan = args.files.plan(context, Writer::Hint, &source)?;
    let mut forecast = args.asking.forecast(context).await?;
    let look = async |turn: Turn| {
        let wanted = !args.only_negative || hint::is_negative(&turn);
        if wanted
            && !args.from_feedback
            && hint::is_hinted(&turn)
            && let Ok(exchange) = Exchange::of(&turn, Quoting::default())
        {
            forecast.add(&hint::ask(prompt, &exchange));
        }
    };
    let tally = stage::survey(source, &plan, look).await?;
    forecast.print(&tally)?;
    Ok(Exit::Done)
}

/// Who is asked.
struct By<'a> {
    args: &'a Args,
    context: &'a Context,
    asker: Option<Asker<'a>>,
    prompt: String,
    counts: RefCell<Counts>,
}

impl<'a> By<'a> {
    /// Finds hints for one table.
    async fn table(&self, source: Source, output: &Output) -> anyhow::Result<Tally> {
        let Self { args, context, .. } = self;
        let mut plan = args.files.plan(context, Writer::Hint, &source)?;
        plan.at_once = args.asking.at_once as usize;
        if let Some(asker) = &self.asker {
            asker.count_into(&mut plan);
        }
        let bar = progress::bar(context, "hint", source.total_rows());
        let watch = |tally: &Tally| bar.set_position(tally.rows);
        let note = async |turn| self.note(turn).await;
        let done = stage::annotate(source, output, &plan, note, &watch).await;
        bar.finish_and_clear();
        Ok(done?)
    }

    /// Finds hints for one shard of a followed folder.
    async fn shard(&self, source: Source, output: &Output) -> anyhow::Result<Worked> {
        let counting = Counting::start(&self.counts);
        let table = self.table(source, output);
        let tally = match &self.asker {
            None => Ok(table.await?),
            Some(asker) => asker.attend(table).await?,
        };
        Ok(match tally {
            Ok(tally) => counting.settle(tally, |counts| counts.with_hints),
            Err(reason) => Worked::Away(reason),
        })
    }

    /// Ends the connection and returns what makes the closing table.
    async fn finish(self) -> impl Fn(&Tally) -> Table + use<'a> {
        let calls = match self.asker {
            Some(asker) => Some(asker.finish().await),
            None => None,
        };
        let counts = self.counts.into_inner();
        move |tally: &Tally| counts.table(tally, calls.as_ref())
    }

    async fn note(&self, mut turn: Turn) -> Turn {
        Found::default().record(&mut turn);
        if self.args.only_negative && !hint::is_negative(&turn) {
            return turn;
        }
        let found = match &self.asker {
            None => hint::from_feedback(&turn, self.args.max_hint_chars),
            Some(_) if !hint::is_hinted(&turn) => return turn,
            Some(asker) => match Exchange::of(&turn, Quoting::default()) {
                Ok(exchange) => match self.ask(asker, &exchange).await {
                    Ok(found) => found,
                    Err(Spent) => {
                        turn.hint_error = Some(BUDGET.to_owned());
                        return turn;
                    }
                },
                Err(error) => {
                    turn.hint_error = Some(error.to_string());
                    return turn;
                }
            },
        };
        self.counts.borrow_mut().add(&found);
        found.record(&mut turn);
        turn
    }

    async fn ask(&self, asker: &Asker<'_>, exchange: &Exchange) -> Result<Found, Spent> {
        let replies = asker.ask(&hint::ask(&self.prompt, exchange)).await?;
        let keep = match self.args.keep {
            KeepName::All => Keep::All,
            KeepName::Longest => Keep::Longest,
        };
        let found = hint::gather(replies, keep, self.args.max_hint_chars);
        found.faults.iter().for_each(|fault| asker.count_fault(fault));
        Ok(found)
    }
}

#[derive(Debug, Clone, Default)]
struct Counts {
    with_hints: u64,
    hints: u64,
    votes: BTreeMap<i8, u64>,
    refused: BTreeMap<&'static str, u64>,
}

impl Counts {
    fn add(&mut self, found: &Found) {
        self.with_hints += u64::from(found.hints.is_some());
        self.hints += found.hints.as_ref().map_or(0, Vec::len) as u64;
        for vote in found.votes.iter().flatten().flatten() {
            *self.votes.entry(*vote).or_default() += 1;
        }
        for refused in &found.refused {
            *self.refused.entry(refused.as_str()).or_default() += 1;
        }
    }

    fn table(&self, tally: &Tally, calls: Option<&Calls>) -> Table {
        let mut table = asking::closing_table();
        table.add_row(["turns".to_owned(), tally.rows.to_string()]);
        if tally.kept > 0 {
            table.add_row(["  noted before".to_owned(), tally.kept.to_string()]);
        }
        table.add_row(["  with hints".to_owned(), self.with_hints.to_string()]);
        table.add_row(["  failed".to_owned(), tally.failed.to_string()]);
        table.add_row(["hints kept".to_owned(), self.hints.to_string()]);
        for (reason, count) in &self.refused {
            table.add_row([format!("hints refused: {reason}"), count.to_string()]);
        }
        if let Some(calls) = calls {
            let count = |value| self.votes.get(&value).copied().unwrap_or_default();
            table.add_row(["votes +1 / -1".to_owned(), format!("{} / {}", count(1), count(-1))]);
            calls.rows(&mut table);
        }
        table
    }
}

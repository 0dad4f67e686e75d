//! `oclaw judge`.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use comfy_table::Table;
use oclaw::judge::{self, Exchange, Quoting, Rules, Verdict};
use oclaw::stage::{self, Output, Tally};
use oclaw::table::Source;
use oclaw::trajectory::{Turn, Writer};

use crate::asking::{self, Asker, Asking, Calls};
use crate::common::{Context, Printing as _};
use crate::files::Files;
use crate::follow::{Counting, Worked};
use crate::progress;
use crate::report::{Exit, Failure};
use crate::spending::{BUDGET, Spent};

/// Judge each answer by what came after it: 1 good, -1 to be done over, 0 open.
///
/// Fills `score`, `votes`, `judge_text` and `judge_error`. Turns that nothing
/// came after, and turns with an explicit reward, which outranks any judge, are
/// left without a score; that is no failure. Of the others each is put to a
/// model `--votes` times (`--engine` or `--model`), or to rules (`--rules`).
///
/// A vote is the last `\boxed{1}`, `\boxed{0}` or `\boxed{-1}` of the answer
/// outside its thinking: an optional sign and one digit, nothing else in the
/// braces. Any other number, a cut answer, or none at all is no vote. The most
/// frequent vote is the score, a tie is 0, no vote is null with the reason in
/// `judge_error`.
///
/// The model sees the last request (4000 characters of it), the answer (8000)
/// and the next state (8000, shared evenly by its messages); of a longer text
/// the first two thirds and the last third, with the number of characters left
/// out between. It never sees log-probs, ids or the rest of the conversation.
///
/// Answers are kept in a file (`--cache`) under what was asked of which model, so
/// that a run that was killed, or is made again, asks only what nobody answered
/// yet, and a server that is away is missed only by a question that no kept answer
/// fits. An answer without a verdict is kept as well: `--seed` asks anew. A budget
/// (`--max-requests`, `--max-tokens-total`, `--max-cost`) that is spent leaves the
/// other turns without a score and with the error `budget`; `--fill` goes on.
/// `--dry-run` says what there is to ask.
///
/// `--follow FOLDER -o OUT` judges each shard of a folder as it comes: `*.parquet`
/// of the folder itself, ordered by the first `created_at` and the name, into a
/// file of the same name in OUT, which is what makes it done. A server that is
/// away is waited for. A shard that fails is tried again (`--shard-tries`), then
/// listed in OUT/failed.jsonl until the next start, and the next one goes on. A
/// signal drops the shard at hand, whose answers are kept, and ends with exit code
/// 0; a spent budget ends with 3, after the shard. OUT has one writer. Killed at
/// any point, the same command goes on where it was.
///
/// Exit code 3 means that some turn was tried and got no score, or that the
/// budget left one out.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    files: Files,
    #[command(flatten)]
    asking: Asking,
    /// Judge by rules: the built-in ones, or those of a TOML file
    #[arg(
        long,
        value_name = "FILE",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "",
        conflicts_with_all = ["engine", "model"]
    )]
    rules: Option<String>,
    /// Print the rules (the built-in ones are the example to start from), and stop
    #[arg(long)]
    show_rules: bool,
}

/// Judges a table.
pub(crate) fn run(args: Args, context: &Context) -> anyhow::Result<Exit> {
    let file = args.rules.as_deref().filter(|file| !file.is_empty());
    if args.show_rules {
        return show_rules(file);
    }
    let rules = match (&args.rules, file) {
        (None, _) => None,
        (Some(_), None) => Some(Rules::built_in()?),
        (Some(_), Some(file)) => Some(Rules::load(Path::new(file))?),
    };
    if rules.is_none() && !args.asking.anybody() {
        return Err(Failure::usage("nobody to judge")
            .hint("give `--engine URL`, `--model DIR` or `--rules`")
            .into());
    }
    let prompt = args.asking.prompt(judge::PROMPT)?;
    if args.asking.budget.dry_run {
        return context.block_on(foretell(&args, context, rules.is_none(), &prompt));
    }
    let counts = RefCell::default();
    context.block_on(async {
        let files = &args.files;
        let Some(route) = files.route(context)? else {
            let source = files.open()?;
            let asker = match rules {
                Some(_) => None,
                None => Some(args.asking.connect(context, true).await?),
            };
            let by = By { args: &args, context, rules, asker, prompt, counts };
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
        let asker = match rules {
            Some(_) => None,
            None => match args.asking.connect_for(&route, context).await? {
                None => return Ok(Exit::Done),
                asker => asker,
            },
        };
        let by = By { args: &args, context, rules, asker, prompt, counts };
        let shard = async |source, output: &Output| by.shard(source, output).await;
        let spent = || by.asker.as_ref().is_some_and(Asker::is_spent);
        let followed = route.run(shard, spent).await;
        let table = by.finish().await;
        let followed = followed?;
        let table = table(&followed.tally);
        route.conclude(followed, table)
    })
}

/// Says what judging would come to.
async fn foretell(
    args: &Args,
    context: &Context,
    asks: bool,
    prompt: &str,
) -> anyhow::Result<Exit> {
    let source = args.files.open_to_look()?;
    let plan = args.files.plan(context, Writer::Judge, &source)?;
    let mut forecast = args.asking.forecast(context).await?;
    let look = async |turn: Turn| {
        if asks
            && judge::is_judged(&turn)
            && let Ok(exchange) = Exchange::of(&turn, Quoting::default())
        {
            forecast.add(&judge::ask(prompt, &exchange));
        }
    };
    let tally = stage::survey(source, &plan, look).await?;
    forecast.print(&tally)?;
    Ok(Exit::Done)
}

fn show_rules(file: Option<&str>) -> anyhow::Result<Exit> {
    let text = match file {
        None => judge::rules::BUILT_IN.to_owned(),
        Some(file) => {
            Rules::load(Path::new(file))?;
            std::fs::read_to_string(file)?
        }
    };
    std::io::stdout().write_all(text.as_bytes()).printed()?;
    Ok(Exit::Done)
}

/// Who judges.
struct By<'a> {
    args: &'a Args,
    context: &'a Context,
    rules: Option<Rules>,
    asker: Option<Asker<'a>>,
    prompt: String,
    counts: RefCell<Counts>,
}

impl<'a> By<'a> {
    /// Judges one table.
    async fn table(&self, source: Source, output: &Output) -> anyhow::Result<Tally> {
        let Self { args, context, .. } = self;
        let mut plan = args.files.plan(context, Writer::Judge, &source)?;
        plan.at_once = args.asking.at_once as usize;
        if let Some(asker) = &self.asker {
            asker.count_into(&mut plan);
        }
        let bar = progress::bar(context, "judge", source.total_rows());
        let watch = |tally: &Tally| bar.set_position(tally.rows);
        let note = async |turn| self.note(turn).await;
        let done = stage::annotate(source, output, &plan, note, &watch).await;
        bar.finish_and_clear();
        Ok(done?)
    }

    /// Judges one shard of a followed folder.
    async fn shard(&self, source: Source, output: &Output) -> anyhow::Result<Worked> {
        let counting = Counting::start(&self.counts);
        let table = self.table(source, output);
        let tally = match &self.asker {
            None => Ok(table.await?),
            Some(asker) => asker.attend(table).await?,
        };
        Ok(match tally {
            Ok(tally) => counting.settle(tally, Counts::judged),
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
        judge::clear(&mut turn);
        if !judge::is_judged(&turn) {
            return turn;
        }
        let verdict = match Exchange::of(&turn, Quoting::default()) {
            Ok(exchange) => match self.judge(&exchange).await {
                Ok(verdict) => verdict,
                Err(Spent) => {
                    turn.judge_error = Some(BUDGET.to_owned());
                    self.counts.borrow_mut().left_out += 1;
                    return turn;
                }
            },
            Err(error) => {
                turn.judge_error = Some(error.to_string());
                self.counts.borrow_mut().unusable += 1;
                return turn;
            }
        };
        self.counts.borrow_mut().add(&verdict);
        verdict.record(&mut turn);
        turn
    }

    async fn judge(&self, exchange: &Exchange) -> Result<Verdict, Spent> {
        if let Some(rules) = &self.rules {
            return Ok(rules.judge(exchange));
        }
        let Some(asker) = &self.asker else {
            return Ok(Verdict::default());
        };
        let replies = asker.ask(&judge::ask(&self.prompt, exchange)).await?;
        let verdict = judge::verdict(replies);
        verdict.faults.iter().flatten().for_each(|fault| asker.count_fault(fault));
        Ok(verdict)
    }
}

#[derive(Debug, Clone, Default)]
struct Counts {
    scores: BTreeMap<i8, u64>,
    votes: BTreeMap<i8, u64>,
    ties: u64,
    no_vote: u64,
    unusable: u64,
    left_out: u64,
}

impl Counts {
    fn add(&mut self, verdict: &Verdict) {
        match verdict.score() {
            Some(score) => *self.scores.entry(score).or_default() += 1,
            None => self.no_vote += 1,
        }
        for vote in verdict.votes.iter().flatten() {
            *self.votes.entry(*vote).or_default() += 1;
        }
        self.ties += u64::from(verdict.tied());
    }

    fn judged(&self) -> u64 {
        self.scores.values().sum()
    }

    fn table(&self, tally: &Tally, calls: Option<&Calls>) -> Table {
        let judged = self.judged();
        let failed = self.no_vote + self.unusable + self.left_out;
        let each = |counts: &BTreeMap<i8, u64>| {
            let count = |value| counts.get(&value).copied().unwrap_or_default();
            format!("{} / {} / {}", count(1), count(0), count(-1))
        };
        let mut table = asking::closing_table();
        table.add_row(["turns".to_owned(), tally.rows.to_string()]);
        if tally.kept > 0 {
            table.add_row(["  scored before".to_owned(), tally.kept.to_string()]);
        }
        table.add_row(["  judged".to_owned(), judged.to_string()]);
        table.add_row(["  failed".to_owned(), failed.to_string()]);
        let rest = tally.rows.saturating_sub(judged + failed + tally.kept);
        table.add_row(["  nothing to judge".to_owned(), rest.to_string()]);
        table.add_row(["scores +1 / 0 / -1".to_owned(), each(&self.scores)]);
        table.add_row(["votes +1 / 0 / -1".to_owned(), each(&self.votes)]);
        table.add_row(["ties".to_owned(), self.ties.to_string()]);
        if let Some(calls) = calls {
            calls.rows(&mut table);
        }
        table
    }
}

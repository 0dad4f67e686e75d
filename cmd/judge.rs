//! `oclaw judge`.

mod calibrate;
mod labels;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use comfy_table::Table;
use oclaw::judge::{self, Exchange, Quoting, Rules, Verdict};
use oclaw::stage::Tally;
use oclaw::trajectory::{Turn, Writer};
use serde_json::Value;

use crate::asking::stage::{self, Asks, By};
use crate::asking::{Asking, Calls, Needed, Prompts};
use crate::common::{Context, Printing as _};
use crate::files::Files;
use crate::report::{Exit, Failure};
use crate::spending::{BUDGET, Spent};

/// The built-in instruction, and what any other must say.
const NEEDED: Needed = Needed { built_in: judge::PROMPT, words: &["\\boxed"] };

/// Judge each answer by what came after it: 1 good, -1 to be done over, 0 open.
///
/// Fills `score`, `votes`, `judge_text` and `judge_error`. Turns that nothing
/// came after, and turns with an explicit reward, which outranks any judge, are
/// left without a score; that is no failure. Of the others each is put to a
/// model `--votes` times (`--engine` or `--model`), or to rules (`--rules`), or, if
/// both are given, to the model only where no rule decides.
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
/// out between; of more than 100 messages the first 66 and the last 34, with the
/// number of those left out. It never sees log-probs, ids or the rest of the
/// conversation.
///
/// Rules are a TOML file, tried from the top: each `[[rule]]` has a `name`, a `score`
/// and conditions about flags and exit codes of tools, words of either side, lengths
/// and formats. `--show-rules` prints the built-in ones, with all conditions
/// explained. Where no rule decides, and there is no model, the score is 0.
///
/// Several servers of one model (`--engine` given again, or a list in the settings)
/// share the calls: each goes where the fewest are under way, and one that is gone is
/// left out and tried again later. If all are gone, the run ends with exit code 4 and
/// writes nothing, or with 2 if they refuse the key; what was answered is kept. They must
/// agree on the model's name and, where they tell it, on the version of its weights: kept
/// answers are the model's, not a server's.
///
/// `--calibrate LABELS` compares scores with people's: a CSV file with a column
/// `label` (-1, 0 or 1; empty is not labelled) and `turn_id`, or `session_id` and
/// `turn`. It prints accuracy, Cohen's kappa, the counts of each pair and the entropy
/// of the votes, by who came next; `--format json` and `--format csv` are for scripts.
/// Given somebody to judge, the labelled turns are judged now, else the scores of the
/// table are taken; no table is written. Exit code 3 means that some label has no turn
/// or its turn no score.
///
/// `--at-once` calls are under way together, so that a file takes no less than its
/// calls, divided by that, times the seconds of one. 64 keep a server busy that
/// batches its requests (SGLang, vLLM, a gateway); more help as long as its answers
/// do not slow down, fewer keep clear of a gateway's limit. llama.cpp and a model in
/// this process answer a few at a time and get 16. Memory grows with the calls under
/// way, not with the file.
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
    /// Judge by rules: the built-in ones, or those of a TOML file; a model is asked the rest
    #[arg(
        long,
        value_name = "FILE",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = ""
    )]
    rules: Option<String>,
    /// Print the rules (the built-in ones are the example to start from), and stop
    #[arg(long)]
    show_rules: bool,
    /// Compare scores with the labels of people in this CSV file, and write no table
    #[arg(long, value_name = "LABELS", conflicts_with_all = ["output", "replace", "fill", "follow", "dry_run"])]
    calibrate: Option<PathBuf>,
}

/// Judges a table.
pub(crate) fn run(args: Args, context: &Context) -> anyhow::Result<Exit> {
    let file = args.rules.as_deref().filter(|file| !file.is_empty());
    if args.show_rules {
        return show_rules(file);
    }
    let prompts = args.asking.prompts.read(&NEEDED)?;
    if args.asking.prompts.show_prompt {
        return prompts.show();
    }
    let rules = match (&args.rules, file) {
        (None, _) => None,
        (Some(_), None) => Some(Rules::built_in()?),
        (Some(_), Some(file)) => Some(Rules::load(Path::new(file))?),
    };
    let asks = args.asking.anybody();
    if let Some(labels) = &args.calibrate {
        let judging = (rules.is_some() || asks).then_some(Judging { rules, asks, prompts });
        return context.block_on(calibrate::run((&args, labels), judging, context));
    }
    if rules.is_none() && !asks {
        return Err(Failure::usage("nobody to judge")
            .hint("give `--engine URL`, `--model DIR` or `--rules`")
            .into());
    }
    let judging = Judging { rules, asks, prompts };
    context.block_on(stage::run(&judging, (&args.files, &args.asking), context))
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

/// Who judges: rules, a model, or a model where no rule decides.
struct Judging {
    rules: Option<Rules>,
    asks: bool,
    prompts: Prompts,
}

impl Judging {
    /// Returns what the rules say, if they decide.
    fn by_rules(&self, exchange: &Exchange) -> Option<Verdict> {
        let rules = self.rules.as_ref()?;
        match rules.decide(exchange).rule {
            None if self.asks => None,
            _ => Some(rules.judge(exchange)),
        }
    }

    fn messages(&self, exchange: &Exchange) -> Vec<Value> {
        judge::ask(self.prompts.of(exchange.kind), exchange)
    }

    async fn judge(&self, exchange: &Exchange, by: &By<'_, Self>) -> Result<Verdict, Spent> {
        if let Some(verdict) = self.by_rules(exchange) {
            by.counts.borrow_mut().by_rules += 1;
            return Ok(verdict);
        }
        let Some(asker) = &by.asker else {
            return Ok(Verdict::default());
        };
        let replies = asker.ask(&self.messages(exchange)).await?;
        let verdict = judge::verdict(replies);
        verdict.faults.iter().flatten().for_each(|fault| asker.count_fault(fault));
        Ok(verdict)
    }
}

impl Asks for Judging {
    type Counts = Counts;

    const WRITER: Writer = Writer::Judge;

    fn asks(&self) -> bool {
        self.asks
    }

    fn question(&self, turn: &Turn) -> Option<Vec<Value>> {
        let exchange = match judge::is_judged(turn) {
            true => Exchange::of(turn, Quoting::default()).ok()?,
            false => return None,
        };
        self.by_rules(&exchange).is_none().then(|| self.messages(&exchange))
    }

    async fn note(&self, mut turn: Turn, by: &By<'_, Self>) -> Turn {
        judge::clear(&mut turn);
        if !judge::is_judged(&turn) {
            return turn;
        }
        let verdict = match Exchange::of(&turn, Quoting::default()) {
            Ok(exchange) => match self.judge(&exchange, by).await {
                Ok(verdict) => verdict,
                Err(Spent) => {
                    turn.judge_error = Some(BUDGET.to_owned());
                    by.counts.borrow_mut().left_out += 1;
                    return turn;
                }
            },
            Err(error) => {
                turn.judge_error = Some(error.to_string());
                by.counts.borrow_mut().unusable += 1;
                return turn;
            }
        };
        by.counts.borrow_mut().add(&verdict);
        verdict.record(&mut turn);
        turn
    }

    fn noted(counts: &Counts) -> u64 {
        counts.judged()
    }

    fn rows(counts: &Counts, tally: &Tally, calls: Option<&Calls>, table: &mut Table) {
        let judged = counts.judged();
        let failed = counts.no_vote + counts.unusable + counts.left_out;
        let each = |counts: &BTreeMap<i8, u64>| {
            let count = |value| counts.get(&value).copied().unwrap_or_default();
            format!("{} / {} / {}", count(1), count(0), count(-1))
        };
        table.add_row(["  judged".to_owned(), judged.to_string()]);
        if calls.is_some() && counts.by_rules > 0 {
            table.add_row(["    by rules, without a call".to_owned(), counts.by_rules.to_string()]);
        }
        table.add_row(["  failed".to_owned(), failed.to_string()]);
        let rest = tally.rows.saturating_sub(judged + failed + tally.kept);
        table.add_row(["  nothing to judge".to_owned(), rest.to_string()]);
        table.add_row(["scores +1 / 0 / -1".to_owned(), each(&counts.scores)]);
        table.add_row(["votes +1 / 0 / -1".to_owned(), each(&counts.votes)]);
        table.add_row(["ties".to_owned(), counts.ties.to_string()]);
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
    by_rules: u64,
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
}

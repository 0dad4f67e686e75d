//! `oclaw hint`.

use std::collections::BTreeMap;

use clap::ValueEnum;
use comfy_table::Table;
use oclaw::hint::{self, Found, Keep};
use oclaw::judge::{Exchange, Quoting};
use oclaw::stage::Tally;
use oclaw::trajectory::{Turn, Writer};
use serde_json::Value;

use crate::asking::stage::{self, Asks, By};
use crate::asking::{Asker, Asking, Calls, Needed, Prompts};
use crate::common::Context;
use crate::files::Files;
use crate::report::{Exit, Failure};
use crate::spending::{BUDGET, Spent};

/// The built-in instruction, and what any other must say.
const NEEDED: Needed =
    Needed { built_in: hint::PROMPT, words: &["\\boxed", "[HINT_START]", "[HINT_END]"] };

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
/// `--only-negative` asks about fewer turns: those with a negative reward (explicit,
/// else the score) and those with feedback.
///
/// `--from-feedback` asks nobody: where the reward (explicit, else the score) is
/// negative, the hint is the feedback text, else what the user wrote next,
/// without the client's stamps.
///
/// Answers are kept in a file (`--cache`), so that the same run asks nothing twice;
/// a spent budget leaves the other turns with the error `budget`; `--dry-run` says
/// what there is to ask. All of it is as in `oclaw judge`, and so are `--follow` and
/// several servers (`--engine` given again).
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
    let prompts = args.asking.prompts.read(&NEEDED)?;
    if args.asking.prompts.show_prompt {
        return prompts.show();
    }
    if !args.from_feedback && !args.asking.anybody() {
        return Err(Failure::usage("nobody to ask for hints")
            .hint("give `--engine URL`, `--model DIR` or `--from-feedback`")
            .into());
    }
    let hinting = Hinting { args: &args, prompts };
    context.block_on(stage::run(&hinting, (&args.files, &args.asking), context))
}

/// How hints are found.
struct Hinting<'a> {
    args: &'a Args,
    prompts: Prompts,
}

impl Asks for Hinting<'_> {
    type Counts = Counts;

    const WRITER: Writer = Writer::Hint;

    fn asks(&self) -> bool {
        !self.args.from_feedback
    }

    fn question(&self, turn: &Turn) -> Option<Vec<Value>> {
        let wanted = !self.args.only_negative || hint::is_negative(turn);
        let exchange = match wanted && hint::is_hinted(turn) {
            true => Exchange::of(turn, Quoting::default()).ok()?,
            false => return None,
        };
        Some(hint::ask(self.prompts.of(exchange.kind), &exchange))
    }

    async fn note(&self, mut turn: Turn, by: &By<'_, Self>) -> Turn {
        Found::default().record(&mut turn);
        if self.args.only_negative && !hint::is_negative(&turn) {
            return turn;
        }
        let found = match &by.asker {
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
        by.counts.borrow_mut().add(&found);
        found.record(&mut turn);
        turn
    }

    fn noted(counts: &Counts) -> u64 {
        counts.with_hints
    }

    fn rows(counts: &Counts, tally: &Tally, calls: Option<&Calls>, table: &mut Table) {
        table.add_row(["  with hints".to_owned(), counts.with_hints.to_string()]);
        table.add_row(["  failed".to_owned(), tally.failed.to_string()]);
        table.add_row(["hints kept".to_owned(), counts.hints.to_string()]);
        for (reason, count) in &counts.refused {
            table.add_row([format!("hints refused: {reason}"), count.to_string()]);
        }
        if calls.is_some() {
            let count = |value| counts.votes.get(&value).copied().unwrap_or_default();
            table.add_row(["votes +1 / -1".to_owned(), format!("{} / {}", count(1), count(-1))]);
        }
    }
}

impl Hinting<'_> {
    async fn ask(&self, asker: &Asker<'_>, exchange: &Exchange) -> Result<Found, Spent> {
        let replies = asker.ask(&hint::ask(self.prompts.of(exchange.kind), exchange)).await?;
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
}

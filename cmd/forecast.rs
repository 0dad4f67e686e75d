//! What `--dry-run` prints: how much there is to ask, without asking.

use std::io::Write;

use oclaw::stage::Tally;
use serde_json::Value;

use crate::answers::Answers;
use crate::asking::{self, Asking, characters};
use crate::common::Printing as _;
use crate::spending::{Budget, Meter, Tokens, guess};

/// A count of what asking would come to.
pub(crate) struct Forecast<'a> {
    asking: &'a Asking,
    answers: Answers,
    whom: Option<Value>,
    seed: u64,
    asked: u64,
    expected: Expected,
    meter: Meter,
}

/// Numbers that a dry run prints.
#[derive(Debug, Default)]
pub(crate) struct Expected {
    pub(crate) calls: u64,
    pub(crate) hits: u64,
    pub(crate) prompt_tokens: u64,
    /// Of answers, at most.
    pub(crate) answer_tokens: u64,
    /// What the budget would leave out, were every answer as long as it may be.
    pub(crate) left_out: u64,
}

impl<'a> Forecast<'a> {
    pub(crate) fn new(
        asking: &'a Asking,
        answers: Answers,
        whom: Option<Value>,
        seed: u64,
    ) -> Self {
        let meter = Meter::new(&asking.budget);
        Self { asking, answers, whom, seed, asked: 0, expected: Expected::default(), meter }
    }

    /// Counts a turn that would be asked about.
    pub(crate) fn add(&mut self, messages: &[Value]) {
        self.asked += 1;
        let votes = u64::from(self.asking.votes);
        let hits = match &self.whom {
            None => 0,
            Some(whom) => {
                let request = self.asking.request(messages, self.seed);
                let question = self.answers.question(whom, &request);
                let kept = |vote: &u32| self.answers.find::<Value>(&question.vote(*vote)).is_some();
                (0..self.asking.votes).filter(kept).count() as u64
            }
        };
        let calls = votes - hits;
        if calls > 0 && self.meter.grant(calls).is_err() {
            self.expected.left_out += 1;
            return;
        }
        let prompts = calls * guess(characters(messages));
        let answers = calls * u64::from(self.asking.max_tokens);
        self.meter.tokens(Tokens::known(prompts, answers));
        self.expected.hits += hits;
        self.expected.calls += calls;
        self.expected.prompt_tokens += prompts;
        self.expected.answer_tokens += answers;
    }

    /// Prints the count.
    pub(crate) fn print(&self, tally: &Tally) -> anyhow::Result<()> {
        let how = "guessed: 4 characters make one";
        print(tally, self.asked, &self.expected, (&self.asking.budget, how))
    }
}

/// Prints how many turns, calls and tokens there would be, and what they cost at
/// most.
pub(crate) fn print(
    tally: &Tally,
    asked: u64,
    expected: &Expected,
    (budget, how): (&Budget, &str),
) -> anyhow::Result<()> {
    let mut table = asking::closing_table();
    table.add_row(["turns".to_owned(), tally.rows.to_string()]);
    if tally.kept > 0 {
        table.add_row(["  noted before".to_owned(), tally.kept.to_string()]);
    }
    table.add_row(["  to ask about".to_owned(), asked.to_string()]);
    table.add_row(["calls".to_owned(), expected.calls.to_string()]);
    table.add_row(["cache hits".to_owned(), expected.hits.to_string()]);
    table.add_row([format!("prompt tokens ({how})"), expected.prompt_tokens.to_string()]);
    table.add_row(["answer tokens, at most".to_owned(), expected.answer_tokens.to_string()]);
    if let Some(cost) = budget.cost(expected.prompt_tokens, expected.answer_tokens) {
        table.add_row(["cost, at most".to_owned(), format!("{cost:.6}")]);
    }
    if expected.left_out > 0 {
        table.add_row(["left out: budget, at most".to_owned(), expected.left_out.to_string()]);
    }
    writeln!(std::io::stdout(), "{table}").printed()?;
    Ok(())
}

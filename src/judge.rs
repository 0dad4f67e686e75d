//! The binary judge: what came after an answer says whether it was good.
//!
//! Three pure parts around one call: [`ask`] makes a prompt of a turn,
//! [`read`] makes a vote of the reply, [`majority`] makes a score of the votes.
//! [`rules`] judge without any model. A vote that cannot be read is no vote and
//! never a number. Absent on purpose: HTTP, files of turns, the loop over them.

mod agreement;
mod exchange;
mod quote;
mod reply;
pub mod rules;

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::trajectory::Turn;
use crate::trajectory::words::NextStateKind;

pub use agreement::{Agreement, SCORES, entropy};
pub use exchange::{Exchange, Shown};
pub use quote::{Quoting, quote};
pub use reply::{Fault, final_answer, last_box, reply_is_whole};
pub use rules::Rules;

/// What a judge is told, unless the user brings a text of their own.
pub const PROMPT: &str = include_str!("judge/prompt.txt");

/// What can go wrong before anybody is asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A JSON column of a turn does not hold what it should.
    #[error("turn `{turn}`: `{column}` is not usable: {message}")]
    Turn {
        /// The turn's id.
        turn: String,
        /// The column.
        column: &'static str,
        /// What is wrong with it.
        message: String,
    },
    /// A file of rules is broken.
    #[error("{place}: {message}")]
    Rules {
        /// File and rule.
        place: String,
        /// What is wrong.
        message: String,
    },
    /// A judge's prompt does not say how to answer.
    #[error("prompt `{place}` never says `{lacks}`, so no answer could be read")]
    Prompt {
        /// File.
        place: String,
        /// The words that must stand in it.
        lacks: &'static str,
    },
}

/// One answer of a judge.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Reply {
    /// The answer without its reasoning.
    pub text: String,
    /// Why it ended.
    pub finish_reason: Option<String>,
}

/// What one turn got.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Verdict {
    /// Each vote, in the order of the calls.
    pub votes: Vec<Option<i8>>,
    /// The words behind each vote.
    pub texts: Vec<Option<String>>,
    /// Why each vote is none.
    pub faults: Vec<Option<Fault>>,
}

impl Verdict {
    /// Returns the score, if anybody voted.
    pub fn score(&self) -> Option<i8> {
        majority(&self.votes)
    }

    /// Tells whether the top of the votes is shared.
    pub fn tied(&self) -> bool {
        tied(&self.votes)
    }

    /// Returns why there is no score.
    pub fn error(&self) -> Option<String> {
        self.score().is_none().then(|| reasons(self.faults.iter().flatten()))
    }

    /// Writes the verdict into the turn's columns.
    pub fn record(self, turn: &mut Turn) {
        turn.score = self.score().map(f32::from);
        turn.judge_error = self.error();
        turn.votes = Some(self.votes);
        turn.judge_text = Some(self.texts);
    }
}

/// Tells whether a turn is judged: something came after it, and nobody said its
/// worth by number, which would outrank any judge.
pub fn is_judged(turn: &Turn) -> bool {
    turn.reward_explicit.is_none()
        && matches!(turn.next_state_kind, NextStateKind::User | NextStateKind::Tool)
}

/// Takes the judge's columns off a turn: not judged, nothing failed.
pub fn clear(turn: &mut Turn) {
    turn.score = None;
    turn.votes = None;
    turn.judge_text = None;
    turn.judge_error = None;
}

/// Makes the messages for a judge. What the exchange holds is quoted: it can
/// neither end its section nor hold a verdict that counts.
pub fn ask(prompt: &str, exchange: &Exchange) -> Vec<Value> {
    vec![
        json!({"role": "system", "content": prompt}),
        json!({"role": "user", "content": exchange.sections()}),
    ]
}

/// Reads the vote in a reply: the last well-formed box of the final answer, if
/// it is -1, 0 or 1.
pub fn read(reply: &Reply) -> Result<i8, Fault> {
    reply_is_whole(reply)?;
    match last_box(&final_answer(&reply.text)) {
        None => Err(Fault::Unreadable),
        Some(vote @ -1..=1) => Ok(vote),
        Some(_) => Err(Fault::OutOfRange),
    }
}

/// Makes a verdict of replies, in the order of the calls.
pub fn verdict(replies: Vec<Result<Reply, Fault>>) -> Verdict {
    let mut verdict = Verdict::default();
    for reply in replies {
        let vote = reply.as_ref().map_err(Fault::clone).and_then(read);
        verdict.texts.push(reply.ok().map(|reply| reply.text));
        verdict.faults.push(vote.as_ref().err().cloned());
        verdict.votes.push(vote.ok());
    }
    verdict
}

/// Returns the most frequent vote; 0 if several are; nothing if nobody voted.
pub fn majority(votes: &[Option<i8>]) -> Option<i8> {
    let (most, top) = top(votes)?;
    Some(if top == 1 { most } else { 0 })
}

fn tied(votes: &[Option<i8>]) -> bool {
    top(votes).is_some_and(|(_, top)| top > 1)
}

/// Returns a vote with the highest count, and how many share that count.
fn top(votes: &[Option<i8>]) -> Option<(i8, usize)> {
    let mut counts = BTreeMap::<i8, usize>::new();
    for vote in votes.iter().flatten() {
        *counts.entry(*vote).or_default() += 1;
    }
    let highest = *counts.values().max()?;
    let mut leaders = counts.iter().filter(|(_, count)| **count == highest);
    let (most, _) = leaders.next()?;
    Some((*most, 1 + leaders.count()))
}

/// Lists reasons with their counts, the most frequent first.
pub fn reasons<'a>(faults: impl Iterator<Item = &'a Fault>) -> String {
    let mut counts = BTreeMap::<String, usize>::new();
    for fault in faults {
        *counts.entry(fault.to_string()).or_default() += 1;
    }
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let each = |(reason, count): (String, usize)| match count {
        1 => reason,
        count => format!("{reason} x{count}"),
    };
    counts.into_iter().map(each).collect::<Vec<_>>().join(", ")
}

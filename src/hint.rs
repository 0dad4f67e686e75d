//! Hindsight: what the answer should have been told beforehand.
//!
//! As in the judge, three pure parts around a call: [`ask`], [`read`],
//! [`select`]; and [`from_feedback`], which takes the person's own words and
//! calls nobody. No accepted hint is null, never an empty text.

use std::sync::OnceLock;

use regex::Regex;
use serde_json::Value;

use crate::judge::{Exchange, Fault, Reply, final_answer, last_box, reasons};
use crate::template::{person_text, strip};
use crate::trajectory::Turn;
use crate::trajectory::words::NextStateKind;

/// What a judge is told, unless the user brings a text of their own.
pub const PROMPT: &str = include_str!("hint/prompt.txt");

/// A hint is longer than this many characters.
const LEAST: usize = 10;
/// At most so many hints are kept.
const MOST: usize = 3;

/// Which accepted hints are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// Up to three different ones, shortest first.
    All,
    /// The longest.
    Longest,
}

/// One call's outcome: the verdict and the words between the markers.
#[derive(Debug, Clone, PartialEq)]
pub struct Vote {
    /// 1 (there is a hint), -1 (there is none), nothing if it cannot be read.
    pub vote: Option<i8>,
    /// The words, trimmed; empty if there are none.
    pub hint: String,
}

/// Why a hint that a judge gave is not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// Ten characters or less.
    TooShort,
    /// Over the size limit.
    TooLong,
    /// It holds what looks like a control token of some model.
    ControlTokens,
}

impl Refused {
    /// Returns the reason in words.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::TooShort => "too short",
            Self::TooLong => "too long",
            Self::ControlTokens => "control tokens",
        }
    }
}

/// What one turn got.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Found {
    /// The kept hints.
    pub hints: Option<Vec<String>>,
    /// Each call's verdict.
    pub votes: Option<Vec<Option<i8>>>,
    /// Why calls gave no verdict.
    pub faults: Vec<Fault>,
    /// Why hints were not taken.
    pub refused: Vec<Refused>,
}

impl Found {
    /// Returns why there is no hint, if that is a failure: no call gave a
    /// verdict, or what was given cannot be used. A judge who says that there
    /// is none has not failed, nor has one whose hint says nothing.
    pub fn error(&self) -> Option<String> {
        if self.hints.is_some() {
            return None;
        }
        let refused = self.refused.iter().find(|refused| **refused != Refused::TooShort);
        let silent = self.votes.iter().flatten().all(Option::is_none);
        match refused {
            Some(refused) => Some(format!("hint refused: {}", refused.as_str())),
            None if silent && !self.faults.is_empty() => Some(reasons(self.faults.iter())),
            None => None,
        }
    }

    /// Writes it into the turn's columns.
    pub fn record(self, turn: &mut Turn) {
        turn.hint_error = self.error();
        turn.hints = self.hints;
        turn.hint_votes = self.votes;
    }
}

/// Tells whether hindsight may be asked for: something came after the answer.
pub fn is_hinted(turn: &Turn) -> bool {
    matches!(turn.next_state_kind, NextStateKind::User | NextStateKind::Tool)
}

/// Tells whether the answer was bad, or somebody said something about it.
pub fn is_negative(turn: &Turn) -> bool {
    reward(turn).is_some_and(|reward| reward < 0.0) || turn.feedback_text.is_some()
}

fn reward(turn: &Turn) -> Option<f32> {
    turn.reward_explicit.or(turn.score)
}

/// Makes the messages for a judge.
pub fn ask(prompt: &str, exchange: &Exchange) -> Vec<Value> {
    crate::judge::ask(prompt, exchange)
}

/// Reads a reply: the last box of the final answer, 1 or -1, and the last text
/// between the markers.
pub fn read(reply: &Reply) -> Result<Vote, Fault> {
    crate::judge::reply_is_whole(reply)?;
    Ok(parse(&reply.text))
}

/// Reads the text of a reply.
pub fn parse(text: &str) -> Vote {
    static MARKED: OnceLock<Option<Regex>> = OnceLock::new();
    let text = final_answer(text);
    let marked = MARKED.get_or_init(|| Regex::new(r"(?s)\[HINT_START\](.*?)\[HINT_END\]").ok());
    let last = marked.as_ref().and_then(|marked| marked.captures_iter(&text).last());
    let hint = last.map_or_else(String::new, |found| strip(&found[1]).to_owned());
    Vote { vote: last_box(&text).filter(|vote| *vote == 1 || *vote == -1), hint }
}

/// Makes the turn's hints of replies, in the order of the calls.
pub fn gather(replies: Vec<Result<Reply, Fault>>, keep: Keep, most_chars: usize) -> Found {
    let mut found = Found::default();
    let mut votes = Vec::new();
    for reply in replies {
        match reply.as_ref().map_err(Fault::clone).and_then(read) {
            Ok(vote) => {
                if vote.vote.is_none() {
                    found.faults.push(Fault::Unreadable);
                }
                votes.push(vote);
            }
            Err(fault) => {
                found.faults.push(fault);
                votes.push(Vote { vote: None, hint: String::new() });
            }
        }
    }
    let hints = votes.iter().filter(|vote| vote.vote == Some(1));
    for hint in hints.clone() {
        found.refused.extend(usable(&hint.hint, most_chars).err());
    }
    let hints = select(hints.map(|vote| vote.hint.as_str()), keep, most_chars);
    found.hints = (!hints.is_empty()).then_some(hints);
    found.votes = Some(votes.iter().map(|vote| vote.vote).collect());
    found
}

/// Selects among accepted hints: usable, each once, shortest first, at most
/// three; or the longest, the first of equals.
pub fn select<'a>(
    hints: impl Iterator<Item = &'a str>,
    keep: Keep,
    most_chars: usize,
) -> Vec<String> {
    let mut usable_hints = Vec::<&str>::new();
    for hint in hints.map(strip) {
        if usable(hint, most_chars).is_ok() && !usable_hints.contains(&hint) {
            usable_hints.push(hint);
        }
    }
    let length = |hint: &&str| hint.chars().count();
    match keep {
        Keep::All => {
            usable_hints.sort_by_key(length);
            usable_hints.truncate(MOST);
        }
        Keep::Longest => {
            usable_hints.sort_by_key(|hint| std::cmp::Reverse(length(hint)));
            usable_hints.truncate(1);
        }
    }
    usable_hints.into_iter().map(str::to_owned).collect()
}

fn usable(hint: &str, most_chars: usize) -> Result<(), Refused> {
    match strip(hint).chars().count() {
        length if length <= LEAST => Err(Refused::TooShort),
        _ => fits(hint, most_chars),
    }
}

fn fits(hint: &str, most_chars: usize) -> Result<(), Refused> {
    static CONTROL: OnceLock<Option<Regex>> = OnceLock::new();
    let names =
        r"<[|｜][^<>\n]{1,64}[|｜]>|<(?:s|/s|bos|eos|start_of_turn|end_of_turn)>|\[/?INST\]";
    let control = CONTROL.get_or_init(|| Regex::new(names).ok());
    match strip(hint).chars().count() {
        length if length > most_chars => Err(Refused::TooLong),
        _ if control.as_ref().is_none_or(|control| control.is_match(hint)) => {
            Err(Refused::ControlTokens)
        }
        _ => Ok(()),
    }
}

/// Takes the person's own words as the hint of an answer whose reward is
/// negative: the feedback, else what the user wrote next.
pub fn from_feedback(turn: &Turn, most_chars: usize) -> Found {
    let mut found = Found::default();
    if reward(turn).is_none_or(|reward| reward >= 0.0) {
        return found;
    }
    let words = match turn.feedback_text.as_deref().map(strip).filter(|text| !text.is_empty()) {
        Some(text) => text.to_owned(),
        None => next_words(turn),
    };
    if words.is_empty() {
        return found;
    }
    match fits(&words, most_chars) {
        Ok(()) => found.hints = Some(vec![words]),
        Err(refused) => found.refused.push(refused),
    }
    found
}

/// What the user wrote next, without the client's stamps.
fn next_words(turn: &Turn) -> String {
    if turn.next_state_kind != NextStateKind::User {
        return String::new();
    }
    let parsed = turn.next_state.as_deref().and_then(|text| serde_json::from_str(text).ok());
    let Some(Value::Array(messages)) = parsed else {
        return String::new();
    };
    let from_user =
        |message: &&Value| message["role"] == "user" && !crate::template::is_envelope(message);
    let texts = messages.iter().filter(from_user).filter_map(|message| person_text(message).ok());
    strip(&texts.collect::<Vec<_>>().join("\n\n")).to_owned()
}

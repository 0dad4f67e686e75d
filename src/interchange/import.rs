//! Lines become rows.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use super::line::{self, Answer, Exchange, Identity, Line, LogProbs};
use super::messages::next_state;
use super::{Shape, retokenize};
use crate::session::{Arrival, History, Incoming, Limits, Source, Tracker};
use crate::template::Chat;
use crate::trajectory::Turn;
use crate::trajectory::turn::Micros;
use crate::trajectory::words::{
    NextStateKind, SessionSource, Status, TokenSource, UNTOLD_FINISH_REASON,
};
use crate::wire::json;

/// The branch of a session's first line.
const MAIN: &str = "main";
/// The model of an answer whose log does not say it.
const UNKNOWN: &str = "unknown";

/// What an import came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Lines that tell something.
    pub lines: u64,
    /// Rows made.
    pub rows: u64,
    /// Turns that an earlier line told already.
    pub repeated: u64,
    /// Requests without an answer.
    pub unanswered: u64,
    /// Answers to nothing, at the head of a conversation; they are no rows.
    pub greetings: u64,
    /// Lines that were read with replacements (half surrogates, `NaN`).
    pub repaired: u64,
    /// Rows whose ids were made again from the text.
    pub retokenized: u64,
    /// Rows that a tokenizer or its template could make no ids of.
    pub not_retokenized: u64,
    /// Rows whose log-probs could not be kept: no ids, another number of them, or
    /// one of them is missing.
    pub log_probs_dropped: u64,
}

/// The rows, and how they came about.
#[derive(Debug)]
pub struct Imported {
    /// The rows, in the order of the lines.
    pub turns: Vec<Turn>,
    /// What was counted.
    pub counts: Counts,
    /// Why the first of the rows that got no ids got none.
    pub failure: Option<String>,
}

/// A row, and what was logged of it that the table has no column for.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) turn: Turn,
    pub(super) log_probs: LogProbs,
    pub(super) rendered: Option<(String, String)>,
}

/// Takes lines and makes rows of them.
#[derive(Debug, Default)]
pub struct Importer {
    shape: Option<Shape>,
    pub(super) counts: Counts,
    pub(super) rows: Vec<Row>,
    pub(super) by_id: HashMap<String, usize>,
    sessions: HashSet<String>,
    /// Rows of conversations that have a child.
    pub(super) parents: HashSet<usize>,
    exchanges: Vec<(String, Exchange)>,
    told: HashSet<String>,
}

impl Importer {
    /// Starts an import of lines of one shape, or of any known one.
    pub fn new(shape: Option<Shape>) -> Self {
        Self { shape, ..Self::default() }
    }

    /// Takes a line. Errors with what is wrong with it, and is as before.
    pub fn line(&mut self, bytes: &[u8]) -> Result<(), String> {
        let Some(read) = json::parse(bytes) else {
            let error = serde_json::from_slice::<Value>(bytes).err();
            let reason = error.map(|error| error.to_string()).unwrap_or_default();
            // The parser counts lines within the line; only the column tells.
            return Err(format!(
                "no JSON: {}",
                reason.replace(" at line 1 column ", " at column ")
            ));
        };
        let repaired = read.repaired();
        self.value(&read.value)?;
        self.counts.repaired += u64::from(repaired);
        Ok(())
    }

    /// Takes a line that was parsed already.
    pub fn value(&mut self, value: &Value) -> Result<(), String> {
        let line = line::read(self.shape, value)?;
        self.counts.lines += 1;
        match line {
            Line::Conversation(conversation) => self.conversation(&conversation),
            Line::Unanswered => self.counts.unanswered += 1,
            Line::Exchange(exchange) => {
                let id = Identity::new("exchange").with(&json::canonical(value)).uuid(exchange.at);
                match self.told.insert(id.clone()) {
                    true => self.exchanges.push((id, *exchange)),
                    false => self.counts.repeated += exchange.answers.len() as u64,
                }
            }
        }
        Ok(())
    }

    /// Finds which conversation each request goes on with, and returns the rows.
    /// With a tokenizer and template the rows get ids, marked as made again.
    pub fn finish(mut self, chat: Option<&Chat>) -> Imported {
        self.pair();
        let mut failure = None;
        for row in &mut self.rows {
            let Some(chat) = chat else {
                self.counts.log_probs_dropped += u64::from(row.log_probs != LogProbs::Absent);
                continue;
            };
            if let Err(reason) = retokenize::retokenize(chat, row, &mut self.counts) {
                self.counts.not_retokenized += 1;
                failure.get_or_insert(reason);
            }
        }
        self.counts.rows = self.rows.len() as u64;
        let turns = self.rows.into_iter().map(|row| row.turn).collect();
        Imported { turns, counts: self.counts, failure }
    }

    /// Pairs requests as `serve` does when they come in live.
    fn pair(&mut self) {
        let mut exchanges = std::mem::take(&mut self.exchanges);
        if exchanges.iter().all(|(_, exchange)| exchange.at.is_some()) {
            exchanges.sort_by_key(|(_, exchange)| exchange.at);
        }
        let endless = Limits {
            idle: i64::MAX,
            retention: i64::MAX,
            turns: usize::MAX,
            open: usize::MAX,
            open_bytes: usize::MAX,
        };
        let mut tracker = Tracker::new(endless);
        let mut noted = Vec::new();
        for (id, exchange) in &exchanges {
            let history = History::read(&exchange.messages);
            let at = exchange.at.unwrap_or_default();
            let arrival = tracker.arrive(&Incoming {
                id: id.clone(),
                messages: &exchange.messages,
                history: &history,
                session: exchange.session.clone().map(|session| (session, Source::Body)),
                client: None,
                address: None,
                done: false,
                resent: false,
                at,
            });
            if let Some(extended) = &arrival.extended
                && let Some(row) = self.by_id.get(&extended.turn_id)
            {
                self.rows[*row].follow(next_state(extended.next_state.iter()));
            }
            for answer in &exchange.answers {
                let turn_id = match answer.choice {
                    0 => id.clone(),
                    choice => {
                        Identity::new("choice").with(id).with(&choice.to_string()).uuid(exchange.at)
                    }
                };
                let known = tracker.answer(id, answer.choice, &turn_id, (&answer.message, at));
                let mut row = self.row(exchange, answer, &arrival, turn_id);
                if let Some(known) = known {
                    row.turn.branch = known.branch;
                }
                noted.push((self.add(row), exchange.next.clone()));
            }
            tracker.finish(id, true, at);
        }
        // What the log itself noted counts where no later line shows more.
        for (row, next) in noted {
            self.rows[row].follow(next.as_ref().and_then(|next| next_state(std::iter::once(next))));
        }
    }

    fn row(&self, exchange: &Exchange, answer: &Answer, arrival: &Arrival, turn_id: String) -> Row {
        let tools = exchange.tools.as_ref().map(|tools| Value::from(tools.clone()).to_string());
        let mut row = Row::of(&exchange.messages, &answer.message, tools);
        let turn = &mut row.turn;
        turn.session_id.clone_from(&arrival.session_id);
        turn.turn = arrival.turn;
        turn.parent_turn_id.clone_from(&arrival.parent);
        turn.branch.clone_from(&arrival.branch);
        turn.turn_id = turn_id;
        turn.request_id.clone_from(&arrival.id);
        turn.choice = answer.choice;
        turn.session_source = match arrival.source {
            Source::Header => SessionSource::Header,
            Source::Affinity => SessionSource::Affinity,
            Source::Body => SessionSource::Body,
            Source::Inferred => SessionSource::Inferred,
            Source::None => SessionSource::None,
        };
        turn.session_confidence = arrival.confidence;
        turn.sampling = exchange.sampling.clone();
        turn.session_end = exchange.done;
        if let Some(reason) = &answer.finish_reason {
            turn.finish_reason = Some(reason.clone());
            turn.status = match reason.as_str() {
                "length" => Status::Truncated,
                "abort" => Status::Aborted,
                _ => Status::Complete,
            };
        }
        row.log_probs.clone_from(&answer.log_probs);
        row.rendered.clone_from(&exchange.rendered);
        row.name_model(exchange.model.as_deref());
        let parent = arrival.parent.as_ref().and_then(|parent| self.by_id.get(parent));
        row.date(exchange.at, parent.map(|parent| self.rows[*parent].turn.created_at));
        row
    }

    pub(super) fn add(&mut self, row: Row) -> usize {
        self.by_id.insert(row.turn.turn_id.clone(), self.rows.len());
        self.rows.push(row);
        self.rows.len() - 1
    }

    /// Returns the branch of a line of a session: the first is the main one.
    pub(super) fn branch(&mut self, session_id: &str, turn_id: &str) -> String {
        match self.sessions.insert(session_id.to_owned()) {
            true => MAIN.to_owned(),
            false => own_branch(turn_id),
        }
    }
}

/// Returns the branch that begins with a turn.
pub(super) fn own_branch(turn_id: &str) -> String {
    turn_id.get(turn_id.len().saturating_sub(12)..).unwrap_or(turn_id).to_owned()
}

impl Row {
    /// Makes the row of an answer of which only the words are known.
    pub(super) fn of(messages: &[Value], response: &Value, tools: Option<String>) -> Self {
        let turn = Turn {
            messages: Value::from(messages.to_vec()).to_string(),
            tools,
            response: response.to_string(),
            finish_reason: Some(UNTOLD_FINISH_REASON.to_owned()),
            status: Status::Complete,
            token_source: TokenSource::None,
            untrainable_reason: Some("no_token_ids".to_owned()),
            ..Turn::default()
        };
        Self { turn, log_probs: LogProbs::Absent, rendered: None }
    }

    pub(super) fn name_model(&mut self, model: Option<&str>) {
        self.turn.model = model.unwrap_or(UNKNOWN).to_owned();
    }

    /// Dates a row. A child is never older than its parent, whatever two clocks
    /// said.
    pub(super) fn date(&mut self, at: Option<i64>, parent: Option<Micros>) {
        let at = Micros(at.unwrap_or_default()).max(parent.unwrap_or_default());
        (self.turn.created_at, self.turn.finished_at) = (at, at);
    }

    /// Gives a row its next state, unless it has one.
    pub(super) fn follow(&mut self, next: Option<(Vec<Value>, NextStateKind)>) {
        if let Some((messages, kind)) = next
            && self.turn.next_state.is_none()
        {
            self.turn.next_state = Some(Value::from(messages).to_string());
            self.turn.next_state_kind = kind;
        }
    }
}

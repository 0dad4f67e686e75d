//! Turns that shall be gone: which they are, and out of a table with them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use arrow::array::BooleanArray;
use arrow::compute::filter_record_batch;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::inventory::remove_file;
use super::{Error, Left};
use crate::table::{Format, Sink, Source, Target};
use crate::trajectory::Turn;

/// Shorter texts stand in many places by chance.
const TELLING: usize = 16;

/// Whose turns shall be gone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Whose {
    /// All of a session.
    Session(String),
    /// All of a client key.
    Client(String),
    /// A single turn.
    Turn(String),
}

impl Whose {
    /// Tells whether a turn is meant.
    pub fn fits(&self, session_id: &str, client: Option<&str>, turn_id: &str) -> bool {
        match self {
            Self::Session(wanted) => wanted == session_id,
            Self::Client(wanted) => client == Some(wanted),
            Self::Turn(wanted) => wanted == turn_id,
        }
    }
}

/// What is known of the turns that shall be gone.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Found {
    /// Their ids.
    pub turn_ids: BTreeSet<String>,
    /// Their places: session and number.
    pub places: BTreeSet<(String, u32)>,
    /// Their words, as far as they are long enough to tell.
    pub texts: BTreeSet<String>,
    /// What they answered, whole.
    answers: BTreeSet<String>,
    /// The turns that they extend, and the messages of their requests.
    parents: BTreeMap<String, Vec<Value>>,
    /// Log-probs that teachers gave for them.
    pub log_probs: Vec<Vec<f32>>,
    /// Tables that have rows of them, and how many.
    pub rows: Vec<(PathBuf, u64)>,
    /// Tables that cannot be read to their end, and why.
    pub left: Vec<(PathBuf, Left)>,
}

impl Found {
    /// Returns the ids that tell of the turns wherever they stand.
    pub fn ids(&self, whose: &Whose) -> BTreeSet<String> {
        let mut ids = self.turn_ids.clone();
        match whose {
            Whose::Session(session) => _ = ids.insert(session.clone()),
            Whose::Client(_) => ids.extend(self.places.iter().map(|(session, _)| session.clone())),
            Whose::Turn(_) => {}
        }
        ids
    }

    /// Tells whether feedback is about one of the turns.
    pub fn is_about(
        &self,
        whose: &Whose,
        turn_id: Option<&str>,
        place: (Option<&str>, Option<u32>),
    ) -> bool {
        let (session, turn) = place;
        if turn_id.is_some_and(|turn_id| self.turn_ids.contains(turn_id)) {
            return true;
        }
        match (whose, session, turn) {
            (Whose::Session(wanted), Some(session), _) => wanted == session,
            (Whose::Turn(wanted), _, _) if turn_id == Some(wanted) => true,
            (_, Some(session), Some(turn)) => self.places.contains(&(session.to_owned(), turn)),
            // "The latest turn of that session", whichever it was.
            (Whose::Client(_), Some(session), None) => {
                turn_id.is_none() && self.places.iter().any(|(known, _)| known == session)
            }
            _ => false,
        }
    }

    /// Takes in what a row, or a journal, tells of one of the turns.
    pub fn see(&mut self, turn: &Turn) {
        self.turn_ids.insert(turn.turn_id.clone());
        if !turn.session_id.is_empty() {
            self.places.insert((turn.session_id.clone(), turn.turn));
        }
        if let Some(parent) = &turn.parent_turn_id
            && let Ok(Value::Array(messages)) = serde_json::from_str(&turn.messages)
        {
            self.parents.entry(parent.clone()).or_default().extend(messages);
        }
        for text in [Some(&turn.messages), Some(&turn.response), turn.next_state.as_ref()] {
            let parsed = text.and_then(|text| serde_json::from_str::<Value>(text).ok());
            said(&parsed.unwrap_or_default(), &mut self.texts);
        }
        let response: Option<Value> = serde_json::from_str(&turn.response).ok();
        self.answers.extend(response.as_ref().and_then(answer));
        let texts = turn.judge_text.iter().flatten().flatten();
        let texts = texts.chain(turn.hints.iter().flatten()).chain(&turn.feedback_text);
        self.texts.extend(texts.filter(|text| text.len() >= TELLING).cloned());
        let numbers = turn.teacher_log_probs.iter().flatten().flatten();
        self.log_probs.extend(numbers.chain(&turn.student_topk_log_probs).cloned());
    }
}

impl Found {
    /// Tells how another turn, which stays, still tells of the turns: its request
    /// repeats an answer of theirs, or what came after it is their request.
    pub fn repeated_by(&self, whose: &Whose, turn: &Turn) -> Option<&'static str> {
        if wanted(turn, whose, &self.turn_ids) {
            return None;
        }
        let asks = self.parents.get(&turn.turn_id);
        let next = turn.next_state.as_deref().map(serde_json::from_str::<Value>);
        if let (Some(asked), Some(Ok(Value::Array(next)))) = (asks, next)
            && next.iter().any(|message| asked.contains(message))
        {
            return Some("what came after it is the turn's request");
        }
        let same_session = self.places.iter().any(|(session, _)| *session == turn.session_id);
        (same_session && holds(&turn.messages, &self.answers))
            .then_some("its request repeats an answer")
    }
}

/// Collects what persons, models and tools said. What a system message says, many
/// sessions share.
fn said(messages: &Value, texts: &mut BTreeSet<String>) {
    fn strings(value: &Value, texts: &mut BTreeSet<String>) {
        match value {
            Value::String(text) if text.len() >= TELLING => {
                texts.insert(text.clone());
            }
            Value::Array(items) => items.iter().for_each(|item| strings(item, texts)),
            Value::Object(members) => members.values().for_each(|member| strings(member, texts)),
            _ => {}
        }
    }
    let messages = match messages {
        Value::Array(messages) => messages.as_slice(),
        message => std::slice::from_ref(message),
    };
    let shared = |message: &&Value| message["role"] == "system" || message["role"] == "developer";
    messages.iter().filter(|message| !shared(message)).for_each(|message| strings(message, texts));
}

/// Looks through tables for the turns, and for those that an interrupted run has
/// named. A table that cannot be read keeps no other one from being looked at.
pub fn find(tables: &[PathBuf], whose: &Whose, named: &BTreeSet<String>) -> Found {
    let mut found = Found::default();
    for path in tables {
        match see_all(path, whose, named, &mut found) {
            Ok(0) => {}
            Ok(rows) => found.rows.push((path.clone(), rows)),
            Err(error) => found.left.push((path.clone(), Left::unreadable(&error))),
        }
    }
    found
}

fn see_all(
    path: &PathBuf,
    whose: &Whose,
    named: &BTreeSet<String>,
    found: &mut Found,
) -> Result<u64, Error> {
    let mut source = Source::open(std::slice::from_ref(path))?;
    let mut rows = 0;
    while let Some(turns) = source.next_turns()? {
        for turn in turns.iter().filter(|turn| wanted(turn, whose, named)) {
            rows += 1;
            found.see(turn);
        }
    }
    Ok(rows)
}

fn wanted(turn: &Turn, whose: &Whose, named: &BTreeSet<String>) -> bool {
    whose.fits(&turn.session_id, turn.client.as_deref(), &turn.turn_id)
        || named.contains(&turn.turn_id)
}

/// What was taken out of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Removed {
    /// Rows taken out.
    pub rows: u64,
    /// Rows that are left; with none, the file is gone.
    pub kept: u64,
}

/// Takes turns out of a table. The other rows, the columns that the schema does
/// not know and what the file says of itself stay as they are.
pub fn remove(path: &Path, whose: &Whose, named: &BTreeSet<String>) -> Result<Removed, Error> {
    let mut source = Source::open(&[path.to_owned()])?;
    let format = format(path)?;
    let (schema, provenance) = (source.schema(), source.provenance().clone());
    let mut sink = Sink::create(&Target::Path(path.to_owned()), Some(format), schema, &provenance)?;
    let mut rows = 0;
    while let Some(batch) = source.next_batch()? {
        let turns = source.read(&batch)?;
        let keep: BooleanArray =
            turns.iter().map(|turn| Some(!wanted(turn, whose, named))).collect();
        rows += keep.false_count() as u64;
        let kept = filter_record_batch(&batch, &keep).map_err(|error| {
            let name = path.display().to_string();
            crate::table::Error::Encode { name, reason: error.to_string() }
        })?;
        if kept.num_rows() > 0 {
            sink.write(&kept)?;
        }
    }
    let kept = sink.rows();
    match kept {
        0 => {
            drop(sink);
            remove_file(path)?;
        }
        _ => sink.finish()?,
    }
    Ok(Removed { rows, kept })
}

fn format(path: &Path) -> Result<Format, Error> {
    let mut head = [0; 4];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut head));
    read.map_err(|source| Error::read(path, source))?;
    Ok(if head == *b"PAR1" { Format::Parquet } else { Format::Ipc })
}

/// Returns the other turns in tables that still tell of the turns, and how.
pub fn repeats(
    tables: &[PathBuf],
    whose: &Whose,
    found: &Found,
) -> Result<BTreeMap<String, &'static str>, Error> {
    let mut repeating = BTreeMap::new();
    let readable = |path: &&PathBuf| found.left.iter().all(|(left, _)| left != *path);
    for path in tables.iter().filter(readable) {
        let mut source = Source::open(std::slice::from_ref(path))?;
        while let Some(turns) = source.next_turns()? {
            let told = |turn: &Turn| Some((turn.turn_id.clone(), found.repeated_by(whose, turn)?));
            repeating.extend(turns.iter().filter_map(told));
        }
    }
    Ok(repeating)
}

fn holds(messages: &str, answers: &BTreeSet<String>) -> bool {
    let Ok(Value::Array(messages)) = serde_json::from_str(messages) else { return false };
    messages.iter().any(|message| {
        message["role"] == "assistant"
            && answer(message).is_some_and(|answer| answers.contains(&answer))
    })
}

/// What an assistant's message says: its text, else its calls.
fn answer(message: &Value) -> Option<String> {
    match (&message["content"], &message["tool_calls"]) {
        (Value::String(text), _) if !text.trim().is_empty() => Some(text.trim().to_owned()),
        (_, Value::Array(calls)) => Some(Value::from(calls.clone()).to_string()),
        _ => None,
    }
}

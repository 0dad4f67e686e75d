//! The open turns, the rows that wait, and the turns to remember: what the
//! records of a log add up to.

use std::collections::{HashMap, HashSet};

use crate::trajectory::words::NextStateKind;

use super::entry::{Entry, Remembered};
use super::record::Record;

/// Facts about turns that are not complete yet, at most.
const EARLY: usize = 10_000;

/// What the records add up to.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) open: HashMap<String, Entry>,
    /// Rows that wait for their shard.
    pub(super) ready: Vec<Entry>,
    /// Rows whose shard is being written.
    pub(super) writing: Vec<Entry>,
    known: HashMap<String, Remembered>,
    /// Facts that came before their turn: a client may go on before the engine
    /// has said the last of its answer.
    early: HashMap<String, Vec<Record>>,
    ready_bytes: usize,
}

impl State {
    /// Adds a record. Returns whether it found its turn.
    pub(super) fn apply(&mut self, record: Record) -> bool {
        match record {
            Record::Turn(entry) => self.turn(*entry),
            Record::Extended { turn_id, next_state, kind } => match self.open.remove(&turn_id) {
                Some(mut entry) => {
                    entry.next_state = Some(next_state);
                    entry.next_state_kind = kind;
                    self.make_ready(entry)
                }
                None => {
                    self.keep_early(turn_id.clone(), Record::Extended { turn_id, next_state, kind })
                }
            },
            Record::Closed { turn_id, session_end } => match self.open.remove(&turn_id) {
                Some(mut entry) => {
                    entry.session_end = session_end;
                    if entry.reward_explicit.is_some() || entry.feedback_text.is_some() {
                        entry.next_state_kind = NextStateKind::Explicit;
                    }
                    self.make_ready(entry)
                }
                None => {
                    // The request that extended it got an empty answer.
                    let waiting = self.rows().find(|entry| entry.turn_id == turn_id);
                    let found = waiting.map(|entry| entry.session_end |= session_end).is_some();
                    let record = Record::Closed { turn_id: turn_id.clone(), session_end };
                    found || self.keep_early(turn_id, record)
                }
            },
            Record::Feedback { turn_id, reward, text } => self.feedback(&turn_id, reward, text),
            Record::Written { turn_ids, .. } => {
                self.drop_rows(&turn_ids.into_iter().collect());
                true
            }
            Record::Known(known) => {
                self.known.insert(known.turn_id.clone(), known);
                true
            }
        }
    }

    /// Adds a record of an earlier run. Feedback in it was meant for a row, and may
    /// stand before the turn.
    pub(super) fn restore(&mut self, record: Record) {
        let feedback = matches!(record, Record::Feedback { .. }).then(|| record.clone());
        if !self.apply(record)
            && let Some(feedback) = feedback
        {
            self.expect(feedback);
        }
    }

    /// Returns whether a turn has been recorded.
    pub(super) fn is_known(&self, turn_id: &str) -> bool {
        self.known.contains_key(turn_id)
    }

    /// Keeps feedback for a turn whose record has not come yet.
    pub(super) fn expect(&mut self, feedback: Record) {
        if let Record::Feedback { turn_id, .. } = &feedback {
            self.keep_early(turn_id.clone(), feedback);
        }
    }

    /// Forgets rows that are in a shard.
    pub(super) fn drop_rows(&mut self, written: &HashSet<String>) {
        for id in written {
            self.open.remove(id);
            self.early.remove(id);
        }
        self.ready.retain(|entry| !written.contains(&entry.turn_id));
        self.writing.retain(|entry| !written.contains(&entry.turn_id));
        self.ready_bytes = self.ready.iter().map(Entry::weight).sum();
    }

    /// Returns whether a turn is here and in no shard.
    pub(super) fn holds(&self, turn_id: &str) -> bool {
        let mut rows = self.ready.iter().chain(&self.writing);
        self.open.contains_key(turn_id) || rows.any(|entry| entry.turn_id == turn_id)
    }

    /// Returns the bytes of the rows that wait.
    pub(super) fn ready_bytes(&self) -> usize {
        self.ready_bytes
    }

    /// Hands the waiting rows over to be written.
    pub(super) fn start_writing(&mut self) -> &[Entry] {
        self.writing.append(&mut self.ready);
        self.ready_bytes = 0;
        &self.writing
    }

    /// Takes rows back whose shard could not be written.
    pub(super) fn stop_writing(&mut self) {
        let mut rows = std::mem::take(&mut self.writing);
        rows.append(&mut self.ready);
        self.ready = rows;
        self.ready_bytes = self.ready.iter().map(Entry::weight).sum();
    }

    /// Makes rows of all open turns.
    pub(super) fn close_all(&mut self) {
        let mut open: Vec<_> = self.open.keys().cloned().collect();
        open.sort();
        for turn_id in open {
            self.apply(Record::Closed { turn_id, session_end: false });
        }
    }

    /// Lists the turns that are remembered besides the open ones.
    pub(super) fn remembered(&self) -> impl Iterator<Item = &Remembered> {
        self.known.values().filter(|known| !self.open.contains_key(&known.turn_id))
    }

    /// Forgets turns that nobody will go on with.
    pub(super) fn forget(&mut self, before: i64, most: usize) {
        self.known.retain(|_, known| known.finished_at >= before);
        if self.known.len() > most {
            let mut times: Vec<_> = self.known.values().map(|known| known.finished_at).collect();
            times.sort_unstable();
            let oldest = times[times.len() - most.max(1)];
            self.known.retain(|_, known| known.finished_at >= oldest);
        }
        if self.early.len() > EARLY {
            self.early.clear();
        }
    }

    /// Returns records that add up to this state.
    pub(super) fn snapshot(&self) -> Vec<Record> {
        let known = self.known.values().cloned().map(Record::Known);
        let open = self.open.values().map(|entry| Record::Turn(Box::new(entry.clone())));
        let rows = self.writing.iter().chain(&self.ready).flat_map(|entry| {
            let mut bare = entry.clone();
            let (turn_id, session_end) = (bare.turn_id.clone(), bare.session_end);
            let closed = Record::Closed { turn_id: turn_id.clone(), session_end };
            let ends = match bare.next_state.take() {
                Some(next_state) => {
                    let kind = bare.next_state_kind;
                    let extended = Record::Extended { turn_id, next_state, kind };
                    [Some(extended), session_end.then_some(closed)]
                }
                None => [Some(closed), None],
            };
            std::iter::once(Record::Turn(Box::new(bare))).chain(ends.into_iter().flatten())
        });
        // A known turn would not be taken as a new one, so these come last.
        let early = self.early.values().flatten().cloned();
        let rows: Vec<_> = open.chain(rows).collect();
        rows.into_iter().chain(early).chain(known).collect()
    }

    fn turn(&mut self, entry: Entry) -> bool {
        let turn_id = entry.turn_id.clone();
        // A log that was carried over but not removed says everything twice.
        if self.known.contains_key(&turn_id) {
            return false;
        }
        self.known.insert(turn_id.clone(), entry.remembered());
        self.open.insert(turn_id.clone(), entry);
        for record in self.early.remove(&turn_id).unwrap_or_default() {
            self.apply(record);
        }
        true
    }

    /// Returns the rows that are in no shard yet. Those that are being written may
    /// come back.
    fn rows(&mut self) -> impl Iterator<Item = &mut Entry> {
        self.ready.iter_mut().chain(&mut self.writing)
    }

    fn make_ready(&mut self, entry: Entry) -> bool {
        self.ready_bytes += entry.weight();
        self.ready.push(entry);
        true
    }

    fn keep_early(&mut self, turn_id: String, record: Record) -> bool {
        if !self.known.contains_key(&turn_id) {
            self.early.entry(turn_id).or_default().push(record);
        }
        false
    }

    fn feedback(&mut self, turn_id: &str, reward: Option<f32>, text: Option<String>) -> bool {
        let waiting = self.ready.iter_mut().find(|entry| entry.turn_id == turn_id);
        let Some(entry) = self.open.get_mut(turn_id).or(waiting) else { return false };
        entry.reward_explicit = reward.or(entry.reward_explicit);
        entry.feedback_text = text.or(entry.feedback_text.take());
        if entry.next_state_kind == NextStateKind::None && !self.open.contains_key(turn_id) {
            let waiting = self.ready.iter_mut().find(|entry| entry.turn_id == turn_id);
            if let Some(entry) = waiting {
                entry.next_state_kind = NextStateKind::Explicit;
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn entry() -> Entry {
        let settings = json!({
            "temperature": null, "top_p": null, "top_k": null, "min_p": null, "seed": null,
            "max_tokens": null, "log_prob_kind": "tempered",
        });
        let entry = json!({
            "session_id": "s", "turn": 1, "turn_id": "s-1", "parent_turn_id": null,
            "branch": "main", "request_id": "s-1", "choice": 0, "client": null,
            "session_source": "header", "session_confidence": 1.0, "created_at": 1,
            "finished_at": 2, "model": "m", "weight_version": null, "weight_version_end": null,
            "weight_version_source": "answer", "sampling": settings, "messages": "[]",
            "tools": null, "response": "{}", "finish_reason": "stop", "matched_stop": null,
            "ends_with_stop_token": null, "status": "complete", "usage_completion_tokens": null,
            "prompt_ids": null, "response_ids": null, "rollout_log_probs": null,
            "token_source": "engine", "untrainable_reason": null, "next_state": null,
            "next_state_kind": "none", "session_end": false, "reward_explicit": null,
            "feedback_text": null,
            "lineage": {"stated": true, "key": null, "system": "", "address": null},
        });
        serde_json::from_value(entry).unwrap()
    }

    #[test]
    fn the_end_of_a_session_reaches_a_row_that_is_being_written() {
        let mut state = State::default();
        let turn_id = "s-1".to_owned();
        let (next_state, kind) = ("[]".to_owned(), NextStateKind::User);
        state.apply(Record::Turn(Box::new(entry())));
        state.apply(Record::Extended { turn_id: turn_id.clone(), next_state, kind });
        assert_eq!(state.start_writing().len(), 1);
        assert!(state.apply(Record::Closed { turn_id, session_end: true }));
        // The shard could not be written.
        state.stop_writing();
        assert!(state.ready[0].session_end);
    }
}

//! The open conversations: which turn a request extends, which turns are over.

use std::collections::HashMap;

use serde_json::Value;

use super::choice::{Choice, choose, confidence, may_follow, tail};
use super::facts::{Arrival, Closed, Counted, Extended, Incoming, Known, Limits, Source};
use super::identity::{Key, Step, without_envelope};

/// Branch of a session's first line.
const MAIN: &str = "main";

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) known: Known,
    /// A request follows it, or did.
    extended: bool,
    /// The id of the request that goes on with its line.
    continued_by: Option<String>,
    /// Bytes of its row, as far as they are known.
    pub(super) bytes: usize,
}

#[derive(Debug, Default)]
pub(super) struct Session {
    pub(super) turns: Vec<String>,
    pub(super) in_flight: u32,
    requests: u64,
    pub(super) last_activity: i64,
}

#[derive(Debug)]
struct Ticket {
    arrival: Arrival,
    key: Key,
    system: Key,
    client: Option<String>,
    address: Option<String>,
    done: bool,
    /// Whether a turn of it can be extended.
    answered: bool,
}

/// The open conversations.
#[derive(Debug)]
pub struct Tracker {
    pub(super) limits: Limits,
    pub(super) turns: HashMap<String, Entry>,
    pub(super) by_key: HashMap<Key, Vec<String>>,
    pub(super) sessions: HashMap<String, Session>,
    tickets: HashMap<String, Ticket>,
    /// Turns that wait for a next state, and the bytes of their rows.
    pub(super) open: usize,
    pub(super) open_bytes: usize,
    pub(super) hurried: u64,
    /// No session is over before.
    pub(super) next_look: i64,
}

impl Tracker {
    /// Makes a tracker that knows nothing yet.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            turns: HashMap::new(),
            by_key: HashMap::new(),
            sessions: HashMap::new(),
            tickets: HashMap::new(),
            open: 0,
            open_bytes: 0,
            hurried: 0,
            next_look: i64::MIN,
        }
    }

    /// Takes up a turn of an earlier run.
    pub fn restore(&mut self, known: Known) {
        let extended = !known.open;
        self.insert(known, extended);
    }

    /// Places a request, and gives the turn it extends its next state.
    pub fn arrive(&mut self, incoming: &Incoming<'_>) -> Arrival {
        let found = self.find(incoming);
        let mut counted = None;
        let mut extended = None;
        let parent = match found {
            Found::Turn { turn_id, step } => {
                (extended, counted) = self.extend(&turn_id, incoming, step);
                Some(turn_id)
            }
            Found::Ambiguous => {
                counted = Some(Counted::Ambiguous);
                None
            }
            Found::Nothing => None,
        };
        let arrival = self.place(incoming, parent, extended, counted);
        let session = self.sessions.entry(arrival.session_id.clone()).or_default();
        session.in_flight += 1;
        session.requests += 1;
        session.last_activity = session.last_activity.max(incoming.at);
        let ticket = Ticket {
            arrival: arrival.clone(),
            key: incoming.history.key(),
            system: incoming.history.system,
            client: incoming.client.clone(),
            address: incoming.address.clone(),
            done: incoming.done,
            answered: false,
        };
        self.tickets.insert(incoming.id.clone(), ticket);
        arrival
    }

    /// Makes an answer known, so that a request may extend it from now on.
    /// Call it before the client can have seen the answer's end. Returns the
    /// turn as it is remembered, or nothing for an empty answer.
    pub fn answer(
        &mut self,
        id: &str,
        choice: u8,
        turn_id: &str,
        answer: (&Value, i64),
    ) -> Option<Known> {
        let ticket = self.tickets.get(id)?;
        let (response, at) = answer;
        let key = ticket.key.answered(response)?;
        let arrival = &ticket.arrival;
        let known = Known {
            turn_id: turn_id.to_owned(),
            session_id: arrival.session_id.clone(),
            stated: !matches!(arrival.source, Source::Inferred | Source::None),
            turn: arrival.turn,
            branch: match choice {
                0 => arrival.branch.clone(),
                _ => format!("{}-{choice}", tail(id)),
            },
            key,
            system: ticket.system,
            client: ticket.client.clone(),
            address: ticket.address.clone(),
            at,
            open: true,
        };
        if !self.turns.contains_key(turn_id) {
            self.insert(known.clone(), false);
        }
        if let Some(ticket) = self.tickets.get_mut(id) {
            ticket.answered = true;
        }
        Some(known)
    }

    /// Returns whether a session ends with a request's answer.
    pub fn is_done(&self, id: &str) -> bool {
        self.tickets.get(id).is_some_and(|ticket| ticket.done)
    }

    /// Ends a request. Returns the turns that are over because the session is.
    pub fn finish(&mut self, id: &str, recorded: bool, at: i64) -> Vec<Closed> {
        let Some(ticket) = self.tickets.remove(id) else { return Vec::new() };
        if !recorded && let Some(parent) = &ticket.arrival.parent {
            // The line is free again for the retry of a request that failed.
            let parent = self.turns.get_mut(parent);
            if let Some(parent) = parent.filter(|entry| entry.continued_by.as_deref() == Some(id)) {
                parent.continued_by = None;
            }
        }
        let session_id = ticket.arrival.session_id;
        if let Some(session) = self.sessions.get_mut(&session_id) {
            session.in_flight = session.in_flight.saturating_sub(1);
            session.last_activity = session.last_activity.max(at);
        }
        match ticket.done {
            false => Vec::new(),
            // What was recorded and cannot be extended is the last turn itself.
            true if recorded && !ticket.answered => self.close_turns(&session_id, false),
            true => self.end_session(&session_id),
        }
    }

    /// Ends a session that its client declared done. Its last turn is told even
    /// if a request extends it already: the answer to that one was empty.
    pub fn end_session(&mut self, session_id: &str) -> Vec<Closed> {
        let mut closed = self.close_turns(session_id, true);
        // A request on its way will bring a later turn.
        let session = self.sessions.get(session_id).filter(|session| session.in_flight == 0);
        let last = session.and_then(|session| session.turns.last());
        let told = |turn_id: &String| closed.iter().any(|closed| closed.turn_id == *turn_id);
        if let Some(turn_id) = last.filter(|turn_id| !told(turn_id)).cloned() {
            closed.push(Closed { turn_id, session_end: true });
        }
        closed
    }

    /// Closes what is open of a session; `ends` says whether the last turn is
    /// the end of it.
    pub(super) fn close_turns(&mut self, session_id: &str, ends: bool) -> Vec<Closed> {
        let Some(session) = self.sessions.get(session_id) else { return Vec::new() };
        let last = session.turns.last().filter(|_| ends);
        let mut closed = Vec::new();
        for turn_id in &session.turns {
            if let Some(entry) = self.turns.get_mut(turn_id).filter(|entry| entry.known.open) {
                entry.known.open = false;
                self.open -= 1;
                self.open_bytes = self.open_bytes.saturating_sub(entry.bytes);
                closed
                    .push(Closed { turn_id: turn_id.clone(), session_end: last == Some(turn_id) });
            }
        }
        closed
    }

    /// Finds a turn by session and number, or a session's latest.
    pub fn resolve(&self, session_id: &str, turn: Option<u32>) -> Option<&Known> {
        let turns = self.sessions.get(session_id)?.turns.iter().rev();
        let mut known = turns.filter_map(|id| self.turns.get(id)).map(|entry| &entry.known);
        known.find(|known| turn.is_none_or(|turn| known.turn == turn))
    }

    fn find(&self, incoming: &Incoming<'_>) -> Found {
        let steps = incoming.history.steps.iter().enumerate().rev();
        for (step, _) in steps.filter(|(_, step)| step.assistant) {
            let key = incoming.history.steps[step].key;
            let fits = self.by_key.get(&key).into_iter().flatten();
            let fits = fits.filter_map(|id| self.turns.get(id)).map(|entry| &entry.known);
            let fits: Vec<_> = fits.filter(|known| may_follow(known, incoming)).collect();
            match choose(fits, incoming) {
                Choice::One(known) => {
                    return Found::Turn { turn_id: known.turn_id.clone(), step };
                }
                Choice::Several => return Found::Ambiguous,
                Choice::None => {}
            }
        }
        Found::Nothing
    }

    fn extend(
        &mut self,
        turn_id: &str,
        incoming: &Incoming<'_>,
        step: usize,
    ) -> (Option<Extended>, Option<Counted>) {
        let appended = incoming.history.following(step);
        let Some(entry) = self.turns.get_mut(turn_id).filter(|_| !appended.is_empty()) else {
            // A list that ends with the answer asks to go on with it.
            return (None, None);
        };
        if entry.extended {
            return (None, Some(Counted::Again));
        }
        entry.extended = true;
        if !std::mem::take(&mut entry.known.open) {
            return (None, Some(Counted::Late));
        }
        self.open -= 1;
        self.open_bytes = self.open_bytes.saturating_sub(entry.bytes);
        let message = |step: &Step| without_envelope(&incoming.messages[step.index]);
        let extended = Extended {
            turn_id: turn_id.to_owned(),
            next_state: appended.iter().filter_map(message).collect(),
            tool: appended.iter().any(|step| step.tool),
        };
        (Some(extended), None)
    }

    fn place(
        &mut self,
        incoming: &Incoming<'_>,
        parent: Option<String>,
        extended: Option<Extended>,
        counted: Option<Counted>,
    ) -> Arrival {
        let id = incoming.id.clone();
        let parent_entry = parent.as_ref().and_then(|parent| self.turns.get_mut(parent));
        let (session_id, turn, branch, inferred) = match parent_entry {
            Some(entry) => {
                let free = entry.continued_by.is_none();
                entry.continued_by.get_or_insert_with(|| id.clone());
                let branch = if free { entry.known.branch.clone() } else { tail(&id).to_owned() };
                let confidence = confidence(&entry.known, incoming);
                (entry.known.session_id.clone(), entry.known.turn + 1, branch, Some(confidence))
            }
            None => {
                let session_id = match &incoming.session {
                    Some((named, _)) => named.clone(),
                    None => self.resent_session(incoming).unwrap_or_else(|| id.clone()),
                };
                let fresh = self
                    .sessions
                    .get(&session_id)
                    .is_none_or(|session| session.turns.is_empty() && session.in_flight == 0);
                let branch = if fresh { MAIN.to_owned() } else { tail(&id).to_owned() };
                (session_id, 1, branch, None)
            }
        };
        let (source, confidence) = match (&incoming.session, inferred) {
            (Some((_, source)), _) => (*source, 1.0),
            (None, Some(confidence)) => (Source::Inferred, confidence),
            (None, None) => (Source::None, 0.5),
        };
        Arrival { id, session_id, source, confidence, turn, parent, branch, extended, counted }
    }

    /// Finds the session of a request that a client library sends again while
    /// the first attempt is still in flight.
    fn resent_session(&self, incoming: &Incoming<'_>) -> Option<String> {
        let key = incoming.history.key();
        let same = |ticket: &&Ticket| {
            ticket.key == key
                && ticket.client == incoming.client
                && ticket.address == incoming.address
        };
        let ticket = self.tickets.values().find(same).filter(|_| incoming.resent)?;
        Some(ticket.arrival.session_id.clone())
    }

    fn insert(&mut self, known: Known, extended: bool) {
        let session = self.sessions.entry(known.session_id.clone()).or_default();
        session.turns.push(known.turn_id.clone());
        session.last_activity = session.last_activity.max(known.at);
        self.next_look = self.next_look.min(known.at.saturating_add(self.limits.idle));
        self.by_key.entry(known.key).or_default().push(known.turn_id.clone());
        self.open += usize::from(known.open);
        let entry = Entry { known, extended, continued_by: None, bytes: 0 };
        let before = self.turns.insert(entry.known.turn_id.clone(), entry);
        self.open -= usize::from(before.is_some_and(|before| before.known.open));
    }
}

enum Found {
    Turn { turn_id: String, step: usize },
    Ambiguous,
    Nothing,
}

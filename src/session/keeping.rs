//! What is not remembered any longer: idle sessions, and what is too much.

use super::facts::{Closed, Limits};
use super::tracker::Tracker;

/// Idle sessions are looked for so often within the time after which they are over,
/// at most.
const OFTEN: i64 = 64;

impl Tracker {
    /// Closes the turns of sessions that have been idle, and forgets sessions
    /// that are long over. Looks through them when one can be due, and not more
    /// often than need be: there may be very many.
    pub fn expire(&mut self, now: i64) -> Vec<Closed> {
        let Limits { idle, retention, turns, open, open_bytes } = self.limits;
        let hurries = self.open > open || self.open_bytes > open_bytes;
        let crowded = self.turns.len().max(self.sessions.len()) > turns;
        if now < self.next_look && !hurries && !crowded {
            return Vec::new();
        }
        let (mut over, mut forgotten) = (Vec::new(), Vec::new());
        let mut next = now.saturating_add(idle);
        for (id, session) in &self.sessions {
            let rest = now.saturating_sub(session.last_activity);
            // Of an empty one nothing was recorded: failed requests, empty answers.
            let empty = session.turns.is_empty();
            if session.in_flight > 0 {
                continue;
            }
            if rest >= retention || empty && (rest >= idle || crowded) {
                forgotten.push(id.clone());
            }
            match rest >= idle {
                true => over.push(id.clone()),
                false => next = next.min(session.last_activity.saturating_add(idle)),
            }
        }
        self.next_look = next.max(now.saturating_add(idle / OFTEN));
        let mut closed: Vec<_> = over.iter().flat_map(|id| self.close_turns(id, true)).collect();
        if hurries {
            closed.extend(self.hurry());
        }
        if self.turns.len() > turns {
            forgotten.extend(self.oldest());
        }
        for session_id in forgotten {
            self.forget(&session_id);
        }
        closed
    }

    /// Closes the turns of the oldest sessions while more wait than may, with some
    /// room so that this is rare.
    fn hurry(&mut self) -> Vec<Closed> {
        let Limits { open, open_bytes, .. } = self.limits;
        let (open, open_bytes) = (open - open / 10, open_bytes - open_bytes / 10);
        let waits = |id: &String| self.turns.get(id).is_some_and(|entry| entry.known.open);
        let waiting = self.sessions.iter().filter(|(_, session)| session.turns.iter().any(waits));
        let mut oldest: Vec<_> =
            waiting.map(|(id, session)| (session.last_activity, id.clone())).collect();
        oldest.sort_unstable();
        let mut closed = Vec::new();
        for (_, id) in oldest {
            if self.open <= open && self.open_bytes <= open_bytes {
                break;
            }
            // Their sessions may go on.
            closed.extend(self.close_turns(&id, false));
        }
        self.hurried += closed.len() as u64;
        closed
    }

    /// Returns how many turns wait for a next state.
    pub fn open(&self) -> usize {
        self.open
    }

    /// Returns how many turns did not wait as long as they should have, because
    /// there were too many.
    pub fn hurried(&self) -> u64 {
        self.hurried
    }

    /// Says how many bytes the row of a turn has.
    pub fn weigh(&mut self, turn_id: &str, bytes: usize) {
        let Some(entry) = self.turns.get_mut(turn_id) else { return };
        let before = std::mem::replace(&mut entry.bytes, bytes);
        if entry.known.open {
            self.open_bytes = (self.open_bytes + bytes).saturating_sub(before);
        }
    }

    /// Lists the sessions to forget so that the limit holds again, with some
    /// room so that this is rare.
    fn oldest(&self) -> Vec<String> {
        let mut sessions: Vec<_> =
            self.sessions.iter().filter(|(_, session)| session.in_flight == 0).collect();
        sessions.sort_by_key(|(_, session)| session.last_activity);
        let open = |id: &String| self.turns.get(id).is_some_and(|entry| entry.known.open);
        let mut surplus =
            self.turns.len().saturating_sub(self.limits.turns - self.limits.turns / 10);
        let mut found = Vec::new();
        for (id, session) in sessions {
            if surplus == 0 {
                break;
            }
            if !session.turns.iter().any(open) {
                surplus = surplus.saturating_sub(session.turns.len());
                found.push(id.clone());
            }
        }
        found
    }

    fn forget(&mut self, session_id: &str) {
        let Some(session) = self.sessions.remove(session_id) else { return };
        for turn_id in session.turns {
            let Some(entry) = self.turns.remove(&turn_id) else { continue };
            if entry.known.open {
                self.open -= 1;
                self.open_bytes = self.open_bytes.saturating_sub(entry.bytes);
            }
            if let Some(ids) = self.by_key.get_mut(&entry.known.key) {
                ids.retain(|id| *id != turn_id);
                if ids.is_empty() {
                    self.by_key.remove(&entry.known.key);
                }
            }
        }
    }
}

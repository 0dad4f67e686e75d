//! Turns put together to sessions.

use std::collections::BTreeMap;

use crate::trajectory::Turn;

/// A recorded session.
#[derive(Debug, Clone, PartialEq)]
pub struct Session {
    /// Its id.
    pub id: String,
    /// Its turns in the order in which they were asked.
    pub turns: Vec<Turn>,
}

impl Session {
    /// Returns when it began, in microseconds since 1970, if that was recorded.
    pub fn began(&self) -> Option<i64> {
        self.turns.iter().find_map(Turn::asked_at)
    }

    /// Tells whether a turn is one of several choices of one request, which a
    /// single new answer cannot stand for.
    pub fn is_choice(&self, turn: &Turn) -> bool {
        let same = |other: &&Turn| other.request_id == turn.request_id;
        turn.choice > 0 || self.turns.iter().filter(same).count() > 1
    }
}

/// Puts turns together to sessions, the earliest first.
pub fn sessions(turns: Vec<Turn>) -> Vec<Session> {
    let mut found = BTreeMap::<String, Vec<Turn>>::new();
    for turn in turns {
        found.entry(turn.session_id.clone()).or_default().push(turn);
    }
    let in_order = |(id, mut turns): (String, Vec<Turn>)| {
        turns.sort_by_key(|turn| (turn.created_at, turn.turn, turn.choice));
        Session { id, turns }
    };
    let mut sessions: Vec<_> = found.into_iter().map(in_order).collect();
    sessions.sort_by_key(Session::began);
    sessions
}

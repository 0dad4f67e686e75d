//! Which of the turns that a history fits is meant.

use super::facts::{Incoming, Known};

/// Which of several turns a request follows.
pub(super) enum Choice<'a> {
    One(&'a Known),
    Several,
    None,
}

/// Returns whether a request may follow a turn whose messages it repeats.
pub(super) fn may_follow(known: &Known, incoming: &Incoming<'_>) -> bool {
    match &incoming.session {
        Some((session_id, _)) => known.session_id == *session_id,
        // A named key is a person; another person's turn is never extended.
        None => !known.stated && known.client == incoming.client,
    }
}

/// Chooses among the turns that one history fits.
pub(super) fn choose<'a>(mut fits: Vec<&'a Known>, incoming: &Incoming<'_>) -> Choice<'a> {
    if fits.len() > 1 {
        let near =
            |known: &&Known| known.client == incoming.client && known.address == incoming.address;
        if fits.iter().any(near) {
            fits.retain(near);
        }
    }
    // Turns of one session with one history are retries of each other: the
    // client shows the latest.
    let Some(latest) = fits.iter().max_by_key(|known| (known.at, &known.turn_id)) else {
        return Choice::None;
    };
    match fits.iter().all(|known| known.session_id == latest.session_id) {
        true => Choice::One(latest),
        false => Choice::Several,
    }
}

pub(super) fn confidence(known: &Known, incoming: &Incoming<'_>) -> f32 {
    let mut confidence = 0.9;
    if known.system != incoming.history.system {
        confidence -= 0.2;
    }
    if known.address != incoming.address {
        confidence -= 0.2;
    }
    confidence
}

pub(super) fn tail(id: &str) -> &str {
    id.get(id.len().saturating_sub(12)..).unwrap_or(id)
}

//! What the tracker is told and what it tells.

use serde_json::Value;

use super::identity::{History, Key};

/// Who named the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// A session header.
    Header,
    /// The client's affinity headers.
    Affinity,
    /// A field of the body.
    Body,
    /// The messages extend a known turn.
    Inferred,
    /// Nobody; the request opened a session of its own.
    None,
}

/// A main-line request, as it came in.
#[derive(Debug, Clone)]
pub struct Incoming<'a> {
    /// A fresh id. It becomes the id of the first choice's turn.
    pub id: String,
    /// The request's messages.
    pub messages: &'a [Value],
    /// The same, as identities.
    pub history: &'a History,
    /// The session that the client named, and where.
    pub session: Option<(String, Source)>,
    /// Name of the client's key.
    pub client: Option<String>,
    /// The client's address.
    pub address: Option<String>,
    /// Whether the session ends with this request's answer.
    pub done: bool,
    /// The client says that it sends the same request again.
    pub resent: bool,
    /// Microseconds since 1970.
    pub at: i64,
}

/// Where a request stands.
#[derive(Debug, Clone, PartialEq)]
pub struct Arrival {
    /// The request's id, as given.
    pub id: String,
    /// The session.
    pub session_id: String,
    /// Who named it.
    pub source: Source,
    /// 1 for a stated session, less for an inferred one.
    pub confidence: f32,
    /// Recorded ancestors + 1.
    pub turn: u32,
    /// The turn that this request follows.
    pub parent: Option<String>,
    /// Line of the conversation.
    pub branch: String,
    /// The open turn that has its next state now.
    pub extended: Option<Extended>,
    /// Something to count about this pairing.
    pub counted: Option<Counted>,
}

/// A turn's next state.
#[derive(Debug, Clone, PartialEq)]
pub struct Extended {
    /// The turn.
    pub turn_id: String,
    /// The messages that the client appended.
    pub next_state: Vec<Value>,
    /// Whether they are results of the turn's tool calls.
    pub tool: bool,
}

/// What is worth a count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counted {
    /// The history fits several open turns of strangers: no next state.
    Ambiguous,
    /// The turn had been closed without a next state.
    Late,
    /// The turn's next state is known; this is a retry, an edit or a branch.
    Again,
}

/// A turn that is over.
#[derive(Debug, Clone, PartialEq)]
pub struct Closed {
    /// The turn.
    pub turn_id: String,
    /// Whether the session ended with it.
    pub session_end: bool,
}

/// What has to be remembered of a turn to pair what comes later.
#[derive(Debug, Clone, PartialEq)]
pub struct Known {
    /// The turn.
    pub turn_id: String,
    /// Its session.
    pub session_id: String,
    /// Whether the client named the session.
    pub stated: bool,
    /// Its number.
    pub turn: u32,
    /// Its line.
    pub branch: String,
    /// Identity of its messages and answer.
    pub key: Key,
    /// Identity of its leading system messages.
    pub system: Key,
    /// Name of the client's key.
    pub client: Option<String>,
    /// The client's address.
    pub address: Option<String>,
    /// When it was complete, microseconds since 1970.
    pub at: i64,
    /// Whether it still waits for a next state.
    pub open: bool,
}

/// Limits of what is remembered.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// A session without a request for so long is over, microseconds.
    pub idle: i64,
    /// A session is forgotten after so long, microseconds.
    pub retention: i64,
    /// Number of turns remembered; the oldest sessions go first.
    pub turns: usize,
    /// Number of turns that wait for a next state; beyond, those of the oldest
    /// sessions do not wait any longer.
    pub open: usize,
    /// Bytes of their rows.
    pub open_bytes: usize,
}

//! What visits come to.

/// Sessions in a row whose first reply obeys, by which an agent has adapted.
pub const IN_A_ROW: usize = 3;
/// Share of bare first replies that obey above which a persona proves nothing.
pub const MOST_BARE: f64 = 0.3;
/// Share under the hinted prompt below which a model cannot do it at all.
pub const LEAST_HINTED: f64 = 0.2;

/// One session, as it went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Visit {
    /// Its number, from 1.
    pub session: usize,
    /// Its id.
    pub id: String,
    /// What it opened with.
    pub question: String,
    /// Version of the weights that gave the first reply, if told.
    pub policy: Option<String>,
    /// Whether the first reply obeyed.
    pub obeyed: bool,
    /// Whether the last one that was waited for did.
    pub content: bool,
    /// Replies that were waited for.
    pub replies: u32,
    /// Length of the first reply in tokens, if told.
    pub tokens: Option<u64>,
    /// Length of all replies that were waited for, if told of each.
    pub all_tokens: Option<u64>,
    /// The first reply.
    pub reply: String,
}

/// Returns the number of the first of three sessions in a row whose first replies
/// obey, counted from 1.
pub fn sessions_to_adapt(obeyed: &[bool]) -> Option<usize> {
    obeyed.windows(IN_A_ROW).position(|row| row.iter().all(|obeyed| *obeyed)).map(|at| at + 1)
}

/// Tells whether a persona has room to learn on a model: it rarely obeys by itself
/// and can if told.
pub fn has_room(bare: f64, hinted: f64) -> bool {
    bare <= MOST_BARE && hinted >= LEAST_HINTED
}

//! The invariants of the schema, each a small rule about one turn or about how
//! turns stand to each other. A rule says what is wrong; it mends nothing.

mod captured;
mod noted;

use std::collections::HashMap;

use super::Turn;
use super::turn::Micros;

/// Slack for a log-prob that rounding lifted above 0.
const ABOVE_ZERO: f32 = 1e-4;

/// Largest size of an advantage. Rewards end at 1 and log-probs at some hundreds;
/// what is beyond this is no measurement, and its square may overflow.
pub const LARGEST_ADVANTAGE: f32 = 1e6;

/// Smallest temperature of sampling; 0 stands for the likeliest token. Log-probs
/// of a smaller one overflow.
pub const SMALLEST_TEMPERATURE: f32 = 1e-4;

/// A broken invariant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The column that is wrong, or does not go with another.
    pub column: &'static str,
    /// What is wrong with it.
    pub what: String,
}

impl Fault {
    fn new(column: &'static str, what: impl Into<String>) -> Self {
        Self { column, what: what.into() }
    }
}

/// A broken invariant and the row it is in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Name of the input.
    pub input: String,
    /// Row there, counted from 0.
    pub row: u64,
    /// Session of the row.
    pub session: String,
    /// Turn of the row.
    pub turn: u32,
    /// What is wrong.
    pub fault: Fault,
}

/// An invariant of one turn.
#[derive(Debug)]
pub struct Rule {
    /// The invariant, as a sentence about a sound row.
    pub says: &'static str,
    /// Returns what is wrong with a turn.
    pub check: fn(&Turn) -> Vec<Fault>,
}

/// Returns the invariants of one turn, in the order of the columns.
pub fn rules() -> impl Iterator<Item = &'static Rule> {
    captured::RULES.iter().chain(noted::RULES)
}

/// The invariants between turns, as [`Linter`] checks them.
pub const BETWEEN: [&str; 5] = [
    "a turn id is unique",
    "a request's choice is recorded once",
    "a parent is of the same session, one turn earlier",
    "a parent was asked before its child",
    "the engine's token count of a request with one choice is that of the ids",
];

/// Checks turns as they come by. Holds the identity of each, not its contents.
#[derive(Debug, Default)]
pub struct Linter {
    turns: HashMap<String, Seen>,
    choices: HashMap<(String, u8), u64>,
    requests: HashMap<String, u32>,
    children: Vec<(Place, String, Micros)>,
    counts: Vec<(Place, String, Fault)>,
}

#[derive(Debug)]
struct Seen {
    session: String,
    turn: u32,
    created_at: Micros,
}

#[derive(Debug, Clone)]
struct Place {
    input: String,
    row: u64,
    session: String,
    turn: u32,
}

impl Place {
    fn finding(&self, fault: Fault) -> Finding {
        let Self { input, row, session, turn } = self.clone();
        Finding { input, row, session, turn, fault }
    }
}

impl Linter {
    /// Checks one turn against every rule and against the turns before it.
    pub fn see(&mut self, input: &str, row: u64, turn: &Turn) -> Vec<Finding> {
        let place = Place {
            input: input.to_owned(),
            row,
            session: turn.session_id.clone(),
            turn: turn.turn,
        };
        let mut faults: Vec<Fault> = rules().flat_map(|rule| (rule.check)(turn)).collect();
        let seen =
            Seen { session: turn.session_id.clone(), turn: turn.turn, created_at: turn.created_at };
        if self.turns.insert(turn.turn_id.clone(), seen).is_some() {
            faults.push(Fault::new("turn_id", format!("`{}` is there twice", turn.turn_id)));
        }
        if self.choices.insert((turn.request_id.clone(), turn.choice), row).is_some() {
            let what = format!("choice {} of `{}` is there twice", turn.choice, turn.request_id);
            faults.push(Fault::new("request_id", what));
        }
        *self.requests.entry(turn.request_id.clone()).or_default() += 1;
        if let Some(parent) = &turn.parent_turn_id {
            self.children.push((place.clone(), parent.clone(), turn.created_at));
        }
        if let Some(fault) = captured::token_count(turn) {
            self.counts.push((place.clone(), turn.request_id.clone(), fault));
        }
        faults.into_iter().map(|fault| place.finding(fault)).collect()
    }

    /// Checks what only the whole table can tell.
    pub fn finish(self) -> Vec<Finding> {
        let mut found = Vec::new();
        for (place, parent, created_at) in &self.children {
            // A parent may stand in a file that was not given.
            let Some(seen) = self.turns.get(parent) else { continue };
            let mut fault = |what: String| {
                found.push(place.finding(Fault::new("parent_turn_id", what)));
            };
            if seen.session != place.session {
                fault(format!("its parent is of session `{}`", seen.session));
            } else if u64::from(seen.turn) + 1 != u64::from(place.turn) {
                fault(format!("its parent is turn {}", seen.turn));
            }
            if seen.created_at > *created_at {
                fault("its parent was asked later".to_owned());
            }
        }
        for (place, request, fault) in &self.counts {
            // A server counts all choices of a request together.
            if self.requests.get(request) == Some(&1) {
                found.push(place.finding(fault.clone()));
            }
        }
        found
    }
}

/// Returns whether a number can be no log-prob.
pub fn bad_log_prob(value: f32) -> bool {
    !value.is_finite() || value > ABOVE_ZERO
}

/// Returns whether a number can be no advantage.
pub fn bad_advantage(value: f32) -> bool {
    // Of NaN, too.
    !(-LARGEST_ADVANTAGE..=LARGEST_ADVANTAGE).contains(&value)
}

/// Returns whether log-probs cannot have been computed at a temperature.
pub fn bad_temperature(value: f32) -> bool {
    !(SMALLEST_TEMPERATURE..=f32::MAX).contains(&value)
}

//! Which turn a request follows: pairing, branches, retries, envelopes.
//!
//! Pure: the caller brings the clock and fresh ids, and is told what happened.
//! The identity of a conversation is its messages (see [`identity`]); a stated
//! session id only narrows where to look. A wrong "main line" guess costs
//! nothing, because a turn that nobody extends has no next state and is never
//! judged. Absent on purpose: sockets, files, JSON of answers.

mod choice;
mod facts;
pub mod identity;
mod keeping;
mod tracker;

pub use facts::{Arrival, Closed, Counted, Extended, Incoming, Known, Limits, Source};
pub use identity::{History, Key};
pub use tracker::Tracker;

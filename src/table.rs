//! The door.

/// Removes what unfinished sinks have written so far.
pub fn discard_unfinished() {}

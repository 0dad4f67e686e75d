//! The JSON of the dialects that inference servers speak, and their event
//! streams.

pub mod sglang;

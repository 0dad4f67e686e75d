//! Recorded sessions in and out: what other programs write becomes turns, and
//! turns become what other trainers read.
//!
//! Nothing is made up on the way. A line that says no time gets none (1970), a
//! text without token ids stays without them unless the caller brings a
//! tokenizer, and then the row says so; a row that an output cannot hold is
//! counted under its reason and left out. Absent on purpose: files, progress,
//! exit codes.

mod conversation;
mod export;
mod import;
mod instant;
mod line;
mod messages;
mod openai;
mod preference;
mod record;
mod request;
mod retokenize;
mod sharegpt;
mod slime;

pub use export::{Left, sft, worth};
pub use import::{Counts, Imported, Importer};
pub use preference::{Pair, Preferences};
pub use slime::{Slime, teacher_candidate};

/// A published shape of recorded chats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// `{"messages": […], "tools"?: […]}`, or a chat-completions request with its
    /// response.
    OpenAi,
    /// The record file of OpenClaw-RL's proxy.
    Record,
    /// `{"conversations": [{"from", "value"}, …]}`.
    ShareGpt,
}

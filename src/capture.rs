//! From the bytes of a chat request and its answer to what was sampled.
//!
//! Pure: bytes in, bytes and facts out. A request is edited so that the engine
//! tells ids and log-probs in its dialect's way; what the client did not ask for
//! is cut out of its copy by byte range. Nothing is written anew, nothing is
//! padded, and a doubt makes a row untrainable, never a number. Absent: sockets,
//! sessions, files.

mod answer;
mod cut;
mod grow;
mod request;
mod settle;
mod stream;

pub use answer::{Answer, read_answer};
pub use cut::rename_listed;
pub use request::{Dialect, Names, Prepared, prepare, prepare_named};
pub use settle::{Captured, Outcome};
pub use stream::{Ending, Relay, StreamCapture};

/// Why a row must not be trained on, in the words of the schema.
pub mod reason {
    /// The server gave no ids of the answer.
    pub const NO_TOKEN_IDS: &str = "no_token_ids";
    /// The server gave no ids of the prompt, or such as cannot be ids.
    pub const NO_PROMPT_IDS: &str = "no_prompt_ids";
    /// The server gave no log-probs.
    pub const NO_LOG_PROBS: &str = "no_log_probs";
    /// Log-probs and ids do not fit each other, or some id cannot be one.
    pub const LOG_PROBS_MISALIGNED: &str = "log_probs_misaligned";
    /// The server counted other tokens than it sent.
    pub const USAGE_MISMATCH: &str = "usage_mismatch";
    /// llama.cpp gives no log-probs for a stream with tools.
    pub const LLAMACPP_TOOLS_STREAM: &str = "llamacpp_tools_stream";
    /// The engine, or the client, gave up.
    pub const ABORTED: &str = "aborted";
    /// The engine reported an error inside its answer.
    pub const UPSTREAM_ERROR: &str = "upstream_error";
    /// The answer broke off.
    pub const INCOMPLETE_STREAM: &str = "incomplete_stream";
    /// Part of the answer could not be read.
    pub const UNREADABLE_ANSWER: &str = "unreadable_answer";
    /// A message of the request has no role, or there is none: the engine's own
    /// guess is not known.
    pub const ODD_MESSAGES: &str = "odd_messages";
    /// A tool of the request is no object.
    pub const ODD_TOOLS: &str = "odd_tools";
    /// A sampling setting of the request is no number that it can be.
    pub const ODD_SAMPLING: &str = "odd_sampling";
    /// The answer is not the assistant's.
    pub const ODD_ANSWER: &str = "odd_answer";
    /// A choice's index is none, or another choice's.
    pub const ODD_CHOICE_INDEX: &str = "odd_choice_index";
    /// The answer held half a character, which was replaced before recording.
    pub const NOT_QUITE_JSON: &str = "not_quite_json";
}

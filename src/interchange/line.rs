//! What one line of a file tells, whatever its shape, and the ids made of it.

use serde_json::Value;
use sha2::{Digest, Sha256};

use super::Shape;
use super::{openai, record, sharegpt};
use crate::trajectory::Sampling;

/// What one line tells.
#[derive(Debug)]
pub(super) enum Line {
    /// A whole conversation.
    Conversation(Conversation),
    /// One request and its answers.
    Exchange(Box<Exchange>),
    /// A request that got no answer.
    Unanswered,
}

/// A conversation that stands whole in its line.
#[derive(Debug)]
pub(super) struct Conversation {
    pub(super) session: Option<String>,
    pub(super) messages: Vec<Value>,
    pub(super) tools: Option<Vec<Value>>,
    pub(super) model: Option<String>,
    pub(super) at: Option<i64>,
}

/// A request and its answers; which conversation it goes on with is to be found.
#[derive(Debug, Default)]
pub(super) struct Exchange {
    pub(super) session: Option<String>,
    pub(super) messages: Vec<Value>,
    pub(super) tools: Option<Vec<Value>>,
    pub(super) answers: Vec<Answer>,
    pub(super) model: Option<String>,
    pub(super) sampling: Sampling,
    pub(super) at: Option<i64>,
    /// A message that came next, as the log itself noted it.
    pub(super) next: Option<Value>,
    /// Whether the log says that the session ended here.
    pub(super) done: bool,
    /// Prompt and answer as the template of those days rendered them.
    pub(super) rendered: Option<(String, String)>,
}

/// One choice.
#[derive(Debug, Default)]
pub(super) struct Answer {
    pub(super) choice: u8,
    pub(super) message: Value,
    pub(super) finish_reason: Option<String>,
    pub(super) log_probs: LogProbs,
}

/// What a log says of the log-probs of an answer's tokens.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) enum LogProbs {
    /// Nothing.
    #[default]
    Absent,
    /// Something, but not one number for each token.
    Incomplete,
    /// One number for each token.
    Whole(Vec<f32>),
}

/// Reads one line.
pub(super) fn read(shape: Option<Shape>, value: &Value) -> Result<Line, String> {
    if !value.is_object() {
        return Err("no JSON object".to_owned());
    }
    match shape.or_else(|| detect(value)) {
        Some(Shape::OpenAi) => openai::read(value),
        Some(Shape::Record) => record::read(value),
        Some(Shape::ShareGpt) => sharegpt::read(value),
        None => Err("none of the shapes `openai`, `openclaw-rl` and `sharegpt`".to_owned()),
    }
}

fn detect(value: &Value) -> Option<Shape> {
    let has = |name: &str| value.get(name).is_some();
    if has("conversations") {
        Some(Shape::ShareGpt)
    } else if has("response_text") || has("prompt_text") || (has("votes") && has("score")) {
        Some(Shape::Record)
    } else if has("messages") || has("request") {
        Some(Shape::OpenAi)
    } else {
        None
    }
}

/// A running hash of what makes a turn this turn.
#[derive(Debug, Clone)]
pub(super) struct Identity(Sha256);

impl Identity {
    pub(super) fn new(kind: &str) -> Self {
        Self(Sha256::new()).with(kind)
    }

    /// Adds a part; parts cannot run into each other.
    pub(super) fn with(self, part: &str) -> Self {
        let length = (part.len() as u64).to_le_bytes();
        Self(self.0.chain_update(length).chain_update(part))
    }

    /// Returns a UUID of version 7 that is the same in every import.
    pub(super) fn uuid(&self, at: Option<i64>) -> String {
        let digest = self.0.clone().finalize();
        let mut random = [0; 10];
        random.copy_from_slice(&digest[..10]);
        let millis = u64::try_from(at.unwrap_or_default() / 1000).unwrap_or_default();
        uuid::Builder::from_unix_timestamp_millis(millis, &random).into_uuid().to_string()
    }

    /// Returns 16 hexadecimal digits.
    pub(super) fn hex(&self) -> String {
        self.0.clone().finalize()[..8].iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

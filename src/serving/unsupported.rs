//! What the engine cannot do and a request may ask for.
//!
//! SGLang, and so this engine, ignores members that it does not know. A member
//! of this table is known, and would change what is sampled: ignoring it would
//! give an answer that was not asked for. Neutral values, which client libraries
//! send unasked, pass.

use serde_json::{Map, Value};

use super::failure::Failure;

/// The object in which members stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// The body of a chat.
    Chat,
    /// The body of a completion.
    Completion,
    /// The body of `/generate`.
    Generate,
    /// The `sampling_params` of `/generate`.
    Sampling,
}

use Place::{Chat, Completion, Generate, Sampling};

/// A member that only some values may have.
pub(super) struct Member {
    pub(super) name: &'static str,
    pub(super) places: &'static [Place],
    neutral: fn(&Value) -> bool,
    /// What is lacking, and what to do.
    pub(super) reason: &'static str,
}

const GRAMMAR: &str =
    "answers are not held to a grammar here: leave it out, and ask for the form in the messages";
const PENALTY: &str = "tokens are sampled without penalties here: leave it out";

pub(super) const MEMBERS: &[Member] = &[
    Member {
        name: "logit_bias",
        places: &[Chat, Completion, Sampling],
        neutral: is_empty,
        reason: "logits are not biased here: leave it out",
    },
    Member {
        name: "response_format",
        places: &[Chat, Completion],
        neutral: |value| value.get("type").is_some_and(|kind| kind == "text"),
        reason: GRAMMAR,
    },
    Member {
        name: "json_schema",
        places: &[Chat, Completion, Sampling],
        neutral: is_empty,
        reason: GRAMMAR,
    },
    Member {
        name: "regex",
        places: &[Chat, Completion, Sampling],
        neutral: is_empty,
        reason: GRAMMAR,
    },
    Member {
        name: "ebnf",
        places: &[Chat, Completion, Sampling],
        neutral: is_empty,
        reason: GRAMMAR,
    },
    Member {
        name: "structural_tag",
        places: &[Chat, Completion, Sampling],
        neutral: is_empty,
        reason: GRAMMAR,
    },
    Member {
        name: "stop_regex",
        places: &[Chat, Completion, Sampling],
        neutral: is_empty,
        reason: "only strings and ids end an answer here: use `stop` or `stop_token_ids`",
    },
    Member {
        name: "custom_logit_processor",
        places: &[Chat, Completion, Generate],
        neutral: is_empty,
        reason: "logits are not processed here: leave it out",
    },
    Member {
        name: "frequency_penalty",
        places: &[Chat, Completion, Sampling],
        neutral: |value| value.as_f64() == Some(0.0),
        reason: PENALTY,
    },
    Member {
        name: "presence_penalty",
        places: &[Chat, Completion, Sampling],
        neutral: |value| value.as_f64() == Some(0.0),
        reason: PENALTY,
    },
    Member {
        name: "repetition_penalty",
        places: &[Chat, Completion, Sampling],
        neutral: |value| value.as_f64() == Some(1.0),
        reason: PENALTY,
    },
    Member {
        name: "min_tokens",
        places: &[Chat, Completion, Sampling],
        neutral: |value| value.as_f64() == Some(0.0),
        reason: "an answer ends where it ends: leave it out, or send `ignore_eos` with a `max_tokens`",
    },
    Member {
        name: "min_new_tokens",
        places: &[Chat, Completion, Sampling],
        neutral: |value| value.as_f64() == Some(0.0),
        reason: "an answer ends where it ends: leave it out, or send `ignore_eos` with a limit",
    },
    Member {
        name: "continue_final_message",
        places: &[Chat],
        neutral: |value| *value == Value::Bool(false),
        reason: "every answer is a message of its own: send the whole prompt to `/generate` instead",
    },
    Member {
        name: "echo",
        places: &[Completion],
        neutral: |value| *value == Value::Bool(false),
        reason: "the answer alone is told: leave it out, and score a prompt by `/generate` with `logprob_start_len`",
    },
    Member {
        name: "suffix",
        places: &[Completion],
        neutral: is_empty,
        reason: "nothing is filled in before a text: leave it out",
    },
    Member {
        name: "best_of",
        places: &[Completion],
        neutral: |value| value.as_f64() == Some(1.0),
        reason: "every answer that is made is told: send `n`",
    },
    Member {
        name: "functions",
        places: &[Chat],
        neutral: is_empty,
        reason: "it is the old name: send `tools`",
    },
    Member {
        name: "function_call",
        places: &[Chat],
        neutral: |value| value == "none" || value == "auto",
        reason: "it is the old name: send `tool_choice`",
    },
    Member {
        name: "audio",
        places: &[Chat],
        neutral: is_empty,
        reason: "answers are text: leave it out",
    },
    Member {
        name: "modalities",
        places: &[Chat],
        neutral: |value| {
            value.as_array().is_some_and(|kinds| kinds.iter().all(|kind| kind == "text"))
        },
        reason: "answers are text: leave it out, or send [\"text\"]",
    },
    Member {
        name: "input_embeds",
        places: &[Generate],
        neutral: is_empty,
        reason: "prompts are text or ids: send `text` or `input_ids`",
    },
    Member {
        name: "image_data",
        places: &[Generate],
        neutral: is_empty,
        reason: "prompts are text or ids: leave it out",
    },
    Member {
        name: "audio_data",
        places: &[Generate],
        neutral: is_empty,
        reason: "prompts are text or ids: leave it out",
    },
    Member {
        name: "video_data",
        places: &[Generate],
        neutral: is_empty,
        reason: "prompts are text or ids: leave it out",
    },
    Member {
        name: "session_params",
        places: &[Generate],
        neutral: is_empty,
        reason: "there are no sessions of prompts here: send the whole prompt",
    },
];

/// Refuses a request for what the engine cannot do. `members` are those that
/// the request's type has no field for.
pub(super) fn refuse(members: &Map<String, Value>, place: Place) -> Result<(), Failure> {
    let here = MEMBERS.iter().filter(|member| member.places.contains(&place));
    for Member { name, neutral, reason, .. } in here {
        match members.get(*name) {
            None | Some(Value::Null) => {}
            Some(value) if neutral(value) => {}
            Some(_) => {
                return Err(Failure::of(name, format!("`{name}` is not supported: {reason}")));
            }
        }
    }
    Ok(())
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(members) => members.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

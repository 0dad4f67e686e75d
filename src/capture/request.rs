//! What the engine is asked beyond what the client asked.

use std::sync::Arc;

use serde_json::Value;

use crate::wire::openai::{ChatRequest, OWN_FIELDS, Settings};
use crate::wire::span::{self, Member};

/// The HTTP dialect of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// SGLang, and the embedded engine.
    Sglang,
    /// vLLM.
    Vllm,
    /// The server of llama.cpp.
    LlamaCpp,
    /// Some OpenAI-compatible server or gateway.
    Generic,
}

impl Dialect {
    /// Tells whether log-probs are those of the distribution after the division by the
    /// temperature; nothing if nobody knows.
    pub fn tempers_log_probs(self) -> Option<bool> {
        match self {
            // SGLang divides by the temperature first, the others do not.
            Self::Sglang => Some(true),
            Self::Vllm | Self::LlamaCpp => Some(false),
            Self::Generic => None,
        }
    }
}

/// What one model is called by clients and by its engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names {
    /// The clients' name.
    pub public: String,
    /// The engine's name.
    pub engine: String,
}

/// A request for the engine, and what it asks beyond the client's.
#[derive(Debug, Clone, PartialEq)]
pub struct Prepared {
    /// The bytes for the engine. Only documented members differ.
    pub body: Vec<u8>,
    /// How the answer is read.
    pub dialect: Dialect,
    /// Whether the answer is a stream.
    pub stream: bool,
    /// Number of choices asked for.
    pub choices: u32,
    /// The names to change back in the client's copy.
    pub names: Option<Arc<Names>>,
    /// Members to cut from each choice of the client's copy.
    pub(super) hidden_in_choice: Vec<&'static str>,
    /// Members to cut from the top of the client's copy.
    pub(super) hidden_on_top: Vec<&'static str>,
    /// The dialect cannot give log-probs for this request.
    pub(super) unavailable: Option<&'static str>,
    /// The engine accepted what is no conversation.
    pub(super) odd: Option<&'static str>,
}

/// Members that the engine is asked for, and where the answer shows them.
struct Wish {
    ask: &'static str,
    in_choice: &'static [&'static str],
    on_top: &'static [&'static str],
}

const LOG_PROBS: Wish = Wish { ask: "logprobs", in_choice: &["logprobs"], on_top: &[] };
const SGLANG_IDS: Wish = Wish {
    ask: "return_token_ids",
    in_choice: &["prompt_token_ids", "response_token_ids"],
    on_top: &[],
};
const SGLANG_META: Wish = Wish { ask: "return_meta_info", in_choice: &["meta_info"], on_top: &[] };
const SGLANG_STREAM_INPUT: Wish =
    Wish { ask: "return_input_ids_in_sglext", in_choice: &[], on_top: &["sglext"] };
const SGLANG_STREAM_OUTPUT: Wish =
    Wish { ask: "return_output_ids_in_sglext", in_choice: &[], on_top: &["sglext"] };
const VLLM_IDS: Wish = Wish {
    ask: "return_token_ids",
    in_choice: &["token_ids", "prompt_token_ids"],
    on_top: &["prompt_token_ids"],
};

/// Edits a client's request into the engine's: the dialect's wishes are set, our
/// own session fields are removed, every other byte stays.
pub fn prepare(body: &[u8], request: &ChatRequest, dialect: Dialect) -> Prepared {
    prepare_named(body, request, dialect, None)
}

/// Edits a client's request into the engine's, the model's name included.
pub fn prepare_named(
    body: &[u8],
    request: &ChatRequest,
    dialect: Dialect,
    names: Option<&Arc<Names>>,
) -> Prepared {
    let names = names.filter(|names| names.public == request.model);
    let tools_stream = request.stream && request.tools_text.is_some();
    let (wishes, usage): (&[&Wish], bool) = match dialect {
        Dialect::Sglang if request.stream => {
            (&[&LOG_PROBS, &SGLANG_STREAM_INPUT, &SGLANG_STREAM_OUTPUT], true)
        }
        Dialect::Sglang => (&[&LOG_PROBS, &SGLANG_IDS, &SGLANG_META], false),
        Dialect::Vllm => (&[&LOG_PROBS, &VLLM_IDS], request.stream),
        Dialect::LlamaCpp if tools_stream => (&[], true),
        Dialect::LlamaCpp => (&[&LOG_PROBS], request.stream),
        // A gateway may refuse what it does not know.
        Dialect::Generic => (&[], false),
    };
    let wanted: Vec<_> = wishes.iter().filter(|wish| !request.asks(wish.ask)).collect();
    let usage = usage && !request.include_usage;
    let mut set: Vec<_> = wanted.iter().map(|wish| (wish.ask, "true".to_owned())).collect();
    let members = request.members(body);
    if usage {
        set.push(("stream_options", stream_options(body, members.as_deref())));
    }
    if let Some(names) = names {
        set.push(("model", Value::from(names.engine.as_str()).to_string()));
    }
    let mut hidden_in_choice: Vec<_> =
        wanted.iter().flat_map(|wish| wish.in_choice).copied().collect();
    let mut hidden_on_top: Vec<_> = wanted.iter().flat_map(|wish| wish.on_top).copied().collect();
    // One member answers two wishes; it stays if the client had either.
    if request.asks(SGLANG_STREAM_INPUT.ask) || request.asks(SGLANG_STREAM_OUTPUT.ask) {
        hidden_on_top.retain(|name| *name != "sglext");
    }
    hidden_on_top.dedup();
    hidden_in_choice.dedup();
    if usage {
        hidden_on_top.push("usage");
    }
    Prepared {
        body: members
            .and_then(|members| edited(body, &members, &set))
            .unwrap_or_else(|| body.to_vec()),
        dialect,
        stream: request.stream,
        choices: request.choices,
        names: names.cloned(),
        hidden_in_choice,
        hidden_on_top,
        unavailable: (dialect == Dialect::LlamaCpp && tools_stream)
            .then_some(super::reason::LLAMACPP_TOOLS_STREAM),
        odd: odd(request),
    }
}

/// Returns why nobody can say what the engine made of a request.
fn odd(request: &ChatRequest) -> Option<&'static str> {
    let has_role = |message: &Value| message.get("role").is_some_and(Value::is_string);
    if request.messages.is_empty() || !request.messages.iter().all(has_role) {
        return Some(super::reason::ODD_MESSAGES);
    }
    if request.odd_tools {
        return Some(super::reason::ODD_TOOLS);
    }
    // Some engines read `"0.7"` as a number and some do not.
    if request.odd_settings {
        return Some(super::reason::ODD_SAMPLING);
    }
    let Settings { temperature, top_p, min_p, .. } = request.settings;
    let ranges = [(temperature, f32::MAX), (top_p, 1.0), (min_p, 1.0)];
    let odd = |(value, most): &(Option<f32>, f32)| {
        value.is_some_and(|value| !(0.0..=*most).contains(&value))
    };
    ranges.iter().any(odd).then_some(super::reason::ODD_SAMPLING)
}

/// Returns the client's stream options with the usage chunk wished for.
fn stream_options(body: &[u8], members: Option<&[Member]>) -> String {
    let mut members = members.unwrap_or_default().iter().rev();
    let inner = members.find(|member| member.is(body, "stream_options"));
    let inner = inner.map(|member| &body[member.value.clone()]);
    let wish = [("include_usage", "true".to_owned())];
    inner
        .and_then(|inner| edited(inner, &span::members(inner, 0)?, &wish))
        .and_then(|bytes| String::from_utf8(bytes).ok())
        .unwrap_or_else(|| "{\"include_usage\":true}".to_owned())
}

/// Sets members of an object to new values and removes our own fields.
fn edited(bytes: &[u8], members: &[Member], set: &[(&str, String)]) -> Option<Vec<u8>> {
    let gone = |number: usize| OWN_FIELDS.iter().any(|name| members[number].is(bytes, name));
    let mut edits: Vec<_> =
        span::cuts(members, gone).into_iter().map(|range| (range, String::new())).collect();
    let mut missing = Vec::new();
    for (name, value) in set {
        let mut found = false;
        // A key that stands twice is set twice: parsers differ in which counts.
        for member in members.iter().filter(|member| member.is(bytes, name)) {
            edits.push((member.value.clone(), value.clone()));
            found = true;
        }
        if !found {
            missing.push(format!("\"{name}\":{value}"));
        }
    }
    edits.sort_by_key(|(range, _)| range.start);
    if !missing.is_empty() {
        let kept = (0..members.len()).any(|number| !gone(number));
        let end = match members.last() {
            Some(last) => last.value.end,
            None => bytes.iter().position(|byte| *byte == b'{')? + 1,
        };
        let comma = if kept { "," } else { "" };
        edits.push((end..end, format!("{comma}{}", missing.join(","))));
    }
    Some(span::edit(bytes, &edits))
}

//! What an OpenAI chat request says, as far as a capturing proxy cares. A member
//! of the wrong type counts as absent: refusing it is the engine's business.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::{json, span};
use span::Member;

/// A chat request, read leniently.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ChatRequest {
    /// Model name as the client wrote it.
    pub model: String,
    /// The messages.
    pub messages: Vec<Value>,
    /// The messages' JSON as the client wrote it (after a repair, if one was
    /// needed).
    pub messages_text: String,
    /// The tool definitions' JSON, if there are any.
    pub tools_text: Option<String>,
    /// Whether there are tools and one of them is no object.
    pub odd_tools: bool,
    /// Whether the answer is to be streamed.
    pub stream: bool,
    /// Whether the client wants the usage chunk of a stream.
    pub include_usage: bool,
    /// Number of choices.
    pub choices: u32,
    /// Sampling settings that the request states.
    pub settings: Settings,
    /// Whether a sampling setting is there and is no number.
    pub odd_settings: bool,
    /// The session fields of the body.
    pub session: SessionFields,
    /// What the client says of the answer before.
    pub rating: Rating,
    /// Whether the body was not quite JSON and was read with replacements.
    pub repaired: bool,
    flags: Vec<String>,
    /// Where the members stand in the body, unless that had to be repaired.
    members: Option<Vec<Member>>,
}

/// Sampling settings that a request states.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Settings {
    /// Softmax temperature.
    pub temperature: Option<f32>,
    /// Nucleus bound.
    pub top_p: Option<f32>,
    /// Number of ids kept.
    pub top_k: Option<i32>,
    /// Bound relative to the most likely id.
    pub min_p: Option<f32>,
    /// Seed of the sampler.
    pub seed: Option<i64>,
    /// Limit on new tokens.
    pub max_tokens: Option<u32>,
}

/// Body fields that speak about the session.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SessionFields {
    /// `session_id`.
    pub id: Option<String>,
    /// `turn_type`.
    pub turn_type: Option<String>,
    /// `session_done`.
    pub done: bool,
    /// `prompt_cache_key`, which is the upstream's too and is not removed.
    pub cache_key: Option<String>,
}

/// Body fields that say what the answer before was worth.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Rating {
    /// `reward`, -1 to 1.
    pub reward: Option<f32>,
    /// `feedback`, words.
    pub text: Option<String>,
    /// One of them is there and is none: no number from -1 to 1, no text.
    pub odd: bool,
}

/// Body fields that are ours alone and are not handed to the engine.
pub const OWN_FIELDS: &[&str] = &["session_id", "turn_type", "session_done", "reward", "feedback"];

impl ChatRequest {
    /// Reads a request body. `None` if it is no object with a list of messages.
    pub fn read(body: &[u8]) -> Option<Self> {
        let lenient = json::parse(body)?;
        let repaired = lenient.repaired();
        let members = span::members(&lenient.text, 0);
        let slice = |name: &str| {
            let mut members = members.iter().flatten().rev();
            let range = members.find(|member| member.is(&lenient.text, name))?.value.clone();
            String::from_utf8(lenient.text[range].to_vec()).ok()
        };
        let (messages_text, tools_text) = (slice("messages"), slice("tools"));
        let members = members.filter(|_| !repaired);
        let Value::Object(mut body) = lenient.value else { return None };
        let Some(Value::Array(messages)) = body.remove("messages") else { return None };
        let options = body.get("stream_options");
        let include_usage = options.and_then(|options| options.get("include_usage"));
        Some(Self {
            model: text(&body, "model").unwrap_or_default(),
            messages_text: messages_text
                .unwrap_or_else(|| Value::from(messages.clone()).to_string()),
            messages,
            tools_text: tools_text.filter(|_| has_tools(&body)),
            odd_tools: has_tools(&body) && !tools(&body).all(Value::is_object),
            stream: truth(body.get("stream")),
            include_usage: truth(include_usage),
            choices: number(&body, "n").map_or(1, |n| n as u32).max(1),
            settings: Settings::read(&body),
            odd_settings: Settings::NAMES.iter().any(|name| is_odd_number(&body, name)),
            session: SessionFields::read(&body),
            rating: Rating::read(&body),
            repaired,
            flags: body
                .iter()
                .filter(|(_, value)| truth(Some(value)))
                .map(|(key, _)| key.clone())
                .collect(),
            members,
        })
    }

    /// Returns whether a member of the request is `true`.
    pub fn asks(&self, name: &str) -> bool {
        self.flags.iter().any(|flag| flag == name)
    }

    /// Returns where the members of the body stand.
    pub fn members(&self, body: &[u8]) -> Option<Cow<'_, [Member]>> {
        match &self.members {
            Some(members) => Some(Cow::Borrowed(members)),
            None => span::members(body, 0).map(Cow::Owned),
        }
    }
}

impl Settings {
    /// The members that settings are read from.
    const NAMES: [&str; 7] =
        ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "max_completion_tokens"];

    fn read(body: &Map<String, Value>) -> Self {
        let max_tokens =
            number(body, "max_completion_tokens").or_else(|| number(body, "max_tokens"));
        Self {
            temperature: number(body, "temperature").map(|value| value as f32),
            top_p: number(body, "top_p").map(|value| value as f32),
            top_k: number(body, "top_k").map(|value| value as i32),
            min_p: number(body, "min_p").map(|value| value as f32),
            seed: body.get("seed").and_then(Value::as_i64),
            max_tokens: max_tokens.map(|value| value as u32),
        }
    }
}

impl SessionFields {
    fn read(body: &Map<String, Value>) -> Self {
        Self {
            id: text(body, "session_id"),
            turn_type: text(body, "turn_type"),
            done: match body.get("session_done") {
                Some(Value::String(word)) => is_truthy(word),
                Some(Value::Number(number)) => number.as_f64() != Some(0.0),
                other => truth(other),
            },
            cache_key: text(body, "prompt_cache_key"),
        }
    }
}

impl Rating {
    fn read(body: &Map<String, Value>) -> Self {
        let given = |name: &str| body.get(name).filter(|value| !value.is_null());
        let range = -1.0..=1.0;
        let reward = given("reward").map(|value| value.as_f64().filter(|it| range.contains(it)));
        let text = given("feedback").map(Value::as_str);
        let odd = matches!(reward, Some(None)) || matches!(text, Some(None));
        let text = text.flatten().filter(|text| !text.trim().is_empty());
        Self {
            reward: reward.flatten().map(|reward| reward as f32),
            text: text.map(str::to_owned),
            odd,
        }
    }

    /// Returns whether nothing is said that can be kept.
    pub fn is_empty(&self) -> bool {
        self.reward.is_none() && self.text.is_none()
    }
}

/// Reads a header's or field's word as the reference does.
pub fn is_truthy(word: &str) -> bool {
    ["1", "true", "yes", "on"].iter().any(|yes| word.trim().eq_ignore_ascii_case(yes))
}

fn has_tools(body: &Map<String, Value>) -> bool {
    tools(body).next().is_some()
}

fn tools(body: &Map<String, Value>) -> impl Iterator<Item = &Value> {
    body.get("tools").and_then(Value::as_array).into_iter().flatten()
}

fn truth(value: Option<&Value>) -> bool {
    value.and_then(Value::as_bool).unwrap_or_default()
}

fn text(body: &Map<String, Value>, name: &str) -> Option<String> {
    let text = body.get(name)?.as_str()?;
    (!text.trim().is_empty()).then(|| text.to_owned())
}

fn number(body: &Map<String, Value>, name: &str) -> Option<f64> {
    body.get(name)?.as_f64()
}

/// Null is what a client sends for "as you like".
fn is_odd_number(body: &Map<String, Value>, name: &str) -> bool {
    body.get(name).is_some_and(|value| !value.is_null() && !value.is_number())
}

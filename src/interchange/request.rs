//! What a request says besides its messages.

use serde_json::Value;

use super::messages::{shortened, text_of};
use crate::trajectory::Sampling;
use crate::wire::openai::ChatRequest;

/// Longest session id that is believed.
const LONGEST: usize = 512;

/// Returns the session that a line or a request names.
pub(super) fn session_of(value: &Value) -> Option<String> {
    let names = ["session_id", "conversation_id"];
    let inner = value.get("metadata").and_then(|inner| text_of(inner, &names));
    let session = text_of(value, &names).or(inner);
    believed(session.or_else(|| text_of(value, &["prompt_cache_key"])))
}

/// Returns the session of a line that is a whole conversation: its own id, if
/// nothing else is named.
pub(super) fn session_of_conversation(value: &Value) -> Option<String> {
    session_of(value).or_else(|| believed(text_of(value, &["id"])))
}

fn believed(session: Option<&str>) -> Option<String> {
    session.filter(|session| session.len() <= LONGEST).map(str::to_owned)
}

/// Returns the sampling settings of a request, or which of them is none.
pub(super) fn sampling(request: &Value) -> Result<Sampling, String> {
    let Some(read) = ChatRequest::read(request.to_string().as_bytes()) else {
        return Err("the request is no chat request".to_owned());
    };
    let settings = read.settings;
    let ranges = [
        ("temperature", settings.temperature, f32::MAX),
        ("top_p", settings.top_p, 1.0),
        ("min_p", settings.min_p, 1.0),
    ];
    for (name, value, most) in ranges {
        if let Some(value) = value.filter(|value| !(0.0..=most).contains(value)) {
            return Err(format!("`{name}` is {}", shortened(&value.to_string())));
        }
    }
    Ok(Sampling {
        temperature: settings.temperature,
        top_p: settings.top_p,
        top_k: settings.top_k,
        min_p: settings.min_p,
        seed: settings.seed,
        max_tokens: settings.max_tokens,
        ..Sampling::default()
    })
}

//! One answer as it grows: ids, log-probs, versions, and why it ended.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::template::Tokenizer;

use super::compute::{End, Token};
use super::text::{Part, TextStream};

/// An answer.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) tokens: Vec<Token>,
    pub(super) finish: Option<Finish>,
    stream: TextStream,
    calls: usize,
    /// Tokens that were thought, marks included.
    pub(super) thought: usize,
    /// Tokens of the prompt that were not computed for it.
    pub(super) cached: usize,
    /// Ids whose token stays out of the text.
    trimmed: Vec<i32>,
}

/// Why an answer ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Finish {
    /// By a token.
    StopToken(i32),
    /// By a stop string.
    StopText(String),
    /// By its limit.
    Length,
    /// By request.
    Abort,
}

impl Answer {
    /// Starts an answer. A token of `trimmed` stays out of the text.
    pub(super) fn new(stream: TextStream, trimmed: Vec<i32>) -> Self {
        Self { tokens: Vec::new(), finish: None, stream, calls: 0, thought: 0, cached: 0, trimmed }
    }

    /// Takes a token; returns the parts that it completes. It may complete a stop
    /// string, which ends the answer.
    pub(super) fn push(&mut self, token: Token) -> Vec<Part> {
        let id = token.id;
        self.tokens.push(token);
        if self.trimmed.contains(&id) {
            return Vec::new();
        }
        let before = self.stream.is_thinking();
        let (parts, matched) = self.stream.push(id);
        self.thought += usize::from(before || self.stream.is_thinking());
        if let Some(stop) = matched {
            self.finish = Some(Finish::StopText(stop));
        }
        self.counted(parts)
    }

    /// Ends the answer; returns what was held back.
    pub(super) fn end(&mut self, end: End) -> Vec<Part> {
        if self.finish.is_none() {
            self.finish = Some(match end {
                End::Stop(id) => Finish::StopToken(id),
                End::Length => Finish::Length,
                End::Abort => Finish::Abort,
            });
        }
        let parts = self.stream.finish();
        self.counted(parts)
    }

    fn counted(&mut self, parts: Vec<Part>) -> Vec<Part> {
        self.calls += parts.iter().filter(|part| matches!(part, Part::Call { .. })).count();
        parts
    }

    /// Returns OpenAI's word for the end.
    pub(super) fn finish_reason(&self) -> Option<&'static str> {
        Some(match self.finish.as_ref()? {
            Finish::StopToken(_) | Finish::StopText(_) if self.calls > 0 => "tool_calls",
            Finish::StopToken(_) | Finish::StopText(_) => "stop",
            Finish::Length => "length",
            Finish::Abort => "abort",
        })
    }

    /// Returns what the end matched: an id or a string.
    pub(super) fn matched(&self) -> Value {
        match &self.finish {
            Some(Finish::StopToken(id)) => json!(id),
            Some(Finish::StopText(text)) => json!(text),
            _ => Value::Null,
        }
    }

    /// Returns SGLang's object for the end.
    pub(super) fn native_finish(&self) -> Value {
        match &self.finish {
            None => Value::Null,
            Some(Finish::StopToken(id)) => json!({"type": "stop", "matched": id}),
            Some(Finish::StopText(text)) => json!({"type": "stop", "matched": text}),
            Some(Finish::Length) => json!({"type": "length", "length": self.tokens.len()}),
            Some(Finish::Abort) => aborted(),
        }
    }

    /// Returns the ids.
    pub(super) fn ids(&self) -> Vec<i32> {
        self.tokens.iter().map(|token| token.id).collect()
    }

    /// Returns the version that made the last token, and, if the weights were
    /// changed on the way, the half-open ranges of each.
    pub(super) fn versions(&self, now: &Arc<str>) -> (Arc<str>, Option<Value>) {
        let mut spans: Vec<(Arc<str>, usize, usize)> = Vec::new();
        for (place, token) in self.tokens.iter().enumerate() {
            match spans.last_mut() {
                Some((version, _, end)) if *version == token.version => *end = place + 1,
                _ => spans.push((token.version.clone(), place, place + 1)),
            }
        }
        let last = spans.last().map_or_else(|| now.clone(), |(version, ..)| version.clone());
        let told = spans.len() > 1;
        let span = |(version, start, end): &(Arc<str>, usize, usize)| json!({"version": &**version, "start": start, "end": end});
        (last, told.then(|| spans.iter().map(span).collect()))
    }
}

/// Returns SGLang's object for the end of what was aborted.
pub(super) fn aborted() -> Value {
    json!({
        "type": "abort",
        "message": "the request was aborted",
        "status_code": null,
        "err_type": null,
    })
}

/// Returns OpenAI's entries for tokens.
pub(super) fn log_prob_entries(tokens: &[Token], tokenizer: &Tokenizer) -> Vec<Value> {
    let entry = |id: i32, log_prob: f32| {
        let (text, bytes) = spelled(id, tokenizer);
        json!({"token": text, "bytes": bytes, "logprob": decimal(log_prob)})
    };
    let whole = |token: &Token| {
        let mut value = entry(token.id, token.log_prob);
        let top: Vec<_> = token.top.iter().map(|(id, log_prob)| entry(*id, *log_prob)).collect();
        value["top_logprobs"] = Value::Array(top);
        value
    };
    tokens.iter().map(whole).collect()
}

/// Returns SGLang's triple.
pub(super) fn triple(log_prob: Option<f32>, id: i64, tokenizer: Option<&Tokenizer>) -> Value {
    let text = tokenizer.map(|tokenizer| spelled(id as i32, tokenizer).0);
    json!([log_prob.map(decimal), id, text])
}

/// Widens by way of the shortest decimal: half the bytes, and the same f32
/// again when it is read. JSON has no infinity: what cannot be, as all tokens but one at a
/// temperature of next to nothing, has the lowest number. What is no log-prob at all stays
/// none, and is null in JSON.
pub(super) fn decimal(number: f32) -> f64 {
    let number = if number == f32::NEG_INFINITY { f32::MIN } else { number };
    number.to_string().parse().unwrap_or(f64::from(number))
}

/// Returns a token as text and as bytes. A piece of a character is U+FFFD as
/// text; its bytes are right.
pub(super) fn spelled(id: i32, tokenizer: &Tokenizer) -> (String, Vec<u8>) {
    let text = tokenizer.decode(&[id], false).unwrap_or_default();
    let bytes = match text.contains('\u{fffd}') {
        true => tokenizer.token_of(id).and_then(|token| token.chars().map(byte_of).collect()),
        false => None,
    };
    let bytes = bytes.unwrap_or_else(|| text.as_bytes().to_vec());
    (text, bytes)
}

/// Returns the byte that a character stands for in byte-level vocabularies: the
/// printable ones are themselves, the rest follow from U+0100 on.
fn byte_of(character: char) -> Option<u8> {
    let printable = |byte: u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let code = u32::from(character);
    match u8::try_from(code) {
        Ok(byte) => printable(byte).then_some(byte),
        Err(_) => {
            let place = code.checked_sub(0x100)? as usize;
            (0..=u8::MAX).filter(|byte| !printable(*byte)).nth(place)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_level_characters_are_bytes() {
        // The table of GPT-2: Ġ is the space, Ċ the newline.
        let expected =
            [('Ġ', 0x20), ('Ċ', 0x0a), ('a', 0x61), ('Ã', 0xc3), ('Ń', 0xad), ('ł', 0xa0)];
        for (character, byte) in expected {
            assert_eq!(byte_of(character), Some(byte), "{character}");
        }
        assert_eq!(byte_of('世'), None);
    }

    #[test]
    fn log_probs_keep_their_value_and_lose_their_tail() {
        assert_eq!(decimal(-0.2), -0.2);
        assert_eq!(decimal(-1.0e-7) as f32, -1.0e-7);
        assert_eq!(decimal(f32::NEG_INFINITY) as f32, f32::MIN);
        assert_eq!(decimal(f32::MIN) as f32, f32::MIN);
        for none in [f32::NAN, f32::INFINITY] {
            assert_eq!(json!(decimal(none)), Value::Null, "{none}");
        }
    }
}

//! Reading what a judge said.

use std::sync::OnceLock;

use regex::Regex;

use super::Reply;

/// Why a call gave no vote.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// No box in the final answer.
    #[error("unreadable")]
    Unreadable,
    /// The last box holds another number.
    #[error("out of range")]
    OutOfRange,
    /// The token limit ended the answer.
    #[error("truncated")]
    Truncated,
    /// The answer was cut off by the server.
    #[error("ended by the server ({reason})")]
    Ended {
        /// The server's word for it.
        reason: String,
    },
    /// The call failed.
    #[error("{reason}")]
    Failed {
        /// Why, in few words: `timeout`, `status 500`.
        reason: String,
    },
}

impl Fault {
    /// Returns the fault of a failed call.
    pub fn failed(reason: impl Into<String>) -> Self {
        Self::Failed { reason: reason.into() }
    }
}

/// Refuses an answer that is not whole: what stands in it may have been meant
/// as a beginning.
pub fn reply_is_whole(reply: &Reply) -> Result<(), Fault> {
    match reply.finish_reason.as_deref() {
        Some("length") => Err(Fault::Truncated),
        Some(reason @ ("abort" | "content_filter" | "error")) => {
            Err(Fault::Ended { reason: reason.to_owned() })
        }
        _ => Ok(()),
    }
}

struct Patterns {
    thought: Regex,
    opening: Regex,
    closing: Regex,
    boxed: Regex,
    digit: Regex,
}

fn patterns() -> Option<&'static Patterns> {
    static PATTERNS: OnceLock<Option<Patterns>> = OnceLock::new();
    let compile = || {
        let tag = "(?:think|thinking|thought|reasoning)";
        Some(Patterns {
            thought: Regex::new(&format!("(?s)<{tag}>.*?</{tag}>")).ok()?,
            opening: Regex::new(&format!("<{tag}>")).ok()?,
            closing: Regex::new(&format!("</{tag}>")).ok()?,
            boxed: Regex::new(r"\\boxed\{([-+]?)(\d)\}").ok()?,
            digit: Regex::new(r"^\d$").ok()?,
        })
    };
    PATTERNS.get_or_init(compile).as_ref()
}

/// Returns an answer without its thinking. A closing tag alone ends thinking
/// that the prompt had opened; an opening tag alone begins thinking that never
/// ended.
pub fn final_answer(text: &str) -> String {
    let Some(patterns) = patterns() else {
        return String::new();
    };
    let text = patterns.thought.replace_all(text, "");
    let after = patterns.closing.find_iter(&text).last().map_or(0, |tag| tag.end());
    let text = &text[after..];
    let before = patterns.opening.find(text).map_or(text.len(), |tag| tag.start());
    text[..before].to_owned()
}

/// Returns the number in the last well-formed box of a text: an optional sign
/// and one digit of any script. Quoted lines (`>`) are somebody else's words.
pub fn last_box(text: &str) -> Option<i8> {
    let patterns = patterns()?;
    let own = text.lines().filter(|line| !line.trim_start().starts_with('>'));
    let found = own.flat_map(|line| patterns.boxed.captures_iter(line)).last()?;
    let digit = digit(found[2].chars().next()?, &patterns.digit)?;
    Some(if &found[1] == "-" { -digit } else { digit })
}

/// The value of a decimal digit. Unicode keeps the digits of a script in runs
/// of ten from 0 on, so the distance from the run's start tells it.
fn digit(character: char, is_digit: &Regex) -> Option<i8> {
    let mut start = character;
    let mut buffer = [0; 4];
    while let Some(before) = u32::from(start).checked_sub(1).and_then(char::from_u32) {
        if !is_digit.is_match(before.encode_utf8(&mut buffer)) {
            break;
        }
        start = before;
    }
    i8::try_from((u32::from(character) - u32::from(start)) % 10).ok()
}

//! Showing somebody else's words to a judge.
//!
//! Each line of quoted material begins with `> `, so none can look like a
//! heading of ours. What a judge could repeat as a verdict, or its tokenizer
//! read as a control token, is broken by a space.

use std::sync::OnceLock;

use regex::Regex;

/// How much of each part a judge sees, in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quoting {
    /// The request before the answer.
    pub request: usize,
    /// The answer.
    pub answer: usize,
    /// All messages of the next state together, shared evenly; of many, as many
    /// are shown as get 80 each.
    pub next_state: usize,
}

impl Default for Quoting {
    fn default() -> Self {
        Self { request: 4_000, answer: 8_000, next_state: 8_000 }
    }
}

/// The least that is shown of one of many messages that is shown at all.
pub(super) const LEAST: usize = 80;

/// Quotes a text. One longer than the limit keeps the first two thirds and the
/// last third of it, and says how many characters are left out between.
pub fn quote(text: &str, limit: usize) -> String {
    let length = text.chars().count();
    if length <= limit {
        return lines(text);
    }
    let byte = |count: usize| text.char_indices().nth(count).map_or(text.len(), |(at, _)| at);
    let head = limit * 2 / 3;
    let tail = limit - head;
    let (head, tail) = (&text[..byte(head)], &text[byte(length - tail)..]);
    format!("{}({} characters left out)\n{}", lines(head), length - limit, lines(tail))
}

fn lines(text: &str) -> String {
    let mut quoted = String::new();
    // Everything that some reader takes for the end of a line.
    let text = text.replace("\r\n", "\n");
    let breaks = ['\n', '\r', '\u{b}', '\u{c}', '\u{85}', '\u{2028}', '\u{2029}'];
    for line in text.trim_end_matches(breaks).split(breaks) {
        quoted.push_str("> ");
        quoted.push_str(&defused(line));
        quoted.push('\n');
    }
    quoted
}

/// Breaks what is not to be taken literally.
pub(super) fn defused(line: &str) -> String {
    static PATTERN: OnceLock<Option<Regex>> = OnceLock::new();
    let pattern = || {
        let tags = r"</?(?:think|thinking|thought|reasoning|s|bos|eos|start_of_turn|end_of_turn)>";
        let marks = r"<[|｜]|\[/?(?:INST|HINT_START|HINT_END)\]|\\boxed";
        Regex::new(&format!("(?i){tags}|{marks}")).ok()
    };
    let Some(pattern) = PATTERN.get_or_init(pattern) else {
        return line.to_owned();
    };
    let broken = pattern.replace_all(line, |found: &regex::Captures<'_>| {
        let (first, rest) = found[0].split_at(1);
        format!("{first} {rest}")
    });
    // Both ends of a control token, for readers that look at one only.
    broken.replace("|>", "| >").replace("｜>", "｜ >")
}

//! What a model thinks, between `<think>` and `</think>`, apart from what it says.
//!
//! An answer thinks if it begins with the mark, or if its prompt ends with it. A mark
//! later in an answer is text. White space around either part belongs to the marks.

use super::overlap;

/// What thinking begins with.
pub(in crate::serving) const OPEN: &str = "<think>";
/// What it ends with.
pub(in crate::serving) const CLOSE: &str = "</think>";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing but white space and a part of the mark so far.
    Undecided,
    /// Within the marks; `begun` once something was thought.
    Thinking { begun: bool },
    /// After the closing mark, before the first word.
    Between,
    /// What comes is said.
    Saying,
}

/// Splits an answer.
#[derive(Debug, Clone)]
pub(in crate::serving) struct Think {
    state: State,
    held: String,
    /// Whether a thought is told as it comes.
    streamed: bool,
}

/// What a piece of text turned out to be.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Split {
    pub(super) thought: String,
    pub(super) said: String,
}

impl Think {
    /// Starts an answer; `opened` if its prompt ends with the mark.
    pub(in crate::serving) fn new(opened: bool, streamed: bool) -> Self {
        let state = if opened { State::Thinking { begun: false } } else { State::Undecided };
        Self { state, held: String::new(), streamed }
    }

    /// Whether the answer is within the marks.
    pub(super) fn is_thinking(&self) -> bool {
        matches!(self.state, State::Thinking { .. })
    }

    pub(super) fn push(&mut self, text: &str) -> Split {
        self.held.push_str(text);
        let mut split = Split::default();
        if self.state == State::Undecided {
            let word = self.held.trim_start();
            if let Some(rest) = word.strip_prefix(OPEN) {
                self.held = rest.to_owned();
                self.state = State::Thinking { begun: false };
            } else if !OPEN.starts_with(word) {
                self.state = State::Saying;
            }
        }
        if let State::Thinking { begun } = self.state {
            split.thought = self.thought(begun);
        }
        if self.state == State::Between {
            self.held = self.held.trim_start().to_owned();
            if !self.held.is_empty() {
                self.state = State::Saying;
            }
        }
        if self.state == State::Saying {
            split.said = std::mem::take(&mut self.held);
        }
        split
    }

    /// Returns what may be told of the thought; goes on behind its end, if that is there.
    fn thought(&mut self, begun: bool) -> String {
        if !begun {
            self.held = self.held.trim_start().to_owned();
        }
        if let Some(at) = self.held.find(CLOSE) {
            let thought = self.held[..at].trim_end().to_owned();
            self.held.drain(..at + CLOSE.len());
            self.state = State::Between;
            return thought;
        }
        if !self.streamed {
            return String::new();
        }
        // White space at the end may turn out to be that before the mark.
        let free = self.held[..self.held.len() - overlap(&self.held, CLOSE)].trim_end().len();
        let thought: String = self.held.drain(..free).collect();
        self.state = State::Thinking { begun: begun || !thought.is_empty() };
        thought
    }

    /// Ends the answer; returns what was held back.
    pub(super) fn finish(&mut self) -> Split {
        let held = std::mem::take(&mut self.held);
        match self.state {
            State::Thinking { .. } => {
                Split { thought: held.trim_end().to_owned(), said: String::new() }
            }
            _ => Split { thought: String::new(), said: held },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(opened: bool, streamed: bool, pieces: &[&str]) -> (String, String) {
        let mut think = Think::new(opened, streamed);
        let mut parts: Vec<_> = pieces.iter().map(|piece| think.push(piece)).collect();
        parts.push(think.finish());
        let thought = parts.iter().map(|part| part.thought.as_str()).collect();
        (thought, parts.iter().map(|part| part.said.as_str()).collect())
    }

    #[test]
    fn thought_and_speech_are_apart_however_the_text_is_split() {
        for (opened, whole, thought, said) in [
            (
                false,
                "<think>\nHm, a < b.\n\nYes.\n</think>\n\nIt is. ",
                "Hm, a < b.\n\nYes.",
                "It is. ",
            ),
            (false, " \n<think></think>\n\nIt is.", "", "It is."),
            (false, "<think>\nand so on \n", "and so on", ""),
            (false, "<think>x</thin", "x</thin", ""),
            (true, "Hm.\n</think>\nIt is.", "Hm.", "It is."),
            (true, "", "", ""),
            // No mark, or not at the beginning: text as it stands.
            (false, " It is. <think>x</think> y", "", " It is. <think>x</think> y"),
            (false, "<thinking>", "", "<thinking>"),
            (false, " \n", "", " \n"),
            (false, "<thi", "", "<thi"),
            (false, "a</think>b", "", "a</think>b"),
            (false, "<think>a</think>b</think>c", "a", "b</think>c"),
        ] {
            let letters: Vec<_> = whole.split_inclusive(|_: char| true).collect();
            for streamed in [true, false] {
                for pieces in [&[whole][..], &letters] {
                    let found = split(opened, streamed, pieces);
                    assert_eq!(
                        found,
                        (thought.to_owned(), said.to_owned()),
                        "{whole:?} {pieces:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_thought_is_streamed_or_told_at_its_end() {
        for (streamed, first) in [(true, "Hm."), (false, "")] {
            let mut think = Think::new(true, streamed);
            assert_eq!(think.push("Hm. ").thought, first);
            assert!(think.is_thinking());
            let rest = think.push("Yes.</think>");
            assert_eq!(rest.thought, if streamed { " Yes." } else { "Hm. Yes." });
            assert!(!think.is_thinking());
        }
    }
}

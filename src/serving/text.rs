//! Ids to text, as they come: stop strings, thoughts and tool calls are cut out on
//! the way. A stream and a whole answer go through the same code, so they agree.

mod calls;
mod think;

use std::sync::Arc;

use crate::template::Decoder;

use calls::{Calls, Forced};
use think::Split;

pub(super) use calls::{Form, tool_names};
pub(super) use think::{CLOSE as THINK_CLOSE, OPEN as THINK_OPEN, Think};

/// A piece of an answer, complete in itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Part {
    /// Text to be appended.
    Text(String),
    /// Text to be appended to what was thought.
    Thought(String),
    /// A whole tool call.
    Call {
        /// Name of the tool.
        name: String,
        /// Arguments as the model wrote them.
        arguments: String,
    },
}

/// What a request says about tools.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) enum Tools {
    /// There are none, or they must not be called.
    #[default]
    None,
    /// Calls to tools of these names are cut out of the text.
    Offered(Arc<[String]>),
    /// The prompt ends inside a call to this tool: the text is its arguments.
    Forced(String, Form),
}

impl Tools {
    /// Returns what the prompt of a forced call ends with. The model goes on
    /// with the arguments.
    pub(super) fn opening(&self) -> Option<String> {
        let Self::Forced(name, form) = self else { return None };
        Some(form.opening(name))
    }
}

/// Turns ids into parts.
#[derive(Debug)]
pub(super) struct TextStream {
    decoder: Option<Decoder>,
    stops: Stops,
    think: Option<Think>,
    calls: Option<Calls>,
    forced: Option<Forced>,
}

impl TextStream {
    /// Starts an answer.
    pub(super) fn new(
        decoder: Decoder,
        mut stops: Stops,
        think: Option<Think>,
        tools: Tools,
    ) -> Self {
        let (mut calls, mut forced) = (None, None);
        match tools {
            Tools::None => {}
            Tools::Offered(tools) => calls = Some(Calls::new(tools)),
            Tools::Forced(name, form) => {
                if form == Form::Hermes {
                    Arc::make_mut(&mut stops.strings).push(calls::CLOSE.to_owned());
                    stops.keep = false;
                }
                forced = Some(Forced { name, arguments: String::new() });
            }
        }
        Self { decoder: Some(decoder), stops, think, calls, forced }
    }

    /// Takes an id; returns the parts that it completes and the stop string that
    /// it completes, after which nothing more may come.
    pub(super) fn push(&mut self, id: i32) -> (Vec<Part>, Option<String>) {
        let text = self.decoder.as_mut().and_then(|decoder| decoder.step(id)).unwrap_or_default();
        let (text, matched) = self.stops.push(&text);
        let mut parts = self.parts(&text);
        if matched.is_some() {
            self.decoder = None;
            parts.extend(self.rest());
        }
        (parts, matched)
    }

    /// Ends the answer; returns what was held back.
    pub(super) fn finish(&mut self) -> Vec<Part> {
        let Some(decoder) = self.decoder.take() else {
            return Vec::new();
        };
        let last = decoder.finish().unwrap_or_default();
        let (mut text, matched) = self.stops.push(&last);
        if matched.is_none() {
            text.push_str(&std::mem::take(&mut self.stops.held));
        }
        let mut parts = self.parts(&text);
        parts.extend(self.rest());
        parts
    }

    /// Whether what comes is thought.
    pub(super) fn is_thinking(&self) -> bool {
        self.think.as_ref().is_some_and(Think::is_thinking)
    }

    fn parts(&mut self, text: &str) -> Vec<Part> {
        match &mut self.think {
            Some(think) => {
                let split = think.push(text);
                self.split(split)
            }
            None => self.said(text),
        }
    }

    fn split(&mut self, Split { thought, said }: Split) -> Vec<Part> {
        let thought = (!thought.is_empty()).then_some(Part::Thought(thought));
        thought.into_iter().chain(self.said(&said)).collect()
    }

    fn said(&mut self, text: &str) -> Vec<Part> {
        if let Some(forced) = &mut self.forced {
            forced.arguments.push_str(text);
            return Vec::new();
        }
        match &mut self.calls {
            Some(calls) => calls.push(text),
            None if text.is_empty() => Vec::new(),
            None => vec![Part::Text(text.to_owned())],
        }
    }

    fn rest(&mut self) -> Vec<Part> {
        let held = self.think.as_mut().map(Think::finish);
        let mut parts = held.map(|split| self.split(split)).unwrap_or_default();
        match self.forced.take() {
            Some(forced) => parts.push(forced.finish()),
            None => parts.extend(self.calls.as_mut().and_then(Calls::finish)),
        }
        parts
    }
}

/// The stop strings of a request, and the text that may be the start of one.
#[derive(Debug, Clone, Default)]
pub(super) struct Stops {
    /// All answers of a request share them.
    strings: Arc<Vec<String>>,
    keep: bool,
    held: String,
}

impl Stops {
    /// Returns the stops of a request; `keep` leaves the match in the text.
    pub(super) fn new(strings: Vec<String>, keep: bool) -> Self {
        Self { strings: Arc::new(strings), keep, held: String::new() }
    }

    fn push(&mut self, text: &str) -> (String, Option<String>) {
        if self.strings.is_empty() {
            return (text.to_owned(), None);
        }
        self.held.push_str(text);
        let found = self.strings.iter().filter_map(|stop| Some((self.held.find(stop)?, stop)));
        if let Some((at, stop)) =
            found.min_by_key(|(at, stop)| (*at, std::cmp::Reverse(stop.len())))
        {
            let stop = stop.clone();
            let end = if self.keep { at + stop.len() } else { at };
            let text = self.held[..end].to_owned();
            self.held.clear();
            return (text, Some(stop));
        }
        let kept = self.strings.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - kept);
        (std::mem::replace(&mut self.held, rest), None)
    }
}

/// Returns the length of the longest end of `text` that begins `word` without
/// being all of it.
fn overlap(text: &str, word: &str) -> usize {
    let longest = word.len().saturating_sub(1).min(text.len());
    let fits = |length: &usize| {
        word.is_char_boundary(*length) && text.as_bytes().ends_with(&word.as_bytes()[..*length])
    };
    (1..=longest).rev().find(fits).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stopped(stops: &[&str], keep: bool, pieces: &[&str]) -> (Vec<String>, Option<String>) {
        let mut stops = Stops::new(stops.iter().map(|stop| (*stop).to_owned()).collect(), keep);
        let mut texts = Vec::new();
        for piece in pieces {
            let (text, matched) = stops.push(piece);
            texts.push(text);
            if matched.is_some() {
                return (texts, matched);
            }
        }
        texts.push(stops.held);
        (texts, None)
    }

    #[test]
    fn a_stop_string_may_lie_across_pieces() {
        let (texts, matched) = stopped(&["END", "\n\n"], false, &["a", "bE", "N", "Dc"]);
        assert_eq!((texts.concat().as_str(), matched.as_deref()), ("ab", Some("END")));
        let (texts, matched) = stopped(&["END"], true, &["abENDc"]);
        assert_eq!((texts.concat().as_str(), matched.as_deref()), ("abEND", Some("END")));
        let (texts, matched) = stopped(&["END"], false, &["aE", "NE", "N"]);
        assert_eq!((texts, matched), (vec!["a".into(), "EN".into(), "".into(), "EN".into()], None));
        let (texts, _) = stopped(&["é!"], false, &["é", "x"]);
        assert_eq!(texts, ["", "éx", ""]);
    }

    #[test]
    fn the_earliest_stop_wins_then_the_longest() {
        let (texts, matched) = stopped(&["b", "bc", "c"], false, &["abc"]);
        assert_eq!((texts.concat().as_str(), matched.as_deref()), ("a", Some("bc")));
    }
}

//! Ids to text, as they come: stop strings and tool calls are cut out on the
//! way. A stream and a whole answer go through the same code, so they agree.

use serde_json::Value;
use serde_json::value::RawValue;

use crate::template::Decoder;

/// A piece of an answer, complete in itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Part {
    /// Text to be appended.
    Text(String),
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
    Offered(Vec<String>),
    /// The prompt ends inside a call to this tool: the text is its arguments.
    Forced(String),
}

impl Tools {
    /// Returns what the prompt of a forced call ends with. The model goes on
    /// with the arguments.
    pub(super) fn opening(&self) -> Option<String> {
        let Self::Forced(name) = self else { return None };
        Some(format!("{OPEN}\n{{\"name\": {}, \"arguments\":", Value::from(name.as_str())))
    }
}

/// Turns ids into parts.
#[derive(Debug)]
pub(super) struct TextStream {
    decoder: Option<Decoder>,
    stops: Stops,
    calls: Option<Calls>,
    forced: Option<Forced>,
}

impl TextStream {
    /// Starts an answer.
    pub(super) fn new(decoder: Decoder, mut stops: Stops, tools: Tools) -> Self {
        let (mut calls, mut forced) = (None, None);
        match tools {
            Tools::None => {}
            Tools::Offered(tools) => {
                calls = Some(Calls { tools, held: String::new(), after_call: false });
            }
            Tools::Forced(name) => {
                stops.strings.push(CLOSE.to_owned());
                stops.keep = false;
                forced = Some(Forced { name, arguments: String::new() });
            }
        }
        Self { decoder: Some(decoder), stops, calls, forced }
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

    fn parts(&mut self, text: &str) -> Vec<Part> {
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

    fn rest(&mut self) -> Option<Part> {
        if let Some(forced) = self.forced.take() {
            return Some(forced.finish());
        }
        self.calls.as_mut().and_then(Calls::finish)
    }
}

/// The stop strings of a request, and the text that may be the start of one.
#[derive(Debug, Clone, Default)]
pub(super) struct Stops {
    strings: Vec<String>,
    keep: bool,
    held: String,
}

impl Stops {
    /// Returns the stops of a request; `keep` leaves the match in the text.
    pub(super) fn new(strings: Vec<String>, keep: bool) -> Self {
        Self { strings, keep, held: String::new() }
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

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

/// Cuts `<tool_call>{json}</tool_call>` out of a text. White space around a call
/// belongs to it; a block that is no call to a known tool stays text.
#[derive(Debug)]
struct Calls {
    tools: Vec<String>,
    held: String,
    after_call: bool,
}

impl Calls {
    fn push(&mut self, text: &str) -> Vec<Part> {
        self.held.push_str(text);
        let mut parts = Vec::new();
        while let Some(open) = self.held.find(OPEN) {
            let body = open + OPEN.len();
            let Some(length) = self.held[body..].find(CLOSE) else {
                self.release(open, &mut parts);
                return parts;
            };
            let end = body + length + CLOSE.len();
            match self.call(&self.held[body..body + length]) {
                Some(call) => {
                    self.release(open, &mut parts);
                    // What is left before the block is white space.
                    let blank = self.held.find(OPEN).unwrap_or_default();
                    self.held.drain(..blank + (end - open));
                    self.after_call = true;
                    parts.push(call);
                }
                None => {
                    let text: String = self.held.drain(..end).collect();
                    self.text(text, &mut parts);
                }
            }
        }
        let free = self.held.len() - overlap(&self.held, OPEN);
        self.release(free, &mut parts);
        parts
    }

    fn finish(&mut self) -> Option<Part> {
        let mut parts = Vec::new();
        let rest = std::mem::take(&mut self.held);
        if !(self.after_call && rest.trim().is_empty()) {
            self.text(rest, &mut parts);
        }
        parts.pop()
    }

    /// Lets text up to `end` go, but not the white space at its end.
    fn release(&mut self, end: usize, parts: &mut Vec<Part>) {
        let length = self.held[..end].trim_end().len();
        let text: String = self.held.drain(..length).collect();
        self.text(text, parts);
    }

    fn text(&mut self, text: String, parts: &mut Vec<Part>) {
        let text = if self.after_call { text.trim_start().to_owned() } else { text };
        if !text.is_empty() {
            self.after_call = false;
            parts.push(Part::Text(text));
        }
    }

    fn call(&self, block: &str) -> Option<Part> {
        #[derive(serde::Deserialize)]
        struct Call {
            name: String,
            #[serde(alias = "parameters")]
            arguments: Option<Box<RawValue>>,
        }
        let call: Call = serde_json::from_str(block.trim()).ok()?;
        if !self.tools.contains(&call.name) {
            return None;
        }
        let arguments = call.arguments.map_or_else(|| "{}".to_owned(), |raw| raw.get().to_owned());
        // Some models write the arguments as a string of JSON already.
        let arguments = match serde_json::from_str(&arguments) {
            Ok(Value::String(inner)) => inner,
            _ => arguments,
        };
        Some(Part::Call { name: call.name, arguments })
    }
}

/// A call that the request demanded by name: all text is its arguments.
#[derive(Debug)]
struct Forced {
    name: String,
    arguments: String,
}

impl Forced {
    /// Ends the call. The brace that closes the call itself is cut off; what the
    /// model wrote inside is handed on as it is, valid JSON or not.
    fn finish(self) -> Part {
        let text = self.arguments.trim();
        let valid = |text: &str| serde_json::from_str::<&RawValue>(text).is_ok();
        let inner = text.strip_suffix('}').map(str::trim_end).filter(|inner| valid(inner));
        let arguments = inner.unwrap_or(text).to_owned();
        Part::Call { name: self.name, arguments }
    }
}

/// Returns the names of the tools of a request.
pub(super) fn tool_names(tools: &[Value]) -> Vec<String> {
    let name = |tool: &Value| {
        let holder = tool.get("function").unwrap_or(tool);
        holder.get("name").and_then(Value::as_str).map(str::to_owned)
    };
    tools.iter().filter_map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls(pieces: &[&str]) -> Vec<Part> {
        let tools = vec!["ls".to_owned()];
        let mut calls = Calls { tools, held: String::new(), after_call: false };
        let mut parts: Vec<_> = pieces.iter().flat_map(|piece| calls.push(piece)).collect();
        parts.extend(calls.finish());
        parts
    }

    fn text(text: &str) -> Part {
        Part::Text(text.to_owned())
    }

    fn call(arguments: &str) -> Part {
        Part::Call { name: "ls".to_owned(), arguments: arguments.to_owned() }
    }

    /// Joins neighbouring texts.
    fn joined(parts: Vec<Part>) -> Vec<Part> {
        let mut joined = Vec::new();
        for part in parts {
            match (joined.last_mut(), part) {
                (Some(Part::Text(before)), Part::Text(after)) => before.push_str(&after),
                (_, part) => joined.push(part),
            }
        }
        joined
    }

    #[test]
    fn calls_are_cut_out_however_the_text_is_split() {
        let whole = "I look.\n<tool_call>\n{\"name\": \"ls\", \"arguments\": {\"p\":  1}}\n</tool_call>\n<tool_call>{\"name\":\"ls\"}</tool_call>\nDone. ";
        let expected = [text("I look."), call("{\"p\":  1}"), call("{}"), text("Done. ")];
        assert_eq!(joined(calls(&[whole])), expected);
        let letters: Vec<_> = whole.split_inclusive(|_: char| true).collect();
        assert_eq!(joined(calls(&letters)), expected);
    }

    #[test]
    fn what_is_no_call_stays_text() {
        for whole in [
            "<tool_call>{\"name\":\"rm\"}</tool_call>",
            "a <tool_call>{bad</tool_call> b",
            "  <tool_call>{\"name\":\"ls\"",
            "a < b <tool",
            " \n",
        ] {
            assert_eq!(joined(calls(&[whole])), [text(whole)], "{whole}");
            let letters: Vec<_> = whole.split_inclusive(|_: char| true).collect();
            assert_eq!(joined(calls(&letters)), [text(whole)], "{whole}");
        }
        assert_eq!(calls(&[]), []);
    }

    #[test]
    fn a_forced_call_takes_the_text_as_its_arguments() {
        for (written, expected) in [
            (" {\"p\": 1}}\n", "{\"p\": 1}"),
            (" {\"p\": {}}", "{\"p\": {}}"),
            ("{}}", "{}"),
            ("no json }", "no json }"),
            ("", ""),
        ] {
            let forced = Forced { name: "ls".to_owned(), arguments: written.to_owned() };
            assert_eq!(forced.finish(), call(expected), "{written}");
        }
        let opening = Tools::Forced("l\"s".to_owned()).opening();
        assert_eq!(opening.as_deref(), Some("<tool_call>\n{\"name\": \"l\\\"s\", \"arguments\":"));
        assert_eq!(Tools::Offered(vec![]).opening(), None);
    }

    #[test]
    fn arguments_that_are_a_string_of_json_are_unwrapped() {
        let parts = calls(&[r#"<tool_call>{"name":"ls","arguments":"{\"p\":1}"}</tool_call>"#]);
        assert_eq!(parts, [call("{\"p\":1}")]);
    }

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

//! Tool calls in the text of a model: the form of Qwen and Hermes, a JSON object in
//! `<tool_call>` marks, and that of Llama, a JSON object that begins the answer.

use std::sync::Arc;

use serde_json::Value;
use serde_json::value::RawValue;

use crate::template::Tokenizer;

use super::{Part, overlap};

const OPEN: &str = "<tool_call>";
pub(super) const CLOSE: &str = "</tool_call>";
/// What Llama may write before a call.
const PYTHON_TAG: &str = "<|python_tag|>";

/// How a model writes calls. All forms are read of any model; this one is what a call
/// is begun in that a request demands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::serving) enum Form {
    /// Between marks.
    Hermes,
    /// A bare object.
    Llama,
}

impl Form {
    /// Returns the form that a vocabulary is made for.
    pub(in crate::serving) fn of(tokenizer: &Tokenizer) -> Self {
        match tokenizer.id_of(PYTHON_TAG) {
            Some(_) => Self::Llama,
            None => Self::Hermes,
        }
    }

    /// Returns what a call is begun with. The model goes on with the arguments.
    pub(super) fn opening(self, name: &str) -> String {
        let name = Value::from(name);
        match self {
            Self::Hermes => format!("{OPEN}\n{{\"name\": {name}, \"arguments\":"),
            Self::Llama => format!("{{\"name\": {name}, \"parameters\":"),
        }
    }
}

/// Cuts calls out of a text. White space around a call belongs to it; what is no
/// call to a known tool stays text.
#[derive(Debug)]
pub(super) struct Calls {
    /// All answers to a request share them.
    tools: Arc<[String]>,
    held: String,
    after_call: bool,
    /// Whether all of the answer so far was bare calls.
    bare: bool,
}

impl Calls {
    pub(super) fn new(tools: Arc<[String]>) -> Self {
        Self { tools, held: String::new(), after_call: false, bare: true }
    }

    pub(super) fn push(&mut self, text: &str) -> Vec<Part> {
        self.held.push_str(text);
        let mut parts = Vec::new();
        while self.bare {
            match self.bare_call() {
                Bare::Call(call) => parts.push(call),
                Bare::Open => return parts,
                Bare::None => self.bare = false,
            }
        }
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

    /// Takes the object that the text begins with, if it is a call.
    fn bare_call(&mut self) -> Bare {
        if self.after_call {
            // Several calls stand one after another, with semicolons between.
            let is_between = |letter: char| letter == ';' || letter.is_whitespace();
            self.held = self.held.trim_start_matches(is_between).to_owned();
        }
        let start = self.held.trim_start();
        let start = start.strip_prefix(PYTHON_TAG).map_or(start, str::trim_start);
        if PYTHON_TAG.starts_with(start) {
            return Bare::Open;
        }
        if !start.starts_with('{') {
            return Bare::None;
        }
        let mut objects = serde_json::Deserializer::from_str(start).into_iter::<&RawValue>();
        let object = match objects.next() {
            Some(Ok(object)) => object.get(),
            Some(Err(error)) if error.is_eof() => return Bare::Open,
            _ => return Bare::None,
        };
        let Some(call) = self.call(object) else { return Bare::None };
        let end = self.held.len() - start.len() + objects.byte_offset();
        self.held.drain(..end);
        self.after_call = true;
        Bare::Call(call)
    }

    pub(super) fn finish(&mut self) -> Option<Part> {
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

/// What the beginning of an answer is.
enum Bare {
    /// A call, which was taken.
    Call(Part),
    /// It may become one.
    Open,
    /// None.
    None,
}

/// A call that the request demanded by name: all text is its arguments.
#[derive(Debug)]
pub(super) struct Forced {
    pub(super) name: String,
    pub(super) arguments: String,
}

impl Forced {
    /// Ends the call. The brace that closes the call itself is cut off; what the
    /// model wrote inside is handed on as it is, valid JSON or not.
    pub(super) fn finish(self) -> Part {
        let text = self.arguments.trim();
        let valid = |text: &str| serde_json::from_str::<&RawValue>(text).is_ok();
        let inner = text.strip_suffix('}').map(str::trim_end).filter(|inner| valid(inner));
        let arguments = inner.unwrap_or(text).to_owned();
        Part::Call { name: self.name, arguments }
    }
}

/// Returns the names of the tools of a request.
pub(in crate::serving) fn tool_names(tools: &[Value]) -> Vec<String> {
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
        let mut calls = Calls::new(["ls".to_owned()].into());
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
        for (form, expected) in [
            (Form::Hermes, "<tool_call>\n{\"name\": \"l\\\"s\", \"arguments\":"),
            (Form::Llama, "{\"name\": \"l\\\"s\", \"parameters\":"),
        ] {
            assert_eq!(form.opening("l\"s"), expected);
        }
    }

    #[test]
    fn arguments_that_are_a_string_of_json_are_unwrapped() {
        let parts = calls(&[r#"<tool_call>{"name":"ls","arguments":"{\"p\":1}"}</tool_call>"#]);
        assert_eq!(parts, [call("{\"p\":1}")]);
    }

    #[test]
    fn an_answer_that_begins_with_an_object_may_be_a_call() {
        for (whole, expected) in [
            (r#"{"name": "ls", "parameters": {"p": 1}}"#, vec![call(r#"{"p": 1}"#)]),
            ("\n<|python_tag|>{\"name\":\"ls\",\"parameters\":{}}", vec![call("{}")]),
            (
                r#"{"name":"ls","parameters":{"p":"}{"}}; {"name":"ls","parameters":{"q":2}} Done."#,
                vec![call(r#"{"p":"}{"}"#), call(r#"{"q":2}"#), text("Done.")],
            ),
            (r#"{"name":"ls"};<tool_call>{"name":"ls"}</tool_call>"#, vec![call("{}"), call("{}")]),
            (r#"{"name":"ls"};"#, vec![call("{}")]),
            // What is no call to a known tool is the answer.
            (
                r#"{"name": "rm", "parameters": {}}"#,
                vec![text(r#"{"name": "rm", "parameters": {}}"#)],
            ),
            (r#"{"a": 1} and more"#, vec![text(r#"{"a": 1} and more"#)]),
            (r#"{"name": "ls", "#, vec![text(r#"{"name": "ls", "#)]),
            ("{a}", vec![text("{a}")]),
            ("<|python_tag", vec![text("<|python_tag")]),
            (r#"See {"name": "ls"}"#, vec![text(r#"See {"name": "ls"}"#)]),
        ] {
            let letters: Vec<_> = whole.split_inclusive(|_: char| true).collect();
            for pieces in [&[whole][..], &letters] {
                assert_eq!(joined(calls(pieces)), expected, "{whole}");
            }
        }
    }
}

//! Whether a reply obeys a wish: plain checks of its text and its size.

use std::sync::OnceLock;

use regex::Regex;
use serde::Deserialize;

use super::Error;

/// A reply, as far as rules look at it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reply {
    /// The text.
    pub text: String,
    /// Its length in tokens, if the server told.
    pub tokens: Option<u64>,
    /// Why it ended, if the server told.
    pub finish_reason: Option<String>,
}

/// A rule.
#[derive(Debug, Clone)]
pub enum Rule {
    /// Something is found in the text.
    Regex(Regex),
    /// So many of something.
    Count(Unit, Span),
    /// The text has a form.
    Form(Form),
    /// The reply came to its end (or, with false, did not).
    Finished(bool),
    /// A rule does not hold.
    Not(Box<Rule>),
    /// All of them hold.
    All(Vec<Rule>),
    /// One of them holds.
    Any(Vec<Rule>),
}

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Tokens, as the server counts them.
    Tokens,
    /// Characters of the trimmed text.
    Chars,
    /// What stands between white space.
    Words,
    /// What ends in `.`, `!` or `?`, or with its line.
    Sentences,
    /// Lines that are not blank.
    Lines,
}

/// A number's bounds, both of which belong to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Span {
    min: Option<u64>,
    max: Option<u64>,
}

/// A form of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Form {
    /// `**so**` or `__so__`.
    Bold,
    /// A line that begins with `1.` or `1)`.
    NumberedList,
    /// A line that begins with `-`, `*` or `•`.
    Bullets,
    /// `\boxed{…}`.
    Boxed,
    /// Letters, and none of them a capital.
    LowerCase,
    /// Letters, and all of them capitals.
    UpperCase,
    /// A pictograph.
    Emoji,
    /// JSON and nothing else.
    Json,
}

/// A rule as it stands in a file: all of its conditions must hold.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Written {
    regex: Option<String>,
    tokens: Option<Span>,
    chars: Option<Span>,
    words: Option<Span>,
    sentences: Option<Span>,
    lines: Option<Span>,
    form: Option<Form>,
    finished: Option<bool>,
    not: Option<Box<Written>>,
    all: Option<Vec<Written>>,
    any: Option<Vec<Written>>,
}

impl Written {
    /// Makes the rule of it; `place` is where it stands in the file.
    pub(super) fn compile(self, place: &str) -> Result<Rule, String> {
        let mut rules = Vec::new();
        if let Some(text) = &self.regex {
            let regex = Regex::new(text).map_err(|error| format!("`{place}.regex`: {error}"))?;
            rules.push(Rule::Regex(regex));
        }
        let counts = [
            ("tokens", Unit::Tokens, self.tokens),
            ("chars", Unit::Chars, self.chars),
            ("words", Unit::Words, self.words),
            ("sentences", Unit::Sentences, self.sentences),
            ("lines", Unit::Lines, self.lines),
        ];
        for (name, unit, span) in counts {
            let Some(span) = span else { continue };
            match (span.min, span.max) {
                (None, None) => return Err(format!("`{place}.{name}` has no `min` and no `max`")),
                (Some(min), Some(max)) if min > max => {
                    return Err(format!("`{place}.{name}` has its `min` above its `max`"));
                }
                _ => rules.push(Rule::Count(unit, span)),
            }
        }
        rules.extend(self.form.map(Rule::Form));
        rules.extend(self.finished.map(Rule::Finished));
        if let Some(not) = self.not {
            rules.push(Rule::Not(Box::new(not.compile(&format!("{place}.not"))?)));
        }
        if let Some(all) = self.all {
            rules.push(Rule::All(each(all, &format!("{place}.all"))?));
        }
        if let Some(any) = self.any {
            rules.push(Rule::Any(each(any, &format!("{place}.any"))?));
        }
        match (rules.len(), rules.pop()) {
            (0, _) | (_, None) => Err(format!("`{place}` asks for nothing")),
            (1, Some(only)) => Ok(only),
            (_, Some(last)) => {
                rules.push(last);
                Ok(Rule::All(rules))
            }
        }
    }
}

fn each(rules: Vec<Written>, place: &str) -> Result<Vec<Rule>, String> {
    match rules.is_empty() {
        true => Err(format!("`{place}` asks for nothing")),
        false => rules.into_iter().map(|rule| rule.compile(place)).collect(),
    }
}

impl Rule {
    /// Tells whether a reply obeys.
    pub fn holds(&self, reply: &Reply) -> Result<bool, Error> {
        Ok(match self {
            Self::Regex(regex) => regex.is_match(&reply.text),
            Self::Count(unit, span) => {
                let count = unit.of(reply)?;
                span.min.is_none_or(|min| count >= min) && span.max.is_none_or(|max| count <= max)
            }
            Self::Form(form) => form.is_in(&reply.text),
            Self::Finished(wanted) => {
                let reason = reply.finish_reason.as_deref();
                let reason = reason.ok_or(Error::Untold { what: "finish reason" })?;
                (reason != "length") == *wanted
            }
            Self::Not(rule) => !rule.holds(reply)?,
            Self::All(rules) => rules
                .iter()
                .try_fold(true, |all, rule| Ok::<_, Error>(rule.holds(reply)? && all))?,
            Self::Any(rules) => rules
                .iter()
                .try_fold(false, |any, rule| Ok::<_, Error>(rule.holds(reply)? || any))?,
        })
    }
}

impl Unit {
    fn of(self, reply: &Reply) -> Result<u64, Error> {
        let text = reply.text.trim();
        let count = match self {
            Self::Tokens => return reply.tokens.ok_or(Error::Untold { what: "number of tokens" }),
            Self::Chars => text.chars().count(),
            Self::Words => text.split_whitespace().count(),
            Self::Sentences => sentences(text),
            Self::Lines => text.lines().filter(|line| !line.trim().is_empty()).count(),
        };
        Ok(count as u64)
    }
}

/// Counts sentences. A number with a point in it has no end, an abbreviation has.
fn sentences(text: &str) -> usize {
    static END: OnceLock<Option<Regex>> = OnceLock::new();
    let end = END.get_or_init(|| Regex::new(r#"[.!?…]+["'”’)\]*]*(?:\s+|$)|\n+"#).ok());
    let says = |part: &&str| part.chars().any(char::is_alphanumeric);
    end.as_ref().map_or(0, |end| end.split(text).filter(says).count())
}

impl Form {
    fn is_in(self, text: &str) -> bool {
        static FORMS: OnceLock<[Option<Regex>; 5]> = OnceLock::new();
        let forms = FORMS.get_or_init(|| {
            [
                r"\*\*[^*\n]+\*\*|__[^_\n]+__",
                r"(?m)^\s*\d+[.)]\s",
                r"(?m)^\s*[-*•]\s+\S",
                r"\\boxed\{",
                r"[\p{Extended_Pictographic}--[©®™]]",
            ]
            .map(|form| Regex::new(form).ok())
        });
        let found = |place: usize| {
            forms.get(place).and_then(Option::as_ref).is_some_and(|form| form.is_match(text))
        };
        let letters = || text.chars().any(char::is_alphabetic);
        match self {
            Self::Bold => found(0),
            Self::NumberedList => found(1),
            Self::Bullets => found(2),
            Self::Boxed => found(3),
            Self::Emoji => found(4),
            Self::LowerCase => letters() && !text.chars().any(char::is_uppercase),
            Self::UpperCase => letters() && !text.chars().any(char::is_lowercase),
            Self::Json => serde_json::from_str::<serde_json::Value>(text.trim()).is_ok(),
        }
    }
}

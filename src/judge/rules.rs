//! Judging without a model: a list of rules, of which the first that matches
//! decides.

use std::path::Path;

use regex::Regex;
use serde::Deserialize;
use serde_json::Value;
use toml::Spanned;

use crate::trajectory::words::NextStateKind;

use super::{Error, Exchange, Shown, Verdict};

/// The built-in rules, for English, as the file that they are.
pub const BUILT_IN: &str = include_str!("rules.toml");

/// Rules in the order in which they are tried.
#[derive(Debug, Clone)]
pub struct Rules {
    rules: Vec<Rule>,
}

/// One rule: it matches if all its conditions hold.
#[derive(Debug, Clone)]
struct Rule {
    written: Written,
    request: Option<Regex>,
    next: Option<Regex>,
    next_lacks: Option<Regex>,
    tool: Option<Regex>,
    answer: Option<Regex>,
    answer_lacks: Option<Regex>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    rule: Vec<Spanned<Written>>,
}

/// A rule as it stands in the file.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    name: String,
    score: i8,
    role: Option<Role>,
    request: Option<String>,
    next: Option<String>,
    next_lacks: Option<String>,
    min_next_chars: Option<usize>,
    max_next_chars: Option<usize>,
    tool: Option<String>,
    answer: Option<String>,
    answer_lacks: Option<String>,
    tool_error: Option<bool>,
    exit_code: Option<ExitCode>,
    repeats_request: Option<bool>,
    finish_reason: Option<String>,
    answer_is_json: Option<bool>,
    min_answer_chars: Option<usize>,
    max_answer_chars: Option<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Role {
    User,
    Tool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(untagged, expecting = "wanted `zero`, `nonzero` or a number")]
enum ExitCode {
    Kind(ExitKind),
    Number(i64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ExitKind {
    Zero,
    Nonzero,
}

impl Rules {
    /// Reads rules from the text of a TOML file, which errors call `place`.
    pub fn parse(text: &str, place: &str) -> Result<Self, Error> {
        let file: File = toml::from_str(text).map_err(|error| Error::Rules {
            place: place.to_owned(),
            message: error.to_string().trim_end().to_owned(),
        })?;
        if file.rule.is_empty() {
            let message = "no `[[rule]]` in it".to_owned();
            return Err(Error::Rules { place: place.to_owned(), message });
        }
        let rules = file.rule.into_iter().map(|written| {
            let line = text[..written.span().start].matches('\n').count() + 1;
            Rule::new(written.into_inner(), &format!("{place} line {line}"))
        });
        Ok(Self { rules: rules.collect::<Result<_, _>>()? })
    }

    /// Reads a file of rules.
    pub fn load(path: &Path) -> Result<Self, Error> {
        let place = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|error| Error::Rules {
            place: place.clone(),
            message: format!("cannot read it: {error}"),
        })?;
        Self::parse(&text, &place)
    }

    /// Returns the built-in rules.
    pub fn built_in() -> Result<Self, Error> {
        Self::parse(BUILT_IN, "built-in rules")
    }

    /// Judges one exchange: one vote, and the name of the rule behind it. Where
    /// no rule matches, the next state does not tell: 0.
    pub fn judge(&self, exchange: &Exchange) -> Verdict {
        let Decision { score, rule } = self.decide(exchange);
        let text = match rule {
            Some(rule) => format!("rule `{rule}`"),
            None => "no rule matches".to_owned(),
        };
        Verdict { votes: vec![Some(score)], texts: vec![Some(text)], faults: vec![None] }
    }

    /// Returns the score of one exchange, and which rule gave it.
    pub fn decide(&self, exchange: &Exchange) -> Decision<'_> {
        match self.rules.iter().find(|rule| rule.matches(exchange)) {
            Some(rule) => Decision { score: rule.written.score, rule: Some(&rule.written.name) },
            None => Decision { score: 0, rule: None },
        }
    }

    /// Returns the rules that look at the answer; those that look at nothing but
    /// the next state say the same of any answer. Nothing if there are none.
    pub fn about_answers(&self) -> Option<Self> {
        let rules = self.rules.iter().filter(|rule| rule.looks_at_answer()).cloned();
        let rules: Vec<_> = rules.collect();
        (!rules.is_empty()).then_some(Self { rules })
    }
}

/// A score, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision<'a> {
    /// -1, 0 or 1.
    pub score: i8,
    /// Name of the rule that matched first; none gives 0.
    pub rule: Option<&'a str>,
}

impl Rule {
    fn new(written: Written, place: &str) -> Result<Self, Error> {
        let wrong = |message: String| Error::Rules {
            place: format!("{place}, rule `{}`", written.name),
            message,
        };
        if !(-1..=1).contains(&written.score) {
            return Err(wrong(format!("score is {}, wanted -1, 0 or 1", written.score)));
        }
        let regex = |key: &str, text: &Option<String>| match text {
            None => Ok(None),
            Some(text) => {
                Regex::new(text).map(Some).map_err(|error| wrong(format!("`{key}`: {error}")))
            }
        };
        for (what, least, most) in [
            ("next", written.min_next_chars, written.max_next_chars),
            ("answer", written.min_answer_chars, written.max_answer_chars),
        ] {
            if least.zip(most).is_some_and(|(least, most)| least > most) {
                let what = format!("`min_{what}_chars` is above `max_{what}_chars`");
                return Err(wrong(format!("{what}, so it would never match")));
            }
        }
        let of_tools = written.tool_error == Some(true)
            || written.exit_code.is_some()
            || written.tool.is_some();
        if written.role == Some(Role::User) && of_tools {
            return Err(wrong("it asks a user for what only tools have".to_owned()));
        }
        if written.role == Some(Role::Tool) && written.repeats_request == Some(true) {
            return Err(wrong("it asks tools for what only a user does".to_owned()));
        }
        Ok(Self {
            request: regex("request", &written.request)?,
            next: regex("next", &written.next)?,
            next_lacks: regex("next_lacks", &written.next_lacks)?,
            tool: regex("tool", &written.tool)?,
            answer: regex("answer", &written.answer)?,
            answer_lacks: regex("answer_lacks", &written.answer_lacks)?,
            written,
        })
    }

    fn matches(&self, exchange: &Exchange) -> bool {
        let written = &self.written;
        let role = match written.role {
            None => true,
            Some(Role::User) => exchange.kind == NextStateKind::User,
            Some(Role::Tool) => exchange.kind == NextStateKind::Tool,
        };
        role && self.next_matches(exchange)
            && self.request.as_ref().is_none_or(|request| request.is_match(&exchange.request))
            && written.tool_error.is_none_or(|wanted| any(exchange, has_error_flag) == wanted)
            && written.exit_code.is_none_or(|wanted| ends_with(exchange, wanted))
            && written.repeats_request.is_none_or(|wanted| repeats(exchange) == wanted)
            && self.answer_matches(exchange)
    }

    fn next_matches(&self, exchange: &Exchange) -> bool {
        let written = &self.written;
        let finds = |regex: &Regex| any(exchange, |shown| regex.is_match(&shown.text));
        let named = |shown: &Shown, tool: &Regex| {
            shown.tool.as_deref().is_some_and(|name| tool.is_match(name))
        };
        let length = || exchange.next.iter().map(|shown| shown.text.chars().count()).sum::<usize>();
        self.next.as_ref().is_none_or(finds)
            && self.next_lacks.as_ref().is_none_or(|lacks| !finds(lacks))
            && self.tool.as_ref().is_none_or(|tool| any(exchange, |shown| named(shown, tool)))
            && written.min_next_chars.is_none_or(|least| length() >= least)
            && written.max_next_chars.is_none_or(|most| length() <= most)
    }

    fn looks_at_answer(&self) -> bool {
        let written = &self.written;
        written.answer.is_some()
            || written.answer_lacks.is_some()
            || written.finish_reason.is_some()
            || written.answer_is_json.is_some()
            || written.min_answer_chars.is_some()
            || written.max_answer_chars.is_some()
    }

    fn answer_matches(&self, exchange: &Exchange) -> bool {
        let written = &self.written;
        let length = exchange.answer.chars().count();
        let is_json = || serde_json::from_str::<Value>(&exchange.answer).is_ok();
        self.answer.as_ref().is_none_or(|answer| answer.is_match(&exchange.answer))
            && self.answer_lacks.as_ref().is_none_or(|lacks| !lacks.is_match(&exchange.answer))
            && written.min_answer_chars.is_none_or(|least| length >= least)
            && written.max_answer_chars.is_none_or(|most| length <= most)
            && written.answer_is_json.is_none_or(|wanted| is_json() == wanted)
            && (written.finish_reason.is_none() || written.finish_reason == exchange.finish_reason)
    }
}

fn any(exchange: &Exchange, holds: impl Fn(&Shown) -> bool) -> bool {
    exchange.next.iter().any(holds)
}

/// Tells whether a tool result says by flag that it is an error: a member of
/// the message or of the JSON object that it holds.
fn has_error_flag(shown: &Shown) -> bool {
    let inner: Value = serde_json::from_str(shown.text.trim()).unwrap_or(Value::Null);
    [&shown.message, &inner].into_iter().any(|value| {
        let flag = |key: &str| value.get(key).and_then(Value::as_bool);
        let status = value.get("status").and_then(Value::as_str).unwrap_or_default();
        let error = value.get("error").unwrap_or(&Value::Null);
        let told = match error {
            Value::Null | Value::Bool(false) => false,
            Value::String(text) => !text.trim().is_empty(),
            Value::Array(list) => !list.is_empty(),
            Value::Object(members) => !members.is_empty(),
            _ => true,
        };
        flag("is_error") == Some(true)
            || flag("isError") == Some(true)
            || flag("success") == Some(false)
            || flag("ok") == Some(false)
            || ["error", "failed", "failure", "timeout"].contains(&status.to_lowercase().as_str())
            || told
    })
}

/// Finds the exit codes that the results tell. Nonzero: one of them is; zero:
/// there are some, and all are; a number: one of them is that.
fn ends_with(exchange: &Exchange, wanted: ExitCode) -> bool {
    let codes: Vec<_> = exchange.next.iter().filter_map(exit_code).collect();
    match wanted {
        ExitCode::Kind(ExitKind::Nonzero) => codes.iter().any(|code| *code != 0),
        ExitCode::Kind(ExitKind::Zero) => !codes.is_empty() && codes.iter().all(|code| *code == 0),
        ExitCode::Number(wanted) => codes.contains(&wanted),
    }
}

fn exit_code(shown: &Shown) -> Option<i64> {
    let inner: Value = serde_json::from_str(shown.text.trim()).unwrap_or(Value::Null);
    for value in [&shown.message, &inner] {
        for key in ["exit_code", "exitCode", "exit_status", "returncode", "return_code"] {
            if let Some(code) = value.get(key).and_then(Value::as_i64) {
                return Some(code);
            }
        }
    }
    let words = r"(?im)\b(?:exit(?:ed)?(?: with)?(?: (?:exit )?(?:code|status))|return ?code)\s*[:=]?\s*(-?\d+)";
    let told = Regex::new(words).ok()?;
    told.captures_iter(&shown.text).last()?[1].parse().ok()
}

/// Tells whether the user asks the same again: all words of the request come
/// back, in order, with hardly any others.
fn repeats(exchange: &Exchange) -> bool {
    let words = |text: &str| -> Vec<String> {
        let split = text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty());
        split.map(str::to_lowercase).collect()
    };
    let asked = words(&exchange.request);
    let next =
        words(&exchange.next.iter().map(|shown| shown.text.as_str()).collect::<Vec<_>>().join(" "));
    let mut rest = next.iter();
    let all = asked.iter().all(|word| rest.any(|other| other == word));
    asked.len() >= 2 && all && next.len() <= asked.len() + 3 + asked.len() / 4
}

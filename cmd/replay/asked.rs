//! What is typed after `oclaw replay`, as values.

use std::path::Path;

use clap::ValueEnum;
use oclaw::judge::Rules;
use oclaw::replay::{ANSWER_RULES, By};

use crate::report::Failure;

/// As of `oclaw judge`.
pub(crate) const JUDGE_TEMPERATURE: f64 = 0.6;
/// As of `oclaw judge`.
pub(crate) const JUDGE_TOKENS: u32 = 2048;

/// Conversation before each question.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HistoryName {
    /// As recorded
    Fixed,
    /// With the new answers in it
    OnPolicy,
}

/// When to ask.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pace {
    /// With the recorded pauses
    Recorded,
    /// As fast as possible
    Fast,
}

/// A comparison.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ByName {
    /// Word for word
    Exact,
    /// By rules
    Rules,
    /// By a judge
    Judge,
    /// By the log-probs of the recorded ids
    LogProb,
}

/// How the turns are written.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// A line per turn, for people
    Table,
    /// A line of JSON per turn, and one with the summary
    Json,
    /// JUnit XML
    Junit,
}

/// How many turns may differ.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Allowed {
    Turns(usize),
    Percent(f64),
}

impl Allowed {
    /// Reads `3` or `5%`.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let wrong = || "wanted a number of turns, or a share like `5%`".to_owned();
        match text.strip_suffix('%') {
            None => text.parse().map(Self::Turns).map_err(|_| wrong()),
            Some(number) => match number.trim().parse() {
                Ok(percent) if (0.0..=100.0).contains(&percent) => Ok(Self::Percent(percent)),
                _ => Err(wrong()),
            },
        }
    }

    /// Returns the number of turns of so many that were compared.
    pub(super) fn of(self, compared: usize) -> usize {
        match self {
            Self::Turns(turns) => turns,
            // Rounded down: 5 % of 10 turns is none.
            Self::Percent(percent) => (compared as f64 * percent / 100.0 + 1e-9) as usize,
        }
    }
}

/// Returns the comparisons in the order of the manual, each once.
pub(super) fn ways(names: &[ByName]) -> Vec<By> {
    let named: Vec<By> = names.iter().map(|name| name.way()).collect();
    By::ALL.into_iter().filter(|by| named.contains(by)).collect()
}

/// Returns the rules that have something to say about answers.
pub(crate) fn rules(file: Option<&Path>) -> anyhow::Result<Rules> {
    let Some(file) = file else {
        return Ok(Rules::parse(ANSWER_RULES, "built-in rules about answers")?);
    };
    Rules::load(file)?.about_answers().ok_or_else(|| {
        let message = format!("no rule in `{}` looks at the answer", file.display());
        let hint = "a rule about the next state says the same of any answer; \
                    add `answer`, `answer_is_json`, `max_answer_chars` …";
        Failure::usage(message).hint(hint).into()
    })
}

/// Reads a number from 0 on.
pub(crate) fn not_negative(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err("wanted a number from 0 on".to_owned()),
    }
}

/// Reads a number above 0.
pub(super) fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value > 0.0 => Ok(value),
        _ => Err("wanted a number above 0".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::Allowed;

    #[test]
    fn a_share_is_rounded_down() {
        let of = |text: &str, compared| Allowed::parse(text).unwrap().of(compared);
        assert_eq!((of("3", 100), of("5%", 100), of("5%", 10), of("5 %", 39)), (3, 5, 0, 1));
        assert_eq!((of("100%", 7), of("0.1%", 1000)), (7, 1));
        for wrong in ["", "-1", "x%", "101%", "5.5", "NaN%"] {
            assert!(Allowed::parse(wrong).is_err(), "{wrong}");
        }
    }
}

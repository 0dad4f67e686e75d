//! What is typed after `oclaw replay`, as values, and who judges.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use oclaw::engine::{Engine, EngineOptions};
use oclaw::judge::{self, Rules};
use oclaw::replay::{ANSWER_RULES, By, Jury};

use crate::common::Context;
use crate::embedded;
use crate::report::Failure;

/// As of `oclaw judge`.
const JUDGE_TEMPERATURE: f64 = 0.6;
/// As of `oclaw judge`.
const JUDGE_TOKENS: u32 = 2048;

/// Who judges new answers, of `replay` and of `gate`.
#[derive(clap::Args, Debug)]
pub(crate) struct Judge {
    /// Address of the judge for `--by judge`
    #[arg(long, value_name = "URL")]
    judge_engine: Option<String>,
    /// Name of the judge's model there, if it has several
    #[arg(long, value_name = "NAME", requires = "judge_engine")]
    judge_model: Option<String>,
    /// File with the judge's key
    #[arg(long, value_name = "FILE", requires = "judge_engine")]
    judge_key_file: Option<PathBuf>,
    /// Votes of the judge on each answer
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=99), requires = "judge_engine")]
    judge_votes: u32,
}

impl Judge {
    /// Returns the address, or what is missing.
    pub(crate) fn wanted(&self) -> anyhow::Result<&str> {
        let hint = "give `--judge-engine URL`";
        self.judge_engine
            .as_deref()
            .ok_or_else(|| Failure::usage("nobody to judge").hint(hint).into())
    }

    /// Errors if a judge is named that nobody is going to ask.
    pub(crate) fn only_for(&self, judging: bool) -> anyhow::Result<()> {
        match (judging, &self.judge_engine) {
            (false, Some(_)) => Err(unused("--judge-engine", "judge")),
            _ => Ok(()),
        }
    }

    /// Connects to the judge. Its key is that of `OCLAW_<COMMAND>_JUDGE_KEY`, if not
    /// in a file; `options` hold how it is to be asked.
    pub(crate) async fn jury(
        &self,
        context: &Context,
        options: impl Fn(&str) -> EngineOptions,
    ) -> anyhow::Result<Jury> {
        let key =
            embedded::key(&format!("{}-judge", context.command), self.judge_key_file.as_deref())?;
        let options =
            EngineOptions { key, model: self.judge_model.clone(), ..options(self.wanted()?) };
        Ok(Jury {
            engine: Engine::connect(options).await?,
            prompt: judge::PROMPT.to_owned(),
            votes: self.judge_votes,
            temperature: JUDGE_TEMPERATURE,
            max_tokens: JUDGE_TOKENS,
            seed: context.seed,
        })
    }
}

/// Errors if a file of rules is named that nobody is going to read.
pub(crate) fn rules_only_for(ruling: bool, file: Option<&Path>) -> anyhow::Result<()> {
    match (ruling, file) {
        (false, Some(_)) => Err(unused("--rules", "rules")),
        _ => Ok(()),
    }
}

fn unused(flag: &str, way: &str) -> anyhow::Error {
    Failure::usage(format!("`{flag}` says nothing without `--by {way}`"))
        .hint(format!("add `--by {way}`, or leave `{flag}` out"))
        .into()
}

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

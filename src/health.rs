//! Is a run well? Figures of turns and of training steps, and the three questions
//! that they answer: is exploration collapsing, is the signal alive, is it
//! drifting off policy.
//!
//! Pure counting: no files, no clock. A figure for which there is no data is not
//! known, and a question about which nothing decisive is known has the verdict
//! `unknown`, never `healthy`. Absent on purpose: any remedy applied by itself.

mod bounds;
mod evidence;
mod figures;
mod step;
mod survey;

pub use bounds::{BOUNDS, Bound, Side};
pub use evidence::Evidence;
pub use figures::{Amount, Figure};
pub use step::Step;
pub use survey::{Counts, Survey};

use std::fmt;

use serde::Serialize;

/// What is asked of every run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Question {
    /// Is exploration collapsing?
    Exploration,
    /// Is the signal alive?
    Signal,
    /// Is it drifting off policy?
    Drift,
}

impl Question {
    /// Every question, in the order of the documentation.
    pub const ALL: [Self; 3] = [Self::Exploration, Self::Signal, Self::Drift];

    /// Returns its one word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Exploration => "exploration",
            Self::Signal => "signal",
            Self::Drift => "drift",
        }
    }

    /// Returns the question in full.
    pub fn words(self) -> &'static str {
        match self {
            Self::Exploration => "Is exploration collapsing?",
            Self::Signal => "Is the signal alive?",
            Self::Drift => "Is it drifting off policy?",
        }
    }
}

/// What a figure, or all figures of a question, come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// There is no data.
    Unknown,
    /// Within bounds.
    Healthy,
    /// To be looked at.
    Watch,
    /// To be mended before going on.
    Ill,
}

impl Verdict {
    /// Returns the word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Healthy => "healthy",
            Self::Watch => "watch",
            Self::Ill => "ill",
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

/// A figure held against its bounds.
#[derive(Debug, Clone, PartialEq)]
pub struct Judged {
    /// The figure and its bounds.
    pub bound: &'static Bound,
    /// Its value; `None` is not known.
    pub value: Option<f64>,
    /// What it comes to.
    pub verdict: Verdict,
}

impl Judged {
    /// Says the figure and the bound that it is held against.
    pub fn words(&self) -> String {
        let Bound { name, side, watch, ill, .. } = self.bound;
        let Some(value) = self.value else { return format!("{name} is not known") };
        let side = side.as_str();
        match self.verdict {
            Verdict::Ill => format!("{name} {value:.4}, ill {side} {ill}"),
            _ => format!("{name} {value:.4}, watch {side} {watch}"),
        }
    }
}

/// The answer to a question.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// The question.
    pub question: Question,
    /// What its figures come to.
    pub verdict: Verdict,
    /// Its figures.
    pub figures: Vec<Judged>,
}

impl Answer {
    /// Answers a question. The worst figure counts; that all is well can only be
    /// said by one that decides.
    pub fn to(question: Question, evidence: &Evidence<'_>) -> Self {
        let bounds = BOUNDS.iter().filter(|bound| bound.question == question);
        let judge = |bound: &'static Bound| {
            let value = (bound.read)(evidence).filter(|value| value.is_finite());
            Judged { bound, value, verdict: bound.verdict(value) }
        };
        let figures: Vec<Judged> = bounds.map(judge).collect();
        let worst = figures.iter().map(|judged| judged.verdict).max().unwrap_or(Verdict::Unknown);
        let decided = figures.iter().any(|judged| judged.bound.decides && judged.value.is_some());
        let verdict = match worst {
            Verdict::Healthy if !decided => Verdict::Unknown,
            worst => worst,
        };
        Self { question, verdict, figures }
    }

    /// Returns the figure that the verdict rests on: the first of the worst, or
    /// the first that decides.
    pub fn reason(&self) -> Option<&Judged> {
        let fits = |judged: &&Judged| match self.verdict {
            Verdict::Unknown => false,
            Verdict::Healthy => judged.bound.decides && judged.value.is_some(),
            verdict => judged.verdict == verdict,
        };
        self.figures.iter().find(fits)
    }

    /// Says the figure and its bound, and what to do; for an unknown answer, what
    /// would make it known.
    pub fn words(&self) -> String {
        match self.reason() {
            Some(judged) if self.verdict > Verdict::Healthy => {
                format!("{}: {}", judged.words(), judged.bound.advice)
            }
            Some(judged) => judged.words(),
            None => {
                let decides = self.figures.iter().filter(|judged| judged.bound.decides);
                let names: Vec<_> = decides.map(|judged| judged.bound.name).collect();
                format!("no data: {} not known", names.join(", "))
            }
        }
    }
}

/// Answers all questions.
pub fn answers(evidence: &Evidence<'_>) -> [Answer; 3] {
    Question::ALL.map(|question| Answer::to(question, evidence))
}

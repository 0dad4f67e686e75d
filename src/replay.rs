//! Recorded sessions as regression tests.
//!
//! A recorded turn is sent again and the new answer is compared with the
//! recorded one: [`Answer`] is what both have in common, [`compare`] tells them
//! apart, [`Player`] does it session by session, [`report`] writes down what came
//! of it. What cannot be compared is counted as that, with the reason, and never
//! as a success. Absent on purpose: files, where the engine comes from, exit codes.

mod answer;
pub mod compare;
mod conversation;
pub mod gate;
pub mod junit;
mod jury;
mod log_prob;
mod player;
pub mod report;
mod request;
mod session;
pub mod stages;
mod trial;

pub use answer::{Answer, Call, Facts};
pub use conversation::Conversation;
pub use jury::{Jury, Unjudged};
pub use player::{History, Options, Outcome, Player, Replayed};
pub use request::{Overrides, body, sampling};
pub use session::{Session, sessions};
pub use trial::{Away, Measure, Scores, Trial};

/// Rules about the answer alone, for `rules` comparisons without a file.
pub const ANSWER_RULES: &str = include_str!("replay/answer_rules.toml");

/// A way to compare a new answer with the recorded one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum By {
    /// Same text, same calls, same end, same ids.
    Exact,
    /// Rules score it no lower.
    Rules,
    /// The engine gives the recorded ids the recorded log-probs.
    LogProb,
    /// A judge scores it no lower.
    Judge,
}

impl By {
    /// Every way.
    pub const ALL: [Self; 4] = [Self::Exact, Self::Rules, Self::LogProb, Self::Judge];

    /// Returns its name, as it is typed.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Rules => "rules",
            Self::LogProb => "log-prob",
            Self::Judge => "judge",
        }
    }
}

impl std::fmt::Display for By {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.as_str())
    }
}

/// What one comparison, or one turn, came to.
#[derive(Debug, Clone, PartialEq)]
pub enum Finding {
    /// As good as recorded.
    Same,
    /// Not so, and how.
    Differs(String),
    /// There was nothing to compare, and why.
    NotCompared(String),
    /// The engine was asked and did not answer.
    Failed(String),
}

impl Finding {
    /// Returns its name.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Same => "same",
            Self::Differs(_) => "differs",
            Self::NotCompared(_) => "not compared",
            Self::Failed(_) => "failed",
        }
    }

    /// Returns the words behind it.
    pub fn what(&self) -> &str {
        match self {
            Self::Same => "",
            Self::Differs(what) | Self::NotCompared(what) | Self::Failed(what) => what,
        }
    }
}

/// One comparison of one turn.
#[derive(Debug, Clone, PartialEq)]
pub struct Check {
    /// Which.
    pub by: By,
    /// What came of it.
    pub finding: Finding,
    /// Numbers behind it, by name.
    pub figures: Vec<(&'static str, f64)>,
}

impl Check {
    fn new(by: By, finding: Finding) -> Self {
        Self { by, finding, figures: Vec::new() }
    }
}

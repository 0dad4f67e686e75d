//! What a run learned, as one page and as series of numbers: rewards, sessions to
//! adapt, health, training, answers before and after, stages.
//!
//! Pure text: no files, no network, no clock. Whatever was said in a chat reaches
//! the page as text and never as markup. Absent on purpose: scripts in the page.

mod chart;
mod journey;
mod page;
mod series;
mod text;

pub use journey::{Journey, Pair, Session, Spoken};
pub use series::Series;

use crate::health::{Answer, Evidence, Step, Survey, answers};

/// A stage that the run's tables went through.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StageRow {
    /// Subcommand.
    pub command: String,
    /// Version of oclaw.
    pub version: String,
    /// Command line.
    pub arguments: String,
    /// Seed.
    pub seed: Option<u64>,
    /// What it read.
    pub inputs: Vec<String>,
    /// What it asked of others, in words.
    pub usage: String,
}

/// All that a report tells.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Name of the run.
    pub title: String,
    /// When the first turn was asked and the last one, in words.
    pub period: Option<(String, String)>,
    /// Rewards and answers over time.
    pub journey: Journey,
    /// Figures of the turns.
    pub survey: Survey,
    /// Steps trained, oldest first.
    pub steps: Vec<Step>,
    /// The stages, in the order in which they ran.
    pub stages: Vec<StageRow>,
}

impl Report {
    /// Returns the answers to the three health questions.
    pub fn health(&self) -> [Answer; 3] {
        answers(&Evidence { survey: &self.survey, steps: &self.steps })
    }

    /// Returns the page: one HTML file that needs nothing else.
    pub fn html(&self) -> String {
        page::html(self)
    }

    /// Returns every series of the page.
    pub fn series(&self) -> Vec<Series> {
        series::all(self)
    }
}

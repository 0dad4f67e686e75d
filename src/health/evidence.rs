//! Where the figures of the three questions come from.

use super::{Step, Survey};

/// All that is known of a run.
#[derive(Debug, Clone, Copy)]
pub struct Evidence<'a> {
    /// The turns.
    pub survey: &'a Survey,
    /// The training steps, oldest first.
    pub steps: &'a [Step],
}

impl Evidence<'_> {
    /// Returns a figure of the last step.
    pub(super) fn last(&self, figure: fn(&Step) -> Option<f64>) -> Option<f64> {
        self.steps.last().and_then(figure)
    }

    /// Returns what is left of a figure: its last value over its first.
    pub(super) fn kept(&self, figure: fn(&Step) -> Option<f64>) -> Option<f64> {
        let mut known = self.steps.iter().filter_map(figure);
        let first = known.next().filter(|first| *first > 0.0)?;
        Some(known.next_back()? / first)
    }

    /// Returns a figure of the advantages: of the last step, else of the turns.
    ///
    /// Not under top-k distillation, where the reward part alone is called
    /// advantage and 0 is what a row with nothing but a hint has.
    pub(super) fn advantage(
        &self,
        step: fn(&Step) -> Option<f64>,
        survey: fn(&Survey) -> Option<f64>,
    ) -> Option<f64> {
        match self.steps.last() {
            Some(last) if last.distill_gap.is_some() => None,
            Some(last) => step(last).or_else(|| survey(self.survey)),
            None => survey(self.survey),
        }
    }

    /// Returns how many updates of all steps were skipped.
    pub(super) fn skipped(&self) -> Option<f64> {
        let counts: Vec<u64> = self.steps.iter().filter_map(|step| step.skipped_updates).collect();
        (!counts.is_empty()).then(|| counts.iter().sum::<u64>() as f64)
    }
}

//! Which turns a step takes, and the count of those that it does not.

use std::collections::VecDeque;

use super::super::sample::{Refusal, Sample, admit};
use super::{Fault, Trainer};
use crate::trajectory::Turn;

/// Why the second row of one id is not trained.
const DUPLICATE: &str = "duplicate_turn_id";

impl Trainer {
    /// Takes turns from the front of the queue until `wanted` of them (all, if
    /// not given) can be trained. Rows that cannot are noted and dropped; if the
    /// queue ends early, what was found is returned all the same.
    pub fn collect(&mut self, queue: &mut VecDeque<Turn>, wanted: Option<usize>) -> Vec<Sample> {
        let mut samples = Vec::new();
        self.collect_into(&mut samples, queue, wanted);
        samples
    }

    /// Likewise adds to what was collected before and has not been trained.
    pub fn collect_into(
        &mut self,
        samples: &mut Vec<Sample>,
        queue: &mut VecDeque<Turn>,
        wanted: Option<usize>,
    ) {
        while wanted.is_none_or(|wanted| samples.len() < wanted) {
            let Some(turn) = queue.pop_front() else { break };
            let twice = samples.iter().any(|sample| sample.turn_id == turn.turn_id);
            if twice || self.taken.contains(&turn.turn_id) {
                // The ledger has, or will have, what became of the first.
                self.count(DUPLICATE);
                continue;
            }
            let admitted = match self.ledger.consumed(&turn.turn_id) {
                true => Err(Refusal::sound("already_trained")),
                false => admit(&turn, self.step, &self.options.admission),
            };
            match admitted {
                Ok(sample) => samples.push(sample),
                Err(refusal) => self.refuse(&turn.turn_id, refusal),
            }
        }
    }

    pub(super) fn count(&mut self, reason: &str) {
        *self.refused.entry(reason.to_owned()).or_default() += 1;
    }

    pub(super) fn refuse(&mut self, turn_id: &str, refusal: Refusal) {
        self.count(&refusal.reason);
        if !turn_id.is_empty() {
            self.ledger.refuse(turn_id, self.policies.after(self.step), &refusal.reason);
        }
        if let Some(problem) = refusal.fault {
            self.faults.push(Fault { turn_id: turn_id.to_owned(), problem });
        }
    }
}

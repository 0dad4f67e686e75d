//! What was computed along with a student's request, until the teacher is asked:
//! the plain and the hinted prompts of a turn begin alike, but which tokens the
//! hinted ones are scored at is known only after the plain one.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};

use oclaw::model::Score;
use tch::Tensor;

/// Most bytes held. What had to go is computed again.
const MOST: usize = 256 << 20;

struct Held {
    folder: PathBuf,
    ids: Vec<i64>,
    start: usize,
    states: Tensor,
}

impl Held {
    fn bytes(&self) -> usize {
        4 * self.states.numel() + 8 * self.ids.len()
    }
}

/// States by model and sequence, the oldest first.
#[derive(Default)]
pub(super) struct Ahead {
    held: VecDeque<Held>,
    bytes: usize,
}

impl Ahead {
    /// Keeps the states of a sequence from a position on.
    pub(super) fn keep(&mut self, folder: &Path, (ids, start): (&[i64], usize), states: Tensor) {
        let held = Held { folder: folder.to_owned(), ids: ids.to_vec(), start, states };
        self.bytes += held.bytes();
        self.held.push_back(held);
        while self.bytes > MOST {
            let Some(oldest) = self.held.pop_front() else { return };
            self.bytes -= oldest.bytes();
        }
    }

    /// Hands out the states of a request, once.
    pub(super) fn take(&mut self, folder: &Path, score: &Score) -> Option<Tensor> {
        let is_it = |held: &Held| {
            held.start == score.start && held.ids == score.ids && held.folder == folder
        };
        let place = self.held.iter().position(is_it)?;
        let held = self.held.remove(place)?;
        self.bytes -= held.bytes();
        Some(held.states)
    }
}

//! Counts of a stage over shards of which some come to nothing.

use std::cell::RefCell;

use oclaw::stage::Tally;

use super::Worked;

/// Counts of a stage, set back to what they were unless the shard is done.
pub(crate) struct Counting<'a, C: Clone> {
    counts: &'a RefCell<C>,
    before: Option<C>,
}

impl<'a, C: Clone> Counting<'a, C> {
    /// Remembers the counts as they are.
    pub(crate) fn start(counts: &'a RefCell<C>) -> Self {
        Self { counts, before: Some(counts.borrow().clone()) }
    }

    /// Keeps the counts if the shard is done. Tells what it added to one of them.
    pub(crate) fn settle(mut self, tally: Tally, count: impl Fn(&C) -> u64) -> Worked {
        let before = self.before.take().map_or(0, |before| count(&before));
        Worked::Done(tally, count(&self.counts.borrow()) - before)
    }
}

impl<C: Clone> Drop for Counting<'_, C> {
    fn drop(&mut self) {
        if let Some(before) = self.before.take() {
            self.counts.replace(before);
        }
    }
}

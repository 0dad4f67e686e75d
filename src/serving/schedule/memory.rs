//! Keeps the keys and values of all running sequences within their memory.

use crate::model::Cache;

use super::{Scheduler, Sequence};

impl Scheduler {
    /// Returns the bytes of keys and values that a sequence has after its next step.
    pub(super) fn kv_bytes(&self, sequence: &Sequence) -> usize {
        Cache::bytes_of(&self.model.config, sequence.ids.len())
    }

    /// Whether a sequence may join those that hold so many bytes. One alone always may:
    /// what could outgrow the memory by itself is refused when it is asked for.
    pub(super) fn fits(&self, held: usize, next: &Sequence) -> bool {
        self.running.is_empty() || held + self.kv_bytes(next) <= self.limits.kv_memory
    }

    /// Puts the newest running sequences back in front of the queue until the others fit.
    /// What they lose is computed again later, but for what the memory of beginnings holds
    /// of it, which is apart. Returns the bytes that are held.
    pub(super) fn make_room(&mut self) -> usize {
        let mut held = self.running.iter().map(|sequence| self.kv_bytes(sequence)).sum::<usize>();
        while held > self.limits.kv_memory
            && self.running.len() > 1
            && let Some(mut newest) = self.running.pop()
        {
            held -= self.kv_bytes(&newest);
            let adapter = newest.job.adapter;
            if adapter.is_none_or(|id| self.shelf.has(id)) {
                self.prefixes.keep(adapter, &newest.ids, &newest.cache);
            }
            newest.forget(self.model.cache());
            self.waiting.push_front(newest);
        }
        held
    }
}

#[cfg(test)]
mod tests {
    use crate::serving::schedule::trial;

    use super::*;

    /// A scheduler with room for so many tokens of one sequence.
    fn scheduler(tokens: usize) -> Scheduler {
        let scheduler = trial::scheduler(tokens, 256, 0);
        let (config, bytes) = (&scheduler.model.config, scheduler.limits.kv_memory);
        assert_eq!(Cache::tokens_in(config, bytes), tokens);
        assert_eq!(Cache::tokens_in(config, bytes - 1), tokens - 256);
        scheduler
    }

    fn rid(sequence: &Sequence) -> &str {
        &sequence.job.rid
    }

    /// Who runs, who waits, and the bytes that caches take.
    fn standing(scheduler: &Scheduler) -> (Vec<&str>, Vec<&str>, usize) {
        let all = scheduler.running.iter().chain(&scheduler.waiting);
        let held = all.map(|sequence| sequence.cache.bytes()).sum();
        let running = scheduler.running.iter().map(rid).collect();
        (running, scheduler.waiting.iter().map(rid).collect(), held)
    }

    #[test]
    fn what_does_not_fit_waits_and_what_outgrows_the_memory_waits_again() {
        let mut scheduler = scheduler(3 * 256);
        let limit = scheduler.limits.kv_memory;
        // No two begin alike.
        let mut told: Vec<_> = [("a", 255, 5), ("b", 256, 6), ("c", 257, 7), ("d", 5, 8)]
            .into_iter()
            .map(|(rid, count, id)| trial::queue(&mut scheduler, rid, &vec![id; count], 200))
            .collect();
        scheduler.admit();
        scheduler.step();
        // `c` takes two chunks, of which one is left; `d` does not overtake it.
        assert_eq!(standing(&scheduler), (vec!["a", "b"], vec!["c", "d"], limit / 3 * 2));
        // Now `b` grows into a second chunk, and after it `a`: both do not fit.
        scheduler.admit();
        scheduler.step();
        assert_eq!(standing(&scheduler), (vec!["a", "b"], vec!["c", "d"], limit));
        scheduler.admit();
        scheduler.step();
        assert_eq!(standing(&scheduler), (vec!["a"], vec!["b", "c", "d"], limit / 3 * 2));
        // Who ends makes room for the next, which goes on behind its last token.
        drop(told.remove(0));
        scheduler.admit();
        scheduler.step();
        assert_eq!(standing(&scheduler), (vec!["b"], vec!["c", "d"], limit / 3 * 2));
        assert_eq!(trial::told(&mut told[0]).1.len(), 3);
    }
}

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
    /// What they lose is computed again later. Returns the bytes that are held.
    pub(super) fn make_room(&mut self) -> usize {
        let mut held = self.running.iter().map(|sequence| self.kv_bytes(sequence)).sum::<usize>();
        while held > self.limits.kv_memory
            && self.running.len() > 1
            && let Some(mut newest) = self.running.pop()
        {
            held -= self.kv_bytes(&newest);
            newest.cache = self.model.cache();
            self.waiting.push_front(newest);
        }
        held
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    use crate::model::{LoadOptions, Model, SamplingParams};
    use crate::serving::compute::{Board, Event, Job, Limits, Plan};

    use super::*;

    /// A scheduler of the tiny model with room for so many tokens of one sequence.
    fn scheduler(tokens: usize) -> Scheduler {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models/tiny-qwen3");
        let load = LoadOptions::default();
        let model = Model::load(&folder, &load).unwrap();
        let kv_memory = Cache::bytes_of(&model.config, tokens);
        assert_eq!(Cache::tokens_in(&model.config, kv_memory), tokens);
        assert_eq!(Cache::tokens_in(&model.config, kv_memory - 1), tokens - 256);
        let limits = Limits { max_running: 16, kv_memory, load };
        Scheduler::new(model, limits, Board::new("0".to_owned(), folder))
    }

    fn queue(scheduler: &mut Scheduler, rid: &str, prompt: usize) -> UnboundedReceiver<Event> {
        let (events, told) = unbounded_channel();
        let sampling = SamplingParams { temperature: 0.0, ..Default::default() };
        let plan = Plan { sampling, max_new: 200, stop_ids: vec![], top: 0, chosen: vec![] };
        let prompt = vec![5_i64; prompt].into();
        scheduler.queue(Job { rid: rid.into(), prompt, adapter: None, plan, events });
        told
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
        let mut told: Vec<_> = [("a", 255), ("b", 256), ("c", 257), ("d", 5)]
            .into_iter()
            .map(|(rid, prompt)| queue(&mut scheduler, rid, prompt))
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
        let mut tokens = 0;
        while let Ok(Event::Token(_)) = told[0].try_recv() {
            tokens += 1;
        }
        assert_eq!(tokens, 3);
    }
}

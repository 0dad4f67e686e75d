//! Which sequence gets the next token: continuous batching.
//!
//! Requests join and leave between tokens. A sequence is its ids and a cache of
//! some of them; what the cache lacks is fed in the next step, be it a prompt,
//! one token, or everything again because the weights are new. So keys and
//! values of old weights never meet new ones, and no stream breaks.

mod memory;
mod prefixes;
mod scoring;
mod step;
#[cfg(test)]
mod trial;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use crate::model::{Cache, Model, Sampler};
use crate::wire::sglang::PauseMode;

use super::adapters::Shelf;
use super::compute::{Board, Command, End, Event, Job, Limits, ScoreJob, Update};
use super::failure::Failure;
use super::shape::same_shape;

use prefixes::Prefixes;
use scoring::Batch;

struct Sequence {
    job: Job,
    ids: Vec<i64>,
    cache: Cache,
    sampler: Sampler,
    /// Tokens that the next pass feeds it.
    fed: usize,
    /// Whether another is computing what it begins with.
    waits: bool,
    /// Tokens of its prompt that were not computed for it.
    cached: usize,
}

impl Sequence {
    fn generated(&self) -> usize {
        self.ids.len() - self.job.prompt.len()
    }

    fn missing(&self) -> usize {
        self.ids.len() - self.cache.len()
    }

    /// Takes its cache away: what that held will be fed once more.
    fn forget(&mut self, empty: Cache) {
        self.cache = empty;
        if self.generated() == 0 {
            self.cached = 0;
        }
    }

    fn tell(&self, event: Event) {
        // A receiver that is gone has its sequence dropped before the next step.
        let _ = self.job.events.send(event);
    }
}

/// Owns the model and every running sequence.
pub(super) struct Scheduler {
    model: Model,
    shelf: Shelf,
    version: Arc<str>,
    limits: Limits,
    board: Board,
    paused: bool,
    waiting: VecDeque<Sequence>,
    running: Vec<Sequence>,
    scores: VecDeque<ScoreJob>,
    /// What is being scored.
    scoring: Option<Batch>,
    /// Of sequences that have ended, and of the beginnings of others.
    prefixes: Prefixes,
}

impl Scheduler {
    pub(super) fn new(model: Model, limits: Limits, board: Board) -> Self {
        Self {
            model,
            shelf: Shelf::default(),
            version: board.read().version,
            prefixes: Prefixes::new(limits.prefix_cache),
            limits,
            board,
            paused: false,
            waiting: VecDeque::new(),
            running: Vec::new(),
            scores: VecDeque::new(),
            scoring: None,
        }
    }

    /// Works until it is told to stop, or nobody is left to tell it.
    pub(super) fn run(mut self, inbox: &Receiver<Command>) {
        loop {
            if self.paused || !self.has_work() {
                let Ok(command) = inbox.recv() else {
                    return;
                };
                if !self.take(command) {
                    return;
                }
            }
            // What came meanwhile is taken before the next token.
            while let Ok(command) = inbox.try_recv() {
                if !self.take(command) {
                    return;
                }
            }
            if !self.paused {
                self.score();
                self.admit();
                self.step();
            }
            self.publish();
        }
    }

    fn has_work(&self) -> bool {
        let sequences = !(self.waiting.is_empty() && self.running.is_empty());
        sequences || self.scoring.is_some() || !self.scores.is_empty()
    }

    fn publish(&mut self) {
        let (waiting, running, scores) = (&self.waiting, &self.running, &self.scores);
        let scoring = self.scoring.as_ref().and_then(|batch| batch.adapter);
        self.shelf.tidy(|id| {
            let mut sequences = waiting.iter().chain(running);
            sequences.any(|sequence| sequence.job.adapter == Some(id))
                || scores.iter().any(|job| job.adapter == Some(id))
                || scoring == Some(id)
        });
        self.board.change(|status| {
            status.running = self.running.len();
            // Who is being scored waits for the next piece.
            let scoring = self.scoring.as_ref().map_or(0, Batch::count);
            status.waiting = self.waiting.len() + self.scores.len() + scoring;
            status.prefix_bytes = self.prefixes.bytes();
        });
    }

    /// Does what a command says; false ends the thread.
    fn take(&mut self, command: Command) -> bool {
        match command {
            Command::Generate(jobs) => jobs.into_iter().for_each(|job| self.queue(job)),
            Command::Score(job) => self.queue_score(job),
            Command::Update(update) => self.update(update),
            Command::Load(load) => {
                let loads = || self.shelf.load(&load.name, load.folder, &self.model);
                let loaded = catch_unwind(AssertUnwindSafe(loads));
                let loaded = loaded.unwrap_or_else(|_| Err("loading failed".to_owned()));
                self.publish_adapters();
                let _ = load.reply.send(loaded);
            }
            Command::Unload(unload) => {
                let gone = self.shelf.unload(&unload.name);
                self.prefixes.retain(|id| self.shelf.has(id));
                self.publish_adapters();
                let _ = unload.reply.send(gone);
            }
            Command::NameVersion(version, reply) => {
                self.version = version.into();
                self.shelf.name_version(&self.version);
                self.board.change(|status| status.version = self.version.clone());
                let _ = reply.send(());
            }
            Command::Pause(mode, reply) => {
                self.pause(mode);
                let _ = reply.send(());
            }
            Command::Continue(reply) => {
                self.set_paused(false);
                let _ = reply.send(());
            }
            Command::Flush(reply) => {
                self.prefixes.clear();
                let _ = reply.send(());
            }
            Command::Abort(rid) => self.abort(rid.as_deref()),
            Command::Stop => {
                // These can be asked for once more elsewhere: their requests hear that the
                // engine answers no more.
                self.scores.clear();
                self.scoring = None;
                self.abort(None);
                return false;
            }
        }
        true
    }

    /// Tells everybody before the caller hears of it.
    fn publish_adapters(&self) {
        let names = Arc::new(self.shelf.names.clone());
        self.board.change(|status| status.adapters = names);
    }

    fn queue(&mut self, job: Job) {
        if self.shelf.model(job.adapter, &self.model).is_none() {
            let failure = Failure::bad("the adapter was unloaded meanwhile");
            let _ = job.events.send(Event::Failed(failure));
            return;
        }
        match Sampler::new(job.plan.sampling) {
            Ok(sampler) => {
                let ids = job.prompt.to_vec();
                let cache = self.model.cache();
                let (fed, waits, cached) = (0, false, 0);
                let sequence = Sequence { job, ids, cache, sampler, fed, waits, cached };
                self.waiting.push_back(sequence);
            }
            Err(error) => {
                let _ = job.events.send(Event::Failed(Failure::bad(error.to_string())));
            }
        }
    }

    fn set_paused(&mut self, paused: bool) {
        self.paused = paused;
        self.board.change(|status| status.paused = paused);
    }

    fn pause(&mut self, mode: PauseMode) {
        self.set_paused(true);
        match mode {
            PauseMode::Abort => self.abort(None),
            PauseMode::InPlace => {}
            PauseMode::Retract => self.retract(),
        }
    }

    /// Puts running sequences back in front of the queue, without caches.
    fn retract(&mut self) {
        for mut sequence in self.running.drain(..).rev() {
            sequence.forget(self.model.cache());
            self.waiting.push_front(sequence);
        }
    }

    fn abort(&mut self, rid: Option<&str>) {
        self.abort_scores(rid);
        let meant = |sequence: &Sequence| rid.is_none_or(|rid| &*sequence.job.rid == rid);
        let mut ended: Vec<_> = self.running.extract_if(.., |sequence| meant(sequence)).collect();
        let (out, kept) = self.waiting.drain(..).partition::<Vec<_>, _>(meant);
        self.waiting = kept.into();
        ended.extend(out);
        for sequence in ended {
            sequence.tell(Event::End(End::Abort));
        }
    }

    /// Loads new weights beside the old ones; only if that works do they change
    /// places. Sequences go on from where they are.
    fn update(&mut self, update: Update) {
        let Update { folder, version, abort, reply } = update;
        let loaded = self.load(&folder);
        let loaded = loaded.and_then(|model| Ok((self.shelf.on(&model)?, model)));
        let outcome = loaded.map(|(shelf, model)| {
            if abort {
                self.abort(None);
            }
            let carried = self.running.len() + self.waiting.len();
            (self.model, self.shelf) = (model, shelf);
            self.retract();
            // A paused sequence may wait with a cache of the old weights.
            for sequence in &mut self.waiting {
                sequence.forget(self.model.cache());
            }
            self.prefixes.clear();
            self.scoring.iter_mut().for_each(Batch::begin_again);
            if let Some(version) = version {
                self.version = version.into();
            }
            self.board.change(|status| {
                status.version = self.version.clone();
                status.folder = folder;
            });
            carried
        });
        let _ = reply.send(outcome);
    }

    fn load(&self, folder: &Path) -> Result<Model, String> {
        let load = || Model::load(folder, &self.limits.load);
        let loaded =
            catch_unwind(AssertUnwindSafe(load)).map_err(|_| "loading failed".to_owned())?;
        let model = loaded.map_err(|error| error.to_string())?;
        same_shape(folder, &self.model.config, &model.config)?;
        Ok(model)
    }

    /// Lets waiting sequences join, as far as their number and the memory stay bounded.
    fn admit(&mut self) {
        self.waiting.retain(|sequence| !sequence.job.events.is_closed());
        // A stop string ends an answer where its text is made: its receiver is gone then.
        for sequence in self.running.extract_if(.., |sequence| sequence.job.events.is_closed()) {
            let Sequence { job, ids, cache, .. } = &sequence;
            if job.adapter.is_none_or(|id| self.shelf.has(id)) {
                self.prefixes.keep(job.adapter, ids, cache);
            }
        }
        let mut held = self.make_room();
        while self.running.len() < self.limits.max_running
            && let Some(next) = self.waiting.front()
            && self.fits(held, next)
            && let Some(next) = self.waiting.pop_front()
        {
            held += self.kv_bytes(&next);
            self.running.push(next);
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc::UnboundedReceiver;

    use super::*;

    /// What was told of an answer: its ids, and its ends.
    type Told = (Vec<i32>, Vec<End>);

    fn told(events: &mut UnboundedReceiver<Event>) -> Told {
        let (mut ids, mut ends) = (Vec::new(), Vec::new());
        while let Ok(event) = events.try_recv() {
            match event {
                Event::Begun(_) => {}
                Event::Token(token) => ids.push(token.id),
                Event::End(end) => ends.push(end),
                Event::Failed(failure) => panic!("{failure}"),
            }
        }
        (ids, ends)
    }

    /// Asks twice for the same prompt beside a stream; the second waits for the first. After
    /// so many steps the first is aborted by its name, or nobody listens to it any more.
    /// Returns what was told of the first and of the others, and the number of steps.
    fn cut_off(after: usize, by_name: bool) -> (Told, [Told; 2], usize) {
        let prompt: Vec<i64> = (0..100).map(|place| place * 11 % 1000).collect();
        let mut scheduler = trial::scheduler(trial::LARGE, 16, 1 << 26);
        let mut stream = trial::queue(&mut scheduler, "stream", &[5, 6, 7], 14);
        // As long as it goes on, prompts come in pieces.
        scheduler.admit();
        scheduler.step();
        let mut first = trial::queue(&mut scheduler, "first", &prompt, 5);
        let mut second = trial::queue(&mut scheduler, "second", &prompt, 5);
        let (mut heard, mut steps) = (None, 0);
        loop {
            match (steps == after, by_name) {
                (true, true) => scheduler.abort(Some("first")),
                (true, false) => {
                    heard = Some(told(&mut first));
                    first.close();
                }
                (false, _) => {}
            }
            if scheduler.waiting.is_empty() && scheduler.running.is_empty() {
                break;
            }
            scheduler.admit();
            scheduler.step();
            steps += 1;
            assert!(steps < 100, "it does not end");
        }
        let heard = heard.unwrap_or_else(|| told(&mut first));
        (heard, [told(&mut stream), told(&mut second)], steps)
    }

    #[test]
    fn an_answer_ends_wherever_it_is_aborted_and_changes_no_other() {
        let (whole, others, steps) = cut_off(usize::MAX, true);
        assert_eq!((whole.0.len(), &whole.1), (5, &vec![End::Length]));
        for (other, length) in others.iter().zip([14, 5]) {
            assert_eq!((other.0.len(), &other.1), (length, &vec![End::Length]));
        }
        // The prompt comes in seven pieces, so this is: in the queue, in each of them, with
        // each of its tokens, and after its end.
        assert!(steps > 7 + 5, "{steps}");
        let mut lengths = std::collections::BTreeSet::new();
        for after in 0..=steps {
            let (named, after_name, _) = cut_off(after, true);
            let over = named.0.len() == 5;
            let end = if over { End::Length } else { End::Abort };
            assert_eq!(
                (&named.0[..], &named.1),
                (&whole.0[..named.0.len()], &vec![end]),
                "{after}"
            );
            let (left, after_leaving, _) = cut_off(after, false);
            assert_eq!(left.0, named.0, "{after}");
            for found in [&after_name, &after_leaving] {
                assert_eq!(*found, others, "{after}");
            }
            lengths.insert(named.0.len());
        }
        assert_eq!(lengths.into_iter().collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    }
}

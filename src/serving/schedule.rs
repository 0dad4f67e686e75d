//! Which sequence gets the next token: continuous batching.
//!
//! Requests join and leave between tokens. A sequence is its ids and a cache of
//! some of them; what the cache lacks is fed in the next step, be it a prompt,
//! one token, or everything again because the weights are new. So keys and
//! values of old weights never meet new ones, and no stream breaks.

mod memory;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use crate::model::sampler::top_log_probs;
use crate::model::{Cache, Error, Model, Sampler};
use crate::wire::sglang::PauseMode;

use super::adapters::{AdapterId, Shelf};
use super::compute::{Board, Command, End, Event, Job, Limits, ScoreJob, Scores, Token, Update};
use super::failure::Failure;
use super::shape::same_shape;

/// Tokens that are fed in one step, unless one prompt alone has more.
const FED_AT_ONCE: usize = 4096;
/// Sequences that are scored between two tokens of the running ones.
const SCORED_AT_ONCE: usize = 16;

struct Sequence {
    job: Job,
    ids: Vec<i64>,
    cache: Cache,
    sampler: Sampler,
}

impl Sequence {
    fn generated(&self) -> usize {
        self.ids.len() - self.job.prompt.len()
    }

    fn missing(&self) -> usize {
        self.ids.len() - self.cache.len()
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
}

impl Scheduler {
    pub(super) fn new(model: Model, limits: Limits, board: Board) -> Self {
        Self {
            model,
            shelf: Shelf::default(),
            version: board.read().version,
            limits,
            board,
            paused: false,
            waiting: VecDeque::new(),
            running: Vec::new(),
            scores: VecDeque::new(),
        }
    }

    /// Works until it is told to stop, or nobody is left to tell it.
    pub(super) fn run(mut self, inbox: &Receiver<Command>) {
        loop {
            let work =
                !(self.waiting.is_empty() && self.running.is_empty() && self.scores.is_empty());
            if self.paused || !work {
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

    fn publish(&mut self) {
        let (waiting, running, scores) = (&self.waiting, &self.running, &self.scores);
        self.shelf.tidy(|id| {
            let mut sequences = waiting.iter().chain(running);
            sequences.any(|sequence| sequence.job.adapter == Some(id))
                || scores.iter().any(|job| job.adapter == Some(id))
        });
        self.board.change(|status| {
            status.running = self.running.len();
            status.waiting = self.waiting.len() + self.scores.len();
        });
    }

    /// Does what a command says; false ends the thread.
    fn take(&mut self, command: Command) -> bool {
        match command {
            Command::Generate(jobs) => jobs.into_iter().for_each(|job| self.queue(job)),
            Command::Score(job) => self.scores.push_back(job),
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
            Command::Abort(rid) => self.abort(rid.as_deref()),
            Command::Stop => {
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
                self.waiting.push_back(Sequence { job, ids, cache, sampler });
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
            sequence.cache = self.model.cache();
            self.waiting.push_front(sequence);
        }
    }

    fn abort(&mut self, rid: Option<&str>) {
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
                sequence.cache = self.model.cache();
            }
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

    fn score(&mut self) {
        let count = self.scores.len().min(SCORED_AT_ONCE);
        let jobs: Vec<_> =
            self.scores.drain(..count).filter(|job| !job.reply.is_closed()).collect();
        let mut by_adapter: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for job in jobs {
            by_adapter.entry(job.adapter).or_default().push(job);
        }
        by_adapter.into_iter().for_each(|(adapter, jobs)| self.score_with(adapter, jobs));
    }

    fn score_with(&self, adapter: Option<AdapterId>, jobs: Vec<ScoreJob>) {
        let version = self.shelf.version(adapter, &self.version);
        let model = self.shelf.model(adapter, &self.model);
        let requests: Vec<_> = jobs.iter().map(|job| job.request.clone()).collect();
        let scored = catch_unwind(AssertUnwindSafe(|| model.map(|model| model.score(&requests))));
        match scored {
            Ok(Some(scored)) => {
                for (job, scored) in jobs.into_iter().zip(scored) {
                    let _ = job.reply.send(Ok(Scores { scored, version: version.clone() }));
                }
            }
            Ok(None) | Err(_) => {
                for job in jobs {
                    let _ = job.reply.send(Err(Failure::internal("scoring failed")));
                }
            }
        }
    }

    /// Lets waiting sequences join, as far as the step and the memory stay bounded.
    fn admit(&mut self) {
        self.waiting.retain(|sequence| !sequence.job.events.is_closed());
        self.running.retain(|sequence| !sequence.job.events.is_closed());
        let mut held = self.make_room();
        let mut fed: usize = self.running.iter().map(Sequence::missing).sum();
        while self.running.len() < self.limits.max_running
            && let Some(next) = self.waiting.front()
            && (fed == 0 || fed + next.missing() <= FED_AT_ONCE)
            && self.fits(held, next)
            && let Some(next) = self.waiting.pop_front()
        {
            fed += next.missing();
            held += self.kv_bytes(&next);
            self.running.push(next);
        }
    }

    /// Gives every running sequence its next token: one pass for each adapter in use,
    /// and one for the model alone.
    fn step(&mut self) {
        let worn: BTreeSet<_> = self.running.iter().map(|sequence| sequence.job.adapter).collect();
        worn.into_iter().for_each(|adapter| self.step_with(adapter));
    }

    fn step_with(&mut self, adapter: Option<AdapterId>) {
        // Who uses an adapter keeps it there.
        let Some(model) = self.shelf.model(adapter, &self.model) else { return };
        let running = &mut self.running;
        let meant = |sequence: &Sequence| sequence.job.adapter == adapter;
        let computed = catch_unwind(AssertUnwindSafe(|| {
            let mut batch: Vec<(&[i64], &mut Cache)> = running
                .iter_mut()
                .filter(|sequence| meant(sequence))
                .map(|Sequence { ids, cache, .. }| (&ids[cache.len()..], cache))
                .collect();
            rows(&model.step(&mut batch))
        }));
        let Ok(Ok(rows)) = computed else {
            let failure = Failure::internal("the forward pass failed");
            tracing::error!("the forward pass failed; its requests are ended");
            for sequence in self.running.extract_if(.., |sequence| meant(sequence)) {
                sequence.tell(Event::Failed(failure.clone()));
            }
            return;
        };
        let version = self.shelf.version(adapter, &self.version);
        let mut row = rows.iter();
        self.running.retain_mut(|sequence| match meant(sequence).then(|| row.next()) {
            Some(Some(logits)) => goes_on(sequence, logits, &version),
            Some(None) => false,
            None => true,
        });
    }
}

/// Samples a sequence's next token from its logits; false ends the sequence.
fn goes_on(sequence: &mut Sequence, logits: &[f32], version: &Arc<str>) -> bool {
    let token = match sample(sequence, logits, version) {
        Ok(token) => token,
        Err(error) => {
            sequence.tell(Event::Failed(Failure::internal(error.to_string())));
            return false;
        }
    };
    let id = token.id;
    sequence.ids.push(i64::from(id));
    sequence.tell(Event::Token(token));
    let plan = &sequence.job.plan;
    let end = if plan.stop_ids.contains(&id) {
        End::Stop(id)
    } else if sequence.generated() >= plan.max_new {
        End::Length
    } else {
        return true;
    };
    sequence.tell(Event::End(end));
    false
}

fn sample(sequence: &mut Sequence, logits: &[f32], version: &Arc<str>) -> Result<Token, Error> {
    let sampled = sequence.sampler.sample(logits)?;
    let plan = &sequence.job.plan;
    let temperature = match plan.sampling.temperature {
        0.0 => 1.0,
        temperature => temperature,
    };
    // All log-probs of a row differ by what their logits differ by.
    let own = logits.get(sampled.id as usize).copied().unwrap_or_default();
    let at = |id: i64| {
        let logit = usize::try_from(id).ok().and_then(|id| logits.get(id));
        logit.map(|logit| (id, sampled.log_prob + (logit - own) / temperature))
    };
    let top = match plan.top {
        0 => Vec::new(),
        count => top_log_probs(logits, count, temperature)?,
    };
    Ok(Token {
        id: sampled.id,
        log_prob: sampled.log_prob,
        top,
        chosen: plan.chosen.iter().filter_map(|id| at(*id)).collect(),
        version: version.clone(),
    })
}

/// Copies the rows of a matrix out of libtorch.
fn rows(logits: &tch::Tensor) -> Result<Vec<Vec<f32>>, tch::TchError> {
    let width = logits.size2()?.1 as usize;
    let flat: Vec<f32> = Vec::try_from(logits.f_reshape([-1])?)?;
    Ok(flat.chunks(width.max(1)).map(<[f32]>::to_vec).collect())
}

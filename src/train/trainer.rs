//! The trainer: a model, its optimiser, the folder of its policies, and the one
//! step that leads from a batch of turns to the next policy.

mod constants;
mod intake;

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Instant;

use tch::Tensor;

use crate::advantage::Method;
use crate::model::{Dtype, Model};

use super::Error;
use super::adamw::{AdamW, zero_gradients};
use super::average::Average;
use super::checkpoint::{self, ADAPTER, Base, LEDGER, OPTIMIZER, OURS, Record};
use super::health::Probe;
use super::ledger::Ledger;
use super::metrics::{Metrics, Updates};
use super::objective::{Prepared, Terms, gradients};
use super::policies::Policies;
use super::rounding::Served;
use super::sample::{Refusal, Sample};
use super::start::{Options, base, default_dtype, held, load, resume};

/// Skipped updates in a row that end the run.
const SKIPS_ALLOWED: u64 = 3;

/// Why turns are not trained in which nothing pulls at the weights.
const ZERO: &str = "zero_advantage";

/// Why turns are not trained whose updates were skipped.
const NOT_FINITE: &str = "not_finite_step";

/// A model in training.
#[derive(Debug)]
pub struct Trainer {
    options: Options,
    model: Model,
    reference: Option<Model>,
    optimizer: AdamW,
    average: Option<Average>,
    policies: Policies,
    /// Folder whose tensor names and settings the policies take over.
    pattern: PathBuf,
    base: Base,
    dtype: Dtype,
    /// What the newest policy is served as, if its weights are rounded.
    served: Option<Served>,
    ledger: Ledger,
    step: u64,
    skips_in_a_row: u64,
    /// Ids of the turns that this run has trained.
    taken: HashSet<String>,
    refused: BTreeMap<String, u64>,
    faults: Vec<Fault>,
    notes: Vec<String>,
}

/// A broken row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Its turn id.
    pub turn_id: String,
    /// What is wrong with it.
    pub problem: String,
}

impl Trainer {
    /// Resumes at the folder's `latest`, or starts from the model.
    pub fn open(mut options: Options) -> Result<Self, Error> {
        let mut policies = Policies::open(&options.out)?;
        let latest = policies.latest()?;
        let record = latest.as_deref().map(checkpoint::read_record).transpose()?;
        let base = base(&options, record.as_ref())?;
        let pattern = latest.clone().unwrap_or_else(|| base.folder.clone());
        let model = load(&options, &base, latest.as_deref())?;
        let weights: u64 = model.parameters().iter().map(|(_, tensor)| tensor.numel() as u64).sum();
        let dtype = options.dtype.map_or_else(|| default_dtype(&base.folder, weights), Ok)?;
        let rounded = held(&model, dtype) == Dtype::Bf16;
        let served = rounded.then(|| Served::new(&model, options.rounding, options.seed));
        let mut optimizer = AdamW::new(options.rates, model.trained());
        let mut notes = Vec::new();
        let mut ledger = Ledger::default();
        if let (Some(policy), Some(record)) = (&latest, &record) {
            optimizer.updates = record.updates;
            resume(policy, record, &model, &mut optimizer, &mut notes)?;
            ledger = Ledger::read(&policy.join(LEDGER))?;
        }
        let average = Average::open(options.average, latest.as_deref(), &model, &mut notes)?;
        let reference = match options.terms.kl_coefficient != 0.0 {
            true => Some(Model::load(&base.folder, &options.compute.load(false))?),
            false => None,
        };
        options.admission.vocabulary = model.config.vocab_size;
        policies.make()?;
        let step = record.map_or(0, |record| record.step);
        Ok(Self {
            options,
            model,
            reference,
            optimizer,
            average,
            policies,
            pattern,
            base,
            dtype,
            served,
            ledger,
            step,
            skips_in_a_row: 0,
            taken: HashSet::new(),
            refused: BTreeMap::new(),
            faults: Vec::new(),
            notes,
        })
    }

    /// Returns the step of the policy at hand; 0 is the start model.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Returns the model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Returns what happened to turns so far.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Returns how many rows were refused in this run, by reason.
    pub fn refused(&self) -> &BTreeMap<String, u64> {
        &self.refused
    }

    /// Returns the broken rows met in this run.
    pub fn faults(&self) -> &[Fault] {
        &self.faults
    }

    /// Returns the broken rows met since the last call, and forgets them.
    pub fn take_faults(&mut self) -> Vec<Fault> {
        std::mem::take(&mut self.faults)
    }

    /// Returns what the reader of the run should know.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns the type of the weights written.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Admits and trains by another method from here on, with the terms of the loss and the
    /// record's settings that go with it.
    pub fn set_method(&mut self, method: Method, terms: Terms, settings: serde_json::Value) {
        self.options.admission.method = method;
        (self.options.terms, self.options.settings) = (terms, settings);
    }

    /// Trains one batch and writes the next policy. Returns nothing, and writes
    /// nothing, if no sample is left or no update could be made; a policy that the
    /// step has broken is an error.
    pub fn train(&mut self, samples: Vec<Sample>) -> Result<Option<Trained>, Error> {
        let started = Instant::now();
        let batch = self.prepare(samples);
        if batch.is_empty() {
            return Ok(None);
        }
        if self.pointless(&batch) {
            // A step would move the weights all the same, by decay and momentum.
            for prepared in &batch {
                self.refuse(&prepared.sample.turn_id, Refusal::sound(ZERO));
            }
            return Ok(None);
        }
        let probe = Probe::new(&self.model, &batch, self.options.tokens_per_pass);
        let (updates, taken) = self.update(&batch)?;
        let step = self.policies.after(self.step);
        if updates.update.is_none() {
            for (prepared, taken) in batch.iter().zip(taken) {
                let reason = if taken { ZERO } else { NOT_FINITE };
                self.refuse(&prepared.sample.turn_id, Refusal::sound(reason));
            }
            let metrics = self.metrics(step, &batch, &updates, started);
            return Ok(Some(Trained { metrics, policy: None }));
        }
        let ruined = |ruin| Error::Ruined { step, ruin };
        let moved = probe.check(&self.model).map_err(ruined)?;
        let mut trained = Vec::new();
        for (prepared, taken) in batch.into_iter().zip(taken) {
            match taken {
                true => trained.push(prepared),
                // The ledger does not have it: another run may train it.
                false => self.count(NOT_FINITE),
            }
        }
        let mut metrics = self.metrics(step, &trained, &updates, started);
        metrics.moved = Some(moved);
        self.step = step;
        for prepared in &trained {
            self.ledger.consume(&prepared.sample.turn_id, self.step);
            self.taken.insert(prepared.sample.turn_id.clone());
        }
        let rounded = self.served.as_mut().map(|served| served.round(&self.model, step));
        let weights = rounded.map(|(changed, weights)| {
            metrics.weights_changed = Some(changed);
            weights
        });
        let policy = self.save(&metrics, weights.as_deref())?;
        Ok(Some(Trained { metrics, policy: Some(policy) }))
    }

    fn metrics(
        &self,
        step: u64,
        batch: &[Prepared],
        updates: &Updates,
        started: Instant,
    ) -> Metrics {
        let admission = &self.options.admission;
        let rate = self.optimizer.rates.learning_rate;
        let metrics = Metrics::new(step, batch, updates, admission.old_log_probs, rate);
        let metrics = match admission.method.estimator.has_advantages() {
            true => metrics,
            false => metrics.without_advantages(),
        };
        let seconds = started.elapsed().as_secs_f64();
        Metrics { seconds, refused: self.refused.clone(), ..metrics }
    }

    /// Returns whether nothing in the batch pulls at the weights.
    fn pointless(&self, batch: &[Prepared]) -> bool {
        let Terms { kl_coefficient, entropy_coefficient, .. } = self.options.terms;
        let zero = |prepared: &Prepared| {
            prepared.sample.trained().all(|token| {
                let distilled = prepared.distilled.as_ref();
                prepared.advantages[token] == 0.0 && distilled.is_none_or(|it| it.is_zero(token))
            })
        };
        kl_coefficient == 0.0 && entropy_coefficient == 0.0 && batch.iter().all(zero)
    }

    /// Moves the weights, `epochs` times on the same constants, with an update for
    /// each part of the batch. Also returns which turns are done with: those of a part
    /// whose every update was skipped are not.
    fn update(&mut self, batch: &[Prepared]) -> Result<(Updates, Vec<bool>), Error> {
        let mut updates = Updates::default();
        let count = self.options.parts.max(1) as usize;
        let bound = |part: usize| batch.len() * part / count;
        let parts = (0..count).map(|part| bound(part)..bound(part + 1));
        let parts: Vec<Range<usize>> = parts
            .filter(|part| !part.is_empty() && !self.pointless(&batch[part.clone()]))
            .collect();
        let mut taken = vec![true; batch.len()];
        for part in &parts {
            taken[part.clone()].fill(false);
        }
        for part in (0..self.options.epochs.max(1)).flat_map(|_| &parts) {
            if self.update_by(&batch[part.clone()], &mut updates)? {
                taken[part.clone()].fill(true);
            }
        }
        Ok((updates, taken))
    }

    /// Moves the weights once. Returns whether they moved; errors if too many updates
    /// in a row were not finite.
    fn update_by(&mut self, part: &[Prepared], updates: &mut Updates) -> Result<bool, Error> {
        zero_gradients(self.model.trained());
        let budget = self.options.tokens_per_pass;
        let measures = gradients(&self.model, part, &self.options.terms, budget);
        updates.first.get_or_insert(measures);
        updates.last = Some(measures);
        let share = self.options.schedule.share(self.optimizer.updates + 1);
        self.optimizer.rates.learning_rate = self.options.rates.learning_rate * share;
        let step = match measures.loss.is_finite() {
            true => self.optimizer.step(self.model.trained(), held(&self.model, self.dtype)),
            false => None,
        };
        let Some(update) = step else {
            updates.skipped += 1;
            self.skips_in_a_row += 1;
            return match self.skips_in_a_row >= SKIPS_ALLOWED {
                true => Err(Error::NotFinite { updates: self.skips_in_a_row }),
                false => Ok(false),
            };
        };
        self.skips_in_a_row = 0;
        self.average.iter_mut().for_each(|average| average.follow(&self.model));
        tracing::debug!(update = self.optimizer.updates, "the weights have moved");
        updates.changed = updates.changed.max(update.changed);
        updates.update = Some(update);
        Ok(true)
    }

    /// Writes the policy of the step at hand. `rounded` are its weights, if they are not
    /// the model's own.
    fn save(
        &mut self,
        metrics: &Metrics,
        rounded: Option<&[(String, Tensor)]>,
    ) -> Result<PathBuf, Error> {
        let aside = self.policies.begin(self.step)?;
        self.write(&aside, metrics, rounded)
            .map_err(|error| self.policies.named(error, self.step))?;
        let policy = self.policies.publish(&aside, self.step)?;
        self.pattern.clone_from(&policy);
        self.policies.prune(self.step, self.options.keep, OPTIMIZER)?;
        Ok(policy)
    }

    fn write(
        &self,
        aside: &Path,
        metrics: &Metrics,
        rounded: Option<&[(String, Tensor)]>,
    ) -> Result<(), Error> {
        let dtype = Some(self.dtype);
        match rounded {
            Some(weights) => self.model.save_with(weights, &self.pattern, aside, dtype)?,
            None => self.model.save(&self.pattern, aside, dtype)?,
        }
        let ours = aside.join(OURS);
        std::fs::create_dir_all(&ours).map_err(|source| Error::write(&ours, source))?;
        let record = Record {
            step: self.step,
            updates: self.optimizer.updates,
            base: self.base.clone(),
            dtype: self.dtype.to_string(),
            seed: self.options.seed,
            oclaw: env!("CARGO_PKG_VERSION").to_owned(),
            settings: self.options.settings.clone(),
            metrics: serde_json::to_value(metrics).unwrap_or_default(),
        };
        checkpoint::write_record(aside, &record)?;
        let state = aside.join(OPTIMIZER);
        let trained = self.model.trained();
        let held = held(&self.model, self.dtype);
        checkpoint::write_optimizer(&state, &self.optimizer, trained, held)?;
        if let Some(adapter) = self.model.adapter() {
            adapter.write(&self.base.folder, &aside.join(ADAPTER))?;
        }
        if let Some(average) = &self.average {
            let folders = [self.pattern.as_path(), &self.base.folder];
            average.write(&self.model, folders, aside, self.dtype)?;
        }
        self.ledger.write(&aside.join(LEDGER))
    }
}

/// What a step led to.
#[derive(Debug, Clone, PartialEq)]
pub struct Trained {
    /// Its numbers.
    pub metrics: Metrics,
    /// The new policy's folder; nothing if the step was skipped.
    pub policy: Option<PathBuf>,
}

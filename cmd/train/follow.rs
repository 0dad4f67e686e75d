//! `oclaw train --follow`: steps as shards arrive.
//!
//! The ledger of the newest policy says what became of each turn, so that a run
//! that was killed goes on where it was: shards are looked at again from the first,
//! and turns that the ledger has are passed over. Of a shard that has no others only
//! the ids are read. Within a run a shard is read once.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::OsString;
use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use clap::ValueEnum as _;
use oclaw::advantage::Method;
use oclaw::sync;
use oclaw::table::{Shard, Stamp, turn_ids};
use oclaw::train::{Sample, Trainer, read_record};
use oclaw::trajectory::Turn;
use tokio::sync::watch;

use super::metrics_file::Records;
use super::shelf::Shelf;
use super::{Args, checks, idle, silence, steps};
use crate::advantage::EstimatorName;
use crate::common::Context;
use crate::follow::{Incoming, longer, sleep, unless_signalled};
use crate::report::{self, Exit, Failure};
use crate::visible::visible;

/// Turns per step unless the user says otherwise.
const BATCH_TURNS: u64 = 16;

pub(super) fn run(
    args: &Args,
    shelf: &mut Shelf,
    context: &Context,
    folder: &Path,
) -> anyhow::Result<Exit> {
    if !args.inputs.inputs.is_empty() {
        let problem = "`--follow` reads one folder and nothing beside it";
        let remedy = "leave the inputs out, or leave `--follow` out";
        return Err(Failure::usage(problem).hint(remedy).into());
    }
    // The first signal ends the run between two steps.
    let signal = context.drain_on_signal();
    let (estimator, chosen) = estimator(args, context)?;
    let method = args.method.method_of(estimator);
    let trainer = Trainer::open(steps::options(args, context, &method)?)?;
    let records = Records::open(args)?;
    steps::announce(&trainer, args, context);
    let mut run = Run {
        args,
        shelf,
        context,
        method,
        chosen,
        signal,
        trainer,
        records,
        incoming: Incoming::open(context, folder)?,
        seen: false,
        read: HashSet::new(),
        listed: HashMap::new(),
        due: VecDeque::new(),
        looked: None,
        queue: VecDeque::new(),
        samples: Vec::new(),
        since: None,
        counts: Counts::default(),
        shut: None,
        said: HashSet::new(),
    };
    run.steps()?;
    Ok(run.close())
}

/// Returns the estimator that was given, else that of the newest policy: a run that was
/// killed goes on as it began, whichever shard is the first that is not done. Also returns
/// whether it is either; the first shard decides if not.
fn estimator(args: &Args, context: &Context) -> Result<(EstimatorName, bool), Failure> {
    if let Some(given) = args.estimator {
        return Ok((given, true));
    }
    let Some(recorded) = recorded(&args.out) else {
        return Ok((EstimatorName::default(), false));
    };
    let method = args.method.method_of(recorded);
    context.say(format!("the estimator is `{}`, as the newest policy's", method.estimator));
    idle::tell(args, method.estimator, &mut |text| context.say(text))?;
    Ok((recorded, true))
}

/// Returns the estimator that the newest policy was trained by, if there is one that tells.
/// What is wrong with a policy the trainer says when it takes it up.
fn recorded(out: &Path) -> Option<EstimatorName> {
    let policy = sync::folder_of(&out.join("latest")).ok()?;
    let record = read_record(&policy).ok()?;
    EstimatorName::from_str(record.settings["estimator"].as_str()?, false).ok()
}

/// A run under way.
struct Run<'a> {
    args: &'a Args,
    shelf: &'a mut Shelf,
    context: &'a Context,
    method: Method,
    /// Whether the method is no longer a guess: it was given, a policy has it, or a shard was
    /// read.
    chosen: bool,
    signal: watch::Receiver<bool>,
    trainer: Trainer,
    records: Records,
    incoming: Incoming,
    /// Whether the folder was ever looked at.
    seen: bool,
    /// Shards of which every turn was taken.
    read: HashSet<OsString>,
    /// Shards that failed for good, as they were then.
    listed: HashMap<OsString, Stamp>,
    /// Shards found when last looked, which are still to be read.
    due: VecDeque<Shard>,
    looked: Option<Instant>,
    /// Turns of the shard at hand that nobody has looked at.
    queue: VecDeque<Turn>,
    /// What waits for a full batch.
    samples: Vec<Sample>,
    /// When the first of them came.
    since: Option<Instant>,
    counts: Counts,
    /// Why no step may begin, as it was said.
    shut: Option<String>,
    /// What is said once and not of every shard.
    said: HashSet<String>,
}

#[derive(Debug, Default)]
struct Counts {
    shards: u64,
    listed: u64,
    steps: u64,
    /// Steps with updates that were not finite.
    skipped: usize,
    /// Turns that the ledger had.
    known: u64,
    /// Shards of which it had every turn.
    passed: u64,
    faults: usize,
}

impl Run<'_> {
    fn wanted(&self) -> usize {
        self.args.batch_turns.unwrap_or(BATCH_TURNS) as usize
    }

    /// Trains until a signal comes, or nothing is left under `--once`.
    fn steps(&mut self) -> anyhow::Result<()> {
        while !*self.signal.borrow() {
            self.shelf.publish_waiting(self.context)?;
            let wanted = self.wanted();
            self.trainer.collect_into(&mut self.samples, &mut self.queue, Some(wanted));
            self.tell_faults();
            if self.samples.is_empty() {
                self.since = None;
            } else {
                self.since.get_or_insert_with(Instant::now);
            }
            if self.samples.len() >= wanted {
                self.step_in_time()?;
            } else if !self.read_next()? {
                let left = self.left_to_wait();
                if left == Some(Duration::ZERO) {
                    self.step_in_time()?;
                } else if self.args.following.once {
                    break;
                } else {
                    let poll = self.args.following.poll;
                    self.sleep(left.map_or(poll, |left| left.min(poll)));
                }
            }
        }
        Ok(())
    }

    /// Returns how long an incomplete batch still waits; nothing if for ever, or
    /// if there is none.
    fn left_to_wait(&self) -> Option<Duration> {
        Some(self.args.max_wait?.saturating_sub(self.since?.elapsed()))
    }

    /// Waits. Returns whether no signal came meanwhile.
    fn sleep(&self, time: Duration) -> bool {
        self.context.block_on(sleep(&self.signal, time))
    }

    /// Makes a step if one may begin now, else waits a little.
    fn step_in_time(&mut self) -> anyhow::Result<()> {
        let shut = self.args.window.shut();
        if shut != self.shut {
            let waiting = self.samples.len();
            self.context.say(match &shut {
                Some(why) => format!("{why}: {waiting} turns wait"),
                None => format!("a step may begin: {waiting} turns have waited"),
            });
            self.shut = shut;
        }
        match self.shut {
            Some(_) => {
                self.sleep(self.args.following.poll);
                Ok(())
            }
            None => self.step(),
        }
    }

    fn step(&mut self) -> anyhow::Result<()> {
        self.since = None;
        let before = self.trainer.refused().clone();
        let trained = self.trainer.train(std::mem::take(&mut self.samples))?;
        self.tell_faults();
        let Some(trained) = trained else {
            let refused = silence::since(&before, self.trainer.refused());
            self.context.say(format!("no step: {}", silence::reasons(&refused)));
            if silence::is_zero(&before, self.trainer.refused()) {
                let why = silence::zero(self.method.estimator);
                self.say_once(format!("warning: a batch made no step: {why}"));
            }
            return Ok(());
        };
        if let Some(policy) = &trained.policy {
            self.counts.steps += 1;
            self.shelf.publish(policy, self.context)?;
        }
        self.counts.skipped += usize::from(steps::is_skipped(&trained));
        self.records.write(&trained.metrics)?;
        self.context.conclude(steps::table(&trained));
        steps::warn(&trained, self.context);
        Ok(())
    }

    /// Returns the next shard to read. The folder is looked at when all that was found
    /// is read, and anew as often as `--poll` says: a shard that comes late may have
    /// the earlier turns.
    fn next(&mut self) -> anyhow::Result<Option<Shard>> {
        let poll = self.args.following.poll;
        if self.due.is_empty() || self.looked.is_none_or(|looked| looked.elapsed() >= poll) {
            let (read, listed) = (&self.read, &self.listed);
            let given_up = |shard: &Shard| listed.get(&shard.name) == Some(&shard.stamp);
            let due = self.context.block_on(unless_signalled(
                &self.signal,
                self.incoming.due(&|it| read.contains(it), &given_up),
            ));
            let Some(due) = due else { return Ok(None) };
            self.due = match due {
                Ok(due) => {
                    self.seen = true;
                    due.into()
                }
                Err(error) => {
                    let refused = !self.seen && report::is_store_refusal(&error);
                    if self.args.following.once || refused {
                        return Err(error);
                    }
                    self.say_once(format!("{}: waiting", report::told(&error)));
                    VecDeque::new()
                }
            };
            self.looked = Some(Instant::now());
        }
        Ok(self.due.pop_front())
    }

    /// Reads the next shard whole, so that one that breaks off gives nothing.
    /// Returns whether there was any, or a signal came. Flags that do not go with what the
    /// shard is trained by end the run: they would with the next shard, too.
    fn read_next(&mut self) -> anyhow::Result<bool> {
        let Some(shard) = self.next()? else { return Ok(*self.signal.borrow()) };
        let (mut tries, mut pause) = (0, self.args.following.poll);
        loop {
            let error = match self.read(&shard) {
                Ok(flags) => {
                    flags?;
                    return Ok(true);
                }
                Err(error) => error,
            };
            let away = report::is_store_away(&error);
            if away && self.args.following.once {
                return Err(error);
            }
            if !away {
                let there = unless_signalled(&self.signal, self.incoming.has(&shard));
                if self.context.block_on(there) != Some(true) {
                    return Ok(true);
                }
            }
            // The store's absence is no fault of the shard.
            tries += u32::from(!away);
            if tries >= self.args.following.shard_tries {
                self.list(shard, &error, tries)?;
                return Ok(true);
            }
            let (name, told) = (shard.name.display(), report::told(&error));
            self.context
                .say(format!("{name}: {told}: trying again in {:.1} s", pause.as_secs_f64()));
            if !self.sleep(pause) {
                return Ok(true);
            }
            pause = longer(pause);
        }
    }

    /// Returns the number of turns of a shard of which the ledger has every one. A shard
    /// of a store is copied to be looked at, and then read as any other.
    fn is_known(&self, shard: &Shard) -> Option<usize> {
        let ids = turn_ids(File::open(&shard.path).ok()?)?;
        let known = |id: &String| self.trainer.ledger().entry(id).is_some();
        (!ids.is_empty() && ids.iter().all(known)).then_some(ids.len())
    }

    /// Reads a shard. Within what went well, refuses flags that do not go with its estimator.
    fn read(&mut self, shard: &Shard) -> anyhow::Result<Result<(), Failure>> {
        if let Some(turns) = self.is_known(shard) {
            self.counts.shards += 1;
            self.counts.known += turns as u64;
            self.counts.passed += 1;
            self.read.insert(shard.name.clone());
            return Ok(Ok(()));
        }
        let opened = unless_signalled(&self.signal, self.incoming.source(shard));
        let Some(opened) = self.context.block_on(opened) else { return Ok(Ok(())) };
        let (mut source, _copy) = opened?;
        let mut said = Vec::new();
        let method = match self.chosen {
            true => self.method.clone(),
            false => match checks::choose(&source, self.args, &mut |text| said.push(text)) {
                Ok(method) => method,
                Err(refusal) => return Ok(Err(refusal)),
            },
        };
        checks::check_columns(&source, &method)?;
        checks::check_estimator(&source, method.estimator, &mut |text| said.push(text))?;
        checks::check_tokenizer(&source, self.args)?;
        let mut turns = VecDeque::new();
        while let Some(more) = source.next_turns()? {
            turns.extend(more);
        }
        checks::check_topk(&turns, &method, &mut |text| said.push(text))?;
        self.choose(method);
        said.into_iter().for_each(|text| self.say_once(text));
        let rows = turns.len();
        turns.retain(|turn| self.trainer.ledger().entry(&turn.turn_id).is_none());
        let known = rows - turns.len();
        self.counts.known += known as u64;
        self.counts.shards += 1;
        let name = shard.name.display();
        self.context.say(match known {
            0 => format!("{name}: {rows} turns"),
            _ => format!("{name}: {rows} turns, {known} of them in the ledger"),
        });
        self.queue.extend(turns);
        self.read.insert(shard.name.clone());
        Ok(Ok(()))
    }

    /// Trains by a method from here on. If no policy has one, the first shard does, before any
    /// turn is taken.
    fn choose(&mut self, method: Method) {
        if !self.chosen {
            let terms = self.args.loss.terms(&method);
            let settings = steps::settings(self.args, &method);
            self.trainer.set_method(method.clone(), terms, settings);
            (self.method, self.chosen) = (method, true);
        }
    }

    /// Lists a shard, waiting for a store that is away. If a signal comes first, whoever
    /// starts next finds it as bad.
    fn list(&mut self, shard: Shard, error: &anyhow::Error, tries: u32) -> anyhow::Result<()> {
        let told = report::told(error);
        let (failures, mut pause) = (self.shelf.failures(), self.args.following.poll);
        loop {
            let listing = failures.list(&shard.name, &told, tries);
            match self.context.block_on(unless_signalled(&self.signal, listing)) {
                None => return Ok(()),
                Some(Err(error)) if report::is_store_away(&error) && !self.args.following.once => {
                    self.say_once(format!("{}: waiting for it", report::told(&error)));
                }
                Some(listed) => {
                    listed?;
                    break;
                }
            }
            if !self.sleep(pause) {
                return Ok(());
            }
            pause = longer(pause);
        }
        let name = shard.name.display();
        self.context.say(format!("{name}: {told}: listed as failed after {tries} tries"));
        self.listed.insert(shard.name, shard.stamp);
        self.counts.listed += 1;
        Ok(())
    }

    fn say_once(&mut self, text: String) {
        if self.said.insert(text.clone()) {
            self.context.say(text);
        }
    }

    fn tell_faults(&mut self) {
        for fault in self.trainer.take_faults() {
            self.counts.faults += 1;
            if self.counts.faults <= steps::NAMED {
                steps::tell_fault(&fault, self.context);
            }
        }
    }

    /// Says what the run came to.
    fn close(&self) -> Exit {
        let Counts { shards, listed, steps, skipped, known, passed, faults } = self.counts;
        let say = |text: String| self.context.say(text);
        say(format!(
            "{steps} steps of {shards} shards; policy {} is the newest",
            self.trainer.step()
        ));
        let waiting = self.samples.len();
        if waiting > 0 {
            say(format!("{waiting}/{} turns wait for a full batch", self.wanted()));
        }
        if known > 0 {
            say(format!("passed over: {known} turns that the ledger had, {passed} whole shards"));
        }
        for (reason, count) in self.trainer.refused() {
            say(format!("not trained: {count} turns: {}", visible(reason)));
        }
        if faults > steps::NAMED {
            say(format!("and {} more broken rows", faults - steps::NAMED));
        }
        if listed > 0 {
            say(format!("listed as failed: {listed} shards"));
        }
        let drained = *self.signal.borrow();
        if drained || listed as usize + faults + skipped == 0 { Exit::Done } else { Exit::Partial }
    }
}

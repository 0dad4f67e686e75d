//! What has become of every turn: captured = trained + refused + pending, always.
//!
//! Read off the folders themselves and the ledger of the newest policy, so that a
//! turn that a stage lost shows as lost. Shards have the same name in every folder
//! and as many rows; how far a turn is, is how far its shard is. A turn that
//! `advantage` found nothing to learn from waits for no step: the trainer can only
//! refuse it.

mod cloud;
mod shards;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::{Error, Hop, Run, published};
use crate::store::Store;
use cloud::{Cloud, Look};
use shards::{Folder, Ledger, Outcome, Shards, Turns};

/// Rates are taken over so long.
const WINDOW: Duration = Duration::from_secs(600);
/// And over so long at least: less tells nothing.
const SHORTEST: Duration = Duration::from_secs(1);

/// What has become of the turns.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Account {
    /// Rows in the spool.
    pub captured: u64,
    /// Turns that a policy has learned from.
    pub trained: u64,
    /// Turns that the trainer would not have, or will not, by reason, and those whose
    /// shard a stage has given up (`failed_in_STAGE`).
    pub refused: BTreeMap<String, u64>,
    /// Turns on their way, by the stage that they wait for.
    pub pending: BTreeMap<String, u64>,
    /// Rows that are nowhere: more than 0 is a fault of a stage.
    pub lost: i64,
    /// Shards that cannot be read.
    pub unreadable: u64,
    /// Turns that `oclaw serve` has not made rows of, if it tells.
    pub open: Option<u64>,
    /// Why it does not tell, where it was asked.
    #[serde(default)]
    pub open_unknown: Option<String>,
}

impl Account {
    /// Says it in a line.
    pub fn words(&self) -> String {
        let sum = |counts: &BTreeMap<String, u64>| counts.values().sum::<u64>();
        let list = |counts: &BTreeMap<String, u64>| {
            let parts: Vec<_> =
                counts.iter().map(|(word, count)| format!("{word} {count}")).collect();
            if parts.is_empty() { String::new() } else { format!(" ({})", parts.join(", ")) }
        };
        let Self { captured, trained, refused, pending, lost, .. } = self;
        let mut text = format!(
            "captured {captured} = trained {trained} + refused {}{} + pending {}{}",
            sum(refused),
            list(refused),
            sum(pending),
            list(pending)
        );
        if *lost != 0 {
            text.push_str(&format!(" + LOST {lost}"));
        }
        if let Some(open) = self.open {
            text.push_str(&format!("; {open} more are open"));
        }
        if let Some(why) = &self.open_unknown {
            text.push_str(&format!("; nobody knows how many more are open: {why}"));
        }
        text
    }
}

/// How a stage is getting on.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Queue {
    /// The stage.
    pub stage: String,
    /// Shards that wait for it.
    pub shards: u64,
    /// Rows in them.
    pub rows: u64,
    /// Age of the oldest of them, in seconds.
    pub oldest: Option<u64>,
    /// Rows done in a minute, over the last ten, or as long as the loop has run.
    pub rows_per_minute: f64,
    /// Shards that it has given up.
    pub failed: u64,
}

/// Looks at the folders of a run again and again; each shard is read once.
#[derive(Debug)]
pub struct Accountant {
    run: Run,
    hops: Vec<Hop>,
    store: Option<Store>,
    /// When the loop began, if it runs.
    began: Option<SystemTime>,
    known: Shared,
}

/// What is known of shards and policies. A look at a store adds to it while others count.
#[derive(Debug, Default)]
struct Known {
    shards: Shards,
    ledger: Ledger,
    cloud: Cloud,
}

type Shared = Arc<Mutex<Known>>;

/// What was noted stays true, whoever panicked meanwhile.
fn lock(known: &Mutex<Known>) -> MutexGuard<'_, Known> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Accountant {
    /// Looks at a run whose turns go this way.
    pub fn new(run: &Run, without: &[String]) -> Self {
        let hops = run.hops(without);
        Self { run: run.clone(), hops, store: None, began: None, known: Shared::default() }
    }

    /// Looks at the folder of a store by which the stages meet.
    pub fn over(self, store: Store) -> Self {
        Self { store: Some(store), ..self }
    }

    /// Takes rates since a loop began, if that is not long ago.
    pub fn since(self, began: Option<SystemTime>) -> Self {
        Self { began, ..self }
    }

    /// Returns what rates are taken over.
    fn window(&self) -> Duration {
        let ran = self.began.and_then(|began| began.elapsed().ok());
        ran.map_or(WINDOW, |ran| ran.clamp(SHORTEST, WINDOW))
    }

    /// Looks at the store, if there is one: as long as that takes, while turns are
    /// counted as it told of them last. What it told before an error, or before this was
    /// dropped, is not asked again.
    pub fn look(&self) -> impl Future<Output = Result<(), Error>> + use<> {
        let look = self.store.as_ref().map(|store| Look {
            store: store.clone(),
            hops: self.hops.clone(),
            known: self.known.clone(),
        });
        async move {
            match look {
                Some(look) => look.look().await,
                None => Ok(()),
            }
        }
    }

    /// Whether there is something to count: a store was never looked at otherwise.
    pub fn has_looked(&self) -> bool {
        self.store.is_none() || self.told_at().is_some()
    }

    /// Returns since when the store may have changed, if there is one and it has told: in
    /// seconds since 1970.
    pub fn told_at(&self) -> Option<u64> {
        let told = lock(&self.known).cloud.told_at()?;
        Some(told.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs())
    }

    /// Returns the step that the newest policy stands for.
    pub fn published(&self) -> Option<u64> {
        match &self.store {
            Some(_) => lock(&self.known).cloud.published(),
            None => published(&self.run.policy()),
        }
    }

    fn list(&self, known: &Known, folder: &Path) -> Result<Folder, Error> {
        match &self.store {
            Some(_) => Ok(known.cloud.folder(folder)),
            None => Folder::list(folder),
        }
    }

    fn steps_made(&self, known: &Known, policies: &Path) -> Vec<(u64, SystemTime)> {
        match &self.store {
            Some(_) => known.cloud.steps_made(),
            None => steps_made(policies),
        }
    }

    fn given_up(&self, known: &Known, folder: &Path) -> HashSet<OsString> {
        match &self.store {
            Some(_) => known.cloud.given_up(folder),
            None => given_up(folder),
        }
    }

    /// Counts; in a store what was there at the last look. Folders are listed before
    /// those that they flow into, so that a turn on its way is seen once.
    pub fn take(&mut self) -> Result<(Account, Vec<Queue>), Error> {
        let spool = Folder::list(&self.run.turns())?;
        let mut guard = lock(&self.known);
        let known = &mut *guard;
        let mut behind = Vec::new();
        for hop in self.hops.iter().filter(|hop| hop.stage != "train") {
            behind.push(self.list(known, &hop.into)?);
        }
        let policies =
            self.hops.iter().find(|hop| hop.stage == "train").map(|hop| hop.into.clone());
        if let Some(policies) = policies.filter(|_| self.store.is_none()) {
            known.ledger.refresh(&policies)?;
        }
        let failed: Vec<HashSet<OsString>> =
            self.hops.iter().map(|hop| self.given_up(known, &hop.into)).collect();
        let mut count = Count {
            account: Account::default(),
            queues: self.hops.iter().map(|hop| queue(hop.stage)).collect(),
            now: SystemTime::now(),
        };
        for name in spool.names() {
            let done = behind.iter().take_while(|folder| folder.has(name)).count();
            let listed = failed.get(done).is_some_and(|failed| failed.contains(name));
            self.count_shard(known, &mut count, (name, done, listed));
        }
        let window = self.window();
        for (index, hop) in self.hops.iter().enumerate() {
            // One that was done later, as by a stage that was started anew, is not given up.
            let done = |name: &OsString| behind.get(index).is_some_and(|folder| folder.has(name));
            let given_up = failed[index].iter().filter(|name| !done(name));
            count.queues[index].failed = given_up.count() as u64;
            count.queues[index].rows_per_minute = match behind.get(index) {
                Some(folder) => rate(&mut known.shards, (&hop.into, folder), window),
                None => trained_rate(&self.run, self.steps_made(known, &hop.into), window),
            };
        }
        Ok((count.account, count.queues))
    }

    /// Counts a shard that so many stages have done, and that the next one has given up if
    /// it is `listed`.
    fn count_shard(
        &self,
        known: &mut Known,
        count: &mut Count,
        (name, done, listed): (&OsStr, usize, bool),
    ) {
        let at = match done {
            0 => self.run.turns(),
            done => self.hops[done - 1].into.clone(),
        };
        let rows = known.shards.rows(&self.run.turns().join(name));
        let here = known.shards.rows(&at.join(name));
        let (Some(rows), Some(here)) = (rows, here) else {
            count.account.unreadable += 1;
            return;
        };
        count.account.captured += rows;
        count.account.lost += rows as i64 - here as i64;
        let written = known.shards.written(&at.join(name));
        match self.hops.get(done) {
            Some(hop) if listed => count.give_up(hop.stage, here),
            Some(hop) if hop.stage == "train" => match known.shards.turns(&at.join(name)) {
                Some(turns) => count.trainable((done, written), turns, &known.ledger),
                // Its turns are there; which of them were trained, nobody can say.
                None => {
                    count.account.unreadable += 1;
                    count.wait((done, hop.stage), written, here);
                }
            },
            Some(hop) => count.wait((done, hop.stage), written, here),
            None => count.account_for("nobody", here),
        }
    }
}

/// Counts the rows of shards written lately.
fn rate(shards: &mut Shards, (folder, listed): (&Path, &Folder), window: Duration) -> f64 {
    let since = SystemTime::now().checked_sub(window).unwrap_or(SystemTime::UNIX_EPOCH);
    let rows: u64 = listed.since(since).filter_map(|name| shards.rows(&folder.join(name))).sum();
    per_minute(rows, window)
}

fn per_minute(rows: u64, window: Duration) -> f64 {
    rows as f64 * 60.0 / window.as_secs_f64()
}

fn queue(stage: &str) -> Queue {
    Queue { stage: stage.to_owned(), ..Queue::default() }
}

struct Count {
    account: Account,
    queues: Vec<Queue>,
    now: SystemTime,
}

impl Count {
    fn account_for(&mut self, stage: &str, rows: u64) {
        if rows > 0 {
            *self.account.pending.entry(stage.to_owned()).or_default() += rows;
        }
    }

    fn give_up(&mut self, stage: &str, rows: u64) {
        *self.account.refused.entry(format!("failed_in_{stage}")).or_default() += rows;
    }

    fn wait(&mut self, (index, stage): (usize, &str), written: Option<SystemTime>, rows: u64) {
        self.account_for(stage, rows);
        let queue = &mut self.queues[index];
        queue.shards += 1;
        queue.rows += rows;
        let age = written.and_then(|written| self.now.duration_since(written).ok());
        queue.oldest = queue.oldest.max(age.map(|age| age.as_secs()));
    }

    fn trainable(
        &mut self,
        (index, written): (usize, Option<SystemTime>),
        turns: &Turns,
        ledger: &Ledger,
    ) {
        let mut waiting = 0;
        for (place, id) in turns.ids.iter().enumerate() {
            let silence = turns.silence(place).map(Outcome::Refused);
            match ledger.outcome(*id).or(silence) {
                Some(Outcome::Trained) => self.account.trained += 1,
                Some(Outcome::Refused(reason)) => {
                    *self.account.refused.entry(reason.to_owned()).or_default() += 1;
                }
                None => waiting += 1,
            }
        }
        if waiting > 0 {
            self.wait((index, "train"), written, waiting);
        }
    }
}

/// Reads which shards a stage has given up.
fn given_up(folder: &Path) -> HashSet<OsString> {
    let text = std::fs::read_to_string(folder.join("failed.jsonl")).unwrap_or_default();
    let lines =
        text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let names = lines.filter_map(|line| Some(OsString::from(line.get("shard")?.as_str()?)));
    names.collect()
}

/// Counts the turns of the steps made lately.
fn trained_rate(run: &Run, made: Vec<(u64, SystemTime)>, window: Duration) -> f64 {
    let steps: HashMap<u64, u64> = super::status::steps(run)
        .into_iter()
        .map(|step| (step.step, step.turns.unwrap_or_default()))
        .collect();
    let fresh = made.into_iter().filter(|(_, at)| at.elapsed().unwrap_or_default() <= window);
    per_minute(fresh.filter_map(|(step, _)| steps.get(&step)).sum(), window)
}

/// Lists the policies of a folder, with when each was made.
fn steps_made(policies: &Path) -> Vec<(u64, SystemTime)> {
    let entries = std::fs::read_dir(policies).into_iter().flatten().filter_map(Result::ok);
    let made = entries.filter_map(|entry| {
        let name = entry.file_name();
        let step = name.to_str()?.strip_prefix("step-")?.parse().ok()?;
        Some((step, entry.metadata().ok()?.modified().ok()?))
    });
    made.collect()
}

/// Returns the stages of which a run has no folder.
pub fn absent(run: &Run) -> Vec<String> {
    let hops: Vec<(String, PathBuf)> =
        run.hops(&[]).into_iter().map(|hop| (hop.stage.to_owned(), hop.into)).collect();
    hops.into_iter().filter(|(_, into)| !into.is_dir()).map(|(stage, _)| stage).collect()
}

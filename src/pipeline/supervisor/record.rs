//! What one supervisor leaves to the next, and tells of each process.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::super::watched::Watched;
use super::super::{Child, Error, Job, Launcher, Limits, Phase, Run, Tier, write_aside};
use super::Supervisor;

/// How often is looked whether somebody has ended.
const LOOK: Duration = Duration::from_millis(50);
/// The same, of a cluster.
const LEFT_LOOK: Duration = Duration::from_secs(1);

/// The processes of a loop, as they were started last.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Record {
    children: BTreeMap<String, Kept>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Kept {
    id: String,
    attempt: u64,
    restarts: u64,
    /// Whether it was ready once.
    #[serde(default)]
    ready: bool,
}

impl Record {
    /// Reads the record of a run. A broken one is as good as none.
    pub(super) fn read(run: &Run) -> Self {
        let text = std::fs::read(run.record()).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }
}

/// How a process is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChildStatus {
    /// Its name.
    pub name: String,
    /// What it is at.
    pub phase: String,
    /// Its number, if it runs on this machine.
    pub pid: Option<u32>,
    /// For how long it has been at that, in seconds.
    pub seconds: u64,
    /// How often it was started again.
    pub restarts: u64,
    /// How often it has ended in a row, with no steady time in between.
    #[serde(default)]
    pub failures: u32,
    /// How it ended the last time.
    pub last_end: Option<String>,
    /// Why nobody knows how it is, as where a scheduler does not answer.
    #[serde(default)]
    pub trouble: Option<String>,
}

impl ChildStatus {
    pub(super) fn of(watched: &Watched, limits: &Limits, pid: Option<u32>) -> Self {
        let now = Instant::now();
        let failing = watched.is_failing(limits, now);
        Self {
            name: watched.child.name.clone(),
            phase: if failing { "failing" } else { watched.phase.as_str() }.to_owned(),
            pid,
            seconds: watched.since.elapsed().as_secs(),
            restarts: watched.restarts,
            failures: watched.failures(limits, now),
            last_end: watched.last_end.clone(),
            trouble: watched.trouble.clone(),
        }
    }
}

/// Returns the id of a start.
pub(super) fn id(child: &Child, attempt: u64) -> String {
    format!("{}-{}-{attempt}", child.name, child.digest)
}

impl Supervisor {
    /// Writes down what was started. A full disk takes no record: what outlives us
    /// is then found by its mark.
    pub(super) fn keep_record(&mut self) {
        let kept = self.watched.iter().map(|it| {
            let (id, attempt, restarts) = (it.job.id.clone(), it.attempt, it.restarts);
            (it.child.name.clone(), Kept { id, attempt, restarts, ready: it.was_ready })
        });
        let record = Record { children: kept.collect() };
        let text = serde_json::to_vec_pretty(&record).unwrap_or_default();
        if let Err(error) = write_aside(&self.run.record(), &text) {
            self.told.push(super::chain(&error));
        }
    }

    /// Takes up what the last supervisor has left, and ends the rest of it.
    pub(super) async fn take_up(&mut self, record: &Record) -> Result<(), Error> {
        for watched in &mut self.watched {
            let Some(kept) = record.children.get(&watched.child.name) else { continue };
            (watched.attempt, watched.restarts) = (kept.attempt, kept.restarts);
            watched.job.id = id(&watched.child, kept.attempt);
            if kept.id != watched.job.id || watched.child.argv.is_empty() {
                continue;
            }
            let keeps = self.launcher.keeps(&watched.job);
            if keeps && self.launcher.poll(&watched.job).await?.is_alive() {
                watched.enter(Phase::Starting, Instant::now());
                // It may not be now: the stage that would let its engine go on after an
                // update was killed, and must not wait for it.
                watched.was_ready = kept.ready;
                let told = match self.launcher.pid(&watched.job) {
                    Some(pid) => format!("{}: taken up (process {pid})", watched.child.name),
                    None => format!("{}: taken up", watched.child.name),
                };
                self.told.push(told);
            }
        }
        self.end_left(record).await?;
        self.end_others().await
    }

    /// Ends what was left on a cluster and is not wanted any more: there shall not be
    /// two of a stage.
    async fn end_left(&mut self, record: &Record) -> Result<(), Error> {
        if matches!(self.launcher, Launcher::Local(_)) {
            return Ok(());
        }
        let taken = self.watched.iter().filter(|it| it.phase == Phase::Starting);
        let keep: Vec<String> = taken.map(|it| it.job.id.clone()).collect();
        for (name, kept) in record.children.iter().filter(|(_, kept)| !keep.contains(&kept.id)) {
            let job = Job::named(&kept.id, name, &self.run.logs());
            let asked = Instant::now();
            let mut told = false;
            while self.launcher.poll(&job).await?.is_alive() {
                self.launcher.stop(&job, asked.elapsed() >= self.limits.grace).await?;
                if !told {
                    self.told.push(format!("left by another supervisor, ended: {name}"));
                }
                told = true;
                tokio::time::sleep(LEFT_LOOK).await;
            }
        }
        Ok(())
    }

    /// Ends what runs of this loop and is not taken up.
    async fn end_others(&mut self) -> Result<(), Error> {
        let taken = self.watched.iter().filter(|it| it.phase == Phase::Starting);
        let keep: Vec<String> = taken.map(|it| it.job.id.clone()).collect();
        let others = self.launcher.others(&keep)?;
        if others.is_empty() {
            return Ok(());
        }
        self.told.push(format!("left by another supervisor, ended: {}", others.join(", ")));
        self.launcher.end_others(&keep, false)?;
        let asked = Instant::now();
        let mut forced = false;
        while !self.launcher.others(&keep)?.is_empty() {
            if !forced && asked.elapsed() >= self.limits.grace {
                forced = true;
                self.launcher.end_others(&keep, true)?;
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    }
}

/// The order in which a loop ends: nobody is served any more, what is at hand is
/// done, and then nobody needs the engines.
pub(super) const ENDING: [Tier; 3] = [Tier::Serve, Tier::Stage, Tier::Engine];

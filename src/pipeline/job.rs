//! A process that somebody runs for us, and whom we can ask to.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::{Error, Local, Ray, Slurm};

/// A process to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// Tells it from every other start, and is the same when the same start is
    /// asked for again: letters, digits, `-`, `_`.
    pub id: String,
    /// What people call it, and its log.
    pub name: String,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Variables beside those of the supervisor.
    pub env: BTreeMap<String, String>,
    /// Devices that it may use, by number here, by count on a cluster. None: it was
    /// given none.
    pub gpus: Vec<u32>,
    /// The file that takes what it says. Always appended to: it may be cut meanwhile.
    pub log: PathBuf,
    /// Where it runs.
    pub folder: PathBuf,
    /// Whether it outlives the supervisor, to be taken up by the next one.
    pub outlives: bool,
}

impl Job {
    /// Returns as much of a job as it takes to ask about it.
    pub(super) fn named(id: &str, name: &str, logs: &Path) -> Self {
        Self {
            id: id.to_owned(),
            name: name.to_owned(),
            argv: Vec::new(),
            env: BTreeMap::new(),
            gpus: Vec::new(),
            log: logs.join(format!("{name}.log")),
            folder: PathBuf::new(),
            outlives: false,
        }
    }
}

/// How a job is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// It waits for its turn.
    Pending,
    /// It runs.
    Running,
    /// It has ended.
    Ended {
        /// Its exit code; `None` if a signal ended it.
        code: Option<i32>,
    },
    /// It has ended otherwise, or nobody can say how.
    Over {
        /// What is to be told of it, as in `was preempted`.
        told: &'static str,
    },
    /// Nobody knows a job of that id.
    Lost,
}

impl State {
    /// Whether it has not ended.
    pub fn is_alive(self) -> bool {
        matches!(self, Self::Pending | Self::Running)
    }
}

/// Where jobs run.
#[derive(Debug)]
pub enum Launcher {
    /// On this machine.
    Local(Local),
    /// On a Ray cluster.
    Ray(Ray),
    /// On a Slurm cluster.
    Slurm(Slurm),
}

impl Launcher {
    /// Looks at all jobs at once, where that is cheaper than to ask about each of
    /// them: [`Launcher::poll`] tells what was seen.
    pub async fn look(&mut self) -> Result<(), Error> {
        match self {
            Self::Local(_) | Self::Ray(_) => Ok(()),
            Self::Slurm(slurm) => slurm.look().await,
        }
    }

    /// Asks whether all is here that it takes to run jobs, and looks at them once.
    pub async fn check(&mut self) -> Result<(), Error> {
        match self {
            Self::Local(_) | Self::Ray(_) => Ok(()),
            Self::Slurm(slurm) => slurm.version().await.map(drop),
        }
    }

    /// Starts a job. One of the same id that runs already is taken up.
    pub async fn start(&mut self, job: &Job) -> Result<(), Error> {
        match self {
            Self::Local(local) => local.start(job),
            Self::Ray(ray) => ray.start(job).await,
            Self::Slurm(slurm) => slurm.start(job).await,
        }
    }

    /// Says how a job is.
    pub async fn poll(&mut self, job: &Job) -> Result<State, Error> {
        match self {
            Self::Local(local) => Ok(local.poll(job)),
            Self::Ray(ray) => ray.poll(job).await,
            Self::Slurm(slurm) => slurm.poll(job).await,
        }
    }

    /// Brings a job's log up to date.
    pub async fn logs(&mut self, job: &Job) -> Result<(), Error> {
        match self {
            // It writes there itself.
            Self::Local(_) => Ok(()),
            Self::Ray(ray) => ray.logs(job).await,
            Self::Slurm(slurm) => slurm.logs(job).await,
        }
    }

    /// Asks a job to end, or ends it at once. One that has ended is left alone.
    pub async fn stop(&mut self, job: &Job, at_once: bool) -> Result<(), Error> {
        match self {
            Self::Local(local) => {
                local.stop(job, at_once);
                Ok(())
            }
            Self::Ray(ray) => ray.stop(job, at_once).await,
            Self::Slurm(slurm) => slurm.stop(job, at_once).await,
        }
    }

    /// Whether a job that another supervisor has left is taken up. What dies with
    /// the supervisor and is still there is not: it is ended. On a cluster nothing
    /// does.
    pub fn keeps(&self, job: &Job) -> bool {
        match self {
            Self::Local(_) => job.outlives,
            Self::Ray(_) | Self::Slurm(_) => true,
        }
    }

    /// Returns the number of the process of a job, if it is one of this machine.
    pub fn pid(&self, job: &Job) -> Option<u32> {
        match self {
            Self::Local(local) => local.pid(job),
            Self::Ray(_) | Self::Slurm(_) => None,
        }
    }

    /// Names what another supervisor has left running on this machine, but for the
    /// ids to keep.
    pub fn others(&self, keep: &[String]) -> Result<Vec<String>, Error> {
        match self {
            Self::Local(local) => local.others(keep),
            Self::Ray(_) | Self::Slurm(_) => Ok(Vec::new()),
        }
    }

    /// Asks these to end, or ends them at once.
    pub fn end_others(&self, keep: &[String], at_once: bool) -> Result<(), Error> {
        match self {
            Self::Local(local) => local.end_others(keep, at_once),
            Self::Ray(_) | Self::Slurm(_) => Ok(()),
        }
    }
}

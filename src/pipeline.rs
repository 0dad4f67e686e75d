//! The supervised loop: which processes a configuration file asks for, how they
//! are started, watched and started again, and what has become of every turn.
//!
//! It knows stages as commands with folders before and behind them, and imports
//! none. Absent on purpose: anything that a stage does.

mod account;
mod children;
mod job;
mod local;
mod logs;
mod plan;
mod probe;
mod process;
mod quoting;
mod ray;
mod run;
mod slurm;
mod status;
mod supervisor;
mod taken;
mod watched;

pub use account::{Account, Accountant, Queue, absent};
pub use children::{Child, Given, Tier, Wishes, children, front, policy_engines};
pub use job::{Job, Launcher, State};
pub use local::Local;
pub use logs::append_line;
pub use plan::{EnginePlan, Kind, Origin, Plan, Process, ReadTime, STAGES, Scheduler, Serves};
pub use process::{Identity, signal};
pub use ray::Ray;
pub use run::{Hop, Run, published};
pub use slurm::Slurm;
pub use status::{PolicyStatus, Status};
pub use supervisor::{ChildStatus, Supervisor};
pub use watched::{Limits, Phase};

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::store;

/// What can go wrong around a loop.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration is no TOML.
    #[error("{problem}")]
    Syntax {
        /// What the parser says, with the place.
        problem: String,
    },
    /// The configuration asks for something that is not possible.
    #[error("line {line}: {problem}")]
    Plan {
        /// The line of it.
        line: usize,
        /// What is wrong there.
        problem: String,
    },
    /// The configuration leaves out what a loop needs.
    #[error("{problem}")]
    Wanting {
        /// What is missing.
        problem: String,
    },
    /// A process cannot be started.
    #[error("cannot start `{name}` (`{program}`)")]
    Start {
        /// The name of the job.
        name: String,
        /// The program.
        program: String,
        /// The operating system's reason.
        source: io::Error,
    },
    /// A scheduler does not answer, or refuses.
    #[error("`{whom}`: {problem}")]
    Scheduler {
        /// Its address, or its command.
        whom: String,
        /// What is wrong.
        problem: String,
    },
    /// A command of a scheduler is not on this machine.
    #[error("cannot run `{program}`, a command of the scheduler")]
    Command {
        /// The command.
        program: String,
        /// The operating system's reason.
        source: io::Error,
    },
    /// The object store of the loop cannot be looked at.
    #[error(transparent)]
    Store(#[from] store::Error),
    /// A file of the loop itself cannot be read or written.
    #[error("cannot read or write `{path}`")]
    File {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
}

impl Error {
    /// Whether another start meets the same: there is no such program, or it may not
    /// be run.
    fn is_lasting(&self) -> bool {
        let lasting = [io::ErrorKind::NotFound, io::ErrorKind::PermissionDenied];
        match self {
            Self::Start { source, .. } | Self::Command { source, .. } => {
                lasting.contains(&source.kind())
            }
            _ => false,
        }
    }

    fn file(path: impl Into<PathBuf>, source: io::Error) -> Self {
        Self::File { path: path.into(), source }
    }
}

/// Replaces a file in one step.
fn write_aside(path: &Path, text: &[u8]) -> Result<(), Error> {
    let mut aside = path.as_os_str().to_owned();
    aside.push(".new");
    let failed = |source| Error::file(path, source);
    fs::write(&aside, text).and_then(|()| fs::rename(&aside, path)).map_err(failed)
}

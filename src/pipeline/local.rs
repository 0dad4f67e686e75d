//! Jobs as processes of this machine.
//!
//! What outlives the supervisor gets a session of its own, so that no terminal
//! takes it along, and a record by which the next supervisor knows it. The others
//! die with the supervisor, whatever ends that.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde::{Deserialize, Serialize};

use super::process::{self, Identity, MARK};
use super::{Error, Job, State};

/// A process tells how it ended to whoever started it alone.
const OF_ANOTHER: &str = "ended, nobody knows how: another supervisor had started it";

/// Processes of this machine.
#[derive(Debug)]
pub struct Local {
    /// The folder of the records.
    records: PathBuf,
    /// Sets the jobs of one loop apart from those of another.
    scope: String,
    /// By the id of the job.
    known: HashMap<String, Known>,
}

#[derive(Debug)]
enum Known {
    Child(Child),
    /// Started by another supervisor.
    Adopted(Identity),
}

/// What is kept of a process.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    id: String,
    #[serde(flatten)]
    identity: Identity,
}

impl Local {
    /// Keeps records in a folder, which must be there.
    pub fn new(records: &Path) -> Self {
        let scope = records.canonicalize().unwrap_or_else(|_| records.to_owned());
        Self {
            records: records.to_owned(),
            scope: scope.display().to_string(),
            known: HashMap::new(),
        }
    }

    /// Starts a job, or takes up the process that another supervisor started for it.
    pub fn start(&mut self, job: &Job) -> Result<(), Error> {
        if self.poll(job) == State::Running {
            return Ok(());
        }
        let child = self.spawn(job)?;
        if let Some(identity) = Identity::of(child.id()) {
            // On a full disk there is none, and the process is found by its mark.
            let _ = self.record(&job.name, &Record { id: job.id.clone(), identity });
        }
        self.known.insert(job.id.clone(), Known::Child(child));
        Ok(())
    }

    /// Says how a job is.
    pub fn poll(&mut self, job: &Job) -> State {
        if !self.known.contains_key(&job.id) {
            match self.left(job) {
                Some(identity) => self.known.insert(job.id.clone(), Known::Adopted(identity)),
                None => return State::Lost,
            };
        }
        match self.known.get_mut(&job.id) {
            Some(Known::Child(child)) => {
                if process::is_over(child.id()) {
                    // What it started itself goes too, while its number still is its own.
                    process::signal(child.id(), true);
                }
                match child.try_wait() {
                    Ok(None) => State::Running,
                    Ok(Some(status)) => State::Ended { code: status.code() },
                    Err(_) => State::Ended { code: None },
                }
            }
            Some(Known::Adopted(identity)) if identity.lives() => State::Running,
            Some(Known::Adopted(_)) => State::Over { told: OF_ANOTHER },
            None => State::Lost,
        }
    }

    /// Asks a job to end, or ends it at once.
    pub fn stop(&mut self, job: &Job, at_once: bool) {
        if self.poll(job) != State::Running {
            return;
        }
        match self.known.get(&job.id) {
            Some(Known::Child(child)) => process::signal(child.id(), at_once),
            Some(Known::Adopted(identity)) => process::signal(identity.pid, at_once),
            None => {}
        }
    }

    /// Returns the number of the process of a job that runs.
    pub fn pid(&self, job: &Job) -> Option<u32> {
        match self.known.get(&job.id)? {
            Known::Child(child) => Some(child.id()),
            Known::Adopted(identity) => Some(identity.pid),
        }
    }

    /// Whether the process of a job was started by another supervisor.
    pub fn is_adopted(&self, job: &Job) -> bool {
        matches!(self.known.get(&job.id), Some(Known::Adopted(_)))
    }

    /// Names what another supervisor has left running, but for the ids to keep.
    pub fn others(&self, keep: &[String]) -> Result<Vec<String>, Error> {
        let mut names: Vec<String> =
            self.left_over(keep)?.into_iter().map(|(name, _)| name).collect();
        names.sort();
        Ok(names)
    }

    /// Asks these to end, or ends them at once.
    pub fn end_others(&self, keep: &[String], at_once: bool) -> Result<(), Error> {
        for (_, identity) in self.left_over(keep)? {
            process::signal(identity.pid, at_once);
        }
        Ok(())
    }

    fn left_over(&self, keep: &[String]) -> Result<Vec<(String, Identity)>, Error> {
        let failed = |source| Error::file(&self.records, source);
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.records).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let Some(name) = name.strip_suffix(".process.json") else { continue };
            let record = self.read(name).filter(|record| !keep.contains(&record.id));
            if let Some(record) = record.filter(|record| record.identity.lives()) {
                found.push((name.to_owned(), record.identity));
            }
        }
        Ok(found)
    }

    /// Finds the process that another supervisor has left for a job.
    fn left(&self, job: &Job) -> Option<Identity> {
        let record = self.read(&job.name).filter(|record| record.id == job.id);
        match record.filter(|record| record.identity.lives()) {
            Some(record) => Some(record.identity),
            // It was killed between the start and the record.
            None if job.outlives => process::find(&self.mark(job)),
            None => None,
        }
    }

    fn mark(&self, job: &Job) -> String {
        format!("{}/{}", self.scope, job.id)
    }

    fn spawn(&self, job: &Job) -> Result<Child, Error> {
        let log = File::options().create(true).append(true).open(&job.log);
        let log = log.map_err(|source| Error::file(&job.log, source))?;
        let errors = log.try_clone().map_err(|source| Error::file(&job.log, source))?;
        let (program, arguments) = job
            .argv
            .split_first()
            .map_or(("", &[][..]), |(program, rest)| (program.as_str(), rest));
        let mut command = Command::new(program);
        command.args(arguments).current_dir(&job.folder).envs(&job.env);
        command.env(MARK, self.mark(job));
        command.stdin(Stdio::null()).stdout(log).stderr(errors);
        if !job.gpus.is_empty() {
            let devices: Vec<String> = job.gpus.iter().map(u32::to_string).collect();
            command.env("CUDA_VISIBLE_DEVICES", devices.join(","));
        }
        bind(&mut command, job.outlives);
        let failed =
            |source| Error::Start { name: job.name.clone(), program: program.to_owned(), source };
        command.spawn().map_err(failed)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.records.join(format!("{name}.process.json"))
    }

    fn record(&self, name: &str, record: &Record) -> Result<(), Error> {
        let path = self.path(name);
        let text = serde_json::to_vec(record).unwrap_or_default();
        super::write_aside(&path, &text)
    }

    /// Reads a record. One that is broken is as good as none.
    fn read(&self, name: &str) -> Option<Record> {
        serde_json::from_slice(&fs::read(self.path(name)).ok()?).ok()
    }
}

/// Gives a child a group of its own, so that a signal to the terminal's is not its
/// own; and ties it to the life of this process, unless it is to outlive that. The
/// child must be started by a thread that lives as long as the process.
fn bind(command: &mut Command, outlives: bool) {
    let parent = std::process::id();
    let tie = move || {
        #[expect(unsafe_code, reason = "std knows neither sessions nor the death of a parent")]
        // SAFETY: system calls that may be made between fork and exec.
        unsafe {
            if libc::setsid() < 0 {
                return Err(io::Error::last_os_error());
            }
            #[cfg(target_os = "linux")]
            if !outlives {
                if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) < 0 {
                    return Err(io::Error::last_os_error());
                }
                // The parent may have died before it was asked for.
                if u32::try_from(libc::getppid()) != Ok(parent) {
                    return Err(io::Error::from_raw_os_error(libc::ESRCH));
                }
            }
        }
        Ok(())
    };
    #[expect(unsafe_code, reason = "std has no other way to act between fork and exec")]
    // SAFETY: the closure allocates nothing, but for an error that ends the child.
    unsafe {
        command.pre_exec(tie);
    }
}

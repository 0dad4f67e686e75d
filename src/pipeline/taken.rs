//! Logs that somebody else keeps: what of them is in the job's own file already.

use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{Error, Job, write_aside};

/// How far a log was taken. Kept in a file, for the next supervisor.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Taken {
    id: String,
    bytes: u64,
}

/// A log as it comes, from its beginning. What goes beyond what was taken of it
/// before is appended to the job's file.
#[derive(Debug)]
pub(super) struct Taking<'a> {
    job: &'a Job,
    before: u64,
    come: u64,
    file: Option<File>,
}

impl<'a> Taking<'a> {
    pub(super) fn new(job: &'a Job) -> Self {
        let taken: Taken = fs::read(record(job))
            .ok()
            .and_then(|text| serde_json::from_slice(&text).ok())
            .filter(|taken: &Taken| taken.id == job.id)
            .unwrap_or_default();
        Self { job, before: taken.bytes, come: 0, file: None }
    }

    /// Takes what has come next.
    pub(super) fn take(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let known = usize::try_from(self.before.saturating_sub(self.come)).unwrap_or(usize::MAX);
        let fresh = bytes.get(known..).unwrap_or_default();
        if !fresh.is_empty() {
            let failed = |source| Error::file(&self.job.log, source);
            let file = match &mut self.file {
                Some(file) => file,
                none => {
                    let opened = File::options().create(true).append(true).open(&self.job.log);
                    none.insert(opened.map_err(failed)?)
                }
            };
            file.write_all(fresh).map_err(failed)?;
        }
        self.come += bytes.len() as u64;
        Ok(())
    }

    /// Notes how far it was taken. Returns the length of a log that has come to its
    /// end; nothing for one that is shorter than it was, which is another one and has
    /// to come once more, from its beginning.
    pub(super) fn end(self, whole: bool) -> Result<Option<u64>, Error> {
        let other = whole && self.come < self.before;
        let bytes = if other { 0 } else { self.come.max(self.before) };
        if bytes != self.before {
            let taken = Taken { id: self.job.id.clone(), bytes };
            write_aside(&record(self.job), &serde_json::to_vec(&taken).unwrap_or_default())?;
        }
        Ok((!other).then_some(bytes))
    }
}

fn record(job: &Job) -> PathBuf {
    let mut name = job.log.as_os_str().to_owned();
    name.push(".taken.json");
    PathBuf::from(name)
}

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
    bytes: usize,
}

/// Appends to a job's file what a log has beyond what was taken of it.
pub(super) fn append(job: &Job, log: &[u8]) -> Result<(), Error> {
    let record = record(job);
    let taken: Taken = fs::read(&record)
        .ok()
        .and_then(|text| serde_json::from_slice(&text).ok())
        .filter(|taken: &Taken| taken.id == job.id)
        .unwrap_or_default();
    // A log that is shorter than it was is another one.
    let from = if taken.bytes <= log.len() { taken.bytes } else { 0 };
    if from == log.len() {
        return Ok(());
    }
    let failed = |source| Error::file(&job.log, source);
    let mut file = File::options().create(true).append(true).open(&job.log).map_err(failed)?;
    file.write_all(&log[from..]).map_err(failed)?;
    let taken = Taken { id: job.id.clone(), bytes: log.len() };
    write_aside(&record, &serde_json::to_vec(&taken).unwrap_or_default())
}

fn record(job: &Job) -> PathBuf {
    let mut name = job.log.as_os_str().to_owned();
    name.push(".taken.json");
    PathBuf::from(name)
}

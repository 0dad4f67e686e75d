//! Feedback for turns whose row is written already.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use uuid::Uuid;

/// What somebody said about a turn.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Feedback {
    /// The turn, if it is known.
    pub turn_id: Option<String>,
    /// Its session, if that was named.
    pub session_id: Option<String>,
    /// Its number in the session, if that was named.
    pub turn: Option<u32>,
    /// -1 to 1.
    pub reward: Option<f32>,
    /// Words.
    pub text: Option<String>,
    /// Microseconds since 1970.
    pub at: i64,
}

/// The file that takes late feedback: one JSON line each, a new file per run.
#[derive(Debug)]
pub(super) struct FeedbackFile {
    folder: PathBuf,
    /// The file and its length, once there is one.
    file: Option<(File, u64)>,
}

impl FeedbackFile {
    pub(super) fn new(spool: &Path) -> Self {
        Self { folder: spool.join("feedback"), file: None }
    }

    /// Appends a whole line. On failure the file is as before.
    pub(super) fn append(&mut self, feedback: &Feedback) -> io::Result<()> {
        let mut line = serde_json::to_vec(feedback)?;
        line.push(b'\n');
        let (file, length) = match &mut self.file {
            Some(file) => file,
            None => {
                std::fs::create_dir_all(&self.folder)?;
                let path = self.folder.join(format!("{}.jsonl", Uuid::now_v7()));
                let file = OpenOptions::new().append(true).create_new(true).open(path)?;
                self.file.insert((file, 0))
            }
        };
        if let Err(error) = file.write_all(&line) {
            // A part of it may be there; the next line must not follow it.
            file.set_len(*length)?;
            return Err(error);
        }
        *length += line.len() as u64;
        file.sync_data()
    }
}

//! Feedback for turns whose row is written already.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// What somebody said about a turn.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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

/// Reads the feedback that came after its rows, earliest first: of a file, or of all
/// files of a feedback folder. The end of a line that a killed process left is none.
pub fn late_feedback(path: &Path) -> io::Result<Vec<Feedback>> {
    let mut files = vec![path.to_owned()];
    if path.is_dir() {
        let entries: io::Result<Vec<_>> = fs::read_dir(path)?.collect();
        files = entries?.into_iter().map(|entry| entry.path()).collect();
        files.retain(|path| path.extension().is_some_and(|ending| ending == "jsonl"));
        files.sort();
    }
    let mut found = Vec::new();
    for path in files {
        let bytes = fs::read(&path)?;
        for (number, line) in bytes.split_inclusive(|byte| *byte == b'\n').enumerate() {
            match serde_json::from_slice::<Feedback>(line) {
                Ok(feedback) => found.push(feedback),
                Err(_) if !line.ends_with(b"\n") || line.trim_ascii().is_empty() => {}
                Err(error) => {
                    let place = format!("`{}`, line {}", path.display(), number + 1);
                    return Err(io::Error::new(
                        io::ErrorKind::InvalidData,
                        format!("{place}: {error}"),
                    ));
                }
            }
        }
    }
    found.sort_by_key(|feedback| feedback.at);
    Ok(found)
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

//! The file that takes the metrics: opened before the first step, so that one
//! which cannot be written ends the run at once.

use std::fs::{self, File, Metadata};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use oclaw::train::Metrics;

use super::Args;
use super::board::Board;

/// Where the numbers of a run's steps are put down.
pub(super) struct Records {
    file: Option<MetricsFile>,
    board: Option<Board>,
}

impl Records {
    pub(super) fn open(args: &Args) -> anyhow::Result<Self> {
        Ok(Self {
            board: args.tensorboard.as_deref().map(Board::open).transpose()?,
            file: args.metrics.as_deref().map(MetricsFile::open).transpose()?,
        })
    }

    /// Appends a step.
    pub(super) fn write(&mut self, metrics: &Metrics) -> anyhow::Result<()> {
        self.file.iter_mut().try_for_each(|file| file.write(metrics))?;
        self.board.iter_mut().try_for_each(|board| board.write(metrics))
    }
}

/// A file of metrics. If this run made it and nobody wrote to it, it goes again.
struct MetricsFile {
    path: PathBuf,
    file: File,
    in_vain: bool,
}

impl MetricsFile {
    fn open(path: &Path) -> anyhow::Result<Self> {
        let in_vain = !path.exists();
        let opening = || format!("cannot write `{}`", path.display());
        let file = File::options().create(true).append(true).open(path).with_context(opening)?;
        Ok(Self { path: path.to_owned(), file, in_vain })
    }

    /// Appends the line of a step.
    fn write(&mut self, metrics: &Metrics) -> anyhow::Result<()> {
        let mut line = serde_json::to_vec(metrics)?;
        line.push(b'\n');
        let writing = || format!("cannot write the metrics to `{}`", self.path.display());
        self.file.write_all(&line).with_context(writing)?;
        self.in_vain = false;
        Ok(())
    }
}

impl Drop for MetricsFile {
    fn drop(&mut self) {
        // Another run may write to it by now, or another file may have its name.
        let same = |there: &Metadata, own: &Metadata| {
            (there.dev(), there.ino(), there.len()) == (own.dev(), own.ino(), 0)
        };
        if self.in_vain
            && let (Ok(there), Ok(own)) = (fs::metadata(&self.path), self.file.metadata())
            && same(&there, &own)
        {
            // An empty file is in nobody's way.
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_file_that_nobody_wrote_to_goes_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        drop(MetricsFile::open(&path).unwrap());
        assert!(!path.exists());
        let first = MetricsFile::open(&path).unwrap();
        fs::write(&path, "of another run\n").unwrap();
        drop(first);
        assert!(path.exists());
        fs::remove_file(&path).unwrap();
        let first = MetricsFile::open(&path).unwrap();
        fs::rename(&path, folder.path().join("moved.jsonl")).unwrap();
        fs::write(&path, "").unwrap();
        drop(first);
        assert!(path.exists());
        // One that was there before stays as well.
        drop(MetricsFile::open(&path).unwrap());
        assert!(path.exists());
    }
}

//! The file that takes the metrics: opened before the first step, so that one
//! which cannot be written ends the run at once.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use oclaw::train::Metrics;

/// A file of metrics. If this run made it and wrote nothing, it goes again.
pub(super) struct MetricsFile {
    path: PathBuf,
    file: File,
    in_vain: bool,
}

impl MetricsFile {
    pub(super) fn open(path: &Path) -> anyhow::Result<Self> {
        let in_vain = !path.exists();
        let opening = || format!("cannot write `{}`", path.display());
        let file = File::options().create(true).append(true).open(path).with_context(opening)?;
        Ok(Self { path: path.to_owned(), file, in_vain })
    }

    /// Appends the line of a step.
    pub(super) fn write(&mut self, metrics: &Metrics) -> anyhow::Result<()> {
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
        if self.in_vain {
            // An empty file is in nobody's way.
            let _ = fs::remove_file(&self.path);
        }
    }
}

//! The folder of a run, and the way of a turn through it.

use std::path::{Path, PathBuf};

/// The folder of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// The folder itself.
    pub folder: PathBuf,
    /// The folder of an object store by which the stages meet instead.
    pub store: Option<String>,
}

/// A stage with the folders before and behind it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hop {
    /// The stage.
    pub stage: &'static str,
    /// Where its shards come from.
    pub from: PathBuf,
    /// Where they go; for `train`, the folder of the policies.
    pub into: PathBuf,
}

/// What `oclaw serve` does besides where the stages meet in an object store.
pub(super) const SHIP: &str = "ship";

/// The stages that turn shards into shards, with what they make.
const SHARDS: [(&str, &str); 4] =
    [("judge", "judged"), ("hint", "hinted"), ("teacher-lp", "taught"), ("advantage", "ready")];

impl Run {
    /// Names a folder.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), store: None }
    }

    /// Names the folder of an object store for shards and policies. The spool, logs
    /// and what the loop itself keeps stay in the folder.
    pub fn with_store(self, store: Option<String>) -> Self {
        let store = store.map(|url| url.trim_end_matches('/').to_owned());
        Self { store, ..self }
    }

    /// Returns where stages find a folder.
    fn place(&self, name: &str) -> PathBuf {
        match &self.store {
            Some(url) => Path::new(url).join(name),
            None => self.folder.join(name),
        }
    }

    /// Returns the folder of what was copied from the store.
    pub fn copies(&self) -> PathBuf {
        self.folder.join("objects")
    }

    /// Returns the spool.
    pub fn turns(&self) -> PathBuf {
        self.folder.join("turns")
    }

    /// Returns the folder of the policies.
    pub fn policy(&self) -> PathBuf {
        self.place("policy")
    }

    /// Returns the file of the training metrics.
    pub fn metrics(&self) -> PathBuf {
        self.folder.join("metrics.jsonl")
    }

    /// Returns the folder of what the processes say.
    pub fn logs(&self) -> PathBuf {
        self.folder.join("logs")
    }

    /// Returns the folder of what the loop itself keeps.
    pub fn state(&self) -> PathBuf {
        self.folder.join("state")
    }

    /// Returns the file of the loop's own record.
    pub fn record(&self) -> PathBuf {
        self.state().join("loop.json")
    }

    /// Returns the way of a turn through the stages that run.
    pub fn hops(&self, without: &[String]) -> Vec<Hop> {
        let runs = |stage: &str| !without.iter().any(|left_out| left_out == stage);
        let mut from = self.turns();
        let mut hops = Vec::new();
        if self.store.is_some() {
            let into = self.place("turns");
            hops.push(Hop { stage: SHIP, from, into: into.clone() });
            from = into;
        }
        for (stage, into) in SHARDS.into_iter().filter(|(stage, _)| runs(stage)) {
            let into = self.place(into);
            hops.push(Hop { stage, from: from.clone(), into: into.clone() });
            from = into;
        }
        if runs("train") {
            hops.push(Hop { stage: "train", from, into: self.policy() });
        }
        hops
    }
}

/// Returns the step that the newest policy of a folder stands for.
pub fn published(policies: &Path) -> Option<u64> {
    let latest = policies.join("latest");
    let name = match std::fs::read_link(&latest) {
        Ok(target) => target.file_name()?.to_str()?.to_owned(),
        Err(_) => std::fs::read_to_string(&latest).ok()?,
    };
    name.trim().strip_prefix("step-")?.parse().ok()
}

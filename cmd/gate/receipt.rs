//! What remains of a gate: a file that `sync-weights --require-gate` reads.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use oclaw::replay::Scores;
use oclaw::replay::gate::{CONFIDENCE, Figures, Rule, Verdict};
use oclaw::sync::RECEIPT;
use serde_json::{Value, json};

use crate::files::write_whole;
use crate::report::Failure;

use super::policy::Contender;

/// Everything that a receipt tells.
pub(super) struct Receipt<'a> {
    pub(super) suite: (&'a Path, String),
    pub(super) candidate: &'a Contender,
    pub(super) current: &'a Contender,
    pub(super) measure: &'a str,
    pub(super) temperature: f64,
    pub(super) scores: (&'a Scores, &'a Scores),
    pub(super) rule: &'a Rule,
    pub(super) figures: Option<&'a Figures>,
}

/// Returns where the receipt goes.
pub(super) fn place(given: Option<&Path>, candidate: &Contender) -> anyhow::Result<PathBuf> {
    match (given, candidate) {
        (Some(given), _) => Ok(given.to_owned()),
        (None, Contender::Folder { folder, .. }) => Ok(folder.join(RECEIPT)),
        (None, Contender::Server { .. }) => {
            Err(Failure::usage("the candidate is a server: it has no place for the receipt")
                .hint("name a file by `--receipt FILE`")
                .into())
        }
    }
}

impl Receipt<'_> {
    /// Writes the receipt, whole or not at all.
    pub(super) fn write(&self, path: &Path) -> anyhow::Result<()> {
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder)
                .with_context(|| format!("cannot make `{}`", folder.display()))?;
        }
        let text = format!("{:#}\n", self.json());
        write_whole(path, text.as_bytes()).context("no receipt")
    }

    fn json(&self) -> Value {
        let Rule { margin, least_items, resamples, seed } = self.rule;
        let verdict = self.figures.map_or(Verdict::Undecided, |figures| figures.verdict);
        let (new, old) = self.scores;
        json!({
            "oclaw": env!("CARGO_PKG_VERSION"),
            "verdict": verdict.as_str(),
            "suite": {"file": self.suite.0.display().to_string(), "sha256": self.suite.1},
            "candidate": policy(self.candidate),
            "current": policy(self.current),
            "by": self.measure,
            "temperature": self.temperature,
            "figures": self.figures.map(|figures| json!({
                "items": figures.items,
                "sessions": figures.sessions,
                "candidate": figures.candidate,
                "current": figures.current,
                "difference": figures.difference,
                "interval": [figures.interval.0, figures.interval.1],
            })),
            "rule": {
                "margin": margin,
                "min_items": least_items,
                "confidence": CONFIDENCE,
                "resamples": resamples,
                "seed": seed,
            },
            "left_out": new.left_out,
            "failed": {"candidate": new.failed, "current": old.failed},
        })
    }
}

fn policy(contender: &Contender) -> Value {
    match contender {
        Contender::Server { url } => {
            json!({"url": crate::files::told(url), "weights_sha256": null})
        }
        Contender::Folder { folder, weights } => {
            json!({"folder": folder.display().to_string(), "weights_sha256": weights})
        }
    }
}

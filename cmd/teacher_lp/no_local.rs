//! What stands in for the models in a build that has none.

use std::convert::Infallible;
use std::path::{Path, PathBuf};

use oclaw::teacher_lp::{ScoreRequest, Scores};

use super::DtypeName;

pub(super) struct Local {
    never: Infallible,
}

impl Local {
    /// Says what this build lacks.
    pub(super) fn start(_: DtypeName) -> anyhow::Result<Self> {
        Err(crate::common::needs_torch("a teacher or student in this process"))
    }

    pub(super) fn work(&self) -> (u64, u64) {
        match self.never {}
    }

    pub(super) async fn load(&self, _: &Path) -> anyhow::Result<()> {
        match self.never {}
    }

    pub(super) fn forget(&self, _: &Path) -> anyhow::Result<()> {
        match self.never {}
    }

    pub(super) async fn score(&self, _: PathBuf, _: ScoreRequest) -> Result<Scores, String> {
        match self.never {}
    }
}

/// A folder of policies, whose models nobody here can run.
pub(super) struct Policies;

impl Policies {
    pub(super) fn new(_: PathBuf, _: Option<PathBuf>) -> Self {
        Self
    }

    pub(super) fn of(&self, _: Option<&str>) -> Result<(String, PathBuf), String> {
        Err("this build has no models".to_owned())
    }
}

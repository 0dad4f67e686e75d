//! Where the shards of a follower go: a folder of this machine, or of an object
//! store, into which each is put once it is whole here.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use oclaw::store::Store;
use oclaw::table::{Claim, is_shard, shard_names};

use super::Failures;
use crate::common::Context;
use crate::report::Failure;
use crate::stores;

/// The folder of the results. On this machine nobody else writes there.
pub(crate) struct Outgoing {
    /// Where shards are written.
    folder: PathBuf,
    /// Where they go from there.
    store: Option<Store>,
    _claim: Claim,
}

impl Outgoing {
    /// Claims the folder, or one of this machine from which shards go to the store.
    pub(crate) fn open(context: &Context, output: &Path) -> anyhow::Result<Self> {
        let Some(store) = stores::open(output)? else {
            if output.exists() && !output.is_dir() {
                let problem = format!("`{}` is no folder", output.display());
                let hint = "`--follow` writes a shard per shard";
                return Err(Failure::usage(problem).hint(hint).into());
            }
            let claim = Claim::take(output)?;
            return Ok(Self { folder: output.to_owned(), store: None, _claim: claim });
        };
        let folder = context.stores.beside("outgoing", store.address())?;
        let claim = Claim::take(&folder)?;
        // Whole shards of a run that was killed before they were put: they are
        // made again, from answers that are kept.
        for name in shard_names(&folder)? {
            let path = folder.join(name);
            fs::remove_file(&path)
                .with_context(|| format!("cannot remove `{}`", path.display()))?;
        }
        Ok(Self { folder, store: Some(store), _claim: claim })
    }

    /// Returns the names of the shards that are done.
    pub(crate) async fn done(&self) -> anyhow::Result<HashSet<OsString>> {
        let Some(store) = &self.store else { return Ok(shard_names(&self.folder)?) };
        let names = store.list().await?.0.into_iter().map(|object| OsString::from(object.name));
        Ok(names.filter(|name| is_shard(name)).collect())
    }

    /// Returns where a shard is written.
    pub(crate) fn path(&self, name: &OsStr) -> PathBuf {
        self.folder.join(name)
    }

    /// Gives a shard that was written its place, if that is elsewhere.
    pub(crate) async fn publish(&self, name: &OsStr) -> anyhow::Result<()> {
        let Some(store) = &self.store else { return Ok(()) };
        Ok(store.publish(&name.to_string_lossy(), &self.path(name)).await?)
    }

    /// Forgets a shard that goes nowhere.
    pub(crate) fn discard(&self, name: &OsStr) {
        if self.store.is_some() {
            let _ = fs::remove_file(self.path(name));
        }
    }

    /// Returns the list of shards that are given up.
    pub(crate) fn failures(&self) -> Failures {
        match &self.store {
            None => Failures::of(&self.folder),
            Some(store) => Failures::in_store(store.clone()),
        }
    }
}

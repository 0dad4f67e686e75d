//! Policies of an object store, copied to where the servers can read them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use oclaw::store::{Address, Policies, Store};
use oclaw::sync::Policy;

use crate::common::Context;
use crate::report::Failure;
use crate::stores;

/// Copies kept per folder: the one served, and the one before.
const KEPT: usize = 2;
/// What `oclaw gate` may add to a policy later.
const RECEIPT: &str = "oclaw/gate.json";

/// A folder of policies in a store, and the one of their copies.
pub(super) struct Shelf {
    policies: Policies,
    folder: PathBuf,
}

/// Returns a policy as a path of this machine.
pub(super) async fn bring(given: &Path, context: &Context) -> anyhow::Result<PathBuf> {
    let Some(address) = Address::of(given)? else { return Ok(given.to_owned()) };
    let named = address.split().and_then(|(folder, name)| {
        (name == "latest" || name.starts_with("step-")).then_some((folder, name))
    });
    let Some((folder, name)) = named else {
        let problem = format!("`{address}` names no policy");
        return Err(Failure::usage(problem).hint("name `…/latest` or `…/step-000007`").into());
    };
    let folder = PathBuf::from(folder.to_string());
    let Some(shelf) = Shelf::open(&folder, context)? else { return Ok(folder) };
    let copy = match name.as_str() {
        "latest" => shelf.latest().await?,
        name => Some(shelf.copy(name).await?),
    };
    copy.ok_or_else(|| Failure::failed(format!("`{address}`: no policy yet")).into())
}

impl Shelf {
    /// Opens the store that a path names, if it names one.
    pub(super) fn open(given: &Path, context: &Context) -> anyhow::Result<Option<Self>> {
        stores::open(given)?.map(|store| Self::of(store, context)).transpose()
    }

    fn of(store: Store, context: &Context) -> anyhow::Result<Self> {
        let folder = context.stores.beside("weights", store.address())?;
        // Servers read it by this path, whatever their own folder is.
        let folder = std::path::absolute(&folder)
            .with_context(|| format!("cannot find `{}`", folder.display()))?;
        Ok(Self { policies: Policies::new(store), folder })
    }

    /// Copies the newest policy, if there is any.
    pub(super) async fn latest(&self) -> anyhow::Result<Option<PathBuf>> {
        match self.policies.latest().await? {
            Some(name) => self.copy(&name).await.map(Some),
            None => Ok(None),
        }
    }

    /// Copies a policy, unless that has been done, and its receipt, which may be
    /// newer.
    async fn copy(&self, name: &str) -> anyhow::Result<PathBuf> {
        let copy = self.policies.fetch(name, &self.folder, false).await?;
        if let Some(receipt) = self.policies.store().inside(name).read(RECEIPT).await? {
            let path = copy.join(RECEIPT);
            fs::write(&path, receipt)
                .with_context(|| format!("cannot write `{}`", path.display()))?;
        }
        self.tidy(name)?;
        Ok(copy)
    }

    /// Removes copies but for the newest ones and the one at hand.
    fn tidy(&self, at_hand: &str) -> anyhow::Result<()> {
        let reading = || format!("cannot read `{}`", self.folder.display());
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.folder).with_context(reading)? {
            let name = entry.with_context(reading)?.file_name().to_string_lossy().into_owned();
            if name.starts_with("step-") {
                names.push(name);
            }
        }
        names.sort();
        for name in names.iter().rev().skip(KEPT).filter(|name| *name != at_hand) {
            let path = self.folder.join(name);
            fs::remove_dir_all(&path)
                .with_context(|| format!("cannot remove `{}`", path.display()))?;
        }
        Ok(())
    }
}

/// Resolves the policy that `latest` names, of a folder or of a store.
pub(super) async fn newest(folder: &Path, shelf: Option<&Shelf>) -> anyhow::Result<Option<Policy>> {
    let latest = match shelf {
        Some(shelf) => shelf.latest().await?,
        None => {
            let latest = folder.join("latest");
            match latest.symlink_metadata() {
                // No step has been made yet, or the folder is away.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
                _ => Some(latest),
            }
        }
    };
    Ok(latest.map(|latest| Policy::resolve(&latest, None)).transpose()?)
}

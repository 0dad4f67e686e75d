//! The folder of policies in a store: `step-000007/…`, each with its manifest, and
//! `latest`, a line of text.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use super::manifest::{Listed, MANIFEST, Manifest, sum};
use super::{Error, Object, Store};

const LATEST: &str = "latest";
/// Policies that keep what training goes on from.
const WITH_STATE: usize = 2;

/// The folder.
#[derive(Debug, Clone)]
pub struct Policies {
    store: Store,
}

/// What publishing a policy came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Published {
    /// It is there now.
    Now,
    /// The very same was there.
    Before,
}

impl Policies {
    /// Uses a folder of a store.
    pub fn new(store: Store) -> Self {
        Self { store }
    }

    /// Returns the folder.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Returns the name of the newest policy.
    pub async fn latest(&self) -> Result<Option<String>, Error> {
        let Some(bytes) = self.store.read(LATEST).await? else { return Ok(None) };
        let text = String::from_utf8_lossy(&bytes);
        let name = text.trim();
        match step_of(name) {
            Some(_) => Ok(Some(name.to_owned())),
            None => Err(self.problem(LATEST, "it names no policy".to_owned())),
        }
    }

    /// Publishes the policy of a folder: its files, then its manifest, and only then
    /// moves `latest`. A policy of the same number that is there already stays, and
    /// is an error unless it is the same.
    pub async fn publish(&self, folder: &Path) -> Result<Published, Error> {
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let policy = self.store.inside(&name);
        let manifest = Manifest::of(folder)?;
        let published = match self.manifest(&name).await? {
            Some(there) => self.same(&name, &manifest, &there)?,
            None => {
                for listed in &manifest.files {
                    policy.upload(&listed.name, &folder.join(&listed.name)).await?;
                }
                match policy.put_new(MANIFEST, manifest.bytes().into()).await {
                    Ok(()) => Published::Now,
                    Err(Error::Exists { .. }) => {
                        let there = self.manifest(&name).await?;
                        let there = there.unwrap_or(Manifest { files: Vec::new() });
                        self.same(&name, &manifest, &there)?
                    }
                    Err(error) => return Err(error),
                }
            }
        };
        self.store.replace(LATEST, format!("{name}\n").into()).await?;
        Ok(published)
    }

    fn same(&self, name: &str, ours: &Manifest, there: &Manifest) -> Result<Published, Error> {
        match ours == there {
            true => Ok(Published::Before),
            false => {
                let problem = "another policy of this number is there: is another trainer at work?";
                Err(self.problem(name, problem.to_owned()))
            }
        }
    }

    /// Returns whether a file of a published policy is the one of a folder.
    pub async fn has(&self, name: &str, file: &str, folder: &Path) -> Result<bool, Error> {
        let Some(manifest) = self.manifest(name).await? else { return Ok(false) };
        let listed = manifest.files.iter().find(|listed| listed.name == file);
        let here = sum(&folder.join(file)).ok();
        Ok(listed.map(|listed| (listed.size, listed.sha256.clone())) == here && here.is_some())
    }

    /// Copies a policy into a folder, under its name there, and returns the copy.
    /// Every file is checked; a copy has its name only when it is whole. One of the
    /// same policy that is there already is taken.
    pub async fn fetch(&self, name: &str, into: &Path, state: bool) -> Result<PathBuf, Error> {
        let copy = into.join(name);
        let Some(manifest) = self.manifest(name).await? else {
            return Err(self.problem(name, "it has no manifest: it is not whole".to_owned()));
        };
        let kept = fs::read(copy.join(MANIFEST)).ok().and_then(|bytes| Manifest::read(&bytes));
        if kept.as_ref() == Some(&manifest) {
            return Ok(copy);
        }
        let failed = |path: &Path, source| Error::File { path: path.to_owned(), source };
        fs::create_dir_all(into).map_err(|source| failed(into, source))?;
        let aside = tempfile::Builder::new().prefix(".tmp-policy-").tempdir_in(into);
        let aside = aside.map_err(|source| failed(into, source))?;
        for listed in manifest.files.iter().filter(|listed| state || !listed.is_state()) {
            self.fetch_file(name, listed, &aside.path().join(&listed.name)).await?;
        }
        let file = aside.path().join(MANIFEST);
        let folder = file.parent().unwrap_or(into);
        fs::create_dir_all(folder)
            .and_then(|()| fs::write(&file, manifest.bytes()))
            .map_err(|source| failed(&file, source))?;
        if copy.exists() {
            // Not whole, or without what is wanted now.
            fs::remove_dir_all(&copy).map_err(|source| failed(&copy, source))?;
        }
        fs::rename(aside.keep(), &copy).map_err(|source| failed(&copy, source))?;
        Ok(copy)
    }

    async fn fetch_file(&self, name: &str, listed: &Listed, path: &Path) -> Result<(), Error> {
        let failed = |source| Error::File { path: path.to_owned(), source };
        let folder = path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(failed)?;
        let policy = self.store.inside(name);
        let object = policy.look(&listed.name).await?;
        let object = object.filter(|object| object.size == listed.size).ok_or_else(|| {
            let problem = format!("its `{}` is not the one of its manifest", listed.name);
            self.problem(name, problem)
        })?;
        let mut file = File::create(path).map_err(failed)?;
        policy.fetch(&object, path, &mut file).await?;
        file.sync_all().map_err(failed)?;
        match sum(path).map_err(failed)? == (listed.size, listed.sha256.clone()) {
            true => Ok(()),
            false => {
                let problem = format!("its `{}` is not the one of its manifest", listed.name);
                Err(self.problem(name, problem))
            }
        }
    }

    /// Removes policies but for the `keep` newest up to `newest`, and what training
    /// goes on from but for the two newest. Of a policy the manifest goes first.
    pub async fn prune(&self, newest: &str, keep: u64) -> Result<(), Error> {
        let (_, folders) = self.store.list().await?;
        let limit = step_of(newest);
        let mut steps: Vec<_> =
            folders.into_iter().filter_map(|name| Some((step_of(&name)?, name))).collect();
        steps.retain(|(step, _)| Some(*step) <= limit);
        steps.sort();
        for (age, (_, name)) in steps.iter().rev().enumerate() {
            let policy = self.store.inside(name);
            if age as u64 >= keep.max(1) {
                policy.delete(MANIFEST).await?;
                for Object { name, .. } in policy.list_all().await? {
                    policy.delete(&name).await?;
                }
            } else if age >= WITH_STATE {
                policy.delete(super::manifest::STATE).await?;
            }
        }
        Ok(())
    }

    async fn manifest(&self, name: &str) -> Result<Option<Manifest>, Error> {
        let Some(bytes) = self.store.inside(name).read(MANIFEST).await? else { return Ok(None) };
        match Manifest::read(&bytes) {
            Some(manifest) => Ok(Some(manifest)),
            None => Err(self.problem(name, format!("its `{MANIFEST}` is no list of files"))),
        }
    }

    fn problem(&self, name: &str, problem: String) -> Error {
        Error::Policy { url: self.store.url(name), problem }
    }
}

/// Returns the number of a policy.
fn step_of(name: &str) -> Option<u64> {
    name.strip_prefix("step-")?.parse().ok()
}

//! The folder of policies in a store: `step-000007/oclaw/files.json`, the manifest of a
//! policy, with its files in a folder beside that, and `latest`, a line of text.
//!
//! The manifest is put if there is none, and names the folder of the files, which is
//! named by what they hold. Of two trainers that publish one number at the same time
//! one gets it, whole; the other's files are nobody's.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use bytes::Bytes;

use super::manifest::{Listed, MANIFEST, Manifest, STATE, sum};
use super::{Error, Object, Store};

const LATEST: &str = "latest";
/// Policies that keep what training goes on from.
const WITH_STATE: usize = 2;
/// So often `latest` is written anew that others have written meanwhile.
const ROUNDS: usize = 10;

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
        let bytes = self.store.read(LATEST).await?;
        bytes.map(|bytes| self.named(&bytes)).transpose()
    }

    /// Reads a file of a policy, if both are there.
    pub async fn read(&self, name: &str, file: &str) -> Result<Option<Bytes>, Error> {
        let Some(manifest) = self.manifest(name).await? else { return Ok(None) };
        self.files(name, &manifest).read(file).await
    }

    /// Publishes the policy of a folder: its files, then its manifest, and only then
    /// moves `latest`. A policy of the same number that is there already stays, and
    /// is an error unless it is the same; so is a later one.
    pub async fn publish(&self, folder: &Path) -> Result<Published, Error> {
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if let Some(latest) = self.latest().await? {
            self.not_behind(&name, &latest)?;
        }
        let ours = Manifest::of(folder)?;
        let there = match self.manifest(&name).await? {
            Some(there) => Some(there),
            None => self.put(&name, folder, &ours).await?,
        };
        // Whosever the policy is: `latest` may be what a killed trainer had not moved.
        self.move_latest(&name).await?;
        match there {
            None => Ok(Published::Now),
            Some(there) if there.files == ours.files => Ok(Published::Before),
            Some(_) => {
                let problem = "another policy of this number is there: is another trainer at \
                               work? The next start goes on from that one";
                Err(self.problem(&name, problem.to_owned()))
            }
        }
    }

    /// Puts a policy. Returns the manifest of the one that was put before, if one was.
    async fn put(
        &self,
        name: &str,
        folder: &Path,
        ours: &Manifest,
    ) -> Result<Option<Manifest>, Error> {
        let files = self.files(name, ours);
        for listed in &ours.files {
            // What an earlier try has put there has the same bytes.
            let there = files.look(&listed.name).await?;
            if there.is_none_or(|there| there.size != listed.size) {
                files.upload(&listed.name, &folder.join(&listed.name)).await?;
            }
        }
        match self.store.inside(name).put_new(MANIFEST, ours.bytes().into()).await {
            Ok(()) => Ok(None),
            Err(Error::Exists { url }) => match self.manifest(name).await? {
                Some(there) => Ok(Some(there)),
                None => Err(Error::Changed { url, problem: "it is gone again".to_owned() }),
            },
            Err(error) => Err(error),
        }
    }

    /// Moves `latest` on to a policy, and never back.
    async fn move_latest(&self, name: &str) -> Result<(), Error> {
        let line = Bytes::from(format!("{name}\n"));
        for _ in 0..ROUNDS {
            let Some((there, version, _)) = self.store.read_version(LATEST).await? else {
                match self.store.put_new(LATEST, line.clone()).await {
                    Err(Error::Exists { .. }) => continue,
                    put => return put,
                }
            };
            let there = self.named(&there)?;
            if there == name {
                return Ok(());
            }
            self.not_behind(name, &there)?;
            match self.store.update(LATEST, line.clone(), version).await {
                Err(Error::Changed { .. }) => {}
                // Not every server knows that condition.
                Err(Error::Refused { .. }) => return self.store.replace(LATEST, line).await,
                put => return put,
            }
        }
        let problem = "it is replaced again and again".to_owned();
        Err(Error::Changed { url: self.store.url(LATEST), problem })
    }

    /// Errors if a later policy is the newest.
    fn not_behind(&self, name: &str, latest: &str) -> Result<(), Error> {
        match step_of(latest) > step_of(name) {
            true => {
                let problem = format!(
                    "a later policy is there, {latest}: is another trainer at work? The next \
                     start goes on from that one"
                );
                Err(self.problem(name, problem))
            }
            false => Ok(()),
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
            let path = aside.path().join(&listed.name);
            self.fetch_file(name, &manifest, listed, &path).await?;
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

    async fn fetch_file(
        &self,
        name: &str,
        manifest: &Manifest,
        listed: &Listed,
        path: &Path,
    ) -> Result<(), Error> {
        let failed = |source| Error::File { path: path.to_owned(), source };
        let folder = path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(failed)?;
        let files = self.files(name, manifest);
        let object = files.look(&listed.name).await?;
        let object = object.filter(|object| object.size == listed.size).ok_or_else(|| {
            let problem = format!("its `{}` is not the one of its manifest", listed.name);
            self.problem(name, problem)
        })?;
        let mut file = File::create(path).map_err(failed)?;
        files.fetch(&object, path, &mut file).await?;
        file.sync_all().map_err(failed)?;
        match sum(path).map_err(failed)? == (listed.size, listed.sha256.clone()) {
            true => Ok(()),
            false => {
                let problem = format!("its `{}` is not the one of its manifest", listed.name);
                Err(self.problem(name, problem))
            }
        }
    }

    /// Removes policies but for the `keep` newest up to `newest`, what training goes on
    /// from but for the two newest, and what others put under a number that was not
    /// theirs. Of a policy the manifest goes first.
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
                remove(&policy).await?;
                continue;
            }
            let manifest = match self.manifest(name).await {
                Ok(Some(manifest)) => manifest,
                // It is on its way, or broken, which is told to whoever wants it.
                Ok(None) | Err(Error::Policy { .. }) => continue,
                Err(error) => return Err(error),
            };
            self.sweep(name, &manifest).await?;
            if age >= WITH_STATE {
                self.files(name, &manifest).delete(STATE).await?;
            }
        }
        Ok(())
    }

    /// Removes the files that are in the folder of a policy without being its own: as
    /// its manifest is there, theirs will never be.
    async fn sweep(&self, name: &str, manifest: &Manifest) -> Result<(), Error> {
        let policy = self.store.inside(name);
        let (_, mut folders) = policy.list().await?;
        folders.retain(|folder| {
            Manifest::may_name(folder) && manifest.folder.as_ref() != Some(folder)
        });
        for folder in folders {
            remove(&policy.inside(&folder)).await?;
        }
        Ok(())
    }

    /// Returns the folder that has the files of a policy.
    fn files(&self, name: &str, manifest: &Manifest) -> Store {
        let policy = self.store.inside(name);
        match &manifest.folder {
            Some(folder) => policy.inside(folder),
            None => policy,
        }
    }

    /// Returns the policy that `latest` names.
    fn named(&self, latest: &[u8]) -> Result<String, Error> {
        let text = String::from_utf8_lossy(latest);
        let name = text.trim();
        match step_of(name) {
            Some(_) => Ok(name.to_owned()),
            None => Err(self.problem(LATEST, "it names no policy".to_owned())),
        }
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

/// Removes everything below a folder.
async fn remove(folder: &Store) -> Result<(), Error> {
    for Object { name, .. } in folder.list_all().await? {
        folder.delete(&name).await?;
    }
    Ok(())
}

/// Returns the number of a policy.
fn step_of(name: &str) -> Option<u64> {
    name.strip_prefix("step-")?.parse().ok()
}

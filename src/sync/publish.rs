//! Putting a policy into a plain folder, for whoever reads models from there.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use super::latest::{self, sync_folder};
use super::{Error, Policy, weights_hash};

/// What is published of `oclaw/`: where the policy comes from, and that it may be
/// served. The state that training goes on from stays where it is.
const RECORDS: [&str; 2] = ["train.json", "gate.json"];

/// A folder that policies are published to.
#[derive(Debug, Clone)]
pub struct Publication {
    folder: PathBuf,
}

impl Publication {
    /// Uses a folder, which is made with the first policy.
    pub fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned() }
    }

    /// Returns the version that its `latest` names, if it names a whole policy.
    pub fn version(&self) -> Option<String> {
        Policy::resolve(&self.folder.join("latest"), None).ok().map(|policy| policy.version)
    }

    /// Puts a policy there under its name and returns the one there. Files are linked
    /// where that is possible, and copied elsewhere; the name appears once all are
    /// whole. The very same policy may be there already.
    pub fn put(&self, policy: &Policy) -> Result<Policy, Error> {
        let name = policy.folder.file_name().unwrap_or_default();
        let target = self.folder.join(name);
        if target.exists() {
            if weights_hash(&target)? != weights_hash(&policy.folder)? {
                let reason = "another policy of this name is there".to_owned();
                return Err(Error::Policy { folder: target, reason });
            }
        } else {
            self.copy(&policy.folder, &target)
                .map_err(|source| Error::Publish { folder: target.clone(), source })?;
        }
        let published = Policy::resolve(&target, Some(&policy.version))?;
        match policy.adapter {
            Some(_) => published.as_adapter(),
            None => Ok(published),
        }
    }

    /// Points `latest` to a policy that was put there.
    pub fn point(&self, policy: &Policy) -> Result<(), Error> {
        let link = self.folder.join("latest");
        let name = policy.folder.file_name().unwrap_or_default();
        latest::point(&link, name).map_err(|source| Error::Publish { folder: link, source })
    }

    fn copy(&self, from: &Path, target: &Path) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        let name = from.file_name().unwrap_or_default().to_string_lossy();
        let aside = self.folder.join(format!(".tmp-{name}-{}", std::process::id()));
        match fs::remove_dir_all(&aside) {
            // A killed process of the same number has left it.
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let copied = copy_files(from, &aside, &|_| true).and_then(|()| {
            let ours = from.join("oclaw");
            let known = |name: &str| RECORDS.contains(&name);
            if ours.is_dir() { copy_files(&ours, &aside.join("oclaw"), &known) } else { Ok(()) }
        });
        let copied = copied.and_then(|()| match from.join("adapter").is_dir() {
            true => copy_files(&from.join("adapter"), &aside.join("adapter"), &|_| true),
            false => Ok(()),
        });
        let renamed = copied
            .and_then(|()| sync_folder(&aside))
            .and_then(|()| fs::rename(&aside, target))
            .and_then(|()| sync_folder(&self.folder));
        if renamed.is_err() {
            // What is wrong is told; what was begun is in nobody's way.
            let _ = fs::remove_dir_all(&aside);
        }
        renamed
    }
}

/// Links or copies the files of one folder, without those of the folders in it.
fn copy_files(from: &Path, to: &Path, wanted: &dyn Fn(&str) -> bool) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let path = entry.path();
        if !path.is_file() || !wanted(&entry.file_name().to_string_lossy()) {
            continue;
        }
        let target = to.join(entry.file_name());
        // A link to a symbolic link would lead elsewhere from there.
        let source = path.canonicalize()?;
        if fs::hard_link(&source, &target).is_err() {
            fs::copy(&source, &target)?;
            File::open(&target)?.sync_all()?;
        }
    }
    sync_folder(to)
}

//! A folder that is there as a whole or not at all.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Lets `write` fill a folder aside, which then gets the name `out`; what has that
/// name goes. `failed` makes an error of the system's own.
pub fn whole_folder<T, E>(
    out: &Path,
    failed: impl Fn(io::Error) -> E,
    write: impl FnOnce(&Path) -> Result<T, E>,
) -> Result<T, E> {
    let parent = match out.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let made = Made::parents(parent).map_err(&failed)?;
    let aside = tempfile::Builder::new()
        .prefix(".tmp-")
        .permissions(Permissions::from_mode(0o777))
        .tempdir_in(parent)
        .map_err(|error| failed(system(error)))?;
    let written = write(aside.path())?;
    let old = match out.symlink_metadata().is_ok() {
        true => Some(set_aside(out, parent).map_err(&failed)?),
        false => None,
    };
    std::fs::rename(aside.path(), out).map_err(&failed)?;
    // Nothing is left under its temporary name.
    let _ = aside.keep();
    made.keep();
    File::open(parent).and_then(|folder| folder.sync_all()).map_err(&failed)?;
    drop(old);
    Ok(written)
}

/// Folders above the one to write that were not there, innermost first. They go
/// again if nothing comes of it.
struct Made(Vec<PathBuf>);

impl Made {
    fn parents(parent: &Path) -> io::Result<Self> {
        let missing = parent.ancestors().take_while(|folder| {
            !folder.as_os_str().is_empty() && folder.symlink_metadata().is_err()
        });
        let made = Self(missing.map(Path::to_owned).collect());
        std::fs::create_dir_all(parent)?;
        Ok(made)
    }

    fn keep(mut self) {
        self.0.clear();
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        for folder in &self.0 {
            // One in which somebody has put something stays.
            let _ = std::fs::remove_dir(folder);
        }
    }
}

/// Returns the system's own error: a temporary folder's name is no part of it.
fn system(error: io::Error) -> io::Error {
    match error.to_string().rsplit_once(" at path ") {
        Some((reason, _)) => io::Error::new(error.kind(), reason),
        None => error,
    }
}

/// Moves what is in the way into a folder that goes when it is dropped.
fn set_aside(out: &Path, parent: &Path) -> io::Result<tempfile::TempDir> {
    let aside = tempfile::Builder::new().prefix(".tmp-").tempdir_in(parent).map_err(system)?;
    std::fs::rename(out, aside.path().join("replaced"))?;
    Ok(aside)
}

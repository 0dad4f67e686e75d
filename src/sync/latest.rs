//! `latest`: a link to the newest policy beside it, or a line of text that names it.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// Points it to another policy, in the form that it has; a new one is a link.
pub(super) fn point(link: &Path, name: &OsStr) -> io::Result<()> {
    let folder = link.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    let aside = folder.join(format!(".tmp-latest-{}", std::process::id()));
    match fs::remove_file(&aside) {
        // A killed process of the same number has left it.
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    match fs::symlink_metadata(link) {
        Ok(found) if !found.is_symlink() => {
            let mut file = File::create(&aside)?;
            writeln!(file, "{}", name.to_string_lossy())?;
            file.sync_all()?;
        }
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => std::os::unix::fs::symlink(name, &aside)?,
    }
    fs::rename(&aside, link)?;
    sync_folder(folder)
}

/// Makes the disk itself know the names in a folder.
pub(super) fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

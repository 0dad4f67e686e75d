//! The door of tables, for Parquet files and Arrow streams from anywhere: rows or an
//! error that names the file, never a panic, and never rows for a file that is cut.

use std::fs;
use std::path::Path;

use oclaw::table::{Error, Source};

pub(crate) fn run(bytes: &[u8]) {
    let Ok(folder) = tempfile::tempdir() else { return };
    let path = folder.path().join("table");
    if fs::write(&path, bytes).is_err() {
        return;
    }
    match read(&path) {
        Ok((rows, total)) => assert!(total.is_none_or(|total| total == rows)),
        Err(error) => assert!(error.to_string().contains("table"), "{error}"),
    }
}

fn read(path: &Path) -> Result<(u64, Option<u64>), Error> {
    let mut source = Source::open(&[path.to_owned()])?;
    let mut rows = 0;
    while let Some(turns) = source.next_turns()? {
        rows += turns.len() as u64;
    }
    Ok((rows, source.total_rows()))
}

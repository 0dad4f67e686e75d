//! The log of a journal as a crash, a disk or somebody left it: it is taken up, what
//! is damaged is counted and set aside, and what was taken up is there the next time.
//! An input of lines becomes their records with sound frames, one that begins with
//! `OCJ1` is the log as it is.

use std::fs;
use std::sync::atomic::Ordering;
use std::time::Duration;

use oclaw::journal::{Journal, Options, Roll, Sync};
use oclaw::table::Provenance;

pub(crate) fn run(bytes: &[u8]) {
    let Ok(folder) = tempfile::tempdir() else { return };
    let log = folder.path().join(".journal/00000001.log");
    let bytes = &log_of(bytes)[..];
    if fs::create_dir(folder.path().join(".journal")).and_then(|()| fs::write(log, bytes)).is_err()
    {
        return;
    }
    let open = || {
        let options = Options {
            spool: folder.path().to_owned(),
            sync: Sync::Every(Duration::from_secs(3600)),
            roll: Roll { rows: 1 << 20, bytes: 1 << 30, age: Duration::from_secs(3600) },
            retention: i64::MAX,
            remembered: 65_536,
            compact: 1 << 30,
            provenance: Provenance::default(),
        };
        let (journal, mut found) = Journal::open(options).unwrap();
        found.open.sort_by(|left, right| left.turn_id.cmp(&right.turn_id));
        found.known.sort_by(|left, right| left.turn_id.cmp(&right.turn_id));
        (journal.counts().set_aside.load(Ordering::Relaxed), found)
    };
    let (damaged, first) = open();
    assert!(damaged <= bytes.len() as u64);
    let (damaged, second) = open();
    assert_eq!(damaged, 0);
    assert_eq!(first.open, second.open);
    assert_eq!(first.known, second.known);
}

fn log_of(bytes: &[u8]) -> Vec<u8> {
    if bytes.starts_with(b"OCJ1") {
        return bytes.to_vec();
    }
    let framed = bytes.split(|byte| *byte == b'\n').flat_map(|line| {
        let length = u32::try_from(line.len()).unwrap_or(u32::MAX);
        [b"OCJ1", &length.to_le_bytes()[..], &crc32c::crc32c(line).to_le_bytes(), line].concat()
    });
    framed.collect()
}

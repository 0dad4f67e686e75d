//! Broken tables: an error that names the file; no panic, no short success, no
//! memory that the file's size does not warrant.

use std::fs;
use std::path::{Path, PathBuf};

use oclaw::table::{Error, Format, read_turns};
use oclaw::trajectory::Turn;

use crate::forge::{STAGES, finished, write};

fn turns() -> Vec<Turn> {
    (1..=4).map(|number| finished("a", number)).collect()
}

struct Broken {
    _folder: tempfile::TempDir,
    path: PathBuf,
    bytes: Vec<u8>,
}

impl Broken {
    fn new(format: Format) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = write(&folder.path().join("whole"), format, &STAGES, &turns());
        let bytes = fs::read(&path).unwrap();
        Self { path: folder.path().join("broken"), _folder: folder, bytes }
    }

    fn read(&self, bytes: &[u8]) -> Result<Vec<Turn>, Error> {
        fs::write(&self.path, bytes).unwrap();
        read_turns(std::slice::from_ref(&self.path))
    }
}

fn names(error: &Error, path: &Path) -> bool {
    format!("{error}").contains(&path.display().to_string())
}

/// The most memory this process ever held, in MiB.
fn peak() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() / 1024
}

#[test]
fn a_cut_table_is_an_error_wherever_it_is_cut() {
    for format in [Format::Parquet, Format::Ipc] {
        let broken = Broken::new(format);
        let length = broken.bytes.len();
        let cuts = (0..length).step_by(7).chain(length - 16..length);
        for cut in cuts {
            match broken.read(&broken.bytes[..cut]) {
                Ok(_) => panic!("{format:?} cut to {cut} of {length} bytes was read"),
                Err(error) => assert!(names(&error, &broken.path), "{error}"),
            }
        }
        assert_eq!(broken.read(&broken.bytes).unwrap(), turns());
    }
}

#[test]
fn a_flipped_byte_never_panics_and_needs_no_memory() {
    let before = peak();
    for format in [Format::Parquet, Format::Ipc] {
        let broken = Broken::new(format);
        let length = broken.bytes.len();
        for index in 0..500 {
            // All of the last bytes, where the footer is, and places all over.
            let at = if index < 250 { length - 1 - index } else { (index * 7919) % length };
            for flip in [0xff, 0x01, 0x80] {
                let mut bytes = broken.bytes.clone();
                bytes[at] ^= flip;
                if let Err(error) = broken.read(&bytes) {
                    assert!(names(&error, &broken.path), "{error}");
                }
            }
        }
    }
    let grown = peak() - before;
    assert!(grown < 512, "{grown} MiB for tables of some KiB");
}

#[test]
fn a_stream_that_stops_between_batches_is_cut() {
    let broken = Broken::new(Format::Ipc);
    // Without the end mark the last batch is whole, and a careless reader happy.
    let without_mark = &broken.bytes[..broken.bytes.len() - 8];
    let error = broken.read(without_mark).unwrap_err();
    assert!(matches!(error, Error::Cut { .. }), "{error}");
    let followed = [broken.bytes.as_slice(), b"x"].concat();
    assert!(matches!(broken.read(&followed), Err(Error::Damaged { .. })));
}

#[test]
fn footers_that_lie_are_refused() {
    let broken = Broken::new(Format::Parquet);
    let length = broken.bytes.len();
    for claimed in [u32::MAX, length as u32, length as u32 - 11] {
        let mut bytes = broken.bytes.clone();
        bytes[length - 8..length - 4].copy_from_slice(&claimed.to_le_bytes());
        assert!(matches!(broken.read(&bytes), Err(Error::Cut { .. })), "{claimed}");
    }
    let mut bytes = broken.bytes.clone();
    bytes[length - 1] = b'0';
    assert!(matches!(broken.read(&bytes), Err(Error::Cut { .. })));
}

#[test]
fn what_is_no_table_is_told_apart() {
    let broken = Broken::new(Format::Parquet);
    let said = |bytes: &[u8]| {
        let text = broken.read(bytes).unwrap_err().to_string();
        text.replace(&broken.path.display().to_string(), "F")
    };
    assert_eq!(said(b""), "`F` is empty: zero bytes");
    assert_eq!(
        said(b"{\"a\":1}\n"),
        "`F` is no table: JSON, wanted Parquet or an Arrow IPC stream"
    );
    assert_eq!(
        said(b"ARROW1\0\0rest"),
        "`F` is no table: an Arrow file, wanted Parquet or an Arrow IPC stream"
    );
    assert_eq!(
        said(b"\x1b[31mred"),
        "`F` is no table: it starts with `\\x1b[31mred`, wanted Parquet or an Arrow IPC stream"
    );
    assert_eq!(said(b"PAR1"), "`F` is cut short: 4 bytes are no Parquet file");
    assert_eq!(said(b"PA"), "`F` is cut short: 2 bytes");
    assert_eq!(said(b"PAR1 and no more"), "`F` is cut short: the Parquet footer is missing");
}

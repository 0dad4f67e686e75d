//! Logs of others as JSON lines: each line is rows or an error, and rows can be
//! written.

use oclaw::interchange::Importer;
use oclaw::trajectory::{Writer, turn};

pub(crate) fn run(bytes: &[u8]) {
    let mut importer = Importer::new(None);
    for line in bytes.split(|byte| *byte == b'\n') {
        if let Err(reason) = importer.line(line) {
            assert!(!reason.is_empty());
        }
    }
    let imported = importer.finish(None);
    let batch = turn::batch(&[Writer::Serve], &imported.turns).unwrap();
    assert_eq!(turn::read(&batch).unwrap().len(), imported.turns.len());
}

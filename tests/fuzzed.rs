//! Every fuzz target for a moment: seeds, and what becomes of them by chance, the same
//! chance every time. A longer search is `cargo fuzz`'s (fuzz/README.md).

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};

use oclaw::table::{Format, Provenance, Sink, Source, Target};

use crate::harness::{fixture, root};

#[path = "../fuzz/targets/capture.rs"]
mod capture;
#[cfg(feature = "torch")]
mod engine;
#[path = "../fuzz/targets/hint.rs"]
mod hint;
#[path = "../fuzz/targets/import.rs"]
mod import;
#[path = "../fuzz/targets/journal.rs"]
mod journal;
#[path = "../fuzz/targets/replies.rs"]
mod replies;
#[path = "../fuzz/targets/requests.rs"]
mod requests;
#[path = "../fuzz/targets/sse.rs"]
mod sse;
#[path = "../fuzz/targets/table.rs"]
mod table;
#[path = "../fuzz/targets/verdict.rs"]
mod verdict;

/// What often matters, wherever it stands.
const PIECES: [&[u8]; 18] = [
    b"\n",
    b"\r",
    b"\0",
    b"\"",
    b"\\",
    b"{",
    b"}",
    b"]",
    b",",
    b"-",
    b"null",
    b"1e999",
    b"-9999.0",
    b"99999999999999999999",
    b"\xff",
    "\u{2028}".as_bytes(),
    b"\\ud800",
    b"\\boxed{1}",
];

/// A small source of chance.
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound.max(1) as u64) as usize
    }

    fn span(&mut self, length: usize) -> std::ops::Range<usize> {
        let start = self.below(length + 1);
        start..length.min(start + 1 + self.below(16))
    }

    fn change(&mut self, bytes: &mut Vec<u8>, seeds: &[Vec<u8>]) {
        let span = self.span(bytes.len());
        match self.below(6) {
            0 => drop(bytes.drain(span)),
            1 => bytes.truncate(span.start),
            2 => {
                let twice = bytes[span.clone()].to_vec();
                bytes.splice(span.start..span.start, twice);
            }
            3 => {
                let piece = PIECES[self.below(PIECES.len())];
                bytes.splice(span, piece.iter().copied());
            }
            4 => {
                let other = &seeds[self.below(seeds.len())];
                let piece = other[self.span(other.len())].to_vec();
                bytes.splice(span, piece);
            }
            _ => {
                let bit = 1 << self.below(8);
                if let Some(byte) = bytes.get_mut(span.start) {
                    *byte ^= bit;
                }
            }
        }
    }
}

fn files(folder: std::path::PathBuf) -> Vec<Vec<u8>> {
    let mut paths: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.iter().map(|path| fs::read(path).unwrap()).collect()
}

fn seeds(target: &str) -> Vec<Vec<u8>> {
    files(root().join("fuzz/seeds").join(target))
}

fn run(seeds: &[Vec<u8>], rounds: usize, target: impl Fn(&[u8])) {
    let mut chance = Chance(0x9e37_79b9_7f4a_7c15);
    let mutated = (0..rounds).map(|round| {
        let mut bytes = seeds[round % seeds.len()].clone();
        for _ in 0..=chance.below(4) {
            chance.change(&mut bytes, seeds);
        }
        bytes
    });
    for bytes in seeds.iter().cloned().chain(mutated) {
        let outcome = catch_unwind(AssertUnwindSafe(|| target(&bytes)));
        assert!(outcome.is_ok(), "on b\"{}\"", bytes.escape_ascii());
    }
}

#[test]
fn server_sent_events() {
    run(&seeds("sse"), 3000, sse::run);
}

#[test]
fn answers_of_engines() {
    run(&seeds("capture"), 2000, capture::run);
}

#[test]
fn the_log_of_a_journal() {
    run(&seeds("journal"), 60, journal::run);
}

#[test]
fn verdicts() {
    run(&seeds("verdict"), 3000, verdict::run);
}

#[test]
fn hints() {
    run(&seeds("hint"), 2000, hint::run);
}

#[test]
fn lines_to_import() {
    run(&files(fixture("interchange")), 500, import::run);
}

#[test]
fn bodies_of_requests() {
    run(&seeds("requests"), 1500, requests::run);
}

#[test]
fn replies_of_servers() {
    run(&seeds("replies"), 150, replies::run);
}

#[test]
fn tables() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (fixture("sessions/tiny.parquet"), folder.path().join("stream"));
    let mut source = Source::open(std::slice::from_ref(&input)).unwrap();
    let (target, format) = (Target::Path(output.clone()), Some(Format::Ipc));
    let mut sink = Sink::create(&target, format, source.schema(), &Provenance::default()).unwrap();
    while let Some(batch) = source.next_batch().unwrap() {
        sink.write(&batch).unwrap();
    }
    sink.finish().unwrap();
    run(&[fs::read(input).unwrap(), fs::read(output).unwrap()], 400, table::run);
}

//! Shards and ledgers, read no further than their counts and turn ids.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use arrow::array::{Array, AsArray, RecordBatch};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::file::reader::ChunkReader;
use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::pipeline::Error;
use crate::store::Counted;
use crate::table::{shard_names, texts};

/// What is read of a turn.
pub(super) const COLUMNS: [&str; 3] = ["turn_id", "sample_kind", "sample_reason"];

/// The shards of a folder, with when each was written.
#[derive(Debug, Default, Clone)]
pub(super) struct Folder {
    shards: BTreeMap<OsString, Option<SystemTime>>,
}

impl Folder {
    /// Lists a folder; one that is not there yet is empty.
    pub(super) fn list(folder: &Path) -> Result<Self, Error> {
        if !folder.exists() {
            return Ok(Self::default());
        }
        let failed =
            |error: crate::table::Error| Error::file(folder, io::Error::other(error.to_string()));
        let names = shard_names(folder).map_err(failed)?;
        let dated = names.into_iter().map(|name| {
            let written = fs::metadata(folder.join(&name)).and_then(|facts| facts.modified()).ok();
            (name, written)
        });
        Ok(Self { shards: dated.collect() })
    }

    /// Makes one of what a store lists.
    pub(super) fn of(shards: impl Iterator<Item = (OsString, Option<SystemTime>)>) -> Self {
        Self { shards: shards.collect() }
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &OsStr> {
        self.shards.keys().map(OsString::as_os_str)
    }

    pub(super) fn has(&self, name: &OsStr) -> bool {
        self.shards.contains_key(name)
    }

    /// Names those that were written after a time.
    pub(super) fn since(&self, time: SystemTime) -> impl Iterator<Item = &OsStr> {
        let fresh =
            self.shards.iter().filter(move |(_, written)| written.is_some_and(|it| it >= time));
        fresh.map(|(name, _)| name.as_os_str())
    }
}

/// What is known of shards: a finished one changes only by being replaced.
#[derive(Debug, Default)]
pub(super) struct Shards {
    rows: HashMap<PathBuf, (Mark, u64)>,
    turns: HashMap<PathBuf, (Mark, Turns)>,
    /// Those of a store, by their address: they are counted when it is looked at.
    listed: HashMap<PathBuf, Mark>,
}

/// The turns of a shard.
#[derive(Debug)]
pub(super) struct Turns {
    pub(super) ids: Vec<u128>,
    /// Why those have nothing to learn from that have not, by their places.
    silent: BTreeMap<usize, String>,
}

impl Turns {
    /// Reads the columns. A turn without an id could be any.
    fn of(rows: Vec<[Option<String>; 3]>) -> Option<Self> {
        let (mut ids, mut silent) = (Vec::with_capacity(rows.len()), BTreeMap::new());
        for (place, [turn_id, kind, reason]) in rows.into_iter().enumerate() {
            ids.push(id(&turn_id?));
            if let Some(reason) = reason.filter(|_| kind.is_none_or(|kind| kind == "none")) {
                silent.insert(place, reason);
            }
        }
        Some(Self { ids, silent })
    }

    /// Says why a turn has nothing to learn from, if it has not.
    pub(super) fn silence(&self, place: usize) -> Option<&str> {
        self.silent.get(&place).map(String::as_str)
    }
}

/// Tells a file from another that takes its name.
pub(super) type Mark = (u64, Option<SystemTime>);

fn mark(facts: &Metadata) -> Mark {
    (facts.len(), facts.modified().ok())
}

impl Shards {
    /// Takes what a store lists from now on.
    pub(super) fn list(&mut self, listed: HashMap<PathBuf, Mark>) {
        self.listed = listed;
    }

    /// Takes what a shard of a store tells.
    pub(super) fn note(&mut self, path: PathBuf, mark: Mark, counted: Counted<3>) {
        if let Some(turns) = counted.texts.and_then(Turns::of) {
            self.turns.insert(path.clone(), (mark, turns));
        }
        self.rows.insert(path, (mark, counted.rows));
    }

    /// Whether a shard of a store has told its rows, and its turns if they are wanted.
    pub(super) fn knows(&self, path: &Path, mark: Mark, turns: bool) -> bool {
        self.rows.get(path).is_some_and(|(then, _)| *then == mark)
            && (!turns || self.turns.get(path).is_some_and(|(then, _)| *then == mark))
    }

    /// Returns when a shard was written.
    pub(super) fn written(&self, path: &Path) -> Option<SystemTime> {
        self.mark(path)?.1
    }

    fn mark(&self, path: &Path) -> Option<Mark> {
        match self.listed.get(path) {
            Some(mark) => Some(*mark),
            None => Some(mark(&fs::metadata(path).ok()?)),
        }
    }

    /// Returns how many rows a shard has, if it can be read.
    pub(super) fn rows(&mut self, path: &Path) -> Option<u64> {
        let now = self.mark(path)?;
        if let Some((_, rows)) = self.rows.get(path).filter(|(then, _)| *then == now) {
            return Some(*rows);
        }
        let reader = ParquetRecordBatchReaderBuilder::try_new(File::open(path).ok()?).ok()?;
        let rows = u64::try_from(reader.metadata().file_metadata().num_rows()).ok()?;
        self.rows.insert(path.to_owned(), (now, rows));
        Some(rows)
    }

    /// Returns the turns of a shard, if it can be read.
    pub(super) fn turns(&mut self, path: &Path) -> Option<&Turns> {
        let now = self.mark(path)?;
        if self.listed.contains_key(path) {
            let known = self.turns.get(path).filter(|(then, _)| *then == now);
            return known.map(|(_, turns)| turns);
        }
        if self.turns.get(path).is_none_or(|(then, _)| *then != now) {
            let turns = Turns::of(texts(File::open(path).ok()?, COLUMNS)?)?;
            self.turns.insert(path.to_owned(), (now, turns));
        }
        self.turns.get(path).map(|(_, turns)| turns)
    }
}

/// Returns a number for a turn id: that of the UUID, or of any other text.
pub(super) fn id(text: &str) -> u128 {
    match Uuid::parse_str(text) {
        Ok(id) => id.as_u128(),
        Err(_) => {
            let digest = Sha256::digest(text.as_bytes());
            digest.iter().take(16).fold(0, |sum, byte| sum << 8 | u128::from(*byte))
        }
    }
}

/// What became of a turn that the trainer has seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome<'a> {
    Trained,
    Refused(&'a str),
}

/// The ledger of the newest policy.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    policy: PathBuf,
    /// Turns, each with the place of its reason; none is trained.
    turns: HashMap<u128, Option<u32>>,
    reasons: Vec<String>,
}

impl Ledger {
    /// Reads the ledger anew if there is a newer policy.
    pub(super) fn refresh(&mut self, policies: &Path) -> Result<(), Error> {
        let latest = policies.join("latest");
        let policy = match latest.canonicalize() {
            Ok(policy) if policy.is_dir() => policy,
            Ok(file) => {
                let name = fs::read_to_string(&file).map_err(|error| Error::file(&file, error))?;
                policies.join(name.trim())
            }
            // No step has been made yet.
            Err(_) => return Ok(()),
        };
        if policy == self.policy {
            return Ok(());
        }
        let path = policy.join("oclaw/ledger.parquet");
        let file = File::open(&path).map_err(|error| Error::file(&path, error))?;
        *self = Self::read(file, policy)?;
        Ok(())
    }

    /// Whether it is that of a policy.
    pub(super) fn is_of(&self, policy: &Path) -> bool {
        self.policy == policy
    }

    /// Reads the ledger of a policy.
    pub(super) fn read(file: impl ChunkReader + 'static, policy: PathBuf) -> Result<Self, Error> {
        let path = policy.join("oclaw/ledger.parquet");
        let failed = |reason: String| Error::file(&path, io::Error::other(reason));
        let mut fresh = Self { policy, ..Self::default() };
        let mut places: HashMap<String, u32> = HashMap::new();
        for batch in columns(file, &["turn_id", "outcome", "reason"]).map_err(failed)? {
            let column = |name: &str| batch.column_by_name(name)?.as_string_opt::<i32>().cloned();
            let (Some(ids), Some(outcomes), Some(reasons)) =
                (column("turn_id"), column("outcome"), column("reason"))
            else {
                return Err(failed("its columns have other types".to_owned()));
            };
            for row in 0..batch.num_rows() {
                let place = (outcomes.value(row) != "consumed").then(|| {
                    let reason = if reasons.is_valid(row) { reasons.value(row) } else { "unknown" };
                    *places.entry(reason.to_owned()).or_insert_with(|| {
                        fresh.reasons.push(reason.to_owned());
                        fresh.reasons.len() as u32 - 1
                    })
                });
                fresh.turns.insert(id(ids.value(row)), place);
            }
        }
        Ok(fresh)
    }

    /// Returns what became of a turn.
    pub(super) fn outcome(&self, turn: u128) -> Option<Outcome<'_>> {
        Some(match self.turns.get(&turn)? {
            None => Outcome::Trained,
            Some(place) => Outcome::Refused(self.reasons.get(*place as usize)?),
        })
    }
}

/// Reads some columns of a file.
fn columns(file: impl ChunkReader + 'static, columns: &[&str]) -> Result<Vec<RecordBatch>, String> {
    let told = |error: &dyn std::fmt::Display| error.to_string();
    let reader = ParquetRecordBatchReaderBuilder::try_new(file).map_err(|error| told(&error))?;
    let mask = ProjectionMask::columns(reader.parquet_schema(), columns.iter().copied());
    let reader = reader.with_projection(mask).build().map_err(|error| told(&error))?;
    reader.collect::<Result<_, _>>().map_err(|error| told(&error))
}

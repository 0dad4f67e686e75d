//! Turns taken out of what a spool folder keeps beside its shards: the logs, the
//! ones set aside, and late feedback. Only while nobody serves there.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::entry::Remembered;
use super::record::{Record, Span, walk};
use super::{Error, lock};
use crate::trajectory::Turn;

/// Whether feedback is meant, by its turn id, session and number.
pub type IsAbout<'a> = dyn Fn(Option<&str>, Option<&str>, Option<u32>) -> bool + 'a;

/// Which turns, asked in several ways.
pub struct Wanted<'a> {
    /// Whether a turn is meant, by what is remembered of it.
    pub turn: &'a dyn Fn(&Remembered) -> bool,
    /// Whether feedback is about one: turn id, session and number.
    pub feedback: &'a IsAbout<'a>,
    /// Turns that are known to be meant.
    pub turn_ids: &'a BTreeSet<String>,
    /// Texts that tell damaged bytes as theirs.
    pub texts: &'a BTreeSet<String>,
    /// Whether another turn still tells of one, and how.
    pub repeats: &'a dyn Fn(&Turn) -> Option<&'static str>,
}

/// What was, or would be, removed.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Forgotten {
    /// Files with something to remove, and how many records or lines of each.
    pub files: Vec<(PathBuf, u64)>,
    /// Turns found in the logs.
    pub turn_ids: BTreeSet<String>,
    /// Those of which the logs tell more than the id, as far as they tell.
    pub turns: BTreeMap<String, Turn>,
    /// Other turns, which stay and still tell of them, and how.
    pub repeating: BTreeMap<String, &'static str>,
    /// What an interrupted writer left, which goes.
    pub unfinished: Vec<PathBuf>,
    /// Files with bytes that nobody can read and that tell nothing of the turns;
    /// they stay.
    pub unreadable: Vec<PathBuf>,
}

/// Takes a spool folder as `serve` does, so that none can start meanwhile. It is
/// let go when the file is dropped.
pub fn hold(spool: &Path) -> Result<File, Error> {
    lock(spool)
}

/// Removes turns from the logs and the feedback of a spool folder, or only tells
/// what would be removed. Each file is replaced at once.
pub fn forget(spool: &Path, wanted: &Wanted<'_>, dry: bool) -> Result<Forgotten, Error> {
    let folder = spool.join(".journal");
    let mut forgotten = Forgotten { turn_ids: wanted.turn_ids.clone(), ..Forgotten::default() };
    let mut logs = files(&folder, ".log")?;
    logs.extend(files(&folder.join("aside"), "")?);
    // Ids first: what a later log calls by id only, an earlier one may tell whole,
    // and the other way round.
    for path in &logs {
        let bytes = read(path)?;
        walk(&bytes, |span| {
            let known = match span {
                Span::Record(Record::Turn(entry), _) => Some(entry.remembered()),
                Span::Record(Record::Known(known), _) => Some(known),
                _ => None,
            };
            if let Some(known) = known.filter(|known| (wanted.turn)(known)) {
                forgotten.turn_ids.insert(known.turn_id);
            }
        });
    }
    for path in &logs {
        log(path, wanted, &mut forgotten, dry)?;
    }
    for path in files(&spool.join("feedback"), ".jsonl")? {
        feedback(&path, wanted, &mut forgotten, dry)?;
    }
    for place in [&folder, &folder.join("aside"), &spool.join("feedback")] {
        for path in unfinished(place)? {
            if !dry {
                fs::remove_file(&path).map_err(|source| failed(&path, source))?;
            }
            forgotten.unfinished.push(path);
        }
    }
    Ok(forgotten)
}

fn log(
    path: &Path,
    wanted: &Wanted<'_>,
    forgotten: &mut Forgotten,
    dry: bool,
) -> Result<(), Error> {
    let bytes = read(path)?;
    let ids = forgotten.turn_ids.clone();
    let (mut kept, mut removed, mut unreadable) = (Vec::new(), 0, false);
    let mut broken = None;
    walk(&bytes, |span| match span {
        Span::Damaged(damaged) => match tells(damaged, &ids, wanted) {
            true => removed += 1,
            false => {
                unreadable = true;
                kept.extend_from_slice(damaged);
            }
        },
        Span::Record(Record::Written { shard, turn_ids }, raw) => {
            let left: Vec<_> = turn_ids.iter().filter(|id| !ids.contains(*id)).cloned().collect();
            if left.len() == turn_ids.len() {
                kept.extend_from_slice(raw);
            } else {
                removed += 1;
                let record = Record::Written { shard, turn_ids: left };
                if let Err(error) = record.frame(&mut kept) {
                    broken.get_or_insert(error);
                }
            }
        }
        Span::Record(record, raw) => match ids.contains(turn_id(&record)) {
            true => {
                removed += 1;
                note(record, &mut forgotten.turns);
            }
            false => {
                kept.extend_from_slice(raw);
                let turn = turn_of(record);
                if let Some(how) = turn.as_ref().and_then(wanted.repeats) {
                    forgotten.repeating.extend(turn.map(|turn| (turn.turn_id, how)));
                }
            }
        },
    });
    if let Some(error) = broken {
        return Err(failed(path, error.into()));
    }
    if unreadable {
        forgotten.unreadable.push(path.to_owned());
    }
    finish(path, removed, &kept, (forgotten, dry))
}

/// Tells whether bytes that nobody can read spell an id or words of the turns.
fn tells(bytes: &[u8], ids: &BTreeSet<String>, wanted: &Wanted<'_>) -> bool {
    let texts = ids.iter().chain(wanted.texts).map(String::as_bytes);
    let mut texts = texts.filter(|text| !text.is_empty());
    texts.any(|text| bytes.windows(text.len()).any(|window| window == text))
}

/// Puts what a record tells to what others told of the turn.
fn note(record: Record, turns: &mut BTreeMap<String, Turn>) {
    let Some(told) = turn_of(record) else { return };
    let Some(turn) = turns.get_mut(&told.turn_id) else {
        turns.insert(told.turn_id.clone(), told);
        return;
    };
    let (next_state, feedback_text) = (
        told.next_state.clone().or(turn.next_state.take()),
        told.feedback_text.clone().or(turn.feedback_text.take()),
    );
    // The log of a turn's row tells more than the notes about it.
    if !told.session_id.is_empty() && turn.messages.is_empty() {
        *turn = told;
    }
    (turn.next_state, turn.feedback_text) = (next_state, feedback_text);
}

/// Returns a turn as far as a record tells of it.
fn turn_of(record: Record) -> Option<Turn> {
    match record {
        Record::Turn(entry) => Some(entry.row()),
        Record::Known(known) => Some(Turn {
            turn_id: known.turn_id,
            session_id: known.session_id,
            turn: known.turn,
            client: known.client,
            ..Turn::default()
        }),
        Record::Extended { turn_id, next_state, kind } => Some(Turn {
            turn_id,
            next_state: Some(next_state),
            next_state_kind: kind,
            ..Turn::default()
        }),
        Record::Feedback { turn_id, text, .. } => {
            Some(Turn { turn_id, feedback_text: text, ..Turn::default() })
        }
        Record::Closed { .. } | Record::Written { .. } => None,
    }
}

fn turn_id(record: &Record) -> &str {
    match record {
        Record::Turn(entry) => &entry.turn_id,
        Record::Known(known) => &known.turn_id,
        Record::Extended { turn_id, .. }
        | Record::Closed { turn_id, .. }
        | Record::Feedback { turn_id, .. } => turn_id,
        Record::Written { .. } => "",
    }
}

fn feedback(
    path: &Path,
    wanted: &Wanted<'_>,
    forgotten: &mut Forgotten,
    dry: bool,
) -> Result<(), Error> {
    let bytes = read(path)?;
    let (mut kept, mut removed, mut unreadable) = (Vec::new(), 0, false);
    for line in bytes.split_inclusive(|byte| *byte == b'\n') {
        let Ok(told) = serde_json::from_slice::<Value>(line) else {
            match tells(line, &forgotten.turn_ids, wanted) {
                true => removed += 1,
                false => {
                    unreadable |= !line.trim_ascii().is_empty();
                    kept.extend_from_slice(line);
                }
            }
            continue;
        };
        let turn_id = told["turn_id"].as_str();
        let number = told["turn"].as_u64().and_then(|turn| u32::try_from(turn).ok());
        let theirs = turn_id.is_some_and(|turn_id| forgotten.turn_ids.contains(turn_id))
            || (wanted.feedback)(turn_id, told["session_id"].as_str(), number);
        match theirs {
            true => removed += 1,
            false => kept.extend_from_slice(line),
        }
    }
    if unreadable {
        forgotten.unreadable.push(path.to_owned());
    }
    finish(path, removed, &kept, (forgotten, dry))
}

fn finish(
    path: &Path,
    removed: u64,
    kept: &[u8],
    (forgotten, dry): (&mut Forgotten, bool),
) -> Result<(), Error> {
    if removed == 0 {
        return Ok(());
    }
    forgotten.files.push((path.to_owned(), removed));
    match (dry, kept.is_empty()) {
        (true, _) => Ok(()),
        (false, true) => fs::remove_file(path).map_err(|source| failed(path, source)),
        (false, false) => replace(path, kept).map_err(|source| failed(path, source)),
    }
}

fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let permissions = fs::metadata(path)?.permissions();
    let mut aside =
        tempfile::Builder::new().prefix(".tmp-").permissions(permissions).tempfile_in(folder)?;
    aside.write_all(bytes)?;
    aside.as_file().sync_all()?;
    aside.persist(path).map_err(|error| error.error)?;
    File::open(folder)?.sync_all()
}

/// Lists a folder's files whose names end so. A folder that is not there has none.
fn files(folder: &Path, ending: &str) -> Result<Vec<PathBuf>, Error> {
    listed(folder, |name| name.ends_with(ending) && !name.starts_with('.'))
}

/// Lists what an interrupted writer left in a folder.
fn unfinished(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    listed(folder, |name| name.starts_with(".tmp-"))
}

fn listed(folder: &Path, fits: impl Fn(&str) -> bool) -> Result<Vec<PathBuf>, Error> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(failed(folder, source)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(|source| failed(folder, source))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_file() && fits(&name) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

fn read(path: &Path) -> Result<Vec<u8>, Error> {
    fs::read(path).map_err(|source| failed(path, source))
}

fn failed(path: &Path, source: io::Error) -> Error {
    Error::Folder { path: path.to_owned(), source }
}

//! `oclaw forget`: turns gone from everything that a run has written.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use oclaw::cache::Cache;
use oclaw::journal;
use oclaw::journal::{Forgotten, Remembered, Wanted};
use oclaw::privacy::{
    Found, Inventory, Learned, Left, Pending, Trained, Whose, find, inventory, learned_from,
    remove, remove_file, repeats, still_there,
};
use serde_json::Value;

use crate::asking;
use crate::common::Context;
use crate::report::{Exit, Failure};
use crate::stores;
use crate::visible::visible;

/// Remove a session, a client's turns or one turn from all files of a run
///
/// Looks through folders for every table of turns (Parquet or Arrow), whatever
/// stage wrote it, through the journal and the late feedback of spool folders and,
/// if it is named, the file of kept answers. Each file is replaced at once; one
/// that would be empty is removed; other rows stay as they are. What was
/// interrupted is completed by the same command.
///
/// Stop `oclaw serve` and the stages of the run first: a spool folder that is
/// being served is refused (exit code 2).
///
/// Of `--cache` those answers go that spell words of the turns or are the scores
/// that their rows hold; requests are not kept there. `--clear-cache` removes all
/// answers. Both write the file anew.
///
/// Weights cannot forget: policies that were trained on the turns are listed, and
/// the exit code is 3 if there are any, or if something is left elsewhere or may
/// be: words or ids of the turns in files that are no tables (a report, a log),
/// links to other places, compressed files and archives, what cannot be read, with
/// `--turn` later requests of the session and the turn before it. Each place is named and stays as it is.
/// Links are not followed: give what they point to to `--in` itself. Copies,
/// backups and freed disk blocks are beyond this command.
///
/// A folder of an object store is refused (exit code 2), and one that a run has its
/// shards in is not looked for: copy it to a folder, forget there, then put back the
/// files that changed and delete those that are gone.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    whose: Selected,
    /// Run folders, spool folders or tables
    #[arg(long = "in", value_name = "RUN", required = true, num_args = 1..)]
    runs: Vec<PathBuf>,
    /// File of kept answers to clean, too
    #[arg(long, value_name = "FILE")]
    cache: Option<PathBuf>,
    /// Remove all kept answers, not only those that tell of the turns
    #[arg(long, requires = "cache")]
    clear_cache: bool,
    /// Only tell what would be removed
    #[arg(long)]
    dry_run: bool,
}

#[derive(clap::Args, Debug)]
#[group(required = true, multiple = false)]
struct Selected {
    /// Session to forget
    #[arg(long, value_name = "ID")]
    session: Option<String>,
    /// Client key whose turns to forget
    #[arg(long, value_name = "NAME")]
    client: Option<String>,
    /// Turn to forget
    #[arg(long, value_name = "ID")]
    turn: Option<String>,
}

impl Selected {
    fn whose(self) -> anyhow::Result<Whose> {
        match (self.session, self.client, self.turn) {
            (Some(session), _, _) => Ok(Whose::Session(session)),
            (_, Some(client), _) => Ok(Whose::Client(client)),
            (_, _, Some(turn)) => Ok(Whose::Turn(turn)),
            _ => Err(Failure::usage("name a session, a client or a turn").into()),
        }
    }
}

/// What to do with what is in an object store.
const IN_A_STORE: &str = "copy it to a folder, run this with `--in FOLDER`, then put back \
    the files that changed and delete those that are gone, there and in `--object-cache`";

/// What is removed, file by file, and what cannot be.
#[derive(Default)]
struct Account {
    files: Vec<(PathBuf, u64, &'static str)>,
    policies: Vec<Trained>,
    left: Vec<(PathBuf, String)>,
    repeating: BTreeMap<String, &'static str>,
}

impl Account {
    fn leave(&mut self, places: impl IntoIterator<Item = (PathBuf, Left)>) {
        self.left.extend(places.into_iter().map(|(path, left)| (path, left.to_string())));
    }
}

fn named(whose: &Whose) -> String {
    match whose {
        Whose::Session(session) => format!("session `{}`", visible(session)),
        Whose::Client(client) => format!("client `{}`", visible(client)),
        Whose::Turn(turn) => format!("turn `{}`", visible(turn)),
    }
}

pub(crate) fn run(args: Args, context: &Context) -> anyhow::Result<Exit> {
    let Args { whose, runs, cache, clear_cache, dry_run } = args;
    let whose = whose.whose()?;
    for path in runs.iter().chain(&cache) {
        stores::refuse(path, "turns are forgotten in files of this machine", IN_A_STORE)?;
    }
    let there = inventory(&runs)?;
    // Held to the end: no server may start on a spool that is half done.
    let _held = if dry_run { Vec::new() } else { hold(&there.spools)? };
    let folders: Vec<&PathBuf> = runs.iter().filter(|run| run.is_dir()).collect();
    let found = gather(&there, &whose, &folders)?;
    let mut account = Account::default();
    for policy in &there.policies {
        match learned_from(policy, &found.turn_ids) {
            Ok(Learned { trained: None, refused: 1.. }) => {
                account.leave([(policy.join("oclaw/ledger.parquet"), Left::Ids)]);
            }
            Ok(Learned { trained, .. }) => account.policies.extend(trained),
            Err(error) => account.leave([(policy.clone(), Left::unreadable(&error))]),
        }
    }
    account.leave(there.left.iter().chain(&found.left).cloned());
    if !dry_run {
        let (turn_ids, places) = (found.turn_ids.clone(), found.places.clone());
        let pending = Pending { whose: whose.clone(), turn_ids, places };
        folders.iter().try_for_each(|folder| pending.write(folder))?;
    }
    if let Some(path) = &cache {
        answers(path, (&found, clear_cache), dry_run, &mut account)?;
    }
    tables(&there, (&whose, &found), dry_run, &mut account)?;
    for spool in &there.spools {
        let forgotten = spooled(spool, &whose, &found, dry_run)?;
        account.files.extend(forgotten.files.into_iter().map(|(path, n)| (path, n, "records")));
        let unfinished = forgotten.unfinished.into_iter();
        account.files.extend(unfinished.map(|path| (path, 1, "unfinished file")));
        if let Whose::Turn(_) = whose {
            account.repeating.extend(forgotten.repeating);
        }
        let unreadable = forgotten.unreadable.into_iter();
        let what = "bytes that nobody can read".to_owned();
        account.left.extend(unreadable.map(|path| (path, what.clone())));
    }
    account.leave(still_there(&there.others, &found.texts, &found.ids(&whose))?);
    if !dry_run {
        folders.iter().try_for_each(|folder| Pending::done(folder, &whose))?;
    }
    if account.files.is_empty() && account.policies.is_empty() {
        context.say(format!("nothing of {} was found in what could be read", named(&whose)));
    }
    report(context, &account, dry_run)?;
    let all_gone =
        account.policies.is_empty() && account.left.is_empty() && account.repeating.is_empty();
    Ok(if all_gone { Exit::Done } else { Exit::Partial })
}

fn hold(spools: &[PathBuf]) -> anyhow::Result<Vec<File>> {
    let hold = |spool: &PathBuf| -> anyhow::Result<File> {
        match journal::hold(spool) {
            Err(journal::Error::Locked { path }) => {
                let message = format!("`{}` is being served", path.display());
                Err(Failure::usage(message)
                    .hint("stop `oclaw serve` first, then start it again")
                    .into())
            }
            other => Ok(other?),
        }
    };
    spools.iter().map(hold).collect()
}

/// Finds the turns: in tables, in journals, and in what an interrupted run noted.
fn gather(there: &Inventory, whose: &Whose, folders: &[&PathBuf]) -> anyhow::Result<Found> {
    let mut named = BTreeSet::new();
    let mut places = BTreeSet::new();
    if let Whose::Turn(turn) = whose {
        named.insert(turn.clone());
    }
    for folder in folders {
        if let Some(pending) = Pending::read(folder, whose)? {
            named.extend(pending.turn_ids);
            places.extend(pending.places);
        }
    }
    let mut found = find(&there.tables, whose, &named);
    found.turn_ids.extend(named);
    found.places.extend(places);
    for spool in &there.spools {
        let forgotten = spooled(spool, whose, &found, true)?;
        found.turn_ids.extend(forgotten.turn_ids);
        forgotten.turns.values().for_each(|turn| found.see(turn));
    }
    Ok(found)
}

fn spooled(spool: &Path, whose: &Whose, found: &Found, dry_run: bool) -> anyhow::Result<Forgotten> {
    let turn =
        |known: &Remembered| whose.fits(&known.session_id, known.client.as_deref(), &known.turn_id);
    let feedback = |turn_id: Option<&str>, session: Option<&str>, number: Option<u32>| {
        found.is_about(whose, turn_id, (session, number))
    };
    let wanted = Wanted {
        turn: &turn,
        feedback: &feedback,
        turn_ids: &found.turn_ids,
        texts: &found.texts,
        repeats: &|turn| found.repeated_by(whose, turn),
    };
    Ok(journal::forget(spool, &wanted, dry_run)?)
}

fn tables(
    there: &Inventory,
    (whose, found): (&Whose, &Found),
    dry_run: bool,
    account: &mut Account,
) -> anyhow::Result<()> {
    for (path, rows) in &found.rows {
        let mut what = "rows";
        if !dry_run && remove(path, whose, &found.turn_ids)?.kept == 0 {
            what = "rows, and the file with them";
        }
        account.files.push((path.clone(), *rows, what));
    }
    for path in &there.unfinished {
        if !dry_run {
            remove_file(path)?;
        }
        account.files.push((path.clone(), 1, "unfinished file"));
    }
    if let Whose::Turn(_) = whose {
        let left: Vec<PathBuf> =
            there.tables.iter().filter(|path| path.exists()).cloned().collect();
        account.repeating.extend(repeats(&left, whose, found)?);
    }
    Ok(())
}

/// Cleans the file of kept answers.
fn answers(
    path: &Path,
    (found, all): (&Found, bool),
    dry_run: bool,
    account: &mut Account,
) -> anyhow::Result<()> {
    if !path.is_file() {
        let message = format!("`{}`: there is no file of answers", path.display());
        return Err(Failure::usage(message).into());
    }
    let cache = Cache::open(path)?;
    let removed = cache.forget(|answer| all || tells(answer, found), dry_run)?;
    if removed > 0 {
        account.files.push((path.to_owned(), removed, "answers"));
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    for entry in std::fs::read_dir(folder.unwrap_or(Path::new(".")))? {
        let entry = entry?;
        let beside = entry.file_name().to_string_lossy().into_owned();
        if beside.starts_with(&format!("{name}.damaged-")) {
            account.left.push((entry.path(), "answers set aside as damaged".to_owned()));
        }
    }
    Ok(())
}

/// Tells whether an answer spells words of the turns, or is a score of theirs.
fn tells(answer: &str, found: &Found) -> bool {
    fn any(value: &Value, found: &Found) -> bool {
        match value {
            Value::String(said) => found.texts.iter().any(|text| said.contains(text.as_str())),
            Value::Array(items) => {
                let numbers: Option<Vec<f32>> =
                    items.iter().map(|item| item.as_f64().map(|number| number as f32)).collect();
                let scored =
                    |numbers: Vec<f32>| !numbers.is_empty() && found.log_probs.contains(&numbers);
                numbers.is_some_and(scored) || items.iter().any(|item| any(item, found))
            }
            Value::Object(members) => members.values().any(|member| any(member, found)),
            _ => false,
        }
    }
    match serde_json::from_str(answer) {
        Ok(value) => any(&value, found),
        Err(_) => found.texts.iter().any(|text| answer.contains(text.as_str())),
    }
}

fn report(context: &Context, account: &Account, dry_run: bool) -> anyhow::Result<()> {
    let mut out = BufWriter::new(io::stdout().lock());
    let shown = |path: &Path| visible(&path.display().to_string());
    for (path, count, what) in &account.files {
        writeln!(out, "{}: {count} {what}", shown(path))?;
    }
    for Trained { policy, turns, first_step } in &account.policies {
        let before = first_step.saturating_sub(1);
        writeln!(
            out,
            "{}: trained on {turns} of the turns: retrain from step {before}, or delete it",
            shown(policy)
        )?;
    }
    for (path, what) in &account.left {
        writeln!(out, "{}: left: {}", shown(path), visible(what))?;
    }
    for (turn, how) in &account.repeating {
        writeln!(out, "turn {}: left: {how}", visible(turn))?;
    }
    out.flush()?;
    let rows: u64 = account
        .files
        .iter()
        .filter(|(_, _, what)| what.starts_with("rows"))
        .map(|(_, n, _)| n)
        .sum();
    let mut table = asking::closing_table();
    let removed = if dry_run { "rows to remove" } else { "rows removed" };
    table.add_row(["files touched".to_owned(), account.files.len().to_string()]);
    table.add_row([removed.to_owned(), rows.to_string()]);
    table.add_row(["policies trained on them".to_owned(), account.policies.len().to_string()]);
    let left = account.left.len() + account.repeating.len();
    table.add_row(["places left".to_owned(), left.to_string()]);
    context.conclude(table);
    Ok(())
}

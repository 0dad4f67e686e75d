//! Looking again and again.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::Context as _;
use oclaw::health::Survey;
use oclaw::table::Source;

use super::{Args, Look, show};
use crate::common::Context;
use crate::report::{Exit, Failure};
use crate::run_folder::{self, RunFolder, Subject};

/// Clears a terminal and goes to its top left corner.
const CLEAR: &str = "\u{1b}[2J\u{1b}[H";

/// Looks until a signal comes.
pub(super) fn run(args: &Args, context: &Context, out: &mut impl Write) -> anyhow::Result<Exit> {
    let [folder] = args.inputs.inputs.as_slice() else {
        return Err(Failure::usage("`--live` looks at one folder").into());
    };
    if !folder.is_dir() {
        return Err(Failure::usage(format!("`{}` is no folder", folder.display())).into());
    }
    let mut stop = context.drain_on_signal();
    let mut counted = Counted::default();
    let terminal = io::stdout().is_terminal();
    loop {
        let subject = subject(folder, args.metrics.as_deref())?;
        counted.take_in(subject.richest())?;
        let look = Look { input: None, survey: counted.survey.clone() };
        match args.json {
            true => show::json_line(out, &subject, &look)?,
            false => {
                out.write_all(if terminal { CLEAR.as_bytes() } else { b"" })?;
                show::page(out, &subject, &look)?;
                out.write_all(b"\n")?;
            }
        }
        out.flush()?;
        let stopped = context.block_on(async {
            tokio::select! {
                _ = stop.wait_for(|stopped| *stopped) => true,
                () = tokio::time::sleep(args.every) => false,
            }
        });
        if stopped {
            return Ok(Exit::Done);
        }
    }
}

/// Looks at a folder, and at metrics beside it. Where nothing is finished yet there
/// are no tables, and metrics that no step has been written to are none.
fn subject(folder: &Path, metrics: Option<&Path>) -> anyhow::Result<Subject> {
    let subject = match run_folder::is_run(folder) {
        false => Subject::of_tables(run_folder::tables(folder)?),
        true => Subject::of_run(RunFolder::look(folder)?),
    };
    Ok(match metrics.filter(|path| path.exists()) {
        Some(path) => subject.and_steps(run_folder::read_metrics(path)?),
        None => subject,
    })
}

/// The shards counted so far. A finished shard never changes; if one did, or is
/// gone, or others are looked at, all are counted again.
#[derive(Default)]
struct Counted {
    shards: BTreeMap<PathBuf, (u64, Option<SystemTime>)>,
    survey: Survey,
}

impl Counted {
    fn take_in(&mut self, tables: &[PathBuf]) -> anyhow::Result<()> {
        let mut there = BTreeMap::new();
        for path in tables {
            let reading = || format!("cannot read `{}`", path.display());
            let facts = path.metadata().with_context(reading)?;
            there.insert(path.clone(), (facts.len(), facts.modified().ok()));
        }
        if self.shards.iter().any(|(path, facts)| there.get(path) != Some(facts)) {
            *self = Self::default();
        }
        for (path, facts) in there {
            if self.shards.contains_key(&path) {
                continue;
            }
            let mut source = Source::open(std::slice::from_ref(&path))?;
            while let Some(turns) = source.next_turns()? {
                turns.iter().for_each(|turn| self.survey.add(turn));
            }
            self.shards.insert(path, facts);
        }
        Ok(())
    }
}

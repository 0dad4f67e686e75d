//! `oclaw lint`: every invariant of the schema, checked.

use std::collections::HashMap;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use arrow::array::RecordBatch;
use oclaw::table::Source;
use oclaw::trajectory;
use oclaw::trajectory::Writer;
use oclaw::trajectory::lint::{Finding, Linter};
use oclaw::trajectory::turn;

use crate::common::{Context, Printing as _};
use crate::files::Inputs;
use crate::report::{Exit, Failure};
use crate::run_folder;
use crate::stores::Here;
use crate::visible::visible;

/// Check tables against every invariant of the schema
///
/// One line per finding on standard output, `FILE: row N (session …, turn …):
/// COLUMN: what`, rows counted from 0. Ends with 0 if there is none, 3 if there
/// are some, 1 if a table cannot be read at all.
///
/// IN may also be the folder of a run: all its tables are checked. A turn may stand
/// in the tables of several stages, but only once in those of one: the tables in one
/// folder that the same stage wrote last count as one table, be they many shards.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    inputs: Inputs,
}

/// Tables in which a turn may stand only once: they lie in one folder, and the same
/// stage wrote them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Group {
    folder: PathBuf,
    written_by: Option<Writer>,
    /// The table itself, if it is a stage of a run by its own.
    alone: Option<PathBuf>,
}

/// The linters of all groups, in the order in which they came up.
#[derive(Debug, Default)]
struct Linters {
    known: HashMap<Group, usize>,
    linters: Vec<Linter>,
}

impl Linters {
    fn of(&mut self, group: Group) -> &mut Linter {
        let next = self.linters.len();
        let place = *self.known.entry(group).or_insert(next);
        if place == next {
            self.linters.push(Linter::default());
        }
        &mut self.linters[place]
    }
}

pub(crate) fn run(args: Args, context: &Context) -> anyhow::Result<Exit> {
    let (inputs, lone) = tables(args.inputs.inputs)?;
    let mut source = Here::bring(&inputs, context)?.open(context)?;
    let mut out = BufWriter::new(io::stdout().lock());
    let mut linters = Linters::default();
    let (mut rows, mut faults) = (0, 0);
    while let Some(batch) = source.next_batch()? {
        rows += batch.num_rows();
        let linter = linters.of(group(&source, &lone));
        faults += check(&source, &batch, linter, &mut out)?;
    }
    for finding in linters.linters.into_iter().flat_map(Linter::finish) {
        print(&mut out, &finding).printed()?;
        faults += 1;
    }
    out.flush().printed()?;
    context.say(format_args!("{rows} rows, {faults} findings"));
    match faults {
        0 => Ok(Exit::Done),
        _ => Ok(Exit::Partial),
    }
}

/// Puts the tables of a run in the place of its folder. Returns beside all tables
/// those that lie beside the stages' folders.
fn tables(named: Vec<PathBuf>) -> anyhow::Result<(Vec<PathBuf>, Vec<PathBuf>)> {
    let (mut inputs, mut lone) = (Vec::new(), Vec::new());
    for input in named {
        if !run_folder::is_run(&input) {
            inputs.push(input);
            continue;
        }
        let stages = run_folder::tables_of_run(&input)?;
        if stages.is_empty() {
            return Err(Failure::failed(format!("`{}`: no tables", input.display())).into());
        }
        for (_, tables) in stages {
            lone.extend(tables.iter().filter(|it| it.parent() == Some(&input)).cloned());
            inputs.extend(tables);
        }
    }
    Ok((inputs, lone))
}

fn group(source: &Source, lone: &[PathBuf]) -> Group {
    let input = Path::new(source.place().0);
    Group {
        folder: input.parent().unwrap_or(Path::new("")).to_owned(),
        written_by: source.written_by(),
        alone: lone.iter().any(|it| it == input).then(|| input.to_owned()),
    }
}

/// Checks one batch. If a row of it cannot even be read, that is a finding too,
/// and the others are checked all the same.
fn check(
    source: &Source,
    batch: &RecordBatch,
    linter: &mut Linter,
    out: &mut impl Write,
) -> anyhow::Result<u64> {
    let (input, first) = source.place();
    let mut faults = 0;
    let mut see = |row: u64, turn: &trajectory::Turn| -> io::Result<()> {
        for finding in linter.see(input, row, turn) {
            print(out, &finding)?;
            faults += 1;
        }
        Ok(())
    };
    if let Ok(turns) = turn::read(batch) {
        for (row, turn) in (first..).zip(&turns) {
            see(row, turn).printed()?;
        }
        return Ok(faults);
    }
    let mut unreadable = Vec::new();
    for (row, index) in (first..).zip(0..batch.num_rows()) {
        match turn::read(&batch.slice(index, 1)) {
            Ok(turns) => turns.iter().try_for_each(|turn| see(row, turn)).printed()?,
            Err(error) => unreadable.push((row, error)),
        }
    }
    for (row, error) in &unreadable {
        writeln!(out, "{}: row {row}: {}", visible(input), unreadable_row(error)).printed()?;
    }
    Ok(faults + unreadable.len() as u64)
}

fn unreadable_row(error: &trajectory::Error) -> String {
    use trajectory::Error;
    match error {
        Error::Null { column, .. } => format!("{column}: null and must not be"),
        Error::UnknownWord { column, found, wanted, .. } => {
            format!("{column}: `{}`, wanted one of {wanted}", visible(found))
        }
        Error::MissingColumn { .. } | Error::WrongType { .. } | Error::Arrow { .. } => {
            visible(&error.to_string())
        }
    }
}

fn print(out: &mut impl Write, finding: &Finding) -> io::Result<()> {
    let Finding { input, row, session, turn, fault } = finding;
    writeln!(
        out,
        "{}: row {row} (session {}, turn {turn}): {}: {}",
        visible(input),
        visible(session),
        fault.column,
        visible(&fault.what)
    )
}

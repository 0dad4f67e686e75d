//! `oclaw lint`: every invariant of the schema, checked.

use std::io::{self, BufWriter, Write};

use arrow::array::RecordBatch;
use oclaw::table::Source;
use oclaw::trajectory;
use oclaw::trajectory::lint::{Finding, Linter};
use oclaw::trajectory::turn;

use crate::common::{Context, Printing as _};
use crate::files::Inputs;
use crate::report::Exit;
use crate::visible::visible;

/// Check tables against every invariant of the schema
///
/// One line per finding on standard output, `FILE: row N (session …, turn …):
/// COLUMN: what`, rows counted from 0. Ends with 0 if there is none, 3 if there
/// are some, 1 if a table cannot be read at all.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    inputs: Inputs,
}

pub(crate) fn run(args: Args, context: &Context) -> anyhow::Result<Exit> {
    let mut source = args.inputs.open()?;
    let mut out = BufWriter::new(io::stdout().lock());
    let mut linter = Linter::default();
    let (mut rows, mut faults) = (0, 0);
    while let Some(batch) = source.next_batch()? {
        rows += batch.num_rows();
        faults += check(&source, &batch, &mut linter, &mut out)?;
    }
    for finding in linter.finish() {
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

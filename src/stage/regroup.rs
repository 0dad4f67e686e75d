//! The stage that looks at all turns before it notes one.

use super::columns::{self, Layout};
use super::pieces::in_order;
use super::{Error, Existing, Output, Plan, READ_AHEAD, Tally};
use crate::table::{Encoded, Encoding, Sink, Source, Splice};
use crate::trajectory::Turn;

/// Reads turns twice. The first pass keeps what `look` makes of each, in order;
/// `survey` gets all of it and returns the function that notes each turn in the second
/// pass, and counts it in an `S`. `watch` gets the state of affairs and the counts now
/// and then, in order.
///
/// Of Parquet files that become a Parquet file only the columns are read that the plan
/// names, and all but the stage's own are copied as they are, row groups in parallel;
/// of anything else, batch after batch. Memory holds a few batches, and what `look`
/// keeps.
pub fn regroup<L, N, S>(
    mut source: Source,
    output: &Output,
    plan: &Plan,
    (look, survey): (impl Fn(Turn) -> L + Sync, impl FnOnce(Vec<L>) -> Result<N, Error>),
    watch: &mut dyn FnMut(&Tally, S),
) -> Result<Tally, Error>
where
    L: Send,
    N: Fn(Turn, &mut S) -> Turn + Sync,
    S: Default + Send,
{
    let layout = Layout::plan(&source, plan)?;
    source.hold()?;
    let mut splice = splice(&source, plan, &layout)?;
    let mut looked = Vec::new();
    match &splice {
        Some(splice) => in_order(
            splice.groups(),
            |group| {
                let mut found = Vec::new();
                each_slice(splice, group, |turns| {
                    found.extend(turns.into_iter().map(&look));
                    Ok(())
                })?;
                Ok::<_, Error>(found)
            },
            |found| {
                looked.extend(found);
                Ok(())
            },
        )?,
        None => {
            while let Some(batch) = source.next_batch()? {
                for start in (0..batch.num_rows()).step_by(READ_AHEAD) {
                    let end = batch.num_rows().min(start + READ_AHEAD);
                    looked.extend(source.read_rows(&batch, start..end)?.into_iter().map(&look));
                }
            }
            source.rewind()?;
        }
    }
    if let Some(splice) = &mut splice {
        splice.narrow(&[plan.reads, &layout.own()].concat());
    }
    let pass = Pass { note: survey(looked)?, plan, layout };
    pass.run(source, splice, output, watch)
}

/// Opens the row groups, if the plan says which columns are enough and the input is of
/// the right kind.
fn splice(source: &Source, plan: &Plan, layout: &Layout) -> Result<Option<Splice>, Error> {
    if plan.reads.is_empty() {
        return Ok(None);
    }
    let own = layout.own();
    let reads = [plan.reads, plan.looks, &own].concat();
    Ok(source.splice(&reads, (&layout.schema(), &own))?)
}

/// Reads a row group, some turns at a time.
fn each_slice(
    splice: &Splice,
    group: usize,
    mut take: impl FnMut(Vec<Turn>) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut reading = splice.read(group)?;
    while let Some(turns) = reading.next_turns()? {
        take(turns)?;
    }
    Ok(())
}

/// The second pass.
struct Pass<'a, N> {
    note: N,
    plan: &'a Plan,
    layout: Layout,
}

impl<N> Pass<'_, N> {
    fn run<S: Default + Send>(
        &self,
        mut source: Source,
        splice: Option<Splice>,
        output: &Output,
        watch: &mut dyn FnMut(&Tally, S),
    ) -> Result<Tally, Error>
    where
        N: Fn(Turn, &mut S) -> Turn + Sync,
    {
        let mut provenance = source.provenance().clone();
        provenance.lines.extend(self.plan.line.clone());
        let (schema, target) = (self.layout.schema(), (&output.target, output.format));
        let mut tally = Tally::default();
        let mut count = |more: Tally, counts: S| {
            tally.rows += more.rows;
            tally.kept += more.kept;
            tally.failed += more.failed;
            watch(&tally, counts);
        };
        let (mut sink, encoding) = match &splice {
            Some(splice) => Sink::create_beside(target, (schema, splice), &provenance)?,
            None => (Sink::create(target.0, target.1, schema, &provenance)?, None),
        };
        if let (Some(splice), Some(encoding)) = (&splice, &encoding) {
            let mut group = 0;
            in_order(
                splice.groups(),
                |group| self.group(splice, encoding, group),
                |(encoded, more, counts)| {
                    sink.append(splice, group, encoded)?;
                    group += 1;
                    count(more, counts);
                    Ok(())
                },
            )?;
        } else {
            while let Some(batch) = source.next_batch()? {
                let (mut more, mut counts) = Default::default();
                let turns = self.notes(source.read(&batch)?, &mut more, &mut counts);
                sink.write(&self.layout.apply(&batch, &turns)?)?;
                count(more, counts);
            }
        }
        sink.finish()?;
        Ok(tally)
    }

    /// Makes the new columns of a row group.
    fn group<S: Default>(
        &self,
        splice: &Splice,
        encoding: &Encoding,
        group: usize,
    ) -> Result<(Encoded, Tally, S), Error>
    where
        N: Fn(Turn, &mut S) -> Turn,
    {
        let (mut tally, mut counts) = Default::default();
        let mut columns = encoding.start(splice, group)?;
        each_slice(splice, group, |turns| {
            let turns = self.notes(turns, &mut tally, &mut counts);
            Ok(columns.write(&self.layout.build(&turns)?)?)
        })?;
        Ok((columns.finish()?, tally, counts))
    }

    fn notes<S>(&self, turns: Vec<Turn>, tally: &mut Tally, counts: &mut S) -> Vec<Turn>
    where
        N: Fn(Turn, &mut S) -> Turn,
    {
        let writer = self.plan.writer;
        let mut note = |turn: Turn| {
            tally.rows += 1;
            if self.plan.existing == Existing::Fill && !columns::due(writer, &turn) {
                tally.kept += 1;
                return turn;
            }
            let turn = (self.note)(turn, counts);
            tally.failed += u64::from(columns::failed(writer, &turn));
            turn
        };
        turns.into_iter().map(&mut note).collect()
    }
}

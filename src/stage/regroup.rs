//! The stage that looks at all turns before it notes one.

use super::columns::{self, Layout};
use super::pieces::in_order;
use super::{Error, Existing, Output, Plan, READ_AHEAD, Tally};
use crate::table::{Encoded, Encoding, Sink, Source, Splice};
use crate::trajectory::Turn;

/// What [`regroup`] makes of turns. `K` is what is kept of each until all are known, `V`
/// what all together decide, and `S` what is counted.
pub struct Rules<P, L, D, N, S> {
    /// Makes `K` of a turn that has only the plan's `peeks`: what is most likely.
    pub suppose: P,
    /// Makes `K` of a turn.
    pub look: L,
    /// Makes `V` of all `K`, in the order of the rows.
    pub decide: D,
    /// Notes a turn, knowing `V`, and counts it. Makes its `K`, too.
    pub note: N,
    /// Adds counts to others.
    pub merge: fn(&mut S, S),
}

/// Notes turns of which each depends on all.
///
/// Of Parquet files that become a Parquet file only the columns are read that the plan
/// names, and all but the stage's own are copied as they are, row groups in parallel.
/// There the heavy columns are read once, if the plan has light ones to peek at: these
/// tell what is to be supposed of each row, turns are noted by what that decides, and what
/// was seen of them meanwhile decides anew. If that is something else, what was written
/// is dropped, and turns are noted once more, by what is now known.
///
/// Anything else is read twice, batch after batch. Memory holds a few batches, and what
/// is kept of each turn. `watch` gets the state of affairs now and then.
pub fn regroup<K, V, S>(
    mut source: Source,
    output: &Output,
    plan: &Plan,
    rules: Rules<
        impl Fn(Turn) -> K + Sync,
        impl Fn(Turn) -> K + Sync,
        impl Fn(Vec<K>) -> Result<V, Error>,
        impl Fn(&mut Turn, &V, &mut S) -> K + Sync,
        S,
    >,
    watch: &mut dyn FnMut(&Tally),
) -> Result<(Tally, S), Error>
where
    K: Send,
    V: PartialEq + Sync,
    S: Default + Send,
{
    let layout = Layout::plan(&source, plan)?;
    source.hold()?;
    let mut splice = splice(&source, plan, &layout)?;
    // What has gone down a pipe is not taken back.
    let again = output.target.is_a_file() && !plan.peeks.is_empty();
    let (decided, supposed) = match &mut splice {
        Some(splice) if again => {
            splice.narrow(plan.peeks);
            let supposed = look_at(splice, &rules.suppose)?;
            splice.narrow(&[plan.reads, &layout.own()].concat());
            ((rules.decide)(supposed)?, true)
        }
        Some(splice) => ((rules.decide)(look_at(splice, &rules.look)?)?, false),
        None => {
            let mut looked = Vec::new();
            while let Some(batch) = source.next_batch()? {
                for start in (0..batch.num_rows()).step_by(READ_AHEAD) {
                    let end = batch.num_rows().min(start + READ_AHEAD);
                    let turns = source.read_rows(&batch, start..end)?;
                    looked.extend(turns.into_iter().map(&rules.look));
                }
            }
            source.rewind()?;
            ((rules.decide)(looked)?, false)
        }
    };
    let Rules { look, note, merge, .. } = &rules;
    let mut pass = Pass { look, note, merge: *merge, decided, plan, layout, output };
    let mut done = pass.run(&mut source, splice.as_ref(), watch)?;
    if supposed {
        let decided = (rules.decide)(std::mem::take(&mut done.looked))?;
        if decided != pass.decided {
            pass.decided = decided;
            source.rewind()?;
            // A sink that is dropped leaves nothing.
            drop(done);
            done = pass.run(&mut source, splice.as_ref(), watch)?;
        }
    }
    done.sink.finish()?;
    Ok((done.tally, done.counts))
}

/// Opens the row groups, if the plan says which columns are enough and the input is of
/// the right kind.
fn splice(source: &Source, plan: &Plan, layout: &Layout) -> Result<Option<Splice>, Error> {
    if plan.reads.is_empty() {
        return Ok(None);
    }
    let own = layout.own();
    let mut splice = source.splice(&[plan.reads, &own].concat(), (&layout.schema(), &own))?;
    if let Some(splice) = splice.as_mut().filter(|_| plan.trusts_prompts) {
        splice.trust_prompts();
    }
    Ok(splice)
}

/// Looks at the turns of all row groups, in order.
fn look_at<K: Send>(splice: &Splice, look: &(impl Fn(Turn) -> K + Sync)) -> Result<Vec<K>, Error> {
    let mut looked = Vec::new();
    in_order(
        splice.groups(),
        |group| {
            let mut found = Vec::new();
            each_slice(splice, group, |turns| {
                found.extend(turns.into_iter().map(look));
                Ok(())
            })?;
            Ok::<_, Error>(found)
        },
        |found| {
            looked.extend(found);
            Ok(())
        },
    )?;
    Ok(looked)
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

/// The pass that notes.
struct Pass<'a, L, N, V, S> {
    look: &'a L,
    note: &'a N,
    merge: fn(&mut S, S),
    decided: V,
    plan: &'a Plan,
    layout: Layout,
    output: &'a Output,
}

/// A table that is written and not finished.
struct Done<K, S> {
    sink: Sink,
    tally: Tally,
    counts: S,
    looked: Vec<K>,
}

/// What became of some turns.
struct Noted<K, S> {
    tally: Tally,
    counts: S,
    looked: Vec<K>,
}

impl<K, S: Default> Noted<K, S> {
    fn new() -> Self {
        Self { tally: Tally::default(), counts: S::default(), looked: Vec::new() }
    }
}

impl<K, S> Done<K, S> {
    fn add(&mut self, more: Noted<K, S>, merge: fn(&mut S, S)) {
        self.tally.rows += more.tally.rows;
        self.tally.kept += more.tally.kept;
        self.tally.failed += more.tally.failed;
        merge(&mut self.counts, more.counts);
        self.looked.extend(more.looked);
    }
}

impl<L, N, V: Sync, S: Default + Send> Pass<'_, L, N, V, S> {
    fn run<K: Send>(
        &self,
        source: &mut Source,
        splice: Option<&Splice>,
        watch: &mut dyn FnMut(&Tally),
    ) -> Result<Done<K, S>, Error>
    where
        L: Fn(Turn) -> K + Sync,
        N: Fn(&mut Turn, &V, &mut S) -> K + Sync,
    {
        let mut provenance = source.provenance().clone();
        provenance.lines.extend(self.plan.line.clone());
        let (schema, target) = (self.layout.schema(), (&self.output.target, self.output.format));
        let (sink, encoding) = match splice {
            Some(splice) => Sink::create_beside(target, (schema, splice), &provenance)?,
            None => (Sink::create(target.0, target.1, schema, &provenance)?, None),
        };
        let (tally, counts, looked) = Default::default();
        let mut done = Done { sink, tally, counts, looked };
        if let (Some(splice), Some(encoding)) = (splice, &encoding) {
            let mut group = 0;
            in_order(
                splice.groups(),
                |group| self.group(splice, encoding, group),
                |(encoded, noted)| {
                    done.sink.append(splice, group, encoded)?;
                    group += 1;
                    done.add(noted, self.merge);
                    watch(&done.tally);
                    Ok(())
                },
            )?;
        } else {
            while let Some(batch) = source.next_batch()? {
                let mut noted = Noted::new();
                let mut turns = source.read(&batch)?;
                self.notes(&mut turns, &mut noted);
                done.sink.write(&self.layout.apply(&batch, &turns)?)?;
                done.add(noted, self.merge);
                watch(&done.tally);
            }
        }
        Ok(done)
    }

    /// Makes the new columns of a row group.
    fn group<K>(
        &self,
        splice: &Splice,
        encoding: &Encoding,
        group: usize,
    ) -> Result<(Encoded, Noted<K, S>), Error>
    where
        L: Fn(Turn) -> K,
        N: Fn(&mut Turn, &V, &mut S) -> K,
    {
        let mut noted = Noted::new();
        let mut columns = encoding.start(splice, group)?;
        each_slice(splice, group, |mut turns| {
            self.notes(&mut turns, &mut noted);
            Ok(columns.write(&self.layout.build(&turns)?)?)
        })?;
        Ok((columns.finish()?, noted))
    }

    fn notes<K>(&self, turns: &mut [Turn], noted: &mut Noted<K, S>)
    where
        L: Fn(Turn) -> K,
        N: Fn(&mut Turn, &V, &mut S) -> K,
    {
        let writer = self.plan.writer;
        for turn in turns {
            noted.tally.rows += 1;
            if self.plan.existing == Existing::Fill && !columns::due(writer, turn) {
                noted.tally.kept += 1;
                noted.looked.push((self.look)(turn.clone()));
                continue;
            }
            noted.looked.push((self.note)(turn, &self.decided, &mut noted.counts));
            noted.tally.failed += u64::from(columns::failed(writer, turn));
        }
    }
}

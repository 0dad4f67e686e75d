//! The loop of a stage: read turns, note something about each, write them all.
//!
//! There are two shapes and no trait. [`annotate`] asks one question per turn,
//! several at once; [`regroup`] looks at all turns before it notes one. Both keep
//! the order of the rows and every column they do not write. Absent on purpose:
//! what is asked, of whom, and what an answer means.

mod columns;
mod pieces;
mod regroup;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use arrow::array::RecordBatch;
use futures_util::{StreamExt, stream};

use crate::table;
use crate::table::{Format, Sink, Source, StageLine, Target, Usage};
use crate::trajectory;
use crate::trajectory::{Turn, Writer};
use columns::Layout;
pub use regroup::{Rules, regroup};

/// Most bytes of a batch of [`annotate`], which holds as many of them as the turns
/// under way span.
const BATCH_BYTES: usize = 4 << 20;
/// So many rows become turns together, which weigh more than the rows.
const READ_AHEAD: usize = 32;

/// What to do when the stage's columns are there already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Existing {
    /// Refuse to run.
    #[default]
    Refuse,
    /// Compute them again for every row.
    Replace,
    /// Compute them for rows that have no note yet, or whose note failed.
    Fill,
}

/// What a stage does to a table, beside the note itself.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The stage, which is the writer of the columns to fill.
    pub writer: Writer,
    /// What to do when they are there already.
    pub existing: Existing,
    /// How many notes may be under way at once; at least 1.
    pub at_once: usize,
    /// Columns without which the stage has nothing to work on.
    pub needs: &'static [&'static str],
    /// Columns that the note looks at, beside those that it writes: no others need be
    /// read where the rest can be copied. Nothing means all.
    pub reads: &'static [&'static str],
    /// Light columns from which [`regroup`] may suppose what is kept of a turn. Nothing
    /// means that it cannot be supposed.
    pub peeks: &'static [&'static str],
    /// Of a prompt is only asked whether it has ids, and none below 0: where a file of
    /// ours says so of all its prompts, they need not be read, and turns have a single id
    /// 0 in their place.
    pub trusts_prompts: bool,
    /// Columns of an earlier stage that the note of [`regroup`] may mend.
    pub mends: &'static [&'static str],
    /// What the file shall say about this run.
    pub line: Option<StageLine>,
    /// What the stage asks of others, counted by its note: the line's last word.
    pub usage: Option<Arc<Mutex<Usage>>>,
}

impl Plan {
    /// Returns the plan of a stage that refuses to run twice, one turn at a time.
    pub fn new(writer: Writer) -> Self {
        Self {
            writer,
            existing: Existing::Refuse,
            at_once: 1,
            needs: &[],
            reads: &[],
            peeks: &[],
            trusts_prompts: false,
            mends: &[],
            line: None,
            usage: None,
        }
    }
}

/// Where a stage's table goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// File or standard output.
    pub target: Target,
    /// Format; else the one that suits the target.
    pub format: Option<Format>,
}

/// What a stage has done so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tally {
    /// Rows noted or left as they were.
    pub rows: u64,
    /// Rows that had their note already (`Existing::Fill`).
    pub kept: u64,
    /// Rows whose note was tried and failed: the stage's error column says why.
    pub failed: u64,
}

/// What can go wrong around a note; what goes wrong in one is the note's own
/// business and ends up in its error column.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The table cannot be read or written.
    #[error(transparent)]
    Table(#[from] table::Error),
    /// The stage has run on this table before.
    #[error("column `{column}` is there already: `{stage}` has run on this table")]
    ColumnExists {
        /// The first such column.
        column: &'static str,
        /// The stage that writes it.
        stage: &'static str,
    },
    /// A stage that has to come first has not run.
    #[error("there is no column `{column}`: run `oclaw {stage}` first")]
    ColumnMissing {
        /// The column.
        column: &'static str,
        /// The stage that writes it.
        stage: &'static str,
    },
    /// A note lacks a value that the schema demands.
    #[error("the note of a turn cannot be stored")]
    Note {
        /// What is wrong with it.
        source: trajectory::Error,
    },
}

/// Reads turns, lets `note` fill each one's columns, several at once, and writes
/// them in the order they came. `note` gets a turn and returns it; whatever it
/// changes outside the plan's own columns is not written. Memory holds the turns
/// under way, the batches they span, the notes of these, and what the sink has not
/// written yet, however long the table is.
pub async fn annotate(
    mut source: Source,
    output: &Output,
    plan: &Plan,
    note: impl AsyncFn(Turn) -> Turn,
    watch: &dyn Fn(&Tally),
) -> Result<Tally, Error> {
    let layout = Layout::plan(&source, plan)?;
    let mut writing = Writing::start(&source, output, plan, layout)?;
    source.in_batches_of(BATCH_BYTES);
    let rows = Rows { source: RefCell::new(source), batches: RefCell::default() };
    let kept = Cell::new(0);
    let mut noted = stream::iter(rows.turns())
        .map(|turn| async {
            let turn = turn?;
            if plan.existing == Existing::Fill && !columns::due(plan.writer, &turn) {
                kept.set(kept.get() + 1);
                return Ok(turn.only(plan.writer));
            }
            Ok::<_, Error>(note(turn).await.only(plan.writer))
        })
        .buffered(plan.at_once.max(1));
    let mut done = Vec::new();
    while let Some(turn) = noted.next().await {
        done.push(turn?);
        writing.count(done.last(), kept.get(), watch);
        if let Some(batch) = rows.finished(done.len()) {
            writing.write(&batch, &done)?;
            done.clear();
        }
    }
    drop(noted);
    writing.finish(plan)
}

/// Reads turns and shows `look` each one that [`annotate`] would note. Nothing is
/// written.
pub async fn survey(
    mut source: Source,
    plan: &Plan,
    mut look: impl AsyncFnMut(Turn),
) -> Result<Tally, Error> {
    Layout::plan(&source, plan)?;
    let mut tally = Tally::default();
    while let Some(batch) = source.next_batch()? {
        for turn in source.read(&batch)? {
            tally.rows += 1;
            if plan.existing == Existing::Fill && !columns::due(plan.writer, &turn) {
                tally.kept += 1;
            } else {
                look(turn).await;
            }
        }
    }
    Ok(tally)
}

/// The rows of a source, one by one, with the batches they came in.
struct Rows {
    source: RefCell<Source>,
    /// Batches of which not every row is done.
    batches: RefCell<VecDeque<RecordBatch>>,
}

impl Rows {
    /// Returns the turns. Batches are read, and their rows made turns, when they are
    /// needed, so no more of them are held than the turns under way span.
    fn turns(&self) -> impl Iterator<Item = Result<Turn, Error>> {
        let mut waiting = Vec::new().into_iter();
        let mut rest = None;
        let mut ended = false;
        std::iter::from_fn(move || {
            while !ended {
                if let Some(turn) = waiting.next() {
                    return Some(Ok(turn));
                }
                match self.next_rows(&mut rest) {
                    Ok(Some(turns)) => waiting = turns.into_iter(),
                    Ok(None) => ended = true,
                    Err(error) => {
                        ended = true;
                        return Some(Err(error));
                    }
                }
            }
            None
        })
    }

    /// Returns some more turns. `rest` is the batch that they are taken from, and its
    /// first row that is none yet.
    fn next_rows(
        &self,
        rest: &mut Option<(RecordBatch, usize)>,
    ) -> Result<Option<Vec<Turn>>, Error> {
        let mut source = self.source.borrow_mut();
        let (batch, from) = match rest.take() {
            Some(rest) => rest,
            None => {
                let Some(batch) = source.next_batch()? else {
                    return Ok(None);
                };
                self.batches.borrow_mut().push_back(batch.clone());
                (batch, 0)
            }
        };
        let end = batch.num_rows().min(from + READ_AHEAD);
        let turns = source.read_rows(&batch, from..end)?;
        *rest = (end < batch.num_rows()).then_some((batch, end));
        Ok(Some(turns))
    }

    /// Returns the oldest batch if all its rows are done.
    fn finished(&self, done: usize) -> Option<RecordBatch> {
        let mut batches = self.batches.borrow_mut();
        match batches.front() {
            Some(batch) if batch.num_rows() == done => batches.pop_front(),
            _ => None,
        }
    }
}

/// A stage's output under way.
struct Writing {
    sink: Sink,
    layout: Layout,
    tally: Tally,
}

impl Writing {
    fn start(source: &Source, output: &Output, plan: &Plan, layout: Layout) -> Result<Self, Error> {
        let mut provenance = source.provenance().clone();
        provenance.lines.extend(plan.line.clone());
        let schema = layout.schema();
        let sink = Sink::create(&output.target, output.format, schema, &provenance)?;
        Ok(Self { sink, layout, tally: Tally::default() })
    }

    fn count(&mut self, turn: Option<&Turn>, kept: u64, watch: &dyn Fn(&Tally)) {
        self.tally.rows += 1;
        self.tally.kept = kept;
        let failed = turn.is_some_and(|turn| columns::failed(self.layout.writer(), turn));
        self.tally.failed += u64::from(failed);
        watch(&self.tally);
    }

    fn write(&mut self, batch: &RecordBatch, turns: &[Turn]) -> Result<(), Error> {
        self.sink.write(&self.layout.apply(batch, turns)?)?;
        Ok(())
    }

    fn finish(mut self, plan: &Plan) -> Result<Tally, Error> {
        if let (Some(usage), Some(_)) = (&plan.usage, &plan.line) {
            self.sink.note_usage(&usage.lock().unwrap_or_else(PoisonError::into_inner));
        }
        self.sink.finish()?;
        Ok(self.tally)
    }
}

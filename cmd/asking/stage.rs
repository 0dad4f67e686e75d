//! What all stages that ask about each turn do alike: one table or a followed
//! folder, connecting, a dry run, the bar, the closing table.

use std::cell::RefCell;

use comfy_table::Table;
use oclaw::stage::{self, Output, Tally};
use oclaw::table::Source;
use oclaw::trajectory::{Turn, Writer};
use serde_json::Value;

use super::{Asker, Asking, Calls};
use crate::common::Context;
use crate::files::Files;
use crate::follow::{Counting, Worked};
use crate::progress;
use crate::report::Exit;

/// A stage that asks somebody about a turn, or decides by itself.
pub(crate) trait Asks {
    /// What it counts.
    type Counts: Clone + Default;

    /// Whose columns it fills.
    const WRITER: Writer;

    /// Tells whether it asks anybody at all.
    fn asks(&self) -> bool;

    /// Returns what it would ask about a turn, if anything.
    fn question(&self, turn: &Turn) -> Option<Vec<Value>>;

    /// Fills its columns of a turn.
    async fn note(&self, turn: Turn, by: &By<'_, Self>) -> Turn;

    /// Tells how many turns got what the stage gives.
    fn noted(counts: &Self::Counts) -> u64;

    /// Adds what it counted to a closing table that begins with the number of turns.
    fn rows(counts: &Self::Counts, tally: &Tally, calls: Option<&Calls>, table: &mut Table);
}

/// A stage at work.
pub(crate) struct By<'a, S: Asks + ?Sized> {
    stage: &'a S,
    files: &'a Files,
    context: &'a Context,
    pub(crate) asker: Option<Asker<'a>>,
    pub(crate) counts: RefCell<S::Counts>,
}

/// Does a stage: a table, or shard after shard of a folder.
pub(crate) async fn run<S: Asks>(
    stage: &S,
    (files, asking): (&Files, &Asking),
    context: &Context,
) -> anyhow::Result<Exit> {
    if asking.budget.dry_run {
        return foretell(stage, (files, asking), context).await;
    }
    let by = |asker| By { stage, files, context, asker, counts: RefCell::default() };
    let Some(route) = files.route(context)? else {
        let source = files.open(context)?;
        let asker = match stage.asks() {
            true => Some(asking.connect(context, true).await?),
            false => None,
        };
        let by = by(asker);
        let output = files.output();
        let table = by.table(source, &output);
        let done = match &by.asker {
            Some(asker) => asker.absent.unless_needed(table).await,
            None => table.await,
        };
        let table = by.finish().await;
        let tally = done?;
        context.conclude(table(&tally));
        return Ok(if tally.failed > 0 { Exit::Partial } else { Exit::Done });
    };
    let asker = match stage.asks() {
        false => None,
        true => match asking.connect_for(&route, context).await? {
            None => return Ok(Exit::Done),
            asker => asker,
        },
    };
    let by = by(asker);
    let shard = async |source, output: &Output| by.shard(source, output).await;
    let spent = || by.asker.as_ref().is_some_and(Asker::is_spent);
    let followed = route.run(shard, spent).await;
    let table = by.finish().await;
    let followed = followed?;
    let table = table(&followed.tally);
    route.conclude(followed, table)
}

/// Says what a stage would come to.
async fn foretell<S: Asks>(
    stage: &S,
    (files, asking): (&Files, &Asking),
    context: &Context,
) -> anyhow::Result<Exit> {
    let source = files.open_to_look(context)?;
    let plan = files.plan(context, S::WRITER, &source)?;
    let mut forecast = asking.forecast(context).await?;
    let look = async |turn: Turn| {
        if let Some(question) = stage.question(&turn).filter(|_| stage.asks()) {
            forecast.add(&question);
        }
    };
    let tally = stage::survey(source, &plan, look).await?;
    forecast.print(&tally)?;
    Ok(Exit::Done)
}

impl<'a, S: Asks> By<'a, S> {
    /// Prepares to note turns outside a table.
    pub(crate) fn aside(
        stage: &'a S,
        files: &'a Files,
        context: &'a Context,
        asker: Option<Asker<'a>>,
    ) -> Self {
        Self { stage, files, context, asker, counts: RefCell::default() }
    }

    async fn table(&self, source: Source, output: &Output) -> anyhow::Result<Tally> {
        let mut plan = self.files.plan(self.context, S::WRITER, &source)?;
        if let Some(asker) = &self.asker {
            plan.at_once = asker.at_once;
            asker.count_into(&mut plan);
        }
        let bar = progress::bar(self.context, &self.context.command, source.total_rows());
        let watch = |tally: &Tally| bar.set_position(tally.rows);
        let note = async |turn| self.stage.note(turn, self).await;
        let done = stage::annotate(source, output, &plan, note, &watch).await;
        bar.finish_and_clear();
        Ok(done?)
    }

    async fn shard(&self, source: Source, output: &Output) -> anyhow::Result<Worked> {
        let counting = Counting::start(&self.counts);
        let table = self.table(source, output);
        let tally = match &self.asker {
            None => Ok(table.await?),
            Some(asker) => asker.attend(table).await?,
        };
        Ok(match tally {
            Ok(tally) => counting.settle(tally, S::noted),
            Err(reason) => Worked::Away(reason),
        })
    }

    /// Ends the connection and returns what makes the closing table.
    pub(crate) async fn finish(self) -> impl Fn(&Tally) -> Table + use<'a, S> {
        let calls = match self.asker {
            Some(asker) => Some(asker.finish().await),
            None => None,
        };
        let counts = self.counts.into_inner();
        move |tally: &Tally| {
            let mut table = super::closing_table();
            table.add_row(["turns".to_owned(), tally.rows.to_string()]);
            if tally.kept > 0 {
                table.add_row(["  noted before".to_owned(), tally.kept.to_string()]);
            }
            S::rows(&counts, tally, calls.as_ref(), &mut table);
            if let Some(calls) = &calls {
                calls.rows(&mut table);
            }
            table
        }
    }
}

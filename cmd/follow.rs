//! `--follow`: a stage that does the shards of a folder as they come, and goes on
//! until it is told to stop.

mod args;
mod counting;
mod failures;
mod incoming;
mod outgoing;
mod waiting;

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::Path;
use std::time::{Duration, Instant};

use comfy_table::Table;
use oclaw::stage::{Output, Tally};
use oclaw::store::Address;
use oclaw::table::{Shard, Source, Stamp, Target};
use tokio::sync::watch;

use crate::common::Context;
use crate::report::{self, Exit, Failure};
pub(crate) use args::{FollowArgs, interval};
pub(crate) use counting::Counting;
pub(crate) use failures::{Failures, is_ours, is_taken};
pub(crate) use incoming::Incoming;
pub(crate) use outgoing::Outgoing;
pub(crate) use waiting::{longer, signalled, sleep, unless_signalled};

/// From which folder into which, and when to stop.
pub(crate) struct Route<'a> {
    args: &'a FollowArgs,
    context: &'a Context,
    input: &'a Path,
    out: Outgoing,
    signal: watch::Receiver<bool>,
}

/// What became of a shard that did not fail.
pub(crate) enum Worked {
    /// It is written. Of its rows so many got what the stage gives.
    Done(Tally, u64),
    /// Whom the stage asks is away, for this reason; nothing is written.
    Away(String),
}

/// What a run came to.
#[derive(Default)]
pub(crate) struct Followed {
    pub(crate) tally: Tally,
    shards: u64,
    failed: u64,
    end: Option<End>,
}

/// Why a run ended.
enum End {
    /// A signal told it to.
    Signal,
    /// Nothing is left to do (`--once`).
    Finished,
    /// A budget is spent.
    Spent,
    /// Whom the stage asks is away, and nobody waits (`--once`).
    Away(String),
}

impl<'a> Route<'a> {
    /// Prepares to follow `input` into `output`, which belongs to this process from
    /// now on. The first signal ends the run between two shards, or drops the one
    /// at hand.
    pub(crate) fn open(
        args: &'a FollowArgs,
        context: &'a Context,
        input: &'a Path,
        output: &'a Path,
    ) -> anyhow::Result<Self> {
        let same = match (Address::of(input)?, Address::of(output)?) {
            (None, None) => {
                matches!((input.canonicalize(), output.canonicalize()), (Ok(one), Ok(two)) if one == two)
            }
            (from, to) => from == to,
        };
        if same {
            let problem = format!("`{}` cannot be followed into itself", input.display());
            return Err(Failure::usage(problem).into());
        }
        Incoming::open(context, input)?;
        let out = Outgoing::open(context, output)?;
        let signal = context.drain_on_signal();
        Ok(Self { args, context, input, out, signal })
    }

    /// Returns how often a shard is tried.
    pub(crate) fn tries(&self) -> u32 {
        self.args.shard_tries
    }

    /// Connects to whom the stage asks, waiting as long as it is away. Returns
    /// nothing if a signal ended the wait.
    pub(crate) async fn patiently<T>(
        &self,
        connect: impl AsyncFn() -> anyhow::Result<T>,
    ) -> anyhow::Result<Option<T>> {
        let mut pause = self.args.poll;
        let mut said = false;
        loop {
            let Some(connected) = unless_signalled(&self.signal, connect()).await else {
                return Ok(None);
            };
            match connected {
                Err(error) if report::is_away(&error) && !self.args.once => {
                    if !said {
                        self.context.say(format!("{}: waiting for it", report::told(&error)));
                        said = true;
                    }
                }
                connected => return connected.map(Some),
            }
            if !sleep(&self.signal, pause).await {
                return Ok(None);
            }
            pause = longer(pause);
        }
    }

    /// Lets `work` do shard after shard, each into a file of the same name, until a
    /// signal comes or `spent` says that a budget is.
    pub(crate) async fn run(
        &self,
        mut work: impl AsyncFnMut(Source, &Output) -> anyhow::Result<Worked>,
        spent: impl Fn() -> bool,
    ) -> anyhow::Result<Followed> {
        let mut run = Run {
            route: self,
            incoming: Incoming::open(self.context, self.input)?,
            listed: HashMap::new(),
            away: false,
            seen: false,
            lost: false,
            followed: Followed::default(),
        };
        loop {
            let due = match tokio::select! {
                biased;
                () = signalled(&self.signal) => return Ok(run.end(End::Signal)),
                due = run.look() => due,
            } {
                Ok(due) => due,
                Err(error) => match run.weigh(error)? {
                    Some(end) => return Ok(run.end(end)),
                    None => Vec::new(),
                },
            };
            if due.is_empty() {
                if self.args.once {
                    return Ok(run.end(End::Finished));
                }
                if !sleep(&self.signal, self.args.poll).await {
                    return Ok(run.end(End::Signal));
                }
            }
            let looked = Instant::now();
            for shard in due {
                if let Some(end) = run.shard(&shard, &mut work).await? {
                    return Ok(run.end(end));
                }
                if spent() {
                    return Ok(run.end(End::Spent));
                }
                if looked.elapsed() >= self.args.poll {
                    break;
                }
            }
        }
    }

    /// Says what a run came to, with the stage's own counts.
    pub(crate) fn conclude(&self, followed: Followed, mut table: Table) -> anyhow::Result<Exit> {
        table.add_row(["shards".to_owned(), followed.shards.to_string()]);
        if followed.failed > 0 {
            let row = ["  listed as failed".to_owned(), followed.failed.to_string()];
            table.add_row(row);
        }
        self.context.conclude(table);
        match followed.end {
            Some(End::Away(reason)) => Err(Failure::engine(reason).into()),
            Some(End::Spent) => Ok(Exit::Partial),
            Some(End::Finished) if followed.failed + followed.tally.failed > 0 => Ok(Exit::Partial),
            Some(End::Finished | End::Signal) | None => Ok(Exit::Done),
        }
    }
}

/// A run under way.
struct Run<'a> {
    route: &'a Route<'a>,
    incoming: Incoming,
    /// Shards that failed for good, as they were then.
    listed: HashMap<OsString, Stamp>,
    /// Whether it was said that somebody is away.
    away: bool,
    /// Whether the folders were ever looked at.
    seen: bool,
    /// Whether it was said that they cannot be.
    lost: bool,
    followed: Followed,
}

impl Run<'_> {
    fn end(mut self, end: End) -> Followed {
        self.followed.end = Some(end);
        self.followed
    }

    /// Looks at the folders.
    async fn look(&mut self) -> anyhow::Result<Vec<Shard>> {
        let done = self.route.out.done().await?;
        let listed = &self.listed;
        let given_up = |it: &Shard| listed.get(&it.name) == Some(&it.stamp);
        let due = self.incoming.due(&|name| done.contains(name), &given_up).await?;
        (self.seen, self.lost) = (true, false);
        Ok(due)
    }

    /// Says, once, why the folders cannot be looked at: a file system or a store may
    /// be away for a while, which is waited for unless nobody waits (`--once`).
    /// Errors with what a store refused from the start.
    fn weigh(&mut self, error: anyhow::Error) -> anyhow::Result<Option<End>> {
        let away = report::is_store_away(&error);
        if self.route.args.once && away {
            return Ok(Some(End::Away(report::told(&error))));
        }
        if self.route.args.once || (!self.seen && report::is_store_refusal(&error)) {
            return Err(error);
        }
        if !self.lost {
            self.route.context.say(format!("{}: waiting", report::told(&error)));
        }
        self.lost = true;
        Ok(None)
    }

    /// Does a shard, trying again what fails. Returns whether the run ends here.
    async fn shard(
        &mut self,
        shard: &Shard,
        work: &mut impl AsyncFnMut(Source, &Output) -> anyhow::Result<Worked>,
    ) -> anyhow::Result<Option<End>> {
        let (args, signal) = (self.route.args, &self.route.signal);
        let (mut tries, mut pause) = (0, args.poll);
        loop {
            let started = Instant::now();
            let worked = tokio::select! {
                biased;
                () = signalled(signal) => return Ok(Some(End::Signal)),
                worked = self.attempt(shard, work) => worked,
            };
            match worked {
                Ok(Worked::Done(tally, noted)) => {
                    self.done(shard, (tally, noted), started.elapsed());
                    return Ok(None);
                }
                Ok(Worked::Away(reason)) if args.once => return Ok(Some(End::Away(reason))),
                Ok(Worked::Away(reason)) => self.gone(&reason),
                Err(error) if report::is_store_away(&error) => {
                    if args.once {
                        return Ok(Some(End::Away(report::told(&error))));
                    }
                    self.gone(&report::told(&error));
                }
                Err(error) => {
                    tries += 1;
                    // A store that hangs holds up no end here either.
                    let settled = tokio::select! {
                        biased;
                        () = signalled(signal) => return Ok(Some(End::Signal)),
                        settled = self.settle(shard, (tries, error, pause)) => settled?,
                    };
                    if settled {
                        return Ok(None);
                    }
                }
            }
            if !sleep(signal, pause).await {
                return Ok(Some(End::Signal));
            }
            pause = longer(pause);
        }
    }

    /// Says what is to become of a shard that failed, which waits so long if it is tried
    /// again. Returns whether it is not.
    async fn settle(
        &mut self,
        shard: &Shard,
        (tries, error, pause): (u32, anyhow::Error, Duration),
    ) -> anyhow::Result<bool> {
        // It was taken away, or somebody has done it.
        if is_taken(&error) || !self.incoming.has(shard).await {
            tracing::info!(shard = %shard.path.display(), "{}", report::told(&error));
            return Ok(true);
        }
        if tries >= self.route.args.shard_tries {
            return self.failed(shard, tries, error).await.map(|()| true);
        }
        let name = shard.name.display();
        let (told, pause) = (report::told(&error), pause.as_secs_f64());
        self.route.context.say(format!("{name}: {told}: trying again in {pause:.1} s"));
        Ok(false)
    }

    fn gone(&mut self, reason: &str) {
        if !self.away {
            self.route.context.say(format!("{reason}: waiting for it"));
        }
        self.away = true;
    }

    fn done(&mut self, shard: &Shard, (tally, noted): (Tally, u64), took: Duration) {
        if std::mem::take(&mut self.away) {
            self.route.context.say("it is there again");
        }
        self.followed.shards += 1;
        self.followed.tally.rows += tally.rows;
        self.followed.tally.kept += tally.kept;
        self.followed.tally.failed += tally.failed;
        self.route.context.say(format!(
            "{}: {} rows, {noted} noted, {} failed, {:.1} s",
            shard.name.display(),
            tally.rows,
            tally.failed,
            took.as_secs_f64()
        ));
    }

    /// Lists a shard, unless it is not the shard's fault.
    async fn failed(
        &mut self,
        shard: &Shard,
        tries: u32,
        error: anyhow::Error,
    ) -> anyhow::Result<()> {
        if is_ours(&error) {
            return Err(error);
        }
        let told = report::told(&error);
        let mut pause = self.route.args.poll;
        loop {
            match self.route.out.failures().list(&shard.name, &told, tries).await {
                Err(error) if report::is_store_away(&error) && !self.route.args.once => {
                    self.gone(&report::told(&error));
                }
                listed => break listed?,
            }
            tokio::time::sleep(pause).await;
            pause = longer(pause);
        }
        self.listed.insert(shard.name.clone(), shard.stamp.clone());
        self.followed.failed += 1;
        let name = shard.name.display();
        self.route.context.say(format!("{name}: {told}: listed as failed after {tries} tries"));
        Ok(())
    }

    async fn attempt(
        &mut self,
        shard: &Shard,
        work: &mut impl AsyncFnMut(Source, &Output) -> anyhow::Result<Worked>,
    ) -> anyhow::Result<Worked> {
        let out = &self.route.out;
        let (source, _copy) = self.incoming.source(shard).await?;
        let target = Target::Shard(out.path(&shard.name));
        let worked = work(source, &Output { target, format: None }).await?;
        if let Worked::Done(..) = &worked {
            let published = self.publish(shard).await;
            self.route.out.discard(&shard.name);
            published?;
        }
        Ok(worked)
    }

    /// Publishes what was written, waiting for a store that is away: the work is not
    /// to be done again for that.
    async fn publish(&mut self, shard: &Shard) -> anyhow::Result<()> {
        let args = self.route.args;
        let mut pause = args.poll;
        loop {
            match self.route.out.publish(&shard.name).await {
                Err(error) if report::is_store_away(&error) && !args.once => {
                    self.gone(&report::told(&error));
                }
                published => return published,
            }
            tokio::time::sleep(pause).await;
            pause = longer(pause);
        }
    }
}

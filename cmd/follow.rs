//! `--follow`: a stage that does the shards of a folder as they come, and goes on
//! until it is told to stop.

mod counting;
mod failures;
mod waiting;

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use comfy_table::Table;
use oclaw::stage::{Output, Tally};
use oclaw::table::{Claim, Follow, Shard, Source, Stamp, Target, shard_names};
use tokio::sync::watch;

use crate::common::Context;
use crate::report::{self, Exit, Failure};
use crate::units;
pub(crate) use counting::Counting;
pub(crate) use failures::{Failures, is_ours, is_taken};
pub(crate) use waiting::{longer, signalled, sleep};

/// How a folder is followed.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Following a folder")]
pub(crate) struct FollowArgs {
    /// Do the shards of this folder as they come, until a signal
    #[arg(long, value_name = "FOLDER")]
    pub(crate) follow: Option<PathBuf>,
    /// How often to look; what failed waits twice as long each time, a minute at most
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = interval)]
    pub(crate) poll: Duration,
    /// Do the shards that are there, then end
    #[arg(long, requires = "follow")]
    pub(crate) once: bool,
    /// Tries of a shard before it is listed in `failed.jsonl`
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) shard_tries: u32,
}

/// Reads a time to wait that is more than none.
pub(crate) fn interval(text: &str) -> Result<Duration, String> {
    match units::duration(text)? {
        Duration::ZERO => Err("wanted a time above 0".to_owned()),
        time => Ok(time),
    }
}

impl FollowArgs {
    /// Returns the folder to follow, which must be there.
    pub(crate) fn folder(&self) -> Result<Option<&Path>, Failure> {
        match &self.follow {
            Some(folder) if !folder.is_dir() => {
                let problem = format!("there is no folder `{}` to follow", folder.display());
                Err(Failure::usage(problem).hint("make it, if its shards are still to come"))
            }
            folder => Ok(folder.as_deref()),
        }
    }
}

/// From which folder into which, and when to stop.
pub(crate) struct Route<'a> {
    args: &'a FollowArgs,
    context: &'a Context,
    input: &'a Path,
    output: &'a Path,
    signal: watch::Receiver<bool>,
    _claim: Claim,
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
        if output.exists() && !output.is_dir() {
            let problem = format!("`{}` is no folder", output.display());
            return Err(Failure::usage(problem).hint("`--follow` writes a shard per shard").into());
        }
        if let (Ok(from), Ok(to)) = (input.canonicalize(), output.canonicalize())
            && from == to
        {
            let problem = format!("`{}` cannot be followed into itself", input.display());
            return Err(Failure::usage(problem).into());
        }
        let claim = Claim::take(output)?;
        let signal = context.drain_on_signal();
        Ok(Self { args, context, input, output, signal, _claim: claim })
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
            let connected = tokio::select! {
                biased;
                () = signalled(&self.signal) => return Ok(None),
                connected = connect() => connected,
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
            follow: Follow::new(self.input),
            listed: HashMap::new(),
            away: false,
            lost: false,
            followed: Followed::default(),
        };
        loop {
            let due = run.due()?;
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
    follow: Follow,
    /// Shards that failed for good, as they were then.
    listed: HashMap<OsString, Stamp>,
    /// Whether it was said that somebody is away.
    away: bool,
    /// Whether it was said that the folders cannot be looked at.
    lost: bool,
    followed: Followed,
}

impl Run<'_> {
    fn end(mut self, end: End) -> Followed {
        self.followed.end = Some(end);
        self.followed
    }

    /// Looks at the folders. A file system may be away for a while, which is waited
    /// for unless nobody waits (`--once`).
    fn due(&mut self) -> anyhow::Result<Vec<Shard>> {
        let listed = &self.listed;
        let due = shard_names(self.route.output).and_then(|done| {
            let given_up = |it: &Shard| listed.get(&it.name) == Some(&it.stamp);
            self.follow.due(&|name| done.contains(name), &given_up)
        });
        match due {
            Ok(due) => {
                self.lost = false;
                Ok(due)
            }
            Err(error) if self.route.args.once => Err(error.into()),
            Err(error) => {
                if !self.lost {
                    self.route.context.say(format!("{}: waiting", report::told(&error.into())));
                }
                self.lost = true;
                Ok(Vec::new())
            }
        }
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
                worked = self.route.attempt(shard, work) => worked,
            };
            match worked {
                Ok(Worked::Done(tally, noted)) => {
                    self.done(shard, (tally, noted), started.elapsed());
                    return Ok(None);
                }
                Ok(Worked::Away(reason)) if args.once => return Ok(Some(End::Away(reason))),
                Ok(Worked::Away(reason)) => self.gone(&reason),
                // It was taken away, or somebody has done it.
                Err(error) if shard.is_gone() || is_taken(&error) => {
                    tracing::info!(shard = %shard.path.display(), "{}", report::told(&error));
                    return Ok(None);
                }
                Err(error) => {
                    tries += 1;
                    if tries >= args.shard_tries {
                        return self.failed(shard, tries, error).map(|()| None);
                    }
                    let name = shard.name.display();
                    self.route.context.say(format!(
                        "{name}: {}: trying again in {:.1} s",
                        report::told(&error),
                        pause.as_secs_f64()
                    ));
                }
            }
            if !sleep(signal, pause).await {
                return Ok(Some(End::Signal));
            }
            pause = longer(pause);
        }
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
    fn failed(&mut self, shard: &Shard, tries: u32, error: anyhow::Error) -> anyhow::Result<()> {
        if is_ours(&error) {
            return Err(error);
        }
        let told = report::told(&error);
        Failures::of(self.route.output).list(&shard.name, &told, tries)?;
        self.listed.insert(shard.name.clone(), shard.stamp);
        self.followed.failed += 1;
        let name = shard.name.display();
        self.route.context.say(format!("{name}: {told}: listed as failed after {tries} tries"));
        Ok(())
    }
}

impl Route<'_> {
    async fn attempt(
        &self,
        shard: &Shard,
        work: &mut impl AsyncFnMut(Source, &Output) -> anyhow::Result<Worked>,
    ) -> anyhow::Result<Worked> {
        let source = Source::open(std::slice::from_ref(&shard.path))?;
        let target = Target::Shard(self.output.join(&shard.name));
        work(source, &Output { target, format: None }).await
    }
}

//! The supervisor at work: tick by tick, until a signal.

use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant, SystemTime};

use oclaw::pipeline::{
    self, Account, Accountant, Identity, Limits, PolicyStatus, Queue, Run, Status, Supervisor,
};
use oclaw::table::Claim;

use super::keys::Keys;
use super::wanted::Wanted;
use super::{Args, listen, show};
use crate::common::Context;
use crate::follow::signalled;
use crate::report::{Exit, Failure, told};

/// How often processes are looked at.
const TICK: Duration = Duration::from_millis(100);
/// The same on a cluster, whose head is asked about each of them.
const RAY_TICK: Duration = Duration::from_secs(2);
/// The same, where one controller answers all users.
const SLURM_TICK: Duration = Duration::from_secs(5);
/// How often the folders are.
const LOOK: Duration = Duration::from_secs(2);
/// The same of a store, which may cost for each list that it gives.
const STORE_LOOK: Duration = Duration::from_secs(10);
/// How long it may keep the processes waiting.
const STORE_PATIENCE: Duration = Duration::from_secs(10);
/// Counting may take so much of the time, as long as a look is not too old.
const SHARE: u32 = 20;
const OLDEST: Duration = Duration::from_secs(30);
/// A process that has run for so long is well.
const STEADY: Duration = Duration::from_secs(60);
/// How often a line tells the state where nothing else shows it.
const LINE: Duration = Duration::from_secs(60);

/// Runs the loop.
pub(super) async fn watch(args: &Args, context: &Context, wanted: Wanted) -> anyhow::Result<Exit> {
    // What cannot be is refused before anything is made. What tells the jobs of this
    // loop from another's is the place of its folder, which is known once it is there.
    drop(wanted.launcher()?);
    wanted.make_folders(&args.without)?;
    let launcher = wanted.launcher()?;
    let _claim = Claim::take(&wanted.run.state())?;
    let status = Arc::new(RwLock::new(Status::default()));
    if let Some(address) = args.listen {
        let server = listen::start(address, args.key_file.as_deref(), status.clone()).await?;
        context.say(format!("status: http://{server}/status, metrics: http://{server}/metrics"));
    }
    // Until now there was nothing to drain: a signal ended the process.
    let signal = context.drain_on_signal();
    let alive: Arc<Mutex<Vec<u32>>> = Arc::default();
    let doomed = alive.clone();
    context.at_the_second_signal(move || {
        let doomed = doomed.lock().map(|pids| pids.clone()).unwrap_or_default();
        doomed.into_iter().for_each(|pid| pipeline::signal(pid, true));
    });
    let Wanted { run, children, engines, front, scheduler, keys } = wanted;
    let usual = match scheduler.kind {
        pipeline::Kind::Local => TICK,
        pipeline::Kind::Ray => RAY_TICK,
        pipeline::Kind::Slurm => SLURM_TICK,
    };
    let pause = scheduler.poll.unwrap_or(usual).max(TICK);
    let limits = limits(args);
    let log_bytes = limits.log_bytes;
    let supervisor = Supervisor::open(launcher, run.clone(), children, limits).await?;
    let mut watch = Watch {
        context,
        accountant: show::accountant(&run, &args.without)?,
        screen: show::Screen::new(context),
        run,
        without: args.without.clone(),
        engines,
        front,
        keys,
        supervisor,
        status,
        alive,
        next_look: Instant::now(),
        next_store_look: Instant::now(),
        next_line: Instant::now() + LINE,
        log_bytes,
        said: None,
        broken: None,
    };
    let mut drained = false;
    while !watch.supervisor.is_over() {
        watch.tick().await;
        if !drained && (*signal.borrow() || watch.broken.is_some()) {
            drained = true;
            watch.say("ending: serve first, then the stages, then the engines; a second signal ends at once");
            watch.supervisor.drain();
        }
        tokio::select! {
            () = signalled(&signal), if !drained => {}
            () = tokio::time::sleep(if drained { pause.min(usual) } else { pause }) => {}
        }
    }
    watch.close().await
}

/// Looks at the store, if there is one, as long as the processes can wait.
async fn look(accountant: &mut Accountant) -> anyhow::Result<()> {
    match tokio::time::timeout(STORE_PATIENCE, accountant.look()).await {
        Ok(looked) => Ok(looked?),
        Err(_) => {
            let seconds = STORE_PATIENCE.as_secs();
            let problem = format!("the object store has not told everything within {seconds} s");
            Err(Failure::engine(problem).into())
        }
    }
}

fn limits(args: &Args) -> Limits {
    Limits {
        first_wait: args.restart_wait,
        longest_wait: args.restart_longest.max(args.restart_wait),
        steady: STEADY,
        give_up: args.give_up,
        grace: args.grace,
        log_bytes: args.log_size as u64,
    }
}

/// Returns how long the folders are left alone after a count that took so long.
fn pause_after(counted: Duration) -> Duration {
    (counted * SHARE).clamp(LOOK, OLDEST)
}

struct Watch<'a> {
    context: &'a Context,
    accountant: Accountant,
    screen: show::Screen,
    run: Run,
    without: Vec<String>,
    engines: Vec<String>,
    front: String,
    keys: Keys,
    supervisor: Supervisor,
    status: Arc<RwLock<Status>>,
    /// Numbers of the processes that run.
    alive: Arc<Mutex<Vec<u32>>>,
    next_look: Instant,
    next_store_look: Instant,
    next_line: Instant,
    /// Longest log of its own.
    log_bytes: u64,
    /// What is wrong with the folders, as it was said.
    said: Option<String>,
    /// A process that chats depend on, and that cannot work.
    broken: Option<String>,
}

impl Watch<'_> {
    async fn tick(&mut self) {
        self.supervisor.tick().await;
        for line in self.supervisor.take_told() {
            self.say(&line);
        }
        let pids = self.supervisor.status().into_iter().filter_map(|child| child.pid).collect();
        if let Ok(mut alive) = self.alive.lock() {
            *alive = pids;
        }
        self.broken = self.broken.take().or_else(|| self.supervisor.broken().map(str::to_owned));
        let now = Instant::now();
        if now >= self.next_look {
            let counted = self.look().await;
            self.next_look = Instant::now() + pause_after(counted);
        }
    }

    /// Looks at the folders and the servers, and shows what it sees. Returns how long it
    /// counted what is here: to wait for a server that hangs is no work, and a store has a
    /// time of its own.
    async fn look(&mut self) -> Duration {
        let store_due = self.run.store.is_some() && Instant::now() >= self.next_store_look;
        let began = Instant::now();
        let looked = self.count().await;
        let counted = if store_due { Duration::ZERO } else { began.elapsed() };
        let Some((mut account, stages)) = looked else { return counted };
        let open = match self.keys.of_serve() {
            Ok(key) => self.supervisor.open_turns(&self.front, key.as_ref()).await,
            Err(problem) => Err(problem),
        };
        match open {
            Ok(open) => account.open = Some(open),
            Err(why) => account.open_unknown = Some(why),
        }
        let key = self.keys.of_engines();
        let served = self.supervisor.served(&self.engines, key.as_ref()).await;
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let status = Status {
            run: self.run.folder.display().to_string(),
            store: self.run.store.clone(),
            at: since.as_secs(),
            supervisor: Identity::of(std::process::id()),
            without: self.without.clone(),
            children: self.supervisor.status(),
            stages,
            policy: PolicyStatus::of(&self.run, self.accountant.published(), served),
            account,
        };
        // Who asks later reads it there; a full disk is told by who needs it more.
        let _ = status.keep(&self.run);
        if Instant::now() >= self.next_line && !self.screen.is_there() {
            self.next_line = Instant::now() + LINE;
            self.say(&status.account.words());
        }
        self.screen.show(&status);
        if let Ok(mut shared) = self.status.write() {
            *shared = status;
        }
        counted
    }

    /// Counts the turns. While a store is away those stay that it told of last.
    async fn count(&mut self) -> Option<(Account, Vec<Queue>)> {
        let begun = Instant::now();
        if begun < self.next_store_look {
            // Meanwhile what is here goes on.
            return self.accountant.take().ok().filter(|_| self.accountant.has_looked());
        }
        let looked = look(&mut self.accountant).await;
        if self.run.store.is_some() {
            self.next_store_look = Instant::now() + STORE_LOOK.max(begun.elapsed() * SHARE);
        }
        let there = self.accountant.has_looked();
        let counted = there.then(|| self.accountant.take()).transpose();
        let (counted, error) = match (counted, looked) {
            (Ok(counted), Ok(())) => (counted, None),
            (Ok(counted), Err(error)) => (counted, Some(error)),
            (Err(error), _) => (None, Some(error.into())),
        };
        let wrong = error.map(|error| told(&error));
        if let Some(told) = wrong.as_ref().filter(|_| self.said != wrong) {
            self.say(&format!("{told}: waiting"));
        }
        self.said = wrong;
        counted
    }

    /// Says a line, and leaves it in the log of the loop.
    fn say(&mut self, line: &str) {
        self.screen.clear();
        self.context.say(line);
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let at =
            oclaw::table::row_json::instant(i64::try_from(now.as_micros()).unwrap_or(i64::MAX));
        let log = self.run.logs().join("loop.log");
        // It was said already.
        let _ = pipeline::append_line(&log, &format!("{at} {line}"), self.log_bytes);
    }

    /// Says what the run came to.
    async fn close(mut self) -> anyhow::Result<Exit> {
        self.next_store_look = Instant::now();
        if let Some((account, _)) = self.count().await {
            self.say(&account.words());
            let mut status = Status::kept(&self.run).unwrap_or_default();
            status.supervisor = None;
            status.children = self.supervisor.status();
            status.account = account;
            let _ = status.keep(&self.run);
        }
        if let Some(name) = self.broken {
            let log = self.run.logs().join(format!("{name}.log"));
            let problem = format!("`{name}` cannot work, and chats depend on it");
            return Err(Failure::failed(problem).hint(format!("see `{}`", log.display())).into());
        }
        match self.supervisor.has_failed() {
            true => Ok(Exit::Partial),
            false => Ok(Exit::Done),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_is_never_old() {
        let pauses =
            [0, 200, 1_000, 18_000].map(|millis| pause_after(Duration::from_millis(millis)));
        assert_eq!(pauses.map(|pause| pause.as_secs()), [2, 4, 20, 30]);
    }
}

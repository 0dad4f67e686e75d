//! The supervisor at work: tick by tick, until a signal.

use std::pin::pin;
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant, SystemTime};

use oclaw::pipeline::{
    self, Account, Accountant, Identity, Limits, PolicyStatus, Queue, Run, Status, Supervisor,
};
use tokio::sync::watch::Receiver;

use super::claim::{self, Claimed};
use super::keys::Keys;
use super::looks::Looks;
use super::wanted::Wanted;
use super::{Args, listen, show};
use crate::common::Context;
use crate::files;
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
    let _claim = claim::take_folder(&wanted.run)?;
    let status = Arc::new(RwLock::new(Status::default()));
    if let Some(address) = args.listen {
        let server = listen::start(address, args.key_file.as_deref(), status.clone()).await?;
        context.say(format!("status: http://{server}/status, metrics: http://{server}/metrics"));
    }
    // Whoever ends before the loop begins is not to leave one that others wait for.
    let mut claimed = Claimed::take(&wanted.run, context).await?;
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
        accountant: show::accountant(&run, &args.without)?.since(Some(SystemTime::now())),
        began: since_1970().as_secs(),
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
        looks: Looks::new(),
        next_line: Instant::now() + LINE,
        log_bytes,
        said: None,
        store_said: None,
        broken: None,
        lost: None,
    };
    watch.go_on(&signal, (pause, usual), &mut claimed).await;
    watch.close(claimed).await
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
    /// When that was, in seconds since 1970.
    began: u64,
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
    /// The looks at the store.
    looks: Looks,
    next_line: Instant,
    /// Longest log of its own.
    log_bytes: u64,
    /// What is wrong with the folders, as it was said.
    said: Option<String>,
    /// The same of the store.
    store_said: Option<String>,
    /// A process that chats depend on, and that cannot work.
    broken: Option<String>,
    /// Who has the store instead.
    lost: Option<Failure>,
}

impl Watch<'_> {
    /// Goes on until everything has ended, looking every `pause`, or, to end, as usual.
    async fn go_on(
        &mut self,
        signal: &Receiver<bool>,
        (pause, usual): (Duration, Duration),
        claimed: &mut Claimed,
    ) {
        let mut drained = false;
        while !self.supervisor.is_over() {
            // A scheduler that hangs may hold this up for longer than a claim lasts.
            let lost = beside(self.tick(), claimed.lost()).await;
            self.lost = self.lost.take().or(lost);
            let over = self.broken.is_some() || self.lost.is_some();
            if !drained && (over || *signal.borrow()) {
                drained = true;
                self.say("ending: serve first, then the stages, then the engines; a second signal ends at once");
                self.supervisor.drain();
            }
            tokio::select! {
                () = signalled(signal), if !drained => {}
                () = tokio::time::sleep(if drained { pause.min(usual) } else { pause }) => {}
                looked = self.looks.ended() => self.store_told(looked),
                lost = claimed.lost() => self.lost = Some(lost),
            }
        }
    }

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
        if self.run.store.is_some() {
            self.looks.begin(&self.accountant);
        }
        let now = Instant::now();
        if now >= self.next_look {
            let counted = self.look().await;
            self.next_look = Instant::now() + pause_after(counted);
        }
    }

    /// Looks at the folders and the servers, and shows what it sees. Returns how long it
    /// counted: to wait for a server that hangs is no work.
    async fn look(&mut self) -> Duration {
        let began = Instant::now();
        let counted = self.count();
        let took = began.elapsed();
        let (mut account, stages, untold) = match counted {
            Ok((account, stages)) => (Some(account), stages, None),
            Err(why) => (None, Vec::new(), Some(why)),
        };
        let open = match self.keys.of_serve() {
            Ok(key) => self.supervisor.open_turns(&self.front, key.as_ref()).await,
            Err(problem) => Err(problem),
        };
        if let Some(account) = &mut account {
            (account.open, account.open_unknown) = match open {
                Ok(open) => (Some(open), None),
                Err(why) => (None, Some(why)),
            };
        }
        let key = self.keys.of_engines();
        let served = self.supervisor.served(&self.engines, key.as_ref()).await;
        // An address may hold a password, and everybody reads the status.
        let served =
            served.into_iter().map(|(url, version)| (files::told(&url), version)).collect();
        let status = Status {
            run: self.run.folder.display().to_string(),
            store: self.run.store.clone(),
            at: since_1970().as_secs(),
            supervisor: Identity::of(std::process::id()),
            began: Some(self.began),
            without: self.without.clone(),
            children: self.supervisor.status(),
            stages,
            policy: match self.accountant.has_looked() {
                true => PolicyStatus::of(&self.run, self.accountant.published(), served),
                false => PolicyStatus::untold(&self.run, served),
            },
            told_at: self.accountant.told_at(),
            account,
            untold,
        };
        self.tell(status);
        took
    }

    /// Leaves the state where it is asked for, and shows it.
    fn tell(&mut self, status: Status) {
        // Who asks later reads it there; a full disk is told by who needs it more.
        let _ = status.keep(&self.run);
        if Instant::now() >= self.next_line && !self.screen.is_there() {
            self.next_line = Instant::now() + LINE;
            self.say(&show::turns(&status));
        }
        self.screen.show(&status);
        if let Ok(mut shared) = self.status.write() {
            *shared = status;
        }
    }

    /// Counts the turns, in a store those that it told of last. Errors with why nobody
    /// knows.
    fn count(&mut self) -> Result<(Account, Vec<Queue>), String> {
        if !self.accountant.has_looked() {
            if self.looks.is_slow() {
                self.say("the object store has not told everything yet: waiting for it");
            }
            let usual = || "the object store has not told everything yet".to_owned();
            return Err(self.store_said.clone().unwrap_or_else(usual));
        }
        let counted = self.accountant.take().map_err(|error| told(&anyhow::Error::from(error)));
        let wrong = counted.as_ref().err().cloned();
        if let Some(told) = wrong.as_ref().filter(|_| self.said != wrong) {
            self.say(&format!("{told}: waiting"));
        }
        self.said = wrong;
        counted
    }

    /// Notes that a look at the store has ended. While it is away, those turns count that
    /// it told of last.
    fn store_told(&mut self, looked: Result<(), pipeline::Error>) {
        let wrong = looked.err().map(|error| told(&anyhow::Error::from(error)));
        if let Some(told) = wrong.as_ref().filter(|_| self.store_said != wrong) {
            self.say(&format!("{told}: waiting"));
        }
        self.store_said = wrong;
    }

    /// Says a line, and leaves it in the log of the loop.
    fn say(&mut self, line: &str) {
        self.screen.clear();
        self.context.say(line);
        let now = i64::try_from(since_1970().as_micros()).unwrap_or(i64::MAX);
        let at = oclaw::table::row_json::instant(now);
        let log = self.run.logs().join("loop.log");
        // It was said already.
        let _ = pipeline::append_line(&log, &format!("{at} {line}"), self.log_bytes);
    }

    /// Looks at the store once more: what was put last is to be counted, too. It holds up
    /// the end no longer than people wait.
    async fn look_last(&mut self) {
        if self.run.store.is_none() {
            return;
        }
        // What the look under way has learned, this one need not ask.
        self.looks = Looks::new();
        match tokio::time::timeout(show::STORE_PATIENCE, self.accountant.look()).await {
            Ok(looked) => self.store_told(looked),
            Err(_) => self.say("the object store is slow: turns and policies as it told them last"),
        }
    }

    /// Says what the run came to.
    async fn close(mut self, claimed: Claimed) -> anyhow::Result<Exit> {
        self.look_last().await;
        let mut status = Status::kept(&self.run).unwrap_or_default();
        (status.supervisor, status.began) = (None, None);
        status.children = self.supervisor.status();
        if let Ok((account, stages)) = self.count() {
            (status.account, status.stages) = (Some(account), stages);
            (status.told_at, status.untold) = (self.accountant.told_at(), None);
            let words = show::turns(&status);
            self.say(&words);
        }
        let _ = status.keep(&self.run);
        claimed.release().await;
        if let Some(lost) = self.lost {
            return Err(lost.into());
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

/// Waits until some work is done, and sees to something else meanwhile. Returns what
/// came of that, if it came.
async fn beside<T>(work: impl Future<Output = ()>, other: impl Future<Output = T>) -> Option<T> {
    let (mut work, mut other) = (pin!(work), pin!(other));
    let mut come = None;
    loop {
        tokio::select! {
            () = &mut work => return come,
            it = &mut other, if come.is_none() => come = Some(it),
        }
    }
}

fn since_1970() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::future::poll_fn;
    use std::task::Poll;

    use super::*;

    /// The claim is renewed while a tick waits for a scheduler.
    #[tokio::test]
    async fn what_waits_holds_up_nothing_beside_it() {
        let seen = Cell::new(0);
        let work = poll_fn(|context| match seen.get() {
            0..3 => {
                context.waker().wake_by_ref();
                Poll::Pending
            }
            _ => Poll::Ready(()),
        });
        let other = poll_fn(|_| {
            seen.set(seen.get() + 1);
            Poll::<u8>::Pending
        });
        assert_eq!(beside(work, other).await, None);
        let mut rests = 2;
        let work = poll_fn(|context| {
            context.waker().wake_by_ref();
            rests -= 1;
            if rests == 0 { Poll::Ready(()) } else { Poll::Pending }
        });
        assert_eq!(beside(work, std::future::ready(7)).await, Some(7));
    }

    #[test]
    fn a_look_is_never_old() {
        let pauses =
            [0, 200, 1_000, 18_000].map(|millis| pause_after(Duration::from_millis(millis)));
        assert_eq!(pauses.map(|pause| pause.as_secs()), [2, 4, 20, 30]);
    }
}

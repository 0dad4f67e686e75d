//! Starts the processes of a loop in order, watches them, starts them again.
//!
//! Nothing in here waits: the caller calls [`Supervisor::tick`] again and again, and
//! says what it has to tell.

mod drain;
mod record;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use secrecy::SecretString;

use super::probe::Probe;
use super::watched::Watched;
use super::{Child, Error, Job, Launcher, Limits, Phase, Run, State, Tier, logs};
use drain::Drain;
pub use record::ChildStatus;
use record::Record;

/// How often a log is looked at.
const LOG_LOOK: Duration = Duration::from_secs(5);

/// The processes of a loop.
#[derive(Debug)]
pub struct Supervisor {
    launcher: Launcher,
    run: Run,
    limits: Limits,
    watched: Vec<Watched>,
    probe: Probe,
    drain: Option<Drain>,
    told: Vec<String>,
    logs_seen: Option<Instant>,
}

impl Supervisor {
    /// Takes up what another supervisor has left running, and ends what is not
    /// wanted any more.
    pub async fn open(
        launcher: Launcher,
        run: Run,
        children: Vec<Child>,
        limits: Limits,
    ) -> Result<Self, Error> {
        let now = Instant::now();
        let record = Record::read(&run);
        let folder = std::env::current_dir().map_err(|source| Error::file(".", source))?;
        let watched = children.into_iter().map(|child| {
            let job = Job {
                id: String::new(),
                name: child.name.clone(),
                argv: child.argv.clone(),
                env: child.process.env.clone(),
                gpus: child.process.gpus.clone(),
                log: run.logs().join(format!("{}.log", child.name)),
                folder: folder.clone(),
                outlives: child.tier < Tier::Stage,
            };
            Watched::new(child, job, now)
        });
        let mut supervisor = Self {
            launcher,
            limits,
            watched: watched.collect(),
            probe: Probe::new(),
            drain: None,
            told: Vec::new(),
            logs_seen: None,
            run,
        };
        if let Err(error) = supervisor.launcher.check().await
            && error.is_lasting()
        {
            return Err(error);
        }
        supervisor.take_up(&record).await?;
        Ok(supervisor)
    }

    /// Looks at every process once.
    pub async fn tick(&mut self) {
        // What is wrong with it is told of each process that it concerns.
        let _ = self.launcher.look().await;
        if self.drain.is_some() {
            self.drain_on().await;
            return;
        }
        for index in 0..self.watched.len() {
            self.look(index).await;
        }
        if self.logs_seen.is_none_or(|seen| seen.elapsed() >= LOG_LOOK) {
            self.logs_seen = Some(Instant::now());
            for index in 0..self.watched.len() {
                self.look_at_log(index).await;
            }
        }
    }

    /// Takes what there is to tell.
    pub fn take_told(&mut self) -> Vec<String> {
        std::mem::take(&mut self.told)
    }

    /// Returns the name of a process that chats depend on and that cannot work. Of
    /// several engines the others go on.
    pub fn broken(&self) -> Option<&str> {
        let of = |tier: Tier| {
            self.watched.iter().filter(move |it| it.child.vital && it.child.tier == tier)
        };
        let given_up = |it: &&Watched| it.phase == Phase::GivenUp;
        let engines = of(Tier::Engine);
        let serve = of(Tier::Serve).find(given_up);
        let engine =
            engines.clone().find(given_up).filter(|_| engines.clone().all(|it| given_up(&it)));
        serve.or(engine).map(|it| it.child.name.as_str())
    }

    /// Whether a process cannot do its work: it is not started any more, or ended each
    /// time when the loop began to end, or failed in the end.
    pub fn has_failed(&self) -> bool {
        self.watched.iter().any(|it| it.failed || it.phase == Phase::GivenUp)
    }

    /// Says how each process is.
    pub fn status(&self) -> Vec<ChildStatus> {
        let pid = |it: &Watched| self.launcher.pid(&it.job);
        let status = |it: &Watched| {
            ChildStatus::of(it, &self.limits, pid(it).filter(|_| it.phase.is_alive()))
        };
        self.watched.iter().map(status).collect()
    }

    /// Returns the versions of the weights that the engines serve, by address.
    pub async fn served(
        &self,
        engines: &[String],
        key: Option<&SecretString>,
    ) -> BTreeMap<String, Option<String>> {
        let asked = engines
            .iter()
            .map(|url| async move { (url.clone(), self.probe.weight_version(url, key).await) });
        futures_util::future::join_all(asked).await.into_iter().collect()
    }

    /// Returns how many turns `oclaw serve` has not made rows of. Errors with why it
    /// does not tell.
    pub async fn open_turns(&self, front: &str, key: Option<&SecretString>) -> Result<u64, String> {
        let text = self.probe.text(&format!("{front}/metrics"), key).await?;
        let value = |name: &str| {
            let mut lines = text.lines().filter_map(|line| line.strip_prefix(name));
            lines.find_map(|rest| rest.trim().parse::<u64>().ok())
        };
        let told = value("oclaw_open_turns ").zip(value("oclaw_waiting_rows "));
        told.map(|(open, waiting)| open + waiting)
            .ok_or_else(|| "its metrics do not tell".to_owned())
    }

    async fn look(&mut self, index: usize) {
        let now = Instant::now();
        match self.watched[index].phase {
            Phase::Waiting if self.is_open(index) => self.start(index).await,
            Phase::Resting(until) if now >= until => {
                self.watched[index].enter(Phase::Waiting, now);
            }
            Phase::Starting | Phase::Up => {
                let runs = self.runs(index).await;
                if runs && self.watched[index].phase == Phase::Starting {
                    self.greet(index).await;
                }
            }
            _ => {}
        }
    }

    /// Whether those before a process are ready. Chats have to be served once before
    /// the stages begin; what is served needs its engines each time.
    fn is_open(&self, index: usize) -> bool {
        let of = |tier: Tier| {
            self.watched.iter().filter(move |it| it.child.vital && it.child.tier == tier)
        };
        match self.watched[index].child.tier {
            Tier::Engine => true,
            // Of several engines one that has ended meanwhile, or ends each time, is
            // done without.
            Tier::Serve => {
                let now = Instant::now();
                let known = |it: &Watched| {
                    it.was_ready || it.phase == Phase::GivenUp || it.is_failing(&self.limits, now)
                };
                let up = |it: &Watched| it.phase == Phase::Up;
                // What another program answers for an engine is no answer to a chat.
                of(Tier::Engine).all(|it| !it.taken && (up(it) || known(it)))
                    && (of(Tier::Engine).next().is_none() || of(Tier::Engine).any(up))
            }
            // Nobody is asked, and no weights are pushed, where another program answers.
            Tier::Stage => {
                of(Tier::Serve).all(|it| it.was_ready) && self.watched.iter().all(|it| !it.taken)
            }
        }
    }

    async fn start(&mut self, index: usize) {
        let now = Instant::now();
        let watched = &mut self.watched[index];
        watched.attempt += 1;
        watched.job.id = record::id(&watched.child, watched.attempt);
        if watched.child.argv.is_empty() {
            watched.enter(Phase::Starting, now);
            return;
        }
        let taken = self.taken(index).await;
        self.watched[index].taken = taken.is_some();
        if let Some(why) = taken {
            self.not_started(index, &why, false);
            return;
        }
        // Before the start, so that the next supervisor knows whom to ask for.
        self.keep_record();
        // Somebody may have tidied the logs away. If not, the start says what is wrong.
        let _ = std::fs::create_dir_all(self.run.logs());
        let watched = &mut self.watched[index];
        match self.launcher.start(&watched.job).await {
            Ok(()) => {
                watched.enter(Phase::Starting, now);
                if !watched.is_failing(&self.limits, now) {
                    self.tell(index, "started");
                }
            }
            Err(error) => self.not_started(index, &chain(&error), error.is_lasting()),
        }
    }

    fn not_started(&mut self, index: usize, why: &str, lasting: bool) {
        let watched = &mut self.watched[index];
        let told = watched.not_started(why, lasting, &self.limits, Instant::now());
        if watched.is_news(&told, &self.limits) {
            self.tell(index, &told);
        }
    }

    /// Returns what is wrong if another program listens already where a process of this
    /// machine is to: it would be taken for ours. On a cluster nobody knows the machine yet.
    async fn taken(&mut self, index: usize) -> Option<String> {
        let watched = &self.watched[index];
        let Launcher::Local(local) = &mut self.launcher else { return None };
        let (url, _) = watched.child.ready.as_ref()?;
        let place = self.probe.taken(url).await?;
        // Another supervisor has left it, and the start takes it up.
        if local.poll(&watched.job).is_alive() {
            return None;
        }
        let name = &watched.child.name;
        let section = match name.strip_prefix("engine-") {
            Some(engine) => format!("engines.{engine}"),
            None => name.clone(),
        };
        Some(format!(
            "{place} is taken by another program: end it, or name another port in [{section}]"
        ))
    }

    /// Whether a process still runs. Notes its end.
    async fn runs(&mut self, index: usize) -> bool {
        let watched = &mut self.watched[index];
        if watched.child.argv.is_empty() {
            return true;
        }
        let end = match self.launcher.poll(&watched.job).await {
            Ok(state @ (State::Running | State::Pending)) => {
                // The next time it is news again.
                if watched.trouble.take().is_some() {
                    watched.said = None;
                }
                return state == State::Running;
            }
            Ok(end) => end,
            Err(error) => {
                let told = chain(&error);
                watched.trouble = Some(told.clone());
                self.tell_once(index, format!("{told}: waiting"));
                return false;
            }
        };
        // The end of its log may tell why.
        let _ = self.launcher.logs(&self.watched[index].job).await;
        self.note_end(index, end);
        false
    }

    fn note_end(&mut self, index: usize, end: State) {
        let watched = &mut self.watched[index];
        watched.trouble = None;
        let mut told = watched.ended(end, &self.limits, Instant::now());
        if matches!(end, State::Ended { code: Some(1..) })
            && watched.is_ours()
            && let Some(words) = logs::last_words(&watched.job.log)
        {
            told.push_str(&format!("\n  {words}"));
            watched.last_end = watched.last_end.take().map(|end| format!("{end}: {words}"));
        }
        if watched.is_news(&told, &self.limits) {
            self.tell(index, &told);
        }
    }

    /// Asks a process that was started whether it is ready.
    async fn greet(&mut self, index: usize) {
        let Some((url, patience)) = self.watched[index].child.ready.clone() else {
            let watched = &mut self.watched[index];
            watched.was_ready = true;
            watched.enter(Phase::Up, Instant::now());
            return;
        };
        let ready = self.probe.is_ready(&url).await;
        // Ours may have ended meanwhile: then another program has answered.
        if ready && !self.runs(index).await {
            return;
        }
        let now = Instant::now();
        let watched = &mut self.watched[index];
        let waited = now.duration_since(watched.since);
        if ready {
            let first = !std::mem::replace(&mut watched.was_ready, true);
            watched.said = None;
            watched.enter(Phase::Up, now);
            self.tell(index, &format!("ready after {:.1} s", waited.as_secs_f64()));
            if first {
                self.keep_record();
            }
        } else if waited >= patience {
            let told = format!("not ready after {:.0} s", patience.as_secs_f64());
            if watched.child.argv.is_empty() {
                self.tell_once(index, format!("{told}: waiting for it"));
            } else {
                let job = watched.job.clone();
                self.tell(index, &told);
                let _ = self.launcher.stop(&job, true).await;
            }
        }
    }

    async fn look_at_log(&mut self, index: usize) {
        let watched = &self.watched[index];
        if watched.child.argv.is_empty() {
            return;
        }
        if watched.phase.is_alive() {
            let _ = self.launcher.logs(&watched.job).await;
        }
        if let Err(source) = logs::rotate(&watched.job.log, self.limits.log_bytes) {
            let told = chain(&Error::file(&watched.job.log, source));
            if self.watched[index].log_said.as_ref() != Some(&told) {
                self.tell(index, &told);
                self.watched[index].log_said = Some(told);
            }
        }
    }

    fn tell(&mut self, index: usize, what: &str) {
        self.told.push(format!("{}: {what}", self.watched[index].child.name));
    }

    /// Tells what is wrong, unless it was the last thing said.
    fn tell_once(&mut self, index: usize, what: String) {
        if self.watched[index].said.as_ref() != Some(&what) {
            self.tell(index, &what);
            self.watched[index].said = Some(what);
        }
    }
}

/// Returns an error with its causes, on a line.
fn chain(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}

//! One process under watch: when it is started, and when nobody starts it again.

use std::time::{Duration, Instant};

use super::{Child, Job, State};

/// How long and how often.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// The first wait before a process is started again; each further one is twice
    /// as long.
    pub first_wait: Duration,
    /// The longest.
    pub longest_wait: Duration,
    /// A process that has run for so long begins with the first wait again.
    pub steady: Duration,
    /// So many ends that are the process's own fault, with none of that in between,
    /// and nobody starts it again. So many of any kind, and it counts as failing.
    pub give_up: u32,
    /// How long each tier may take to end when it is asked to.
    pub grace: Duration,
    /// The longest log.
    pub log_bytes: u64,
}

/// Exit codes that another start does not change: wrong settings, and a bug.
const OWN_FAULT: [i32; 2] = [2, 101];
/// Exit code of a stage whose budget is spent.
const SPENT: i32 = 3;
/// What fails again and again is told again after so many times: hourly, where each
/// start waits for a minute.
const REMINDER: u32 = 60;
/// What failed each time is well again once it has run so much longer than it did
/// then, and for a second at least.
const TRIAL: u32 = 2;
const LEAST_TRIAL: Duration = Duration::from_secs(1);

/// What a process is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// It waits for those before it.
    Waiting,
    /// It was started, and does not answer yet.
    Starting,
    /// It is at work.
    Up,
    /// It has ended, and is started again then.
    Resting(Instant),
    /// It has done what its budget allows.
    Finished,
    /// It cannot do its work, and is not started any more.
    GivenUp,
    /// It was asked to end.
    Ending,
    /// It has ended for good.
    Over,
}

impl Phase {
    /// Returns the word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Starting => "starting",
            Self::Up => "up",
            Self::Resting(_) => "resting",
            Self::Finished => "finished",
            Self::GivenUp => "given up",
            Self::Ending => "ending",
            Self::Over => "ended",
        }
    }

    /// Whether a process may be there.
    pub(super) fn is_alive(self) -> bool {
        matches!(self, Self::Starting | Self::Up | Self::Ending)
    }
}

/// A process under watch.
#[derive(Debug)]
pub(super) struct Watched {
    pub(super) child: Child,
    pub(super) job: Job,
    pub(super) phase: Phase,
    /// Number of its latest start.
    pub(super) attempt: u64,
    pub(super) restarts: u64,
    /// Since when it is in its phase.
    pub(super) since: Instant,
    /// Whether it was ready once.
    pub(super) was_ready: bool,
    /// Whether another program has its address.
    pub(super) taken: bool,
    /// Whether it was failing when the loop began to end, or failed as it ended.
    pub(super) failed: bool,
    /// How it ended the last time.
    pub(super) last_end: Option<String>,
    /// Why nobody knows how it is.
    pub(super) trouble: Option<String>,
    /// What is wrong, as it was said.
    pub(super) said: Option<String>,
    /// What is wrong with its log, as it was said.
    pub(super) log_said: Option<String>,
    /// Ends in a row, none of them after a steady time.
    streak: u32,
    /// Of these, the ones that were its own fault.
    faults: u32,
    /// For how long it ran the last time.
    lasted: Duration,
}

impl Watched {
    pub(super) fn new(child: Child, job: Job, now: Instant) -> Self {
        Self {
            child,
            job,
            phase: Phase::Waiting,
            attempt: 0,
            restarts: 0,
            since: now,
            was_ready: false,
            taken: false,
            failed: false,
            last_end: None,
            trouble: None,
            said: None,
            log_said: None,
            streak: 0,
            faults: 0,
            lasted: Duration::ZERO,
        }
    }

    /// Whether it is a program of ours. Of others nobody knows what their words and
    /// exit codes mean.
    pub(super) fn is_ours(&self) -> bool {
        self.child.argv.get(2).is_some_and(|word| word == "--config")
    }

    pub(super) fn enter(&mut self, phase: Phase, now: Instant) {
        self.phase = phase;
        self.since = now;
    }

    /// Returns how often it has ended in a row, with no steady time in between.
    pub(super) fn failures(&self, limits: &Limits, now: Instant) -> u32 {
        let steady = self.phase == Phase::Up && now.duration_since(self.since) >= limits.steady;
        if steady { 0 } else { self.streak }
    }

    /// Whether it ends each time that it is started. What it lacks may come back, as
    /// room on a disk does: it is tried for ever.
    pub(super) fn is_failing(&self, limits: &Limits, now: Instant) -> bool {
        let trial = (self.lasted * TRIAL).max(LEAST_TRIAL).min(limits.steady);
        let unproven = match self.phase {
            Phase::Waiting | Phase::Starting | Phase::Resting(_) => true,
            Phase::Up => now.duration_since(self.since) < trial,
            Phase::Finished | Phase::GivenUp | Phase::Ending | Phase::Over => false,
        };
        unproven && self.streak >= limits.give_up
    }

    /// Whether there is something new in an end: a failure like those before it is
    /// told now and then.
    pub(super) fn is_news(&mut self, told: &str, limits: &Limits) -> bool {
        let new = self.streak <= limits.give_up
            || self.streak.is_multiple_of(REMINDER)
            || self.said.as_deref() != Some(told);
        self.said = Some(told.to_owned());
        new
    }

    /// Notes an end, and says what comes of it.
    pub(super) fn ended(&mut self, state: State, limits: &Limits, now: Instant) -> String {
        if self.phase == Phase::Up && now.duration_since(self.since) >= limits.steady {
            (self.streak, self.faults) = (0, 0);
        }
        self.lasted = now.duration_since(self.since);
        let (end, code) = match state {
            State::Ended { code: Some(code) } => {
                (format!("ended with exit code {code}"), Some(code))
            }
            State::Over { told } => (told.to_owned(), None),
            State::Lost => ("is gone, nobody knows how it ended".to_owned(), None),
            _ => ("was killed".to_owned(), None),
        };
        self.last_end = Some(end.clone());
        if code == Some(SPENT) {
            self.enter(Phase::Finished, now);
            return format!("{end}: its budget is spent");
        }
        // A server that never was ready has nothing that could be waited for.
        let no_start = code == Some(1) && self.child.ready.is_some() && !self.was_ready;
        let own = code.is_some_and(|code| OWN_FAULT.contains(&code));
        self.faults += u32::from(own || no_start);
        if self.faults >= limits.give_up {
            self.enter(Phase::GivenUp, now);
            return format!("{end} for the {} time: it is not started again", nth(self.faults));
        }
        let wait = self.rest(limits, now);
        match self.streak >= limits.give_up {
            false => format!("{end}: started again in {:.1} s", wait.as_secs_f64()),
            // The same words each time, as long as it is the same.
            true => format!(
                "{end}, as each time of late: started again every {:.0} s at least",
                limits.longest_wait.as_secs_f64()
            ),
        }
    }

    /// Notes that it could not be started, and says what comes of it.
    pub(super) fn not_started(
        &mut self,
        why: &str,
        lasting: bool,
        limits: &Limits,
        now: Instant,
    ) -> String {
        self.last_end = Some(format!("could not be started: {why}"));
        self.faults += u32::from(lasting);
        if self.faults >= limits.give_up {
            self.enter(Phase::GivenUp, now);
            return format!("{why}: it is not tried again");
        }
        let wait = self.rest(limits, now);
        match self.streak >= limits.give_up {
            false => format!("{why}: tried again in {:.1} s", wait.as_secs_f64()),
            // The same words each time, as long as it is the same.
            true => format!(
                "{why}, as each time of late: tried again every {:.0} s at least",
                limits.longest_wait.as_secs_f64()
            ),
        }
    }

    /// Lets it rest, longer each time.
    pub(super) fn rest(&mut self, limits: &Limits, now: Instant) -> Duration {
        let doubled = limits.first_wait.saturating_mul(1 << self.streak.min(20));
        let wait = doubled.min(limits.longest_wait);
        self.streak += 1;
        self.restarts += 1;
        self.enter(Phase::Resting(now + wait), now);
        wait
    }
}

fn nth(number: u32) -> String {
    match number {
        1 => "first".to_owned(),
        2 => "second".to_owned(),
        3 => "third".to_owned(),
        number => format!("{number}th"),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::PathBuf;

    use super::super::{Process, Tier};
    use super::*;

    const LIMITS: Limits = Limits {
        first_wait: Duration::from_secs(1),
        longest_wait: Duration::from_secs(5),
        steady: Duration::from_secs(60),
        give_up: 3,
        grace: Duration::ZERO,
        log_bytes: 0,
    };

    fn watched(server: bool) -> Watched {
        let ready = server.then(|| ("http://a".to_owned(), Duration::ZERO));
        let child = Child {
            name: "judge".to_owned(),
            tier: Tier::Stage,
            argv: Vec::new(),
            process: Process::default(),
            ready,
            vital: false,
            digest: String::new(),
        };
        let job = Job {
            id: String::new(),
            name: String::new(),
            argv: Vec::new(),
            env: BTreeMap::new(),
            gpus: Vec::new(),
            log: PathBuf::new(),
            folder: PathBuf::new(),
            outlives: false,
        };
        Watched::new(child, job, Instant::now())
    }

    /// Runs for so long and ends. Returns how long it rests.
    fn run(it: &mut Watched, seconds: u64, code: Option<i32>) -> Option<u64> {
        let now = Instant::now();
        it.enter(Phase::Up, now);
        let end = now + Duration::from_secs(seconds);
        it.ended(State::Ended { code }, &LIMITS, end);
        match it.phase {
            Phase::Resting(until) => Some(until.duration_since(end).as_secs()),
            _ => None,
        }
    }

    #[test]
    fn what_ends_each_time_is_failing_until_it_runs_well() {
        let mut it = watched(false);
        let now = Instant::now();
        let seen = [(); 4].map(|()| {
            run(&mut it, 2, Some(1));
            (it.is_failing(&LIMITS, now), it.failures(&LIMITS, now))
        });
        assert_eq!(seen, [(false, 1), (false, 2), (true, 3), (true, 4)]);
        it.enter(Phase::Starting, now);
        assert!(it.is_failing(&LIMITS, now), "nobody knows yet whether it is better now");
        it.enter(Phase::Up, now);
        let later = |seconds| now + Duration::from_secs(seconds);
        // It ran for two seconds each time.
        assert!(it.is_failing(&LIMITS, later(3)) && !it.is_failing(&LIMITS, later(4)));
        assert_eq!([59, 60].map(|seconds| it.failures(&LIMITS, later(seconds))), [4, 0]);
        // Told once, then when it is another end, then hourly.
        let tell = |it: &mut Watched, code| {
            it.enter(Phase::Up, now);
            let told = it.ended(State::Ended { code: Some(code) }, &LIMITS, now);
            it.is_news(&told, &LIMITS).then_some(told)
        };
        let words =
            "ended with exit code 1, as each time of late: started again every 5 s at least";
        assert_eq!(tell(&mut it, 1).as_deref(), Some(words));
        assert_eq!(tell(&mut it, 1), None);
        assert!(tell(&mut it, 4).is_some_and(|told| told.starts_with("ended with exit code 4, ")));
        assert!(tell(&mut it, 1).is_some());
        let again = (9..=120).filter(|_| tell(&mut it, 1).is_some()).count();
        assert_eq!(again, 2, "at the 60th and the 120th");
    }

    #[test]
    fn an_end_is_told_as_it_was() {
        let told = |state| watched(false).ended(state, &LIMITS, Instant::now());
        for (state, words) in [
            (State::Ended { code: Some(1) }, "ended with exit code 1: started again in 1.0 s"),
            (State::Ended { code: None }, "was killed: started again in 1.0 s"),
            (State::Over { told: "was preempted" }, "was preempted: started again in 1.0 s"),
            (State::Lost, "is gone, nobody knows how it ended: started again in 1.0 s"),
        ] {
            assert_eq!(told(state), words);
        }
    }

    #[test]
    fn each_rest_is_longer_until_it_ran_well() {
        let mut it = watched(false);
        let rests = [1, 1, 1, 1, 60, 1].map(|seconds| run(&mut it, seconds, None).unwrap());
        assert_eq!(rests, [1, 2, 4, 5, 1, 2]);
        assert_eq!(it.restarts, 6);
    }

    #[test]
    fn what_another_start_does_not_change_is_given_up() {
        let mut it = watched(false);
        // Any other end counts neither for nor against it.
        let codes = [Some(2), Some(101), Some(1), None, Some(4), Some(0)];
        assert!(codes.into_iter().all(|code| run(&mut it, 1, code).is_some()));
        assert!(run(&mut it, 60, Some(2)).is_some(), "it ran well meanwhile");
        assert!(run(&mut it, 1, Some(2)).is_some());
        assert!(run(&mut it, 1, Some(101)).is_none());
        assert_eq!(it.phase, Phase::GivenUp);
        // A server that never was ready has wrong settings, whatever it says.
        let mut it = watched(true);
        let rests = [1; 3].map(|seconds| run(&mut it, seconds, Some(1)).is_some());
        assert_eq!((rests, it.phase), ([true, true, false], Phase::GivenUp));
        let mut it = watched(false);
        assert!(run(&mut it, 1, Some(3)).is_none());
        assert_eq!(it.phase, Phase::Finished);
        // A program that is not there; a machine that is full may have room again.
        let mut it = watched(true);
        let now = Instant::now();
        let told = [true, false, true, true].map(|gone| it.not_started("x", gone, &LIMITS, now));
        let wanted = [
            "x: tried again in 1.0 s",
            "x: tried again in 2.0 s",
            "x, as each time of late: tried again every 5 s at least",
            "x: it is not tried again",
        ];
        assert_eq!((told.each_ref().map(String::as_str), it.phase), (wanted, Phase::GivenUp));
        assert_eq!(it.last_end.as_deref(), Some("could not be started: x"));
    }
}

//! The orderly end.

use std::time::Instant;

use super::super::{Phase, State};
use super::Supervisor;
use super::record::ENDING;

/// An end under way.
#[derive(Debug)]
pub(super) struct Drain {
    /// Which of the tiers is ending.
    tier: usize,
    since: Instant,
}

impl Supervisor {
    /// Begins to end: no process is started any more, and tier after tier is asked
    /// to end, each with its time of grace.
    pub fn drain(&mut self) {
        if self.drain.is_none() {
            let now = Instant::now();
            for watched in &mut self.watched {
                watched.failed = watched.is_failing(&self.limits, now);
            }
            self.drain = Some(Drain { tier: 0, since: now });
        }
    }

    /// Whether everything has ended.
    pub fn is_over(&self) -> bool {
        self.drain.as_ref().is_some_and(|drain| drain.tier >= ENDING.len())
    }

    pub(super) async fn drain_on(&mut self) {
        let now = Instant::now();
        let Some(Drain { tier, since }) = &self.drain else { return };
        let (at, since) = (*tier, *since);
        let Some(tier) = ENDING.get(at) else { return };
        let late = now.duration_since(since) >= self.limits.grace;
        let mut alive = false;
        for index in 0..self.watched.len() {
            if self.watched[index].child.tier == *tier {
                alive |= self.end(index, late).await;
            }
        }
        if !alive {
            self.drain = Some(Drain { tier: at + 1, since: now });
        }
    }

    /// Ends a process further. Returns whether it is still there.
    async fn end(&mut self, index: usize, force: bool) -> bool {
        let now = Instant::now();
        let watched = &mut self.watched[index];
        if !watched.phase.is_alive() || watched.child.argv.is_empty() {
            if !matches!(watched.phase, Phase::GivenUp | Phase::Finished | Phase::Over) {
                watched.enter(Phase::Over, now);
            }
            return false;
        }
        let polled = self.launcher.poll(&watched.job).await;
        if let Err(error) = &polled {
            // Who waits for the end is to know for whom.
            let told = super::chain(error);
            self.tell_once(index, format!("{told}: waiting"));
        }
        // One that cannot be asked about is asked again.
        let state = polled.unwrap_or(State::Running);
        let watched = &mut self.watched[index];
        if !state.is_alive() {
            // Asked to end, it ends with 0 unless it has lost something.
            let lost = matches!(state, State::Ended { code: Some(1 | 101) });
            watched.failed |= lost && watched.is_ours();
            watched.enter(Phase::Over, now);
            let told = match state {
                State::Ended { code: Some(code) } if code != 0 => {
                    format!("ended with exit code {code}")
                }
                State::Lost => "is gone".to_owned(),
                // Of one that was taken up nobody knows more.
                _ => "ended".to_owned(),
            };
            self.tell(index, &told);
            return false;
        }
        if watched.phase != Phase::Ending || force {
            let asked = self.launcher.stop(&watched.job, force).await;
            if watched.phase != Phase::Ending && asked.is_ok() {
                watched.enter(Phase::Ending, now);
            }
            // Who could not be reached with it is told again.
            if force && asked.is_ok() {
                self.tell_once(index, "did not end in time, and is killed".to_owned());
            }
        }
        true
    }
}

//! Where sessions, captured answers and the journal meet.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::Value;

use crate::capture::{Captured, Outcome};
use crate::journal::{self, Counts, Feedback, Journal, Remembered};
use crate::session::{Arrival, Closed, Counted, Incoming, Key, Known, Limits, Source, Tracker};
use crate::trajectory::words::NextStateKind;
use crate::wire::openai::Rating;

use super::exchange::Exchange;
use super::metrics::{Metrics, count};
use super::row::{Turn, entry};

/// What the recorder has to know besides the journal.
pub(super) struct Settings {
    pub(super) idle: Duration,
    /// Microseconds.
    pub(super) retention: i64,
    /// Turns that wait for a next state, and bytes of their rows, at most.
    pub(super) open: (usize, usize),
}

/// Where sessions, captured answers and the journal meet.
#[derive(Debug)]
pub(super) struct Recorder {
    tracker: Mutex<Tracker>,
    journal: Journal,
    metrics: Arc<Metrics>,
}

impl Recorder {
    /// Takes the spool folder, and up the turns of an earlier run.
    pub(super) fn open(
        options: journal::Options,
        settings: Settings,
        metrics: Arc<Metrics>,
    ) -> Result<Self, journal::Error> {
        let remembered = options.remembered;
        let (journal, recovered) = Journal::open(options)?;
        let mut tracker = Tracker::new(Limits {
            idle: micros(settings.idle),
            retention: settings.retention,
            turns: remembered,
            open: settings.open.0,
            open_bytes: settings.open.1,
        });
        let mut known: Vec<_> = recovered.known.into_iter().map(|known| (known, false)).collect();
        for entry in &recovered.open {
            // Nobody could extend an empty answer.
            match entry.lineage.key {
                Some(_) => known.push((entry.remembered(), true)),
                None => journal.close(entry.turn_id.clone(), false),
            }
        }
        known.sort_by(|(a, _), (b, _)| {
            (a.finished_at, &a.turn_id).cmp(&(b.finished_at, &b.turn_id))
        });
        known.into_iter().filter_map(|(known, open)| restored(known, open)).for_each(|known| {
            tracker.restore(known);
        });
        for entry in &recovered.open {
            tracker.weigh(&entry.turn_id, entry.weight());
        }
        Ok(Self { tracker: Mutex::new(tracker), journal, metrics })
    }

    /// Returns the journal's counters.
    pub(super) fn counts(&self) -> &Arc<Counts> {
        self.journal.counts()
    }

    /// Places a request; the turn it extends gets its next state, and what the
    /// client says of it. Returns what became of these words, too.
    pub(super) fn arrive(
        &self,
        incoming: &Incoming<'_>,
        rating: Rating,
    ) -> (Arrival, Option<&'static str>) {
        let mut tracker = self.tracker();
        let arrival = tracker.arrive(incoming);
        let named = incoming.session.as_ref().map(|(session, _)| session);
        let latest = || tracker.resolve(named?, None).map(|known| known.turn_id.clone());
        // Before the turn becomes a row, so that it has it.
        let rated = self.rate(rating, arrival.parent.clone().or_else(latest));
        if let Some(extended) = &arrival.extended {
            let kind = if extended.tool { NextStateKind::Tool } else { NextStateKind::User };
            let next_state = Value::from(extended.next_state.clone()).to_string();
            // Under the lock, so that the journal hears it in the same order.
            self.journal.extend(extended.turn_id.clone(), next_state, kind);
        }
        match arrival.counted {
            Some(Counted::Late) => count(&self.metrics.late_next_state),
            Some(Counted::Ambiguous) => count(&self.metrics.ambiguous),
            Some(Counted::Again) | None => {}
        }
        (arrival, rated)
    }

    /// Keeps what a side request says of the latest turn of its session.
    pub(super) fn rate_latest(&self, rating: Rating, session_id: Option<&str>) {
        let latest = session_id.and_then(|session| {
            self.tracker().resolve(session, None).map(|known| known.turn_id.clone())
        });
        self.rate(rating, latest);
    }

    /// Keeps what a client says of a turn in its next request. Words that are none
    /// are counted and told, and never a reason to refuse the chat that they came
    /// with: it is a person's, and the words are a program's.
    fn rate(&self, rating: Rating, turn_id: Option<String>) -> Option<&'static str> {
        if rating.odd {
            count(&self.metrics.odd_feedback);
        }
        if rating.is_empty() {
            return rating.odd.then_some("ignored");
        }
        if turn_id.is_none() {
            count(&self.metrics.stray_feedback);
            return Some("no_turn");
        }
        count(&self.metrics.feedback);
        self.journal.rate(Feedback {
            turn_id,
            session_id: None,
            turn: None,
            reward: rating.reward,
            text: rating.text,
            at: now(),
        });
        Some(if rating.odd { "partly" } else { "taken" })
    }

    /// Makes an answer known that a client may go on with from now on.
    pub(super) fn answered(&self, exchange: &mut Exchange, choice: u8, response: &Value) {
        let turn_id = exchange.turn_id(choice);
        self.tracker().answer(&exchange.arrival.id, choice, &turn_id, (response, now()));
    }

    /// Ends a request whose answer is not recorded.
    pub(super) fn abandon(&self, request_id: &str, reason: &'static str) {
        self.metrics.skip(reason);
        let closed = self.tracker().finish(request_id, false, now());
        self.close(closed);
    }

    /// Ends a session by name.
    pub(super) fn end_session(&self, session_id: &str) {
        let closed = self.tracker().end_session(session_id);
        self.close(closed);
    }

    /// Records an answer. When this returns, its turns survive the process,
    /// unless the disk fails, which is counted.
    pub(super) async fn record(
        &self,
        mut exchange: Exchange,
        captured: Vec<Captured>,
        versions: (Option<String>, Option<String>),
    ) {
        let finished_at = now();
        let mut recorded = false;
        let mut extended = false;
        let mut unextendable = Vec::new();
        let mut left = captured.len();
        for choice in captured {
            left -= 1;
            let ended_well = matches!(choice.outcome, Outcome::Complete | Outcome::Truncated);
            if ended_well && choice.is_empty() {
                self.metrics.skip("empty_answer");
                continue;
            }
            let turn_id = exchange.turn_id(choice.choice);
            let answer = (&choice.response, finished_at);
            let known =
                self.tracker().answer(&exchange.arrival.id, choice.choice, &turn_id, answer);
            if let Some(reason) = choice.untrainable_reason {
                self.metrics.untrainable(reason);
            }
            count(&self.metrics.turns);
            if exchange.arrival.source == Source::None {
                count(&self.metrics.no_session);
            }
            let extendable = known.is_some();
            let turn = Turn { turn_id: turn_id.clone(), known, finished_at };
            // The last one needs no copy of what may be a long conversation.
            let asked = match left {
                0 => std::mem::take(&mut exchange.asked),
                _ => exchange.asked.clone(),
            };
            let entry = entry(&exchange, choice, (turn, asked), &versions);
            self.tracker().weigh(&turn_id, entry.weight());
            self.journal.turn(entry).await;
            recorded = true;
            extended |= extendable;
            if !extendable {
                unextendable.push(turn_id);
            }
        }
        let ends = !extended && self.tracker().is_done(&exchange.arrival.id);
        let last = unextendable.len().saturating_sub(1);
        for (place, turn_id) in unextendable.into_iter().enumerate() {
            self.journal.close(turn_id, ends && place == last);
        }
        let closed = self.tracker().finish(&exchange.arrival.id, recorded, finished_at);
        exchange.finished = true;
        self.close(closed);
    }

    /// Keeps feedback for a turn that is named by id, by session and number, or
    /// as the latest of a session. Returns the turn and whether its row has it.
    pub(super) async fn feedback(&self, mut feedback: Feedback) -> Option<(Option<String>, bool)> {
        if feedback.turn_id.is_none() {
            let session = feedback.session_id.clone().unwrap_or_default();
            let known = self.tracker().resolve(&session, feedback.turn).cloned();
            feedback.turn_id = known.map(|known| known.turn_id);
        }
        let turn_id = feedback.turn_id.clone();
        let in_row = self.journal.feedback(feedback).await?;
        count(&self.metrics.feedback);
        Some((turn_id, in_row))
    }

    /// Closes idle sessions, again and again.
    pub(super) async fn tick(self: Arc<Self>) {
        loop {
            tokio::time::sleep(Duration::from_millis(500)).await;
            let (closed, hurried) = {
                let mut tracker = self.tracker();
                (tracker.expire(now()), tracker.hurried())
            };
            self.metrics.hurried.store(hurried, Ordering::Relaxed);
            self.close(closed);
        }
    }

    /// Writes what there is to write. Returns how many turns stay open.
    pub(super) async fn finish(&self, flush_open: bool) -> Result<u64, journal::Error> {
        self.journal.finish(flush_open).await
    }

    fn close(&self, closed: Vec<Closed>) {
        for Closed { turn_id, session_end } in closed {
            self.journal.close(turn_id, session_end);
        }
    }

    fn tracker(&self) -> MutexGuard<'_, Tracker> {
        // A panic inside the tracker must not end all chats.
        self.tracker.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns a turn of an earlier run as pairing needs it.
fn restored(known: Remembered, open: bool) -> Option<Known> {
    Some(Known {
        key: Key::parse(known.lineage.key.as_deref()?)?,
        system: Key::parse(&known.lineage.system)?,
        turn_id: known.turn_id,
        session_id: known.session_id,
        stated: known.lineage.stated,
        turn: known.turn,
        branch: known.branch,
        client: known.client,
        address: known.lineage.address,
        at: known.finished_at,
        open,
    })
}

/// Returns microseconds since 1970.
pub(super) fn now() -> i64 {
    micros(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

//! Where sessions, captured answers and the journal meet.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::Value;

use crate::capture::{Captured, Dialect, Outcome};
use crate::journal::{self, Counts, Entry, Feedback, Journal, Lineage, Origin, Remembered};
use crate::session::{Arrival, Closed, Counted, Incoming, Key, Known, Limits, Source, Tracker};
use crate::trajectory::words::{
    LogProbKind, NextStateKind, SessionSource, Status, TokenSource, WeightVersionSource,
};

use super::exchange::{Asked, Exchange};
use super::metrics::{Metrics, count};

/// Turns remembered for pairing, at most.
const REMEMBERED: usize = 65_536;

/// What the recorder has to know besides the journal.
pub(super) struct Settings {
    pub(super) idle: Duration,
    /// Microseconds.
    pub(super) retention: i64,
    pub(super) temperature: Option<f32>,
    pub(super) dialect: Dialect,
    /// What makes the ids of the engine's answers.
    pub(super) origin: Origin,
}

/// Where sessions, captured answers and the journal meet.
#[derive(Debug)]
pub(super) struct Recorder {
    tracker: Mutex<Tracker>,
    journal: Journal,
    metrics: Arc<Metrics>,
    temperature: Option<f32>,
    log_prob_kind: LogProbKind,
    origin: Origin,
}

impl Recorder {
    /// Takes the spool folder, and up the turns of an earlier run.
    pub(super) fn open(
        options: journal::Options,
        settings: Settings,
        metrics: Arc<Metrics>,
    ) -> Result<Self, journal::Error> {
        let (journal, recovered) = Journal::open(options)?;
        let mut tracker = Tracker::new(Limits {
            idle: micros(settings.idle),
            retention: settings.retention,
            turns: REMEMBERED,
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
        Ok(Self {
            tracker: Mutex::new(tracker),
            journal,
            metrics,
            temperature: settings.temperature,
            origin: settings.origin,
            log_prob_kind: LogProbKind::of(settings.dialect.tempers_log_probs()),
        })
    }

    /// Returns the journal's counters.
    pub(super) fn counts(&self) -> &Arc<Counts> {
        self.journal.counts()
    }

    /// Places a request; the turn it extends gets its next state.
    pub(super) fn arrive(&self, incoming: &Incoming<'_>) -> Arrival {
        let mut tracker = self.tracker();
        let arrival = tracker.arrive(incoming);
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
        arrival
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
        for choice in captured {
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
            let entry = self.entry(&exchange, choice, turn, &versions);
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
        if !in_row {
            count(&self.metrics.late_feedback);
        }
        Some((turn_id, in_row))
    }

    /// Closes idle sessions, again and again.
    pub(super) async fn tick(self: Arc<Self>) {
        loop {
            tokio::time::sleep(Duration::from_millis(500)).await;
            let closed = self.tracker().expire(now());
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

    fn entry(
        &self,
        exchange: &Exchange,
        choice: Captured,
        Turn { turn_id, known, finished_at }: Turn,
        polled: &(Option<String>, Option<String>),
    ) -> Entry {
        let arrival = &exchange.arrival;
        let Asked { model, messages, tools, settings, client, address, system, created_at } =
            exchange.asked.clone();
        let (weight_version, weight_version_end, weight_version_source) = match choice
            .weight_version
        {
            Some(start) => (Some(start), choice.weight_version_end, WeightVersionSource::Answer),
            None if polled.0.is_some() => {
                (polled.0.clone(), polled.1.clone(), WeightVersionSource::Polled)
            }
            None => (None, None, WeightVersionSource::None),
        };
        Entry {
            session_id: arrival.session_id.clone(),
            turn: arrival.turn,
            turn_id,
            parent_turn_id: arrival.parent.clone(),
            branch: known
                .as_ref()
                .map_or_else(|| arrival.branch.clone(), |known| known.branch.clone()),
            request_id: arrival.id.clone(),
            choice: choice.choice,
            client,
            session_source: match arrival.source {
                Source::Header => SessionSource::Header,
                Source::Affinity => SessionSource::Affinity,
                Source::Body => SessionSource::Body,
                Source::Inferred => SessionSource::Inferred,
                Source::None => SessionSource::None,
            },
            session_confidence: arrival.confidence,
            created_at,
            finished_at,
            model,
            weight_version,
            weight_version_end,
            weight_version_source,
            sampling: journal::Settings {
                temperature: settings.temperature.or(self.temperature),
                top_p: settings.top_p,
                top_k: settings.top_k,
                min_p: settings.min_p,
                seed: settings.seed,
                max_tokens: settings.max_tokens,
                log_prob_kind: self.log_prob_kind,
            },
            messages,
            tools,
            response: choice.response.to_string(),
            finish_reason: choice.finish_reason,
            matched_stop: choice.matched_stop,
            ends_with_stop_token: choice.ends_with_stop_token,
            status: match choice.outcome {
                Outcome::Complete => Status::Complete,
                Outcome::Truncated => Status::Truncated,
                Outcome::Aborted => Status::Aborted,
                Outcome::Failed => Status::Failed,
            },
            usage_completion_tokens: choice.completion_tokens,
            token_source: match choice.response_ids {
                Some(_) => TokenSource::Engine,
                None => TokenSource::None,
            },
            prompt_ids: choice.prompt_ids,
            response_ids: choice.response_ids,
            rollout_log_probs: choice.log_probs,
            untrainable_reason: choice.untrainable_reason.map(str::to_owned),
            next_state: None,
            next_state_kind: NextStateKind::None,
            session_end: false,
            reward_explicit: None,
            feedback_text: None,
            origin: self.origin.clone(),
            lineage: Lineage {
                stated: !matches!(arrival.source, Source::Inferred | Source::None),
                key: known.map(|known| known.key.to_string()),
                system: system.to_string(),
                address,
            },
        }
    }
}

/// What is known of a turn besides its answer.
struct Turn {
    turn_id: String,
    /// None if nobody can extend it.
    known: Option<Known>,
    finished_at: i64,
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

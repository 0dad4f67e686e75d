//! What is counted, and its Prometheus text.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::journal::Counts;
use crate::wire::prometheus;

use super::fleet::Fleet;
use super::upstream::Upstream;

/// The counters of a proxy. Labels are words of ours, never a client's.
#[derive(Debug, Default)]
pub(super) struct Metrics {
    pub(super) requests: AtomicU64,
    pub(super) turns: AtomicU64,
    pub(super) bytes_from_engine: AtomicU64,
    pub(super) bytes_to_clients: AtomicU64,
    pub(super) late_next_state: AtomicU64,
    pub(super) ambiguous: AtomicU64,
    pub(super) no_session: AtomicU64,
    pub(super) feedback: AtomicU64,
    pub(super) odd_feedback: AtomicU64,
    pub(super) stray_feedback: AtomicU64,
    pub(super) hurried: AtomicU64,
    skipped: Mutex<BTreeMap<&'static str, u64>>,
    untrainable: Mutex<BTreeMap<&'static str, u64>>,
    refused: Mutex<BTreeMap<&'static str, u64>>,
}

/// What is so at the moment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Now {
    /// Requests on their way.
    pub(super) running: usize,
    /// Bytes of those that wait for an engine.
    pub(super) queued: usize,
    /// Lines of the request log that were lost.
    pub(super) lost_lines: usize,
}

/// What a run came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    /// Turns captured.
    pub turns: u64,
    /// Of these, the ones that came without a session.
    pub no_session: u64,
    /// Rows written to shards.
    pub rows: u64,
    /// Turns that stay open for the next run.
    pub open: u64,
    /// Requests, and choices of an answer, that were not captured, by reason.
    pub skipped: Vec<(&'static str, u64)>,
    /// Turns that must not be trained on, by reason.
    pub untrainable: Vec<(&'static str, u64)>,
}

/// Adds one to a counter.
pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Metrics {
    /// Counts a request that is not captured.
    pub(super) fn skip(&self, reason: &'static str) {
        add(&self.skipped, reason);
    }

    /// Counts choices of an answer that are not captured.
    pub(super) fn skip_choices(&self, reason: &'static str, choices: usize) {
        for _ in 0..choices {
            add(&self.skipped, reason);
        }
    }

    /// Counts a turn that must not be trained on.
    pub(super) fn untrainable(&self, reason: &'static str) {
        add(&self.untrainable, reason);
    }

    /// Counts an answer of our own making.
    pub(super) fn refuse(&self, code: &'static str) {
        add(&self.refused, code);
    }

    /// Returns what the run has come to.
    pub(super) fn summary(&self, journal: &Counts, open: u64) -> Summary {
        Summary {
            turns: self.turns.load(Ordering::Relaxed),
            no_session: self.no_session.load(Ordering::Relaxed),
            rows: journal.rows.load(Ordering::Relaxed),
            open,
            skipped: list(&self.skipped),
            untrainable: list(&self.untrainable),
        }
    }

    /// Writes all counters in Prometheus' text format.
    pub(super) fn text(&self, journal: &Counts, now: &Now, fleet: &Fleet) -> String {
        let mut text = String::new();
        for (name, help, value) in [
            ("requests_total", "Requests received.", &self.requests),
            ("turns_total", "Turns captured.", &self.turns),
            ("turns_without_session_total", "Turns that came without a session.", &self.no_session),
            ("late_next_state_total", "Next states of turns closed before.", &self.late_next_state),
            ("ambiguous_total", "Histories that fit turns of several people.", &self.ambiguous),
            ("feedback_total", "Feedback received.", &self.feedback),
            ("late_feedback_total", "Feedback for rows written before.", &journal.late_feedback),
            ("lost_feedback_total", "Feedback that could not be kept.", &journal.lost_feedback),
            ("odd_feedback_total", "Ratings in a chat that are none.", &self.odd_feedback),
            ("stray_feedback_total", "Ratings in a chat of no known turn.", &self.stray_feedback),
            ("hurried_turns_total", "Open turns closed because of a limit.", &self.hurried),
            ("upstream_bytes_total", "Bytes received from the engine.", &self.bytes_from_engine),
            ("client_bytes_total", "Bytes sent to clients.", &self.bytes_to_clients),
            ("rows_total", "Rows written to shards.", &journal.rows),
            ("shards_total", "Shards written.", &journal.shards),
            (
                "journal_errors_total",
                "Turns that could not be logged at once.",
                &journal.append_errors,
            ),
            (
                "shard_errors_total",
                "Shards that could not be written at once.",
                &journal.shard_errors,
            ),
            ("lost_turns_total", "Turns lost to a disk that was away.", &journal.lost),
            ("journal_set_aside_bytes_total", "Damaged bytes set aside.", &journal.set_aside),
        ] {
            family(&mut text, name, "counter", help);
            sample(&mut text, name, None, value.load(Ordering::Relaxed));
        }
        for (name, help, value) in [
            ("open_turns", "Turns that wait for a next state.", &journal.open),
            ("waiting_rows", "Rows that wait for their shard.", &journal.waiting),
        ] {
            family(&mut text, name, "gauge", help);
            sample(&mut text, name, None, value.load(Ordering::Relaxed));
        }
        for (name, help, value) in [
            ("running_requests", "Requests on their way.", now.running),
            ("lost_log_lines", "Lines of the request log that were lost.", now.lost_lines),
            ("queued_bytes", "Bytes of requests that wait for an engine.", now.queued),
        ] {
            family(&mut text, name, "gauge", help);
            sample(&mut text, name, None, value as u64);
        }
        of_engines(&mut text, fleet);
        for (name, label, help, values) in [
            (
                "skipped_total",
                "reason",
                "Requests and choices that were not captured.",
                &self.skipped,
            ),
            ("untrainable_total", "reason", "Turns not to be trained on.", &self.untrainable),
            ("refused_total", "code", "Answers of the proxy itself.", &self.refused),
        ] {
            family(&mut text, name, "counter", help);
            for (word, value) in list(values) {
                sample(&mut text, name, Some((label, word)), value);
            }
        }
        text
    }
}

/// Writes what each engine does.
fn of_engines(text: &mut String, fleet: &Fleet) {
    type Figure = fn(&Upstream) -> u64;
    let figures: [(&str, &str, &str, Figure); 5] = [
        ("engine_requests_total", "counter", "Requests sent to an engine.", |engine| {
            engine.requests.load(Ordering::Relaxed)
        }),
        ("engine_failures_total", "counter", "Requests that an engine did not answer.", |engine| {
            engine.failures.load(Ordering::Relaxed)
        }),
        ("engine_running_requests", "gauge", "Requests on their way.", |engine| {
            engine.busy.load(Ordering::Relaxed) as u64
        }),
        ("engine_up", "gauge", "Whether an engine is well.", |engine| u64::from(!engine.is_away())),
        ("engine_held", "gauge", "Whether an engine is on hold.", |engine| {
            u64::from(engine.is_held())
        }),
    ];
    for (name, kind, help, figure) in figures {
        family(text, name, kind, help);
        for engine in fleet.engines() {
            sample(text, name, Some(("engine", &engine.url)), figure(engine));
        }
    }
}

fn family(text: &mut String, name: &str, kind: &str, help: &str) {
    prometheus::family(text, &format!("oclaw_{name}"), kind, help);
}

fn sample(text: &mut String, name: &str, label: Option<(&str, &str)>, value: u64) {
    prometheus::sample(text, &format!("oclaw_{name}"), label.as_slice(), value);
}

fn add(counters: &Mutex<BTreeMap<&'static str, u64>>, word: &'static str) {
    if let Ok(mut counters) = counters.lock() {
        *counters.entry(word).or_default() += 1;
    }
}

fn list(counters: &Mutex<BTreeMap<&'static str, u64>>) -> Vec<(&'static str, u64)> {
    counters
        .lock()
        .map(|counters| counters.iter().map(|(k, v)| (*k, *v)).collect())
        .unwrap_or_default()
}

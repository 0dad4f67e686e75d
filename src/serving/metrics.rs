//! What the engine counts, under SGLang's names.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::wire::prometheus;

use super::compute::Status;

/// Bounds of times to a first token, in seconds; all bounds are SGLang's.
const FIRST: &[f64] = &[
    0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0,
    400.0,
];
/// Bounds of times between tokens.
const BETWEEN: &[f64] = &[
    0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2,
    0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0,
];
/// Bounds of times of whole answers.
const WHOLE: &[f64] = &[
    0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0,
    400.0, 600.0, 1200.0, 1800.0, 2400.0,
];
/// How long tokens are counted for one throughput.
const WINDOW: Duration = Duration::from_secs(1);
/// After so long without a token nothing was being generated.
const IDLE: Duration = Duration::from_secs(10);

/// The figures of an engine.
#[derive(Debug)]
pub(super) struct Metrics {
    answers: AtomicU64,
    aborted: AtomicU64,
    prompt_tokens: AtomicU64,
    cached_tokens: AtomicU64,
    generated_tokens: AtomicU64,
    times: Mutex<Times>,
}

#[derive(Debug)]
struct Times {
    first: Histogram,
    between: Histogram,
    whole: Histogram,
    rate: Rate,
}

impl Metrics {
    pub(super) fn new() -> Self {
        let times = Times {
            first: Histogram::new(FIRST),
            between: Histogram::new(BETWEEN),
            whole: Histogram::new(WHOLE),
            rate: Rate::default(),
        };
        Self {
            answers: AtomicU64::new(0),
            aborted: AtomicU64::new(0),
            prompt_tokens: AtomicU64::new(0),
            cached_tokens: AtomicU64::new(0),
            generated_tokens: AtomicU64::new(0),
            times: Mutex::new(times),
        }
    }

    /// Counts the prompt of a request, once for all its answers, as `usage` does.
    pub(super) fn prompt(&self, tokens: usize) {
        self.prompt_tokens.fetch_add(tokens as u64, Ordering::Relaxed);
    }

    /// Counts tokens of such a prompt that were there already.
    pub(super) fn cached(&self, tokens: usize) {
        self.cached_tokens.fetch_add(tokens as u64, Ordering::Relaxed);
    }

    fn times(&self) -> MutexGuard<'_, Times> {
        self.times.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes all figures in Prometheus' text format.
    pub(super) fn text(&self, status: &Status, model: &str) -> String {
        let mut text = String::new();
        let labels = [("model_name", model)];
        let times = self.times();
        let busy = status.running > 0;
        let rate = if busy { times.rate.last } else { 0.0 };
        for (name, help, value) in [
            ("num_running_reqs", "Answers that are being generated.", status.running as f64),
            ("num_queue_reqs", "Answers and scores that wait.", status.waiting as f64),
            ("gen_throughput", "Tokens generated per second of late.", rate),
        ] {
            let name = format!("sglang:{name}");
            prometheus::family(&mut text, &name, "gauge", help);
            prometheus::sample(&mut text, &name, &labels, value);
        }
        for (name, help, counter) in [
            ("num_requests_total", "Answers asked for.", &self.answers),
            ("num_aborted_requests_total", "Answers that were cut off.", &self.aborted),
            ("prompt_tokens_total", "Tokens of prompts.", &self.prompt_tokens),
            ("cached_tokens_total", "Those that were there already.", &self.cached_tokens),
            ("generation_tokens_total", "Tokens generated.", &self.generated_tokens),
        ] {
            let name = format!("sglang:{name}");
            prometheus::family(&mut text, &name, "counter", help);
            prometheus::sample(&mut text, &name, &labels, counter.load(Ordering::Relaxed));
        }
        for (name, help, histogram) in [
            ("time_to_first_token_seconds", "Time to the first token.", &times.first),
            ("inter_token_latency_seconds", "Time between two tokens.", &times.between),
            ("e2e_request_latency_seconds", "Time of a whole answer.", &times.whole),
        ] {
            histogram.write(&mut text, &format!("sglang:{name}"), help, model);
        }
        text
    }
}

/// The clock of one answer. One that is dropped before its end was cut off.
#[derive(Debug)]
pub(super) struct Clock {
    metrics: Arc<Metrics>,
    begun: Instant,
    last: Option<Instant>,
    ended: bool,
}

impl Clock {
    /// Counts an answer that is asked for.
    pub(super) fn start(metrics: &Arc<Metrics>) -> Self {
        metrics.answers.fetch_add(1, Ordering::Relaxed);
        Self { metrics: metrics.clone(), begun: Instant::now(), last: None, ended: false }
    }

    /// Counts a token.
    pub(super) fn token(&mut self) {
        let now = Instant::now();
        self.metrics.generated_tokens.fetch_add(1, Ordering::Relaxed);
        let mut times = self.metrics.times();
        match self.last.replace(now) {
            None => times.first.observe(now - self.begun),
            Some(last) => times.between.observe(now - last),
        }
        times.rate.token(now);
    }

    /// Counts the end of an answer that was not cut off.
    pub(super) fn end(&mut self) {
        if !self.ended {
            self.ended = true;
            self.metrics.times().whole.observe(self.begun.elapsed());
        }
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        if !self.ended {
            self.metrics.aborted.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[derive(Debug)]
struct Histogram {
    bounds: &'static [f64],
    /// As many as there are bounds; larger values are in the sum and count alone.
    counts: Vec<u64>,
    sum: f64,
    count: u64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        Self { bounds, counts: vec![0; bounds.len()], sum: 0.0, count: 0 }
    }

    fn observe(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        let place = self.bounds.partition_point(|bound| *bound < seconds);
        if let Some(count) = self.counts.get_mut(place) {
            *count += 1;
        }
        self.sum += seconds;
        self.count += 1;
    }

    fn write(&self, text: &mut String, name: &str, help: &str, model: &str) {
        prometheus::family(text, name, "histogram", help);
        let bucket = format!("{name}_bucket");
        let mut below = 0;
        for (bound, count) in self.bounds.iter().zip(&self.counts) {
            below += count;
            // Python writes 1.0 where Rust's `{}` writes 1; scrapers compare the words.
            let bound = format!("{bound:?}");
            prometheus::sample(text, &bucket, &[("model_name", model), ("le", &bound)], below);
        }
        prometheus::sample(text, &bucket, &[("model_name", model), ("le", "+Inf")], self.count);
        let labels = [("model_name", model)];
        prometheus::sample(text, &format!("{name}_sum"), &labels, self.sum);
        prometheus::sample(text, &format!("{name}_count"), &labels, self.count);
    }
}

/// Tokens per second over the last full window.
#[derive(Debug, Default)]
struct Rate {
    /// Start of the window, its tokens, and the last of them.
    window: Option<(Instant, u64, Instant)>,
    last: f64,
}

impl Rate {
    fn token(&mut self, now: Instant) {
        // The first token after a rest starts the clock, and is not counted.
        let (start, tokens) = match self.window {
            Some((start, tokens, last)) if now - last < IDLE => (start, tokens + 1),
            _ => (now, 0),
        };
        let long = now - start;
        self.window = match long >= WINDOW {
            true => {
                self.last = tokens as f64 / long.as_secs_f64();
                Some((now, 0, now))
            }
            false => Some((start, tokens, now)),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_stands_in_its_bucket_and_in_all_above() {
        let mut histogram = Histogram::new(&[0.1, 1.0, 2.0]);
        for milliseconds in [50, 100, 1500, 9000] {
            histogram.observe(Duration::from_millis(milliseconds));
        }
        let mut text = String::new();
        histogram.write(&mut text, "h", "Help.", "m");
        let expected = "# HELP h Help.\n# TYPE h histogram\n\
            h_bucket{model_name=\"m\",le=\"0.1\"} 2\nh_bucket{model_name=\"m\",le=\"1.0\"} 2\n\
            h_bucket{model_name=\"m\",le=\"2.0\"} 3\nh_bucket{model_name=\"m\",le=\"+Inf\"} 4\n\
            h_sum{model_name=\"m\"} 10.65\nh_count{model_name=\"m\"} 4\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn a_rest_is_no_part_of_a_rate() {
        let mut rate = Rate::default();
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        (0..=4).for_each(|quarter| rate.token(at(250 * quarter)));
        assert_eq!(rate.last, 4.0);
        // A minute later: half a second apart.
        (0..=2).for_each(|half| rate.token(at(60_000 + 500 * half)));
        assert_eq!(rate.last, 2.0);
    }
}

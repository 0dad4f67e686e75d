//! The limits of `serve` as flags.

use std::time::Duration;

use oclaw::proxy::{LEAST_IDLE, Limits};

use crate::units;

/// How much there may be of everything, and for how long.
#[derive(clap::Args, Debug)]
pub(crate) struct LimitFlags {
    /// Largest body of a request
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = units::bytes)]
    max_body: usize,
    /// Largest headers of a request
    #[arg(long, value_name = "SIZE", default_value = "64KiB", value_parser = units::bytes)]
    max_headers: usize,
    /// Most requests on their way at a time; more are refused for the moment
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = at_least_one)]
    max_streams: usize,
    /// Most bytes of requests that wait for an engine at a time
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = units::bytes)]
    max_queue: usize,
    /// Largest answer that is recorded, unpacked; a larger one only passes
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = units::bytes)]
    max_answer: usize,
    /// Most turns that wait for their next state; those of the oldest sessions make room
    #[arg(long, value_name = "N", default_value_t = 262_144, value_parser = at_least_one)]
    max_open_turns: usize,
    /// Most bytes of such turns
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = units::bytes)]
    max_open_bytes: usize,
    /// Longest wait for the engine to begin its answer
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = units::duration)]
    answer_timeout: Duration,
    /// Longest silence inside an answer or a request, or of a client that takes nothing. Idle
    /// connections, and those on which the head of a request does not come, are closed after
    /// as long, but not before 2 minutes
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = units::duration)]
    silence: Duration,
    /// Longest wait of a request while the engines are on hold
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = units::duration)]
    hold: Duration,
    /// Time that running answers get at the end
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = units::duration)]
    drain: Duration,
    /// How often each of several engines is asked how it is
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = units::duration)]
    health_interval: Duration,
}

impl LimitFlags {
    /// Returns the limits.
    pub(super) fn limits(&self) -> Limits {
        Limits {
            body: self.max_body,
            headers: self.max_headers,
            streams: self.max_streams,
            queue: self.max_queue,
            answer_bytes: self.max_answer,
            open_turns: self.max_open_turns,
            open_bytes: self.max_open_bytes,
            answer: self.answer_timeout,
            silence: self.silence,
            idle: self.silence.max(LEAST_IDLE),
            hold: self.hold,
            drain: self.drain,
            // A clock that never rests would keep a core busy.
            health: self.health_interval.max(Duration::from_millis(10)),
        }
    }
}

/// Reads a number that is not 0.
fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("not a number from 1 on".to_owned()),
        Ok(number) => Ok(number),
    }
}

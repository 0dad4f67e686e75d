//! When to try again, and how long to wait before it.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How often and how patiently a failed call is tried again.
#[derive(Debug, Clone, PartialEq)]
pub struct Retries {
    /// Tries in all, the first included.
    pub tries: u32,
    /// Wait before the second try; doubles from then on.
    pub first_wait: Duration,
    /// Longest wait. A server that asks for more is not called again.
    pub longest_wait: Duration,
}

impl Default for Retries {
    fn default() -> Self {
        Self {
            tries: 4,
            first_wait: Duration::from_millis(500),
            longest_wait: Duration::from_secs(60),
        }
    }
}

impl Retries {
    /// Returns retries that do not happen.
    pub fn none() -> Self {
        Self { tries: 1, ..Self::default() }
    }

    /// Returns the wait after the failed try number `tried` (from 1), or
    /// nothing if that was the last. `share` in 0..1 spreads callers that
    /// failed together: half of the wait is fixed, half is scaled by it.
    pub(super) fn wait(&self, tried: u32, asked: Option<Duration>, share: f64) -> Option<Duration> {
        if tried >= self.tries {
            return None;
        }
        let doubled =
            self.first_wait.saturating_mul(1 << (tried - 1).min(20)).min(self.longest_wait);
        let spread = doubled.mul_f64(0.5 + 0.5 * share);
        match asked {
            Some(asked) if asked > self.longest_wait => None,
            // The server's word holds; the spread comes on top, not instead.
            Some(asked) => Some(asked + self.first_wait.mul_f64(0.5 * share)),
            None => Some(spread),
        }
    }
}

/// Returns a random number in 0..1, good enough to spread callers.
pub(super) fn share() -> f64 {
    let random = RandomState::new().build_hasher().finish();
    (random >> 11) as f64 / (1u64 << 53) as f64
}

/// Reads a `Retry-After` header: seconds, or an HTTP date.
pub(super) fn retry_after(header: &str, now: SystemTime) -> Option<Duration> {
    let header = header.trim();
    if let Ok(seconds) = header.parse::<f64>() {
        return Duration::try_from_secs_f64(seconds).ok();
    }
    let at = UNIX_EPOCH + Duration::from_secs(http_date(header)?);
    Some(at.duration_since(now).unwrap_or_default())
}

/// Reads `Sun, 06 Nov 1994 08:49:37 GMT` as seconds since 1970.
fn http_date(text: &str) -> Option<u64> {
    const MONTHS: &str = "JanFebMarAprMayJunJulAugSepOctNovDec";
    let mut words = text.split_once(", ")?.1.split(' ');
    let day: u64 = words.next()?.parse().ok()?;
    let name = words.next().filter(|name| name.len() == 3)?;
    let month = MONTHS.find(name)? as u64 / 3 + 1;
    let year: u64 = words.next()?.parse().ok().filter(|year| (1970..10_000).contains(year))?;
    let mut clock = words.next()?.split(':').map(|part| part.parse::<u64>().ok());
    let (hour, minute, second) = (clock.next()??, clock.next()??, clock.next()??);
    // Days from 1970-03-01 in years that begin in March, so that the leap day is the last.
    let (year, shifted) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * shifted + 2) / 5 + day;
    let days = days.checked_sub(719_469)?;
    Some(((days * 24 + hour) * 60 + minute) * 60 + second)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(number: f64) -> Option<Duration> {
        Some(Duration::from_secs_f64(number))
    }

    #[test]
    fn waits_double_up_to_the_longest() {
        let retries = Retries {
            tries: 5,
            first_wait: Duration::from_secs(1),
            longest_wait: Duration::from_secs(3),
        };
        assert_eq!(retries.wait(1, None, 1.0), seconds(1.0));
        assert_eq!(retries.wait(1, None, 0.0), seconds(0.5));
        assert_eq!(retries.wait(2, None, 1.0), seconds(2.0));
        assert_eq!(retries.wait(4, None, 1.0), seconds(3.0));
        assert_eq!(retries.wait(5, None, 1.0), None);
        assert_eq!(Retries::none().wait(1, None, 1.0), None);
    }

    #[test]
    fn the_servers_word_is_kept_or_the_call_given_up() {
        let retries = Retries {
            tries: 3,
            first_wait: Duration::from_secs(1),
            longest_wait: Duration::from_secs(10),
        };
        assert_eq!(retries.wait(1, seconds(2.0), 0.0), seconds(2.0));
        assert_eq!(retries.wait(1, seconds(2.0), 1.0), seconds(2.5));
        assert_eq!(retries.wait(1, seconds(11.0), 0.0), None);
    }

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let now = UNIX_EPOCH + Duration::from_secs(784_111_777);
        assert_eq!(retry_after("2", now), seconds(2.0));
        assert_eq!(retry_after(" 0.5 ", now), seconds(0.5));
        assert_eq!(retry_after("Sun, 06 Nov 1994 08:49:47 GMT", now), seconds(10.0));
        assert_eq!(retry_after("Sun, 06 Nov 1994 08:49:37 GMT", now), seconds(0.0));
        assert_eq!(retry_after("Thu, 01 Jan 1970 00:00:00 GMT", now), seconds(0.0));
        for text in ["", "soon", "-1", "Sun, 06 Foo 1994 08:49:37 GMT"] {
            assert_eq!(retry_after(text, now), None, "{text}");
        }
    }

    #[test]
    fn shares_lie_between_nothing_and_all() {
        assert!((0..100).all(|_| (0.0..1.0).contains(&share())));
    }
}

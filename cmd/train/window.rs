//! When a step may begin: while nobody chats, and in the hours that are given.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use super::WindowArgs;
use crate::hours::minute_of_day;

impl WindowArgs {
    /// Says why no step may begin now.
    pub(super) fn shut(&self) -> Option<String> {
        let minute = minute_of_day();
        if !self.hours.is_empty() && !self.hours.iter().any(|hours| hours.contain(minute)) {
            return Some("outside `--hours`".to_owned());
        }
        let (Some(wanted), Some(spool)) = (self.when_idle, &self.spool) else { return None };
        let quiet = quiet_for(spool)?;
        (quiet < wanted).then(|| "people are chatting".to_owned())
    }
}

/// Returns how long ago the last turn came in, if any ever did: every turn goes
/// through the journal.
fn quiet_for(spool: &Path) -> Option<Duration> {
    let entries = fs::read_dir(spool.join(".journal")).ok()?;
    let written = entries.filter_map(|entry| entry.ok()?.metadata().ok()?.modified().ok()).max()?;
    // A clock that was set back tells nothing; then it was just now.
    Some(SystemTime::now().duration_since(written).unwrap_or_default())
}

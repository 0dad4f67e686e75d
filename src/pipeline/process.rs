//! Processes of this machine, told apart by number and start: a number is used
//! again.

use std::fs;

use serde::{Deserialize, Serialize};

/// Variable that carries the id of a job to all of its processes.
pub(super) const MARK: &str = "OCLAW_JOB";

/// A process that is, or was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Its number.
    pub pid: u32,
    /// When it started, in ticks since the machine did.
    pub started: u64,
    /// Which start of the machine.
    pub boot: String,
}

impl Identity {
    /// Looks at a process, unless it has ended.
    pub fn of(pid: u32) -> Option<Self> {
        let facts = Facts::of(pid).filter(|facts| !facts.over)?;
        Some(Self { pid, started: facts.started, boot: boot() })
    }

    /// Whether it still runs.
    pub fn lives(&self) -> bool {
        Self::of(self.pid).as_ref() == Some(self)
    }
}

/// What the system says of a process.
struct Facts {
    /// Whether it has ended, and only waits to be asked how.
    over: bool,
    group: u32,
    started: u64,
}

impl Facts {
    fn of(pid: u32) -> Option<Self> {
        let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The second field is a name that may hold anything, in parentheses.
        let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
        Some(Self {
            over: matches!(*fields.first()?, "Z" | "X"),
            group: fields.get(2)?.parse().ok()?,
            started: fields.get(19)?.parse().ok()?,
        })
    }
}

/// Whether a process has ended, and nobody has asked how.
pub(super) fn is_over(pid: u32) -> bool {
    Facts::of(pid).is_some_and(|facts| facts.over)
}

fn boot() -> String {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    text.trim().to_owned()
}

/// Finds the process that leads a job, by the mark that all of its processes carry.
pub(super) fn find(mark: &str) -> Option<Identity> {
    let wanted = format!("{MARK}={mark}");
    let numbers = fs::read_dir("/proc")
        .ok()?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    for pid in numbers {
        let Ok(environment) = fs::read(format!("/proc/{pid}/environ")) else { continue };
        let marked = environment.split(|byte| *byte == 0).any(|it| it == wanted.as_bytes());
        if marked && Facts::of(pid).is_some_and(|facts| facts.group == pid && !facts.over) {
            return Identity::of(pid);
        }
    }
    None
}

/// Asks a process to end, or ends it at once with all of its group.
pub fn signal(leader: u32, at_once: bool) {
    let Ok(pid) = i32::try_from(leader) else { return };
    let (whom, signal) = if at_once { (-pid, libc::SIGKILL) } else { (pid, libc::SIGTERM) };
    #[expect(unsafe_code, reason = "std sends no other signal than SIGKILL, and to no group")]
    // SAFETY: plain numbers go in, and a failure changes nothing.
    unsafe {
        libc::kill(whom, signal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_its_start() {
        let own = Identity::of(std::process::id()).unwrap();
        assert!(own.lives());
        assert!(!Identity { started: own.started + 1, ..own.clone() }.lives());
        assert!(!Identity { boot: "another".to_owned(), ..own }.lives());
    }
}

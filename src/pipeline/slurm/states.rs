//! The states that Slurm tells of a job, by the words of `squeue` and `sacct`: base
//! states, and the flags that are shown in their place (job_state_codes of its
//! documentation).

use super::super::State;

/// What `sacct` says where nobody keeps accounts. The exit code of a job is lost
/// there, and its state known for minutes.
const NO_ACCOUNTS: &str = "accounting storage is disabled";

/// Reads a state and an exit code (`CODE:SIGNAL`). Nothing if it is none.
///
/// `sacct` takes 128 off a code that is as large: 130 of an interrupted command looks
/// like 2 there.
pub(super) fn read(word: &str, code: &str) -> Option<State> {
    // `CANCELLED by 1000`; a column that is too narrow ends with a plus.
    let word = word.split([' ', '+']).next().unwrap_or_default();
    let over = |told| Some(State::Over { told });
    match word {
        "PENDING" | "CONFIGURING" | "REQUEUED" | "REQUEUE_HOLD" | "REQUEUE_FED"
        | "RESV_DEL_HOLD" | "SPECIAL_EXIT" | "POWER_UP_NODE" => Some(State::Pending),
        "RUNNING" | "COMPLETING" | "SUSPENDED" | "STAGE_OUT" | "SIGNALING" | "STOPPED"
        | "RESIZING" | "UPDATE_DB" => Some(State::Running),
        "COMPLETED" => Some(State::Ended { code: Some(0) }),
        "FAILED" => Some(failed(code)),
        // Its exit code is that of whatever the end did to it.
        "CANCELLED" => over("was cancelled"),
        "TIMEOUT" => over("ran into its time limit"),
        "DEADLINE" => over("ran into its deadline"),
        "OUT_OF_MEMORY" => over("ran out of memory"),
        "NODE_FAIL" => over("ended with its node, which failed"),
        "PREEMPTED" => over("was preempted"),
        "BOOT_FAIL" => over("did not start: its node does not boot"),
        "LAUNCH_FAILED" => over("did not start: its node could not launch it"),
        "RECONFIG_FAIL" => over("did not start: its node could not be configured"),
        "REVOKED" => over("was revoked: another cluster has taken it"),
        _ => None,
    }
}

fn failed(code: &str) -> State {
    let (code, signal) = code.trim().split_once(':').unwrap_or((code.trim(), "0"));
    match (code.parse(), signal) {
        (Ok(code @ 1..), "0") => State::Ended { code: Some(code) },
        // By its queue alone nobody can say, nor where it failed before it began.
        (Ok(0), "0") | (Err(_), "0") => State::Over { told: "failed, nobody knows how" },
        _ => State::Ended { code: None },
    }
}

/// Whether `sacct` has nothing to tell of any job.
pub(super) fn has_no_accounts(problem: &str) -> bool {
    // Older ones shout their own name.
    problem.contains(NO_ACCOUNTS)
}

/// Whether a command says that a job is no more.
pub(super) fn is_gone(problem: &str) -> bool {
    problem.contains("Invalid job id") || problem.contains("already completing or completed")
}

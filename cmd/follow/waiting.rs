//! Waiting that a signal ends.

use std::time::Duration;

use tokio::sync::watch;

/// Longest wait between two tries.
const LONGEST: Duration = Duration::from_secs(60);

/// Returns the next wait.
pub(crate) fn longer(pause: Duration) -> Duration {
    pause.saturating_mul(2).min(LONGEST.max(pause))
}

/// Returns when a signal has come.
pub(crate) async fn signalled(signal: &watch::Receiver<bool>) {
    // The sender lives as long as the process.
    let _ = signal.clone().wait_for(|come| *come).await;
}

/// Waits for what may hang, as a store can. Returns nothing if a signal came first.
pub(crate) async fn unless_signalled<T>(
    signal: &watch::Receiver<bool>,
    wanted: impl Future<Output = T>,
) -> Option<T> {
    tokio::select! {
        biased;
        () = signalled(signal) => None,
        come = wanted => Some(come),
    }
}

/// Waits. Returns whether no signal came meanwhile.
pub(crate) async fn sleep(signal: &watch::Receiver<bool>, time: Duration) -> bool {
    tokio::select! {
        biased;
        () = signalled(signal) => false,
        () = tokio::time::sleep(time) => true,
    }
}

//! Servers that go away and come back, for a stage that waits for them
//! (`--follow`): the call that finds its server gone ends the shard at hand, and
//! no row of it gets the blame.

use std::cell::{Cell, RefCell};
use std::future::pending;

use oclaw::engine::Error;
use tokio::sync::Notify;

/// What is known of the servers of a stage. One that nobody waits for is never
/// said to be away: a failed call is the row's.
#[derive(Debug, Default)]
pub(crate) struct Away {
    /// How often a shard is begun anew though the servers answer.
    most: Cell<u32>,
    /// How often the shard at hand was.
    begun_anew: Cell<u32>,
    found: RefCell<Option<String>>,
    noticed: Notify,
}

impl Away {
    /// Waits from now on. A shard that finds its servers gone so many times, while
    /// they answer in between, is to blame itself: its rows get their errors.
    pub(crate) fn wait(&self, most: u32) {
        self.most.set(most);
    }

    /// Looks at the error of a call. Does not return if the server is away. Where
    /// the question may be at fault, `ping` asks the server something simple.
    pub(crate) async fn weigh(&self, error: &Error, ping: impl Future<Output = Result<(), Error>>) {
        if self.begun_anew.get() >= self.most.get() {
            return;
        }
        let gone = match error {
            Error::Unreachable { .. }
            | Error::Unauthorized { .. }
            | Error::Status { status: 429 | 503, .. } => is_gone(error).then(|| error.to_string()),
            error if error.is_transient() => match ping.await {
                Err(error) if is_gone(&error) => Some(error.to_string()),
                _ => None,
            },
            _ => None,
        };
        if let Some(reason) = gone {
            self.found.replace(Some(reason));
            self.noticed.notify_one();
            // The shard is dropped, and this call with it.
            pending::<()>().await;
        }
    }

    /// Begins a shard. Errors with the reason if a server that was away still is.
    pub(crate) async fn begin(
        &self,
        ping: impl Future<Output = Result<(), Error>>,
    ) -> Result<(), String> {
        if self.found.borrow().is_none() {
            return Ok(());
        }
        match ping.await {
            Err(error) if is_gone(&error) => {
                let reason = error.to_string();
                self.found.replace(Some(reason.clone()));
                Err(reason)
            }
            _ => {
                self.found.take();
                self.begun_anew.set(self.begun_anew.get() + 1);
                Ok(())
            }
        }
    }

    /// Returns the reason when a server is found to be away.
    pub(crate) async fn noticed(&self) -> String {
        self.noticed.notified().await;
        self.found.borrow().clone().unwrap_or_default()
    }

    /// Ends a shard.
    pub(crate) fn end(&self) {
        self.begun_anew.set(0);
    }
}

/// A key that is refused may be put right while we wait, like anything else.
fn is_gone(error: &Error) -> bool {
    error.is_transient() || matches!(error, Error::Unauthorized { .. })
}

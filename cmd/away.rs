//! Servers that go away and come back, for a stage that waits for them
//! (`--follow`): the call that finds its server gone ends the shard at hand, and
//! no row of it gets the blame.

use std::cell::{Cell, RefCell};
use std::future::pending;

use oclaw::engine::Error;
use serde_json::Value;
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

    /// Tells whether anybody waits.
    pub(crate) fn waits(&self) -> bool {
        self.most.get() > 0
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

    /// Takes what servers say of the version of their weights, which may be another
    /// by now. Errors with the reason if they are away, or if some have the new ones
    /// already and others do not; who does not tell has none.
    pub(crate) fn weights(&self, told: Result<Option<String>, Error>) -> Result<Value, String> {
        match told {
            Ok(weights) => Ok(weights.into()),
            Err(error @ Error::Unlike { .. }) => Err(error.to_string()),
            Err(error) if is_gone(&error) && self.begun_anew.get() < self.most.get() => {
                let reason = error.to_string();
                self.found.replace(Some(reason.clone()));
                Err(reason)
            }
            Err(_) => Ok(Value::Null),
        }
    }

    /// Returns the reason when a server is found to be away.
    pub(crate) async fn noticed(&self) -> String {
        loop {
            self.noticed.notified().await;
            // Word of a shard that has ended may still be on its way.
            if let Some(reason) = self.found.borrow().clone() {
                return reason;
            }
        }
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

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::Away;

    #[test]
    fn word_of_a_shard_that_has_ended_ends_no_other() {
        let away = Away::default();
        away.noticed.notify_one();
        let mut noticed = pin!(away.noticed());
        let mut context = Context::from_waker(Waker::noop());
        assert!(noticed.as_mut().poll(&mut context).is_pending());
        away.found.replace(Some("gone".to_owned()));
        away.noticed.notify_one();
        assert!(noticed.as_mut().poll(&mut context).map(|reason| reason == "gone").is_ready());
    }
}

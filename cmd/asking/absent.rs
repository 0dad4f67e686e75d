//! Servers that are not there, though their answers may be: they are taken for
//! whom they were when last asked, until a question comes that nobody answered yet.

use std::cell::RefCell;
use std::convert::Infallible;
use std::future::pending;

use oclaw::engine::{Error, Pool};
use tokio::sync::Notify;

/// Tells whether a failed call means that no other will do better: nobody can be
/// reached any more, or the key is good for nothing. A connection that broke is not
/// enough, nor is a question that is forbidden.
pub(crate) async fn is_lost(
    pool: &Pool,
    error: &Error,
    ping: impl AsyncFn() -> Result<(), Error>,
) -> bool {
    match error {
        Error::Unauthorized { status: 401, .. } => {
            matches!(ping().await, Err(Error::Unauthorized { status: 401, .. }))
        }
        _ => pool.is_gone() && ping().await.is_err() && pool.is_gone(),
    }
}

/// Why nobody can be asked, if so.
#[derive(Debug, Default)]
pub(crate) struct Absent {
    error: RefCell<Option<Error>>,
    needed: Notify,
}

impl Absent {
    pub(crate) fn new(error: Error) -> Self {
        Self { error: RefCell::new(Some(error)), needed: Notify::new() }
    }

    /// Holds back a question that only a server can answer. Does not return if none
    /// is there: the stage is ended, and no row gets the blame.
    pub(crate) async fn hold(&self) {
        if self.error.borrow().is_some() {
            self.needed.notify_one();
            pending::<()>().await;
        }
    }

    /// Ends the stage: whoever was there is gone.
    pub(crate) async fn gone(&self, error: Error) -> Infallible {
        self.error.replace(Some(error));
        self.needed.notify_one();
        pending().await
    }

    /// Does a table as long as there is somebody to ask, or kept answers do. The
    /// first question that has neither ends it with the reason.
    pub(crate) async fn unless_needed<T>(
        &self,
        table: impl Future<Output = anyhow::Result<T>>,
    ) -> anyhow::Result<T> {
        tokio::select! {
            done = table => done,
            () = self.needed.notified() => match self.error.take() {
                Some(error) => Err(error.into()),
                // Nobody is held back without a reason.
                None => pending().await,
            },
        }
    }
}

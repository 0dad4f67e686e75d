//! A server that is not there, though its answers may be: it is taken for whom it
//! was when it was last asked, until a question comes that nobody answered yet.

use std::cell::RefCell;
use std::future::pending;

use oclaw::engine::{Dialect, Engine, EngineOptions, Error};
use serde_json::Value;
use tokio::sync::Notify;

use super::Asker;
use crate::answers::Answers;

/// Why the server cannot be asked, if it cannot.
#[derive(Debug, Default)]
pub(super) struct Absent {
    error: RefCell<Option<Error>>,
    needed: Notify,
}

impl Absent {
    pub(super) fn new(error: Option<Error>) -> Self {
        Self { error: RefCell::new(error), needed: Notify::new() }
    }

    /// Holds back a question that only the server can answer. Does not return if it
    /// is not there: the stage is ended, and no row gets the blame.
    pub(super) async fn hold(&self) {
        if self.error.borrow().is_some() {
            self.needed.notify_one();
            pending::<()>().await;
        }
    }
}

/// Makes a client of a server as it was last met, without asking it anything.
pub(super) async fn last_met(
    options: EngineOptions,
    answers: &Answers,
    typed: (&str, Option<&str>),
) -> Option<(Engine, Value)> {
    let whom = answers.last_met(typed)?;
    let dialect = whom["dialect"].as_str()?;
    let dialect = Dialect::ALL.into_iter().find(|known| known.as_str() == dialect)?;
    let model = whom["model"].as_str().map(str::to_owned);
    let options = EngineOptions { dialect: Some(dialect), model, ..options };
    Some((Engine::attach(options).await.ok()?, whom))
}

impl Asker<'_> {
    /// Does a table as long as kept answers do. The first question without one ends
    /// it with the reason for which the server cannot be asked.
    pub(crate) async fn with_what_is_kept<T>(
        &self,
        table: impl Future<Output = anyhow::Result<T>>,
    ) -> anyhow::Result<T> {
        tokio::select! {
            done = table => done,
            () = self.absent.needed.notified() => match self.absent.error.take() {
                Some(error) => Err(error.into()),
                // Nobody is held back without a reason.
                None => pending().await,
            },
        }
    }
}

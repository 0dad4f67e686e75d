//! Asking about the shards of a followed folder: servers may go away and come
//! back, and get other weights, in between.

use oclaw::engine::{ChatRequest, Engine, Error};
use oclaw::stage::Tally;
use serde_json::json;

use super::{Asker, Asking};
use crate::common::Context;
use crate::follow::Route;

impl Asking {
    /// Connects likewise for a folder that is followed. Returns nothing if a signal
    /// came before.
    pub(crate) async fn connect_for(
        &self,
        route: &Route<'_>,
        context: &Context,
    ) -> anyhow::Result<Option<Asker<'_>>> {
        let asker = route.patiently(async || self.connect(context, false).await).await?;
        if let Some(asker) = &asker {
            asker.away.wait(route.tries());
        }
        Ok(asker)
    }
}

impl Asker<'_> {
    /// Does a shard of a followed folder, as long as the server is there.
    pub(crate) async fn attend(
        &self,
        shard: impl Future<Output = anyhow::Result<Tally>>,
    ) -> anyhow::Result<Result<Tally, String>> {
        if let Err(reason) = self.away.begin(self.ping()).await {
            return Ok(Err(reason));
        }
        // The weights may be others by now, and their answers are others too.
        if self.embedded.is_none() {
            match self.away.weights(self.pool.weight_version().await) {
                Ok(weights) => self.whom.borrow_mut()["weights"] = weights,
                Err(reason) => return Ok(Err(reason)),
            }
        }
        self.meter.next_file();
        tokio::select! {
            tally = shard => {
                self.away.end();
                Ok(Ok(tally?))
            }
            reason = self.away.noticed() => Ok(Err(reason)),
        }
    }

    /// Asks the shortest question there is.
    pub(super) async fn ping(&self) -> Result<(), Error> {
        let request = ChatRequest {
            messages: vec![json!({"role": "user", "content": "ping"})],
            max_tokens: Some(1),
            ..ChatRequest::default()
        };
        self.pool.call(async |engine: &Engine| engine.chat(&request).await.map(|_| ())).await
    }

    /// Returns whether the budget leaves no room for another turn.
    pub(crate) fn is_spent(&self) -> bool {
        self.meter.is_spent(u64::from(self.asking.votes))
    }
}

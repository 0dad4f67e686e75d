//! The version of the weights that several servers carry.

use futures_util::future::join_all;

use super::super::{Engine, Error, retry};
use super::Pool;

impl Pool {
    /// Returns the version of the weights that are at work, if anybody tells. It is
    /// an error if they tell different ones, or if nobody can be asked.
    pub async fn weight_version(&self) -> Result<Option<String>, Error> {
        let engines = self.engines();
        let told = join_all(engines.iter().map(|engine| self.told_by(engine))).await;
        let mut known: Option<(String, String)> = None;
        let (mut heard, mut first) = (false, None);
        for (engine, weights) in engines.iter().zip(told) {
            let weights = match weights {
                Ok(weights) => weights,
                Err(error) => {
                    first.get_or_insert(error);
                    continue;
                }
            };
            heard = true;
            let Some(weights) = weights else { continue };
            match &known {
                None => known = Some((engine.url(), weights)),
                Some((_, same)) if *same == weights => {}
                Some((other, wanted)) => {
                    return Err(Error::Unlike {
                        url: engine.url(),
                        has: format!("carries the weights `{weights}`"),
                        other: other.clone(),
                        wanted: format!("carries `{wanted}`"),
                    });
                }
            }
        }
        // Who told none may be all that there is, or all that answered.
        let all = first.is_none() && engines.len() == self.members.len();
        if let Some(error) = first.filter(|_| !heard) {
            return Err(error);
        }
        let mut same = self.same();
        match known {
            Some((_, told)) => same.expected = Some(told),
            None if all => same.expected = None,
            None => {}
        }
        same.weights = same.expected.clone();
        Ok(same.weights.clone())
    }

    /// Asks one server, and again if it only did not get to it: whoever takes a
    /// version for none finds no answer that is kept under it. Who is gone is not
    /// waited for.
    async fn told_by(&self, engine: &Engine) -> Result<Option<String>, Error> {
        let mut tried = 0;
        loop {
            let error = match engine.weight_version().await {
                Err(error) if passes(&error) => error,
                told => return told,
            };
            tried += 1;
            let Some(wait) = self.retries.wait(tried, error.retry_after(), retry::share()) else {
                return Err(error);
            };
            tracing::info!(%error, tried, wait = wait.as_secs_f64(), "trying again");
            tokio::time::sleep(wait).await;
        }
    }
}

fn passes(error: &Error) -> bool {
    error.is_transient() && !matches!(error, Error::Unreachable { .. })
}

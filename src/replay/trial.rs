//! One policy's scores on a suite.

use std::collections::BTreeMap;

use futures_util::future::join_all;
use serde_json::Value;
use tokio::sync::Semaphore;

use crate::engine::{self, Engine, ScoreRequest};
use crate::judge::{Exchange, Quoting, Rules};
use crate::trajectory::Turn;

use super::player::{Asked, ask};
use super::{Answer, Jury, Overrides, Session, Unjudged, gate, request};

/// Seeds that every server takes: 31 bits.
const SEEDS: i64 = 0x7fff_ffff;

/// How an item is scored.
#[derive(Debug)]
pub enum Measure {
    /// The policy answers, rules score the answer: -1, 0 or 1.
    Rules(Rules),
    /// The policy answers, a judge scores the answer: -1, 0 or 1.
    Judge(Jury),
    /// The mean log-prob of a recorded answer that was praised, in nats per token.
    LogProb,
}

impl Measure {
    /// Returns its name.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Rules(_) => "rules",
            Self::Judge(_) => "judge",
            Self::LogProb => "log-prob",
        }
    }
}

/// A policy on trial.
#[derive(Debug)]
pub struct Trial<'a> {
    /// The policy's engine.
    pub engine: &'a Engine,
    /// How items are scored.
    pub measure: &'a Measure,
    /// Settings that replace the recorded ones. A seed is that of the first item;
    /// each further one has the next.
    pub overrides: Overrides,
    /// Requests under way at once.
    pub at_once: usize,
}

/// A policy's scores.
#[derive(Debug, Default)]
pub struct Scores {
    /// Session by session, item by item; none where there is none.
    pub of: Vec<Vec<Option<f64>>>,
    /// Items that the suite gives no score of, by reason.
    pub left_out: BTreeMap<String, usize>,
    /// Items that the engine failed on, by reason.
    pub failed: BTreeMap<String, usize>,
}

impl Scores {
    /// Tells whether more than one in twenty of the items that can have a score were
    /// refused: the others are then no fair choice.
    pub fn is_refused_too_often(&self) -> bool {
        let scored = self.of.iter().flatten().flatten().count();
        let refused: usize = self.failed.values().sum();
        refused * 20 > scored + refused
    }
}

/// Why an item has no score.
enum Missing {
    /// It cannot have one, under any policy.
    Unfit(String),
    /// The engine refused it.
    Failed(String),
    /// Somebody is not there.
    Away(Away),
}

/// Who is not there, and why.
#[derive(Debug)]
pub enum Away {
    /// The policy's engine.
    Policy(engine::Error),
    /// The judge.
    Judge(engine::Error),
}

impl Trial<'_> {
    /// Scores every item. An engine or a judge that is not there ends it.
    pub async fn run(&self, sessions: &[Session], done: &dyn Fn()) -> Result<Scores, Away> {
        let places = Semaphore::new(self.at_once.max(1));
        let item = async |number: usize, session: &Session, turn: &Turn| {
            // The semaphore is never closed.
            let _place = places.acquire().await;
            let score = match session.is_choice(turn) {
                true => Err(Missing::Unfit("one of several choices".to_owned())),
                false => self.score(number, turn).await,
            };
            done();
            score
        };
        let items = sessions
            .iter()
            .flat_map(|session| session.turns.iter().map(move |turn| (session, turn)))
            .enumerate()
            .map(|(number, (session, turn))| item(number, session, turn));
        let mut found = join_all(items).await.into_iter();
        let mut scores = Scores::default();
        for session in sessions {
            let mut of = Vec::new();
            for _ in &session.turns {
                of.push(match found.next() {
                    Some(Ok(score)) => Some(score),
                    Some(Err(Missing::Unfit(reason))) => {
                        *scores.left_out.entry(reason).or_default() += 1;
                        None
                    }
                    Some(Err(Missing::Failed(reason))) => {
                        *scores.failed.entry(reason).or_default() += 1;
                        None
                    }
                    Some(Err(Missing::Away(error))) => return Err(error),
                    None => None,
                });
            }
            scores.of.push(of);
        }
        Ok(scores)
    }

    async fn score(&self, number: usize, turn: &Turn) -> Result<f64, Missing> {
        match self.measure {
            Measure::LogProb => self.log_prob(turn).await,
            Measure::Rules(rules) => {
                let answered = self.answered(number, turn).await?;
                let exchange = Exchange::so_far(&answered, Quoting::default())
                    .map_err(|error| Missing::Unfit(error.to_string()))?;
                Ok(f64::from(rules.decide(&exchange).score))
            }
            Measure::Judge(jury) => {
                if turn.next_state.is_none() {
                    return Err(Missing::Unfit("no next state to judge by".to_owned()));
                }
                let answered = self.answered(number, turn).await?;
                let verdict = jury.verdict(&answered).await.map_err(|error| match error {
                    Unjudged::Unfit(error) => Missing::Unfit(error.to_string()),
                    Unjudged::Away(error) => Missing::Away(Away::Judge(error)),
                })?;
                let none = || Missing::Failed(verdict.error().unwrap_or_default());
                verdict.score().map(f64::from).ok_or_else(none)
            }
        }
    }

    async fn answered(&self, number: usize, turn: &Turn) -> Result<Turn, Missing> {
        let messages = match serde_json::from_str(&turn.messages) {
            Ok(Value::Array(messages)) if !messages.is_empty() => messages,
            _ => return Err(Missing::Unfit("no messages".to_owned())),
        };
        let seed = self.overrides.seed.map(|first| first.wrapping_add(number as i64) & SEEDS);
        let overrides = Overrides { seed, ..self.overrides };
        let body = request::body(self.engine.model(), turn, &messages, &overrides)
            .map_err(Missing::Unfit)?;
        match ask(self.engine, &body).await {
            Ok(answer) => Ok(Answer::instead(&answer, turn)),
            Err(Asked::Answer(reason)) => Err(Missing::Failed(reason)),
            Err(Asked::Engine(error)) => Err(failed(error)),
        }
    }

    async fn log_prob(&self, turn: &Turn) -> Result<f64, Missing> {
        if !gate::is_praised(turn) {
            return Err(Missing::Unfit("not praised".to_owned()));
        }
        let (Some(prompt), Some(response)) = (&turn.prompt_ids, &turn.response_ids) else {
            return Err(Missing::Unfit("no ids".to_owned()));
        };
        if prompt.is_empty() || response.is_empty() {
            return Err(Missing::Unfit("no ids".to_owned()));
        }
        let ids = [prompt.as_slice(), response].concat();
        let request = ScoreRequest { ids, start: prompt.len(), ..ScoreRequest::default() };
        let scores = self.engine.score(&request).await.map_err(failed)?;
        let sum: f64 = scores.log_probs.iter().map(|log_prob| f64::from(*log_prob)).sum();
        Ok(sum / scores.log_probs.len() as f64)
    }
}

/// Tells a passing failure from a refusal. What a server can never do is no
/// refusal of one item.
fn failed(error: engine::Error) -> Missing {
    match error.is_transient() || matches!(error, engine::Error::Unsupported { .. }) {
        true => Missing::Away(Away::Policy(error)),
        false => Missing::Failed(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_a_share_of_the_items_that_fit() {
        let scores = |scored: usize, left_out: usize, refused: usize| {
            let of = [vec![Some(1.0); scored], vec![None; left_out + refused]];
            let counted = |count| BTreeMap::from([("why".to_owned(), count)]);
            Scores { of: of.to_vec(), left_out: counted(left_out), failed: counted(refused) }
        };
        // Items that no policy could have a score of make the share no smaller.
        for left_out in [0, 1000] {
            assert!(!scores(19, left_out, 1).is_refused_too_often());
            assert!(scores(18, left_out, 1).is_refused_too_often());
            assert!(!scores(18, left_out, 0).is_refused_too_often());
            assert!(scores(0, left_out, 1).is_refused_too_often());
        }
    }
}

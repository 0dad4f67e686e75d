//! A model that judges new answers.

use futures_util::future::join_all;

use crate::engine::{self, ChatRequest, Engine};
use crate::judge::{self, Exchange, Fault, Quoting, Reply, Verdict};
use crate::trajectory::Turn;

use super::{Answer, By, Check, Finding};

/// A judge, and how it is asked.
#[derive(Debug, Clone)]
pub struct Jury {
    /// Whom to ask.
    pub engine: Engine,
    /// What it is told.
    pub prompt: String,
    /// Calls per answer.
    pub votes: u32,
    /// Sampling temperature.
    pub temperature: f64,
    /// Longest reply, in tokens.
    pub max_tokens: u32,
    /// Seed of the first vote.
    pub seed: u64,
}

/// Why there is no verdict.
#[derive(Debug)]
pub enum Unjudged {
    /// The turn cannot be judged.
    Unfit(judge::Error),
    /// The judge is not there.
    Away(engine::Error),
}

impl Jury {
    /// Judges one turn: as many votes as there are, in order. A judge that is not
    /// there is no vote.
    pub async fn verdict(&self, turn: &Turn) -> Result<Verdict, Unjudged> {
        let exchange = Exchange::of(turn, Quoting::default()).map_err(Unjudged::Unfit)?;
        let messages = judge::ask(&self.prompt, &exchange);
        let calls = (0..self.votes).map(|vote| {
            let request = ChatRequest {
                messages: messages.clone(),
                temperature: Some(self.temperature),
                max_tokens: Some(self.max_tokens),
                seed: Some(self.seed.wrapping_add(u64::from(vote))),
                ..ChatRequest::default()
            };
            async move {
                match self.engine.chat(&request).await {
                    Ok(reply) => {
                        Ok(Ok(Reply { text: reply.content, finish_reason: reply.finish_reason }))
                    }
                    Err(error) if error.is_transient() => Err(Unjudged::Away(error)),
                    Err(error) => Ok(Err(Fault::failed(error.to_string()))),
                }
            }
        });
        let replies: Result<Vec<_>, _> = join_all(calls).await.into_iter().collect();
        Ok(judge::verdict(replies?))
    }

    /// Compares a new answer with the recorded one: both are judged by the
    /// recorded next state, and the new one must not score lower. The score of
    /// the recorded one is the row's own if it has been judged. Errors if the judge is
    /// not there.
    pub async fn compare(
        &self,
        turn: &Turn,
        recorded: &Answer,
        replayed: &Answer,
    ) -> Result<Check, engine::Error> {
        let done = |finding| Ok(Check::new(By::Judge, finding));
        if !matches!(&turn.next_state, Some(next) if next != "[]") {
            return done(Finding::NotCompared("no next state to judge by".to_owned()));
        }
        if recorded.text == replayed.text && recorded.calls == replayed.calls {
            return done(Finding::Same);
        }
        let before = match turn.score {
            Some(score) => Ok(score),
            None => self.score(turn).await?,
        };
        let after = self.score(&replayed.instead(turn)).await?;
        match (before, after) {
            (Ok(before), Ok(after)) => {
                let finding = match after < before {
                    true => Finding::Differs(format!("judged {after} instead of {before}")),
                    false => Finding::Same,
                };
                let figures = vec![("recorded", f64::from(before)), ("replayed", f64::from(after))];
                Ok(Check { figures, ..Check::new(By::Judge, finding) })
            }
            (Err(finding), _) | (_, Err(finding)) => done(finding),
        }
    }

    async fn score(&self, turn: &Turn) -> Result<Result<f32, Finding>, engine::Error> {
        let verdict = match self.verdict(turn).await {
            Ok(verdict) => verdict,
            Err(Unjudged::Unfit(error)) => return Ok(Err(Finding::NotCompared(error.to_string()))),
            Err(Unjudged::Away(error)) => return Err(error),
        };
        let unjudged = || verdict.error().unwrap_or_default();
        let score = verdict.score().map(f32::from);
        Ok(score.ok_or_else(|| Finding::Failed(format!("no verdict: {}", unjudged()))))
    }
}

//! Scoring through vLLM's `/v1/completions`.
//!
//! vLLM tells, for each token of a prompt, its own log-prob and those of the
//! likeliest tokens, 20 at most; there is no way to ask for chosen ids. A chosen
//! id outside of these makes the whole answer unusable.

use reqwest::Method;
use serde_json::json;

use crate::wire::vllm::{CompletionAnswer, PromptLogProbs};

use super::super::transport::Answer;
use super::super::{Engine, Error};
use super::{Listed, ScoreRequest, Scores, add_top, log_prob};

/// As many of the likeliest tokens as vLLM tells unless its `--max-logprobs` is
/// another.
pub const MOST_TOP: usize = 20;
/// How vLLM writes the logarithm of 0.
const MINUS_INFINITY: f64 = -9999.0;

pub(super) async fn score(engine: &Engine, request: &ScoreRequest) -> Result<Scores, Error> {
    let told = if request.chosen.is_empty() { request.top_k } else { MOST_TOP };
    let mut body = json!({
        "prompt": request.ids,
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": told,
        "return_token_ids": true,
    });
    if let Some(model) = engine.model() {
        body["model"] = model.into();
    }
    let answer = engine.api(Method::POST, "/completions", Some(body.to_string().into())).await?;
    let read: CompletionAnswer = answer.json()?;
    let [choice] = &read.choices[..] else {
        return Err(answer.malformed(format!("{} choices for 1", read.choices.len())));
    };
    if choice.prompt_token_ids.as_ref().is_some_and(|ids| *ids != request.ids) {
        return Err(answer.malformed("`prompt_token_ids` are not the ids that were sent"));
    }
    let Some(entries) = &choice.prompt_logprobs else {
        return Err(answer.malformed("no `choices[0].prompt_logprobs`"));
    };
    if entries.len() != request.ids.len() {
        let reason = format!("{} log-probs for {} tokens", entries.len(), request.ids.len());
        return Err(answer.malformed(reason));
    }
    let mut scores = Scores::default();
    for (row, place) in (request.start..entries.len()).enumerate() {
        let listed = Position::read(&answer, place, entries[place].as_ref(), request, told)?;
        scores.log_probs.push(log_prob(&answer, place, Some(listed.own))?);
        if request.top_k > 0 {
            let top = listed.top.iter().take(request.top_k).copied().collect();
            add_top(&mut scores, &answer, place, request.top_k, top)?;
        }
        for id in request.chosen_at(row) {
            scores.chosen_log_probs.push(log_prob(&answer, place, Some(listed.of(id, engine)?))?);
        }
    }
    Ok(scores)
}

/// What is told of one token.
struct Position {
    own_id: i64,
    own: f64,
    /// Likeliest first.
    top: Vec<Listed>,
}

impl Position {
    /// Reads the entry of a token: `told` likeliest ones, and the token's own,
    /// whether it is one of them or not.
    fn read(
        answer: &Answer,
        place: usize,
        entry: Option<&PromptLogProbs>,
        request: &ScoreRequest,
        told: usize,
    ) -> Result<Self, Error> {
        let own_id = i64::from(request.ids[place]);
        let entry = entry.ok_or_else(|| answer.malformed(format!("a null at place {place}")))?;
        let mut top = Vec::with_capacity(entry.len());
        for (id, told) in entry {
            let wrong = || answer.malformed(format!("`{id}` is no token id, at place {place}"));
            let id: i64 = id.parse().map_err(|_| wrong())?;
            let value = told.logprob.filter(|value| *value > MINUS_INFINITY);
            top.push((id, f64::from(log_prob(answer, place, value)?)));
        }
        top.sort_by(|left, right| right.1.total_cmp(&left.1).then(left.0.cmp(&right.0)));
        let Some(&(_, own)) = top.iter().find(|(id, _)| *id == own_id) else {
            return Err(answer.malformed(format!("no log-prob of id {own_id} at place {place}")));
        };
        // One more than asked for can only be the token's own, below all others.
        let extra = top.len() == told + 1 && top[told..].iter().all(|(_, value)| own <= *value);
        if extra {
            top.retain(|(id, _)| *id != own_id);
        }
        if top.len() != told {
            let reason = format!("{} likeliest tokens for {told} at place {place}", top.len());
            return Err(answer.malformed(reason));
        }
        Ok(Self { own_id, own, top })
    }

    fn of(&self, id: &i32, engine: &Engine) -> Result<f64, Error> {
        let id = i64::from(*id);
        if id == self.own_id {
            return Ok(self.own);
        }
        let found = self.top.iter().find(|(listed, _)| *listed == id);
        found.map(|(_, value)| *value).ok_or_else(|| Error::NotListed {
            url: engine.url(),
            id,
            listed: self.top.len(),
        })
    }
}

//! Log-probs of given tokens.

use reqwest::Method;
use serde_json::json;

use crate::wire::sglang::{GenerateAnswer, TokenLogProb};

use super::transport::Answer;
use super::{Dialect, Engine, Error, NativeCall};

/// Which tokens to score.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScoreRequest {
    /// Prompt and response, as one sequence.
    pub ids: Vec<i32>,
    /// Where the response begins; at least 1, for nothing stands before the
    /// first token.
    pub start: usize,
}

impl Engine {
    /// Returns the log-prob of each token from `start` on, given all before it:
    /// exactly `ids.len() - start` finite numbers, for exactly these ids, or an
    /// error. The numbers are raw: no temperature.
    pub async fn score(&self, request: &ScoreRequest) -> Result<Vec<f32>, Error> {
        self.needs(Dialect::Sglang, "score given tokens by their ids")?;
        let ScoreRequest { ids, start } = request;
        if *start == 0 || *start > ids.len() {
            let reason = format!("no scores from position {start} of {} ids", ids.len());
            return Err(Error::Client { url: self.url(), reason });
        }
        if *start == ids.len() {
            return Ok(Vec::new());
        }
        // The entry at the start is always null, so we start one earlier.
        let body = json!({
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": true,
            "logprob_start_len": start - 1,
        });
        let call = NativeCall {
            method: Method::POST,
            path: "/generate",
            body: Some(&body),
            timeout: None,
            retries: None,
        };
        let answer = self.native(call).await?;
        let read: GenerateAnswer = answer.json()?;
        let entries = read.meta_info.and_then(|meta| meta.input_token_logprobs);
        let Some(entries) = entries else {
            return Err(answer.malformed("no `meta_info.input_token_logprobs`"));
        };
        checked(&answer, &entries, &ids[start - 1..])
    }
}

/// Drops the null first entry and holds the rest against the ids.
fn checked(answer: &Answer, entries: &[TokenLogProb], ids: &[i32]) -> Result<Vec<f32>, Error> {
    if entries.len() != ids.len() {
        let reason = format!("{} log-probs for {} tokens", entries.len(), ids.len());
        return Err(answer.malformed(reason));
    }
    let mut scores = Vec::with_capacity(ids.len() - 1);
    for (position, (TokenLogProb(score, id, _), wanted)) in entries.iter().zip(ids).enumerate() {
        if *id != i64::from(*wanted) {
            let reason = format!("id {id} where {wanted} was sent, at place {position}");
            return Err(answer.malformed(reason));
        }
        if position == 0 {
            continue;
        }
        match score {
            Some(score) if score.is_finite() => scores.push(*score as f32),
            _ => return Err(answer.malformed(format!("no log-prob at place {position}"))),
        }
    }
    Ok(scores)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(entries: &[(Option<f64>, i64)], ids: &[i32]) -> Result<Vec<f32>, String> {
        let answer = Answer { url: "u".to_owned(), body: Default::default() };
        let entries: Vec<_> =
            entries.iter().map(|(score, id)| TokenLogProb(*score, *id, None)).collect();
        checked(&answer, &entries, ids).map_err(|error| error.to_string())
    }

    #[test]
    fn the_first_entry_is_dropped() {
        let entries = [(None, 6), (Some(-1.25), 7), (Some(-0.5), 8)];
        assert_eq!(check(&entries, &[6, 7, 8]), Ok(vec![-1.25, -0.5]));
    }

    #[test]
    fn a_wrong_count_or_id_or_gap_is_refused() {
        let wrong = |entries: &[_]| check(entries, &[6, 7, 8]).unwrap_err();
        let count = wrong(&[(None, 7), (Some(-1.0), 8)]);
        assert!(count.ends_with("2 log-probs for 3 tokens"), "{count}");
        let id = wrong(&[(None, 6), (Some(-1.0), 9), (Some(-1.0), 8)]);
        assert!(id.ends_with("id 9 where 7 was sent, at place 1"), "{id}");
        let gap = wrong(&[(None, 6), (Some(-1.0), 7), (None, 8)]);
        assert!(gap.ends_with("no log-prob at place 2"), "{gap}");
    }
}

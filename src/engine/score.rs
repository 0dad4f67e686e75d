//! Log-probs of tokens that are already there: the tokens' own, those of the
//! likeliest at each position, and those of chosen ones.

mod sglang;
mod vllm;

use super::transport::Answer;
use super::{Dialect, Engine, Error};

pub use vllm::MOST_TOP as VLLM_MOST_TOP;

/// Which tokens to score.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ScoreRequest {
    /// Prompt and response, as one sequence.
    pub ids: Vec<i32>,
    /// Where the response begins; at least 1, for nothing stands before the
    /// first token.
    pub start: usize,
    /// How many of the likeliest tokens are wanted at each position.
    pub top_k: usize,
    /// Tokens wanted at each position besides the sequence's own: row-major
    /// `[R, c]`, the same number c at each of the R positions. Empty for none.
    pub chosen: Vec<i32>,
}

impl ScoreRequest {
    /// Returns the chosen ids of a position from `start` on.
    fn chosen_at(&self, row: usize) -> &[i32] {
        let width = self.chosen.len() / (self.ids.len() - self.start).max(1);
        &self.chosen[row * width..(row + 1) * width]
    }
}

/// What a [`ScoreRequest`] found. R is `ids.len() - start`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Scores {
    /// `[R]`.
    pub log_probs: Vec<f32>,
    /// Row-major `[R, top_k]`, likeliest first.
    pub top_ids: Vec<i32>,
    /// Row-major `[R, top_k]`.
    pub top_log_probs: Vec<f32>,
    /// Row-major `[R, c]`, in the order of `chosen`.
    pub chosen_log_probs: Vec<f32>,
    /// Version of the weights, where the server tells it.
    pub version: Option<String>,
}

impl Engine {
    /// Returns the log-prob of each token from `start` on, given all before it,
    /// and whatever else the request wants there: exactly so many finite numbers,
    /// for exactly these ids, or an error. The numbers are raw: no temperature.
    pub async fn score(&self, request: &ScoreRequest) -> Result<Scores, Error> {
        let ScoreRequest { ids, start, top_k, chosen } = request;
        let dialect = self.dialect();
        if !matches!(dialect, Dialect::Sglang | Dialect::Vllm) {
            return Err(Error::Unsupported {
                url: self.url(),
                dialect,
                what: "score given tokens by their ids",
            });
        }
        if dialect == Dialect::Vllm && *top_k > VLLM_MOST_TOP {
            let what = "tell more than the 20 likeliest tokens";
            return Err(Error::Unsupported { url: self.url(), dialect, what });
        }
        let refuse = |reason| Err(Error::Client { url: self.url(), reason });
        if *start == 0 || *start > ids.len() {
            return refuse(format!("no scores from position {start} of {} ids", ids.len()));
        }
        let rows = ids.len() - start;
        if rows == 0 {
            return Ok(Scores::default());
        }
        if chosen.len() % rows != 0 {
            return refuse(format!("{} chosen ids for {rows} positions", chosen.len()));
        }
        match dialect {
            Dialect::Vllm => vllm::score(self, request).await,
            _ => sglang::score(self, request).await,
        }
    }
}

/// A token and its log-prob, as a server listed them.
type Listed = (i64, f64);

/// Returns a log-prob, or refuses what is none.
fn log_prob(answer: &Answer, place: usize, value: Option<f64>) -> Result<f32, Error> {
    match value {
        Some(value) if value.is_finite() => Ok(value as f32),
        _ => Err(answer.malformed(format!("no log-prob at place {place}"))),
    }
}

/// Adds the likeliest tokens of one position to the scores: exactly `wanted`
/// different ones, which are put in order.
fn add_top(
    scores: &mut Scores,
    answer: &Answer,
    place: usize,
    wanted: usize,
    mut list: Vec<Listed>,
) -> Result<(), Error> {
    if list.len() != wanted {
        let reason = format!("{} likeliest tokens for {wanted} at place {place}", list.len());
        return Err(answer.malformed(reason));
    }
    list.sort_by(|left, right| right.1.total_cmp(&left.1));
    let mut seen = Vec::with_capacity(wanted);
    for (id, value) in list {
        let id = token(answer, place, id)?;
        if seen.contains(&id) {
            return Err(answer.malformed(format!("id {id} twice at place {place}")));
        }
        seen.push(id);
        scores.top_ids.push(id);
        scores.top_log_probs.push(log_prob(answer, place, Some(value))?);
    }
    Ok(())
}

fn token(answer: &Answer, place: usize, id: i64) -> Result<i32, Error> {
    match i32::try_from(id) {
        Ok(id) if id >= 0 => Ok(id),
        _ => Err(answer.malformed(format!("{id} is no token id, at place {place}"))),
    }
}

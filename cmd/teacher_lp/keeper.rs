//! Pays for each score once: what was scored before is looked up, the rest is
//! asked for within the budget and kept.

use oclaw::teacher_lp::{Asked, ScoreRequest, Scores, checked};
use serde_json::{Value, json};

use crate::answers::Answers;
use crate::forecast::Expected;
use crate::spending::{BUDGET, Meter, Share, Spent, Tokens};

/// The kept scores and the meter.
pub(super) struct Keeper {
    pub(super) answers: Answers,
    pub(super) meter: Meter,
    /// How many ids there are.
    pub(super) vocabulary: usize,
}

impl Keeper {
    /// Returns the scores of a request to somebody, by `compute` if they are not
    /// kept. Only scores that fit the request are worth keeping.
    pub(super) async fn score(
        &self,
        (whom, share): (&Value, &Share<'_>),
        request: ScoreRequest,
        compute: impl AsyncFnOnce(ScoreRequest) -> Result<Scores, String>,
    ) -> Result<Scores, String> {
        let key = self.answers.question(whom, &asked(&request)).vote(0);
        if let Some(kept) = self.answers.find(&key) {
            self.meter.hits(1);
            return Ok(kept);
        }
        granted(share, &request.asked).map_err(|_| BUDGET.to_owned())?;
        self.meter.call();
        let scores = compute(request.clone()).await?;
        self.meter.tokens(Tokens::known(request.ids.len() as u64, 0));
        let scores = checked(scores, &request, self.vocabulary)?;
        let weights = whom.get("weights").and_then(Value::as_str);
        let same = match (weights, scores.version.as_deref()) {
            (Some(known), Some(told)) => known == told,
            _ => true,
        };
        if same {
            self.answers.keep(key, &scores).await;
        }
        Ok(scores)
    }
}

/// Grants a request: a student's goes before those of its turn's hints.
fn granted(share: &Share<'_>, asked: &Asked) -> Result<(), Spent> {
    match asked {
        Asked::Student(_) => share.first(),
        Asked::Teacher => share.other(),
    }
}

/// Everything that the numbers depend on, besides who computes them.
fn asked(request: &ScoreRequest) -> Value {
    json!({
        "ids": request.ids,
        "start": request.start,
        "temperature": request.temperature,
        "top_k": request.top_k,
        "chosen": request.chosen,
    })
}

/// Counts a request instead of computing it, and returns scores that fit: the
/// kept ones, else ones without meaning. Fails where the run would.
pub(super) fn foretell(
    expected: &mut Expected,
    (answers, whom, share): (&Answers, Option<&Value>, &Share<'_>),
    request: &ScoreRequest,
) -> Result<Scores, &'static str> {
    let kept = whom.and_then(|whom| answers.find(&answers.question(whom, &asked(request)).vote(0)));
    if let Some(kept) = kept {
        expected.hits += 1;
        return Ok(kept);
    }
    if granted(share, &request.asked).is_err() {
        expected.left_out += 1;
        return Err(BUDGET);
    }
    expected.calls += 1;
    expected.prompt_tokens += request.ids.len() as u64;
    share.meter().tokens(Tokens::known(request.ids.len() as u64, 0));
    let rows = request.ids.len().saturating_sub(request.start);
    let ids = i32::try_from(request.top_k).unwrap_or_default();
    Ok(Scores {
        log_probs: vec![0.0; rows],
        top_ids: (0..rows).flat_map(|_| 0..ids).collect(),
        top_log_probs: vec![0.0; rows * request.top_k],
        chosen_log_probs: vec![0.0; request.chosen.len()],
        version: None,
    })
}

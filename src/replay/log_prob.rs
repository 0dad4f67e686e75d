//! How far log-probs have moved.

use crate::engine::{Engine, Error, ScoreRequest};
use crate::trajectory::words::LogProbKind;
use crate::trajectory::{Sampling, Turn};

use super::{Answer, By, Check, Finding};

/// What is scored of a turn, or why nothing is.
pub(super) enum Plan {
    /// The recorded ids, by a score call.
    Score(ScoreRequest),
    /// The new answer's own log-probs, if it has the recorded ids: a score call
    /// gives raw log-probs only, and the recorded ones are not.
    OfAnswer,
}

/// Decides how a turn's recorded log-probs can be compared.
pub(super) fn plan(turn: &Turn) -> Result<Plan, String> {
    if let Some(reason) = &turn.untrainable_reason {
        return Err(format!("marked untrainable: {reason}"));
    }
    let (Some(prompt), Some(response), Some(_)) =
        (&turn.prompt_ids, &turn.response_ids, &turn.rollout_log_probs)
    else {
        return Err("no ids with log-probs".to_owned());
    };
    if prompt.is_empty() || response.is_empty() {
        return Err("no ids with log-probs".to_owned());
    }
    // Greedy sampling divides by nothing, and dividing by 1 changes nothing.
    let plain = matches!(turn.sampling.temperature, Some(0.0 | 1.0));
    match turn.sampling.log_prob_kind {
        LogProbKind::Raw => {}
        _ if plain => {}
        LogProbKind::Tempered => return Ok(Plan::OfAnswer),
        LogProbKind::Unknown => {
            return Err("the server did not say whether its log-probs are raw".to_owned());
        }
    }
    let ids = [prompt.as_slice(), response].concat();
    Ok(Plan::Score(ScoreRequest { ids, start: prompt.len(), ..ScoreRequest::default() }))
}

/// Scores the recorded ids and compares.
pub(super) async fn compare(
    engine: &Engine,
    turn: &Turn,
    replayed: Option<&Answer>,
    tolerance: f64,
) -> Result<Check, Error> {
    let skipped = |reason: String| Ok(Check::new(By::LogProb, Finding::NotCompared(reason)));
    let recorded = turn.rollout_log_probs.clone().unwrap_or_default();
    match plan(turn) {
        Err(reason) => skipped(reason),
        Ok(Plan::Score(request)) => {
            let scores = engine.score(&request).await?;
            let now: Vec<_> = scores.log_probs.into_iter().map(Some).collect();
            Ok(shift(&recorded, &now, tolerance))
        }
        Ok(Plan::OfAnswer) => {
            let same = replayed.filter(|answer| answer.ids == turn.response_ids);
            let Some((answer, now)) =
                same.and_then(|answer| Some((answer, answer.log_probs.as_ref()?)))
            else {
                let reason = "its log-probs are tempered, and no new answer has its ids";
                return skipped(reason.to_owned());
            };
            match other_distribution(&turn.sampling, &answer.facts.sampling) {
                Some(reason) => skipped(reason),
                None => Ok(shift(&recorded, now, tolerance)),
            }
        }
    }
}

/// Returns why tempered log-probs and new ones are not of the same distribution.
fn other_distribution(recorded: &Sampling, new: &Sampling) -> Option<String> {
    let told = |temperature: Option<f32>| match temperature {
        Some(temperature) => temperature.to_string(),
        None => "an unknown one".to_owned(),
    };
    if new.log_prob_kind != LogProbKind::Tempered {
        return Some(format!("its log-probs are tempered, the new ones {}", new.log_prob_kind));
    }
    let (before, after) = (recorded.temperature, new.temperature);
    let reason =
        || format!("its log-probs are of temperature {}, the new of {}", told(before), told(after));
    (before != after).then(reason)
}

/// Compares log-probs slot by slot. A null slot is no number on that side.
pub(super) fn shift(recorded: &[Option<f32>], now: &[Option<f32>], tolerance: f64) -> Check {
    let pairs = recorded.iter().zip(now);
    let shifts: Vec<f64> = pairs
        .filter_map(|(before, after)| Some(f64::from((*after)?) - f64::from((*before)?)))
        .collect();
    if recorded.len() != now.len() || shifts.is_empty() {
        let reason = format!("{} log-probs against {}", now.len(), recorded.len());
        return Check::new(By::LogProb, Finding::NotCompared(reason));
    }
    let mean = shifts.iter().sum::<f64>() / shifts.len() as f64;
    let (place, largest) = shifts
        .iter()
        .enumerate()
        .map(|(place, shift)| (place, shift.abs()))
        .fold((0, 0.0), |most, each| if each.1 > most.1 { each } else { most });
    let finding = match largest > tolerance {
        true => Finding::Differs(format!(
            "log-prob {place} moved by {largest:.2e} nats, the mean by {mean:+.2e}"
        )),
        false => Finding::Same,
    };
    let figures = vec![("mean_shift", mean), ("largest_shift", largest)];
    Check { by: By::LogProb, finding, figures }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_shift_decides() {
        let recorded = [Some(-1.0), Some(-2.0), None];
        let check = shift(&recorded, &[Some(-1.5), Some(-1.75), Some(-9.0)], 0.1);
        assert_eq!(check.figures, [("mean_shift", -0.125), ("largest_shift", 0.5)]);
        assert!(matches!(check.finding, Finding::Differs(_)));
        assert_eq!(shift(&recorded, &[Some(-1.5), Some(-1.75), None], 0.5).finding, Finding::Same);
        let short = shift(&recorded, &[Some(-1.0)], 0.1);
        assert!(matches!(short.finding, Finding::NotCompared(_)));
    }

    #[test]
    fn tempered_log_probs_are_not_taken_for_raw_ones() {
        let turn = |temperature, log_prob_kind| Turn {
            sampling: Sampling { temperature, log_prob_kind, ..Sampling::default() },
            prompt_ids: Some(vec![1, 2]),
            response_ids: Some(vec![3]),
            rollout_log_probs: Some(vec![Some(-1.0)]),
            ..Turn::default()
        };
        let scored = |turn: &Turn| matches!(plan(turn), Ok(Plan::Score(_)));
        assert!(scored(&turn(Some(0.7), LogProbKind::Raw)));
        assert!(scored(&turn(Some(1.0), LogProbKind::Tempered)));
        assert!(scored(&turn(Some(0.0), LogProbKind::Unknown)));
        assert!(matches!(plan(&turn(Some(0.7), LogProbKind::Tempered)), Ok(Plan::OfAnswer)));
        assert!(matches!(plan(&turn(None, LogProbKind::Tempered)), Ok(Plan::OfAnswer)));
        assert!(plan(&turn(Some(0.7), LogProbKind::Unknown)).is_err());
        let marked = Turn {
            untrainable_reason: Some("usage_mismatch".to_owned()),
            ..turn(Some(1.0), LogProbKind::Raw)
        };
        assert!(plan(&marked).is_err());
    }

    #[test]
    fn tempered_log_probs_are_compared_at_one_temperature() {
        let of = |temperature, log_prob_kind| Sampling {
            temperature,
            log_prob_kind,
            ..Sampling::default()
        };
        let recorded = of(Some(0.7), LogProbKind::Tempered);
        assert_eq!(other_distribution(&recorded, &recorded), None);
        let why = |new: Sampling| other_distribution(&recorded, &new).unwrap();
        assert_eq!(
            why(of(Some(1.0), LogProbKind::Tempered)),
            "its log-probs are of temperature 0.7, the new of 1"
        );
        assert_eq!(
            why(of(None, LogProbKind::Tempered)),
            "its log-probs are of temperature 0.7, the new of an unknown one"
        );
        assert_eq!(
            why(of(Some(0.7), LogProbKind::Raw)),
            "its log-probs are tempered, the new ones raw"
        );
    }
}

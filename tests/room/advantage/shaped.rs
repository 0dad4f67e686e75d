//! Rewards that are made of several, by hand.

use oclaw::advantage::{
    self, Estimator, Shaped, Standing, Weights, note_among, outcome as outcome_of, promoted,
    resolve_shaped,
};
use oclaw::trajectory::Turn;
use oclaw::trajectory::words::{RewardSource, SampleKind};

use super::{close, method, whole, without_hint};

const WEIGHTS: Weights = Weights { explicit: 0.5, judged: 0.25, outcome: 0.25 };

fn row(explicit: Option<f32>, score: Option<f32>) -> Turn {
    Turn { reward_explicit: explicit, score, ..without_hint(1) }
}

fn shaped(weights: Weights, outcome: Option<f32>) -> Option<Shaped> {
    Some(Shaped { weights, outcome })
}

#[test]
fn sources_add_up_and_what_is_null_adds_nothing() {
    let mixed = Some(RewardSource::Mixed);
    for (explicit, score, outcome, reward, source) in [
        (Some(1.0), Some(-1.0), Some(1.0), Some(0.5), mixed),
        (Some(-1.0), Some(-1.0), Some(-1.0), Some(-1.0), mixed),
        (None, Some(1.0), Some(-0.5), Some(0.125), mixed),
        (None, Some(-1.0), None, Some(-0.25), mixed),
        (Some(0.0), Some(0.0), Some(0.0), Some(0.0), mixed),
        (None, None, Some(-1.0), Some(-0.25), Some(RewardSource::Outcome)),
        (None, None, None, None, None),
    ] {
        let signals = resolve_shaped(&row(explicit, score), shaped(WEIGHTS, outcome)).unwrap();
        assert_eq!((signals.reward, signals.reward_source), (reward, source));
    }
    // At full weight a source has its own say, and what has no weight none.
    let judged = Weights { judged: 1.0, ..Weights::default() };
    let signals = resolve_shaped(&row(Some(1.0), Some(-1.0)), shaped(judged, Some(1.0))).unwrap();
    assert_eq!((signals.reward, signals.reward_source), (Some(-1.0), Some(RewardSource::Judged)));
    let signals = resolve_shaped(&row(Some(f32::NAN), None), shaped(judged, None)).unwrap();
    assert_eq!((signals.reward, signals.reward_source), (None, None));
}

#[test]
fn weights_that_round_keep_rewards_in_their_bounds() {
    let weights = Weights { explicit: 0.1, judged: 0.2, outcome: 0.7 };
    let signals = resolve_shaped(&row(Some(1.0), Some(1.0)), shaped(weights, Some(1.0))).unwrap();
    assert_eq!(signals.reward, Some(1.0));
}

#[test]
fn a_source_beyond_its_bounds_is_refused_by_name() {
    for (explicit, score, outcome, told) in [
        (Some(2.0), None, None, "reward_explicit is 2.0, wanted -1 to 1"),
        (None, Some(f32::NAN), None, "score is NaN"),
        (Some(1.0), None, Some(-3.0), "the outcome of its session is -3.0, wanted -1 to 1"),
    ] {
        let refused = resolve_shaped(&row(explicit, score), shaped(WEIGHTS, outcome)).unwrap_err();
        assert_eq!(refused.to_string(), told);
    }
}

#[test]
fn what_cancels_out_is_no_signal_and_is_not_promoted() {
    let cancelled = row(None, Some(-1.0));
    let signals = resolve_shaped(&cancelled, shaped(WEIGHTS, Some(1.0))).unwrap();
    assert_eq!((signals.reward, signals.kind), (Some(0.0), SampleKind::None));
    assert_eq!(signals.reason.as_deref(), Some("neutral_in_sum, no_hint"));
    let seen = outcome_of(&cancelled, shaped(WEIGHTS, Some(1.0)));
    assert!(!seen.signal && promoted(&[seen]).is_empty());
    let signals = resolve_shaped(&row(None, None), shaped(WEIGHTS, Some(0.0))).unwrap();
    assert_eq!(signals.reason.as_deref(), Some("neutral_outcome, no_hint"));
}

/// The rule of at-least-one asks what the judge said, whatever else is in the sum.
#[test]
fn what_is_judged_neutral_is_promoted_under_any_weights() {
    let judged = Weights { judged: 0.7, ..Weights::default() };
    let stated = Weights { explicit: 1.0, ..Weights::default() };
    for (weights, explicit, outcome, kept) in [
        (judged, None, None, true),
        (WEIGHTS, None, None, true),
        (WEIGHTS, None, Some(0.0), true),
        (WEIGHTS, Some(0.0), None, true),
        // 0.5 - 0.25 and -0.25: a signal.
        (WEIGHTS, Some(1.0), Some(-1.0), false),
        (WEIGHTS, None, Some(-1.0), false),
        // The judge has no say.
        (stated, Some(0.0), None, false),
    ] {
        let seen = outcome_of(&row(explicit, Some(0.0)), shaped(weights, outcome));
        let wanted: &[&str] = if kept { &["s-turn-1"] } else { &[] };
        let found: Vec<String> = promoted(&[seen]).into_iter().collect();
        assert_eq!(found, wanted, "{weights:?} {explicit:?} {outcome:?}");
    }
    // Without weights what was stated takes the judge's place.
    assert!(promoted(&[outcome_of(&row(Some(0.0), Some(0.0)), None)]).is_empty());
    assert_eq!(promoted(&[outcome_of(&row(None, Some(0.0)), None)]).len(), 1);
}

#[test]
fn an_outcome_teaches_turns_that_nobody_judged() {
    let standing = Standing { shaped: shaped(WEIGHTS, Some(-1.0)), ..Standing::default() };
    let noted = note_among(row(None, None), standing, &method(Estimator::Grpo));
    assert_eq!((noted.reward, noted.sample_kind), (Some(-0.25), Some(SampleKind::Rl)));
    assert_eq!(noted.rl_advantages, Some(vec![-0.25; 3]));
    assert_eq!(noted.loss_mask, Some(vec![1; 3]));
    // Beside a teacher it is one of two terms: lt - lo is 0.4, 1.05 and 1.7.
    let taught = Turn { score: Some(1.0), ..whole(1) };
    let noted = note_among(taught, standing, &method(Estimator::Combine));
    assert_eq!((noted.reward, noted.sample_kind), (Some(0.0), Some(SampleKind::Opd)));
    close(&noted.advantages.unwrap(), &[0.4, 1.05, 1.7]);
}

#[test]
fn groups_hold_shaped_rewards_against_each_other() {
    let turns = [row(None, Some(1.0)), Turn { turn_id: "b".to_owned(), ..row(None, Some(-1.0)) }];
    let outcomes = [Some(1.0), None];
    let members: Vec<_> = turns
        .iter()
        .zip(outcomes)
        .map(|(turn, outcome)| advantage::member(turn, shaped(WEIGHTS, outcome), Some(7), 0.0))
        .collect();
    let shares = advantage::shares(&method(Estimator::Rloo), &members);
    // 0.5 and -0.25.
    close(&turns.map(|turn| shares[&turn.turn_id]), &[0.75, -0.75]);
}

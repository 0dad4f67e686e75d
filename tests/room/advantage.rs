//! Rewards, kinds, masks, the at-least-one rule and the estimators, against
//! hand-computed numbers. The reference's are in `golden::api`.

mod groups;
mod shaped;

use oclaw::advantage::{
    self, Estimator, Evidence, Method, Scale, Spread, Summary, normalize_groups, note, outcome,
    promoted, resolve,
};
use oclaw::trajectory::Turn;
use oclaw::trajectory::words::{NextStateKind, RewardSource, SampleKind, Status, TokenSource};

use crate::forge::finished;

fn method(estimator: Estimator) -> Method {
    Method::new(estimator)
}

/// A row with all three log-probs.
fn whole(number: u32) -> Turn {
    Turn {
        rollout_log_probs: Some(vec![Some(-0.5), Some(-1.25), Some(-2.0)]),
        advantage_error: None,
        ..finished("s", number)
    }
}

fn without_hint(number: u32) -> Turn {
    let turn = whole(number);
    Turn { hints: None, teacher_log_probs: None, teacher_error: None, ..turn }
}

#[track_caller]
fn close(found: &[f32], wanted: &[f32]) {
    assert_eq!(found.len(), wanted.len());
    for (found, wanted) in found.iter().zip(wanted) {
        assert!((found - wanted).abs() < 1e-6, "{found} is not {wanted}");
    }
}

#[test]
fn the_dispatch_table() {
    let hinted = |score| Turn { score, ..whole(1) };
    let unhinted = |score| Turn { score, ..without_hint(1) };
    for (turn, kind, reason) in [
        (hinted(Some(1.0)), SampleKind::OpdRl, None),
        (hinted(Some(-1.0)), SampleKind::OpdRl, None),
        (hinted(Some(0.0)), SampleKind::Opd, None),
        (hinted(None), SampleKind::Opd, None),
        (unhinted(Some(1.0)), SampleKind::Rl, None),
        (unhinted(Some(0.0)), SampleKind::None, Some("judged_neutral, no_hint")),
        (unhinted(None), SampleKind::None, Some("no_valid_vote, no_hint")),
        (Turn { votes: None, ..unhinted(None) }, SampleKind::None, Some("not_judged, no_hint")),
        (
            Turn { judge_error: Some("timeout".to_owned()), ..unhinted(None) },
            SampleKind::None,
            Some("judge_failed, no_hint"),
        ),
        (
            Turn { next_state_kind: NextStateKind::None, ..unhinted(None) },
            SampleKind::None,
            Some("no_next_state, no_hint"),
        ),
        (
            Turn { teacher_log_probs: Some(vec![None, None]), ..hinted(Some(0.0)) },
            SampleKind::None,
            Some("judged_neutral, teacher_failed"),
        ),
    ] {
        let signals = resolve(&turn).unwrap();
        assert_eq!((signals.kind, signals.reason.as_deref()), (kind, reason));
        let noted = note(turn, false, &method(Estimator::Combine));
        let trained = kind != SampleKind::None;
        assert_eq!(noted.loss_mask, Some(vec![i8::from(trained); 3]));
        assert_eq!(noted.advantages.is_some(), trained);
        assert_eq!(noted.advantage_error, None);
    }
}

#[test]
fn a_stated_reward_outranks_the_judge() {
    let turn = Turn { reward_explicit: Some(0.5), ..whole(1) };
    let noted = note(turn, false, &method(Estimator::Grpo));
    assert_eq!((noted.reward, noted.reward_source), (Some(0.5), Some(RewardSource::Explicit)));
    assert_eq!(noted.advantages, Some(vec![0.5; 3]));
    let noted = note(whole(1), false, &method(Estimator::Grpo));
    assert_eq!((noted.reward, noted.reward_source), (Some(-1.0), Some(RewardSource::Judged)));
}

#[test]
fn the_estimators_by_hand() {
    let noted = |turn, method: &Method| note(turn, false, method).advantages;
    close(&noted(whole(1), &method(Estimator::Opd)).unwrap(), &[0.4, 1.05, 1.7]);
    close(&noted(whole(1), &method(Estimator::Combine)).unwrap(), &[-0.6, 0.05, 0.7]);
    let weighted = Method { reward_weight: 0.5, distill_weight: 2.0, ..method(Estimator::Combine) };
    close(&noted(whole(1), &weighted).unwrap(), &[0.3, 1.6, 2.9]);
    let clipped = Method { distill_clip: Some(1.0), ..method(Estimator::Opd) };
    close(&noted(whole(1), &clipped).unwrap(), &[0.4, 1.0, 1.0]);
    // No hint: no distillation term, and none to distil from.
    close(&noted(without_hint(1), &weighted).unwrap(), &[-0.5; 3]);
    assert_eq!(noted(without_hint(1), &method(Estimator::Opd)), None);
    let neutral = Turn { score: None, ..whole(1) };
    assert_eq!(noted(neutral, &method(Estimator::Grpo)), None);
}

#[test]
fn the_reward_term_stands_apart() {
    let noted = note(whole(1), false, &method(Estimator::Opd));
    assert_eq!(noted.rl_advantages, Some(vec![-1.0; 3]));
    let taught = note(Turn { score: None, ..whole(1) }, false, &method(Estimator::Opd));
    assert_eq!((taught.reward, taught.rl_advantages), (None, Some(vec![0.0; 3])));
    let silent = note(Turn { score: None, ..without_hint(1) }, false, &method(Estimator::Opd));
    assert_eq!(silent.rl_advantages, None);
}

#[test]
fn a_missing_log_prob_is_not_a_number() {
    let noted = note(finished("s", 1), false, &method(Estimator::Combine));
    assert_eq!(noted.advantages, None);
    assert_eq!(noted.advantage_error, None);
    assert_eq!(noted.loss_mask, Some(vec![1; 3]));
    assert_eq!(noted.rl_advantages, Some(vec![-1.0; 3]));
    // The reward alone needs no log-probs.
    let noted = note(finished("s", 1), false, &method(Estimator::Grpo));
    assert_eq!(noted.advantages, Some(vec![-1.0; 3]));
}

#[test]
fn the_first_usable_candidate_teaches() {
    let candidates =
        |lists: [Option<Vec<f32>>; 2]| Turn { teacher_log_probs: Some(lists.to_vec()), ..whole(1) };
    let second = Some(vec![-0.25, -0.25, -0.25]);
    for first in [None, Some(vec![-0.1, f32::NAN, -0.3]), Some(vec![-0.1, f32::NEG_INFINITY, 0.0])]
    {
        let turn = candidates([first, second.clone()]);
        assert_eq!(resolve(&turn).unwrap().teacher, Some(1));
        let noted = note(turn, false, &method(Estimator::Opd));
        close(&noted.advantages.unwrap(), &[0.25, 1.0, 1.75]);
    }
}

#[test]
fn a_candidate_that_another_replaces_is_told() {
    let second = Some(vec![-0.25, -0.25, -0.25]);
    for (first, reason) in [
        (
            vec![-0.1, f32::NAN, -0.3],
            "teacher_log_probs[0] is not finite at token 1: candidate 1 teaches",
        ),
        (
            vec![-0.1, -0.2, 3.0],
            "teacher_log_probs[0] is 3 at token 2, above 0: candidate 1 teaches",
        ),
    ] {
        let turn = Turn { teacher_log_probs: Some(vec![Some(first), second.clone()]), ..whole(1) };
        let opd = method(Estimator::Opd);
        let noted = note(turn, false, &opd);
        assert_eq!(noted.advantage_error, None);
        assert_eq!(noted.sample_reason.as_deref(), Some(reason));
        assert_eq!(noted.loss_mask, Some(vec![1; 3]));
        let mut summary = Summary::default();
        summary.add(&noted, &opd);
        assert_eq!((summary.passed_over, summary.reasons.len()), (1, 0));
    }
    // One after the candidate that teaches is in nobody's way.
    let odd = Some(vec![f32::NAN; 3]);
    let turn = Turn { teacher_log_probs: Some(vec![second, odd]), ..whole(1) };
    assert_eq!(note(turn, false, &method(Estimator::Opd)).sample_reason, None);
}

#[test]
fn a_row_that_contradicts_itself_is_refused_by_name() {
    let nan = vec![Some(-0.5), Some(f32::NAN), None];
    for (turn, error) in [
        (
            Turn { rollout_log_probs: Some(vec![Some(-0.5); 2]), ..whole(1) },
            "rollout_log_probs has 2 values for 3 response ids",
        ),
        (
            Turn { teacher_log_probs: Some(vec![None, Some(vec![-0.1; 4])]), ..whole(1) },
            "teacher_log_probs[1] has 4 values for 3 response ids",
        ),
        (
            Turn { teacher_log_probs: Some(vec![None]), ..whole(1) },
            "teacher_log_probs has 1 values for 2 hints",
        ),
        (
            Turn { response_ids: Some(vec![5, -6, 2]), ..whole(1) },
            "response_ids has id -6 at token 1",
        ),
        (Turn { prompt_ids: Some(vec![-1]), ..whole(1) }, "prompt_ids has id -1 at token 0"),
        (
            Turn { rollout_log_probs: Some(nan), ..whole(1) },
            "rollout_log_probs is not finite at token 1",
        ),
        (Turn { score: Some(f32::NAN), ..whole(1) }, "score is NaN"),
        (Turn { score: Some(7e30), ..whole(1) }, "score is 7e30, wanted -1 to 1"),
        (
            Turn { reward_explicit: Some(-1.5), ..whole(1) },
            "reward_explicit is -1.5, wanted -1 to 1",
        ),
        (
            Turn { rollout_log_probs: Some(vec![Some(-0.5), Some(5.0), None]), ..whole(1) },
            "rollout_log_probs is 5 at token 1, above 0",
        ),
        (
            Turn { teacher_log_probs: Some(vec![Some(vec![-0.1, 3.0, -0.1]), None]), ..whole(1) },
            "teacher_log_probs[0] is 3 at token 1, above 0",
        ),
        (
            Turn { teacher_log_probs: Some(vec![None, Some(vec![f32::NAN; 3])]), ..whole(1) },
            "teacher_log_probs[1] is not finite at token 0",
        ),
    ] {
        let noted = note(turn, false, &method(Estimator::Combine));
        assert_eq!(noted.advantage_error.as_deref(), Some(error));
        assert_eq!(noted.loss_mask, Some(vec![0; 3]));
        assert_eq!((noted.advantages, noted.rl_advantages), (None, None));
    }
}

#[test]
fn only_ids_that_were_sampled_are_trained() {
    let broken = Turn { untrainable_reason: Some("log_probs_misaligned".to_owned()), ..whole(1) };
    for (turn, reason) in [
        (broken, "log_probs_misaligned"),
        (Turn { status: Status::Aborted, ..whole(1) }, "aborted"),
        (Turn { status: Status::Failed, ..whole(1) }, "failed"),
        (Turn { token_source: TokenSource::Retokenized, ..whole(1) }, "retokenized"),
        (Turn { token_source: TokenSource::None, ..whole(1) }, "no_token_ids"),
        (Turn { prompt_ids: None, ..whole(1) }, "no_token_ids"),
    ] {
        let noted = note(turn, false, &method(Estimator::Combine));
        assert_eq!(noted.sample_reason.as_deref(), Some(reason));
        assert_eq!((noted.loss_mask, noted.advantages), (Some(vec![0; 3]), None));
    }
    let truncated = Turn { status: Status::Truncated, ..whole(1) };
    let noted = note(truncated, false, &method(Estimator::Combine));
    assert_eq!((noted.loss_mask, noted.sample_reason), (Some(vec![1; 3]), None));
}

/// Notes a session, the rule at work.
fn session(turns: Vec<Turn>, estimator: Estimator) -> Vec<Turn> {
    let outcomes: Vec<_> = turns.iter().map(|turn| outcome(turn, None)).collect();
    let kept = promoted(&outcomes);
    let note = |turn: Turn| {
        let promoted = kept.contains(&turn.turn_id);
        note(turn, promoted, &method(estimator))
    };
    turns.into_iter().map(note).collect()
}

#[test]
fn at_least_one_promotes_the_first_neutral_turn() {
    let scored = |number, score| Turn { score: Some(score), ..without_hint(number) };
    let flags = |turns: Vec<Turn>| {
        let noted = session(turns, Estimator::Combine);
        noted.iter().map(|turn| turn.promoted.unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(flags(vec![scored(1, 0.0), scored(2, 0.0), scored(3, 1.0)]), [true, false, false]);
    assert_eq!(flags(vec![scored(1, 1.0), scored(2, 0.0)]), [false, false]);
    // By the turns' places, not by the order of the rows.
    assert_eq!(flags(vec![scored(2, 0.0), scored(1, -1.0)]), [false, false]);
    let unjudged = Turn { score: None, ..without_hint(1) };
    assert_eq!(flags(vec![unjudged, scored(2, 0.0)]), [false, true]);
    let stated = Turn { reward_explicit: Some(0.0), ..scored(1, 0.0) };
    assert_eq!(flags(vec![stated]), [false]);
    let lost = Turn { status: Status::Failed, ..scored(1, 0.0) };
    assert_eq!(flags(vec![lost, scored(2, 0.0)]), [false, true]);
}

#[test]
fn a_promoted_turn_teaches_only_with_a_hint() {
    let neutral = |turn: Turn| Turn { score: Some(0.0), ..turn };
    let noted = session(vec![neutral(whole(1))], Estimator::Grpo);
    assert_eq!(noted[0].promoted, Some(true));
    close(noted[0].advantages.as_ref().unwrap(), &[0.4, 1.05, 1.7]);
    let noted = session(vec![neutral(without_hint(1))], Estimator::Grpo);
    assert_eq!(noted[0].sample_reason.as_deref(), Some("promoted_without_signal"));
    assert_eq!((noted[0].loss_mask.clone(), noted[0].promoted), (Some(vec![0; 3]), Some(true)));
}

#[test]
fn groups_are_normalised_without_the_numbers_that_are_none() {
    let normalize = |rewards: &[f32], groups: &[u8]| normalize_groups(rewards, groups, Scale::Std);
    assert_eq!(normalize(&[1.0], &[0]), [0.0]);
    assert_eq!(normalize(&[1.0, 1.0], &[0, 0]), [0.0, 0.0]);
    assert_eq!(normalize(&[0.1, 0.1, 0.1], &[0, 0, 0]), [0.0; 3]);
    let found = normalize(&[1.0, f32::NAN, 3.0], &[0, 0, 0]);
    assert!(found[1].is_nan());
    // std unbiased of 1 and 3 is sqrt(2).
    close(&[found[0], found[2]], &[-0.707_106_3, 0.707_106_3]);
    let found = normalize(&[1.0, -1.0, 0.0, 1.0, 1.0], &[0, 0, 1, 1, 2]);
    assert!(found.iter().all(|value| value.abs() < 1.0), "{found:?}");
    assert_eq!(found[4], 0.0);
}

#[test]
fn the_summary_counts_and_warns() {
    let turns = vec![
        whole(1),
        Turn { score: Some(1.0), ..without_hint(2) },
        Turn { score: None, ..without_hint(3) },
        Turn { score: Some(f32::NAN), ..whole(4) },
        finished("s", 5),
    ];
    let mut summary = Summary::default();
    let combine = method(Estimator::Combine);
    for turn in session(turns, Estimator::Combine) {
        summary.add(&turn, &combine);
    }
    assert_eq!((summary.rows, summary.refused, summary.without_log_probs), (5, 1, 1));
    assert_eq!(summary.of_kind(SampleKind::OpdRl), 2);
    assert_eq!(summary.of_kind(SampleKind::Rl), 1);
    assert_eq!(summary.of_kind(SampleKind::None), 2);
    assert_eq!(summary.reasons["no_valid_vote, no_hint"], 1);
    assert_eq!((summary.tokens, summary.advantages.count), (9, 6));
    assert_eq!(summary.warnings(), Vec::<String>::new());
    let mut equal = Summary { rows: 1, ..Summary::default() };
    equal.alone.add(0.5);
    equal.distilled.add(0.0);
    let warnings = equal.warnings().join("\n");
    for word in
        ["hardly differ", "every distillation advantage is 0", "all advantages are positive"]
    {
        assert!(warnings.contains(word), "{word}: {warnings}");
    }
}

#[test]
fn the_spread_of_nothing_is_not_known() {
    let mut spread = Spread::default();
    assert_eq!((spread.mean(), spread.std(), spread.share_zero()), (None, None, None));
    [1.0, 0.0, -1.0, 0.0].into_iter().for_each(|value| spread.add(value));
    assert_eq!((spread.mean(), spread.share_zero()), (Some(0.0), Some(0.5)));
    assert_eq!(spread.std(), Some(0.5_f64.sqrt()));
}

#[test]
fn evidence_without_a_signal_gives_nothing() {
    let old = [-1.0, -2.0];
    let none = Evidence {
        reward: Some(0.0),
        reward_part: None,
        teacher: None,
        old: &old,
        promoted: false,
    };
    for estimator in Estimator::ALL {
        assert_eq!(advantage::advantages(&method(estimator), &none), None);
    }
}

#[test]
fn a_discount_runs_backwards_over_tokens() {
    let method = Method { gamma: 0.5, ..method(Estimator::ReinforcePlusPlus) };
    let noted = note(without_hint(1), false, &method);
    close(&noted.rl_advantages.unwrap(), &[-0.25, -0.5, -1.0]);
    close(&noted.advantages.unwrap(), &[-0.25, -0.5, -1.0]);
}

#[test]
fn hybrid_keeps_the_reward_part_apart() {
    let method = Method { reward_weight: 0.5, ..method(Estimator::Hybrid) };
    close(&note(whole(1), false, &method).advantages.unwrap(), &[-0.5; 3]);
    let taught = note(Turn { score: None, ..whole(1) }, false, &method);
    close(&taught.advantages.unwrap(), &[0.0; 3]);
    let silent = Turn { score: None, ..without_hint(1) };
    assert_eq!(note(silent, false, &method).advantages, None);
}

#[test]
fn topk_kl_has_none() {
    let method = method(Estimator::TopkKl);
    let noted = note(whole(1), false, &method);
    assert_eq!((noted.advantages, noted.advantage_error), (None, None));
    let evidence = Evidence {
        reward: Some(1.0),
        reward_part: None,
        teacher: Some(&[-1.0, -2.0]),
        old: &[-3.0, -4.0],
        promoted: false,
    };
    // What `train` goes by: a row that a hint teaches, and one that only has a reward.
    assert_eq!(advantage::advantages(&method, &evidence), Some(vec![0.0; 2]));
    let alone = Evidence { teacher: None, ..evidence };
    assert_eq!(advantage::advantages(&method, &alone), None);
}

//! Figures and verdicts against numbers computed by hand.

use std::collections::BTreeSet;

use oclaw::health::{
    self, Answer, BOUNDS, Evidence, Question, Side, Step, Survey, Verdict, answers,
};
use oclaw::trajectory::Turn;
use oclaw::trajectory::words::{NextStateKind, SampleKind, Status};

use crate::forge::{captured, finished};

fn survey(turns: &[Turn]) -> Survey {
    let mut survey = Survey::default();
    turns.iter().for_each(|turn| survey.add(turn));
    survey
}

#[track_caller]
fn close(found: Option<f64>, wanted: f64) {
    let found = found.unwrap();
    assert!((found - wanted).abs() < 1e-6, "{found} is not {wanted}");
}

fn answer(question: Question, survey: &Survey, steps: &[Step]) -> Answer {
    Answer::to(question, &Evidence { survey, steps })
}

#[test]
fn nothing_is_unknown_and_never_healthy() {
    let empty = Survey::default();
    for answer in answers(&Evidence { survey: &empty, steps: &[] }) {
        assert_eq!(answer.verdict, Verdict::Unknown, "{:?}", answer.question);
        assert!(answer.figures.iter().all(|judged| judged.value.is_none()));
        assert!(answer.words().starts_with("no data: "), "{}", answer.words());
    }
    // A captured turn says nothing about the signal, and only that nobody can tell
    // about drift.
    let raw = survey(&[captured("s", 1)]);
    assert_eq!(answer(Question::Signal, &raw, &[]).verdict, Verdict::Unknown);
    assert_eq!(answer(Question::Drift, &raw, &[]).verdict, Verdict::Unknown);
    // A step of which nothing is known changes nothing, NaN neither.
    let silent = Step { log_prob_gap: Some(f64::NAN), ..Step::default() };
    assert_eq!(answer(Question::Drift, &raw, &[silent]).verdict, Verdict::Unknown);
}

#[test]
fn counts_of_captured_turns() {
    let mut turns = [captured("a", 1), captured("a", 2), captured("b", 1), captured("c", 1)];
    turns[1].status = Status::Truncated;
    turns[1].next_state_kind = NextStateKind::None;
    turns[1].weight_version_end = Some("1".to_owned());
    turns[2].weight_version = Some("3".to_owned());
    turns[2].weight_version_end = Some("3".to_owned());
    turns[2].untrainable_reason = Some("log_probs_misaligned".to_owned());
    turns[2].rollout_log_probs = None;
    turns[3].weight_version = Some("default".to_owned());
    turns[3].sampling.temperature = Some(0.0);
    turns[3].response_ids = None;
    turns[3].rollout_log_probs = None;
    turns[3].usage_completion_tokens = Some(11);
    let survey = survey(&turns);
    assert_eq!((survey.turns, survey.sessions()), (4, 3));
    assert_eq!((survey.statuses["complete"], survey.statuses["truncated"]), (3, 1));
    assert_eq!((survey.next_states["user"], survey.next_states["none"]), (3, 1));
    assert_eq!(survey.untrainable["log_probs_misaligned"], 1);
    close(survey.truncated_share(), 0.25);
    // 3, 3, 3 ids and 11 tokens that only the server counted.
    close(survey.lengths.mean(), 5.0);
    close(survey.lengths.std(), 12.0_f64.sqrt());
    // Two rows with log-probs -0.5, -1.25, null.
    assert_eq!(survey.slots, (6, 2));
    close(survey.null_slots(), 1.0 / 3.0);
    close(survey.surprise.mean(), 0.875);
    close(survey.without_log_probs(), 1.0 / 3.0);
    // "default" has a start and an end that differ: it says 0 at the end.
    close(survey.changed_in_flight(), 0.5);
    // Steps 0, 0 and 3: behind the newest by 3, 3, 0. `default` has no age.
    assert_eq!(survey.ages().into_iter().collect::<Vec<_>>(), [(0, 1), (3, 2)]);
    close(survey.staleness(), 2.0);
    assert!(survey.kinds.is_empty() && survey.rewards.mean().is_none());
    assert!(survey.hint_coverage().is_none() && survey.judge_failures().is_none());
}

#[test]
fn greedy_answers_surprise_nobody() {
    let mut greedy = captured("a", 1);
    greedy.sampling.temperature = Some(0.0);
    assert_eq!(survey(&[greedy]).surprise.count, 0);
}

#[test]
fn repetition_counts_runs_of_four() {
    let said = |ids: &[i32]| Turn { response_ids: Some(ids.to_vec()), ..captured("s", 1) };
    // 5 runs, of which 1212 stands twice and 2121 twice: 3 distinct with 2123.
    let survey = survey(&[said(&[1, 2, 1, 2, 1, 2, 1, 3]), said(&[1, 2, 3])]);
    assert_eq!(survey.repetition.count, 1);
    // Runs: 1212 2121 1212 2121 1213.
    close(survey.repetition.mean(), 0.4);
    assert!(survey.opening_diversity().is_none(), "one answer tells nothing");
}

#[test]
fn openings_need_eight_answers() {
    let said = |first: i32| Turn { response_ids: Some(vec![first, 2, 3, 4]), ..captured("s", 1) };
    let same: Vec<Turn> = (0..8).map(|number| said(number / 4)).collect();
    close(survey(&same).opening_diversity(), 0.25);
    assert!(survey(&same[..7]).opening_diversity().is_none());
}

#[test]
fn votes_tie_and_agree() {
    let voted = |votes: &[Option<i8>], score: Option<f32>| Turn {
        votes: Some(votes.to_vec()),
        score,
        ..captured("s", 1)
    };
    let survey = survey(&[
        voted(&[Some(1), Some(1), Some(-1)], Some(1.0)),
        voted(&[Some(1), Some(-1), None], Some(0.0)),
        voted(&[Some(1), None, None], Some(1.0)),
        voted(&[None, None, None], None),
    ]);
    assert_eq!(survey.votes, (12, 6));
    assert_eq!(survey.judged, (4, 1));
    close(survey.judge_failures(), 0.25);
    assert_eq!(survey.ties, 1);
    // 2/3 and 1/2 of two or more votes; one vote alone agrees with nobody.
    assert_eq!(survey.agreement.count, 2);
    close(survey.agreement.mean(), (2.0 / 3.0 + 0.5) / 2.0);
    let first = -(2.0 / 3.0_f64) * (2.0 / 3.0_f64).ln() - (1.0 / 3.0_f64) * (1.0 / 3.0_f64).ln();
    close(survey.vote_entropy.mean(), (first + 2.0_f64.ln()) / 2.0);
    assert_eq!((survey.scores["1"], survey.scores["0"]), (2, 1));
    close(survey.rewards.mean(), 2.0 / 3.0);
}

#[test]
fn hints_and_signal() {
    let plain =
        Turn { sample_kind: Some(SampleKind::None), promoted: Some(true), ..captured("b", 1) };
    let last = Turn { next_state_kind: NextStateKind::None, ..plain.clone() };
    let survey = survey(&[finished("a", 1), plain, last]);
    assert_eq!(survey.hinted, (1, 1));
    close(survey.hint_coverage(), 0.5);
    close(survey.hint_accept_rate(), 2.0 / 3.0);
    // "The answer is 4." and "Two and two make four."
    close(survey.hint_lengths.mean(), 19.0);
    assert_eq!(survey.taught, (2, 1));
    close(survey.promoted_share(), 2.0 / 3.0);
    // Of the two with a next state one can be trained.
    assert_eq!(survey.effective, (2, 1));
    // -0.6, -0.2, -1.3.
    close(survey.advantages.mean(), -0.7);
    close(survey.advantages.std(), (0.62_f64 / 3.0).sqrt());
    close(survey.largest_advantage(), 1.3);
    close(survey.advantages.share_zero(), 0.0);
    // Teacher -0.1, -0.2 less server -0.5, -1.25; the third slot is null.
    assert_eq!(survey.distilled.count, 2);
    close(survey.distilled.mean(), 0.725);
    let answer = answer(Question::Signal, &survey, &[]);
    // One of two hints failed, which is on the bound of ill and so to be watched.
    assert_eq!(answer.verdict, Verdict::Watch);
    let reason = answer.reason().unwrap();
    assert_eq!((reason.bound.name, reason.value), ("teacher_failures", Some(0.5)));
}

#[test]
fn a_bound_itself_is_within() {
    let gap = |log_prob_gap: Option<f64>| {
        let steps = [Step { log_prob_gap, ..Step::default() }];
        answer(Question::Drift, &Survey::default(), &steps).verdict
    };
    for (value, verdict) in [
        (None, Verdict::Unknown),
        (Some(0.0), Verdict::Healthy),
        (Some(0.05), Verdict::Healthy),
        (Some(0.0501), Verdict::Watch),
        (Some(0.1), Verdict::Watch),
        (Some(0.1001), Verdict::Ill),
    ] {
        assert_eq!(gap(value), verdict, "{value:?}");
    }
}

#[test]
fn the_worst_figure_is_the_reason() {
    let step = Step {
        log_prob_gap: Some(0.01),
        approximate_kl: Some(-0.2),
        clip_fraction: Some(0.3),
        ..Step::default()
    };
    let answer = answer(Question::Drift, &Survey::default(), &[step]);
    assert_eq!(answer.verdict, Verdict::Ill);
    let words = answer.words();
    assert_eq!(words, "approximate_kl 0.2000, ill above 0.1: lower `--lr` or `--epochs`");
    // Supporting figures alone may frighten, not calm.
    let fresh = Step { staleness: Some(0.0), clip_fraction: Some(0.0), ..Step::default() };
    let calm =
        Answer::to(Question::Drift, &Evidence { survey: &Survey::default(), steps: &[fresh] });
    assert_eq!(calm.verdict, Verdict::Unknown);
    assert_eq!(calm.words(), "no data: log_prob_gap not known");
}

#[test]
fn what_is_left_of_the_first_step() {
    let step = |step: u64, entropy: Option<f64>| Step { step, entropy, ..Step::default() };
    let kept = |steps: &[Step]| {
        let answer = answer(Question::Exploration, &Survey::default(), steps);
        let judged = answer.figures.iter().find(|judged| judged.bound.name == "entropy_kept");
        judged.unwrap().value
    };
    close(kept(&[step(1, Some(2.0)), step(2, None), step(3, Some(0.5))]), 0.25);
    assert_eq!(kept(&[step(1, Some(2.0))]), None);
    assert_eq!(kept(&[]), None);
    let steps = [step(1, Some(2.0)), step(2, Some(0.21))];
    let answer = answer(Question::Exploration, &Survey::default(), &steps);
    assert_eq!(answer.verdict, Verdict::Watch, "0.105 of the entropy is left");
}

#[test]
fn under_distillation_zero_advantages_are_no_fault() {
    let zero = Step {
        advantage_std: Some(0.0),
        advantage_zero: Some(1.0),
        advantage_min: Some(0.0),
        ..Step::default()
    };
    let ill = answer(Question::Signal, &Survey::default(), std::slice::from_ref(&zero));
    assert_eq!(ill.verdict, Verdict::Ill);
    let hybrid = Step { distill_gap: Some(0.3), ..zero };
    let well = answer(Question::Signal, &Survey::default(), &[hybrid]);
    assert_eq!(well.verdict, Verdict::Healthy);
    assert_eq!(well.reason().unwrap().bound.name, "distill_gap");
}

#[test]
fn a_line_of_metrics_is_read_with_nulls() {
    let text = r#"{"step":3,"turns":4,"tokens":80,"loss":-0.25,"entropy":1.5,"reference_kl":null,"unheard_of":1}"#;
    let step: Step = serde_json::from_str(text).unwrap();
    assert_eq!((step.step, step.loss, step.entropy), (3, Some(-0.25), Some(1.5)));
    assert_eq!((step.reference_kl, step.clip_fraction), (None, None));
    close(step.tokens_per_turn(), 20.0);
}

#[test]
fn the_table_of_bounds_is_sound() {
    let names: BTreeSet<_> = BOUNDS.iter().map(|bound| bound.name).collect();
    assert_eq!(names.len(), BOUNDS.len());
    for bound in BOUNDS {
        let ordered = match bound.side {
            Side::Above => bound.watch < bound.ill,
            Side::Below => bound.watch > bound.ill,
        };
        assert!(ordered, "{}", bound.name);
        for text in [bound.meaning, bound.source, bound.advice] {
            assert!(!text.is_empty(), "{}", bound.name);
        }
    }
    for question in health::Question::ALL {
        assert!(BOUNDS.iter().any(|bound| bound.question == question && bound.decides));
    }
}

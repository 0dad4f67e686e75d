//! From turns to samples: the reference's assembly, its sessions, its groups.
//!
//! Deliberate differences, each by a rule on the case:
//! * The reference pads and cuts lists that do not fit the answer. Here such a row
//!   is refused by the name of the list.
//! * A sample with a reward only takes its own log-probs for the teacher's there.
//!   Here it has no teacher.
//! * A sample with a teacher only has the reward 1.0 there, which its loss never
//!   reads. Here it has none.
//! * The reference trains a promoted turn with mask 1 and reward 0, which is no
//!   gradient. Here such a turn is marked and masked.

use oclaw::advantage::{
    Estimator, Method, Scale, normalize_groups, note, outcome, promoted, resolve,
};
#[cfg(feature = "torch")]
use oclaw::train::{Admission, Distillation, OldLogProbs, Sample, admit};
use oclaw::trajectory::Turn;
use oclaw::trajectory::words::NextStateKind;
use serde_json::Value;

use crate::forge::captured;

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().into_iter().flatten().map(|number| number.as_f64().unwrap() as f32).collect()
}

fn ids(value: &Value) -> Vec<i32> {
    value.as_array().into_iter().flatten().map(|id| id.as_i64().unwrap() as i32).collect()
}

fn whole_numbers(value: &Value) -> Vec<i64> {
    value.as_array().into_iter().flatten().map(|flag| flag.as_f64().unwrap() as i64).collect()
}

pub(super) fn with_reward(input: &Value, output: &Value) {
    assemble(input, output, Estimator::Combine);
}

pub(super) fn taught_only(input: &Value, output: &Value) {
    assemble(input, output, Estimator::Opd);
}

pub(super) fn rewarded_only(input: &Value, output: &Value) {
    assemble(input, output, Estimator::Grpo);
}

/// The turn of a case, as our stages would have written it.
fn turn(input: &Value) -> Turn {
    let recorded = &input["turn"];
    let log_probs = recorded["response_logprobs"].as_array().into_iter().flatten();
    let reward = input.get("reward").or_else(|| input.get("eval_score"));
    let mut turn = Turn {
        prompt_ids: Some(ids(&recorded["prompt_ids"])),
        response_ids: Some(ids(&recorded["response_ids"])),
        rollout_log_probs: Some(log_probs.map(|value| value.as_f64().map(|x| x as f32)).collect()),
        score: reward.and_then(Value::as_f64).map(|reward| reward as f32),
        ..captured("s", 1)
    };
    if let Some(opd) = input.get("opd") {
        turn.hints = Some(vec!["a hint".to_owned()]);
        turn.teacher_error = Some(vec![None]);
        turn.teacher_temperature = Some(1.0);
        turn.teacher_log_probs = Some(vec![Some(numbers(&opd["teacher_log_probs"]))]);
    }
    turn
}

/// Builds the sample of a case and compares it, or sees the turn refused.
fn assemble(input: &Value, output: &Value, estimator: Estimator) {
    let turn = turn(input);
    let tokens = turn.response_ids.as_ref().map_or(0, Vec::len);
    let lists = [
        ("rollout_log_probs", turn.rollout_log_probs.as_ref().map(Vec::len)),
        ("teacher_log_probs", input.get("opd").map(|_| taught(&turn).map_or(0, <[f32]>::len))),
    ];
    let odd = lists.iter().find(|(_, length)| length.is_some_and(|length| length != tokens));
    if let Some((column, _)) = odd {
        let refusal = resolve(&turn).unwrap_err().to_string();
        assert!(refusal.contains(column), "{input}: {refusal}");
        let noted = note(turn, false, &Method::new(estimator));
        assert!(noted.advantage_error.is_some_and(|error| error.contains(column)), "{input}");
        return;
    }
    let mask = resolve(&turn).unwrap().mask.unwrap_or_default();
    let mask: Vec<i64> = mask.into_iter().map(i64::from).collect();
    let noted = note(turn, false, &Method::new(estimator));
    assert_eq!(noted.advantage_error, None, "{input}");
    assert_eq!(mask, whole_numbers(&output["loss_mask"]), "{input}");
    let [prompt, response] = [&noted.prompt_ids, &noted.response_ids];
    let whole: Vec<i32> = prompt.iter().chain(response).flatten().copied().collect();
    assert_eq!(whole, ids(&output["tokens"]), "{input}");
    assert_eq!(output["response_length"], tokens, "{input}");
    check_rollout(&noted.rollout_log_probs.clone().unwrap_or_default(), input, output);
    let teacher = numbers(&output["teacher_log_probs"]);
    match taught(&noted) {
        Some(found) => assert_eq!(found, teacher, "{input}"),
        None => assert_eq!(teacher, numbers(&output["rollout_log_probs"]), "{input}"),
    }
    let reward = output["reward"]["score"].as_f64().map(|reward| reward as f32);
    match estimator {
        Estimator::Opd => assert_eq!((noted.reward, reward), (None, Some(1.0)), "{input}"),
        _ => assert_eq!(noted.reward, reward, "{input}"),
    }
    #[cfg(feature = "torch")]
    {
        check_sample(&noted, estimator, input, output);
        check_topk(&noted, input, output);
    }
}

fn taught(turn: &Turn) -> Option<&[f32]> {
    turn.teacher_log_probs.as_ref()?.first()?.as_deref()
}

/// A slot that the server left empty is 0.0 there and null here.
fn check_rollout(found: &[Option<f32>], input: &Value, output: &Value) {
    let wanted = numbers(&output["rollout_log_probs"]);
    assert_eq!(found.len(), wanted.len(), "{input}");
    for (found, wanted) in found.iter().zip(wanted) {
        assert_eq!(found.unwrap_or(0.0), wanted, "{input}");
    }
}

#[cfg(feature = "torch")]
fn admission(estimator: Estimator) -> Admission {
    Admission {
        method: Method::new(estimator),
        distillation: Distillation {
            subset: oclaw::loss::SubsetIds::Teacher,
            ..Default::default()
        },
        old_log_probs: OldLogProbs::Recompute,
        max_staleness: 4,
        version_aliases: std::collections::BTreeMap::new(),
        assume_temperature: None,
        vocabulary: i64::from(i32::MAX),
    }
}

/// What `train` makes of the noted turn.
#[cfg(feature = "torch")]
fn check_sample(noted: &Turn, estimator: Estimator, input: &Value, output: &Value) {
    let tokens = whole_numbers(&output["loss_mask"]);
    let silent = noted.reward.unwrap_or(0.0) == 0.0 && taught(noted).is_none();
    if silent || tokens.is_empty() {
        assert!(admit(noted, 0, &admission(estimator)).is_err(), "{input}");
        return;
    }
    let Sample { prompt_ids, response_ids, mask, rollout, teacher, reward, .. } =
        admit(noted, 0, &admission(estimator)).unwrap();
    assert_eq!([prompt_ids, response_ids].concat(), ids(&output["tokens"]), "{input}");
    assert_eq!(mask.iter().map(|flag| i64::from(*flag)).collect::<Vec<_>>(), tokens, "{input}");
    check_rollout(&rollout, input, output);
    assert_eq!(teacher.as_deref(), taught(noted), "{input}");
    assert_eq!(reward, noted.reward, "{input}");
}

/// The teacher's likeliest ids: k at each response token, or the row is refused.
#[cfg(feature = "torch")]
fn check_topk(noted: &Turn, input: &Value, output: &Value) {
    if input["topk"] != true {
        assert!(output["teacher_topk_indices"].is_null(), "{input}");
        return;
    }
    let k = input["k"].as_u64().unwrap() as usize;
    let rows = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let (ids_of, log_probs) = (
        rows(&input["opd"]["teacher_topk_indices"]),
        rows(&input["opd"]["teacher_topk_log_probs"]),
    );
    let flat_ids: Vec<i32> = ids_of.iter().flat_map(ids).collect();
    let flat_log_probs: Vec<f32> = log_probs.iter().flat_map(numbers).collect();
    let tokens = noted.response_ids.as_ref().map_or(0, Vec::len);
    let turn = Turn {
        topk: Some(k as u16),
        student_topk_ids: Some((0..tokens).flat_map(|_| 0..k as i32).collect()),
        teacher_topk_ids: Some(vec![Some(flat_ids.clone())]),
        teacher_topk_log_probs: Some(vec![Some(flat_log_probs.clone())]),
        ..noted.clone()
    };
    let full = |rows: &[Value]| rows.iter().all(|row| row.as_array().is_some_and(|r| r.len() == k));
    let fits = flat_ids.len() == tokens * k && full(&ids_of) && full(&log_probs);
    match (admit(&turn, 0, &admission(Estimator::Hybrid)), fits) {
        (Ok(sample), true) => {
            assert!(sample.topk.is_some(), "{input}");
            let wanted = rows(&output["teacher_topk_indices"]);
            assert_eq!(flat_ids, wanted.iter().flat_map(ids).collect::<Vec<_>>(), "{input}");
            let wanted = rows(&output["teacher_topk_log_probs"]);
            assert_eq!(flat_log_probs, wanted.iter().flat_map(numbers).collect::<Vec<_>>());
        }
        (Err(refusal), false) => {
            let fault = refusal.fault.unwrap_or_default();
            assert!(fault.contains("teacher_topk_"), "{input}: {fault}");
        }
        (found, _) => panic!("{input}: {found:?}"),
    }
}

/// A session judged turn by turn, with the at-least-one rule.
pub(super) fn sequence(case: &Value) {
    let inputs = case["input"].as_array().unwrap();
    let outputs = case["output"].as_array().unwrap();
    assert_eq!(inputs.len(), outputs.len(), "{case}");
    let turn = |(index, input): (usize, &Value)| {
        let tokens = whole_numbers(&outputs[index]["loss_mask"]).len();
        Turn {
            score: input["score"].as_f64().map(|score| score as f32),
            votes: Some(vec![input["score"].as_f64().map(|score| score as i8)]),
            response_ids: Some(vec![5; tokens]),
            rollout_log_probs: Some(vec![Some(-0.5); tokens]),
            next_state_kind: match input["has_next_state"] {
                Value::Bool(true) => NextStateKind::User,
                _ => NextStateKind::None,
            },
            ..captured("s", index as u32 + 1)
        }
    };
    let turns: Vec<Turn> = inputs.iter().enumerate().map(turn).collect();
    let kept = promoted(&turns.iter().map(|turn| outcome(turn, None)).collect::<Vec<_>>());
    for ((turn, wanted), index) in turns.into_iter().zip(outputs).zip(0..) {
        // No vote is 0 there.
        assert_eq!(case["eval_scores"][index].as_f64(), Some(turn.score.unwrap_or(0.0).into()));
        let is_kept = kept.contains(&turn.turn_id);
        let noted = note(turn, is_kept, &Method::new(Estimator::Grpo));
        let (mask, reward) = (whole_numbers(&wanted["loss_mask"]), wanted["reward"].as_f64());
        let trained = mask.contains(&1);
        assert_eq!(noted.promoted, Some(trained && reward == Some(0.0)), "{case}");
        let signal = trained && reward != Some(0.0);
        let expected: Vec<i8> = mask.iter().map(|flag| i8::from(signal && *flag == 1)).collect();
        assert_eq!(noted.loss_mask, Some(expected), "{case}");
        assert_eq!(wanted["index"], index, "{case}");
        let first = noted.advantages.iter().flatten().next().map(|first| f64::from(*first));
        assert_eq!(first, reward.filter(|_| signal), "{case}");
    }
}

/// Group normalisation: equal within 1e-6, for ours adds up in another order.
pub(super) fn groups(input: &Value, output: &Value) {
    let rewards = numbers(&input["rewards"]);
    let groups = whole_numbers(&input["group_index"]);
    let found = match (&input["rewards_normalization"], &input["grpo_std_normalization"]) {
        (Value::Bool(false), _) => rewards,
        (_, Value::Bool(true)) => normalize_groups(&rewards, &groups, Scale::Std),
        _ => normalize_groups(&rewards, &groups, Scale::Mean),
    };
    let wanted = numbers(output);
    assert_eq!(found.len(), wanted.len(), "{input}");
    for (found, wanted) in found.iter().zip(&wanted) {
        assert!((found - wanted).abs() < 1e-6 * (1.0 + wanted.abs()), "{input}: {found}, {wanted}");
    }
}

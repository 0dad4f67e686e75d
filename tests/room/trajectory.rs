//! The schema and its invariants.

use std::collections::BTreeSet;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, Int64Array, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Field, Schema};
use oclaw::trajectory::lint::{self, Fault, Linter};
use oclaw::trajectory::turn::{self, Micros};
use oclaw::trajectory::words::{
    NextStateKind, RewardSource, SampleKind, Status, TokenSource, WeightVersionSource, Word,
};
use oclaw::trajectory::{Error, Turn, columns};

use crate::forge::{STAGES, captured, finished};

#[test]
fn turns_round_trip_through_a_batch() {
    let turns = vec![captured("a", 1), finished("a", 2), finished("b", 1)];
    let mut full = turns.clone();
    // Columns of the advantage stage may not be null once they are there.
    full[0].sample_kind = Some(SampleKind::None);
    full[0].promoted = Some(false);
    let batch = turn::batch(&STAGES, &full).unwrap();
    assert_eq!(batch.num_columns(), columns().len());
    assert_eq!(turn::read(&batch).unwrap(), full);
    let served = turn::batch(&STAGES[..1], &turns).unwrap();
    let read = turn::read(&served).unwrap();
    assert_eq!(read[1], captured("a", 2));
}

#[test]
fn a_required_value_that_is_missing_is_named() {
    let error = turn::batch(&STAGES, &[captured("a", 1)]).unwrap_err();
    assert!(matches!(error, Error::Null { column: "sample_kind", row: 0 }), "{error}");
}

#[test]
fn a_missing_column_makes_a_foreign_table() {
    let batch = turn::batch(&STAGES[..1], &[captured("a", 1)]).unwrap();
    let index = batch.schema().index_of("session_id").unwrap();
    let others: Vec<_> = (0..batch.num_columns()).filter(|column| *column != index).collect();
    let error = turn::read(&batch.project(&others).unwrap()).unwrap_err();
    assert_eq!(error.to_string(), "not a trajectory table (no `session_id` column)");
}

fn replaced(batch: &RecordBatch, name: &str, array: ArrayRef) -> RecordBatch {
    let mut columns = batch.columns().to_vec();
    let mut fields: Vec<_> = batch.schema().fields().iter().cloned().collect();
    let index = batch.schema().index_of(name).unwrap();
    fields[index] = Arc::new(Field::new(name, array.data_type().clone(), true));
    columns[index] = array;
    RecordBatch::try_new(Arc::new(Schema::new(fields)), columns).unwrap()
}

#[test]
fn wider_types_are_taken_and_foreign_ones_refused() {
    let batch = turn::batch(&STAGES[..1], &[captured("a", 7)]).unwrap();
    let wide = replaced(&batch, "turn", Arc::new(Int64Array::from(vec![7])));
    assert_eq!(turn::read(&wide).unwrap()[0].turn, 7);
    let negative = replaced(&batch, "turn", Arc::new(Int64Array::from(vec![-7])));
    assert!(matches!(turn::read(&negative), Err(Error::Arrow { column: "turn", .. })));
    let text = replaced(&batch, "turn", Arc::new(StringArray::from(vec!["7"])));
    assert!(matches!(turn::read(&text), Err(Error::WrongType { column: "turn", .. })));
    let word = replaced(&batch, "status", Arc::new(StringArray::from(vec!["done"])));
    let error = turn::read(&word).unwrap_err().to_string();
    let wanted =
        "row 0: `status` is `done`, wanted one of `complete`, `truncated`, `aborted`, `failed`";
    assert_eq!(error, wanted);
    let null = replaced(&batch, "status", arrow::array::new_null_array(&DataType::Utf8, 1));
    assert!(matches!(turn::read(&null), Err(Error::Null { column: "status", row: 0 })));
}

#[test]
fn words_parse_what_they_print() {
    for status in Status::ALL {
        assert_eq!(Status::parse(status.as_str()), Some(*status));
    }
    assert_eq!(SampleKind::OpdRl.to_string(), "opd+rl");
    assert_eq!(Status::parse("Complete"), None);
}

/// One sound row, and for each rule a change that breaks it.
type Breakage = (&'static str, &'static str, fn(&mut Turn));

const BREAKAGES: &[Breakage] = &[
    ("a turn has an id", "turn_id", |t| t.turn_id.clear()),
    ("turns count from 1, and only turn 1 has no parent", "turn", |t| t.turn = 0),
    ("turns count from 1, and only turn 1 has no parent", "parent_turn_id", |t| {
        t.parent_turn_id = None;
    }),
    ("turns count from 1, and only turn 1 has no parent", "parent_turn_id", |t| t.turn = 1),
    ("turns count from 1, and only turn 1 has no parent", "parent_turn_id", |t| {
        t.parent_turn_id = Some(t.turn_id.clone());
    }),
    ("a session's confidence is between 0 and 1", "session_confidence", |t| {
        t.session_confidence = 1.5;
    }),
    ("a session's confidence is between 0 and 1", "session_confidence", |t| {
        t.session_confidence = f32::NAN;
    }),
    ("an answer ends after its request came", "finished_at", |t| t.finished_at = Micros(0)),
    ("a weight version has a source", "weight_version_source", |t| t.weight_version = None),
    ("a weight version has a source", "weight_version_source", |t| {
        t.weight_version_source = WeightVersionSource::None;
    }),
    ("sampling settings are numbers in their ranges", "sampling", |t| {
        t.sampling.temperature = Some(f32::INFINITY);
    }),
    ("sampling settings are numbers in their ranges", "sampling", |t| {
        t.sampling.temperature = Some(1e-30);
    }),
    ("sampling settings are numbers in their ranges", "sampling", |t| {
        t.sampling.top_p = Some(1.1);
    }),
    ("messages are a list of objects with a role", "messages", |t| t.messages = "{}".to_owned()),
    ("messages are a list of objects with a role", "messages", |t| t.messages = "[]".to_owned()),
    ("messages are a list of objects with a role", "messages", |t| {
        t.messages = r#"[{"content":"x"}]"#.to_owned();
    }),
    ("messages are a list of objects with a role", "messages", |t| t.messages = "[".to_owned()),
    ("tools are a list of objects", "tools", |t| t.tools = Some("[1]".to_owned())),
    ("tools are a list of objects", "tools", |t| t.tools = Some("no".to_owned())),
    ("the response is an object of the assistant", "response", |t| t.response = "[]".to_owned()),
    ("the response is an object of the assistant", "response", |t| t.response = "x".to_owned()),
    ("a complete answer has a finish reason, and is not cut", "finish_reason", |t| {
        t.finish_reason = None;
    }),
    ("a complete answer has a finish reason, and is not cut", "finish_reason", |t| {
        t.finish_reason = Some("length".to_owned());
    }),
    ("token ids are there when they have a source, and not negative", "token_source", |t| {
        t.token_source = TokenSource::None;
    }),
    ("token ids are there when they have a source, and not negative", "prompt_ids", |t| {
        t.prompt_ids = Some(vec![1, -1]);
    }),
    ("token ids are there when they have a source, and not negative", "response_ids", |t| {
        t.response_ids = Some(vec![5, 6, -2]);
    }),
    ("log-probs match the response ids", "rollout_log_probs", |t| {
        t.rollout_log_probs = Some(vec![Some(-1.0); 2]);
    }),
    ("log-probs match the response ids", "rollout_log_probs", |t| {
        t.rollout_log_probs = Some(vec![None, Some(-1.0), Some(-1.0)]);
    }),
    ("log-probs match the response ids", "rollout_log_probs", |t| {
        t.rollout_log_probs = Some(vec![Some(-1.0), Some(0.001), None]);
    }),
    ("log-probs match the response ids", "rollout_log_probs", |t| {
        t.rollout_log_probs = Some(vec![Some(-1.0), Some(f32::NEG_INFINITY), None]);
    }),
    ("log-probs match the response ids", "rollout_log_probs", |t| t.response_ids = None),
    ("a row that cannot be trained on says why", "untrainable_reason", |t| {
        t.prompt_ids = Some(Vec::new());
    }),
    ("a row that cannot be trained on says why", "untrainable_reason", |t| t.prompt_ids = None),
    ("a row that cannot be trained on says why", "untrainable_reason", |t| {
        t.token_source = TokenSource::Retokenized;
    }),
    ("a row that cannot be trained on says why", "untrainable_reason", |t| {
        t.status = Status::Failed;
    }),
    ("the next state goes with its kind", "next_state", |t| t.next_state = None),
    ("the next state goes with its kind", "next_state", |t| {
        t.next_state_kind = NextStateKind::Explicit;
    }),
    ("the next state goes with its kind", "next_state", |t| t.next_state = Some("1".to_owned())),
    ("an explicit reward is between -1 and 1", "reward_explicit", |t| {
        t.reward_explicit = Some(2.0);
    }),
    ("an explicit reward is between -1 and 1", "reward_explicit", |t| {
        t.reward_explicit = Some(f32::NAN);
    }),
    ("votes are -1, 0 or 1, and the score is their majority", "votes", |t| {
        t.votes = Some(vec![Some(-1), Some(2)]);
    }),
    ("votes are -1, 0 or 1, and the score is their majority", "score", |t| {
        t.votes = Some(vec![Some(-1), Some(1)]);
    }),
    ("votes are -1, 0 or 1, and the score is their majority", "score", |t| {
        t.votes = Some(vec![None, None, None]);
    }),
    ("votes are -1, 0 or 1, and the score is their majority", "score", |t| t.score = None),
    ("the judge's words match the votes, an error the lack of a score", "judge_text", |t| {
        t.judge_text = Some(vec![None]);
    }),
    ("the judge's words match the votes, an error the lack of a score", "judge_error", |t| {
        t.judge_error = Some("timeout".to_owned());
    }),
    ("hints are at most three, different, shortest first", "hints", |t| {
        t.hints = Some(vec!["longer".to_owned(), "short".to_owned()]);
    }),
    ("hints are at most three, different, shortest first", "hints", |t| {
        t.hints = Some(vec!["same".to_owned(), "same".to_owned()]);
    }),
    ("hints are at most three, different, shortest first", "hints", |t| {
        t.hints = Some(vec![" ".to_owned(), "hint".to_owned()]);
    }),
    ("hints are at most three, different, shortest first", "hints", |t| t.hints = Some(vec![])),
    ("hint votes are -1 or 1", "hint_votes", |t| t.hint_votes = Some(vec![Some(0)])),
    ("teacher columns have one entry per hint", "teacher_log_probs", |t| {
        t.teacher_log_probs = Some(vec![Some(vec![-0.1; 3])]);
    }),
    ("teacher columns have one entry per hint", "teacher_topk_ids", |t| {
        t.teacher_topk_ids = Some(vec![]);
    }),
    ("a candidate has log-probs or an error", "teacher_error", |t| t.teacher_error = None),
    ("a candidate has log-probs or an error", "teacher_error", |t| {
        t.teacher_error = Some(vec![Some("x".to_owned()), Some("y".to_owned())]);
    }),
    ("teacher log-probs match the response ids", "teacher_log_probs", |t| {
        t.teacher_log_probs = Some(vec![Some(vec![-0.1; 2]), None]);
    }),
    ("teacher log-probs match the response ids", "teacher_log_probs", |t| {
        t.teacher_log_probs = Some(vec![Some(vec![-0.1, f32::NAN, -0.1]), None]);
    }),
    ("top-k columns are R times k wide", "student_topk_ids", |t| {
        t.student_topk_ids = Some(vec![1, 2, 3]);
    }),
    ("top-k columns are R times k wide", "teacher_at_student", |t| {
        t.teacher_at_student = Some(vec![Some(vec![-1.0]), None]);
    }),
    ("top-k columns are R times k wide", "teacher_topk_ids", |t| {
        t.teacher_topk_ids = Some(vec![Some(vec![5, 5, 7, 8, 2, 3]), None]);
    }),
    ("top-k columns are R times k wide", "student_topk_log_probs", |t| {
        t.student_topk_log_probs = Some(vec![0.5; 6]);
    }),
    ("a teacher is named, with its temperature", "teacher", |t| t.teacher = None),
    ("a teacher is named, with its temperature", "teacher_temperature", |t| {
        t.teacher_temperature = Some(0.0);
    }),
    ("a reward is between -1 and 1 and has a source", "reward", |t| t.reward = Some(-3.0)),
    ("a reward is between -1 and 1 and has a source", "reward_source", |t| {
        t.reward_source = None;
    }),
    ("the kind of sample goes with its signals", "sample_kind", |t| {
        t.sample_kind = Some(SampleKind::Opd);
    }),
    ("the kind of sample goes with its signals", "sample_kind", |t| {
        t.sample_kind = Some(SampleKind::Rl);
    }),
    ("the kind of sample goes with its signals", "sample_kind", |t| {
        t.reward = Some(0.0);
    }),
    ("the kind of sample goes with its signals", "sample_kind", |t| {
        t.hints = None;
    }),
    ("the kind of sample goes with its signals", "sample_reason", |t| {
        t.sample_kind = Some(SampleKind::None);
    }),
    ("a reward is between -1 and 1 and has a source", "reward", |t| {
        t.reward_source = Some(RewardSource::Judged);
        t.reward = t.score.map(|score| score / 2.0);
    }),
    ("the mask is 0 or 1 per response id", "loss_mask", |t| {
        t.untrainable_reason = Some("imported".to_owned());
    }),
    ("the mask is 0 or 1 per response id", "loss_mask", |t| t.loss_mask = Some(vec![1, 1])),
    ("the mask is 0 or 1 per response id", "loss_mask", |t| t.loss_mask = Some(vec![1, 2, 1])),
    ("advantages are finite, one per response id", "rl_advantages", |t| {
        t.rl_advantages = Some(vec![1e38; 3]);
    }),
    ("advantages are finite, one per response id", "advantages", |t| {
        t.advantages = Some(vec![0.0]);
    }),
    ("advantages are finite, one per response id", "rl_advantages", |t| {
        t.rl_advantages = Some(vec![0.0, f32::NAN, 0.0]);
    }),
    ("advantages are finite, one per response id", "advantage_error", |t| {
        t.advantage_error = Some("x".to_owned());
    }),
];

#[test]
fn each_rule_fires_on_a_row_that_breaks_it() {
    for (index, (says, column, break_it)) in BREAKAGES.iter().enumerate() {
        let mut turn = finished("a", 2);
        break_it(&mut turn);
        let rule = lint::rules().find(|rule| rule.says == *says);
        let rule = rule.unwrap_or_else(|| panic!("no rule `{says}`"));
        let faults = (rule.check)(&turn);
        let fires = faults.iter().any(|fault| fault.column == *column);
        assert!(fires, "breakage {index} of `{says}`: {faults:?}");
    }
    let broken: BTreeSet<_> = BREAKAGES.iter().map(|(says, ..)| *says).collect();
    let rules: BTreeSet<_> = lint::rules().map(|rule| rule.says).collect();
    assert_eq!(broken, rules, "every rule has a row that breaks it");
}

fn faults(turns: &[Turn]) -> Vec<(u64, Fault)> {
    let mut linter = Linter::default();
    let mut found = Vec::new();
    for (row, turn) in (0..).zip(turns) {
        found.extend(linter.see("x", row, turn));
    }
    found.extend(linter.finish());
    found.into_iter().map(|finding| (finding.row, finding.fault)).collect()
}

#[test]
fn sound_turns_have_no_fault() {
    let mut last = captured("b", 2);
    last.next_state = None;
    last.next_state_kind = NextStateKind::None;
    last.session_end = true;
    assert_eq!(faults(&[finished("a", 1), finished("a", 2), captured("b", 1), last]), []);
}

#[test]
fn rules_between_turns() {
    let fault = |column, what: &str| Fault { column, what: what.to_owned() };
    let (first, second) = (captured("a", 1), captured("a", 2));

    let expected = [
        (1, fault("turn_id", "`a-turn-1` is there twice")),
        (1, fault("request_id", "choice 0 of `a-request-1` is there twice")),
    ];
    assert_eq!(faults(&[first.clone(), first.clone()]), expected);

    let mut gap = captured("a", 3);
    gap.parent_turn_id = Some("a-turn-1".to_owned());
    let expected = [(0, fault("parent_turn_id", "its parent is turn 1"))];
    assert_eq!(faults(&[gap, first.clone()]), expected);

    let mut stranger = second.clone();
    stranger.session_id = "b".to_owned();
    let expected = [(1, fault("parent_turn_id", "its parent is of session `a`"))];
    assert_eq!(faults(&[first.clone(), stranger]), expected);

    let mut early = second.clone();
    early.created_at = Micros(0);
    let expected = [(1, fault("parent_turn_id", "its parent was asked later"))];
    assert_eq!(faults(&[first.clone(), early]), expected);

    let mut counted = first;
    counted.usage_completion_tokens = Some(9);
    let expected = [(0, fault("usage_completion_tokens", "9, with 3 response ids"))];
    assert_eq!(faults(std::slice::from_ref(&counted)), expected);
    let mut other_choice = counted.clone();
    other_choice.choice = 1;
    other_choice.turn_id = "other".to_owned();
    assert_eq!(faults(&[counted, other_choice]), []);
    assert_eq!(lint::BETWEEN.len(), 5);
}

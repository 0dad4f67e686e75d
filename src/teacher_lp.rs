//! The teacher's log-probs: the same answer, token by token, had the prompt held
//! the hint; and, for distillation over several tokens, the likeliest ones of the
//! teacher and of the student at each position.
//!
//! The input of the teacher is the ids of the enhanced prompt followed by the
//! stored response ids, unchanged; the student's is those of the plain prompt.
//! Nothing is tokenised again, padded or cut; what fails for one hint fails for it
//! alone and says why. Absent on purpose: who computes the numbers; the caller
//! brings a scorer.

mod check;
mod plan;

use std::fmt::Display;

use futures_util::future::join_all;
use serde::{Deserialize, Serialize};

use crate::template::Chat;
use crate::trajectory::Turn;
use crate::trajectory::words::LogProbKind;
use plan::{Plan, Sequence};

pub use check::checked;

/// Whom to ask.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Asked {
    /// The teacher.
    #[default]
    Teacher,
    /// The student that stands for the policy of a turn's weight version.
    Student(Option<String>),
}

/// What to score.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ScoreRequest {
    /// By whom.
    pub asked: Asked,
    /// Prompt and response.
    pub ids: Vec<i32>,
    /// Where the response begins.
    pub start: usize,
    /// What the logits are divided by; 1 leaves them as they are.
    pub temperature: f32,
    /// How many of the likeliest tokens are wanted at each position.
    pub top_k: usize,
    /// Ids wanted at each position besides, row-major `[R, c]`; empty for none.
    pub chosen: Vec<i32>,
    /// What the teacher will be asked about next, each with where its response
    /// begins: a scorer that is teacher and student in one may compute it along.
    pub ahead: Vec<(Vec<i32>, usize)>,
}

/// What a [`ScoreRequest`] found. R is `ids.len() - start`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Scores {
    /// `[R]`.
    pub log_probs: Vec<f32>,
    /// Row-major `[R, top_k]`, likeliest first.
    pub top_ids: Vec<i32>,
    /// Row-major `[R, top_k]`.
    pub top_log_probs: Vec<f32>,
    /// Row-major `[R, c]`, in the order of `chosen`.
    pub chosen_log_probs: Vec<f32>,
    /// Name of the weights that answered, which the student's column records.
    pub version: Option<String>,
}

/// Who is asked.
#[derive(Debug, Clone, Copy)]
pub struct Teacher<'a> {
    /// Template and tokenizer of the policy, which teacher and student share.
    pub chat: &'a Chat,
    /// Name for the column.
    pub name: &'a str,
    /// Whether all who are asked can divide logits by a temperature; else all
    /// are raw, for numbers of one row are compared.
    pub tempers: bool,
    /// How many of the likeliest tokens are wanted; 0 for the response's only,
    /// and then no student is asked.
    pub topk: u16,
    /// How many ids there are; a likeliest token beyond is none.
    pub vocabulary: usize,
}

/// Tells whether a turn has what the teacher needs: hints, and ids as sampled.
pub fn is_taught(turn: &Turn) -> bool {
    let some = |length: Option<usize>| length.is_some_and(|length| length > 0);
    some(turn.hints.as_ref().map(Vec::len)) && some(turn.response_ids.as_ref().map(Vec::len))
}

/// Takes the teacher's columns off a turn: nothing to teach, nothing failed.
pub fn clear(turn: &mut Turn) {
    turn.teacher = None;
    turn.teacher_temperature = None;
    turn.student_version = None;
    turn.clear_taught_values();
}

/// Fills the teacher's columns of one turn. A candidate is usable only with all
/// that was asked for, so without the student's ids there is none.
pub async fn teach<E: Display>(
    mut turn: Turn,
    teacher: &Teacher<'_>,
    score: impl AsyncFn(ScoreRequest) -> Result<Scores, E>,
) -> Turn {
    clear(&mut turn);
    if !is_taught(&turn) {
        return turn;
    }
    let temperature = if teacher.tempers { temperature(&turn) } else { 1.0 };
    let ask = async |asked, Sequence { ids, start }: Sequence, chosen, ahead| {
        let top_k = usize::from(teacher.topk);
        let request = ScoreRequest { asked, ids, start, temperature, top_k, chosen, ahead };
        let scores = score(request.clone()).await.map_err(|error| error.to_string())?;
        checked(scores, &request, teacher.vocabulary)
    };
    let plan = Plan::of(&turn, teacher.chat);
    let hints = turn.hints.iter().flatten();
    let sequences: Vec<_> = hints
        .map(|hint| plan.as_ref().map_err(Clone::clone).and_then(|plan| plan.hinted(hint)))
        .collect();
    let student = match plan.as_ref().map(Plan::plain) {
        Ok(plain) if teacher.topk > 0 && sequences.iter().any(Result::is_ok) => match plain {
            Ok(plain) => {
                let known = sequences.iter().flatten();
                let ahead = known.map(|sequence| (sequence.ids.clone(), sequence.start)).collect();
                let student = Asked::Student(turn.weight_version.clone());
                ask(student, plain, Vec::new(), ahead).await
            }
            Err(error) => Err(error),
        },
        _ => Ok(Scores::default()),
    };
    let student = student.map_err(|error| format!("student: {error}"));
    let candidates = join_all(sequences.into_iter().map(async |sequence| {
        let sequence = sequence?;
        let chosen = student.as_ref().map_err(Clone::clone)?.top_ids.clone();
        ask(Asked::Teacher, sequence, chosen, Vec::new()).await
    }));
    let candidates = candidates.await;
    turn.teacher = Some(teacher.name.to_owned());
    turn.teacher_temperature = Some(temperature);
    if teacher.topk > 0 {
        turn.topk = Some(teacher.topk);
        note_top_k(&mut turn, student.ok(), &candidates);
    }
    let (log_probs, errors) = candidates
        .into_iter()
        .map(|candidate| match candidate {
            Ok(scores) => (Some(scores.log_probs), None),
            Err(error) => (None, Some(error)),
        })
        .unzip();
    turn.teacher_log_probs = Some(log_probs);
    turn.teacher_error = Some(errors);
    turn
}

fn note_top_k(turn: &mut Turn, student: Option<Scores>, candidates: &[Result<Scores, String>]) {
    fn each<T>(
        candidates: &[Result<Scores, String>],
        part: impl Fn(&Scores) -> Vec<T>,
    ) -> Option<Vec<Option<Vec<T>>>> {
        Some(candidates.iter().map(|scores| scores.as_ref().ok().map(&part)).collect())
    }
    turn.teacher_topk_ids = each(candidates, |scores| scores.top_ids.clone());
    turn.teacher_topk_log_probs = each(candidates, |scores| scores.top_log_probs.clone());
    turn.teacher_at_student = each(candidates, |scores| scores.chosen_log_probs.clone());
    // A student that was not asked has no ids.
    if let Some(student) = student.filter(|student| !student.top_ids.is_empty()) {
        turn.student_version = student.version;
        turn.student_topk_ids = Some(student.top_ids);
        turn.student_topk_log_probs = Some(student.top_log_probs);
    }
}

/// Returns the temperature at which the teacher must be compared: the sampling
/// temperature where the stored log-probs are of tempered logits, else 1.
/// Greedy sampling counts as 1.
pub fn temperature(turn: &Turn) -> f32 {
    match (turn.sampling.log_prob_kind, turn.sampling.temperature) {
        (LogProbKind::Tempered, Some(temperature)) if temperature > 0.0 => temperature,
        _ => 1.0,
    }
}

//! What a table must have before training begins.

use std::collections::VecDeque;
use std::io;

use oclaw::advantage::{Estimator, Method};
use oclaw::stage;
use oclaw::sync;
use oclaw::table::Source;
use oclaw::template::{self, Tokenizer};
use oclaw::trajectory::Turn;

use super::{Args, stated_estimator};
use crate::report::Failure;

/// The stages that the estimator stands on must have run.
pub(super) fn check_columns(source: &Source, method: &Method) -> Result<(), stage::Error> {
    let schema = source.schema();
    let mut needs = vec![("sample_kind", "advantage"), ("loss_mask", "advantage")];
    if method.estimator.reads_teacher() {
        needs.push(("teacher_log_probs", "teacher-lp"));
    }
    match needs.into_iter().find(|(column, _)| schema.index_of(column).is_err()) {
        Some((column, stage)) => Err(stage::Error::ColumnMissing { column, stage }),
        None => Ok(()),
    }
}

/// `teacher-lp` without `--topk` writes its top-k columns too, all null.
pub(super) fn check_topk(queue: &VecDeque<Turn>, method: &Method) -> Result<(), stage::Error> {
    let taught = |turn: &&Turn| turn.teacher_log_probs.iter().flatten().any(Option::is_some);
    let lacking = |turn: &Turn| turn.teacher_topk_ids.is_none() || turn.student_topk_ids.is_none();
    match method.estimator.reads_topk()
        && queue.iter().any(|turn| taught(&turn))
        && queue.iter().all(lacking)
    {
        true => Err(stage::Error::ColumnMissing {
            column: "teacher_topk_ids",
            stage: "teacher-lp --topk 4",
        }),
        false => Ok(()),
    }
}

/// A reward part that another estimator made is no part of this one. What is only
/// put together otherwise is said.
pub(super) fn check_estimator(
    source: &Source,
    own: Estimator,
    say: &mut dyn FnMut(String),
) -> Result<(), Failure> {
    let Some(made) = stated_estimator(source) else {
        if own.shapes_rewards() {
            say(format!("warning: the table does not say whether `{own}` made it"));
        }
        return Ok(());
    };
    if made == own.as_str() {
        return Ok(());
    }
    if own.shapes_rewards() {
        let problem = format!("the table's reward part is that of `{made}`, not of `{own}`");
        let remedy = format!("run `oclaw advantage --replace --estimator {own}`");
        return Err(Failure::usage(problem).hint(remedy));
    }
    let reads = match own.reads_rewards() {
        true => ": its reward part stays as it is",
        false => "",
    };
    say(format!("the table was made with `{made}`, training is with `{own}`{reads}"));
    Ok(())
}

/// Ids mean nothing under another vocabulary.
pub(super) fn check_tokenizer(source: &Source, args: &Args) -> anyhow::Result<()> {
    let given = args.model.clone().unwrap_or_else(|| args.out.join("latest"));
    // `latest` may be a text.
    let folder = sync::folder_of(&given).unwrap_or(given);
    let Some(recorded) = &source.provenance().tokenizer_hash else { return Ok(()) };
    match Tokenizer::hash_of(&folder) {
        Ok(found) if found != *recorded => Err(Failure::usage(format!(
            "the tokenizer of `{}` ({found}) is not the one that made the ids ({recorded})",
            folder.display()
        ))
        .hint("train the model that gave the answers")
        .into()),
        Ok(_) => Ok(()),
        // A folder without a tokenizer can be trained; ids are checked row by row.
        Err(template::Error::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

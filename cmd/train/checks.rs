//! What a table must have before training begins.

use std::collections::VecDeque;
use std::io;

use oclaw::advantage::{Estimator, Method};
use oclaw::stage;
use oclaw::sync;
use oclaw::table::Source;
use oclaw::template::{self, Tokenizer};
use oclaw::trajectory::Turn;

use super::{Args, idle, stated_estimators};
use crate::advantage::EstimatorName;
use crate::report::Failure;

/// Returns the estimator of a table: the one that was given, else the table's own, which its
/// inputs must agree on. Of that is said what it is, and which flags do nothing under it.
pub(super) fn choose(
    source: &Source,
    args: &Args,
    say: &mut dyn FnMut(String),
) -> Result<Method, Failure> {
    let method = args.method_for(source);
    if args.estimator.is_none() {
        agreed(source)?;
        if method.estimator != Estimator::from(EstimatorName::default()) {
            say(format!("the estimator is `{}`, as the table's", method.estimator));
        }
        idle::tell(args, method.estimator, say)?;
    }
    Ok(method)
}

/// Which of several estimators is meant only the user knows. An input that tells of none is
/// taken for like the others.
fn agreed(source: &Source) -> Result<(), Failure> {
    let stated = stated_estimators(source);
    let mut stated = stated.iter().filter_map(|(name, made)| Some((name, (*made)?)));
    if let (Some((one, its)), Some((other, others))) = (stated.next(), stated.next()) {
        let problem = format!("`{one}` was made with `{its}`, `{other}` with `{others}`");
        let remedy = "say by `--estimator` which one all of them are trained with";
        return Err(Failure::usage(problem).hint(remedy));
    }
    Ok(())
}

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

/// `teacher-lp --topk 0` writes its top-k columns too, all null.
pub(super) fn check_topk(
    queue: &VecDeque<Turn>,
    method: &Method,
    say: &mut dyn FnMut(String),
) -> Result<(), Failure> {
    let taught = |turn: &Turn| turn.teacher_log_probs.iter().flatten().any(Option::is_some);
    let lacks = |turn: &Turn| turn.teacher_topk_ids.is_none() || turn.student_topk_ids.is_none();
    let lacking = queue.iter().filter(|turn| taught(turn) && lacks(turn)).count();
    if lacking == 0 || !method.estimator.reads_topk() {
        return Ok(());
    }
    if queue.iter().all(lacks) {
        let (column, stage) = ("teacher_topk_ids", "teacher-lp --topk 4");
        let problem = stage::Error::ColumnMissing { column, stage }.to_string();
        let remedy = "or train by the sampled tokens alone: `--estimator combine`";
        return Err(Failure::failed(problem).hint(remedy));
    }
    say(format!(
        "warning: the hints of {lacking} turns teach nothing: `oclaw teacher-lp --topk 4` has not \
         told their likeliest tokens"
    ));
    Ok(())
}

/// A reward part that another estimator made is no part of this one, whichever input has
/// it. What is only put together otherwise is said.
pub(super) fn check_estimator(
    source: &Source,
    own: Estimator,
    say: &mut dyn FnMut(String),
) -> Result<(), Failure> {
    let stated = stated_estimators(source);
    for (name, made) in &stated {
        // Where all tell the same, none is to be named.
        let table = match stated.len() {
            1 => "the table".to_owned(),
            _ => format!("`{name}`"),
        };
        check_made(&table, *made, own, say)?;
    }
    Ok(())
}

fn check_made(
    table: &str,
    made: Option<&str>,
    own: Estimator,
    say: &mut dyn FnMut(String),
) -> Result<(), Failure> {
    let Some(made) = made else {
        if own.shapes_rewards() {
            say(format!("warning: {table} does not say whether `{own}` made it"));
        }
        return Ok(());
    };
    if made == own.as_str() {
        return Ok(());
    }
    if own.shapes_rewards() {
        let problem = format!("{table}'s reward part is that of `{made}`, not of `{own}`");
        let remedy = format!("run `oclaw advantage --replace --estimator {own}`");
        return Err(Failure::usage(problem).hint(remedy));
    }
    let reads = match own.reads_rewards() {
        true => ": its reward part stays as it is",
        false => "",
    };
    say(format!("{table} was made with `{made}`, training is with `{own}`{reads}"));
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

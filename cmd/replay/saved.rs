//! The new turns as a table.

use std::path::{Path, PathBuf};

use oclaw::replay::{Answer, Facts, Finding, Outcome, Session, compare};
use oclaw::table::{Provenance, Sink, Target};
use oclaw::trajectory::turn::Micros;
use oclaw::trajectory::words::{NextStateKind, Status, TokenSource, WeightVersionSource};
use oclaw::trajectory::{Turn, Writer, turn};

use crate::common::Context;
use crate::files;

/// Writes the turns that got a new answer.
pub(super) fn write(
    path: &Path,
    context: &Context,
    sessions: &[Session],
    outcome: &Outcome,
) -> anyhow::Result<()> {
    let mut turns = Vec::new();
    for (session, replayed) in sessions.iter().zip(&outcome.sessions) {
        for (turn, replayed) in session.turns.iter().zip(replayed) {
            if let Some(answer) = &replayed.answer {
                turns.push(replaced(turn, answer));
            }
        }
    }
    let batch = turn::batch(&[Writer::Serve], &turns)?;
    let lines = files::stage_line_of(context, Vec::new());
    let provenance = Provenance { lines: lines.into_iter().collect(), ..Provenance::default() };
    let target = Target::Path(PathBuf::from(path));
    let mut sink = Sink::create(&target, None, batch.schema(), &provenance)?;
    sink.write(&batch)?;
    sink.finish()?;
    context.say(format!("{} turns saved to `{}`", turns.len(), path.display()));
    Ok(())
}

/// Returns the turn with its new answer, as `serve` would have recorded it. What was
/// said of the recorded one is not said of this one, unless question and answer are
/// the same.
fn replaced(turn: &Turn, answer: &Answer) -> Turn {
    let Facts {
        model,
        messages,
        sampling,
        times,
        matched_stop,
        ends_with_stop_token,
        completion_tokens,
        weight_version,
        weight_version_end,
        untrainable_reason,
    } = answer.facts.clone();
    let same = messages.is_none()
        && Answer::recorded(turn)
            .is_ok_and(|recorded| compare::exact(&recorded, answer) == Finding::Same);
    let new = Turn {
        created_at: Micros(times.0),
        finished_at: Micros(times.1),
        model,
        sampling,
        messages: messages.unwrap_or_else(|| turn.messages.clone()),
        response: answer.message.to_string(),
        finish_reason: answer.finish_reason.clone(),
        matched_stop,
        ends_with_stop_token,
        status: match answer.finish_reason.as_deref() {
            Some("length") => Status::Truncated,
            _ => Status::Complete,
        },
        usage_completion_tokens: completion_tokens,
        prompt_ids: answer.prompt_ids.clone(),
        response_ids: answer.ids.clone(),
        rollout_log_probs: answer.log_probs.clone(),
        token_source: match answer.ids {
            Some(_) => TokenSource::Engine,
            None => TokenSource::None,
        },
        weight_version_source: match weight_version {
            Some(_) => WeightVersionSource::Answer,
            None => WeightVersionSource::None,
        },
        weight_version,
        weight_version_end,
        untrainable_reason: untrainable_reason.map(str::to_owned),
        ..turn.clone()
    };
    match same {
        true => new,
        false => Turn {
            next_state: None,
            next_state_kind: NextStateKind::None,
            reward_explicit: None,
            feedback_text: None,
            ..new
        },
    }
}

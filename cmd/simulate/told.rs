//! What sessions came to: a line each, and a closing table.

use oclaw::simulate::{IN_A_ROW, Persona, Visit, sessions_to_adapt};

use super::{Args, Timed};
use crate::asking::closing_table;
use crate::common::Context;
use crate::files::write_text;
use crate::report::Exit;
use crate::visible::visible;

const HEADER: [&str; 10] = [
    "session",
    "id",
    "question",
    "policy",
    "obeyed",
    "content",
    "replies",
    "tokens",
    "all_tokens",
    "seconds",
];

/// Writes the sessions.
pub(super) fn visits(
    args: &Args,
    persona: &Persona,
    visits: &[Timed],
    context: &Context,
) -> anyhow::Result<Exit> {
    let mut csv = csv::Writer::from_writer(Vec::new());
    csv.write_record(HEADER.into_iter().chain(args.keep_replies.then_some("reply")))?;
    for timed in visits {
        let mut fields = fields(timed);
        fields.extend(args.keep_replies.then(|| timed.visit.reply.clone()));
        csv.write_record(fields)?;
    }
    let bytes = csv.into_inner().map_err(csv::IntoInnerError::into_error)?;
    write_text(args.output.as_deref(), &String::from_utf8(bytes)?)?;
    conclude(persona, visits, context);
    Ok(Exit::Done)
}

/// Returns the session by which the agent has adapted.
pub(super) fn adapted(visits: &[Timed]) -> Option<usize> {
    let obeyed: Vec<_> = visits.iter().map(|timed| timed.visit.obeyed).collect();
    sessions_to_adapt(&obeyed)
}

/// Writes a value that may not be known: nothing, never a number.
pub(super) fn known(value: Option<impl ToString>) -> String {
    value.map(|value| value.to_string()).unwrap_or_default()
}

fn fields(Timed { visit, seconds }: &Timed) -> Vec<String> {
    let Visit { session, id, question, policy, obeyed, content, replies, .. } = visit;
    vec![
        session.to_string(),
        id.clone(),
        question.clone(),
        known(policy.as_ref()),
        obeyed.to_string(),
        content.to_string(),
        replies.to_string(),
        known(visit.tokens),
        known(visit.all_tokens),
        format!("{seconds:.1}"),
    ]
}

fn conclude(persona: &Persona, visits: &[Timed], context: &Context) {
    let count = visits.len();
    let share = |part: &[Timed]| {
        let obeyed = part.iter().filter(|timed| timed.visit.obeyed).count();
        format!("{:.2} ({obeyed} of {})", obeyed as f64 / part.len().max(1) as f64, part.len())
    };
    // The first and the last third, so that the two do not overlap.
    let third = (count / 3).max(1).min(count);
    let tokens: Option<u64> = visits.iter().map(|timed| timed.visit.all_tokens).sum();
    let mut policies: Vec<&str> = Vec::new();
    for policy in visits.iter().filter_map(|timed| timed.visit.policy.as_deref()) {
        if !policies.contains(&policy) {
            policies.push(policy);
        }
    }
    let adapted = match adapted(visits) {
        Some(session) => format!("{session} (the first of {IN_A_ROW} in a row)"),
        None => format!("never within {count}"),
    };
    let mut table = closing_table();
    table.add_row(["persona".to_owned(), visible(&persona.name).to_string()]);
    table.add_row(["sessions".to_owned(), count.to_string()]);
    table.add_row(["sessions to adapt".to_owned(), adapted]);
    table.add_row(["first replies that obeyed".to_owned(), share(visits)]);
    table.add_row(["  in the first third".to_owned(), share(&visits[..third])]);
    table.add_row(["  in the last third".to_owned(), share(&visits[count - third..])]);
    table.add_row(["policies met".to_owned(), policies.len().to_string()]);
    let tokens = tokens.map_or("not told".to_owned(), |tokens| tokens.to_string());
    table.add_row(["tokens of replies".to_owned(), tokens]);
    let seconds = visits.last().map_or(0.0, |timed| timed.seconds);
    table.add_row(["seconds".to_owned(), format!("{seconds:.0}")]);
    context.conclude(table);
}

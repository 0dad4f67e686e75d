//! `--base-rates`: whether a persona has room to learn on a model.

use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use oclaw::simulate::{LEAST_HINTED, MOST_BARE, Person, Probe, Questions, has_room};

use super::Args;
use super::told::known;
use crate::asking::closing_table;
use crate::common::Context;
use crate::files::write_text;
use crate::report::Exit;
use crate::visible::visible;

const HEADER: [&str; 6] = ["number", "question", "prompt", "policy", "obeyed", "tokens"];

/// Asks every question bare and hinted.
pub(super) async fn measure(
    args: &Args,
    (person, questions): (&Person<'_>, &Questions),
    context: &Context,
) -> anyhow::Result<Exit> {
    let asked = (0..args.sessions as usize).flat_map(|place| [(place, false), (place, true)]);
    let probes: Vec<(usize, Probe)> = stream::iter(asked)
        .map(|(place, hinted)| async move {
            let probe = person.probe(place, questions.of(place), hinted).await?;
            anyhow::Ok((place, probe))
        })
        .buffered(args.at_once as usize)
        .try_collect()
        .await?;
    let mut csv = csv::Writer::from_writer(Vec::new());
    csv.write_record(HEADER.into_iter().chain(args.keep_replies.then_some("reply")))?;
    for (place, probe) in &probes {
        let prompt = if probe.hinted { "hinted" } else { "bare" };
        let mut fields = vec![
            (place + 1).to_string(),
            questions.of(*place).to_owned(),
            prompt.to_owned(),
            known(probe.policy.as_ref()),
            probe.obeyed.to_string(),
            known(probe.reply.tokens),
        ];
        fields.extend(args.keep_replies.then(|| probe.reply.text.clone()));
        csv.write_record(fields)?;
    }
    let bytes = csv.into_inner().map_err(csv::IntoInnerError::into_error)?;
    write_text(args.output.as_deref(), &String::from_utf8(bytes)?)?;
    conclude(person, &probes, context);
    Ok(Exit::Done)
}

fn conclude(person: &Person<'_>, probes: &[(usize, Probe)], context: &Context) {
    let rate = |hinted: bool| {
        let asked = probes.iter().filter(|(_, probe)| probe.hinted == hinted);
        let obeyed = asked.clone().filter(|(_, probe)| probe.obeyed).count();
        (obeyed as f64 / asked.count().max(1) as f64, obeyed)
    };
    let ((bare, bare_count), (hinted, hinted_count)) = (rate(false), rate(true));
    let questions = probes.len() / 2;
    let mut table = closing_table();
    table.add_row(["persona".to_owned(), visible(&person.persona.name).to_string()]);
    table.add_row(["questions".to_owned(), questions.to_string()]);
    table.add_row(["obeyed bare".to_owned(), format!("{bare:.2} ({bare_count})")]);
    table.add_row(["obeyed hinted".to_owned(), format!("{hinted:.2} ({hinted_count})")]);
    let room = match has_room(bare, hinted) {
        true => "yes".to_owned(),
        false => format!("no: wanted at most {MOST_BARE} bare, at least {LEAST_HINTED} hinted"),
    };
    table.add_row(["room to learn".to_owned(), room]);
    context.conclude(table);
}

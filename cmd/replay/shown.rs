//! What a replay came to, as it is written and said.

use comfy_table::Table;
use oclaw::replay::report::{self, Tally};
use oclaw::replay::{By, Outcome};
use serde_json::json;

use crate::asking::closing_table;
use crate::files::write_text;
use crate::visible::visible;

use super::Args;
use super::asked::Layout;

/// Tells whether a replay passes: each way of comparing has compared something.
pub(super) fn verdict(tally: &Tally, allowed: usize, away: bool) -> bool {
    let idle = tally.compared() == 0 || tally.idle().next().is_some();
    !away && !idle && tally.differing + tally.failed <= allowed
}

/// Returns what to say at the end, if there is something to say.
pub(super) fn word(tally: &Tally, allowed: usize) -> Option<String> {
    let worse = tally.differing + tally.failed;
    let idle: Vec<_> = tally.idle().map(By::as_str).collect();
    if tally.compared() > 0 && !idle.is_empty() {
        return Some(format!("nothing was compared by {}", idle.join(", ")));
    }
    match (tally.compared(), worse) {
        (0, _) => Some("nothing was compared".to_owned()),
        (_, 0) => None,
        (compared, worse) => Some(format!(
            "{worse} of {compared} compared turns differ or failed; {allowed} are allowed"
        )),
    }
}

/// Writes the turns where they are wanted.
pub(super) fn write(
    args: &Args,
    outcome: &Outcome,
    (tally, passed): (&Tally, bool),
) -> anyhow::Result<()> {
    let text = match args.output_format {
        Layout::Table => turns(outcome),
        Layout::Json => {
            let mut text = String::new();
            for replayed in outcome.sessions.iter().flatten() {
                text.push_str(&format!("{}\n", report::line(replayed)));
            }
            let mut summary = tally.json();
            summary["passed"] = json!(passed);
            text.push_str(&format!("{}\n", json!({"summary": summary})));
            text
        }
        Layout::Junit => report::junit(&outcome.sessions),
    };
    write_text(args.output.as_deref(), &text)
}

fn turns(outcome: &Outcome) -> String {
    let mut table = closing_table();
    table.set_header(["session", "turn", "verdict", "what"]);
    for replayed in outcome.sessions.iter().flatten() {
        table.add_row([
            visible(&replayed.session_id),
            replayed.turn.to_string(),
            replayed.finding.word().to_owned(),
            visible(replayed.finding.what()),
        ]);
    }
    format!("{table}\n")
}

/// Returns the summary.
pub(super) fn table(tally: &Tally) -> Table {
    let mut table = closing_table();
    let rows = [
        ("sessions", tally.sessions),
        ("turns", tally.turns),
        ("  same", tally.same),
        ("  differing", tally.differing),
        ("  failed requests", tally.failed),
        ("  not compared", tally.not_compared.values().sum()),
    ];
    for (label, count) in rows {
        table.add_row([label.to_owned(), count.to_string()]);
    }
    let reason = |(reason, count): (&String, &usize)| {
        [format!("    {}", visible(reason)), count.to_string()]
    };
    table.add_rows(tally.not_compared.iter().map(reason));
    // Of a single way the turns say it all.
    for (by, way) in tally.ways.iter().filter(|_| tally.ways.len() > 1) {
        if !way.not_compared.is_empty() {
            let count = way.not_compared.values().sum::<usize>();
            table.add_row([format!("  not compared by {by}"), count.to_string()]);
            table.add_rows(way.not_compared.iter().map(reason));
        }
    }
    table
}

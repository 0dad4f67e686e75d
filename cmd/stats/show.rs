//! How figures and verdicts are printed.

use std::io::{self, IsTerminal, Write};

use comfy_table::{CellAlignment, Table};
use oclaw::health::{self, Amount, Answer, BOUNDS, Bound, Evidence, Figure, Step, Survey};
use serde_json::{Map, Value, json};

use super::{Args, Look};
use crate::health_lines;
use crate::run_folder::Subject;
use crate::view::print;
use crate::visible::{shown_in, visible};

/// Prints all looks in the format that was asked for.
pub(super) fn looks(
    out: &mut impl Write,
    args: &Args,
    subject: &Subject,
    looks: &[Look],
) -> io::Result<()> {
    if args.csv {
        return csv(out, subject, looks, shown_in(io::stdout().is_terminal()));
    }
    if args.json {
        return looks.iter().try_for_each(|look| json_line(out, subject, look));
    }
    let shards: Vec<_> = looks.iter().filter(|look| look.input.is_some()).collect();
    if !shards.is_empty() {
        print(out, shard_table(&shards))?;
        writeln!(out)?;
    }
    looks.iter().filter(|look| look.input.is_none()).try_for_each(|look| page(out, subject, look))
}

/// Prints the verdicts, the rows per stage and the figures.
pub(super) fn page(out: &mut impl Write, subject: &Subject, look: &Look) -> io::Result<()> {
    print(out, health_lines::table(&answers(look, &subject.steps)))?;
    writeln!(out)?;
    let mut table = Table::new();
    if !subject.stages.is_empty() {
        table.add_row(["stages".to_owned(), String::new()]);
        for (name, rows) in &subject.stages {
            let rows = rows.map_or("-".to_owned(), |rows| rows.to_string());
            table.add_row([format!("  {} rows", visible(name)), rows]);
        }
    }
    if let Some(step) = subject.steps.last() {
        table.add_row(["training".to_owned(), String::new()]);
        table.add_row(["  steps".to_owned(), subject.steps.len().to_string()]);
        for (name, value) in step_figures(step) {
            table.add_row([format!("  {name}"), number(value)]);
        }
    }
    let mut group = "";
    for figure in look.survey.figures() {
        if figure.group != group {
            group = figure.group;
            table.add_row([group.to_owned(), String::new()]);
        }
        table.add_row([format!("  {}", visible(&figure.name)), amount(figure.amount)]);
    }
    right(&mut table, &[1]);
    print(out, table)
}

fn answers(look: &Look, steps: &[Step]) -> [Answer; 3] {
    health::answers(&Evidence { survey: &look.survey, steps })
}

fn right(table: &mut Table, columns: &[usize]) {
    for index in columns {
        if let Some(column) = table.column_mut(*index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
}

/// Writes a number, or `-` where it is not known.
fn number(value: Option<f64>) -> String {
    value.map_or("-".to_owned(), |value| format!("{value:.4}"))
}

fn amount(amount: Amount) -> String {
    match amount {
        Amount::Count(count) => count.to_string(),
        Amount::Number(value) => number(value),
    }
}

/// The figures of the last step, in the order of the metrics.
fn step_figures(step: &Step) -> Vec<(&'static str, Option<f64>)> {
    vec![
        ("last step", Some(step.step as f64)),
        ("loss", step.loss),
        ("entropy", step.entropy),
        ("clip fraction", step.clip_fraction),
        ("approximate KL", step.approximate_kl),
        ("|trainer - server|", step.log_prob_gap),
        ("gradient norm", step.gradient_norm),
        ("weights changed", step.weights_changed),
        ("staleness", step.staleness),
    ]
}

/// One line per shard.
fn shard_table(shards: &[&Look]) -> Table {
    let mut table = Table::new();
    table.set_header(SHARD_HEADER);
    for Look { input, survey } in shards {
        let score = |word: &str| survey.scores.get(word).copied().unwrap_or_default().to_string();
        table.add_row([
            visible(input.as_deref().unwrap_or("-")),
            survey.turns.to_string(),
            survey.sessions().to_string(),
            score("1"),
            score("0"),
            score("-1"),
            number(survey.rewards.mean()),
            survey.effective.1.to_string(),
            number(survey.advantages.std()),
            number(survey.lengths.mean()),
        ]);
    }
    right(&mut table, &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
    table
}

const SHARD_HEADER: [&str; 10] = [
    "shard",
    "turns",
    "sessions",
    "1",
    "0",
    "-1",
    "reward",
    "trainable",
    "advantage std",
    "tokens",
];

/// Writes one look as one line of JSON.
pub(super) fn json_line(out: &mut impl Write, subject: &Subject, look: &Look) -> io::Result<()> {
    let stages: Map<String, Value> =
        subject.stages.iter().map(|(name, rows)| (name.clone(), json!(rows))).collect();
    let line = json!({
        "input": look.input,
        "health": answers(look, &subject.steps).iter().map(health_lines::json).collect::<Vec<_>>(),
        "stages": stages,
        "step": subject.steps.last(),
        "figures": grouped(&look.survey),
    });
    serde_json::to_writer(&mut *out, &line)?;
    out.write_all(b"\n")
}

fn grouped(survey: &Survey) -> Map<String, Value> {
    let mut groups = Map::new();
    for Figure { group, name, amount } in survey.figures() {
        let group = groups.entry(group).or_insert_with(|| Value::Object(Map::new()));
        if let Value::Object(group) = group {
            let value = match amount {
                Amount::Count(count) => json!(count),
                Amount::Number(value) => json!(value),
            };
            group.insert(name, value);
        }
    }
    groups
}

fn csv(
    out: &mut impl Write,
    subject: &Subject,
    looks: &[Look],
    shown: fn(String) -> String,
) -> io::Result<()> {
    let mut csv = csv::Writer::from_writer(out);
    let exact = |value: Option<f64>| value.map(|value| value.to_string()).unwrap_or_default();
    csv.write_record(["input", "group", "name", "value"])?;
    for look in looks {
        let input = &shown(look.input.as_deref().unwrap_or("all").to_owned());
        for answer in answers(look, &subject.steps) {
            let question = answer.question.as_str();
            csv.write_record([input, "verdict", question, answer.verdict.as_str()])?;
            for judged in &answer.figures {
                csv.write_record([input, question, judged.bound.name, &exact(judged.value)])?;
            }
        }
        for Figure { group, name, amount } in look.survey.figures() {
            let value = match amount {
                Amount::Count(count) => count.to_string(),
                Amount::Number(value) => exact(value),
            };
            csv.write_record([input, group, &shown(name), &value])?;
        }
    }
    csv.flush()
}

/// Prints every figure with its bounds.
pub(super) fn bounds(out: &mut impl Write) -> io::Result<()> {
    let mut table = Table::new();
    table.set_header(["question", "figure", "watch", "ill", "decides", "what it is", "source"]);
    for Bound { question, name, meaning, side, watch, ill, decides, source, .. } in BOUNDS {
        let side = side.as_str();
        table.add_row([
            question.as_str().to_owned(),
            (*name).to_owned(),
            format!("{side} {watch}"),
            if ill.is_finite() { format!("{side} {ill}") } else { "never".to_owned() },
            if *decides { "yes" } else { "" }.to_owned(),
            (*meaning).to_owned(),
            (*source).to_owned(),
        ]);
    }
    print(out, table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_gets_no_control_character_of_a_name() {
        let looks =
            [Look { input: Some("a\u{1b}[2J.parquet".to_owned()), survey: Survey::default() }];
        let told = |terminal| {
            let mut out = Vec::new();
            csv(&mut out, &Subject::default(), &looks, shown_in(terminal)).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert!(told(false).contains("a\u{1b}[2J.parquet,verdict,"));
        assert!(
            told(true).contains("a\\u{1b}[2J.parquet,verdict,") && !told(true).contains('\u{1b}')
        );
    }
}

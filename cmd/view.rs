//! `oclaw view`: a table for people's eyes, or as JSON or CSV.

use std::io::{self, BufWriter, IsTerminal, Write};

use arrow::array::RecordBatch;
use arrow::datatypes::{DataType, Schema};
use comfy_table::{CellAlignment, ContentArrangement, Row, Table, presets};
use oclaw::table::{Source, row_json};
use oclaw::trajectory;
use oclaw::trajectory::Turn;
use oclaw::trajectory::message::{parse, words};
use serde_json::Value;

use crate::common::{Context, Printing as _};
use crate::files::Inputs;
use crate::report::{Exit, Failure};
use crate::visible::{shown_in, visible};

/// Show the rows of a table
///
/// Without a format, one line per turn: session, turn, how the answer ended,
/// what came next, score, reward, kind of sample, tokens, and the beginnings of
/// the question and the answer, cut with `…` to the terminal's width. Control
/// characters are made visible, so no text can forge a line.
///
/// `--json` and `--csv` give every column in full: nulls stay null in JSON and
/// are empty in CSV, where lists stand as JSON. CSV has texts as they are, but on a
/// terminal their control characters are made visible.
#[derive(clap::Args, Debug)]
#[command(verbatim_doc_comment)]
pub(crate) struct Args {
    #[command(flatten)]
    inputs: Inputs,
    /// One JSON object per row
    #[arg(long, conflicts_with = "csv")]
    json: bool,
    /// Comma-separated values, lists as JSON
    #[arg(long)]
    csv: bool,
    /// Print the columns instead: of the schema, or of the tables named
    #[arg(long, conflicts_with_all = ["json", "csv", "columns", "count", "provenance"])]
    schema: bool,
    /// Print the stages that the tables went through instead, one JSON object each
    #[arg(long, conflicts_with_all = ["json", "csv", "columns", "count"])]
    provenance: bool,
    /// Show these columns only
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    columns: Vec<String>,
    /// Show at most this many rows
    #[arg(short = 'n', long, value_name = "N")]
    count: Option<usize>,
}

/// Rows of one printed block. Widths are chosen per block, so that a table
/// without end needs no memory without end.
const BLOCK: usize = 1000;
/// Width of a line where no terminal gives one.
const WIDTH: u16 = 120;

pub(crate) fn run(args: Args, context: &Context) -> anyhow::Result<Exit> {
    let mut out = BufWriter::new(io::stdout().lock());
    if args.schema && args.inputs.inputs.is_empty() {
        print(&mut out, schema_table(&trajectory_schema())).printed()?;
    } else {
        let source = args.inputs.open(context)?;
        if args.schema {
            print(&mut out, schema_table(&source.schema())).printed()?;
        } else if args.provenance {
            for line in &source.provenance().lines {
                serde_json::to_writer(&mut out, line).map_err(io::Error::from).printed()?;
                out.write_all(b"\n").printed()?;
            }
        } else {
            rows(&args, source, &mut out)?;
        }
    }
    out.flush().printed()?;
    Ok(Exit::Done)
}

fn rows(args: &Args, mut source: Source, out: &mut impl Write) -> anyhow::Result<()> {
    let chosen = choose(&source.schema(), &args.columns)?;
    let mut left = args.count.unwrap_or(usize::MAX);
    if args.csv {
        let mut csv = csv::Writer::from_writer(out);
        let schema = source.schema();
        let shown = shown_in(io::stdout().is_terminal());
        csv.write_record(chosen.iter().map(|index| shown(schema.field(*index).name().clone())))
            .map_err(csv_failure)
            .printed()?;
        while let Some(batch) = next(&mut source, &mut left)? {
            write_csv(&mut csv, &batch.project(&chosen)?, shown).printed()?;
        }
        csv.flush().printed()?;
        return Ok(());
    }
    // Turns of many small shards share a table; a long input still streams.
    let mut block = Vec::new();
    while let Some(batch) = next(&mut source, &mut left)? {
        if args.json {
            write_json(out, &batch.project(&chosen)?).printed()?;
        } else if args.columns.is_empty() {
            block.extend(source.read(&batch)?);
            while block.len() >= BLOCK {
                let rest = block.split_off(BLOCK);
                print(out, turns_table(&block)).printed()?;
                block = rest;
            }
        } else {
            print(out, columns_table(&batch.project(&chosen)?)).printed()?;
        }
    }
    if !block.is_empty() {
        print(out, turns_table(&block)).printed()?;
    }
    Ok(())
}

/// Returns the next rows, as long as any are left to show.
fn next(source: &mut Source, left: &mut usize) -> anyhow::Result<Option<RecordBatch>> {
    if *left == 0 {
        return Ok(None);
    }
    let Some(batch) = source.next_batch()? else {
        return Ok(None);
    };
    let rows = batch.num_rows().min(*left);
    *left -= rows;
    Ok(Some(batch.slice(0, rows)))
}

/// Finds the columns asked for, or all.
fn choose(schema: &Schema, names: &[String]) -> Result<Vec<usize>, Failure> {
    if names.is_empty() {
        return Ok((0..schema.fields().len()).collect());
    }
    let find = |name: &String| {
        schema.index_of(name).map_err(|_| {
            let there: Vec<_> = schema.fields().iter().map(|field| field.name().as_str()).collect();
            Failure::usage(format!("there is no column `{}`", visible(name)))
                .hint(format!("there are {}", there.join(", ")))
        })
    };
    names.iter().map(find).collect()
}

fn write_json(out: &mut impl Write, batch: &RecordBatch) -> io::Result<()> {
    for row in 0..batch.num_rows() {
        serde_json::to_writer(&mut *out, &row_json::row(batch, row))?;
        out.write_all(b"\n")?;
    }
    Ok(())
}

fn write_csv(
    out: &mut csv::Writer<impl Write>,
    batch: &RecordBatch,
    shown: fn(String) -> String,
) -> io::Result<()> {
    for row in 0..batch.num_rows() {
        let record = row_json::row(batch, row).into_iter().map(|(_, value)| match value {
            Value::Null => String::new(),
            Value::String(text) => shown(text),
            other => shown(other.to_string()),
        });
        out.write_record(record).map_err(csv_failure)?;
    }
    Ok(())
}

fn csv_failure(error: csv::Error) -> io::Error {
    match error.into_kind() {
        csv::ErrorKind::Io(error) => error,
        other => io::Error::other(format!("{other:?}")),
    }
}

/// Prints a table as wide as the terminal, or of a fixed width where there is none.
pub(crate) fn print(out: &mut impl Write, mut table: Table) -> io::Result<()> {
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    if !io::stdout().is_terminal() {
        table.set_width(WIDTH);
    }
    for line in table.lines() {
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

/// Adds a row that takes one line, cut visibly where it is too long.
fn push(table: &mut Table, cells: Vec<String>) {
    let mut row = Row::from(cells);
    row.max_height(1);
    table.add_row(row);
}

fn turns_table(turns: &[Turn]) -> Table {
    let mut table = Table::new();
    table.set_header(HEADER);
    for turn in turns {
        let ids = turn.response_ids.as_ref().map(|ids| ids.len().to_string());
        push(
            &mut table,
            vec![
                cut(&visible(&turn.session_id), 14),
                turn.turn.to_string(),
                turn.status.to_string(),
                turn.next_state_kind.to_string(),
                shown(turn.score.map(|score| score.to_string())),
                shown(turn.reward.or(turn.reward_explicit).map(|reward| reward.to_string())),
                shown(turn.sample_kind.map(|kind| kind.to_string())),
                shown(ids),
                cut(&visible(&last_message(&turn.messages)), 200),
                cut(&visible(&words(&parse(&turn.response))), 200),
            ],
        );
    }
    for index in [1, 4, 5, 7] {
        if let Some(column) = table.column_mut(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

const HEADER: [&str; 10] = [
    "session", "turn", "status", "next", "score", "reward", "sample", "tokens", "asked", "answered",
];

fn shown(value: Option<String>) -> String {
    value.unwrap_or_else(|| "-".to_owned())
}

fn columns_table(batch: &RecordBatch) -> Table {
    let mut table = Table::new();
    table.set_header(batch.schema().fields().iter().map(|field| visible(field.name())));
    for row in 0..batch.num_rows() {
        let cells = row_json::row(batch, row).into_iter().map(|(_, value)| match value {
            Value::Null => "-".to_owned(),
            Value::String(text) => cut(&visible(&text), 200),
            other => cut(&visible(&other.to_string()), 200),
        });
        push(&mut table, cells.collect());
    }
    table
}

fn last_message(messages: &str) -> String {
    match parse(messages) {
        Value::Array(messages) => messages.last().map_or_else(String::new, words),
        other => words(&other),
    }
}

fn trajectory_schema() -> Schema {
    Schema::new(trajectory::columns().iter().map(trajectory::Column::field).collect::<Vec<_>>())
}

fn schema_table(schema: &Schema) -> Table {
    let mut table = Table::new();
    table.set_header(["column", "type", "null", "writer", "meaning"]);
    for field in schema.fields() {
        let column = trajectory::columns().iter().find(|column| column.name == field.name());
        table.add_row([
            visible(field.name()),
            type_name(field.data_type()),
            if field.is_nullable() { "yes" } else { "no" }.to_owned(),
            column.map_or("-", |column| column.writer.command()).to_owned(),
            column
                .map_or("unknown to this build, passed through", |column| column.meaning)
                .to_owned(),
        ]);
    }
    table
}

fn type_name(data_type: &DataType) -> String {
    match data_type {
        DataType::Utf8 => "string".to_owned(),
        DataType::Boolean => "bool".to_owned(),
        DataType::Int8 => "i8".to_owned(),
        DataType::Int32 => "i32".to_owned(),
        DataType::Int64 => "i64".to_owned(),
        DataType::UInt8 => "u8".to_owned(),
        DataType::UInt16 => "u16".to_owned(),
        DataType::UInt32 => "u32".to_owned(),
        DataType::Float32 => "f32".to_owned(),
        DataType::Timestamp(_, Some(_)) => "timestamp(µs, UTC)".to_owned(),
        DataType::List(item) => {
            let optional = if item.is_nullable() { "?" } else { "" };
            format!("list<{}{optional}>", type_name(item.data_type()))
        }
        DataType::Struct(fields) => {
            let fields: Vec<_> = fields
                .iter()
                .map(|field| {
                    let optional = if field.is_nullable() { "?" } else { "" };
                    format!("{}: {}{optional}", field.name(), type_name(field.data_type()))
                })
                .collect();
            format!("{{{}}}", fields.join(", "))
        }
        other => other.to_string(),
    }
}

/// Cuts a text visibly.
pub(crate) fn cut(text: &str, letters: usize) -> String {
    match text.char_indices().nth(letters) {
        None => text.to_owned(),
        Some(_) => text.chars().take(letters.saturating_sub(1)).chain(['…']).collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::StringArray;

    use super::*;

    #[test]
    fn a_terminal_gets_no_control_character_of_a_cell() {
        let text = "\u{1b}[31mred\u{7},\nnext";
        let cells: [(_, arrow::array::ArrayRef); 1] =
            [("response", Arc::new(StringArray::from(vec![text])))];
        let batch = RecordBatch::try_from_iter(cells).unwrap();
        let csv = |terminal| {
            let mut out = csv::Writer::from_writer(Vec::new());
            write_csv(&mut out, &batch, shown_in(terminal)).unwrap();
            String::from_utf8(out.into_inner().unwrap()).unwrap()
        };
        assert_eq!(csv(false), format!("\"{text}\"\n"));
        assert_eq!(csv(true), "\"\\u{1b}[31mred\\u{7},\\nnext\"\n");
    }
}

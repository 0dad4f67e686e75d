//! `oclaw replay --stages`: recorded stage outputs, made again.

mod command_line;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use oclaw::replay::Finding;
use oclaw::replay::junit::{Case, Suite, junit};
use oclaw::replay::stages::{Changed, compare};
use oclaw::table::{Source, StageLine, read_turns};
use oclaw::trajectory::Writer;
use serde_json::{Value, json};

use crate::asking::closing_table;
use crate::common::Context;
use crate::files::write_text;
use crate::report::{Exit, Failure};
use crate::visible::visible;

use super::Args;
use super::asked::Layout;

/// The stages that can be made again: place in a run folder, and whose output it is.
const STAGES: [(&str, Writer); 4] = [
    ("judged", Writer::Judge),
    ("hinted", Writer::Hint),
    ("taught", Writer::TeacherLp),
    ("ready", Writer::Advantage),
];

/// One output of one stage.
struct Recorded {
    writer: Writer,
    path: PathBuf,
    line: StageLine,
}

/// What became of it.
enum Rerun {
    Compared(Changed),
    Left(String),
    Failed(String),
}

impl Rerun {
    fn word(&self) -> &'static str {
        match self {
            Self::Compared(changed) if changed.is_nothing() => "same",
            Self::Compared(_) => "changed",
            Self::Left(_) => "not rerun",
            Self::Failed(_) => "failed",
        }
    }

    fn what(&self) -> String {
        match self {
            Self::Compared(changed) if changed.is_nothing() => format!("{} rows", changed.rows),
            Self::Compared(changed) => {
                let columns = changed.columns.iter();
                let columns: Vec<_> =
                    columns.map(|(name, rows)| format!("{name} in {rows}")).collect();
                let missing = match changed.missing {
                    0 => String::new(),
                    rows => format!("; {rows} rows in one table only"),
                };
                let (rows, of) = (changed.changed, changed.rows);
                format!("{rows} of {of} rows: {}{missing}", columns.join(", "))
            }
            Self::Left(reason) | Self::Failed(reason) => reason.clone(),
        }
    }
}

/// An output that was made again.
struct Made<'a> {
    output: &'a Recorded,
    rerun: Rerun,
    took: Duration,
}

/// Makes every recorded stage again and compares.
pub(super) fn run(run: &Path, args: &Args, context: &Context) -> anyhow::Result<Exit> {
    let recorded = find(run)?;
    if recorded.is_empty() {
        let message = format!("no stage output with its command line in `{}`", run.display());
        let hint = "wanted `judged.parquet`, `judged/`, … written without `--no-provenance`";
        return Err(Failure::failed(message).hint(hint).into());
    }
    let folder = tempfile::tempdir()?;
    let mut found = Vec::new();
    for (number, output) in recorded.iter().enumerate() {
        let started = Instant::now();
        let again = folder.path().join(format!("{number}.parquet"));
        let rerun = rerun(output, &again, args.tolerance)?;
        context.say(format!(
            "{} `{}`: {}",
            output.writer.command(),
            output.path.display(),
            rerun.word()
        ));
        found.push(Made { output, rerun, took: started.elapsed() });
    }
    write(args, &found)?;
    let count = |word: &str| found.iter().filter(|made| made.rerun.word() == word).count();
    if let Some(Made { output, .. }) = found.iter().find(|made| made.rerun.word() == "changed") {
        let (stage, path) = (output.writer.command(), output.path.display());
        context.say(format!("the first stage that changed is {stage}, in `{path}`"));
    }
    let compared = count("same") + count("changed");
    if compared == 0 {
        context.say("no stage was made again: nothing was compared");
    }
    Ok(match (compared, count("changed") + count("failed")) {
        (1.., 0) => Exit::Done,
        _ => Exit::Partial,
    })
}

/// Finds the outputs, stage by stage. A stage without an output of its own has
/// its columns in that of a later one, whose file tells its command line too.
fn find(run: &Path) -> anyhow::Result<Vec<Recorded>> {
    let mut outputs: Vec<(PathBuf, Vec<StageLine>)> = Vec::new();
    for (name, _) in STAGES {
        for place in [run.join(name), run.join(format!("{name}.parquet"))] {
            for path in tables(&place)? {
                let lines = Source::open(std::slice::from_ref(&path))?.provenance().lines.clone();
                outputs.push((path, lines));
            }
        }
    }
    let mut found = Vec::new();
    for (_, writer) in STAGES {
        let is_its = |line: &StageLine| line.command == writer.command();
        let own = |lines: &[StageLine]| lines.last().is_some_and(is_its);
        let any = outputs.iter().any(|(_, lines)| own(lines));
        for (path, lines) in &outputs {
            let line = match any {
                true => lines.last().filter(|line| is_its(line)),
                false => lines.iter().rev().find(|line| is_its(line)),
            };
            if let Some(line) = line {
                found.push(Recorded { writer, path: path.clone(), line: line.clone() });
            }
        }
    }
    Ok(found)
}

/// Lists the tables of a place: itself, or those in it, by name.
fn tables(place: &Path) -> anyhow::Result<Vec<PathBuf>> {
    if !place.is_dir() {
        return Ok(place.is_file().then(|| place.to_owned()).into_iter().collect());
    }
    let mut found = Vec::new();
    for entry in std::fs::read_dir(place)? {
        let path = entry?.path();
        let hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        if !hidden && path.extension().is_some_and(|ending| ending == "parquet") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Runs a stage again on its own output, which holds its input: `--replace` takes
/// nothing but the stage's columns from it.
fn rerun(output: &Recorded, again: &Path, tolerance: f64) -> anyhow::Result<Rerun> {
    let words = match command_line::words(&output.line) {
        Ok(words) => words,
        Err(reason) => return Ok(Rerun::Left(reason)),
    };
    let done = Command::new(std::env::current_exe()?)
        .arg(&output.line.command)
        .arg(&output.path)
        .args(["--replace", "--quiet", "--output"])
        .arg(again)
        .args(words)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .output()?;
    let told = String::from_utf8_lossy(&done.stderr);
    let told = told.lines().find(|line| line.starts_with("oclaw ")).unwrap_or(told.trim());
    match done.status.code() {
        // Notes that were tried and failed are compared like all others.
        Some(0 | 3) => {}
        Some(4) => return Ok(Rerun::Left(format!("its engine is away: {told}"))),
        code => {
            let code = code.map_or("a signal".to_owned(), |code| format!("exit code {code}"));
            return Ok(Rerun::Failed(format!("{code}: {told}")));
        }
    }
    let (recorded, rerun) =
        (read_turns(std::slice::from_ref(&output.path))?, read_turns(&[again.to_owned()])?);
    Ok(Rerun::Compared(compare(output.writer, &recorded, &rerun, tolerance)?))
}

fn write(args: &Args, found: &[Made<'_>]) -> anyhow::Result<()> {
    let text = match args.output_format {
        Layout::Json => found.iter().map(|made| format!("{}\n", line(made))).collect(),
        Layout::Junit => junit("oclaw replay --stages", &suites(found)),
        Layout::Table => {
            let mut table = closing_table();
            table.set_header(["stage", "table", "verdict", "what"]);
            for Made { output, rerun, .. } in found {
                table.add_row([
                    output.writer.command().to_owned(),
                    visible(&output.path.display().to_string()),
                    rerun.word().to_owned(),
                    visible(&rerun.what()),
                ]);
            }
            format!("{table}\n")
        }
    };
    write_text(args.output.as_deref(), &text)
}

/// A suite per stage, a case per table.
fn suites(found: &[Made<'_>]) -> Vec<Suite> {
    let mut suites: Vec<Suite> = Vec::new();
    for Made { output, rerun, took } in found {
        let name = output.writer.command();
        if suites.last().is_none_or(|suite| suite.name != name) {
            suites.push(Suite { name: name.to_owned(), cases: Vec::new() });
        }
        let case = Case {
            name: output.path.display().to_string(),
            finding: match rerun {
                Rerun::Compared(changed) if changed.is_nothing() => Finding::Same,
                Rerun::Compared(_) => Finding::Differs(rerun.what()),
                Rerun::Left(reason) => Finding::NotCompared(reason.clone()),
                Rerun::Failed(reason) => Finding::Failed(reason.clone()),
            },
            took: *took,
            notes: Vec::new(),
        };
        suites.last_mut().into_iter().for_each(|suite| suite.cases.push(case.clone()));
    }
    suites
}

fn line(Made { output, rerun, .. }: &Made<'_>) -> Value {
    let mut line = json!({
        "stage": output.writer.command(),
        "table": output.path.display().to_string(),
        "verdict": rerun.word().replace(' ', "_"),
    });
    match rerun {
        Rerun::Compared(changed) => {
            line["rows"] = json!(changed.rows);
            line["changed"] = json!(changed.changed);
            line["columns"] = json!(changed.columns);
            line["missing"] = json!(changed.missing);
            line["first"] = json!(changed.first);
        }
        Rerun::Left(reason) | Rerun::Failed(reason) => line["what"] = json!(reason),
    }
    line
}

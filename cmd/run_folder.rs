//! The folder of a run: tables of each stage, policies with their records, the
//! metrics of training.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use oclaw::health::Step;
use oclaw::table::{Provenance, Source};
use oclaw::trajectory::{Turn, Writer, columns};
use serde_json::Value;

use crate::report::Failure;

/// The stages' folders, in the order of the loop.
const STAGES: [&str; 5] = ["turns", "judged", "hinted", "taught", "ready"];
const POLICY: &str = "policy";
const METRICS: &str = "metrics.jsonl";

/// What a run has come to so far.
#[derive(Debug, Default)]
pub(crate) struct RunFolder {
    /// Its tables, in the order of the loop; what lies beside the folders last.
    pub(crate) stages: Vec<Stage>,
    /// The steps trained, oldest first.
    pub(crate) steps: Vec<Step>,
}

/// The tables of one stage.
#[derive(Debug)]
pub(crate) struct Stage {
    /// Name of the folder, or of the file beside the folders.
    pub(crate) name: String,
    /// Its tables.
    pub(crate) tables: Vec<PathBuf>,
    /// Rows in them, unless one does not tell.
    pub(crate) rows: Option<u64>,
    /// The last stage that wrote columns.
    written_by: Option<Writer>,
}

/// Whether a path is the folder of a run, and not of shards.
pub(crate) fn is_run(path: &Path) -> bool {
    let has = |name: &str| path.join(name).is_dir();
    path.is_dir()
        && (STAGES.iter().any(|name| has(name)) || has(POLICY) || path.join(METRICS).is_file())
}

impl RunFolder {
    /// Looks at what is there, which may be nothing yet. Errors on tables or records
    /// that cannot be read.
    pub(crate) fn look(folder: &Path) -> anyhow::Result<Self> {
        let mut run = Self { stages: Vec::new(), steps: steps(folder)? };
        for (name, tables) in tables_of_run(folder)? {
            run.stages.extend(Stage::of(name, tables)?);
        }
        Ok(run)
    }

    /// Looks at what is there. Errors if that is nothing, too.
    pub(crate) fn open(folder: &Path) -> anyhow::Result<Self> {
        let run = Self::look(folder)?;
        match run.stages.is_empty() && run.steps.is_empty() {
            true => {
                let problem = format!("`{}`: neither tables nor metrics", folder.display());
                let wanted = format!("a run has {} or `{POLICY}`", STAGES.map(quoted).join(", "));
                Err(Failure::failed(problem).hint(wanted).into())
            }
            false => Ok(run),
        }
    }
}

/// What `stats` and `report` look at: tables, or the folder of one run.
#[derive(Debug, Default)]
pub(crate) struct Subject {
    /// The tables to read, of a run those with the most columns first.
    layers: Vec<Vec<PathBuf>>,
    /// Rows per stage of a run.
    pub(crate) stages: Vec<(String, Option<u64>)>,
    /// The steps trained, oldest first.
    pub(crate) steps: Vec<Step>,
}

impl Subject {
    /// Opens what is named, and metrics beside it. Nothing named is standard input.
    pub(crate) fn open(inputs: &[PathBuf], metrics: Option<&Path>) -> anyhow::Result<Self> {
        let subject = match inputs {
            [folder] if is_run(folder) => Self::of_run(RunFolder::open(folder)?),
            _ if inputs.iter().any(|input| is_run(input)) => {
                return Err(Failure::usage("the folder of a run stands alone").into());
            }
            _ => Self::of_tables(inputs.to_vec()),
        };
        Ok(match metrics {
            Some(path) => subject.and_steps(read_metrics(path)?),
            None => subject,
        })
    }

    /// Adds steps that a file beside it tells; they replace those of the same number.
    pub(crate) fn and_steps(self, further: Vec<Step>) -> Self {
        let steps = self.steps.into_iter().chain(further).map(|step| (step.step, step));
        let steps: BTreeMap<u64, Step> = steps.collect();
        Self { steps: steps.into_values().collect(), ..self }
    }

    /// Takes tables alone.
    pub(crate) fn of_tables(tables: Vec<PathBuf>) -> Self {
        Self { layers: vec![tables], ..Self::default() }
    }

    /// Takes what a run has.
    pub(crate) fn of_run(run: RunFolder) -> Self {
        let stages = run.stages.iter().map(|stage| (stage.name.clone(), stage.rows)).collect();
        let mut layers = run.stages;
        // Stable: of stages that know the same, the later ones first.
        layers.reverse();
        layers.sort_by_key(|stage| std::cmp::Reverse(stage.written_by));
        let layers = layers.into_iter().map(|stage| stage.tables).collect();
        Self { layers, stages, steps: run.steps }
    }

    /// Returns the tables with the most columns.
    pub(crate) fn richest(&self) -> &[PathBuf] {
        self.layers.first().map_or(&[], Vec::as_slice)
    }

    /// Gives every turn once with the name of its shard, from the tables with the
    /// most columns that have it: what came in after the last batch stands only in
    /// earlier ones. Returns what the first tables say about themselves.
    pub(crate) fn read(&self, each: &mut dyn FnMut(&str, &[Turn])) -> anyhow::Result<Provenance> {
        let mut provenance = None;
        let mut known = HashSet::new();
        for tables in &self.layers {
            let mut source = Source::open(tables)?;
            let mut fresh = Vec::new();
            while let Some(mut turns) = source.next_turns()? {
                turns.retain(|turn| !known.contains(&turn.turn_id));
                if self.layers.len() > 1 {
                    fresh.extend(turns.iter().map(|turn| turn.turn_id.clone()));
                }
                each(source.place().0, &turns);
            }
            known.extend(fresh);
            provenance.get_or_insert_with(|| source.provenance().clone());
        }
        Ok(provenance.unwrap_or_default())
    }
}

fn quoted(name: &str) -> String {
    format!("`{name}`")
}

impl Stage {
    fn of(name: String, tables: Vec<PathBuf>) -> anyhow::Result<Option<Self>> {
        if tables.is_empty() {
            return Ok(None);
        }
        let source = Source::open(&tables)?;
        let schema = source.schema();
        let there = columns().iter().filter(|column| schema.index_of(column.name).is_ok());
        let written_by = there.map(|column| column.writer).max();
        Ok(Some(Self { name, rows: source.total_rows(), tables, written_by }))
    }
}

/// Lists the tables of a run by stage, in the order of the loop; what lies beside
/// the folders last, each a stage of its own.
pub(crate) fn tables_of_run(folder: &Path) -> anyhow::Result<Vec<(String, Vec<PathBuf>)>> {
    let mut found = Vec::new();
    for name in STAGES {
        found.push((name.to_owned(), tables(&folder.join(name))?));
    }
    for table in tables(folder)? {
        let name = table.file_name().unwrap_or_default().to_string_lossy().into_owned();
        found.push((name, vec![table]));
    }
    found.retain(|(_, tables)| !tables.is_empty());
    Ok(found)
}

/// Lists the finished tables right in a folder, by name.
pub(crate) fn tables(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = entries(folder)?;
    found.retain(|path| {
        let hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        let ending = path.extension().unwrap_or_default();
        !hidden && (ending == "parquet" || ending == "arrow") && path.is_file()
    });
    Ok(found)
}

/// Lists a folder, sorted; one that is not there is empty.
fn entries(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let reading = || format!("cannot read `{}`", folder.display());
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.with_context(reading)?,
    };
    let path = |entry: std::io::Result<fs::DirEntry>| entry.map(|entry| entry.path());
    let mut found = entries.map(path).collect::<Result<Vec<_>, _>>().with_context(reading)?;
    found.sort();
    Ok(found)
}

/// Collects the steps of a run: of the policies' records, and of the metrics files,
/// which reach further back.
fn steps(folder: &Path) -> anyhow::Result<Vec<Step>> {
    let mut found = BTreeMap::new();
    let policy = folder.join(POLICY);
    for step in entries(&policy)? {
        let record = step.join("oclaw/train.json");
        let named =
            step.file_name().is_some_and(|name| name.to_string_lossy().starts_with("step-"));
        if named && record.is_file() {
            let step = record_step(&record)?;
            found.insert(step.step, step);
        }
    }
    for file in [folder.join(METRICS), policy.join(METRICS)] {
        if file.is_file() {
            found.extend(read_metrics(&file)?.into_iter().map(|step| (step.step, step)));
        }
    }
    Ok(found.into_values().collect())
}

fn record_step(path: &Path) -> anyhow::Result<Step> {
    let bytes = fs::read(path).with_context(|| format!("cannot read `{}`", path.display()))?;
    let record: Value = serde_json::from_slice(&bytes)
        .with_context(|| format!("`{}` is no record of a policy", path.display()))?;
    serde_json::from_value(record["metrics"].clone())
        .with_context(|| format!("`{}` has no metrics", path.display()))
}

/// Reads the lines that `oclaw train --metrics` wrote. A last line without its end
/// is still being written.
pub(crate) fn read_metrics(path: &Path) -> anyhow::Result<Vec<Step>> {
    let text =
        fs::read_to_string(path).with_context(|| format!("cannot read `{}`", path.display()))?;
    let mut steps = Vec::new();
    for (number, line) in text.split_inclusive('\n').enumerate() {
        let Some(line) = line.strip_suffix('\n') else { break };
        if !line.trim().is_empty() {
            let step = serde_json::from_str(line).with_context(|| {
                format!("`{}`, line {}: no metrics of a step", path.display(), number + 1)
            })?;
            steps.push(step);
        }
    }
    Ok(steps)
}

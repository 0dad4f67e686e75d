//! `advantage --compare`: several estimators on one table, side by side.

use std::collections::{HashMap, HashSet};

use comfy_table::Table;
use comfy_table::presets::NOTHING;
use oclaw::advantage::{self, Comparison, Estimator, Method, Side, Standing};
use oclaw::stage;
use oclaw::table::Source;
use oclaw::trajectory::Turn;
use serde_json::{Value, json};

use super::{Args, EstimatorName, Peers, Switch, Told, is_judged};
use crate::common::Context;
use crate::files::{StageFormat, write_text};
use crate::progress;
use crate::report::{Exit, Failure};

/// Prints what the estimators make of a table. No table of turns is written.
pub(super) fn run(args: &Args, names: &[EstimatorName], context: &Context) -> anyhow::Result<Exit> {
    let methods = methods(args, names)?;
    refuse_what_does_nothing(args)?;
    let mut source = args.files.inputs.open(context)?;
    if args.told.weighs_judge() && !is_judged(&source) {
        return Err(stage::Error::ColumnMissing { column: "score", stage: "judge" }.into());
    }
    check_columns(&source, &methods)?;
    let group_by = args.peers.group_by.as_deref();
    let peers = Peers::read(&mut source, group_by, args.peers.value_column.as_deref())?;
    let told = Told::read(&args.told, &mut source)?;
    let bar = progress::bar(context, "advantage", source.total_rows());
    source.hold()?;
    let others = Others::read(&mut source, args, &methods, (&peers, &told))?;
    source.rewind()?;
    let mut comparison = Comparison::new(methods.clone());
    while let Some(batch) = source.next_batch()? {
        for mut turn in source.read(&batch)? {
            bar.inc(1);
            told.join(&mut turn);
            comparison.add(&others.note(&turn, &methods, &told));
        }
    }
    bar.finish_and_clear();
    let text = match args.files.format {
        Some(StageFormat::Json) => format!("{}\n", json_of(&comparison)),
        Some(StageFormat::Csv) => csv(&comparison)?,
        _ => table(&comparison),
    };
    write_text(args.files.output.as_deref(), &text)?;
    let refused = comparison.sides().any(|(_, side)| side.refused > 0);
    Ok(if refused { Exit::Partial } else { Exit::Done })
}

/// Returns the estimators with their numbers. Each number has to be of use to one of
/// them.
fn methods(args: &Args, names: &[EstimatorName]) -> Result<Vec<Method>, Failure> {
    let estimators: Vec<Estimator> = names.iter().map(|name| Estimator::from(*name)).collect();
    let distinct: HashSet<&str> = estimators.iter().map(|estimator| estimator.as_str()).collect();
    if estimators.len() < 2 || distinct.len() < estimators.len() {
        return Err(Failure::usage("`--compare` takes two estimators or more, each once")
            .hint("for example `--compare grpo,opd,combine`"));
    }
    args.peers.check_some(&estimators)?;
    args.told.check(false)?;
    let method = |name: &EstimatorName| {
        let mut method = args.method.method_of(*name);
        method.gamma = args.peers.gamma.unwrap_or(method.gamma);
        method.lambda = args.peers.lambda.unwrap_or(method.lambda);
        method
    };
    Ok(names.iter().map(method).collect())
}

fn refuse_what_does_nothing(args: &Args) -> Result<(), Failure> {
    let files = &args.files;
    let flag = match () {
        () if files.replace => "--replace",
        () if files.fill => "--fill",
        () if files.following.follow.is_some() => "--follow",
        () if matches!(files.format, Some(StageFormat::Parquet | StageFormat::Ipc)) => {
            return Err(Failure::usage("`--compare` writes no table of turns")
                .hint("its figures come as a text, or by `--format csv` or `--format json`"));
        }
        () => return Ok(()),
    };
    Err(Failure::usage(format!("`--compare` has no `{flag}`: it writes no table of turns")))
}

fn check_columns(source: &Source, methods: &[Method]) -> Result<(), stage::Error> {
    if methods.iter().any(|method| method.estimator.reads_teacher()) {
        for (column, stage) in [("hints", "hint"), ("teacher_log_probs", "teacher-lp")] {
            if source.schema().index_of(column).is_err() {
                return Err(stage::Error::ColumnMissing { column, stage });
            }
        }
    }
    Ok(())
}

/// What the rows of a table are to each other.
struct Others {
    promoted: HashSet<String>,
    /// The reward part of each turn by its id, for each estimator.
    shares: Vec<HashMap<String, f32>>,
}

impl Others {
    fn read(
        source: &mut Source,
        args: &Args,
        methods: &[Method],
        (peers, told): (&Peers, &Told),
    ) -> anyhow::Result<Self> {
        let (mut outcomes, mut members, mut stated) = (Vec::new(), Vec::new(), false);
        let grouped = args.peers.group_by.is_some()
            || methods.iter().any(|method| method.estimator == Estimator::Gae);
        let mut row = 0;
        while let Some(batch) = source.next_batch()? {
            for mut turn in source.read(&batch)? {
                told.join(&mut turn);
                stated |= turn.reward_explicit.is_some();
                let shaped = told.shaped(&turn);
                outcomes.push(advantage::outcome(&turn, shaped));
                if grouped {
                    let (group, value) = (peers.group(row), peers.value(row));
                    members.push(advantage::member(&turn, shaped, group, value));
                }
                row += 1;
            }
        }
        let rewards = methods.iter().any(|method| method.estimator.reads_rewards());
        if rewards && !stated && !args.told.spares_judge() && !is_judged(source) {
            return Err(stage::Error::ColumnMissing { column: "score", stage: "judge" }.into());
        }
        let promoted = match args.at_least_one {
            Switch::On => advantage::promoted(&outcomes),
            Switch::Off => HashSet::new(),
        };
        let shares = methods.iter().map(|method| advantage::shares(method, &members)).collect();
        Ok(Self { promoted, shares })
    }

    /// Returns a row as each estimator notes it.
    fn note(&self, turn: &Turn, methods: &[Method], told: &Told) -> Vec<Turn> {
        let shaped = told.shaped(turn);
        let promoted = self.promoted.contains(&turn.turn_id);
        let note = |(method, shares): (&Method, &HashMap<String, f32>)| {
            let share = shares.get(&turn.turn_id).copied();
            let standing = Standing { promoted, share, shaped };
            advantage::note_among(turn.clone(), standing, method)
        };
        methods.iter().zip(&self.shares).map(note).collect()
    }
}

/// The figures of one estimator, in the order of the table.
fn figures(side: &Side) -> [(&'static str, Option<f64>); 9] {
    let spread = &side.advantages;
    let some = |value: f64| (spread.count > 0).then_some(value);
    [
        ("rows", Some(side.rows as f64)),
        ("tokens", Some(spread.count as f64)),
        ("effective_tokens", Some(side.effective_tokens() as f64)),
        ("mean", spread.mean()),
        ("std", spread.std()),
        ("mean_size", side.sizes.mean()),
        ("min", some(spread.min)),
        ("max", some(spread.max)),
        ("clip_share", side.clip_share()),
    ]
}

fn json_of(comparison: &Comparison) -> Value {
    let names: Vec<&str> =
        comparison.sides().map(|(method, _)| method.estimator.as_str()).collect();
    let side = |(place, (method, side)): (usize, (&Method, &Side))| {
        let mut told: serde_json::Map<String, Value> = figures(side)
            .into_iter()
            .map(|(name, value)| match name {
                "rows" | "tokens" | "effective_tokens" => {
                    (name.to_owned(), json!(value.map(|value| value as u64)))
                }
                _ => (name.to_owned(), json!(value)),
            })
            .collect();
        told.insert("refused".to_owned(), json!(side.refused));
        let others = names.iter().enumerate().filter(|(other, _)| *other != place);
        let agreement = others.map(|(other, name)| {
            let agreement = comparison.agreement(place, other);
            ((*name).to_owned(), json!({"tokens": agreement.both, "same_sign": agreement.share()}))
        });
        told.insert("agreement".to_owned(), Value::Object(agreement.collect()));
        (method.estimator.as_str().to_owned(), Value::Object(told))
    };
    Value::Object(comparison.sides().enumerate().map(side).collect())
}

fn csv(comparison: &Comparison) -> anyhow::Result<String> {
    let names: Vec<&str> =
        comparison.sides().map(|(method, _)| method.estimator.as_str()).collect();
    let mut writer = csv::Writer::from_writer(Vec::new());
    let head = figures(&Side::default()).map(|(name, _)| name.to_owned());
    let agreements = names.iter().map(|name| format!("same_sign_as_{name}"));
    let head = std::iter::once("estimator".to_owned()).chain(head).chain(agreements);
    writer.write_record(head)?;
    let number = |value: Option<f64>| value.map_or_else(String::new, |value| value.to_string());
    for (place, (method, side)) in comparison.sides().enumerate() {
        let figures = figures(side).map(|(_, value)| number(value));
        let agreements = (0..names.len()).map(|other| match other == place {
            true => String::new(),
            false => number(comparison.agreement(place, other).share()),
        });
        let name = std::iter::once(method.estimator.to_string());
        writer.write_record(name.chain(figures).chain(agreements))?;
    }
    Ok(String::from_utf8(writer.into_inner()?)?)
}

/// Writes it for people: a column per estimator.
fn table(comparison: &Comparison) -> String {
    let sides: Vec<(&Method, &Side)> = comparison.sides().collect();
    let mut table = Table::new();
    table.load_style(NOTHING);
    let names = sides.iter().map(|(method, _)| method.estimator.to_string());
    table.add_row(std::iter::once(String::new()).chain(names));
    let mut row = |name: String, cells: Vec<Option<String>>| {
        let cells = cells.into_iter().map(|cell| cell.unwrap_or_else(|| "-".to_owned()));
        table.add_row(std::iter::once(name).chain(cells));
    };
    let count = |tell: &dyn Fn(&Side) -> u64| {
        sides.iter().map(|(_, side)| Some(tell(side).to_string())).collect()
    };
    row("rows with a signal".to_owned(), count(&|side| side.rows));
    row("rows refused".to_owned(), count(&|side| side.refused));
    row("tokens".to_owned(), count(&|side| side.advantages.count));
    row("  effective (A is not 0)".to_owned(), count(&Side::effective_tokens));
    for (place, name) in [
        (3, "mean A"),
        (4, "  std"),
        (5, "mean |A|"),
        (6, "min A"),
        (7, "max A"),
        (8, "clip share of lt - lo"),
    ] {
        let figure = |(_, side): &(&Method, &Side)| figures(side)[place].1;
        let cells = sides.iter().map(figure).map(|value| value.map(|value| format!("{value:.4}")));
        row(name.to_owned(), cells.collect());
    }
    for (other, (method, _)) in sides.iter().enumerate() {
        let share = |place: usize| {
            let share = comparison.agreement(place, other).share().filter(|_| place != other);
            share.map(|share| format!("{share:.4}"))
        };
        row(format!("same sign as {}", method.estimator), (0..sides.len()).map(share).collect());
    }
    let mut text = format!("{table}\n");
    if sides.iter().any(|(method, _)| method.estimator == Estimator::Hybrid) {
        text.push_str(
            "`hybrid` is shown by its reward part; `train` adds a loss of its own for the hints.\n",
        );
    }
    if sides.iter().any(|(method, _)| method.estimator == Estimator::TopkKl) {
        text.push_str("`topk-kl` has no advantages: `train` has a loss of its own for it.\n");
    }
    text
}

//! What is told of turns beside their rows: feedback that came late, and what sessions
//! came to in the end.

use std::collections::HashMap;
use std::path::PathBuf;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::compute::{CastOptions, cast_with_options};
use arrow::datatypes::{DataType, Float32Type};
use oclaw::advantage::{Shaped, Weights};
use oclaw::journal::{Feedback, late_feedback};
use oclaw::table::Source;
use oclaw::trajectory::{Turn, turn};

use super::peers::column;
use crate::report::Failure;

/// What is read of each row to find whom it concerns.
const PLACES: &[&str] =
    &["session_id", "turn", "turn_id", "created_at", "session_end", "reward_explicit"];
/// The columns that late feedback fills.
pub(super) const MENDED: &[&str] = &["reward_explicit", "feedback_text"];

/// What rewards are made of.
#[derive(clap::Args, Debug)]
pub(super) struct ToldArgs {
    /// Add rewards up, weighted: `explicit`, `judged`, `outcome` [default: explicit, else judged]
    #[arg(long, value_name = "SOURCE=WEIGHT,...", value_parser = weights)]
    shape: Option<Weights>,
    /// Column of the outcome, in the row that ends its session [default: reward_explicit]
    #[arg(long, value_name = "COLUMN")]
    outcome_column: Option<String>,
    /// Feedback that came after its row: a file or folder that `oclaw serve` made
    #[arg(long, value_name = "PATH")]
    pub(super) feedback: Vec<PathBuf>,
}

impl ToldArgs {
    /// Errors if a flag is of no use.
    pub(super) fn check(&self) -> Result<(), Failure> {
        match (&self.outcome_column, self.shape) {
            (Some(_), None | Some(Weights { outcome: 0.0, .. })) => {
                let problem = "`--outcome-column` is of no use: the outcome has no weight";
                Err(Failure::usage(problem).hint("for example `--shape judged=0.7,outcome=0.3`"))
            }
            _ => Ok(()),
        }
    }

    /// Returns whether rewards can be made without the judge.
    pub(super) fn spares_judge(&self) -> bool {
        self.shape.is_some_and(|weights| weights.judged == 0.0)
    }

    /// Returns the columns of other stages that change.
    pub(super) fn mends(&self) -> &'static [&'static str] {
        if self.feedback.is_empty() { &[] } else { MENDED }
    }
}

/// Reads weights. What they make of rewards from -1 to 1 is from -1 to 1.
fn weights(text: &str) -> Result<Weights, String> {
    let mut weights = Weights::default();
    let mut sum = 0.0;
    for word in text.split(',') {
        let (name, number) = word.split_once('=').unwrap_or((word, ""));
        let place = match name.trim() {
            "explicit" => &mut weights.explicit,
            "judged" => &mut weights.judged,
            "outcome" => &mut weights.outcome,
            _ => return Err("wanted `explicit`, `judged`, `outcome`, each `=WEIGHT`".to_owned()),
        };
        let weight = number.trim().parse().ok().filter(|it| *it > 0.0 && *it <= 1.0);
        let weight: f64 = weight.ok_or("wanted weights above 0 and up to 1")?;
        if *place != 0.0 {
            return Err(format!("`{}` has two weights", name.trim()));
        }
        *place = weight as f32;
        sum += weight;
    }
    match sum <= 1.0 + 1e-6 {
        true => Ok(weights),
        false => Err(format!("the weights add up to {sum}, and may to 1")),
    }
}

/// What was told of the turns of a table.
#[derive(Debug, Default)]
pub(super) struct Told {
    weights: Option<Weights>,
    /// By session.
    outcomes: HashMap<String, f32>,
    /// By turn.
    late: HashMap<String, Late>,
    /// Feedback of sessions or turns by number that are not there.
    unplaced: u64,
}

/// What was said of a turn, at last.
#[derive(Debug, Default)]
struct Late {
    reward: Option<f32>,
    text: Option<String>,
}

/// A row, as far as it has to be known.
struct Row {
    turn: Turn,
    outcome: Option<f32>,
}

impl Row {
    fn place(&self) -> (u32, i64, &str) {
        (self.turn.turn, self.turn.created_at.0, &self.turn.turn_id)
    }
}

impl Told {
    /// Reads the feedback, and the table if it has to be known for it, and rewinds that.
    pub(super) fn read(args: &ToldArgs, source: &mut Source) -> anyhow::Result<Self> {
        let mut told = Self { weights: args.shape, ..Self::default() };
        let mut said = Vec::new();
        for path in &args.feedback {
            said.extend(late_feedback(path).map_err(|error| {
                Failure::failed(format!("cannot read feedback `{}`: {error}", path.display()))
            })?);
        }
        said.sort_by_key(|feedback| feedback.at);
        let weighs = args.shape.is_some_and(|weights| weights.outcome != 0.0);
        let sessions = match weighs || said.iter().any(|feedback| feedback.turn_id.is_none()) {
            true => sessions(source, args.outcome_column.as_deref())?,
            false => HashMap::new(),
        };
        for feedback in said {
            let Some(turn_id) = meant(&feedback, &sessions) else {
                told.unplaced += 1;
                continue;
            };
            let late = told.late.entry(turn_id).or_default();
            late.reward = feedback.reward.or(late.reward);
            late.text = feedback.text.or(late.text.take());
        }
        if weighs {
            let stated = args.outcome_column.is_none();
            for (session, rows) in sessions {
                let ends = rows.iter().filter(|row| row.turn.session_end);
                let Some(end) = ends.max_by_key(|row| row.place()) else { continue };
                let late = told.late.get(&end.turn.turn_id).filter(|_| stated);
                let outcome = late.and_then(|late| late.reward).or(end.outcome);
                told.outcomes.extend(outcome.map(|outcome| (session, outcome)));
            }
        }
        Ok(told)
    }

    /// Returns of how many turns something was said, those counted that nobody knows.
    pub(super) fn said(&self) -> u64 {
        self.late.len() as u64 + self.unplaced
    }

    /// Adds to a turn what came late. Returns whether anything did.
    pub(super) fn join(&self, turn: &mut Turn) -> bool {
        let Some(late) = self.late.get(&turn.turn_id) else { return false };
        turn.reward_explicit = late.reward.or(turn.reward_explicit);
        turn.feedback_text = late.text.clone().or(turn.feedback_text.take());
        true
    }

    /// Returns how the reward of a turn is made.
    pub(super) fn shaped(&self, turn: &Turn) -> Option<Shaped> {
        let outcome = self.outcomes.get(&turn.session_id).copied();
        self.weights.map(|weights| Shaped { weights, outcome })
    }
}

/// Finds the turn that feedback is about: the one it names, or of its session the one
/// of its number, or the latest that was there.
fn meant(feedback: &Feedback, sessions: &HashMap<String, Vec<Row>>) -> Option<String> {
    if let Some(turn_id) = &feedback.turn_id {
        return Some(turn_id.clone());
    }
    let rows = sessions.get(feedback.session_id.as_deref()?)?.iter();
    let meant = rows.filter(|row| match feedback.turn {
        Some(turn) => row.turn.turn == turn,
        None => row.turn.created_at.0 <= feedback.at,
    });
    meant.max_by_key(|row| row.place()).map(|row| row.turn.turn_id.clone())
}

/// Reads where each row stands, by session.
fn sessions(
    source: &mut Source,
    outcome: Option<&str>,
) -> anyhow::Result<HashMap<String, Vec<Row>>> {
    source.hold()?;
    let mut sessions = HashMap::<String, Vec<Row>>::new();
    while let Some(batch) = source.next_batch()? {
        let outcomes = outcome.map(|name| numbers(&batch, name)).transpose()?;
        let wanted = |(place, field): (usize, &arrow::datatypes::FieldRef)| {
            PLACES.contains(&field.name().as_str()).then_some(place)
        };
        let places: Vec<usize> =
            batch.schema().fields().iter().enumerate().filter_map(wanted).collect();
        for (row, turn) in turn::read_part(&batch.project(&places)?)?.into_iter().enumerate() {
            let outcome = match &outcomes {
                Some(outcomes) => outcomes
                    .is_valid(row)
                    .then(|| outcomes.as_primitive::<Float32Type>().value(row)),
                None => turn.reward_explicit,
            };
            sessions.entry(turn.session_id.clone()).or_default().push(Row { turn, outcome });
        }
    }
    source.rewind()?;
    Ok(sessions)
}

fn numbers(batch: &RecordBatch, name: &str) -> anyhow::Result<ArrayRef> {
    let column = column(batch, name)?;
    if !column.data_type().is_numeric() && *column.data_type() != DataType::Null {
        return Err(Failure::usage(format!("column `{name}` holds no numbers")).into());
    }
    let options = CastOptions { safe: false, ..CastOptions::default() };
    Ok(cast_with_options(column, &DataType::Float32, &options)?)
}

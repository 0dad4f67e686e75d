//! What is told of turns beside their rows: feedback that came late, and what sessions
//! came to in the end.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

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
    /// Errors if a flag is of no use, or would not reach every row.
    pub(super) fn check(&self, fill: bool) -> Result<(), Failure> {
        if fill && !self.feedback.is_empty() {
            let problem = "`--fill` would leave late feedback out of rows noted before";
            return Err(Failure::usage(problem).hint("compute all of them again: `--replace`"));
        }
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

    /// Returns whether the judge's word is a part of rewards.
    pub(super) fn weighs_judge(&self) -> bool {
        self.shape.is_some_and(|weights| weights.judged != 0.0)
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
    /// Whom each feedback is about, and the turn that this is, if it is known.
    said: Vec<(About, Option<String>)>,
}

/// What was said of a turn, at last.
#[derive(Debug, Default)]
struct Late {
    reward: Option<f32>,
    text: Option<String>,
    /// Whether a row of the table is that turn.
    met: AtomicBool,
}

/// Whom feedback is about.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum About {
    /// A turn by its id.
    Turn(String),
    /// A turn of a session by its number, or the latest at this time.
    Session(Option<String>, Option<u32>, i64),
}

impl About {
    fn of(feedback: &Feedback) -> Self {
        match &feedback.turn_id {
            Some(turn_id) => Self::Turn(turn_id.clone()),
            None => Self::Session(feedback.session_id.clone(), feedback.turn, feedback.at),
        }
    }
}

/// Whom feedback was about, and whether a row of any table so far was that turn.
#[derive(Debug, Default)]
pub(super) struct Heard(HashMap<About, bool>);

impl Heard {
    /// Takes in what was told of one more table, which has been noted.
    pub(super) fn add(&mut self, told: &Told) {
        for (about, turn_id) in &told.said {
            let late = turn_id.as_ref().and_then(|turn_id| told.late.get(turn_id));
            let met = late.is_some_and(|late| late.met.load(Ordering::Relaxed));
            *self.0.entry(about.clone()).or_default() |= met;
        }
    }

    /// Returns how much of it was about no row.
    pub(super) fn strangers(&self) -> u64 {
        self.0.values().filter(|met| !**met).count() as u64
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
        let unnamed = said.iter().filter(|feedback| feedback.turn_id.is_none());
        let asked: HashSet<String> =
            unnamed.filter_map(|feedback| feedback.session_id.clone()).collect();
        let sessions = match weighs || !asked.is_empty() {
            true => Sessions::read(source, &asked, weighs, args.outcome_column.as_deref())?,
            false => Sessions::default(),
        };
        for feedback in said {
            let meant = sessions.meant(&feedback);
            told.said.push((About::of(&feedback), meant.clone()));
            let Some(turn_id) = meant else { continue };
            let late = told.late.entry(turn_id).or_default();
            late.reward = feedback.reward.or(late.reward);
            late.text = feedback.text.or(late.text.take());
        }
        let stated = args.outcome_column.is_none();
        for (session, end) in sessions.ends {
            let late = told.late.get(&end.turn_id).filter(|_| stated);
            let outcome = late.and_then(|late| late.reward).or(end.outcome);
            told.outcomes.extend(outcome.map(|outcome| (session, outcome)));
        }
        Ok(told)
    }

    /// Adds to a turn what came late. Returns whether anything did.
    pub(super) fn join(&self, turn: &mut Turn) -> bool {
        let Some(late) = self.late.get(&turn.turn_id) else { return false };
        late.met.store(true, Ordering::Relaxed);
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

/// Where the rows of a table stand in their sessions, as far as it has to be known:
/// of most rows nothing is kept.
#[derive(Debug, Default)]
struct Sessions {
    /// The rows of the sessions that were asked about.
    rows: HashMap<String, Vec<Row>>,
    /// The row that ends each session, where outcomes count.
    ends: HashMap<String, Row>,
}

#[derive(Debug, Clone)]
struct Row {
    turn: u32,
    created_at: i64,
    turn_id: String,
    outcome: Option<f32>,
}

impl Row {
    fn place(&self) -> (u32, i64, &str) {
        (self.turn, self.created_at, &self.turn_id)
    }
}

impl Sessions {
    fn read(
        source: &mut Source,
        asked: &HashSet<String>,
        weighs: bool,
        outcome: Option<&str>,
    ) -> anyhow::Result<Self> {
        let mut sessions = Self::default();
        source.hold()?;
        let columns: Vec<&str> = PLACES.iter().copied().chain(outcome).collect();
        source.only(&columns);
        while let Some(batch) = source.next_batch()? {
            let outcomes = outcome.map(|name| numbers(&batch, name)).transpose()?;
            for (place, turn) in turn::read_part(&batch)?.into_iter().enumerate() {
                let outcome = match &outcomes {
                    Some(outcomes) => outcomes
                        .is_valid(place)
                        .then(|| outcomes.as_primitive::<Float32Type>().value(place)),
                    None => turn.reward_explicit,
                };
                let (session, ends) = (turn.session_id, turn.session_end && weighs);
                let (turn, created_at, turn_id) = (turn.turn, turn.created_at.0, turn.turn_id);
                let row = Row { turn, created_at, turn_id, outcome };
                if asked.contains(&session) {
                    sessions.rows.entry(session.clone()).or_default().push(row.clone());
                }
                let before = sessions.ends.get(&session);
                if ends && before.is_none_or(|before| before.place() <= row.place()) {
                    sessions.ends.insert(session, row);
                }
            }
        }
        source.rewind()?;
        Ok(sessions)
    }

    /// Finds the turn that feedback is about: the one it names, or of its session the one
    /// of its number, or the latest that was there.
    fn meant(&self, feedback: &Feedback) -> Option<String> {
        if let Some(turn_id) = &feedback.turn_id {
            return Some(turn_id.clone());
        }
        let rows = self.rows.get(feedback.session_id.as_deref()?)?.iter();
        let meant = rows.filter(|row| match feedback.turn {
            Some(turn) => row.turn == turn,
            None => row.created_at <= feedback.at,
        });
        meant.max_by_key(|row| row.place()).map(|row| row.turn_id.clone())
    }
}

fn numbers(batch: &RecordBatch, name: &str) -> anyhow::Result<ArrayRef> {
    let column = column(batch, name)?;
    if !column.data_type().is_numeric() && *column.data_type() != DataType::Null {
        return Err(Failure::usage(format!("column `{name}` holds no numbers")).into());
    }
    let options = CastOptions { safe: false, ..CastOptions::default() };
    Ok(cast_with_options(column, &DataType::Float32, &options)?)
}

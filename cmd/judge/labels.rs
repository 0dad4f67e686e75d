//! What people said of turns: a CSV file.

use std::collections::HashMap;
use std::path::Path;

use oclaw::judge::SCORES;
use oclaw::trajectory::Turn;

use crate::report::Failure;

/// Labels by the turn that they are of.
#[derive(Debug, Default)]
pub(super) struct Labels {
    by_id: HashMap<String, Label>,
    by_place: HashMap<(String, u32), Label>,
}

/// A label, and the line that it stands on.
#[derive(Debug, Clone, Copy)]
struct Label {
    value: i8,
    line: u64,
}

impl Labels {
    /// Reads a file: a column `label`, and `turn_id`, or `session_id` and `turn`;
    /// others are not looked at. A line without a label is of nobody yet.
    pub(super) fn read(path: &Path) -> Result<Self, Failure> {
        let name = path.display();
        let bad =
            |line: u64, what: String| Failure::failed(format!("`{name}` line {line}: {what}"));
        let bytes = std::fs::read(path).map_err(|error| {
            Failure::usage(format!("cannot read the labels in `{name}`: {error}"))
        })?;
        let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(&bytes[..]);
        let headers = reader.headers().map_err(|error| bad(1, error.to_string()))?.clone();
        let column = |wanted: &str| {
            headers.iter().position(|name| name.trim_start_matches('\u{feff}') == wanted)
        };
        let columns = (column("turn_id"), column("session_id"), column("turn"), column("label"));
        let label_at = match columns {
            (Some(_), _, _, Some(label)) | (_, Some(_), Some(_), Some(label)) => label,
            _ => {
                let what = "no column `label`, or neither `turn_id` nor `session_id` and `turn`";
                return Err(bad(1, what.to_owned()).hint("the first line names the columns"));
            }
        };
        let mut labels = Self::default();
        for record in reader.records() {
            let record = record.map_err(|error| Failure::failed(format!("`{name}`: {error}")))?;
            let line = record.position().map_or(0, |place| line_of(place, &bytes));
            let field = |at: Option<usize>| {
                at.and_then(|at| record.get(at)).filter(|text| !text.is_empty())
            };
            let Some(text) = field(Some(label_at)) else { continue };
            let value = text.parse().ok().filter(|value| SCORES.contains(value));
            let value =
                value.ok_or_else(|| bad(line, format!("label `{text}` is not -1, 0 or 1")))?;
            let label = Label { value, line };
            let before = match (field(columns.0), field(columns.1), field(columns.2)) {
                (Some(id), ..) => labels.by_id.insert(id.to_owned(), label),
                (None, Some(session), Some(turn)) => {
                    let number = turn.parse().map_err(|_| {
                        bad(line, format!("turn `{turn}` is not a number from 1 on"))
                    })?;
                    labels.by_place.insert((session.to_owned(), number), label)
                }
                _ => return Err(bad(line, "it does not say which turn".to_owned())),
            };
            if let Some(before) = before.filter(|before| before.value != value) {
                let what =
                    format!("{value} for a turn that has {} on line {}", before.value, before.line);
                return Err(bad(line, what));
            }
        }
        match labels.len() {
            0 => Err(Failure::failed(format!("there is no label in `{name}`"))),
            _ => Ok(labels),
        }
    }

    /// Returns how many there are.
    pub(super) fn len(&self) -> usize {
        self.by_id.len() + self.by_place.len()
    }

    /// Returns a turn's label and its line, which tells labels apart.
    pub(super) fn of(&self, turn: &Turn) -> Option<(i8, u64)> {
        let place = (turn.session_id.clone(), turn.turn);
        let label = self.by_id.get(&turn.turn_id).or_else(|| self.by_place.get(&place))?;
        Some((label.value, label.line))
    }
}

/// Returns the line that a record stands on. The reader counts the ends of lines
/// before it, empty lines and the second character of an end in two, to the record.
fn line_of(place: &csv::Position, bytes: &[u8]) -> u64 {
    let at = usize::try_from(place.byte()).unwrap_or_default();
    let ends = bytes.iter().skip(at).take_while(|byte| matches!(byte, b'\r' | b'\n'));
    place.line() + ends.filter(|byte| **byte == b'\n').count() as u64
}

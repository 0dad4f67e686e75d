//! Recorded stage outputs against those of the same stage run again.

use std::collections::BTreeMap;

use arrow::array::{Array, AsArray};
use arrow::datatypes::{DataType, Float32Type};

use crate::trajectory;
use crate::trajectory::{Turn, Writer, turn};

/// How a stage's columns have changed.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Changed {
    /// Rows that both tables have.
    pub rows: usize,
    /// Rows of which some column has another value.
    pub changed: usize,
    /// In how many rows each column has another value.
    pub columns: BTreeMap<&'static str, usize>,
    /// Rows of which one of the tables knows nothing.
    pub missing: usize,
    /// The first changed row: its turn id.
    pub first: Option<String>,
}

impl Changed {
    /// Tells whether nothing has.
    pub fn is_nothing(&self) -> bool {
        self.changed == 0 && self.missing == 0
    }
}

/// Compares the columns that a stage writes, row by row on `turn_id`. Numbers may
/// be apart by the tolerance; null is equal to null only.
pub fn compare(
    writer: Writer,
    recorded: &[Turn],
    rerun: &[Turn],
    tolerance: f64,
) -> Result<Changed, trajectory::Error> {
    let mut places: BTreeMap<&str, usize> = BTreeMap::new();
    for (place, turn) in rerun.iter().enumerate() {
        places.insert(&turn.turn_id, place);
    }
    let left = turn::arrays(&[writer], recorded)?;
    let right = turn::arrays(&[writer], rerun)?;
    let names: Vec<&'static str> = trajectory::columns()
        .iter()
        .filter(|column| column.writer == writer)
        .map(|column| column.name)
        .collect();
    let mut found = Changed::default();
    for (row, turn) in recorded.iter().enumerate() {
        let Some(place) = places.remove(turn.turn_id.as_str()) else {
            found.missing += 1;
            continue;
        };
        found.rows += 1;
        let mut changed = false;
        for ((name, (_, left)), (_, right)) in names.iter().zip(&left).zip(&right) {
            if !close(&left.slice(row, 1), &right.slice(place, 1), tolerance) {
                *found.columns.entry(name).or_default() += 1;
                changed = true;
            }
        }
        if changed {
            found.changed += 1;
            found.first.get_or_insert_with(|| turn.turn_id.clone());
        }
    }
    found.missing += places.len();
    Ok(found)
}

/// Compares two arrays of one type, element by element.
fn close(left: &dyn Array, right: &dyn Array, tolerance: f64) -> bool {
    if left.len() != right.len() {
        return false;
    }
    match left.data_type() {
        DataType::Float32 => {
            let pairs =
                left.as_primitive::<Float32Type>().iter().zip(right.as_primitive::<Float32Type>());
            pairs.into_iter().all(|pair| match pair {
                (Some(left), Some(right)) => {
                    left.to_bits() == right.to_bits()
                        || (f64::from(left) - f64::from(right)).abs() <= tolerance
                }
                (left, right) => left.is_none() && right.is_none(),
            })
        }
        DataType::List(_) => {
            let (left, right) = (left.as_list::<i32>(), right.as_list::<i32>());
            left.iter().zip(right.iter()).all(|pair| match pair {
                (Some(left), Some(right)) => close(&left, &right, tolerance),
                (left, right) => left.is_none() && right.is_none(),
            })
        }
        _ => left.to_data() == right.to_data(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(id: &str, score: Option<f32>, texts: &[Option<&str>]) -> Turn {
        let texts = texts.iter().map(|text| text.map(str::to_owned)).collect();
        Turn { turn_id: id.to_owned(), score, judge_text: Some(texts), ..Turn::default() }
    }

    #[test]
    fn rows_are_found_by_their_id_and_columns_by_their_values() {
        let recorded =
            [turn("a", Some(1.0), &[None]), turn("b", None, &[Some("x")]), turn("c", None, &[])];
        let mut rerun = recorded.to_vec();
        rerun.reverse();
        let same = compare(Writer::Judge, &recorded, &rerun, 0.0).unwrap();
        assert_eq!((same.rows, same.is_nothing()), (3, true));
        rerun[2].score = Some(0.5);
        rerun[1].score = Some(0.0);
        rerun[1].judge_text = Some(vec![Some("y".to_owned())]);
        rerun[0].turn_id = "d".to_owned();
        let changed = compare(Writer::Judge, &recorded, &rerun, 0.25).unwrap();
        let expected = Changed {
            rows: 2,
            changed: 2,
            columns: BTreeMap::from([("score", 2), ("judge_text", 1)]),
            missing: 2,
            first: Some("a".to_owned()),
        };
        assert_eq!(changed, expected);
        // Other stages' columns do not count.
        rerun[0].turn_id = "c".to_owned();
        assert!(compare(Writer::Hint, &recorded, &rerun, 0.0).unwrap().is_nothing());
        let near = compare(Writer::Judge, &recorded[..1], &rerun[2..], 0.5).unwrap();
        assert!(near.is_nothing());
    }
}

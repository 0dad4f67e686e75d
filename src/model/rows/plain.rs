//! The product in plain Rust: what any processor can do, and what the others are held to.

use std::ops::Range;

use super::{Output, Weights};

/// Multiplies all rows of `x` with some weight rows.
pub(super) fn multiply(
    x: &[f32],
    (rows, inner): (usize, usize),
    (weights, columns): (Weights<'_>, Range<usize>),
    output: &Output,
) {
    for column in columns {
        let place = column * inner..(column + 1) * inner;
        for row in 0..rows {
            let x = &x[row * inner..][..inner];
            let sum = match weights {
                Weights::F32(weights) => dot(x, weights[place.clone()].iter().copied()),
                Weights::Bf16(weights) => dot(x, weights[place.clone()].iter().map(|w| w.to_f32())),
            };
            output.put(row, column, sum);
        }
    }
}

fn dot(x: &[f32], weights: impl Iterator<Item = f32>) -> f32 {
    x.iter().zip(weights).map(|(x, weight)| x * weight).sum()
}

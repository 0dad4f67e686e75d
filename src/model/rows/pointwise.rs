//! What is done to each number, or each row, between the products.

/// Divides each row, of the weight's length, by the root of the mean of its squares, and
/// multiplies it with the weight.
pub(in crate::model) fn rms_norm(rows: &mut [f32], weight: &[f32], eps: f64) {
    for row in rows.chunks_exact_mut(weight.len()) {
        let mean = sum_of_squares(row) / row.len() as f32;
        let scale = 1.0 / (mean + eps as f32).sqrt();
        for (x, weight) in row.iter_mut().zip(weight) {
            *x = (*x * scale) * weight;
        }
    }
}

/// Several sums side by side, for a single one would wait for itself.
fn sum_of_squares(row: &[f32]) -> f32 {
    let mut sums = [0.0; 16];
    let (chunks, rest) = row.as_chunks::<16>();
    for chunk in chunks {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            *sum += x * x;
        }
    }
    sums.iter().sum::<f32>() + rest.iter().map(|x| x * x).sum::<f32>()
}

/// Turns each head of each row. `turns` has a row for each: the cosines of a head's pairs,
/// then their sines, `width` in all.
pub(in crate::model) fn rotate(heads: &mut [f32], turns: &[f32], width: usize) {
    let rows = turns.len() / width;
    let all = heads.len() / rows;
    for (row, turn) in heads.chunks_exact_mut(all).zip(turns.chunks_exact(width)) {
        let (cosines, sines) = turn.split_at(width / 2);
        for head in row.chunks_exact_mut(width) {
            let (left, right) = head.split_at_mut(width / 2);
            let angles = cosines.iter().zip(sines);
            for ((a, b), (cosine, sine)) in left.iter_mut().zip(right).zip(angles) {
                (*a, *b) = (*a * cosine - *b * sine, *b * cosine + *a * sine);
            }
        }
    }
}

/// Adds one to the other.
pub(in crate::model) fn add(to: &mut [f32], what: &[f32]) {
    for (to, what) in to.iter_mut().zip(what) {
        *to += what;
    }
}

/// Adds a row to each row of its length.
pub(in crate::model) fn add_to_rows(rows: &mut [f32], what: &[f32]) {
    rows.chunks_exact_mut(what.len()).for_each(|row| add(row, what));
}

pub(super) fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

/// Rounds to the nearest number of bf16, of two as near to the even one.
pub(super) fn to_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) & 0xffff_0000;
    // What is no number stays none.
    if x.is_nan() { x } else { f32::from_bits(rounded) }
}

/// Rounds all of them.
pub(in crate::model) fn round_to_bf16(numbers: &mut [f32]) {
    for number in numbers {
        *number = to_bf16(*number);
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use tch::{Kind, Tensor};

    use super::*;

    #[test]
    fn bf16_is_that_of_everybody() {
        let odd = [0.0, -0.0, 1.0, -1.5, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, 1e-40];
        // Ties to either side, and their neighbours.
        let ties = [0x3f80_7fff, 0x3f80_8000, 0x3f80_8001, 0x3f81_8000, 0xbf81_7fff];
        for x in odd.into_iter().chain(ties.map(f32::from_bits)) {
            let wanted = bf16::from_f32(x).to_f32();
            assert_eq!(to_bf16(x).to_bits(), wanted.to_bits(), "{x:e}");
        }
        assert!(to_bf16(f32::NAN).is_nan());
        assert!(to_bf16(f32::from_bits(0x7fff_ffff)).is_nan());
    }

    #[test]
    fn a_norm_is_that_of_libtorch() {
        let x: Vec<f32> = (0..3 * 37).map(|at| ((at * 29) % 41) as f32 / 7.0 - 2.5).collect();
        let weight: Vec<f32> = (0..37).map(|at| 0.5 + at as f32 / 20.0).collect();
        let (tensor, scale) = (Tensor::from_slice(&x).view([3, 37]), Tensor::from_slice(&weight));
        let wanted = tensor.rms_norm(scale.size(), Some(&scale), 1e-5);
        let mut found = x;
        rms_norm(&mut found, &weight, 1e-5);
        let found = Tensor::from_slice(&found).view([3, 37]);
        let off = (found - wanted).abs().max().double_value(&[]);
        assert!(off < 2e-6, "{off}");
    }

    #[test]
    fn a_quarter_turn_changes_the_halves() {
        // Two rows of two heads; the second row is not turned.
        let mut heads = [1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0].repeat(2);
        rotate(&mut heads, &[0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0], 4);
        assert_eq!(heads[..8], [-3.0, -4.0, 1.0, 2.0, -7.0, -8.0, 5.0, 6.0]);
        assert_eq!(heads[8..], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
    }

    #[test]
    fn silu_is_that_of_libtorch() {
        let x: Vec<f32> = (-300..300).map(|at| at as f32 / 3.0).collect();
        let wanted = Tensor::from_slice(&x).silu().to_kind(Kind::Double);
        for (at, x) in x.iter().enumerate() {
            let wanted = wanted.double_value(&[at as i64]);
            assert!((f64::from(silu(*x)) - wanted).abs() <= 1e-6 * (1.0 + wanted.abs()), "{x}");
        }
    }
}

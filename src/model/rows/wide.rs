//! The product in AVX2: eight lanes, four rows of `x` against two weight rows, so that
//! what is loaded is used several times.

use std::arch::x86_64::*;
use std::mem::transmute;
use std::ops::Range;

use half::bf16;

use super::{Output, Weights};

const LANES: usize = 8;

/// Whether this processor can.
pub(super) fn is_there() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

/// A number that weights may be of.
trait Weight: Copy {
    fn wide(self) -> f32;
    /// Loads eight of them as f32.
    ///
    /// # Safety
    /// There are eight at `from`, and the processor has AVX2.
    #[expect(unsafe_code, reason = "vector instructions")]
    unsafe fn load(from: *const Self) -> __m256;
}

impl Weight for f32 {
    fn wide(self) -> f32 {
        self
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    #[expect(unsafe_code, reason = "vector instructions")]
    unsafe fn load(from: *const Self) -> __m256 {
        // A plain read: the load of `std` is checked at each call in a debug build.
        // SAFETY: as the caller promises; any eight numbers are a vector.
        unsafe { transmute::<[f32; LANES], __m256>(*from.cast()) }
    }
}

impl Weight for bf16 {
    fn wide(self) -> f32 {
        self.to_f32()
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    #[expect(unsafe_code, reason = "vector instructions")]
    unsafe fn load(from: *const Self) -> __m256 {
        // The upper half of an f32 is its bf16.
        // SAFETY: as the caller promises; any eight numbers are a vector.
        let halves = unsafe { transmute::<[u16; LANES], __m128i>(*from.cast()) };
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves)))
    }
}

/// Multiplies all rows of `x` with some weight rows. The processor must be able to.
#[expect(unsafe_code, reason = "vector instructions")]
pub(super) fn multiply(
    x: &[f32],
    (rows, inner): (usize, usize),
    (weights, columns): (Weights<'_>, Range<usize>),
    output: &Output,
) {
    assert!(is_there());
    match weights {
        // SAFETY: it is there.
        Weights::F32(weights) => unsafe { pairs(x, (rows, inner), (weights, columns), output) },
        // SAFETY: the same.
        Weights::Bf16(weights) => unsafe { pairs(x, (rows, inner), (weights, columns), output) },
    }
}

#[target_feature(enable = "avx2,fma")]
fn pairs<W: Weight>(
    x: &[f32],
    (rows, inner): (usize, usize),
    (weights, columns): (&[W], Range<usize>),
    output: &Output,
) {
    let mut column = columns.start;
    while column < columns.end {
        let pair = (column + 1 < columns.end).then_some(column + 1);
        let first = &weights[column * inner..][..inner];
        let second = pair.map(|column| &weights[column * inner..][..inner]);
        let mut row = 0;
        while row < rows {
            let left = rows - row;
            let x = &x[row * inner..];
            match (second, left) {
                (Some(second), 4..) => {
                    put(tile::<W, 4, 2>(x, [first, second]), row, column, output);
                    row += 4;
                }
                (Some(second), _) => {
                    put(tile::<W, 1, 2>(x, [first, second]), row, column, output);
                    row += 1;
                }
                (None, 4..) => {
                    put(tile::<W, 4, 1>(x, [first]), row, column, output);
                    row += 4;
                }
                (None, _) => {
                    put(tile::<W, 1, 1>(x, [first]), row, column, output);
                    row += 1;
                }
            }
        }
        column += 2;
    }
}

fn put<const M: usize, const N: usize>(
    sums: [[f32; N]; M],
    row: usize,
    column: usize,
    output: &Output,
) {
    for (m, sums) in sums.into_iter().enumerate() {
        for (n, sum) in sums.into_iter().enumerate() {
            output.put(row + m, column + n, sum);
        }
    }
}

/// Multiplies `M` rows of `x` with `N` weight rows.
#[inline]
#[target_feature(enable = "avx2,fma")]
#[expect(unsafe_code, reason = "vector instructions")]
fn tile<W: Weight, const M: usize, const N: usize>(x: &[f32], weights: [&[W]; N]) -> [[f32; N]; M] {
    let inner = weights[0].len();
    let whole = inner / LANES * LANES;
    assert!(x.len() >= M * inner && weights.iter().all(|row| row.len() == inner));
    let x_rows: [*const f32; M] = std::array::from_fn(|m| x.as_ptr().wrapping_add(m * inner));
    let mut sums = [[_mm256_setzero_ps(); N]; M];
    let mut at = 0;
    while at < whole {
        // SAFETY: `at + 8 <= inner`, and all rows are that long.
        let columns: [__m256; N] =
            unsafe { std::array::from_fn(|n| W::load(weights[n].as_ptr().wrapping_add(at))) };
        for (row, sums) in x_rows.iter().zip(&mut sums) {
            // SAFETY: the same.
            let lanes = unsafe { f32::load(row.wrapping_add(at)) };
            for (sum, column) in sums.iter_mut().zip(columns) {
                *sum = _mm256_fmadd_ps(lanes, column, *sum);
            }
        }
        at += LANES;
    }
    let mut told = [[0.0; N]; M];
    for m in 0..M {
        for n in 0..N {
            let rest = x[m * inner + whole..(m + 1) * inner].iter().zip(&weights[n][whole..]);
            told[m][n] =
                rest.fold(sum_of(sums[m][n]), |sum, (x, weight)| x.mul_add(weight.wide(), sum));
        }
    }
    told
}

/// Adds up the lanes.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn sum_of(lanes: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps::<1>(lanes));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
}

//! The product in AVX-512: sixteen lanes, and up to sixteen sums in registers, so that a
//! weight meets up to eight rows of `x` when it comes from memory. Weight rows that go
//! together are far apart: each is a stream of its own, which the processor reads ahead.

use std::arch::x86_64::*;
use std::mem::transmute;
use std::ops::Range;

use half::bf16;

use super::wide::sum_of;
use super::{Output, Weights};

const LANES: usize = 16;
/// Bytes that a weight row is asked for before it is needed, if so many rows of `x` meet it
/// that to compute takes as long as to read. With fewer it costs more than it gains.
const AHEAD: usize = 4096;
const ROWS_FOR_AHEAD: usize = 4;

/// Whether this processor can.
pub(super) fn is_there() -> bool {
    is_x86_feature_detected!("avx512f") && super::wide::is_there()
}

/// A number that weights may be of.
trait Weight: Copy {
    fn wide(self) -> f32;
    /// Loads sixteen of them as f32.
    ///
    /// # Safety
    /// There are sixteen at `from`, and the processor has AVX-512F.
    #[expect(unsafe_code, reason = "vector instructions")]
    unsafe fn load(from: *const Self) -> __m512;
}

impl Weight for f32 {
    fn wide(self) -> f32 {
        self
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx2,fma")]
    #[expect(unsafe_code, reason = "vector instructions")]
    unsafe fn load(from: *const Self) -> __m512 {
        // A plain read: the load of `std` is checked at each call in a debug build.
        // SAFETY: as the caller promises; any sixteen numbers are a vector.
        unsafe { transmute::<[f32; LANES], __m512>(*from.cast()) }
    }
}

impl Weight for bf16 {
    fn wide(self) -> f32 {
        self.to_f32()
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx2,fma")]
    #[expect(unsafe_code, reason = "vector instructions")]
    unsafe fn load(from: *const Self) -> __m512 {
        // The upper half of an f32 is its bf16.
        // SAFETY: as the caller promises; any sixteen numbers are a vector.
        let halves = unsafe { transmute::<[u16; LANES], __m256i>(*from.cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
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
        Weights::F32(weights) => unsafe { tiles(x, (rows, inner), (weights, columns), output) },
        // SAFETY: the same.
        Weights::Bf16(weights) => unsafe { tiles(x, (rows, inner), (weights, columns), output) },
    }
}

/// Sixteen sums go into the registers beside what they are made of.
#[target_feature(enable = "avx512f,avx2,fma")]
fn tiles<W: Weight>(
    x: &[f32],
    (rows, inner): (usize, usize),
    (weights, columns): (&[W], Range<usize>),
    output: &Output,
) {
    match rows {
        8.. => groups::<W, 8, 2>(x, (rows, inner), (weights, columns), output),
        _ => groups::<W, 4, 4>(x, (rows, inner), (weights, columns), output),
    }
}

/// Takes `N` weight rows at a time, one of each `N`th part of `columns`, and at most `M`
/// rows of `x`.
#[target_feature(enable = "avx512f,avx2,fma")]
fn groups<W: Weight, const M: usize, const N: usize>(
    x: &[f32],
    (rows, inner): (usize, usize),
    (weights, columns): (&[W], Range<usize>),
    output: &Output,
) {
    let weight_row = |column: usize| &weights[column * inner..][..inner];
    let apart = columns.len() / N;
    for first in columns.start..columns.start + apart {
        let places: [usize; N] = std::array::from_fn(|n| first + n * apart);
        let group: [&[W]; N] = std::array::from_fn(|n| weight_row(places[n]));
        let mut row = 0;
        while row < rows {
            let x = &x[row * inner..];
            row += match rows - row {
                left if left >= M => put(tile::<W, M, N>(x, group), row, places, output),
                4.. => put(tile::<W, 4, N>(x, group), row, places, output),
                2.. => put(tile::<W, 2, N>(x, group), row, places, output),
                _ => put(tile::<W, 1, N>(x, group), row, places, output),
            };
        }
    }
    // Those that make no group any more.
    for column in columns.start + apart * N..columns.end {
        for row in 0..rows {
            let sums = tile::<W, 1, 1>(&x[row * inner..], [weight_row(column)]);
            put(sums, row, [column], output);
        }
    }
}

/// Writes the sums and returns how many rows they are of.
fn put<const M: usize, const N: usize>(
    sums: [[f32; N]; M],
    row: usize,
    columns: [usize; N],
    output: &Output,
) -> usize {
    for (m, sums) in sums.into_iter().enumerate() {
        for (column, sum) in columns.into_iter().zip(sums) {
            output.put(row + m, column, sum);
        }
    }
    M
}

/// Multiplies `M` rows of `x` with `N` weight rows. The order of a sum is the same for any
/// `M` and `N`.
#[inline]
#[target_feature(enable = "avx512f,avx2,fma")]
#[expect(unsafe_code, reason = "vector instructions")]
fn tile<W: Weight, const M: usize, const N: usize>(x: &[f32], weights: [&[W]; N]) -> [[f32; N]; M] {
    let inner = weights[0].len();
    let whole = inner / LANES * LANES;
    assert!(x.len() >= M * inner && weights.iter().all(|row| row.len() == inner));
    let x_rows: [*const f32; M] = std::array::from_fn(|m| x.as_ptr().wrapping_add(m * inner));
    let w_rows: [*const W; N] = std::array::from_fn(|n| weights[n].as_ptr());
    let mut sums = [[_mm512_setzero_ps(); N]; M];
    let mut at = 0;
    while at < whole {
        let mut columns = [_mm512_setzero_ps(); N];
        for (column, row) in columns.iter_mut().zip(&w_rows) {
            let from = row.wrapping_add(at);
            if M >= ROWS_FOR_AHEAD {
                _mm_prefetch::<_MM_HINT_T0>(from.cast::<i8>().wrapping_add(AHEAD));
            }
            // SAFETY: `at + 16 <= inner`, and all rows are that long.
            *column = unsafe { W::load(from) };
        }
        for (row, sums) in x_rows.iter().zip(&mut sums) {
            // SAFETY: the same.
            let lanes = unsafe { f32::load(row.wrapping_add(at)) };
            for (sum, column) in sums.iter_mut().zip(&columns) {
                *sum = _mm512_fmadd_ps(lanes, *column, *sum);
            }
        }
        at += LANES;
    }
    let mut told = [[0.0; N]; M];
    for m in 0..M {
        for n in 0..N {
            let rest = x[m * inner + whole..(m + 1) * inner].iter().zip(&weights[n][whole..]);
            let sum = sum_of_all(sums[m][n]);
            told[m][n] = rest.fold(sum, |sum, (x, weight)| x.mul_add(weight.wide(), sum));
        }
    }
    told
}

/// Adds up the lanes: the upper half upon the lower, then as in eight.
#[inline]
#[target_feature(enable = "avx512f,avx2,fma")]
fn sum_of_all(lanes: __m512) -> f32 {
    let upper = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(lanes)));
    sum_of(_mm256_add_ps(_mm512_castps512_ps256(lanes), upper))
}

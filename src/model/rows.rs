//! The product of a few rows with a weight matrix, which is what generating is made of.
//!
//! libtorch packs the whole matrix anew for a handful of rows, which costs more than the
//! product. Here each weight is read once, in order, and meets all rows while it is in the
//! cache. A sum runs along the weight row in eight lanes, whatever the number of rows, so
//! that a row's result does not depend on its neighbours, to the bit.

mod plain;
mod team;
#[cfg(target_arch = "x86_64")]
mod wide;

use half::bf16;
use tch::{Device, Kind, Tensor};

/// Above so many rows libtorch's blocked product is the faster one.
const MOST_ROWS: i64 = 16;
/// Weight rows that a thread takes at a time.
const PIECE: usize = 64;

/// Weights in memory, row after row.
#[derive(Clone, Copy)]
pub(super) enum Weights<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
}

/// Where one thread writes: the outputs of some weight rows, for all rows of `x`.
struct Output {
    start: *mut f32,
    /// Outputs of one row of `x`.
    width: usize,
}

#[expect(unsafe_code, reason = "threads write to places that do not overlap")]
// SAFETY: each piece writes the columns of its own weight rows, and no other does.
unsafe impl Sync for Output {}

impl Output {
    #[expect(unsafe_code, reason = "a slice would cover what other threads write")]
    fn put(&self, row: usize, column: usize, value: f32) {
        debug_assert!(column < self.width);
        // SAFETY: `rows_product` made room for all rows and columns, and calls with no others.
        unsafe { self.start.add(row * self.width + column).write(value) }
    }
}

/// Whether a product of so many rows is one for here.
pub(super) fn fits(rows: i64, device: Device) -> bool {
    device == Device::Cpu && rows <= MOST_ROWS
}

/// Returns `x weight^T`, f32 `[T, out]`, for f32 `x` `[T, in]` and a weight `[out, in]` of
/// f32 or bf16; nothing if it is none for here: too many rows, another device, or one
/// that gradients go back through.
pub(super) fn product(x: &Tensor, weight: &Tensor) -> Option<Tensor> {
    let (rows, width) = x.size2().ok()?;
    let (outputs, inner) = weight.size2().ok()?;
    let here = fits(rows, x.device()) && fits(rows, weight.device());
    if !here || width != inner || x.requires_grad() || weight.requires_grad() {
        return None;
    }
    let x = x.to_kind(Kind::Float).contiguous();
    let out = Tensor::empty([rows, outputs], (Kind::Float, Device::Cpu));
    let shape = (rows as usize, inner as usize, outputs as usize);
    match weight.is_contiguous().then(|| weight.kind())? {
        Kind::Float => multiply(&x, shape, Weights::F32(values(weight)), &out),
        Kind::BFloat16 => multiply(&x, shape, Weights::Bf16(values(weight)), &out),
        _ => return None,
    }
    Some(out)
}

/// Returns the numbers of a contiguous tensor of this machine's memory, whose kind is `T`'s.
#[expect(unsafe_code, reason = "tch gives no slice of a tensor")]
fn values<T>(tensor: &Tensor) -> &[T] {
    debug_assert!(tensor.is_contiguous() && tensor.device() == Device::Cpu);
    // SAFETY: libtorch keeps `numel` numbers there as long as the tensor lives.
    unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast(), tensor.numel()) }
}

fn multiply(
    x: &Tensor,
    (rows, inner, outputs): (usize, usize, usize),
    weights: Weights<'_>,
    out: &Tensor,
) {
    let x: &[f32] = values(x);
    let output = Output { start: out.data_ptr().cast(), width: outputs };
    let threads = usize::try_from(tch::get_num_threads()).unwrap_or(1);
    team::run(outputs.div_ceil(PIECE), threads, &|piece| {
        let from = piece * PIECE;
        let columns = from..(from + PIECE).min(outputs);
        #[cfg(target_arch = "x86_64")]
        if wide::is_there() {
            return wide::multiply(x, (rows, inner), (weights, columns), &output);
        }
        plain::multiply(x, (rows, inner), (weights, columns), &output);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers in -1 to 1 that bf16 holds exactly.
    fn numbers(seed: u64, count: usize) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            bf16::from_f32(((state >> 40) as f32) / 8_388_608.0 - 1.0).to_f32()
        };
        (0..count).map(|_| next()).collect()
    }

    fn tensor(values: &[f32], columns: usize) -> Tensor {
        Tensor::from_slice(values).view([-1, columns as i64])
    }

    /// Odd sizes have ends that fill no lane, no tile and no piece.
    const SHAPES: [(usize, usize, usize); 7] =
        [(1, 1, 1), (1, 7, 3), (2, 9, 64), (3, 64, 65), (5, 23, 130), (8, 576, 200), (16, 40, 7)];

    #[test]
    fn it_is_the_product_in_both_types_and_both_ways() {
        for (rows, inner, outputs) in SHAPES {
            let (x, w) = (numbers(1, rows * inner), numbers(2, outputs * inner));
            let narrow: Vec<_> = w.iter().copied().map(bf16::from_f32).collect();
            let exact = |row: usize, column: usize| -> f64 {
                let pair = x[row * inner..][..inner].iter().zip(&w[column * inner..][..inner]);
                pair.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
            };
            // A sum of so many terms below 1, each rounded to 24 bits.
            let bound = 6e-8 * inner as f64 * 2.0;
            let (x_tensor, w_tensor) = (tensor(&x, inner), tensor(&w, inner));
            let out = product(&x_tensor, &w_tensor).unwrap();
            let half = product(&x_tensor, &w_tensor.to_kind(Kind::BFloat16)).unwrap();
            assert_eq!(values::<f32>(&out), values::<f32>(&half), "weights that both types hold");
            let mut scalar = vec![0.0; rows * outputs];
            let output = Output { start: scalar.as_mut_ptr(), width: outputs };
            plain::multiply(&x, (rows, inner), (Weights::Bf16(&narrow), 0..outputs), &output);
            for row in 0..rows {
                for column in 0..outputs {
                    let place = row * outputs + column;
                    for found in [values::<f32>(&out)[place], scalar[place]] {
                        let off = (f64::from(found) - exact(row, column)).abs();
                        assert!(off <= bound, "{rows}x{inner}x{outputs}: {off}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_row_does_not_depend_on_its_neighbours() {
        let (inner, outputs) = (77, 131);
        let (x, w) = (numbers(3, 16 * inner), tensor(&numbers(4, outputs * inner), inner));
        let all = product(&tensor(&x, inner), &w).unwrap();
        for rows in 1..=16 {
            let some = product(&tensor(&x[..rows * inner], inner), &w).unwrap();
            let wanted = &values::<f32>(&all)[..rows * outputs];
            assert_eq!(values::<f32>(&some), wanted, "{rows} rows");
        }
    }

    #[test]
    fn what_gradients_go_back_through_is_left_to_libtorch() {
        let (x, w) = (tensor(&numbers(5, 8), 4), tensor(&numbers(6, 12), 4));
        assert!(product(&x, &w).is_some());
        let w = w.set_requires_grad(true);
        assert!(product(&x, &w).is_none());
        let many = tensor(&numbers(7, 17 * 4), 4);
        assert!(product(&many, &w.detach()).is_none());
    }
}

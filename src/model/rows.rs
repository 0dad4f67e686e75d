//! The product of a few rows with a weight matrix, which is what generating is made of, and
//! what comes between such products.
//!
//! libtorch packs the whole matrix anew for a handful of rows, which costs more than the
//! product. Here each weight is read once, in order, and meets all rows while it is in the
//! cache. A sum runs along the weight row in as many lanes as the processor has, whatever
//! the number of rows, so that a row's result does not depend on its neighbours, to the bit.
//! Where the processor has a matrix unit, weights in bf16 go through that, for any number
//! of rows.

pub(super) mod attention;
mod plain;
pub(super) mod pointwise;
mod team;
#[cfg(target_arch = "x86_64")]
mod tiles;
#[cfg(target_arch = "x86_64")]
mod wide;
#[cfg(target_arch = "x86_64")]
mod wide512;

use std::ops::Range;

use half::bf16;
use tch::{Device, Kind, Tensor};

/// Above so many rows libtorch's blocked product is the faster one, but for a matrix unit.
const MOST_ROWS: usize = 16;
/// Weight rows that a thread takes at a time, at most.
const PIECE: usize = 128;
/// Weight rows that vectors multiply together: a piece has a multiple of them.
const TOGETHER: usize = 4;

/// Those that the matrix unit does.
const UNIT_TOGETHER: usize = 32;

/// Weights in memory, row after row.
#[derive(Clone, Copy)]
enum Weights<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
}

/// Multiplies all rows of `x`, so many of such a length, with some weight rows.
type Kernel = fn(&[f32], (usize, usize), (Weights<'_>, Range<usize>), &Output);

/// Rows of `x` as they are multiplied.
enum Rows<'a> {
    /// As they are, by vectors.
    Plain(&'a [f32]),
    /// As the matrix unit wants them.
    #[cfg(target_arch = "x86_64")]
    Columns(tiles::Columns),
}

impl<'a> Rows<'a> {
    /// Makes rows ready for all of some matrices, whatever their number: what multiplies
    /// must not depend on it.
    fn of(x: &'a [f32], rows: usize, matrices: &[Matrix<'_>], threads: usize) -> Self {
        #[cfg(target_arch = "x86_64")]
        if rows > 0 && matrices.iter().all(Matrix::suits_unit) {
            return Self::Columns(tiles::Columns::of(x, rows, threads));
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (rows, matrices, threads);
        Self::Plain(x)
    }

    fn multiply(&self, rows: usize, matrix: Matrix<'_>, columns: Range<usize>, output: &Output) {
        match (self, matrix.weights) {
            (Self::Plain(x), weights) => {
                kernel()(x, (rows, matrix.inner), (weights, columns), output);
            }
            #[cfg(target_arch = "x86_64")]
            (Self::Columns(x), Weights::Bf16(weights)) => x.multiply(weights, columns, output),
            #[cfg(target_arch = "x86_64")]
            (Self::Columns(_), Weights::F32(_)) => unreachable!("the unit takes bf16 alone"),
        }
    }
}

/// Returns the best kernel that this processor can do.
fn kernel() -> Kernel {
    #[cfg(target_arch = "x86_64")]
    {
        if wide512::is_there() {
            return wide512::multiply;
        }
        if wide::is_there() {
            return wide::multiply;
        }
    }
    plain::multiply
}

fn threads() -> usize {
    usize::try_from(tch::get_num_threads()).unwrap_or(1).max(1)
}

/// A weight `[outputs, inner]` where it lies in memory.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a> {
    weights: Weights<'a>,
    pub(super) inner: usize,
    pub(super) outputs: usize,
}

impl<'a> Matrix<'a> {
    /// Returns nothing for a tensor that lies elsewhere or otherwise.
    pub(super) fn of(weight: &'a Tensor) -> Option<Self> {
        let (outputs, inner) = weight.size2().ok()?;
        let here = weight.device() == Device::Cpu && weight.is_contiguous();
        let weights = match here.then(|| weight.kind())? {
            Kind::Float => Weights::F32(values(weight)),
            Kind::BFloat16 => Weights::Bf16(values(weight)),
            _ => return None,
        };
        Some(Self { weights, inner: inner as usize, outputs: outputs as usize })
    }

    fn suits_unit(&self) -> bool {
        matches!(self.weights, Weights::Bf16(_)) && unit_takes(self.inner, self.outputs)
    }

    /// Splits the weight rows into as many pieces for each thread.
    fn pieces(&self, threads: usize) -> Vec<Range<usize>> {
        let each = self.outputs.div_ceil(PIECE * threads).max(1);
        let together = if self.suits_unit() { UNIT_TOGETHER } else { TOGETHER };
        let piece = self.outputs.div_ceil(each * threads).max(1).next_multiple_of(together);
        let starts = (0..self.outputs).step_by(piece);
        starts.map(|from| from..(from + piece).min(self.outputs)).collect()
    }
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
    /// The caller borrows `out` for as long as this is used.
    fn of(out: &mut [f32], rows: usize, width: usize) -> Self {
        assert_eq!(out.len(), rows * width);
        Self { start: out.as_mut_ptr(), width }
    }

    #[expect(unsafe_code, reason = "a slice would cover what other threads write")]
    fn put(&self, row: usize, column: usize, value: f32) {
        debug_assert!(column < self.width);
        // SAFETY: `of` has seen that there is room for all rows and columns, and no kernel
        // is called with others.
        unsafe { self.start.add(row * self.width + column).write(value) }
    }

    /// Puts sixteen numbers of one row.
    #[cfg(target_arch = "x86_64")]
    #[expect(unsafe_code, reason = "a slice would cover what other threads write")]
    fn put_all(&self, row: usize, column: usize, values: [f32; 16]) {
        debug_assert!(column + values.len() <= self.width);
        // SAFETY: as for `put`.
        unsafe {
            let place = self.start.add(row * self.width + column);
            place.cast::<[f32; 16]>().write_unaligned(values);
        }
    }

    #[expect(unsafe_code, reason = "a slice would cover what other threads write")]
    fn get(&self, row: usize, column: usize) -> f32 {
        debug_assert!(column < self.width);
        // SAFETY: as for `put`, and a thread reads only what it has written.
        unsafe { self.start.add(row * self.width + column).read() }
    }
}

/// Whether products of so many rows with weights of a type are ones for here. Some of them
/// may be left to libtorch yet if there are more than a few.
pub(super) fn fits(rows: usize, device: Device, weights: Kind) -> bool {
    device == Device::Cpu && (few(rows) || (weights == Kind::BFloat16 && has_unit()))
}

/// Whether rows are so few that libtorch's blocked product is the slower one in any type.
pub(super) fn few(rows: usize) -> bool {
    rows <= MOST_ROWS
}

fn has_unit() -> bool {
    #[cfg(target_arch = "x86_64")]
    return tiles::is_there();
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Whether this processor has a matrix unit that multiplies with matrices in bf16 of such a
/// shape.
pub(super) fn unit_takes(inner: usize, outputs: usize) -> bool {
    #[cfg(target_arch = "x86_64")]
    return tiles::takes(inner, outputs);
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (inner, outputs);
        false
    }
}

/// Returns `x weight^T`, f32 `[T, out]`, for f32 `x` `[T, in]` and a weight `[out, in]` of
/// f32 or bf16; nothing if it is none for here: too many rows, another device, or one
/// that gradients go back through.
pub(super) fn product(x: &Tensor, weight: &Tensor) -> Option<Tensor> {
    let (rows, width) = x.size2().ok()?;
    let (rows, width) = (rows as usize, width as usize);
    if !fits(rows, x.device(), weight.kind()) || x.requires_grad() || weight.requires_grad() {
        return None;
    }
    let matrix = Matrix::of(weight).filter(|matrix| matrix.inner == width)?;
    if rows > MOST_ROWS && !matrix.suits_unit() {
        return None;
    }
    let x = x.to_kind(Kind::Float).contiguous();
    let size = [rows, matrix.outputs].map(|length| length as i64);
    let mut out = Tensor::empty(size, (Kind::Float, Device::Cpu));
    multiply(values(&x), rows, [matrix], [values_mut(&mut out)]);
    Some(out)
}

/// Multiplies rows of `x` with matrices of the same inner length, each into its own place:
/// one task for the threads, where each matrix for itself would be one.
pub(super) fn multiply<const N: usize>(
    x: &[f32],
    rows: usize,
    matrices: [Matrix<'_>; N],
    out: [&mut [f32]; N],
) {
    let threads = threads();
    let mut outputs = Vec::new();
    let mut pieces = Vec::new();
    for (place, (matrix, out)) in matrices.iter().zip(out).enumerate() {
        assert_eq!(x.len(), rows * matrix.inner);
        outputs.push(Output::of(out, rows, matrix.outputs));
        pieces.extend(matrix.pieces(threads).into_iter().map(|columns| (place, columns)));
    }
    let x = Rows::of(x, rows, &matrices, threads);
    team::run(pieces.len(), threads, &|piece| {
        let (place, columns) = &pieces[piece];
        x.multiply(rows, matrices[*place], columns.clone(), &outputs[*place]);
    });
}

/// Puts `silu(x gate^T) * (x up^T)` into `gated`, where `upper` is room for the second
/// factor. `narrow` rounds both products to bf16.
pub(super) fn gated(
    x: &[f32],
    rows: usize,
    [gate, up]: [Matrix<'_>; 2],
    narrow: bool,
    [gated, upper]: [&mut [f32]; 2],
) {
    let threads = threads();
    assert!(x.len() == rows * gate.inner && x.len() == rows * up.inner);
    assert_eq!(gate.outputs, up.outputs);
    let left = Output::of(gated, rows, gate.outputs);
    let right = Output::of(upper, rows, up.outputs);
    let pieces = gate.pieces(threads);
    let x = Rows::of(x, rows, &[gate, up], threads);
    let typed = |x: f32| if narrow { pointwise::to_bf16(x) } else { x };
    team::run(pieces.len(), threads, &|piece| {
        let columns = &pieces[piece];
        x.multiply(rows, gate, columns.clone(), &left);
        x.multiply(rows, up, columns.clone(), &right);
        for row in 0..rows {
            for column in columns.clone() {
                let (x, factor) = (typed(left.get(row, column)), typed(right.get(row, column)));
                left.put(row, column, pointwise::silu(x) * factor);
            }
        }
    });
}

/// Returns the numbers of an f32 tensor; nothing if it lies elsewhere or otherwise.
pub(super) fn numbers(tensor: &Tensor) -> Option<&[f32]> {
    let here = tensor.device() == Device::Cpu && tensor.is_contiguous();
    (here && tensor.kind() == Kind::Float).then(|| values(tensor))
}

/// Returns the numbers of a contiguous tensor of this machine's memory, whose kind is `T`'s.
#[expect(unsafe_code, reason = "tch gives no slice of a tensor")]
fn values<T>(tensor: &Tensor) -> &[T] {
    debug_assert!(tensor.is_contiguous() && tensor.device() == Device::Cpu);
    // SAFETY: libtorch keeps `numel` numbers there as long as the tensor lives.
    unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast(), tensor.numel()) }
}

/// Returns those of a tensor that was made as f32 in this machine's memory.
#[expect(unsafe_code, reason = "tch gives no slice of a tensor")]
pub(super) fn values_mut(tensor: &mut Tensor) -> &mut [f32] {
    assert!(numbers(tensor).is_some());
    // SAFETY: libtorch keeps `numel` numbers there as long as the tensor lives.
    unsafe { std::slice::from_raw_parts_mut(tensor.data_ptr().cast(), tensor.numel()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers in -1 to 1 that bf16 holds exactly.
    fn numbers(seed: u64, count: usize) -> Vec<f32> {
        drawn(seed, count).into_iter().map(|x| bf16::from_f32(x).to_f32()).collect()
    }

    /// Numbers in -1 to 1 of all 24 bits.
    pub(super) fn drawn(seed: u64, count: usize) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            ((state >> 40) as f32) / 8_388_608.0 - 1.0
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
            let check = |name: &str, found: &[f32]| {
                for (place, found) in found.iter().enumerate() {
                    let wanted = exact(place / outputs, place % outputs);
                    let off = (f64::from(*found) - wanted).abs();
                    assert!(off <= bound, "{name} {rows}x{inner}x{outputs}: {off}");
                }
            };
            check("product", values(&out));
            for (name, kernel) in kernels() {
                for weights in [Weights::F32(&w), Weights::Bf16(&narrow)] {
                    let mut found = vec![0.0; rows * outputs];
                    let output = Output::of(&mut found, rows, outputs);
                    kernel(&x, (rows, inner), (weights, 0..outputs), &output);
                    check(name, &found);
                }
            }
        }
    }

    /// All that this processor can do.
    fn kernels() -> Vec<(&'static str, Kernel)> {
        let plain: Kernel = plain::multiply;
        let mut kernels = vec![("plain", plain)];
        #[cfg(target_arch = "x86_64")]
        if wide::is_there() {
            kernels.push(("wide", wide::multiply));
        }
        #[cfg(target_arch = "x86_64")]
        if wide512::is_there() {
            kernels.push(("wide512", wide512::multiply));
        }
        kernels
    }

    /// Whatever rows and weight rows are taken together with, in each kernel.
    #[test]
    fn a_sum_is_the_same_in_any_company() {
        let (inner, outputs) = (83, 23);
        let (x, w) = (numbers(8, 16 * inner), numbers(9, outputs * inner));
        for (name, kernel) in kernels() {
            let found = |rows: usize, columns: Range<usize>| {
                let mut found = vec![0.0; rows * outputs];
                let output = Output::of(&mut found, rows, outputs);
                kernel(&x[..rows * inner], (rows, inner), (Weights::F32(&w), columns), &output);
                found
            };
            let all = found(16, 0..outputs);
            for rows in 1..=16 {
                assert_eq!(found(rows, 0..outputs), all[..rows * outputs], "{name}, {rows} rows");
            }
            for column in 0..outputs {
                let alone = found(9, column..column + 1);
                for row in 0..9 {
                    let place = row * outputs + column;
                    assert_eq!(alone[place], all[place], "{name}, {row}, {column}");
                }
            }
        }
    }

    #[test]
    fn every_thread_has_as_many_pieces() {
        let weight = Tensor::zeros([576, 4], (Kind::Float, Device::Cpu));
        let pieces = |outputs: i64, threads: usize| {
            Matrix::of(&weight.narrow(0, 0, outputs)).unwrap().pieces(threads)
        };
        assert_eq!(pieces(576, 2), [0..96, 96..192, 192..288, 288..384, 384..480, 480..576]);
        assert_eq!(pieces(192, 2), [0..96, 96..192]);
        assert_eq!(pieces(7, 2), [0..4, 4..7]);
        assert_eq!(pieces(1, 8).len(), 1);
        assert_eq!(pieces(300, 1), [0..100, 100..200, 200..300]);
    }

    #[test]
    fn several_products_are_one_task_and_the_same_numbers() {
        let (rows, inner) = (3, 40);
        let x = numbers(10, rows * inner);
        let weights = [5, 130].map(|outputs| tensor(&numbers(11, outputs * inner), inner));
        let [left, right] = weights.each_ref().map(|weight| Matrix::of(weight).unwrap());
        let (mut first, mut second) = (vec![0.0; rows * 5], vec![0.0; rows * 130]);
        multiply(&x, rows, [left, right], [&mut first, &mut second]);
        for (found, weight) in [&first, &second].into_iter().zip(&weights) {
            let wanted = product(&tensor(&x, inner), weight).unwrap();
            assert_eq!(found.as_slice(), values::<f32>(&wanted));
        }
    }

    #[test]
    fn a_gate_is_silu_times_the_other() {
        let (rows, inner, outputs) = (3, 16, 70);
        let x = numbers(12, rows * inner);
        let [gate, up] = [13, 14].map(|seed| tensor(&numbers(seed, outputs * inner), inner));
        let product = |weight: &Tensor| product(&tensor(&x, inner), weight).unwrap();
        let wanted = product(&gate).silu() * product(&up);
        let matrices = [&gate, &up].map(|weight| Matrix::of(weight).unwrap());
        let (mut found, mut upper) = (vec![0.0; rows * outputs], vec![0.0; rows * outputs]);
        gated(&x, rows, matrices, false, [&mut found, &mut upper]);
        for (found, wanted) in found.iter().zip(values::<f32>(&wanted)) {
            assert!((found - wanted).abs() <= 1e-6 * (1.0 + wanted.abs()), "{found}, {wanted}");
        }
    }

    /// Shapes that the matrix unit takes, where there is one.
    #[test]
    fn tasks_of_bf16_weights_are_their_products() {
        let (rows, inner, outputs) = (7, 64, 48);
        let x = numbers(14, rows * inner);
        let weights = [15, 16]
            .map(|seed| tensor(&numbers(seed, outputs * inner), inner).to_kind(Kind::BFloat16));
        let matrices = weights.each_ref().map(|weight| Matrix::of(weight).unwrap());
        let room = || vec![0.0; rows * outputs];
        let (mut first, mut second) = (room(), room());
        multiply(&x, rows, matrices, [&mut first, &mut second]);
        let products =
            weights.each_ref().map(|weight| product(&tensor(&x, inner), weight).unwrap());
        for (found, wanted) in [&first, &second].into_iter().zip(&products) {
            assert_eq!(found.as_slice(), values::<f32>(wanted));
        }
        let (mut found, mut upper) = (room(), room());
        gated(&x, rows, matrices, false, [&mut found, &mut upper]);
        for (place, found) in found.iter().enumerate() {
            assert_eq!(*found, pointwise::silu(first[place]) * second[place]);
        }
        let many = tensor(&numbers(17, 40 * inner), inner);
        assert_eq!(product(&many, &weights[0]).is_some(), unit_takes(inner, outputs));
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

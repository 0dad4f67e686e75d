//! The product in the processor's matrix unit (AMX), for weights in bf16: 32 weight rows
//! meet 32 columns, 32 numbers of each at a time: several rows of `x` take little longer
//! than one, for which the weights have to be read as well.
//!
//! The unit multiplies bf16 with bf16 and adds up in f32. A number of `x` is made three
//! columns: itself rounded to bf16, what that leaves, rounded, and what is left then,
//! which is all of it: three times eight bits are those of an f32. Each product is exact,
//! so the result is that of f32 numbers but for the order of sums, and for parts below
//! 1e-38, which the unit takes for 0. Where all of `x` is of bf16 one column does, and the
//! sums are the same: those of the others would be 0.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::transmute;
use std::ops::Range;
use std::sync::{Mutex, OnceLock, PoisonError};

use half::bf16;

use super::{Output, UNIT_TOGETHER as TOGETHER, team};

/// Rows of a tile, and its columns of f32 or of pairs of bf16.
const SIDE: usize = 16;
/// Numbers of a weight row in a tile.
const DEPTH: usize = 32;
/// Bytes of a row of a tile.
const ROW_BYTES: usize = 64;

/// Asks the system, once, whether this process may use the unit.
pub(super) fn is_there() -> bool {
    static THERE: OnceLock<bool> = OnceLock::new();
    *THERE.get_or_init(|| has_unit() && super::wide512::is_there() && is_permitted())
}

fn has_unit() -> bool {
    // Intel's manual, CPUID: leaf 7, EDX: bit 22 products of bf16, bit 24 tiles.
    const WANTED: u32 = 1 << 22 | 1 << 24;
    __cpuid(0).eax >= 7
        && __cpuid_count(7, 0).edx & WANTED == WANTED
        && is_x86_feature_detected!("avx512bf16")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
}

/// The tiles are 8 KiB of a thread's state: Linux wants to be asked before they are used.
#[cfg(target_os = "linux")]
#[expect(unsafe_code, reason = "a system call that the C library has no name for")]
fn is_permitted() -> bool {
    const REQUEST_PERMISSION: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: both arguments are numbers.
    unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

/// Whether the unit multiplies with weights of such a shape: there is no part of a tile.
pub(super) fn takes(inner: usize, outputs: usize) -> bool {
    let whole = inner.is_multiple_of(DEPTH) && outputs.is_multiple_of(SIDE);
    whole && inner > 0 && is_there()
}

/// Asks for the 2 KiB that a step along twice sixteen weight rows takes, in the order in
/// which they lie.
macro_rules! fetch {
    () => {
        ".if {fetch}
        .irp line, 0, 64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 960
        prefetcht1 [{next} + \\line]
        prefetcht1 [{next} + \\line + 1024]
        .endr
        add {next}, 2048
        .endif"
    };
}

/// A tile of `x`: pairs of numbers that follow each other in a row, of one row and part
/// in each column.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Tile([[u32; SIDE]; SIDE]);

/// Sums of 16 weight rows with 16 columns.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Sums([[f32; SIDE]; SIDE]);

impl Sums {
    const ZERO: Self = Self([[0.0; SIDE]; SIDE]);
}

/// Some rows of `x` as columns.
pub(super) struct Columns {
    /// Those of a group of rows one after another, then the next group's.
    tiles: Vec<Tile>,
    rows: usize,
    /// Tiles of a group.
    deep: usize,
    /// Columns of a row.
    parts: usize,
}

impl Columns {
    /// Lays out rows of a length that [`takes`] has seen.
    pub(super) fn of(x: &[f32], rows: usize, threads: usize) -> Self {
        assert!(is_there());
        let inner = x.len() / rows.max(1);
        assert!(inner.is_multiple_of(DEPTH) && inner * rows == x.len());
        let narrow = x.iter().all(|x| x.to_bits() & 0xffff == 0);
        Self::in_parts(x, (rows, inner), if narrow { 1 } else { 3 }, threads)
    }

    fn in_parts(x: &[f32], (rows, inner): (usize, usize), parts: usize, threads: usize) -> Self {
        let (deep, each) = (inner / DEPTH, SIDE / parts);
        let mut tiles = vec![Tile([[0; SIDE]; SIDE]); rows.div_ceil(each) * deep];
        let groups = tiles.chunks_mut(deep).zip(x.chunks(each * inner));
        let groups: Vec<_> = groups.map(Mutex::new).collect();
        team::run(groups.len(), threads, &|group| {
            let mut group = groups[group].lock().unwrap_or_else(PoisonError::into_inner);
            let (tiles, x) = &mut *group;
            #[expect(unsafe_code, reason = "vector instructions")]
            // SAFETY: it is there.
            unsafe {
                spread(tiles, x, inner, parts);
            }
        });
        drop(groups);
        Self { tiles, rows, deep, parts }
    }

    /// Multiplies all rows with some weight rows: a whole number of tiles of them.
    pub(super) fn multiply(&self, weights: &[bf16], columns: Range<usize>, output: &Output) {
        let inner = self.deep * DEPTH;
        assert!(columns.start.is_multiple_of(SIDE) && columns.end.is_multiple_of(SIDE));
        assert!(columns.end <= output.width);
        let weight_rows = |from: usize| &weights[from * inner..][..SIDE * inner];
        let _unit = Unit::take();
        let groups = self.tiles.len() / self.deep;
        for pair in (0..groups).step_by(2) {
            for from in columns.clone().step_by(TOGETHER) {
                // The last sixteen may have none beside them: their sums are not looked at.
                let beside = from + SIDE < columns.end;
                let upper = if beside { from + SIDE } else { from };
                let left = [weight_rows(from), weight_rows(upper)];
                let mut sums = [Sums::ZERO; 4];
                let next = from + TOGETHER;
                // With one group the processor reads ahead well enough by itself.
                match pair == 0 && groups > 1 && next < columns.end {
                    true => {
                        self.block::<true>(left, pair, weights[next * inner..].as_ptr(), &mut sums);
                    }
                    false => self.block::<false>(left, pair, weights.as_ptr(), &mut sums),
                }
                for group in pair..groups.min(pair + 2) {
                    let [low, high] = [&sums[(group - pair) * 2], &sums[(group - pair) * 2 + 1]];
                    self.put(low, group, from, output);
                    if beside {
                        self.put(high, group, upper, output);
                    }
                }
            }
        }
    }

    /// Multiplies twice sixteen weight rows with one group or two. With `FETCH` the memory
    /// is asked meanwhile for as many weights from `next` on.
    #[expect(unsafe_code, reason = "instructions that Rust has no names for")]
    fn block<const FETCH: bool>(
        &self,
        [low, high]: [&[bf16]; 2],
        pair: usize,
        next: *const bf16,
        sums: &mut [Sums; 4],
    ) {
        assert!(low.len() == SIDE * self.deep * DEPTH && high.len() == low.len());
        let tiles = &self.tiles[pair * self.deep..];
        let stride = self.deep * ROW_BYTES;
        // SAFETY: the weight rows are `deep` tiles long and `stride` bytes apart, a group
        // has `deep` tiles, there is room for four tiles of sums, the caller holds the
        // unit, and to ask the memory for what is not there does nothing.
        unsafe {
            if tiles.len() >= 2 * self.deep {
                asm!(
                    "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                    "2:",
                    "tileloadd tmm4, [{low} + {stride}*1]",
                    "tileloadd tmm6, [{left} + {row}*1]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm5, [{high} + {stride}*1]",
                    "tdpbf16ps tmm1, tmm5, tmm6",
                    "tileloadd tmm7, [{right} + {row}*1]",
                    "tdpbf16ps tmm2, tmm4, tmm7",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    fetch!(),
                    "add {low}, 64", "add {high}, 64", "add {left}, 1024", "add {right}, 1024",
                    "dec {deep}",
                    "jnz 2b",
                    "tilestored [{out} + {row}*1], tmm0",
                    "tilestored [{out} + {row}*1 + 1024], tmm1",
                    "tilestored [{out} + {row}*1 + 2048], tmm2",
                    "tilestored [{out} + {row}*1 + 3072], tmm3",
                    fetch = const FETCH as i32, next = inout(reg) next => _,
                    low = inout(reg) low.as_ptr() => _, high = inout(reg) high.as_ptr() => _,
                    left = inout(reg) tiles.as_ptr() => _,
                    right = inout(reg) tiles.as_ptr().add(self.deep) => _,
                    deep = inout(reg) self.deep => _,
                    stride = in(reg) stride, row = in(reg) ROW_BYTES, out = in(reg) sums,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            } else {
                asm!(
                    "tilezero tmm0", "tilezero tmm1",
                    "2:",
                    "tileloadd tmm4, [{low} + {stride}*1]",
                    "tileloadd tmm6, [{left} + {row}*1]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm5, [{high} + {stride}*1]",
                    "tdpbf16ps tmm1, tmm5, tmm6",
                    fetch!(),
                    "add {low}, 64", "add {high}, 64", "add {left}, 1024",
                    "dec {deep}",
                    "jnz 2b",
                    "tilestored [{out} + {row}*1], tmm0",
                    "tilestored [{out} + {row}*1 + 1024], tmm1",
                    fetch = const FETCH as i32, next = inout(reg) next => _,
                    low = inout(reg) low.as_ptr() => _, high = inout(reg) high.as_ptr() => _,
                    left = inout(reg) tiles.as_ptr() => _,
                    deep = inout(reg) self.deep => _,
                    stride = in(reg) stride, row = in(reg) ROW_BYTES, out = in(reg) sums,
                    out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm5") _, out("tmm6") _,
                    options(nostack),
                );
            }
        }
    }

    /// Adds up the parts of each row of a group and writes its sixteen sums.
    fn put(&self, sums: &Sums, group: usize, column: usize, output: &Output) {
        let each = SIDE / self.parts;
        let first = group * each;
        for row in first..self.rows.min(first + each) {
            let place = (row - first) * self.parts;
            // The smallest first: less is lost.
            let mut told = sums.0.map(|sums| sums[place + self.parts - 1]);
            for part in (0..self.parts - 1).rev() {
                for (told, sums) in told.iter_mut().zip(&sums.0) {
                    *told += sums[place + part];
                }
            }
            output.put_all(row, column, told);
        }
    }
}

/// Rounds, and rounds what is left, and lays the parts side by side.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn spread(tiles: &mut [Tile], x: &[f32], inner: usize, parts: usize) {
    let infinity = _mm512_set1_ps(f32::INFINITY);
    for (row, x) in x.chunks_exact(inner).enumerate() {
        for (half, x) in x.as_chunks::<SIDE>().0.iter().enumerate() {
            let tile = &mut tiles[half / 2].0;
            #[expect(unsafe_code, reason = "any numbers are a vector")]
            // SAFETY: they are sixteen.
            let mut rest = unsafe { transmute::<[f32; SIDE], __m512>(*x) };
            for part in 0..parts {
                let rounded = _mm512_cvtneps_pbh(rest);
                #[expect(unsafe_code, reason = "the same bits")]
                // SAFETY: both are 256 bits.
                let bits = unsafe { transmute::<__m256bh, __m256i>(rounded) };
                let wide = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits));
                let wide = _mm512_castsi512_ps(wide);
                // Infinity leaves nothing, not a NaN.
                let finite = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(_mm512_abs_ps(wide), infinity);
                rest = _mm512_maskz_sub_ps(finite, rest, wide);
                #[expect(unsafe_code, reason = "the same bits")]
                // SAFETY: both are 256 bits.
                let pairs = unsafe { transmute::<__m256i, [u32; SIDE / 2]>(bits) };
                let from = half % 2 * (SIDE / 2);
                for (line, pair) in tile[from..from + SIDE / 2].iter_mut().zip(pairs) {
                    line[row * parts + part] = pair;
                }
            }
        }
    }
}

/// The unit as this thread has set it up. Whoever had it before finds it as it was: a
/// product of libtorch may remember how it has set it up, and not look again.
struct Unit {
    before: Setup,
}

/// Intel's manual, LDTILECFG: the palette, then from byte 16 on the bytes of a row of each
/// tile, and from byte 48 on its rows.
#[repr(C, align(64))]
struct Setup([u8; 64]);

impl Unit {
    #[expect(unsafe_code, reason = "instructions that Rust has no names for")]
    fn take() -> Self {
        assert!(is_there());
        let mut setup = Setup([0; 64]);
        setup.0[0] = 1;
        for tile in 0..8 {
            setup.0[16 + 2 * tile] = ROW_BYTES as u8;
            setup.0[48 + tile] = SIDE as u8;
        }
        let mut before = Setup([0; 64]);
        // SAFETY: the processor has the unit, and 64 bytes are read and written.
        unsafe {
            asm!("sttilecfg [{}]", in(reg) &raw mut before, options(nostack, preserves_flags));
            asm!("ldtilecfg [{}]", in(reg) &raw const setup, options(nostack, preserves_flags));
        }
        Self { before }
    }
}

impl Drop for Unit {
    #[expect(unsafe_code, reason = "instructions that Rust has no names for")]
    fn drop(&mut self) {
        // SAFETY: this is how it was.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const self.before, options(nostack, preserves_flags));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::drawn as numbers;
    use super::*;

    fn weights(inner: usize, outputs: usize) -> Vec<bf16> {
        numbers(1, inner * outputs).into_iter().map(bf16::from_f32).collect()
    }

    fn multiplied(x: &Columns, weights: &[bf16], outputs: usize, piece: usize) -> Vec<f32> {
        let mut found = vec![0.0; x.rows * outputs];
        let output = Output::of(&mut found, x.rows, outputs);
        for from in (0..outputs).step_by(piece) {
            x.multiply(weights, from..outputs.min(from + piece), &output);
        }
        found
    }

    /// Whether there is something to test; says so if not.
    fn can() -> bool {
        if !is_there() {
            eprintln!("skipped: this processor has no matrix unit (AMX)");
        }
        is_there()
    }

    #[test]
    fn it_is_the_product_of_f32_numbers() {
        if !can() {
            return;
        }
        for (rows, inner, outputs) in
            [(1, 32, 16), (2, 64, 48), (5, 576, 32), (6, 96, 208), (17, 1536, 64), (40, 32, 16)]
        {
            let (x, w) = (numbers(2, rows * inner), weights(inner, outputs));
            let columns = Columns::of(&x, rows, 2);
            assert_eq!(columns.parts, 3);
            let found = multiplied(&columns, &w, outputs, 128);
            // A sum of so many terms below 1, in three parts, each rounded to 24 bits.
            let bound = 6e-8 * inner as f64 * 2.0;
            for (place, found) in found.iter().enumerate() {
                let (row, column) = (place / outputs, place % outputs);
                let pairs = x[row * inner..][..inner].iter().zip(&w[column * inner..][..inner]);
                let wanted: f64 = pairs.map(|(x, w)| f64::from(*x) * w.to_f64()).sum();
                let off = (f64::from(*found) - wanted).abs();
                assert!(off <= bound, "{rows}x{inner}x{outputs}: {off}");
            }
        }
    }

    /// Whatever rows and weight rows are taken together with.
    #[test]
    fn a_sum_is_the_same_in_any_company() {
        if !can() {
            return;
        }
        let (inner, outputs) = (96, 112);
        let (x, w) = (numbers(3, 40 * inner), weights(inner, outputs));
        let all = multiplied(&Columns::of(&x, 40, 1), &w, outputs, outputs);
        for rows in [1, 2, 5, 6, 10, 11, 16, 39] {
            let some = Columns::of(&x[..rows * inner], rows, 2);
            for piece in [32, 64, outputs] {
                let found = multiplied(&some, &w, outputs, piece);
                assert_eq!(found, all[..rows * outputs], "{rows} rows in pieces of {piece}");
            }
        }
        for (row, all) in all.chunks(outputs).enumerate() {
            let alone = Columns::of(&x[row * inner..][..inner], 1, 1);
            assert_eq!(multiplied(&alone, &w, outputs, outputs), all, "row {row}");
        }
    }

    /// An engine in bf16 has such rows: two of three columns would be for nothing.
    #[test]
    fn rows_in_bf16_are_one_column_each_and_the_same_sums() {
        if !can() {
            return;
        }
        let (rows, inner, outputs) = (18, 64, 48);
        let x: Vec<_> =
            numbers(4, rows * inner).into_iter().map(|x| bf16::from_f32(x).to_f32()).collect();
        let w = weights(inner, outputs);
        let one = Columns::of(&x, rows, 1);
        assert_eq!((one.parts, one.tiles.len()), (1, 2 * inner / DEPTH));
        let three = Columns::in_parts(&x, (rows, inner), 3, 1);
        assert_eq!(
            multiplied(&one, &w, outputs, outputs),
            multiplied(&three, &w, outputs, outputs)
        );
    }

    #[test]
    fn what_is_no_number_stays_so_in_its_row() {
        if !can() {
            return;
        }
        let (inner, outputs) = (64, 16);
        let w = weights(inner, outputs);
        for broken in [f32::NAN, f32::INFINITY, -f32::INFINITY, f32::from_bits(u32::MAX)] {
            let mut x = numbers(5, 3 * inner);
            let wanted = multiplied(&Columns::of(&x, 3, 1), &w, outputs, outputs);
            x[inner + 7] = broken;
            let found = multiplied(&Columns::of(&x, 3, 1), &w, outputs, outputs);
            assert!(found[outputs..2 * outputs].iter().all(|sum| !sum.is_finite()), "{broken}");
            assert_eq!(found[..outputs], wanted[..outputs]);
            assert_eq!(found[2 * outputs..], wanted[2 * outputs..]);
        }
    }

    #[expect(unsafe_code, reason = "instructions that Rust has no names for")]
    fn setup() -> [u8; 64] {
        let mut setup = Setup([0; 64]);
        // SAFETY: 64 bytes are written.
        unsafe { asm!("sttilecfg [{}]", in(reg) &raw mut setup, options(nostack)) };
        setup.0
    }

    /// Else whoever counts on his own setup would meet another, or none.
    #[test]
    fn the_unit_is_left_as_it_was() {
        if !can() {
            return;
        }
        assert_eq!(setup(), [0; 64]);
        let outer = Unit::take();
        let mine = setup();
        assert_eq!(mine[0], 1);
        let x = Columns::of(&numbers(6, 32), 1, 1);
        multiplied(&x, &weights(32, 16), 16, 16);
        assert_eq!(setup(), mine);
        drop(outer);
        assert_eq!(setup(), [0; 64]);
    }

    #[test]
    fn parts_of_tiles_are_left_to_others() {
        assert_eq!(takes(64, 48), is_there());
        assert!(!takes(48, 64) && !takes(64, 40) && !takes(0, 16));
    }
}

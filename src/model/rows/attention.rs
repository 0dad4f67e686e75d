//! Attention of one new token for each of a few sequences.
//!
//! The queries that share a key head meet its keys in the same kernel as the rows of `x`
//! meet weights, for they lie in memory alike.

use tch::Tensor;

use super::{Output, Weights, kernel, team, threads};

/// Keys and values of a sequence in one layer, as its cache holds them.
pub(in crate::model) struct Past<'a> {
    keys: &'a [f32],
    values: &'a [f32],
    heads: usize,
    /// Tokens.
    length: usize,
    /// Numbers of a head for one token.
    width: usize,
    /// Numbers from one head to the next.
    apart: usize,
}

impl<'a> Past<'a> {
    /// Takes `[1, key heads, L, D]` of each, the beginning of what there is room for.
    pub(in crate::model) fn of(keys: &'a Tensor, values: &'a Tensor) -> Self {
        let (size, stride) = (keys.size(), keys.stride());
        assert!(values.size() == size && values.stride() == stride, "keys and values lie alike");
        assert!(size.len() == 4 && size[0] == 1 && stride[2..] == [size[3], 1]);
        let [heads, length, width, apart] =
            [size[1], size[2], size[3], stride[1]].map(|count| count as usize);
        let count = (heads - 1) * apart + length * width;
        Self { keys: span(keys, count), values: span(values, count), heads, length, width, apart }
    }

    /// Returns the attention of some queries, one after another, over the keys of a head.
    fn attend(&self, head: usize, queries: &[f32]) -> Vec<f32> {
        let Self { length, width, .. } = *self;
        let place = head * self.apart..head * self.apart + length * width;
        let (keys, values) = (&self.keys[place.clone()], &self.values[place]);
        let count = queries.len() / width;
        let mut scores = vec![0.0; count * length];
        let output = Output::of(&mut scores, count, length);
        kernel()(queries, (count, width), (Weights::F32(keys), 0..length), &output);
        let mut attended = vec![0.0; queries.len()];
        let rows = scores.chunks_exact_mut(length).zip(attended.chunks_exact_mut(width));
        for (scores, attended) in rows {
            softmax(scores, 1.0 / (width as f32).sqrt());
            mix(scores, values, attended);
        }
        attended
    }
}

/// Returns the numbers from the first of a tensor on. There must be so many, all of them
/// written at some time.
#[expect(unsafe_code, reason = "tch gives no slice of a tensor")]
fn span(tensor: &Tensor, count: usize) -> &[f32] {
    assert!(tensor.kind() == tch::Kind::Float && tensor.device() == tch::Device::Cpu);
    // SAFETY: size and stride say that the last number is there, and a cache begins with
    // zeros wherever it holds nothing.
    unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast(), count) }
}

/// Puts the attention of each sequence's new token, `[T, heads * D]`, into `out`. `queries`
/// is of the same form, and the token itself the last of the past.
pub(in crate::model) fn attend(queries: &[f32], pasts: &[Past<'_>], out: &mut [f32]) {
    let Some(Past { heads, .. }) = pasts.first() else { return };
    let all = queries.len() / pasts.len();
    let group = all / heads;
    let output = Output::of(out, pasts.len(), all);
    team::run(pasts.len() * heads, threads(), &|piece| {
        let (sequence, head) = (piece / heads, piece % heads);
        let attended = pasts[sequence].attend(head, &queries[piece * group..][..group]);
        for (place, number) in attended.into_iter().enumerate() {
            output.put(sequence, head * group + place, number);
        }
    });
}

/// Turns scores, which are multiplied with `scale`, into shares of 1.
fn softmax(scores: &mut [f32], scale: f32) {
    let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for score in scores.iter_mut() {
        *score = ((*score - most) * scale).exp();
        sum += f64::from(*score);
    }
    let share = (1.0 / sum) as f32;
    scores.iter_mut().for_each(|score| *score *= share);
}

/// Adds up the rows of `values`, each times its share.
fn mix(shares: &[f32], values: &[f32], sum: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if super::wide::is_there() {
        #[expect(unsafe_code, reason = "vector instructions")]
        // SAFETY: the processor has them.
        unsafe {
            mix_wide(shares, values, sum);
        }
        return;
    }
    mix_rows(shares, values, sum);
}

/// The same, compiled for wider registers.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn mix_wide(shares: &[f32], values: &[f32], sum: &mut [f32]) {
    mix_rows(shares, values, sum);
}

#[inline(always)]
fn mix_rows(shares: &[f32], values: &[f32], sum: &mut [f32]) {
    for (share, row) in shares.iter().zip(values.chunks_exact(sum.len())) {
        for (sum, value) in sum.iter_mut().zip(row) {
            *sum += share * value;
        }
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    /// Numbers from -2 to 2 that differ from place to place.
    fn numbers(count: i64, step: i64) -> Tensor {
        let numbers: Vec<f32> =
            (0..count).map(|at| ((at * step) % 101) as f32 / 25.0 - 2.0).collect();
        Tensor::from_slice(&numbers)
    }

    /// A cache has room for more than it holds.
    fn held(heads: i64, length: i64, width: i64, step: i64) -> Tensor {
        let all = Tensor::zeros([heads, length + 5, width], (Kind::Float, Device::Cpu));
        let new = numbers(heads * length * width, step).view([heads, length, width]);
        all.narrow(1, 0, length).copy_(&new);
        all.narrow(1, 0, length).unsqueeze(0)
    }

    #[test]
    fn it_is_that_of_libtorch_for_each_sequence() {
        let (heads, key_heads, width) = (6, 2, 16);
        let part = |length: i64, step: i64| held(key_heads, length, width, step);
        let held = [1, 7, 300].map(|length| (part(length, 37), part(length, 53)));
        let queries = numbers(3 * heads * width, 17);
        let pasts: Vec<_> = held.iter().map(|(keys, values)| Past::of(keys, values)).collect();
        let mut found = vec![0.0; (3 * heads * width) as usize];
        attend(super::super::numbers(&queries).unwrap(), &pasts, &mut found);
        let found = Tensor::from_slice(&found).view([3, heads, width]);
        for (sequence, (keys, values)) in held.iter().enumerate() {
            let queries = queries.view([3, heads, 1, width]).narrow(0, sequence as i64, 1);
            let none = None::<&Tensor>;
            let wanted = Tensor::scaled_dot_product_attention(
                &queries, keys, values, none, 0.0, false, None, true,
            );
            let found = found.get(sequence as i64).view([1, heads, 1, width]);
            let off = (found - wanted).abs().max().double_value(&[]);
            assert!(off < 2e-6, "sequence {sequence}: {off}");
        }
    }

    #[test]
    fn a_sequence_does_not_depend_on_its_neighbours() {
        let both = |length: i64| (held(2, length, 8, 31), held(2, length, 8, 43));
        let held = [3, 40, 9].map(both);
        let queries = numbers(3 * 32, 19);
        let queries = super::super::numbers(&queries).unwrap();
        let pasts: Vec<_> = held.iter().map(|(keys, values)| Past::of(keys, values)).collect();
        let mut together = vec![0.0; 3 * 32];
        attend(queries, &pasts, &mut together);
        for (place, past) in pasts.chunks(1).enumerate() {
            let mut alone = vec![0.0; 32];
            attend(&queries[place * 32..][..32], past, &mut alone);
            assert_eq!(alone, together[place * 32..][..32]);
        }
    }
}

//! Packs samples one after the other into passes of bounded size. No padding:
//! the linear layers see one long run of tokens, attention sees each sequence.

use tch::{Device, Kind, Tensor};

use super::distil::Further;
use super::sample::Sample;

/// One pass through the model.
#[derive(Debug)]
pub(super) struct Pack<'a> {
    /// The samples of this pass, in order, those without trained tokens too.
    samples: Vec<&'a Sample>,
    /// Place of the first of them in the batch.
    first: usize,
    /// Token ids, sequences one after the other. The last id of each sequence
    /// predicts nothing that is trained and is left out.
    pub(super) ids: Tensor,
    /// Length of each sequence.
    pub(super) lengths: Vec<i64>,
    /// Rows of the hidden states that predict the trained tokens.
    pub(super) rows: Tensor,
    /// The trained tokens' ids, `[N, 1 + k]`: the token itself, then the ids whose
    /// log-probs are wanted beside its own.
    pub(super) targets: Tensor,
}

/// Cuts samples into passes of at most `budget` tokens, in order. A sample that
/// alone is longer is a pass of its own; one without trained tokens is left out
/// of the pass, not of the count.
pub(super) fn packs<'a>(
    samples: &[&'a Sample],
    further: Further<'_>,
    budget: usize,
    device: Device,
) -> Vec<Pack<'a>> {
    let mut packs = Vec::new();
    let (mut start, mut size) = (0, 0);
    for (end, sample) in samples.iter().enumerate() {
        let length = if is_trained(sample) { sample.input_length() } else { 0 };
        if size > 0 && size + length > budget {
            packs.push(pack(samples, further, start..end, device));
            (start, size) = (end, 0);
        }
        size += length;
    }
    if start < samples.len() {
        packs.push(pack(samples, further, start..samples.len(), device));
    }
    packs.retain(|pack| pack.rows.numel() > 0);
    packs
}

/// Whether anything of a sample goes through the model.
fn is_trained(sample: &Sample) -> bool {
    sample.trained().next().is_some()
}

fn pack<'a>(
    samples: &[&'a Sample],
    further: Further<'_>,
    range: std::ops::Range<usize>,
    device: Device,
) -> Pack<'a> {
    let first = range.start;
    let (mut ids, mut lengths, mut rows, mut targets) = (vec![], vec![], vec![], vec![]);
    for index in range.clone().filter(|index| is_trained(samples[*index])) {
        let sample = samples[index];
        let offset = ids.len();
        let whole = sample.prompt_ids.iter().chain(&sample.response_ids);
        ids.extend(whole.take(sample.input_length()).map(|id| i64::from(*id)));
        lengths.push(sample.input_length() as i64);
        for token in sample.trained() {
            // The row before a token predicts it.
            rows.push((offset + sample.prompt_ids.len() + token - 1) as i64);
            let own = i64::from(sample.response_ids[token]);
            targets.push(own);
            // Where there is no further id the place is filled, and never read.
            targets.extend((0..further.k).map(|k| further.id(index, token, k).unwrap_or(own)));
        }
    }
    let tensor = |values: &[i64]| Tensor::from_slice(values).to_device(device);
    Pack {
        samples: samples[range].to_vec(),
        first,
        ids: tensor(&ids),
        lengths,
        rows: tensor(&rows),
        targets: tensor(&targets).view([-1, 1 + further.k as i64]),
    }
}

impl Pack<'_> {
    /// Returns sample (its place in the batch) and token of each trained token.
    pub(super) fn tokens(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let numbered = (self.first..).zip(&self.samples);
        numbered.flat_map(|(index, sample)| sample.trained().map(move |token| (index, token)))
    }

    /// Returns how many trained tokens each sample has.
    pub(super) fn trained_lengths(&self) -> Vec<i64> {
        self.samples.iter().map(|sample| sample.trained().count() as i64).collect()
    }

    /// Collects one number of each trained token.
    pub(super) fn column(&self, value: impl Fn(usize, usize) -> f32) -> Tensor {
        let column: Vec<f32> = self.tokens().map(|(sample, token)| value(sample, token)).collect();
        Tensor::from_slice(&column).to_kind(Kind::Float).to_device(self.ids.device())
    }

    /// Collects `k` numbers of each trained token.
    pub(super) fn columns(&self, k: usize, value: impl Fn(usize, usize, usize) -> f32) -> Tensor {
        let places = |(sample, token)| (0..k).map(move |place| (sample, token, place));
        let all: Vec<f32> =
            self.tokens().flat_map(places).map(|(s, t, place)| value(s, t, place)).collect();
        let columns = Tensor::from_slice(&all).to_kind(Kind::Float).to_device(self.ids.device());
        columns.view([-1, k as i64])
    }
}

//! Packs samples one after the other into passes of bounded size. No padding:
//! the linear layers see one long run of tokens, attention sees each sequence.

use tch::{Device, Kind, Tensor};

use super::prepared::Prepared;

/// One pass through the model.
pub(super) struct Pack<'a> {
    /// The samples of this pass, in order.
    pub(super) samples: &'a [Prepared],
    /// Token ids, sequences one after the other. The last id of each sequence
    /// predicts nothing that is trained and is left out.
    pub(super) ids: Tensor,
    /// Length of each sequence.
    pub(super) lengths: Vec<i64>,
    /// Rows of the hidden states that predict the trained tokens.
    pub(super) rows: Tensor,
    /// The trained tokens.
    pub(super) targets: Tensor,
    /// Number of trained tokens.
    pub(super) tokens: usize,
}

/// Cuts samples into passes of at most `budget` tokens, in order. A sample that
/// is longer alone is a pass of its own.
pub(super) fn packs<'a>(samples: &'a [Prepared], budget: usize, device: Device) -> Vec<Pack<'a>> {
    let mut packs = Vec::new();
    let (mut start, mut size) = (0, 0);
    for (end, sample) in samples.iter().enumerate() {
        if size > 0 && size + sample.length() > budget {
            packs.push(pack(&samples[start..end], device));
            (start, size) = (end, 0);
        }
        size += sample.length();
    }
    if start < samples.len() {
        packs.push(pack(&samples[start..], device));
    }
    packs
}

fn pack(samples: &[Prepared], device: Device) -> Pack<'_> {
    let (mut ids, mut lengths, mut rows, mut targets) = (vec![], vec![], vec![], vec![]);
    for sample in samples {
        let offset = ids.len();
        let whole = sample.prompt_ids.iter().chain(&sample.response_ids);
        ids.extend(whole.take(sample.length()).map(|id| i64::from(*id)));
        lengths.push(sample.length() as i64);
        for token in sample.trained() {
            // The row before a token predicts it.
            rows.push((offset + sample.prompt_ids.len() + token - 1) as i64);
            targets.push(i64::from(sample.response_ids[token]));
        }
    }
    let tensor = |values: &[i64]| Tensor::from_slice(values).to_device(device);
    Pack {
        samples,
        ids: tensor(&ids),
        lengths,
        rows: tensor(&rows),
        targets: tensor(&targets),
        tokens: targets.len(),
    }
}

impl Pack<'_> {
    /// Collects one number of each trained token.
    pub(super) fn column(&self, value: impl Fn(&Prepared, usize) -> f32) -> Tensor {
        let column: Vec<f32> = self
            .samples
            .iter()
            .flat_map(|sample| sample.trained().map(|token| value(sample, token)))
            .collect();
        Tensor::from_slice(&column).to_kind(Kind::Float).to_device(self.ids.device())
    }

    /// Deals out one number per trained token to the samples; masked tokens get
    /// none.
    pub(super) fn deal(&self, values: &[f32]) -> Vec<Vec<Option<f32>>> {
        let mut values = values.iter();
        let deal = |sample: &Prepared| {
            let each = sample.mask.iter().map(|flag| flag.then(|| values.next().copied()).flatten());
            each.collect()
        };
        self.samples.iter().map(deal).collect()
    }
}

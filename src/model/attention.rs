//! Attention: which keys a query may see, and where packed sequences have theirs.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::prefix::Segment;

/// Which keys a query may see.
pub(super) enum Mask {
    /// All: a single query at the end.
    None,
    /// Those up to its own place; queries and keys start together.
    Causal,
    /// The same with keys that are older than the first query.
    Given(Tensor),
}

impl Mask {
    pub(super) fn of(past: i64, added: i64, device: Device) -> Self {
        match (past, added) {
            (_, 1) => Self::None,
            (0, _) => Self::Causal,
            _ => {
                let all = Tensor::ones([added, past + added], (Kind::Bool, device));
                Self::Given(all.tril(past))
            }
        }
    }
}

/// Queries that see the same older keys are taken so many at a time: what a mask
/// hides is computed all the same.
const BLOCK: i64 = 256;

/// A segment with what its queries look back at.
pub(super) struct Back {
    segment: Segment,
    /// Per block of its rows: the first one's place, and what the block may see.
    blocks: Vec<(i64, Tensor)>,
}

impl Back {
    pub(super) fn new(segment: &Segment, device: Device) -> Self {
        let Segment { rows, past } = segment;
        let older: i64 = past.iter().map(|rows| rows.end - rows.start).sum();
        let length = if older > 0 { rows.end - rows.start } else { 0 };
        let starts = (0..length).step_by(BLOCK as usize);
        let blocks = starts.map(|start| {
            let end = (start + BLOCK).min(length);
            let all = Tensor::ones([end - start, older + end], (Kind::Bool, device));
            (start, all.tril(older + start))
        });
        Self { segment: segment.clone(), blocks: blocks.collect() }
    }

    /// Attention of the segment over packed queries, keys and values.
    pub(super) fn attend(&self, queries: &Tensor, keys: &Tensor, values: &Tensor) -> Tensor {
        let Segment { rows, past } = &self.segment;
        let part = |x: &Tensor, rows: &Range<i64>| x.narrow(0, rows.start, rows.end - rows.start);
        // [L, heads, D] -> [1, heads, L, D]
        let turned = |x: Tensor| x.transpose(0, 1).unsqueeze(0);
        let queries = turned(part(queries, rows));
        if past.is_empty() {
            let (keys, values) = (turned(part(keys, rows)), turned(part(values, rows)));
            return attend(&queries, &keys, &values, &Mask::Causal);
        }
        let whole = |x: &Tensor| {
            let runs: Vec<_> = past.iter().chain([rows]).map(|rows| part(x, rows)).collect();
            turned(Tensor::cat(&runs, 0))
        };
        let (keys, values) = (whole(keys), whole(values));
        let outputs = self.blocks.iter().map(|(start, mask)| {
            let size = mask.size();
            let seen = |x: &Tensor| x.narrow(2, 0, size[1]);
            let queries = queries.narrow(2, *start, size[0]);
            attend(&queries, &seen(&keys), &seen(&values), &Mask::Given(mask.shallow_clone()))
        });
        Tensor::cat(&outputs.collect::<Vec<_>>(), 0)
    }
}

/// Attention of one sequence: `[1, heads, L, D]` queries over `[1, key heads,
/// P, D]` keys and values, to `[L, heads * D]`.
pub(super) fn attend(queries: &Tensor, keys: &Tensor, values: &Tensor, mask: &Mask) -> Tensor {
    let (mask, causal) = match mask {
        Mask::None => (None, false),
        Mask::Causal => (None, true),
        Mask::Given(mask) => (Some(mask), false),
    };
    let output =
        Tensor::scaled_dot_product_attention(queries, keys, values, mask, 0.0, causal, None, true);
    let length = queries.size()[2];
    output.squeeze_dim(0).transpose(0, 1).reshape([length, -1])
}

//! From hidden states to log-probs of the trained tokens and back, a few rows at
//! a time: logits over a whole vocabulary are the largest tensor of a step and
//! are never kept.

use tch::{Kind, Tensor};

use crate::model::{Head, Model, Pass};

use super::pack::Pack;

/// Logits held at once, as numbers: 24 MB, or what [`Head::LEAST_ROWS`] rows have of a large
/// vocabulary. Several tensors of this size are there together, beside all that autograd keeps.
const CHUNK_NUMBERS: i64 = 6 << 20;

/// Number of rows whose logits are computed at once.
fn chunk_rows(vocabulary: i64) -> i64 {
    (CHUNK_NUMBERS / vocabulary.max(1)).clamp(Head::LEAST_ROWS, 2048)
}

fn chunks(rows: i64, size: i64) -> impl Iterator<Item = (i64, i64)> {
    (0..rows).step_by(size as usize).map(move |start| (start, size.min(rows - start)))
}

/// Returns the log-probs of a pass's targets, `[N, 1 + k]`, at one temperature
/// per token. No gradient.
pub(super) fn log_probs(model: &Model, pack: &Pack<'_>, temperatures: &[&Tensor]) -> Vec<Tensor> {
    let hidden = tch::no_grad(|| model.hidden(&pack.ids, &pack.lengths));
    log_probs_of(model, pack, &hidden, temperatures)
}

/// Returns the same of a pass whose hidden states are there. They go through the head as in
/// [`backward`], so that in the first update the ratios are 1 to the bit.
pub(super) fn log_probs_of(
    model: &Model,
    pack: &Pack<'_>,
    hidden: &Tensor,
    temperatures: &[&Tensor],
) -> Vec<Tensor> {
    tch::no_grad(|| {
        let hidden = hidden.index_select(0, &pack.rows);
        let mut columns: Vec<Vec<Tensor>> = temperatures.iter().map(|_| Vec::new()).collect();
        let head = model.head_pass();
        for (start, length) in chunks(hidden.size()[0], chunk_rows(model.config.vocab_size)) {
            let logits = head.go(&hidden.narrow(0, start, length)).logits;
            let targets = pack.targets.narrow(0, start, length);
            for (column, temperature) in columns.iter_mut().zip(temperatures) {
                let scaled = &logits / temperature.narrow(0, start, length).unsqueeze(-1);
                column.push(chosen(&scaled.log_softmax(-1, Kind::Float), &targets));
            }
        }
        columns.iter().map(|parts| Tensor::cat(parts, 0)).collect()
    })
}

fn chosen(log_probs: &Tensor, ids: &Tensor) -> Tensor {
    log_probs.gather(-1, ids, false)
}

/// Some rows of a pass, whose loss is asked for.
pub(super) struct Chunk<'a> {
    /// First row.
    pub(super) start: i64,
    /// Number of rows.
    pub(super) length: i64,
    /// Log-probs of the trained tokens, `[N]`.
    pub(super) log_probs: &'a Tensor,
    /// Log-probs of the further ids of each, `[N, k]`.
    pub(super) further: &'a Tensor,
    /// Entropy of each row, a leaf.
    pub(super) entropy: &'a Tensor,
}

/// Goes back through one pass and adds the gradient of `loss` to the weights'. `loss` sees
/// the log-probs and entropies of some tokens at a time and returns a scalar.
///
/// The gradient of the logits is written by hand,
/// `g (onehot - p) - h p (log p + H)` with `g` and `h` the loss's derivatives by
/// log-prob (summed over a token's ids) and entropy, so that autograd never holds a second
/// copy of them. `temperatures` are those of the tokens themselves and of their further ids.
pub(super) fn backward(
    model: &Model,
    pack: &Pack<'_>,
    pass: Pass<'_>,
    temperatures: [&Tensor; 2],
    mut loss: impl FnMut(&Chunk<'_>) -> Tensor,
) {
    let k = pack.targets.size()[1] - 1;
    let columns: &[_] = match k == 0 || temperatures[0].equal(temperatures[1]) {
        true => &[(temperatures[0], 0, 1 + k)],
        false => &[(temperatures[0], 0, 1), (temperatures[1], 1, k)],
    };
    let constant = pass.hidden().detach().index_select(0, &pack.rows);
    let gradient = constant.zeros_like();
    let head = model.head_pass();
    for (start, length) in chunks(constant.size()[0], chunk_rows(model.config.vocab_size)) {
        let ahead = head.go(&constant.narrow(0, start, length));
        let targets = pack.targets.narrow(0, start, length);
        let readings: Vec<_> = columns
            .iter()
            .map(|(temperature, first, count)| {
                let temperature = temperature.narrow(0, start, length).unsqueeze(-1);
                Reading::new(&ahead.logits, targets.narrow(1, *first, *count), temperature)
            })
            .collect();
        let entropy = tch::no_grad(|| {
            let log_probs = &readings[0].log_probs;
            -(log_probs.exp() * log_probs).sum_dim_intlist(&[-1i64][..], false, Kind::Float)
        });
        let entropy = entropy.set_requires_grad(true);
        let all = Tensor::cat(&readings.iter().map(|it| &it.chosen).collect::<Vec<_>>(), 1);
        let (own, further) = (all.select(1, 0), all.narrow(1, 1, k));
        let chunk = Chunk { start, length, log_probs: &own, further: &further, entropy: &entropy };
        loss(&chunk).backward();
        let by_logits = tch::no_grad(|| {
            let own = readings[0].logits_gradient(Some(&entropy));
            readings[1..].iter().fold(own, |sum, reading| sum + reading.logits_gradient(None))
        });
        gradient.narrow(0, start, length).copy_(&ahead.back(&by_logits));
    }
    drop(head);
    let all = pass.hidden().detach().zeros_like().index_copy_(0, &pack.rows, &gradient);
    pass.backward(&all);
}

/// Some ids of each row, read at one temperature.
struct Reading {
    temperature: Tensor,
    /// Over the vocabulary.
    log_probs: Tensor,
    ids: Tensor,
    /// Those of the ids, a leaf.
    chosen: Tensor,
}

impl Reading {
    fn new(logits: &Tensor, ids: Tensor, temperature: Tensor) -> Self {
        let log_probs = tch::no_grad(|| (logits / &temperature).log_softmax(-1, Kind::Float));
        let chosen = chosen(&log_probs, &ids).set_requires_grad(true);
        Self { temperature, log_probs, ids, chosen }
    }

    /// Returns the derivative of the loss by the logits, as far as it comes by these
    /// log-probs and by the entropy of the rows.
    fn logits_gradient(&self, entropy: Option<&Tensor>) -> Tensor {
        let probs = self.log_probs.exp();
        let spread = entropy.filter(|entropy| entropy.grad().defined()).map(|entropy| {
            let by_entropy = entropy.grad().unsqueeze(-1);
            (&self.log_probs + entropy.unsqueeze(-1)) * &probs * by_entropy
        });
        // Not there where the loss has no term of these ids.
        let by_log_prob = match self.chosen.grad() {
            gradient if gradient.defined() => gradient,
            _ => self.chosen.zeros_like(),
        };
        let all = by_log_prob.sum_dim_intlist(&[-1i64][..], true, Kind::Float);
        let mut gradient = probs * -all;
        let _ = gradient.scatter_add_(-1, &self.ids, &by_log_prob);
        let gradient = match spread {
            Some(spread) => gradient - spread,
            None => gradient,
        };
        gradient / &self.temperature
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fewer rows than [`Head::LEAST_ROWS`] would be slow where bf16 products are.
    #[test]
    fn no_vocabulary_makes_chunks_of_too_few_rows() {
        for (vocabulary, rows) in [(0, 2048), (1024, 2048), (32_768, 192), (151_936, 64)] {
            assert_eq!(chunk_rows(vocabulary), rows, "{vocabulary}");
        }
        assert_eq!(chunk_rows(i64::MAX), Head::LEAST_ROWS);
    }
}

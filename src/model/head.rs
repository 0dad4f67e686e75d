//! The head as training goes through it: a few rows at a time, forward and back.

use tch::{Kind, Tensor};

use super::decoder::Decoder;
use super::linear::WIDE_ROWS;

/// Weight rows whose gradient is computed at once where it comes in another type than it is
/// added up in.
const BLOCK: i64 = 8192;

/// The head for all rows of a pass. Its weight is the largest of a small model: it is
/// rounded once, and its gradient is added up where it lies, without another copy of it for
/// each few rows.
pub struct Head<'a> {
    decoder: &'a Decoder,
    /// The weight in the product's type, if the way back can be written down: a product and
    /// nothing else.
    weight: Option<Tensor>,
}

/// Some rows behind the head.
pub struct Ahead<'a> {
    head: &'a Head<'a>,
    /// `[N, H]`.
    rows: Tensor,
    /// f32 `[N, V]`.
    pub logits: Tensor,
}

impl<'a> Head<'a> {
    /// Rows that should go at once, if there are so many: of fewer, libtorch multiplies in
    /// bf16 itself where that is slow.
    pub const LEAST_ROWS: i64 = WIDE_ROWS;

    pub(super) fn new(decoder: &'a Decoder) -> Self {
        Self { decoder, weight: tch::no_grad(|| decoder.lm_head.bare_weight()) }
    }

    /// Computes the logits of hidden states `[N, H]`: those of [`super::Model::head`], to
    /// the bit.
    pub fn go(&self, hidden: &Tensor) -> Ahead<'_> {
        let rows = hidden.detach();
        let logits = match &self.weight {
            // The decoder would round the whole weight again for each few rows.
            Some(weight) if weight.kind() != Kind::Float => tch::no_grad(|| {
                rows.to_kind(weight.kind()).linear(weight, None::<&Tensor>).to_kind(Kind::Float)
            }),
            // Nothing is to be rounded, and few rows are padded there.
            Some(_) => tch::no_grad(|| self.decoder.head(&rows)),
            None => self.decoder.head(&rows.set_requires_grad(true)),
        };
        Ahead { head: self, rows, logits }
    }
}

impl Ahead<'_> {
    /// Given the derivative of the loss by the logits, returns that by the states and adds
    /// that by the weights to theirs.
    pub fn back(self, by_logits: &Tensor) -> Tensor {
        let Self { head, rows, logits } = self;
        let Some(weight) = &head.weight else {
            (logits * by_logits).sum(Kind::Float).backward();
            return rows.grad();
        };
        drop(logits);
        let master = &head.decoder.lm_head.weight;
        tch::no_grad(|| {
            let by_logits = by_logits.to_kind(weight.kind());
            if master.requires_grad() {
                add_gradient(&mut gradient_of(master), &by_logits, &rows);
            }
            by_logits.mm(weight).to_kind(Kind::Float)
        })
    }
}

/// Returns the gradient of a weight; zeros that are it if it has none yet.
fn gradient_of(weight: &Tensor) -> Tensor {
    if !weight.grad().defined() {
        tch::with_grad(|| (weight * 0.0).sum(weight.kind()).backward());
    }
    weight.grad()
}

/// Adds `by_logits' rows` to the gradient.
fn add_gradient(gradient: &mut Tensor, by_logits: &Tensor, rows: &Tensor) {
    if by_logits.kind() == gradient.kind() {
        let _ = gradient.addmm_(&by_logits.tr(), rows);
        return;
    }
    let rows = rows.to_kind(by_logits.kind());
    let outputs = gradient.size()[0];
    for start in (0..outputs).step_by(BLOCK as usize) {
        let length = BLOCK.min(outputs - start);
        let block = by_logits.narrow(1, start, length).tr().mm(&rows);
        let _ = gradient.narrow(0, start, length).g_add_(&block);
    }
}

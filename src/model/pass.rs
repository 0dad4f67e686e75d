//! A forward pass that gradients go back through: with all that autograd keeps,
//! or with each layer's input alone, each layer being run again on the way back.

use tch::{Kind, Tensor};

use super::decoder::{Decoder, Packed};

/// A forward pass and the way back.
pub struct Pass<'a> {
    hidden: Tensor,
    /// What running the layers again needs, if autograd keeps nothing.
    kept: Option<Kept<'a>>,
}

struct Kept<'a> {
    decoder: &'a Decoder,
    packed: Packed<'a>,
    /// The input of each layer, and at the end of the last norm.
    inputs: Vec<Tensor>,
}

impl<'a> Pass<'a> {
    pub(super) fn whole(decoder: &Decoder, ids: &Tensor, lengths: &'a [i64]) -> Self {
        Self { hidden: decoder.hidden(ids, lengths), kept: None }
    }

    pub(super) fn recomputed(decoder: &'a Decoder, ids: &Tensor, lengths: &'a [i64]) -> Self {
        tch::no_grad(|| {
            let packed = Packed::new(decoder, ids, lengths);
            let mut inputs = vec![decoder.embed(&packed)];
            for layer in 0..decoder.layers() {
                inputs.push(decoder.layer(layer, &inputs[layer], &packed));
            }
            let hidden = decoder.last_norm(&inputs[decoder.layers()], &packed);
            Self { hidden, kept: Some(Kept { decoder, packed, inputs }) }
        })
    }

    /// Returns the states after the last norm, f32 `[T, H]`.
    pub fn hidden(&self) -> &Tensor {
        &self.hidden
    }

    /// Adds the gradients of the weights, given that of the states.
    pub fn backward(self, gradient: &Tensor) {
        match self.kept {
            None => (self.hidden * gradient).sum(Kind::Float).backward(),
            Some(kept) => kept.backward(gradient),
        }
    }
}

impl Kept<'_> {
    fn backward(self, gradient: &Tensor) {
        let Self { decoder, packed, mut inputs } = self;
        // Takes what is kept from the last to the first; each is freed when used.
        let mut back = |gradient: &Tensor, run: &dyn Fn(&Tensor) -> Tensor| {
            let input = inputs.pop().unwrap_or_default().set_requires_grad(true);
            (run(&input) * gradient).sum(Kind::Float).backward();
            input.grad()
        };
        let mut gradient = back(gradient, &|input| decoder.last_norm(input, &packed));
        for layer in (0..decoder.layers()).rev() {
            gradient = back(&gradient, &|input| decoder.layer(layer, input, &packed));
        }
        let embedded = decoder.embed(&packed);
        if embedded.requires_grad() {
            (embedded * gradient).sum(Kind::Float).backward();
        }
    }
}

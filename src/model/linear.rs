//! A linear layer: its product in its own type, and a low-rank adapter on top of
//! it if there is one.

use tch::{Device, Kind, Tensor};

use super::rows;

/// So many rows make up for widening the weights each time.
pub(super) const WIDE_ROWS: i64 = 64;

/// Tells whether rows are better multiplied in f32 by widened weights: without
/// AVX-512, libtorch's bf16 products are several times slower than its f32 ones.
fn widens(x: &Tensor) -> bool {
    may_widen(x.device()) && x.size()[0] >= WIDE_ROWS
}

fn may_widen(device: Device) -> bool {
    #[cfg(target_arch = "x86_64")]
    let slow = !is_x86_feature_detected!("avx512bw") || !is_x86_feature_detected!("avx512vl");
    #[cfg(not(target_arch = "x86_64"))]
    let slow = false;
    slow && device == Device::Cpu
}

/// The pair of matrices that LoRA trains beside a weight.
#[derive(Debug)]
pub(super) struct LowRank {
    /// `[rank, in]`.
    pub(super) down: Tensor,
    /// `[out, rank]`.
    pub(super) up: Tensor,
    /// Factor on their product.
    pub(super) scale: f64,
}

impl LowRank {
    fn apply(&self, x: &Tensor) -> Tensor {
        // Of the three the narrow product has the fewest numbers to multiply.
        let narrow = x.linear(&self.down, None::<&Tensor>) * self.scale;
        narrow.linear(&self.up, None::<&Tensor>)
    }
}

/// Who multiplies. The two differ in the last bits, so each computation keeps to one:
/// what is scored must be what is trained, to the bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// [`rows`], if it can: a token at a time is generated so.
    Own,
    /// libtorch, for training and scoring.
    Libtorch,
}

/// A linear layer.
#[derive(Debug)]
pub(super) struct Linear {
    pub(super) weight: Tensor,
    pub(super) bias: Option<Tensor>,
    pub(super) low_rank: Option<LowRank>,
    /// Type of the product; that of the weight may be a wider one, or a narrower one that
    /// holds the same numbers.
    pub(super) kind: Kind,
}

impl Linear {
    /// f32 in, f32 out, whatever the type of the product.
    pub(super) fn apply(&self, x: &Tensor, way: Way) -> Tensor {
        let product = self.product(x, way);
        match &self.low_rank {
            Some(low_rank) => product + low_rank.apply(x),
            None => product,
        }
    }

    fn product(&self, x: &Tensor, way: Way) -> Tensor {
        let own = |x: &Tensor, weight: &Tensor| match way {
            Way::Own => rows::product(x, weight),
            Way::Libtorch => None,
        };
        if self.kind == Kind::Float {
            // The weight may be held in bf16, which then is the same numbers.
            return match own(x, &self.weight) {
                Some(product) => self.with_bias(product),
                None => x.linear(&self.weight.to_kind(Kind::Float), self.bias.as_ref()),
            };
        }
        let (rounded, weight) = (x.to_kind(self.kind), self.weight.to_kind(self.kind));
        // The product of two bf16 numbers is exact in f32, so only the order of the
        // sums may differ from the other ways. Of many rows libtorch's is the quicker one.
        let few = rows::few(rounded.size()[0] as usize);
        let product = match few.then(|| own(&rounded, &weight)).flatten() {
            Some(product) => product.to_kind(self.kind),
            None if widens(x) => {
                let weight = weight.to_kind(Kind::Float);
                rounded.to_kind(Kind::Float).linear(&weight, None::<&Tensor>).to_kind(self.kind)
            }
            None => rounded.linear(&weight, None::<&Tensor>),
        };
        self.with_bias(product.to_kind(Kind::Float))
    }

    /// Returns the weight in the product's type, if libtorch's product in that type is all
    /// there is.
    pub(super) fn bare_weight(&self) -> Option<Tensor> {
        let bare = self.bias.is_none() && self.low_rank.is_none();
        let own = self.kind == Kind::Float || !may_widen(self.weight.device());
        (bare && own).then(|| self.weight.to_kind(self.kind))
    }

    /// As [`Linear::apply`], but a product that nothing is added to stays in its own type,
    /// which holds the same numbers: what autograd keeps of it then takes half the memory.
    pub(super) fn apply_narrow(&self, x: &Tensor, way: Way) -> Tensor {
        let bare = self.bias.is_none() && self.low_rank.is_none();
        match way == Way::Libtorch && bare && self.kind != Kind::Float && !widens(x) {
            true => x.to_kind(self.kind).linear(&self.weight.to_kind(self.kind), None::<&Tensor>),
            false => self.apply(x, way),
        }
    }

    fn with_bias(&self, product: Tensor) -> Tensor {
        match &self.bias {
            Some(bias) => product + bias,
            None => product,
        }
    }
}

/// Applies several layers to one `x`. Where libtorch multiplies in bf16 and weights are to
/// be rounded for it, it does so once, with all of them together: `x` is rounded and kept
/// once, and its gradient, too, is a single product. Weights that are held in bf16 are
/// multiplied as they lie: together they would be a copy, which autograd keeps.
pub(super) fn apply_all<const N: usize>(layers: [&Linear; N], x: &Tensor, way: Way) -> [Tensor; N] {
    let kind = layers[0].kind;
    let alike = layers.iter().all(|layer| layer.kind == kind);
    let rounds = layers.iter().any(|layer| layer.weight.kind() != kind);
    if way == Way::Own || kind == Kind::Float || !alike || !rounds || widens(x) {
        return layers.map(|layer| layer.apply(x, way));
    }
    let weights = layers.map(|layer| layer.weight.to_kind(kind));
    let product = x.to_kind(kind).linear(&Tensor::cat(&weights, 0), None::<&Tensor>);
    let (product, mut start) = (product.to_kind(Kind::Float), 0);
    layers.map(|layer| {
        let outputs = layer.weight.size()[0];
        let own = layer.with_bias(product.narrow(1, start, outputs));
        start += outputs;
        match &layer.low_rank {
            Some(low_rank) => own + low_rank.apply(x),
            None => own,
        }
    })
}

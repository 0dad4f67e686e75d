//! One place in memory for the weights of a type.
//!
//! All of them are read for each token that is generated. In pages of 4 KiB the processor
//! has to look up where each of them is, and does not read ahead beyond it: a third of the
//! time. So they lie in one piece, for which the system is asked for its larger pages.

use tch::{Device, Kind, TchError, Tensor};

/// Numbers from one weight to the next are a multiple of so many: lines of the cache.
const APART: usize = 32;

/// Room for weights of one type in this machine's memory.
pub(super) struct Arena {
    all: Tensor,
    used: usize,
}

impl Arena {
    /// Takes room for weights of so many numbers each.
    pub(super) fn new(kind: Kind, counts: impl Iterator<Item = usize>) -> Result<Self, TchError> {
        let total: usize = counts.map(|count| count.next_multiple_of(APART)).sum();
        let all = Tensor::f_empty([total as i64], (kind, Device::Cpu))?;
        ask_for_large_pages(&all);
        Ok(Self { all, used: 0 })
    }

    /// Returns a copy of a weight that lies here, in the arena's type. It keeps the whole
    /// arena alive.
    pub(super) fn hold(&mut self, weight: &Tensor) -> Result<Tensor, TchError> {
        let mut place = self.place(&weight.size())?;
        place.f_copy_(weight)?;
        Ok(place)
    }

    /// Returns a weight that lies here, whose bytes `read` puts there: those of numbers of
    /// the arena's type.
    #[expect(unsafe_code, reason = "tch gives no slice of a tensor")]
    pub(super) fn read<E: From<TchError>>(
        &mut self,
        size: &[i64],
        read: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<Tensor, E> {
        let place = self.place(size)?;
        let count = place.numel() * place.kind().elt_size_in_bytes();
        // SAFETY: the place is one piece of so many bytes, which nobody else has yet.
        read(unsafe { std::slice::from_raw_parts_mut(place.data_ptr().cast(), count) })?;
        Ok(place)
    }

    /// Takes the next place.
    fn place(&mut self, size: &[i64]) -> Result<Tensor, TchError> {
        let count: i64 = size.iter().product();
        let place = self.all.f_narrow(0, self.used as i64, count)?.f_view(size)?;
        self.used += (count as usize).next_multiple_of(APART);
        Ok(place)
    }
}

/// It is a wish: where it is not granted, all goes on, slower.
#[cfg(target_os = "linux")]
#[expect(unsafe_code, reason = "tch does not say how memory is held")]
fn ask_for_large_pages(tensor: &Tensor) {
    const LARGE: usize = 2 << 20;
    let start = tensor.data_ptr() as usize;
    let end = start + tensor.numel() * tensor.kind().elt_size_in_bytes();
    let (first, last) = (start.next_multiple_of(LARGE), end / LARGE * LARGE);
    if first < last {
        // SAFETY: these pages are the tensor's own, and what is in them stays as it is.
        unsafe { libc::madvise(first as *mut libc::c_void, last - first, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
fn ask_for_large_pages(_: &Tensor) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_lie_one_after_another_and_are_what_they_were() {
        let weights =
            [Tensor::arange(33, (Kind::Float, Device::Cpu)), Tensor::from_slice(&[7.5f32])];
        let counts = weights.iter().map(Tensor::numel).chain([4]);
        let mut arena = Arena::new(Kind::BFloat16, counts).unwrap();
        let held = weights.each_ref().map(|weight| arena.hold(weight).unwrap());
        for (held, weight) in held.iter().zip(&weights) {
            assert_eq!(held.kind(), Kind::BFloat16);
            assert_eq!(held.to_kind(Kind::Float), *weight);
        }
        let apart = held[1].data_ptr() as usize - held[0].data_ptr() as usize;
        assert_eq!(apart, 64 * 2, "33 numbers of two bytes, up to the next line but one");
        // 1, -2, 0.5 and 0, as bf16 has them.
        let bytes = [0x80, 0x3f, 0x00, 0xc0, 0x00, 0x3f, 0x00, 0x00];
        let read = |place: &mut [u8]| {
            place.copy_from_slice(&bytes);
            Ok::<_, TchError>(())
        };
        let filled = arena.read(&[2, 2], read).unwrap().to_kind(Kind::Float);
        assert_eq!(filled, Tensor::from_slice(&[1.0f32, -2.0, 0.5, 0.0]).view([2, 2]));
        assert!(arena.hold(&weights[0]).is_err(), "there is no more room");
    }
}

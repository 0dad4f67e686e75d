//! Keys and values of one sequence, kept in f32: attention over one bf16 query
//! row is several times slower on a CPU, and f32 loses nothing.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::config::Config;

/// Tokens by which a full cache grows.
const CHUNK: i64 = 256;

/// A copy of the keys and values of some tokens: `[2 * layers, key heads, tokens, head_dim]`,
/// of each layer the keys and then the values.
#[derive(Debug)]
pub struct Piece(Tensor);

impl Piece {
    /// Returns the bytes held.
    pub fn bytes(&self) -> usize {
        self.0.numel() * size_of::<f32>()
    }
}

/// Keys and values of the tokens a sequence has been fed so far.
#[derive(Debug)]
pub struct Cache {
    /// Per layer: keys and values, `[key heads, capacity, head_dim]` each.
    layers: Vec<(Tensor, Tensor)>,
    length: i64,
    capacity: i64,
    heads: i64,
    head_dim: i64,
    device: Device,
}

impl Cache {
    pub(super) fn new(config: &Config, device: Device) -> Self {
        let (heads, head_dim) = (config.num_key_value_heads, config.head_dim);
        let empty = || Tensor::zeros([heads, 0, head_dim], (Kind::Float, device));
        let layers = (0..config.num_hidden_layers).map(|_| (empty(), empty())).collect();
        Self { layers, length: 0, capacity: 0, heads, head_dim, device }
    }

    /// Returns the bytes of a cache that holds so many tokens, and has grown no further.
    pub fn bytes_of(config: &Config, tokens: usize) -> usize {
        tokens.div_ceil(CHUNK as usize) * chunk_bytes(config)
    }

    /// Returns the most tokens of one sequence that so many bytes can hold.
    pub fn tokens_in(config: &Config, bytes: usize) -> usize {
        bytes / chunk_bytes(config).max(1) * CHUNK as usize
    }

    /// Returns the number of tokens held.
    pub fn len(&self) -> usize {
        self.length as usize
    }

    /// Returns whether no token is held.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Forgets all but the first `length` tokens.
    pub fn truncate(&mut self, length: usize) {
        self.length = self.length.min(length as i64);
    }

    /// Returns a copy of the first `length` tokens: another sequence with the
    /// same beginning.
    pub fn fork(&self, length: usize) -> Self {
        let length = self.length.min(length as i64);
        let copy = |tensor: &Tensor| tensor.narrow(1, 0, length).copy();
        let layers = self.layers.iter().map(|(keys, values)| (copy(keys), copy(values))).collect();
        Self { layers, length, capacity: length, ..*self }
    }

    /// Returns the bytes held.
    pub fn bytes(&self) -> usize {
        self.bytes_for(self.capacity)
    }

    /// Returns the bytes of a copy of so many tokens.
    pub fn piece_bytes(&self, tokens: usize) -> usize {
        self.bytes_for(tokens as i64)
    }

    fn bytes_for(&self, tokens: i64) -> usize {
        self.layers.len() * 2 * (self.heads * tokens * self.head_dim) as usize * size_of::<f32>()
    }

    /// Returns a copy of what is held of some tokens.
    pub fn piece(&self, tokens: Range<usize>) -> Piece {
        let (start, count) = (tokens.start as i64, tokens.len() as i64);
        let both = self.layers.iter().flat_map(|(keys, values)| [keys, values]);
        let parts: Vec<_> = both.map(|held| held.narrow(1, start, count)).collect();
        Piece(Tensor::stack(&parts, 0))
    }

    /// Puts a copy of some tokens behind what is held: they follow it in the sequence.
    pub fn append(&mut self, piece: &Piece) {
        let count = piece.0.size()[2];
        self.reserve(count);
        for (layer, (keys, values)) in self.layers.iter().enumerate() {
            for (part, held) in [keys, values].into_iter().enumerate() {
                let new = piece.0.select(0, (2 * layer + part) as i64);
                held.narrow(1, self.length, count).copy_(&new);
            }
        }
        self.length += count;
    }

    /// Takes over what another cache holds beyond this one, up to so many tokens in all:
    /// the two sequences are the same so far.
    pub fn catch_up(&mut self, other: &Self, length: usize) {
        let (start, end) = (self.length, other.length.min(length as i64));
        if end <= start {
            return;
        }
        self.reserve(end - start);
        let part = |held: &Tensor| held.narrow(1, start, end - start);
        for (own, others) in self.layers.iter().zip(&other.layers) {
            part(&own.0).copy_(&part(&others.0));
            part(&own.1).copy_(&part(&others.1));
        }
        self.length = end;
    }

    /// Makes room for so many tokens in all, at once and not piece by piece.
    pub fn make_room(&mut self, tokens: usize) {
        self.reserve((tokens as i64 - self.length).max(0));
    }

    pub(super) fn length(&self) -> i64 {
        self.length
    }

    /// Makes room for `more` tokens.
    pub(super) fn reserve(&mut self, more: i64) {
        let needed = self.length + more;
        if needed <= self.capacity {
            return;
        }
        let capacity = (needed + CHUNK - 1) / CHUNK * CHUNK;
        let grown = |old: &Tensor| {
            let new =
                Tensor::zeros([self.heads, capacity, self.head_dim], (Kind::Float, self.device));
            new.narrow(1, 0, self.length).copy_(&old.narrow(1, 0, self.length));
            new
        };
        self.layers =
            self.layers.iter().map(|(keys, values)| (grown(keys), grown(values))).collect();
        self.capacity = capacity;
    }

    /// Writes new tokens of one layer behind the held ones and returns all keys
    /// and values, `[1, key heads, L, head_dim]`. The length stays until
    /// [`Cache::advance`], because every layer writes at the same place.
    pub(super) fn extend(
        &mut self,
        layer: usize,
        keys: &Tensor,
        values: &Tensor,
    ) -> (Tensor, Tensor) {
        let added = keys.size()[0];
        let (all_keys, all_values) = &self.layers[layer];
        let write = |all: &Tensor, new: &Tensor| {
            all.narrow(1, self.length, added).copy_(&new.transpose(0, 1));
            all.narrow(1, 0, self.length + added).unsqueeze(0)
        };
        (write(all_keys, keys), write(all_values, values))
    }

    /// Counts tokens in that every layer has written.
    pub(super) fn advance(&mut self, added: i64) {
        self.length += added;
    }
}

/// Returns the bytes by which a full cache grows.
fn chunk_bytes(config: &Config) -> usize {
    let numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim;
    (CHUNK * numbers) as usize * size_of::<f32>()
}

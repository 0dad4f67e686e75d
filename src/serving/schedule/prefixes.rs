//! Keys and values that outlive their sequence, for others that begin alike: the next turn
//! of a session, another vote on a prompt.
//!
//! They are kept in blocks of so many tokens. A block is found by its ids, by the block
//! before it and by the adapter, and all of these are compared: two beginnings with the
//! same hash are never taken for each other.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::model::{Cache, Piece};
use crate::serving::adapters::AdapterId;

/// Tokens of a block.
const BLOCK: usize = 64;

/// What a block is found by.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Key {
    adapter: Option<AdapterId>,
    /// Number of the block before it, which no other ever gets; 0 for none.
    before: u64,
    ids: Box<[i64]>,
}

/// When a block was last used, and how far from the start it is: of those used together the
/// last goes first, for without those before it nobody finds it.
type Age = (u64, Reverse<usize>);

#[derive(Debug)]
struct Block {
    number: u64,
    age: Age,
    piece: Piece,
}

impl Block {
    fn bytes(&self) -> usize {
        bytes(self.piece.bytes())
    }
}

/// Returns what a block takes: its numbers and its ids.
fn bytes(piece: usize) -> usize {
    piece + BLOCK * size_of::<i64>()
}

/// All blocks, within so many bytes.
#[derive(Debug)]
pub(super) struct Prefixes {
    blocks: HashMap<Arc<Key>, Block>,
    /// The same, the oldest first.
    by_age: BTreeMap<Age, Arc<Key>>,
    bytes: usize,
    limit: usize,
    /// How often anything was looked for or added.
    clock: u64,
    /// Number of the newest block.
    newest: u64,
}

impl Prefixes {
    /// Keeps up to so many bytes; with 0, nothing.
    pub(super) fn new(limit: usize) -> Self {
        let (blocks, by_age) = (HashMap::new(), BTreeMap::new());
        Self { blocks, by_age, bytes: 0, limit, clock: 0, newest: 0 }
    }

    /// Returns the bytes held.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Puts what is known of a sequence behind what its cache holds, all but the last
    /// token: something must be left to compute the next one's logits from.
    pub(super) fn fill(&mut self, adapter: Option<AdapterId>, ids: &[i64], cache: &mut Cache) {
        self.clock += 1;
        let mut before = 0;
        let usable = &ids[..ids.len().saturating_sub(1)];
        for (place, part) in usable.chunks_exact(BLOCK).enumerate() {
            let key = Key { adapter, before, ids: part.into() };
            let Some(block) = self.touch(&key, place) else { return };
            before = block.number;
            if cache.len() != place * BLOCK {
                continue;
            }
            let put = || {
                // For all of it at once: each growth copies what is there.
                cache.make_room(ids.len());
                cache.append(&block.piece);
            };
            // Without memory for a copy it is computed like any other, or fails there.
            if catch_unwind(AssertUnwindSafe(put)).is_err() {
                return;
            }
        }
    }

    /// Keeps what the cache of a sequence holds, as far as it fills blocks.
    pub(super) fn keep(&mut self, adapter: Option<AdapterId>, ids: &[i64], cache: &Cache) {
        if self.limit == 0 {
            return;
        }
        self.clock += 1;
        let mut before = 0;
        let held = &ids[..cache.len().min(ids.len())];
        for (place, part) in held.chunks_exact(BLOCK).enumerate() {
            let key = Key { adapter, before, ids: part.into() };
            let known = self.touch(&key, place).map(|block| block.number);
            // Without room for this one there is none for what follows it.
            let Some(number) = known.or_else(|| self.add(key, place, cache)) else { return };
            before = number;
        }
    }

    /// Returns a block that is there, which is in use now.
    fn touch(&mut self, key: &Key, place: usize) -> Option<&Block> {
        let block = self.blocks.get_mut(key)?;
        let age = (self.clock, Reverse(place));
        if let Some(key) = self.by_age.remove(&block.age) {
            self.by_age.insert(age, key);
        }
        block.age = age;
        Some(&*block)
    }

    /// Adds a block, if older ones leave room for it; returns its number.
    fn add(&mut self, key: Key, place: usize, cache: &Cache) -> Option<u64> {
        let more = bytes(cache.piece_bytes(BLOCK));
        while self.bytes + more > self.limit {
            let oldest = self.by_age.first_entry()?;
            let (clock, _) = *oldest.key();
            if clock == self.clock {
                // It is of this very sequence.
                return None;
            }
            let key = oldest.remove();
            let gone = self.blocks.remove(&*key);
            self.bytes -= gone.map_or(0, |block| block.bytes());
        }
        let piece = || cache.piece(place * BLOCK..(place + 1) * BLOCK);
        // Without memory for a copy nothing is kept, which harms nobody.
        let piece = catch_unwind(AssertUnwindSafe(piece)).ok()?;
        self.newest += 1;
        let (number, age) = (self.newest, (self.clock, Reverse(place)));
        let block = Block { number, age, piece };
        self.bytes += block.bytes();
        let key = Arc::new(key);
        self.by_age.insert(age, key.clone());
        self.blocks.insert(key, block);
        Some(number)
    }

    /// Drops all: the weights that made them are no longer.
    pub(super) fn clear(&mut self) {
        self.blocks.clear();
        self.by_age.clear();
        self.bytes = 0;
    }

    /// Drops what adapters made that are no longer there.
    pub(super) fn retain(&mut self, there: impl Fn(AdapterId) -> bool) {
        let stays = |key: &Key| key.adapter.is_none_or(&there);
        self.by_age.retain(|_, key| stays(key));
        self.blocks.retain(|key, _| stays(key));
        self.bytes = self.blocks.values().map(Block::bytes).sum();
    }
}

#[cfg(test)]
mod tests {
    use crate::model::Model;
    use crate::serving::schedule::trial;

    use super::*;

    fn tokens(count: i64, start: i64) -> Vec<i64> {
        (0..count).map(|place| (place * 7 + start) % 1000).collect()
    }

    fn fed(model: &Model, ids: &[i64]) -> Cache {
        let mut cache = model.cache();
        let _ = model.step(&mut [(ids, &mut cache)]);
        cache
    }

    /// Returns how many tokens of a sequence are known.
    fn known(prefixes: &mut Prefixes, model: &Model, adapter: Option<u64>, ids: &[i64]) -> usize {
        let mut cache = model.cache();
        prefixes.fill(adapter, ids, &mut cache);
        cache.len()
    }

    #[test]
    fn a_beginning_is_found_in_whole_blocks_and_holds_what_was_computed() {
        let model = trial::model();
        let mut prefixes = Prefixes::new(1 << 30);
        let ids = tokens(200, 1);
        let cache = fed(&model, &ids);
        prefixes.keep(None, &ids, &cache);
        assert_eq!(prefixes.bytes(), 3 * bytes(cache.piece_bytes(BLOCK)));
        // Again: nothing more.
        prefixes.keep(None, &ids, &cache);
        assert_eq!(prefixes.bytes(), 3 * bytes(cache.piece_bytes(BLOCK)));
        for (length, expected) in [(300, 192), (193, 192), (192, 128), (64, 0), (65, 64), (0, 0)] {
            let mut asked = ids.clone();
            asked.resize(length, 5);
            assert_eq!(known(&mut prefixes, &model, None, &asked), expected, "{length}");
        }
        let mut other = ids.clone();
        other[70] += 1;
        assert_eq!(known(&mut prefixes, &model, None, &other), 64);
        other[0] += 1;
        assert_eq!(known(&mut prefixes, &model, None, &other), 0);
        // The second block is no beginning.
        assert_eq!(known(&mut prefixes, &model, None, &ids[64..]), 0);
        // What is filled in is what was computed, to the bit.
        let mut filled = model.cache();
        prefixes.fill(None, &ids, &mut filled);
        let found = model.step(&mut [(&ids[192..], &mut filled)]);
        let wanted = model.step(&mut [(&ids[192..], &mut cache.fork(192))]);
        assert_eq!(found, wanted);
        // Behind a cache that holds some, the rest follows.
        let mut begun = cache.fork(64);
        prefixes.fill(None, &ids, &mut begun);
        assert_eq!(begun.len(), 192);
        // Nothing fits behind the middle of a block.
        let mut uneven = cache.fork(70);
        prefixes.fill(None, &ids, &mut uneven);
        assert_eq!(uneven.len(), 70);
        prefixes.clear();
        assert_eq!((known(&mut prefixes, &model, None, &ids), prefixes.bytes()), (0, 0));
    }

    #[test]
    fn what_cannot_be_copied_is_left_to_be_computed() {
        let mut model = trial::model();
        let ids = tokens(130, 1);
        let mut prefixes = Prefixes::new(1 << 30);
        prefixes.keep(None, &ids, &fed(&model, &ids));
        // A copy fails for its form here, and otherwise where there is no memory for it.
        model.config.num_key_value_heads += 1;
        assert_eq!(known(&mut prefixes, &model, None, &ids), 0);
        model.config.num_key_value_heads -= 1;
        assert_eq!(known(&mut prefixes, &model, None, &ids), 128);
    }

    #[test]
    fn adapters_share_nothing_and_take_theirs_along() {
        let model = trial::model();
        let mut prefixes = Prefixes::new(1 << 30);
        let ids = tokens(130, 3);
        let cache = fed(&model, &ids);
        for adapter in [None, Some(1)] {
            prefixes.keep(adapter, &ids, &cache);
        }
        let found = |prefixes: &mut Prefixes| {
            [None, Some(1), Some(2)].map(|adapter| known(prefixes, &model, adapter, &ids))
        };
        assert_eq!(found(&mut prefixes), [128, 128, 0]);
        prefixes.retain(|adapter| adapter == 2);
        assert_eq!(found(&mut prefixes), [128, 0, 0]);
        assert_eq!(prefixes.bytes(), 2 * bytes(cache.piece_bytes(BLOCK)));
    }

    #[test]
    fn what_was_not_used_for_longest_goes_and_its_end_before_its_beginning() {
        let model = trial::model();
        let (one, two) = (tokens(130, 1), tokens(130, 2));
        let (first, second) = (fed(&model, &one), fed(&model, &two));
        let each = bytes(first.piece_bytes(BLOCK));
        let mut prefixes = Prefixes::new(3 * each + each / 2);
        prefixes.keep(None, &one, &first);
        prefixes.keep(None, &two, &second);
        assert_eq!(prefixes.bytes(), 3 * each);
        let found = |prefixes: &mut Prefixes, ids: &[i64]| known(prefixes, &model, None, ids);
        assert_eq!((found(&mut prefixes, &two), found(&mut prefixes, &one)), (128, 64));
        // `one` was used last now.
        prefixes.keep(None, &one, &first);
        assert_eq!((found(&mut prefixes, &one), found(&mut prefixes, &two)), (128, 64));
        // A sequence that is longer than all there is keeps its beginning.
        let long = tokens(400, 4);
        prefixes.keep(None, &long, &fed(&model, &long));
        assert_eq!((found(&mut prefixes, &long), prefixes.bytes()), (192, 3 * each));
        assert_eq!((found(&mut prefixes, &one), found(&mut prefixes, &two)), (0, 0));
        let mut none = Prefixes::new(0);
        none.keep(None, &one, &first);
        assert_eq!((found(&mut none, &one), none.bytes()), (0, 0));
    }
}

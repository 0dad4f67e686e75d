//! Sequences that begin alike, laid out so that no token is computed twice.
//!
//! Sorted, each sequence shares its longest beginning with the one before it.
//! What is new in it becomes a segment of the packed rows; the rows of its
//! beginning are there already, in one or more runs.

use std::ops::Range;

/// New tokens that run through the layers together.
const TOKEN_BUDGET: usize = 4096;
/// A shorter beginning costs less to compute again than to look back at.
const LEAST_SHARED: usize = 16;

/// Packed rows, of which each is a token under its own beginning.
#[derive(Debug, Default)]
pub(super) struct Forest {
    /// Token of each row.
    pub(super) ids: Vec<i64>,
    /// Its place in its sequence.
    pub(super) positions: Vec<i64>,
    /// The rows in parts that were new together, in order.
    pub(super) segments: Vec<Segment>,
    /// The sequences.
    pub(super) leaves: Vec<Leaf>,
}

/// Rows that follow each other in a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) rows: Range<i64>,
    /// Rows of the tokens before them, first to last.
    pub(super) past: Vec<Range<i64>>,
}

/// Where the rows of one sequence are.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Leaf {
    /// Which sequence of the caller's it is.
    pub(super) place: usize,
    /// All its rows, first to last.
    pub(super) path: Vec<Range<i64>>,
}

/// Lays sequences out in as many forests as the budget of tokens asks for. A
/// longer sequence has one to itself.
pub(super) fn forests(sequences: &[&[i64]]) -> Vec<Forest> {
    let mut order: Vec<usize> = (0..sequences.len()).collect();
    order.sort_by_key(|place| sequences[*place]);
    let mut forests: Vec<Forest> = Vec::new();
    let mut last: &[i64] = &[];
    for place in order {
        let ids = sequences[place];
        let mut shared = shared(last, ids);
        let full = |forest: &Forest| forest.ids.len() + ids.len() - shared > TOKEN_BUDGET;
        if forests.last().is_none_or(full) {
            forests.push(Forest::default());
            shared = 0;
        }
        if let Some(forest) = forests.last_mut() {
            forest.add(place, ids, shared);
        }
        last = ids;
    }
    forests
}

/// Returns how many tokens two sequences have in common from the start, if that
/// is worth anything.
fn shared(left: &[i64], right: &[i64]) -> usize {
    let same = left.iter().zip(right).take_while(|(left, right)| left == right).count();
    if same < LEAST_SHARED { 0 } else { same }
}

impl Forest {
    /// Adds a sequence of which the first `shared` tokens are those of the one
    /// added before it.
    fn add(&mut self, place: usize, ids: &[i64], shared: usize) {
        let past = match self.leaves.last() {
            Some(leaf) if shared > 0 => part(&leaf.path, 0..shared as i64),
            _ => Vec::new(),
        };
        let rows = self.ids.len() as i64..(self.ids.len() + ids.len() - shared) as i64;
        self.ids.extend_from_slice(&ids[shared..]);
        self.positions.extend(shared as i64..ids.len() as i64);
        let mut path = past.clone();
        if !rows.is_empty() {
            path.push(rows.clone());
            self.segments.push(Segment { rows, past });
        }
        self.leaves.push(Leaf { place, path });
    }
}

/// Returns the rows of some positions of a path.
pub(super) fn part(path: &[Range<i64>], positions: Range<i64>) -> Vec<Range<i64>> {
    let mut found = Vec::new();
    let mut before = 0;
    for rows in path {
        let length = rows.end - rows.start;
        let from = (positions.start - before).clamp(0, length);
        let to = (positions.end - before).clamp(0, length);
        if from < to {
            found.push(rows.start + from..rows.start + to);
        }
        before += length;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(start: i64, count: i64) -> Vec<i64> {
        (start..start + count).collect()
    }

    /// Follows each path and reads the tokens on it.
    fn read(forest: &Forest, path: &[Range<i64>]) -> Vec<i64> {
        let rows = path.iter().cloned().flatten();
        rows.map(|row| forest.ids[row as usize]).collect()
    }

    #[test]
    fn each_beginning_stands_once() {
        let trunk = from(0, 100);
        let sequences = [
            [trunk.clone(), from(500, 10)].concat(),
            [trunk[..60].to_vec(), from(900, 5)].concat(),
            [trunk.clone(), from(500, 4), from(700, 3)].concat(),
            trunk.clone(),
            [trunk.clone(), from(500, 10)].concat(),
            // A beginning of 3 is not worth the while.
            [trunk[..3].to_vec(), from(800, 7)].concat(),
        ];
        let slices: Vec<&[i64]> = sequences.iter().map(Vec::as_slice).collect();
        let forests = forests(&slices);
        assert_eq!(forests.len(), 1);
        let forest = &forests[0];
        assert_eq!(forest.ids.len(), 100 + 10 + 3 + 5 + 10);
        assert_eq!(forest.leaves.len(), 6);
        for leaf in &forest.leaves {
            assert_eq!(read(forest, &leaf.path), sequences[leaf.place], "{}", leaf.place);
            let positions = leaf.path.iter().cloned().flatten();
            let positions: Vec<i64> = positions.map(|row| forest.positions[row as usize]).collect();
            assert_eq!(positions, from(0, sequences[leaf.place].len() as i64));
        }
        // The segments are the rows, one after another.
        let rows: Vec<i64> =
            forest.segments.iter().flat_map(|segment| segment.rows.clone()).collect();
        assert_eq!(rows, from(0, forest.ids.len() as i64));
    }

    #[test]
    fn the_budget_counts_new_tokens_only() {
        let trunk = from(0, 3000);
        let sequences: Vec<_> =
            (0..4).map(|tail| [trunk.clone(), from(10_000 + tail * 1000, 300)].concat()).collect();
        let slices: Vec<&[i64]> = sequences.iter().map(Vec::as_slice).collect();
        let tokens = |slices: &[&[i64]]| -> Vec<usize> {
            forests(slices).iter().map(|forest| forest.ids.len()).collect()
        };
        assert_eq!(tokens(&slices), [3900, 3300]);
        // One that is too long is there all the same, alone.
        let long = from(0, 9000);
        assert_eq!(tokens(&[&long, &[1, 2, 3]]), [9000, 3]);
        assert_eq!(tokens(&[&[], &[]]), [0]);
        assert_eq!(tokens(&[]), [0; 0]);
    }

    #[test]
    fn a_part_of_a_path() {
        let path = [5..8, 20..24];
        assert_eq!(part(&path, 0..7), path);
        assert_eq!(part(&path, 1..4), [6..8, 20..21]);
        assert_eq!(part(&path, 3..6), vec![20..23]);
        assert_eq!(part(&path, 2..2), []);
    }
}

//! Scores in pieces, for whoever has something else to do in between.
//!
//! A piece is a layer over all tokens, or the head over some: to cut the tokens apart
//! would change the last bits, and what is scored must be what is trained.

use std::collections::VecDeque;

use tch::Tensor;

use super::decoder::{Decoder, Walk};
use super::prefix::{self, Forest, Leaf};
use super::score::{Score, Scored, read_rows, states};

/// Rows of the head and of its softmax that take as long as a token takes through all
/// layers, about.
const HEAD_ROWS_OF_A_TOKEN: usize = 2;

/// Sequences that are being scored.
pub struct Scoring {
    requests: Vec<Score>,
    scored: Vec<Scored>,
    /// What has not begun.
    forests: VecDeque<Forest>,
    /// What is among the layers.
    walk: Option<(Forest, Walk)>,
    /// What is through.
    readings: VecDeque<Reading>,
}

/// A sequence whose states are there.
struct Reading {
    place: usize,
    states: Tensor,
    /// Rows that are scored.
    done: i64,
}

impl Scoring {
    /// Begins with some sequences.
    pub fn new(requests: Vec<Score>) -> Self {
        let sequences: Vec<_> = requests.iter().map(|request| request.ids.as_slice()).collect();
        let mut forests = prefix::forests(&sequences);
        forests.retain(|forest| !forest.ids.is_empty());
        Self {
            scored: vec![Scored::default(); requests.len()],
            requests,
            forests: forests.into(),
            walk: None,
            readings: VecDeque::new(),
        }
    }

    /// Returns what was found, in the order of the requests.
    pub fn into_scored(self) -> Vec<Scored> {
        self.scored
    }

    /// Does pieces that are worth so many tokens, at least one; returns whether all is done.
    pub(super) fn go_on(&mut self, decoder: &Decoder, tokens: usize) -> bool {
        let mut spent = 0;
        while spent < tokens.max(1) {
            match self.piece(decoder) {
                Some(worth) => spent += worth.max(1),
                None => return true,
            }
        }
        self.readings.is_empty() && self.walk.is_none() && self.forests.is_empty()
    }

    /// Does the next piece; returns how many tokens it is worth, or nothing if there is none.
    fn piece(&mut self, decoder: &Decoder) -> Option<usize> {
        if let Some(reading) = self.readings.front_mut() {
            let place = reading.place;
            let from = (&reading.states, reading.done);
            let rows = read_rows(decoder, from, &self.requests[place], &mut self.scored[place]);
            reading.done += rows;
            if reading.done >= reading.states.size()[0] {
                self.readings.pop_front();
            }
            // To widen the head takes as long as many rows do, however few there are.
            let widened = decoder.widens_head();
            return Some(if widened {
                usize::MAX / 2
            } else {
                rows as usize / HEAD_ROWS_OF_A_TOKEN
            });
        }
        let (forest, mut walk) = match self.walk.take() {
            Some(walk) => walk,
            None => {
                let forest = self.forests.pop_front()?;
                let walk = decoder.begin(&forest);
                (forest, walk)
            }
        };
        let worth = forest.ids.len() / decoder.layers().max(1);
        match decoder.go_on(&mut walk) {
            true => self.walk = Some((forest, walk)),
            false => self.take_states(&forest, &decoder.end(&walk)),
        }
        Some(worth)
    }

    fn take_states(&mut self, forest: &Forest, hidden: &Tensor) {
        for Leaf { place, path } in &forest.leaves {
            let Score { ids, start, .. } = &self.requests[*place];
            let states = states(hidden, path, (ids.len(), *start));
            if states.size()[0] > 0 {
                self.readings.push_back(Reading { place: *place, states, done: 0 });
            }
        }
    }
}

//! How well a judge agrees with people.

use std::collections::BTreeMap;

/// The values of a score.
pub const SCORES: [i8; 3] = [-1, 0, 1];

/// Pairs of what a person and what the judge said of the same turn.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Agreement {
    /// By person and judge.
    counts: BTreeMap<(i8, i8), u64>,
    entropy: f64,
    voted: u64,
}

impl Agreement {
    /// Adds a turn: a person's label, the judge's score, and the votes behind it.
    pub fn add(&mut self, person: i8, judge: i8, votes: &[Option<i8>]) {
        *self.counts.entry((person, judge)).or_default() += 1;
        if let Some(entropy) = entropy(votes) {
            self.entropy += entropy;
            self.voted += 1;
        }
    }

    /// Returns how many turns were compared.
    pub fn compared(&self) -> u64 {
        self.counts.values().sum()
    }

    /// Returns how many turns got these two.
    pub fn count(&self, person: i8, judge: i8) -> u64 {
        self.counts.get(&(person, judge)).copied().unwrap_or_default()
    }

    /// Returns the share of turns of which both said the same.
    pub fn accuracy(&self) -> Option<f64> {
        let same: u64 = SCORES.iter().map(|score| self.count(*score, *score)).sum();
        let compared = self.compared();
        (compared > 0).then(|| same as f64 / compared as f64)
    }

    /// Returns Cohen's kappa: how far the accuracy goes from what two who know
    /// nothing of the turns, but say each value as often, would reach (0) to 1. It
    /// does not exist where both always said the same one value.
    pub fn kappa(&self) -> Option<f64> {
        let total = u128::from(self.compared());
        let side = |of: &dyn Fn((i8, i8)) -> i8, score: i8| -> u128 {
            let fits = self.counts.iter().filter(|(pair, _)| of(**pair) == score);
            fits.map(|(_, count)| u128::from(*count)).sum()
        };
        let by_chance: u128 = SCORES
            .iter()
            .map(|score| side(&|pair| pair.0, *score) * side(&|pair| pair.1, *score))
            .sum();
        let all = total * total;
        let same: u128 = SCORES.iter().map(|score| u128::from(self.count(*score, *score))).sum();
        // In whole numbers, so that "always by chance" is exact.
        (all > by_chance)
            .then(|| ((same * total) as f64 - by_chance as f64) / (all - by_chance) as f64)
    }

    /// Returns the mean entropy of the votes on a turn, in nats: 0 where all say the
    /// same, 1.10 where the three values are equally frequent.
    pub fn vote_entropy(&self) -> Option<f64> {
        (self.voted > 0).then(|| self.entropy / self.voted as f64)
    }
}

/// Returns the entropy of the votes on one turn, in nats; votes that are none do
/// not count.
pub fn entropy(votes: &[Option<i8>]) -> Option<f64> {
    let mut counts = BTreeMap::<i8, usize>::new();
    for vote in votes.iter().flatten() {
        *counts.entry(*vote).or_default() += 1;
    }
    let total: usize = counts.values().sum();
    let part = |count: &usize| {
        let share = *count as f64 / total as f64;
        -share * share.ln()
    };
    // Not -0, which would be printed.
    (total > 0).then(|| counts.values().map(part).sum::<f64>() + 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(rows: [[u64; 3]; 3]) -> Agreement {
        let mut agreement = Agreement::default();
        for (person, row) in SCORES.into_iter().zip(rows) {
            for (judge, count) in SCORES.into_iter().zip(row) {
                (0..count).for_each(|_| agreement.add(person, judge, &[Some(judge)]));
            }
        }
        agreement
    }

    fn near(value: Option<f64>, expected: f64) {
        assert!((value.unwrap() - expected).abs() < 1e-12, "{value:?} is not {expected}");
    }

    #[test]
    fn kappa_by_hand() {
        // 20 and 15 alike, 5 and 10 not: 0.7 observed; 25*30 + 25*20 of 50*50 by
        // chance: 0.5; (0.7 - 0.5) / 0.5.
        let two = of([[20, 0, 5], [0, 0, 0], [10, 0, 15]]);
        near(two.accuracy(), 0.7);
        near(two.kappa(), 0.4);
        // Rows 6, 4, 6 and columns 5, 5, 6; 12 of 16 alike; by chance
        // (30 + 20 + 36) / 256; (192 - 86) / (256 - 86).
        let three = of([[4, 1, 1], [1, 3, 0], [0, 1, 5]]);
        assert_eq!(three.compared(), 16);
        near(three.accuracy(), 12.0 / 16.0);
        near(three.kappa(), 106.0 / 170.0);
    }

    #[test]
    fn kappa_at_its_ends() {
        near(of([[3, 0, 0], [0, 2, 0], [0, 0, 4]]).kappa(), 1.0);
        near(of([[0, 0, 5], [0, 0, 0], [5, 0, 0]]).kappa(), -1.0);
        near(of([[1, 1, 1], [1, 1, 1], [1, 1, 1]]).kappa(), 0.0);
        // One value only, by both: nothing to go beyond chance.
        assert_eq!(of([[0, 0, 0], [0, 0, 0], [0, 0, 9]]).kappa(), None);
        near(of([[0, 0, 0], [0, 0, 0], [0, 0, 9]]).accuracy(), 1.0);
        assert_eq!(Agreement::default().kappa(), None);
        assert_eq!(Agreement::default().accuracy(), None);
        assert_eq!(Agreement::default().vote_entropy(), None);
    }

    #[test]
    fn entropy_by_hand() {
        assert_eq!(entropy(&[Some(1), Some(1), None]), Some(0.0));
        near(entropy(&[Some(1), Some(-1)]), std::f64::consts::LN_2);
        near(entropy(&[Some(1), Some(0), Some(-1)]), 3f64.ln());
        // 2/3 and 1/3: ln 3 - 2/3 ln 2.
        near(entropy(&[Some(1), Some(1), Some(0)]), 3f64.ln() - 2.0 / 3.0 * 2f64.ln());
        assert_eq!(entropy(&[None, None]), None);
        let mut agreement = Agreement::default();
        agreement.add(1, 1, &[Some(1), Some(-1)]);
        agreement.add(1, 1, &[Some(1)]);
        agreement.add(1, 1, &[]);
        near(agreement.vote_entropy(), std::f64::consts::LN_2 / 2.0);
    }
}

//! The learning rate of each update.

use std::f64::consts::PI;

/// How the rate goes once it has warmed up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Shape {
    /// It stays.
    #[default]
    Constant,
    /// It falls in a straight line.
    Linear,
    /// It falls along half a cosine (Loshchilov & Hutter 2017).
    Cosine,
}

/// The way of the learning rate over updates. Its position is the optimiser's count
/// of updates, which every policy's record has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Schedule {
    /// Updates until the rate is whole.
    pub warmup: u64,
    /// How it goes from there.
    pub shape: Shape,
    /// Updates in all that a falling rate is spread over. The last of them still has
    /// a rate above 0, and those after it keep that one.
    pub total: u64,
}

impl Schedule {
    /// Returns the share of the learning rate that an update has, counted from 1.
    /// Update `w` of a warm-up of `W` has `w / W`, and of `N` updates after it the
    /// k-th has `1 - (k - 1) / N` of the way left.
    pub fn share(&self, update: u64) -> f64 {
        if update < self.warmup {
            return update as f64 / self.warmup as f64;
        }
        let falling = self.total.saturating_sub(self.warmup).max(1);
        let past = update.saturating_sub(self.warmup + 1).min(falling - 1);
        let way = past as f64 / falling as f64;
        match self.shape {
            Shape::Constant => 1.0,
            Shape::Linear => 1.0 - way,
            Shape::Cosine => 0.5 * (1.0 + (PI * way).cos()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_by_hand() {
        let shares = |shape, warmup, total, updates: u64| {
            let schedule = Schedule { warmup, shape, total };
            (1..=updates).map(|update| schedule.share(update)).collect::<Vec<_>>()
        };
        assert_eq!(shares(Shape::Constant, 0, 0, 2), [1.0, 1.0]);
        assert_eq!(shares(Shape::Constant, 4, 0, 5), [0.25, 0.5, 0.75, 1.0, 1.0]);
        assert_eq!(shares(Shape::Linear, 0, 4, 6), [1.0, 0.75, 0.5, 0.25, 0.25, 0.25]);
        assert_eq!(shares(Shape::Linear, 2, 4, 5), [0.5, 1.0, 1.0, 0.5, 0.5]);
        // Cosines of 0, 60 and 120 degrees: 1, 0.5, -0.5.
        let found = shares(Shape::Cosine, 1, 4, 5);
        for (found, wanted) in found.iter().zip([1.0, 1.0, 0.75, 0.25, 0.25]) {
            assert!((found - wanted).abs() < 1e-12, "{found} {wanted}");
        }
    }
}

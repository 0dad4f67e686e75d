//! Rewards held against those of other rows.

use std::collections::HashMap;
use std::hash::Hash;

/// How rewards of one group are made comparable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// `r - mean`.
    Mean,
    /// `(r - mean) / (std + 1e-6)`, std unbiased.
    Std,
}

/// Normalises rewards within their groups (GRPO, Shao et al. 2024; without the
/// division Dr. GRPO, Liu et al. 2025). Rewards that are not finite do not count
/// and stay as they are; a group of one, or of equal rewards, gives 0.
pub fn normalize_groups<G: Eq + Hash>(rewards: &[f32], groups: &[G], scale: Scale) -> Vec<f32> {
    let mut normalized = rewards.to_vec();
    for rows in members(rewards, groups).values() {
        let count = rows.len() as f64;
        let mean = rows.iter().map(|row| f64::from(rewards[*row])).sum::<f64>() / count;
        let squares = rows.iter().map(|row| (f64::from(rewards[*row]) - mean).powi(2)).sum::<f64>();
        let divisor = match scale {
            Scale::Mean => 1.0,
            Scale::Std => (squares / (count - 1.0).max(1.0)).sqrt() + 1e-6,
        };
        for row in rows {
            normalized[*row] = match equal(rewards, rows) {
                true => 0.0,
                false => ((f64::from(rewards[*row]) - mean) / divisor) as f32,
            };
        }
    }
    normalized
}

/// Leave-one-out (RLOO, Ahmadian et al. 2024): `r_i` less the mean of the others
/// in its group. A group of one has no others and gives 0.
pub fn rloo<G: Eq + Hash>(rewards: &[f32], groups: &[G]) -> Vec<f32> {
    let mut centred = rewards.to_vec();
    for rows in members(rewards, groups).values() {
        let sum: f64 = rows.iter().map(|row| f64::from(rewards[*row])).sum();
        let others = rows.len() as f64 - 1.0;
        for row in rows {
            let own = f64::from(rewards[*row]);
            centred[*row] = match equal(rewards, rows) {
                true => 0.0,
                false => (own - (sum - own) / others) as f32,
            };
        }
    }
    centred
}

/// Equal rewards may miss their own mean by a rounding error.
fn equal(rewards: &[f32], rows: &[usize]) -> bool {
    rows.iter().all(|row| rewards[*row] == rewards[rows[0]])
}

fn members<'a, G: Eq + Hash>(rewards: &[f32], groups: &'a [G]) -> HashMap<&'a G, Vec<usize>> {
    let mut members = HashMap::<&G, Vec<usize>>::new();
    for (row, group) in groups.iter().enumerate() {
        if rewards[row].is_finite() {
            members.entry(group).or_default().push(row);
        }
    }
    members
}

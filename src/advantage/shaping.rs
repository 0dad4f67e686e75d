//! Rewards that are made of several.

/// How much each source adds to a reward. They add up to 1 at most, so that no sum
/// leaves -1 to 1.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Weights {
    /// What somebody stated of the turn.
    pub explicit: f32,
    /// What the judge says of it.
    pub judged: f32,
    /// What its session came to in the end.
    pub outcome: f32,
}

/// How the reward of one row is made, where it is not just what was said of it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Shaped {
    /// What counts, and how much.
    pub weights: Weights,
    /// The outcome of the row's session, if there is one.
    pub outcome: Option<f32>,
}

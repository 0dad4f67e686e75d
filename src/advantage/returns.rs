//! Estimators that look beyond one token or one turn, each a pure function of
//! numbers.

/// REINFORCE++ (Hu 2025): the reward stands at the last trained token, less
/// `beta` times the KL at each trained token, and
/// `G_t = ρ_t + gamma G_{t+1}` is summed backwards. Whitening a batch of these
/// is `train`'s.
pub fn reinforce_plus_plus(
    reward: f32,
    kl: &[f32],
    mask: &[bool],
    beta: f32,
    gamma: f32,
) -> Vec<f32> {
    let last = mask.iter().rposition(|trained| *trained);
    let mut returns = vec![0.0; mask.len()];
    let mut following = 0.0;
    for token in (0..mask.len()).rev() {
        let penalty = if mask[token] { beta * kl[token] } else { 0.0 };
        let own = if Some(token) == last { reward } else { 0.0 };
        following = own - penalty + gamma * following;
        returns[token] = following;
    }
    returns
}

/// REINFORCE++ with the group's mean as baseline: the reward less that mean is
/// on every token, less `beta` times the token's KL.
pub fn reinforce_plus_plus_baseline(centred: f32, kl: &[f32], beta: f32) -> Vec<f32> {
    kl.iter().map(|kl| centred - beta * kl).collect()
}

/// Generalised advantage estimation (Schulman et al. 2016) over a sequence that
/// ends: `δ_t = r_t + gamma V_{t+1} - V_t`, `A_t = δ_t + gamma lambda A_{t+1}`.
pub fn gae(rewards: &[f32], values: &[f32], gamma: f32, lambda: f32) -> Vec<f32> {
    let mut advantages = vec![0.0; rewards.len()];
    let (mut next_value, mut following) = (0.0, 0.0);
    for step in (0..rewards.len()).rev() {
        let surprise = rewards[step] + gamma * next_value - values[step];
        following = surprise + gamma * lambda * following;
        advantages[step] = following;
        next_value = values[step];
    }
    advantages
}

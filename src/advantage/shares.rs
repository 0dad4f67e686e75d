//! What a row's reward comes to beside those of its group or session.

use std::collections::HashMap;

use super::groups::{Scale, normalize_groups, rloo};
use super::returns::gae;
use super::signals::resolve_shaped;
use super::{Estimator, Method, Shaped, Signals};
use crate::trajectory::Turn;

/// What has to be known of a row.
#[derive(Debug, Clone, PartialEq)]
pub struct Member {
    /// Its id.
    pub turn_id: String,
    /// The turn that it goes on from.
    pub parent_turn_id: Option<String>,
    /// Its line of the conversation.
    pub branch: String,
    /// Its place among the choices of a request.
    pub choice: u8,
    /// When the request came.
    pub created_at: i64,
    /// Its reward; nothing if nobody gave one, or no token of it may be trained.
    pub reward: Option<f32>,
    /// Its group, if rows are grouped.
    pub group: Option<u64>,
    /// What was expected of it, for `gae`.
    pub value: f32,
}

/// Reads a row. One that contradicts itself has no reward.
pub fn member(turn: &Turn, shaped: Option<Shaped>, group: Option<u64>, value: f32) -> Member {
    Member { group, value, ..Member::of(turn, resolve_shaped(turn, shaped).ok().as_ref()) }
}

impl Member {
    /// Reads a row whose signals have been found: none if it contradicts itself. It is of
    /// no group, and 0 was expected of it.
    pub fn of(turn: &Turn, signals: Option<&Signals>) -> Self {
        let signals = signals.filter(|signals| signals.trainable());
        Self {
            turn_id: turn.turn_id.clone(),
            parent_turn_id: turn.parent_turn_id.clone(),
            branch: turn.branch.clone(),
            choice: turn.choice,
            created_at: turn.created_at.0,
            reward: signals.and_then(|signals| signals.reward),
            group: None,
            value: 0.0,
        }
    }
}

/// Returns the reward part of each turn by its id, where it is not just the
/// turn's own reward.
pub fn shares(method: &Method, members: &[Member]) -> HashMap<String, f32> {
    match method.estimator {
        Estimator::Gae => over_sessions(method, members),
        Estimator::Rloo => in_groups(members, rloo),
        Estimator::ReinforcePlusPlusBaseline => {
            in_groups(members, |rewards, groups| normalize_groups(rewards, groups, Scale::Mean))
        }
        Estimator::Grpo | Estimator::Combine | Estimator::Hybrid => {
            in_groups(members, |rewards, groups| normalize_groups(rewards, groups, Scale::Std))
        }
        Estimator::Opd | Estimator::TopkKl | Estimator::ReinforcePlusPlus => HashMap::new(),
    }
}

fn in_groups(
    members: &[Member],
    compare: impl Fn(&[f32], &[u64]) -> Vec<f32>,
) -> HashMap<String, f32> {
    let (mut ids, mut rewards, mut groups) = (Vec::new(), Vec::new(), Vec::new());
    for member in members {
        if let (Some(reward), Some(group)) = (member.reward, member.group) {
            ids.push(member.turn_id.clone());
            rewards.push(reward);
            groups.push(group);
        }
    }
    let compared = compare(&rewards, &groups);
    ids.into_iter().zip(compared).collect()
}

/// Runs `gae` over each line of turns. A turn without a reward counts as 0.
fn over_sessions(method: &Method, members: &[Member]) -> HashMap<String, f32> {
    let mut found = HashMap::new();
    for line in lines(members) {
        let rewards: Vec<f32> =
            line.iter().map(|row| members[*row].reward.unwrap_or(0.0)).collect();
        let values: Vec<f32> = line.iter().map(|row| members[*row].value).collect();
        let advantages = gae(&rewards, &values, method.gamma, method.lambda);
        let ids = line.iter().map(|row| members[*row].turn_id.clone());
        found.extend(ids.zip(advantages));
    }
    found
}

/// Follows each turn to the one that goes on from it. A turn has one follower at
/// most: of several (an edit, a regeneration, choices) the one of its own branch
/// that was itself gone on from; the others begin lines of their own.
fn lines(members: &[Member]) -> Vec<Vec<usize>> {
    let mut children = HashMap::<&str, Vec<usize>>::new();
    for (row, member) in members.iter().enumerate() {
        if let Some(parent) = member.parent_turn_id.as_deref().filter(|id| *id != member.turn_id) {
            children.entry(parent).or_default().push(row);
        }
    }
    let follower = |row: usize| {
        let own = &members[row];
        let order = |child: &&usize| {
            let child = &members[**child];
            let ended = !children.contains_key(child.turn_id.as_str());
            let elsewhere = child.branch != own.branch;
            (elsewhere, ended, child.choice, child.created_at, child.turn_id.as_str())
        };
        children.get(own.turn_id.as_str())?.iter().min_by_key(order).copied()
    };
    let followers: Vec<Option<usize>> = (0..members.len()).map(follower).collect();
    let mut follows = vec![false; members.len()];
    followers.iter().flatten().for_each(|row| follows[*row] = true);
    let line = |first: usize| {
        // No longer than the table, should ids go round in a circle.
        let rows = std::iter::successors(Some(first), |row| followers[*row]);
        rows.take(members.len()).collect()
    };
    (0..members.len()).filter(|row| !follows[*row]).map(line).collect()
}

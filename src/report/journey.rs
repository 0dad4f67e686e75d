//! Turns over time: what sessions and shards were worth, and what was answered to
//! the same prompt before and after.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use serde_json::Value;

use crate::trajectory::Turn;
use crate::trajectory::message::{parse, words};
use crate::trajectory::turn::Micros;

/// Characters of a text that a pair keeps.
const KEPT: usize = 1200;
/// Sessions in a row whose first reply is right, by which a run has adapted.
const IN_A_ROW: usize = 3;

/// A session and its rewards.
#[derive(Debug, Clone, PartialEq)]
pub struct Session {
    /// Its id.
    pub id: String,
    /// When its first recorded turn was asked.
    pub began: Micros,
    /// Mean of the rewards of its turns.
    pub mean: Option<f64>,
    /// Turns that have a reward.
    pub rewarded: u64,
    /// Reward of its first turn.
    pub first: Option<f64>,
}

/// One answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Spoken {
    /// Policy step that gave it.
    pub version: u64,
    /// The answer, cut visibly.
    pub answer: String,
    /// Its reward.
    pub reward: Option<f64>,
    at: Micros,
}

/// Two answers to the same prompt: of the first policy that was asked, and of the
/// last.
#[derive(Debug, Clone, PartialEq)]
pub struct Pair {
    /// What was asked last in the prompt, cut visibly.
    pub prompt: String,
    /// The earlier policy's answer.
    pub before: Spoken,
    /// The later policy's.
    pub after: Spoken,
}

#[derive(Debug, Clone, Default, PartialEq)]
struct Mean {
    sum: f64,
    count: u64,
}

impl Mean {
    fn add(&mut self, value: f64) {
        self.sum += value;
        self.count += 1;
    }

    fn value(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / self.count as f64)
    }
}

#[derive(Debug, Clone, PartialEq)]
struct Running {
    began: Micros,
    rewards: Mean,
    /// Number and time of the first turn, and its reward.
    first: ((u32, Micros), Option<f64>),
}

/// What happened, turn by turn.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Journey {
    sessions: HashMap<String, Running>,
    shards: Vec<(String, Mean)>,
    pairs: HashMap<u64, Pair>,
}

/// Returns a turn's reward: resolved, else stated, else the judge's score.
fn reward(turn: &Turn) -> Option<f64> {
    let reward = turn.reward.or(turn.reward_explicit).or(turn.score);
    reward.map(f64::from).filter(|reward| reward.is_finite())
}

impl Journey {
    /// Takes in a turn of a shard. Shards come one after the other.
    pub fn add(&mut self, shard: &str, turn: &Turn) {
        let reward = reward(turn);
        if self.shards.last().is_none_or(|(name, _)| name != shard) {
            self.shards.push((shard.to_owned(), Mean::default()));
        }
        if let (Some(reward), Some((_, mean))) = (reward, self.shards.last_mut()) {
            mean.add(reward);
        }
        let place = (turn.turn, turn.created_at);
        let session = self.sessions.entry(turn.session_id.clone()).or_insert_with(|| Running {
            began: turn.created_at,
            rewards: Mean::default(),
            first: (place, reward),
        });
        session.began = session.began.min(turn.created_at);
        reward.iter().for_each(|reward| session.rewards.add(*reward));
        if place < session.first.0 {
            session.first = (place, reward);
        }
        self.pair(turn, reward);
    }

    fn pair(&mut self, turn: &Turn, reward: Option<f64>) {
        let version = turn.weight_version.as_deref().and_then(|version| version.parse().ok());
        let Some(version) = version else { return };
        let (key, last) = prompt(&turn.messages);
        let answer = super::text::cut(&words(&parse(&turn.response)), KEPT);
        let spoken = Spoken { version, answer, reward, at: turn.created_at };
        let pair = self.pairs.entry(key).or_insert_with(|| Pair {
            prompt: super::text::cut(&last, KEPT),
            before: spoken.clone(),
            after: spoken.clone(),
        });
        let order = |spoken: &Spoken| (spoken.version, spoken.at);
        // Of one policy's answers the first counts, on both sides.
        if order(&spoken) < order(&pair.before) {
            pair.before = spoken.clone();
        }
        let newer = spoken.version > pair.after.version
            || (spoken.version == pair.after.version && spoken.at < pair.after.at);
        if newer {
            pair.after = spoken;
        }
    }

    /// Returns the sessions in the order in which they began.
    pub fn sessions(&self) -> Vec<Session> {
        let session = |(id, running): (&String, &Running)| Session {
            id: id.clone(),
            began: running.began,
            mean: running.rewards.value(),
            rewarded: running.rewards.count,
            first: running.first.1,
        };
        let mut sessions: Vec<_> = self.sessions.iter().map(session).collect();
        sessions.sort_by(|a, b| (a.began, &a.id).cmp(&(b.began, &b.id)));
        sessions
    }

    /// Returns each shard's mean reward and the number of its turns with one.
    pub fn shards(&self) -> Vec<(&str, Option<f64>, u64)> {
        self.shards.iter().map(|(name, mean)| (name.as_str(), mean.value(), mean.count)).collect()
    }

    /// Returns the prompts that two policies answered, in the order of time.
    pub fn pairs(&self) -> Vec<&Pair> {
        let mut pairs: Vec<_> =
            self.pairs.values().filter(|pair| pair.before.version < pair.after.version).collect();
        pairs.sort_by(|a, b| {
            let key = |pair: &Pair| (pair.before.at, pair.prompt.clone());
            key(a).cmp(&key(b))
        });
        pairs
    }
}

/// Returns the place, counted from 0, of the session that begins the first three in
/// a row whose first turn has a reward above 0. A session of which nothing is known
/// breaks a row.
pub(super) fn adapted(sessions: &[Session]) -> Option<usize> {
    let right = |session: &Session| session.first.is_some_and(|first| first > 0.0);
    sessions.windows(IN_A_ROW).position(|row| row.iter().all(right))
}

/// Returns what makes prompts the same, who says what, and the last thing said.
fn prompt(messages: &str) -> (u64, String) {
    let mut hasher = DefaultHasher::new();
    let mut last = String::new();
    match parse(messages) {
        Value::Array(messages) => {
            for message in &messages {
                last = words(message);
                (message["role"].as_str(), &last).hash(&mut hasher);
            }
        }
        other => {
            last = words(&other);
            last.hash(&mut hasher);
        }
    }
    (hasher.finish(), last)
}

//! What is counted of turns, one after the other.

use std::collections::{BTreeMap, HashSet};

use crate::advantage;
use crate::advantage::Spread;
use crate::trajectory::Turn;
use crate::trajectory::words::{NextStateKind, SampleKind, Status, Word};

/// How many rows have each word.
pub type Counts = BTreeMap<String, u64>;

/// Length of the runs of tokens that repetition and openings look at.
const RUN: usize = 4;
/// Answers below which their openings tell nothing.
const FEW_ANSWERS: u64 = 8;

/// Counts over turns. A stage that has not run leaves its counts empty.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Survey {
    /// Rows.
    pub turns: u64,
    /// Rows per `status`.
    pub statuses: Counts,
    /// Rows per `next_state_kind`.
    pub next_states: Counts,
    /// Rows per `untrainable_reason`.
    pub untrainable: Counts,
    /// Rows per `score`.
    pub scores: Counts,
    /// Rows per `sample_kind`.
    pub kinds: Counts,
    /// Rows per `sample_reason`.
    pub reasons: Counts,
    /// Rows per policy at the start of the answer; `unknown` where nobody told.
    pub versions: Counts,
    /// Rewards: resolved ones, else those that a person stated, else scores.
    pub rewards: Spread,
    /// Tokens per answer.
    pub lengths: Spread,
    /// Share of an answer's runs of 4 tokens that stood in it before.
    pub repetition: Spread,
    /// `-log-prob` of each sampled token, greedy answers left out.
    pub surprise: Spread,
    /// Share of a turn's votes that say what most say, of 2 votes or more.
    pub agreement: Spread,
    /// Entropy of a turn's votes, nats, of 2 votes or more.
    pub vote_entropy: Spread,
    /// Turns whose most frequent vote is not one.
    pub ties: u64,
    /// Votes asked for, and votes that said something.
    pub votes: (u64, u64),
    /// Turns that a judge saw, and those of them without a score.
    pub judged: (u64, u64),
    /// Turns that the hint stage left a trace on, and those with a hint.
    pub hinted: (u64, u64),
    /// Verdicts of hint calls, and accepted ones.
    pub hint_verdicts: (u64, u64),
    /// Characters per hint.
    pub hint_lengths: Spread,
    /// Hints that a teacher saw, and those of them without log-probs.
    pub taught: (u64, u64),
    /// Turns noted by `advantage`, and promoted ones.
    pub noted: (u64, u64),
    /// Noted turns that something could be known of, and those that can be trained.
    pub effective: (u64, u64),
    /// Advantages of the tokens that may be trained.
    pub advantages: Spread,
    /// `lt - lb` of those tokens.
    pub distilled: Spread,
    /// Log-prob slots, and null ones.
    pub slots: (u64, u64),
    /// Answers with token ids, and those of them without any log-probs.
    pub answers: (u64, u64),
    /// Answers of which both versions are known, and those where they differ.
    pub in_flight: (u64, u64),
    sessions: HashSet<String>,
    openings: HashSet<Vec<i32>>,
    opened: u64,
}

/// Returns a share, or nothing of nothing.
fn share((all, some): (u64, u64)) -> Option<f64> {
    (all > 0).then(|| some as f64 / all as f64)
}

fn count(counts: &mut Counts, word: &str) {
    *counts.entry(word.to_owned()).or_default() += 1;
}

impl Survey {
    /// Counts a turn.
    pub fn add(&mut self, turn: &Turn) {
        self.turns += 1;
        self.sessions.insert(turn.session_id.clone());
        count(&mut self.statuses, turn.status.as_str());
        count(&mut self.next_states, turn.next_state_kind.as_str());
        turn.untrainable_reason.iter().for_each(|reason| count(&mut self.untrainable, reason));
        if let Some(reward) = turn.reward.or(turn.reward_explicit).or(turn.score) {
            self.rewards.add(reward);
        }
        self.add_answer(turn);
        self.add_versions(turn);
        self.add_votes(turn);
        self.add_hints(turn);
        self.add_signal(turn);
    }

    fn add_answer(&mut self, turn: &Turn) {
        let told = turn.usage_completion_tokens;
        let Some(ids) = &turn.response_ids else {
            told.iter().for_each(|tokens| self.lengths.add(*tokens as f32));
            return;
        };
        self.lengths.add(ids.len() as f32);
        if ids.len() >= RUN {
            let runs: HashSet<&[i32]> = ids.windows(RUN).collect();
            let all = ids.len() - RUN + 1;
            self.repetition.add(1.0 - runs.len() as f32 / all as f32);
            self.openings.insert(ids[..RUN].to_vec());
            self.opened += 1;
        }
        self.answers.0 += 1;
        let Some(log_probs) = &turn.rollout_log_probs else {
            self.answers.1 += 1;
            return;
        };
        self.slots.0 += log_probs.len() as u64;
        self.slots.1 += log_probs.iter().filter(|slot| slot.is_none()).count() as u64;
        if turn.sampling.temperature != Some(0.0) {
            log_probs.iter().flatten().for_each(|log_prob| self.surprise.add(-log_prob));
        }
    }

    fn add_versions(&mut self, turn: &Turn) {
        count(&mut self.versions, turn.weight_version.as_deref().unwrap_or("unknown"));
        if let (Some(start), Some(end)) = (&turn.weight_version, &turn.weight_version_end) {
            self.in_flight.0 += 1;
            self.in_flight.1 += u64::from(start != end);
        }
    }

    fn add_votes(&mut self, turn: &Turn) {
        turn.score.iter().for_each(|score| count(&mut self.scores, &score.to_string()));
        if turn.votes.is_some() || turn.judge_error.is_some() || turn.score.is_some() {
            self.judged.0 += 1;
            self.judged.1 += u64::from(turn.score.is_none());
        }
        let Some(votes) = &turn.votes else { return };
        let valid: Vec<i8> = votes.iter().flatten().copied().collect();
        self.votes.0 += votes.len() as u64;
        self.votes.1 += valid.len() as u64;
        if valid.len() < 2 {
            return;
        }
        let mut tally = BTreeMap::<i8, u64>::new();
        valid.iter().for_each(|vote| *tally.entry(*vote).or_default() += 1);
        let most = tally.values().max().copied().unwrap_or_default();
        self.ties += u64::from(tally.values().filter(|votes| **votes == most).count() > 1);
        let part = |votes: u64| votes as f64 / valid.len() as f64;
        self.agreement.add(part(most) as f32);
        let entropy: f64 = tally.values().map(|votes| -part(*votes) * part(*votes).ln()).sum();
        self.vote_entropy.add(entropy.max(0.0) as f32);
    }

    fn add_hints(&mut self, turn: &Turn) {
        let hints = turn.hints.as_deref().unwrap_or_default();
        if turn.hints.is_some() || turn.hint_votes.is_some() || turn.hint_error.is_some() {
            self.hinted.0 += 1;
            self.hinted.1 += u64::from(!hints.is_empty());
        }
        hints.iter().for_each(|hint| self.hint_lengths.add(hint.chars().count() as f32));
        for verdict in turn.hint_votes.iter().flatten().flatten() {
            self.hint_verdicts.0 += 1;
            self.hint_verdicts.1 += u64::from(*verdict == 1);
        }
        for candidate in turn.teacher_log_probs.iter().flatten() {
            self.taught.0 += 1;
            self.taught.1 += u64::from(candidate.is_none());
        }
    }

    fn add_signal(&mut self, turn: &Turn) {
        turn.sample_reason.iter().for_each(|reason| count(&mut self.reasons, reason));
        let Some(kind) = turn.sample_kind else { return };
        count(&mut self.kinds, kind.as_str());
        self.noted.0 += 1;
        self.noted.1 += u64::from(turn.promoted == Some(true));
        let mask = turn.loss_mask.as_deref().unwrap_or_default();
        if turn.next_state_kind != NextStateKind::None || turn.reward_explicit.is_some() {
            self.effective.0 += 1;
            self.effective.1 += u64::from(kind != SampleKind::None && mask.contains(&1));
        }
        let advantages = turn.advantages.as_deref().unwrap_or_default();
        let trained = mask.iter().zip(advantages).filter(|(flag, _)| **flag == 1);
        trained.for_each(|(_, advantage)| self.advantages.add(*advantage));
        let Ok(signals) = advantage::resolve(turn) else { return };
        let server = turn.rollout_log_probs.as_deref().unwrap_or_default();
        let teacher = signals.teacher_log_probs(turn).unwrap_or_default();
        for ((flag, teacher), server) in mask.iter().zip(teacher).zip(server) {
            if let (1, Some(server)) = (flag, server) {
                self.distilled.add(teacher - server);
            }
        }
    }

    /// Returns the number of sessions.
    pub fn sessions(&self) -> u64 {
        self.sessions.len() as u64
    }

    /// Returns the share of answers that the token limit ended.
    pub fn truncated_share(&self) -> Option<f64> {
        let truncated = self.statuses.get(Status::Truncated.as_str()).copied().unwrap_or_default();
        share((self.turns, truncated))
    }

    /// Returns the share of answers that begin as no earlier one does.
    pub fn opening_diversity(&self) -> Option<f64> {
        (self.opened >= FEW_ANSWERS).then(|| self.openings.len() as f64 / self.opened as f64)
    }

    /// Returns the share of noted turns that can be trained, of those that
    /// something could be known of.
    pub fn effective_share(&self) -> Option<f64> {
        share(self.effective)
    }

    /// Returns the smallest advantage.
    pub fn least_advantage(&self) -> Option<f64> {
        (self.advantages.count > 0).then_some(self.advantages.min)
    }

    /// Returns the share of turns with a next state that have a hint, if the hint
    /// stage left a trace anywhere.
    pub fn hint_coverage(&self) -> Option<f64> {
        let without = self.next_states.get(NextStateKind::None.as_str()).copied();
        let answered = self.turns - without.unwrap_or_default();
        (self.hinted.0 > 0).then(|| share((answered, self.hinted.1)))?
    }

    /// Returns the share of accepted hints among the verdicts.
    pub fn hint_accept_rate(&self) -> Option<f64> {
        share(self.hint_verdicts)
    }

    /// Returns the share of judged turns without a score.
    pub fn judge_failures(&self) -> Option<f64> {
        share(self.judged)
    }

    /// Returns the share of hints without teacher log-probs.
    pub fn teacher_failures(&self) -> Option<f64> {
        share(self.taught)
    }

    /// Returns the share of promoted turns.
    pub fn promoted_share(&self) -> Option<f64> {
        share(self.noted)
    }

    /// Returns the share of null log-prob slots.
    pub fn null_slots(&self) -> Option<f64> {
        share(self.slots)
    }

    /// Returns the share of answers with ids for which there are no log-probs.
    pub fn without_log_probs(&self) -> Option<f64> {
        share(self.answers)
    }

    /// Returns the share of answers during which the weights changed.
    pub fn changed_in_flight(&self) -> Option<f64> {
        share(self.in_flight)
    }

    /// Returns how many rows there are of each age, in steps behind the newest
    /// policy among them. Versions that are no step have no age.
    pub fn ages(&self) -> BTreeMap<u64, u64> {
        let step = |version: &String| version.parse::<u64>().ok();
        let newest = self.versions.keys().filter_map(step).max().unwrap_or_default();
        let aged = self.versions.iter().filter_map(|(version, rows)| Some((step(version)?, *rows)));
        aged.map(|(version, rows)| (newest - version, rows)).collect()
    }

    /// Returns the mean age.
    pub fn staleness(&self) -> Option<f64> {
        let ages = self.ages();
        let rows: u64 = ages.values().sum();
        let steps: u64 = ages.iter().map(|(age, rows)| age * rows).sum();
        share((rows, steps))
    }
}

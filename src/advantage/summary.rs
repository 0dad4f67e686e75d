//! What a run says at its end: kinds, reasons, the spread of the advantages,
//! and what looks wrong with them.

use std::collections::BTreeMap;

use super::signals::noted_teacher;
use super::{Method, opd_at};
use crate::trajectory::Turn;
use crate::trajectory::words::{SampleKind, Word};

/// Count, mean, standard deviation, extremes and zeros of a stream of numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct Spread {
    /// How many numbers.
    pub count: u64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
    /// How many are exactly 0.
    pub zeros: u64,
    sum: f64,
    squares: f64,
}

impl Default for Spread {
    fn default() -> Self {
        let (min, max) = (f64::INFINITY, f64::NEG_INFINITY);
        Self { count: 0, min, max, zeros: 0, sum: 0.0, squares: 0.0 }
    }
}

impl Spread {
    /// Takes in one more number.
    pub fn add(&mut self, value: f32) {
        let value = f64::from(value);
        self.count += 1;
        self.zeros += u64::from(value == 0.0);
        self.min = self.min.min(value);
        self.max = self.max.max(value);
        self.sum += value;
        self.squares += value * value;
    }

    /// Takes in the numbers of another stream.
    pub fn merge(&mut self, other: &Self) {
        self.count += other.count;
        self.zeros += other.zeros;
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
        self.sum += other.sum;
        self.squares += other.squares;
    }

    /// Returns the mean, or nothing of nothing.
    pub fn mean(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / self.count as f64)
    }

    /// Returns the standard deviation (of the numbers themselves, divided by
    /// their count), or nothing of nothing.
    pub fn std(&self) -> Option<f64> {
        let mean = self.mean()?;
        Some((self.squares / self.count as f64 - mean * mean).max(0.0).sqrt())
    }

    /// Returns the share of numbers that are exactly 0, or nothing of nothing.
    pub fn share_zero(&self) -> Option<f64> {
        (self.count > 0).then(|| self.zeros as f64 / self.count as f64)
    }
}

/// The counts of a run, row by row.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Summary {
    /// Rows seen.
    pub rows: u64,
    /// Rows per sample kind, in the order of the schema's words.
    pub kinds: BTreeMap<SampleKind, u64>,
    /// Rows per reason for carrying nothing.
    pub reasons: BTreeMap<String, u64>,
    /// Rows that another candidate teaches than the first, which has numbers that
    /// are no log-probs.
    pub passed_over: u64,
    /// Rows that contradict themselves.
    pub refused: u64,
    /// Rows that late feedback was joined to.
    pub joined: u64,
    /// Feedback that is about no row of the table.
    pub strangers: u64,
    /// Rows kept by the at-least-one rule.
    pub promoted: u64,
    /// Rows that the estimator could use but that have no `advantages`, for
    /// want of the server's log-prob of some token.
    pub without_log_probs: u64,
    /// Tokens that may be trained.
    pub tokens: u64,
    /// The advantages of those tokens.
    pub advantages: Spread,
    /// The distillation advantages `lt_t - lo_t` of those tokens.
    pub distilled: Spread,
    /// The advantages of those rows that nothing else teaches: a teacher with a loss of
    /// its own is not in the advantages.
    pub alone: Spread,
}

impl Summary {
    /// Counts a row that [`note`](super::note) has filled.
    pub fn add(&mut self, turn: &Turn, method: &Method) {
        self.rows += 1;
        let kind = turn.sample_kind.unwrap_or(SampleKind::None);
        *self.kinds.entry(kind).or_default() += 1;
        self.promoted += u64::from(turn.promoted == Some(true));
        self.refused += u64::from(turn.advantage_error.is_some());
        let trainable = turn.loss_mask.as_ref().is_some_and(|mask| mask.contains(&1));
        match &turn.sample_reason {
            // A reason beside a signal.
            Some(_) if trainable => self.passed_over += 1,
            Some(reason) => *self.reasons.entry(reason.clone()).or_default() += 1,
            None => {}
        }
        let Some(mask) = &turn.loss_mask else { return };
        let trained = |token: &usize| mask[*token] == 1;
        self.tokens += (0..mask.len()).filter(trained).count() as u64;
        let taught = matches!(kind, SampleKind::Opd | SampleKind::OpdRl);
        if let Some(advantages) = &turn.advantages {
            let mut found = Spread::default();
            let used = (0..mask.len()).filter(trained);
            used.for_each(|token| found.add(advantages[token]));
            self.advantages.merge(&found);
            if !(taught && method.estimator.reads_topk()) {
                self.alone.merge(&found);
            }
        } else if mask.contains(&1)
            && taught
            && method.estimator.reads_teacher()
            && method.estimator.has_advantages()
        {
            self.without_log_probs += 1;
        }
        self.add_distilled(turn, mask, method);
    }

    /// Takes in the counts of other rows.
    pub fn merge(&mut self, other: Self) {
        self.rows += other.rows;
        for (kind, count) in other.kinds {
            *self.kinds.entry(kind).or_default() += count;
        }
        for (reason, count) in other.reasons {
            *self.reasons.entry(reason).or_default() += count;
        }
        self.passed_over += other.passed_over;
        self.joined += other.joined;
        self.strangers += other.strangers;
        self.refused += other.refused;
        self.promoted += other.promoted;
        self.without_log_probs += other.without_log_probs;
        self.tokens += other.tokens;
        self.advantages.merge(&other.advantages);
        self.distilled.merge(&other.distilled);
        self.alone.merge(&other.alone);
    }

    fn add_distilled(&mut self, turn: &Turn, mask: &[i8], method: &Method) {
        let Some(old) = &turn.rollout_log_probs else { return };
        let Some(teacher) = noted_teacher(turn) else { return };
        for ((flag, old), teacher) in mask.iter().zip(old).zip(teacher) {
            if *flag == 1
                && let Some(old) = old
            {
                self.distilled.add(opd_at(*teacher, *old, method.distill_clip));
            }
        }
    }

    /// Returns how many rows have a kind.
    pub fn of_kind(&self, kind: SampleKind) -> u64 {
        self.kinds.get(&kind).copied().unwrap_or_default()
    }

    /// Returns the kinds with their counts, in the order of the schema.
    pub fn kinds(&self) -> impl Iterator<Item = (SampleKind, u64)> + '_ {
        SampleKind::ALL.iter().map(|kind| (*kind, self.of_kind(*kind)))
    }

    /// Returns what looks wrong with the signal.
    pub fn warnings(&self) -> Vec<String> {
        let mut found = Vec::new();
        if self.rows > 0 && self.rows == self.of_kind(SampleKind::None) {
            found.push("no row carries a signal: nothing can be trained".to_owned());
        }
        if let Some(std) = self.alone.std()
            && std < 0.1
        {
            found.push(format!("advantages hardly differ (std {std:.4}): the signal is weak"));
        }
        if self.distilled.count > 0 && self.distilled.zeros == self.distilled.count {
            found.push(
                "every distillation advantage is 0: teacher and student agree, or the hint was lost"
                    .to_owned(),
            );
        }
        if self.alone.count > 0 && self.alone.min > 0.0 {
            found.push("all advantages are positive: nothing is discouraged".to_owned());
        }
        found
    }
}

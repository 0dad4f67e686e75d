//! A survey as a list of named figures, for tables and files.

use super::Survey;
use super::survey::Counts;
use crate::advantage::Spread;

/// The value of a figure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Amount {
    /// So many.
    Count(u64),
    /// A number; `None` is not known.
    Number(Option<f64>),
}

/// One figure.
#[derive(Debug, Clone, PartialEq)]
pub struct Figure {
    /// What it is about.
    pub group: &'static str,
    /// Its name in the group.
    pub name: String,
    /// Its value.
    pub amount: Amount,
}

/// Collects figures.
#[derive(Default)]
struct List {
    group: &'static str,
    figures: Vec<Figure>,
}

impl List {
    fn push(&mut self, name: impl Into<String>, amount: Amount) {
        self.figures.push(Figure { group: self.group, name: name.into(), amount });
    }

    fn count(&mut self, name: &str, count: u64) {
        self.push(name, Amount::Count(count));
    }

    fn number(&mut self, name: &str, number: Option<f64>) {
        self.push(name, Amount::Number(number));
    }

    fn counts(&mut self, prefix: &str, counts: &Counts) {
        for (word, rows) in counts {
            self.push(format!("{prefix}{word}"), Amount::Count(*rows));
        }
    }

    fn spread(&mut self, prefix: &str, spread: &Spread) {
        self.number(&format!("{prefix}mean"), spread.mean());
        self.number(&format!("{prefix}std"), spread.std());
    }

    fn extremes(&mut self, prefix: &str, spread: &Spread) {
        let known = |value: f64| (spread.count > 0).then_some(value);
        self.number(&format!("{prefix}min"), known(spread.min));
        self.number(&format!("{prefix}max"), known(spread.max));
    }
}

impl Survey {
    /// Returns every figure, in the order of the loop.
    pub fn figures(&self) -> Vec<Figure> {
        let mut list = List::default();
        self.turn_figures(&mut list);
        self.note_figures(&mut list);
        self.signal_figures(&mut list);
        list.figures
    }

    fn turn_figures(&self, list: &mut List) {
        list.group = "turns";
        list.count("rows", self.turns);
        list.count("sessions", self.sessions());
        list.counts("status ", &self.statuses);
        list.counts("next state ", &self.next_states);
        list.counts("untrainable: ", &self.untrainable);
        list.group = "answers";
        list.number("tokens mean", self.lengths.mean());
        list.extremes("tokens ", &self.lengths);
        list.number("truncated share", self.truncated_share());
        list.number("repetition", self.repetition.mean());
        list.number("opening diversity", self.opening_diversity());
        list.number("surprise", self.surprise.mean());
        list.group = "policy";
        list.counts("rows of version ", &self.versions);
        for (age, rows) in self.ages() {
            list.push(format!("rows {age} steps behind"), Amount::Count(rows));
        }
        list.number("staleness", self.staleness());
        list.number("changed in flight", self.changed_in_flight());
        list.number("null log-prob slots", self.null_slots());
        list.number("without log-probs", self.without_log_probs());
    }

    fn note_figures(&self, list: &mut List) {
        list.group = "rewards";
        list.spread("", &self.rewards);
        list.counts("score ", &self.scores);
        list.group = "votes";
        list.count("judged", self.judged.0);
        list.count("without a score", self.judged.1);
        list.number("failures", self.judge_failures());
        list.count("asked", self.votes.0);
        list.count("valid", self.votes.1);
        list.count("ties", self.ties);
        list.number("agreement", self.agreement.mean());
        list.number("entropy", self.vote_entropy.mean());
        list.group = "hints";
        list.count("turns with a hint", self.hinted.1);
        list.number("coverage", self.hint_coverage());
        list.number("accept rate", self.hint_accept_rate());
        list.number("characters mean", self.hint_lengths.mean());
        list.number("teacher failures", self.teacher_failures());
    }

    fn signal_figures(&self, list: &mut List) {
        list.group = "signal";
        list.counts("kind ", &self.kinds);
        list.counts("no signal: ", &self.reasons);
        list.number("promoted share", self.promoted_share());
        list.number("effective samples", self.effective_share());
        list.count("advantages", self.advantages.count);
        list.spread("advantage ", &self.advantages);
        list.number("largest |advantage|", self.largest_advantage());
        list.number("zero advantages", self.advantages.share_zero());
        list.spread("teacher - server ", &self.distilled);
        list.number("zero distillation", self.distilled.share_zero());
    }

    /// Returns the size of the largest advantage.
    pub fn largest_advantage(&self) -> Option<f64> {
        let advantages = &self.advantages;
        (advantages.count > 0).then(|| advantages.min.abs().max(advantages.max.abs()))
    }
}

//! Pairs of answers of which one was better, in TRL's conversational form.
//!
//! Two rules make pairs. *Same prompt*: rows with equal messages and tools (choices
//! of one request, retries, regenerations) are compared by reward, and the best is
//! chosen over each that is strictly worse. *Redo*: a turn with a negative reward
//! that a person followed up on, and its direct successor with a positive one; the
//! prompt is the earlier one, so that the answer is preferred without the
//! correction. Equal answers make no pair.

use std::collections::{BTreeSet, HashMap};

use serde_json::{Value, json};

use super::export::{Left, Told, told, worth};
use crate::trajectory::Turn;
use crate::trajectory::words::NextStateKind;
use crate::wire::json::canonical;

/// A pair, and the rule that made it.
#[derive(Debug, Clone, PartialEq)]
pub struct Pair {
    /// `same_prompt` or `redo`.
    pub rule: &'static str,
    /// `{"prompt", "chosen", "rejected", "tools"?}`.
    pub line: Value,
}

/// Collects rows and makes pairs of them.
#[derive(Debug, Default)]
pub struct Preferences {
    rows: Vec<Row>,
    left: Left,
}

#[derive(Debug)]
struct Row {
    turn_id: String,
    parent: Option<String>,
    prompt: String,
    told: Told,
    worth: f32,
    followed_up: bool,
}

impl Preferences {
    /// Takes a row.
    pub fn add(&mut self, turn: &Turn) {
        let worth = worth(turn).ok_or("no_reward");
        match worth.and_then(|worth| Ok((worth, told(turn)?))) {
            Err(reason) => *self.left.entry(reason).or_default() += 1,
            Ok((worth, told)) => self.rows.push(Row {
                turn_id: turn.turn_id.clone(),
                parent: turn.parent_turn_id.clone(),
                prompt: canonical(&json!([told.messages, told.tools])),
                told,
                worth,
                followed_up: turn.next_state_kind == NextStateKind::User,
            }),
        }
    }

    /// Returns the pairs, and how many rows are in none by what reason.
    pub fn finish(mut self) -> (Vec<Pair>, Left) {
        let mut used = BTreeSet::new();
        let mut pairs = Vec::new();
        for group in self.same_prompt() {
            let mut ranked = group;
            // The first of equals is chosen.
            ranked.sort_by(|a, b| self.rows[*b].worth.total_cmp(&self.rows[*a].worth));
            let Some((best, others)) = ranked.split_first() else { continue };
            for other in others {
                let worse = self.rows[*other].worth < self.rows[*best].worth;
                if worse && let Some(line) = self.pair(*best, *other) {
                    used.extend([*best, *other]);
                    pairs.push(Pair { rule: "same_prompt", line });
                }
            }
        }
        let by_id: HashMap<&str, usize> =
            self.rows.iter().enumerate().map(|(at, row)| (row.turn_id.as_str(), at)).collect();
        for (redo, row) in self.rows.iter().enumerate() {
            let parent = row.parent.as_deref().and_then(|parent| by_id.get(parent));
            let Some(first) = parent.filter(|_| row.worth > 0.0) else { continue };
            let corrected = self.rows[*first].worth < 0.0 && self.rows[*first].followed_up;
            if corrected && let Some(line) = self.pair(redo, *first) {
                used.extend([redo, *first]);
                pairs.push(Pair { rule: "redo", line });
            }
        }
        let alone = (self.rows.len() - used.len()) as u64;
        if alone > 0 {
            self.left.insert("no_partner", alone);
        }
        (pairs, self.left)
    }

    /// Groups rows by prompt, in the order in which prompts came.
    fn same_prompt(&self) -> Vec<Vec<usize>> {
        let mut places: HashMap<&str, usize> = HashMap::new();
        let mut groups: Vec<Vec<usize>> = Vec::new();
        for (at, row) in self.rows.iter().enumerate() {
            let place = *places.entry(&row.prompt).or_insert(groups.len());
            if place == groups.len() {
                groups.push(Vec::new());
            }
            groups[place].push(at);
        }
        groups
    }

    fn pair(&self, chosen: usize, rejected: usize) -> Option<Value> {
        let (chosen, rejected) = (&self.rows[chosen].told, &self.rows[rejected].told);
        if chosen.response == rejected.response {
            return None;
        }
        let mut line = json!({
            "prompt": rejected.messages,
            "chosen": [chosen.response],
            "rejected": [rejected.response],
        });
        if let Some(tools) = &rejected.tools {
            line["tools"] = tools.clone();
        }
        Some(line)
    }
}

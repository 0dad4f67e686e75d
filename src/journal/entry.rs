//! A turn between its answer and its row.

use serde::{Deserialize, Serialize};

use crate::trajectory::turn::Micros;
use crate::trajectory::words::{
    LogProbKind, NextStateKind, SessionSource, Status, TokenSource, WeightVersionSource,
};
use crate::trajectory::{Sampling, Turn};

/// A turn between its answer and its row: what `serve` writes of it, and what
/// pairing needs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the meanings stand in the schema")]
pub struct Entry {
    pub session_id: String,
    pub turn: u32,
    pub turn_id: String,
    pub parent_turn_id: Option<String>,
    pub branch: String,
    pub request_id: String,
    pub choice: u8,
    pub client: Option<String>,
    #[serde(with = "word")]
    pub session_source: SessionSource,
    pub session_confidence: f32,
    pub created_at: i64,
    pub finished_at: i64,
    pub model: String,
    pub weight_version: Option<String>,
    pub weight_version_end: Option<String>,
    #[serde(with = "word")]
    pub weight_version_source: WeightVersionSource,
    pub sampling: Settings,
    pub messages: String,
    pub tools: Option<String>,
    pub response: String,
    pub finish_reason: Option<String>,
    pub matched_stop: Option<String>,
    pub ends_with_stop_token: Option<bool>,
    #[serde(with = "word")]
    pub status: Status,
    pub usage_completion_tokens: Option<u32>,
    pub prompt_ids: Option<Vec<i32>>,
    pub response_ids: Option<Vec<i32>>,
    pub rollout_log_probs: Option<Vec<Option<f32>>>,
    #[serde(with = "word")]
    pub token_source: TokenSource,
    pub untrainable_reason: Option<String>,
    pub next_state: Option<String>,
    #[serde(with = "word")]
    pub next_state_kind: NextStateKind,
    pub session_end: bool,
    pub reward_explicit: Option<f32>,
    pub feedback_text: Option<String>,
    /// What made the ids.
    #[serde(default)]
    pub origin: Origin,
    /// What pairing needs.
    pub lineage: Lineage,
}

/// Which tokenizer and chat template made the ids of a turn, as far as that is
/// known.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Origin {
    /// Hash of the tokenizer.
    pub tokenizer_hash: Option<String>,
    /// Hash of the chat template.
    pub chat_template_hash: Option<String>,
}

/// Sampling settings, as they are logged.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the meanings stand in the schema")]
pub struct Settings {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<i32>,
    pub min_p: Option<f32>,
    pub seed: Option<i64>,
    pub max_tokens: Option<u32>,
    #[serde(with = "word")]
    pub log_prob_kind: LogProbKind,
}

/// What pairing needs of a turn and its row does not hold.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Lineage {
    /// Whether the client named the session.
    pub stated: bool,
    /// Identity of the messages and the answer. None if the answer is empty.
    pub key: Option<String>,
    /// Identity of the leading system messages.
    pub system: String,
    /// The client's address.
    pub address: Option<String>,
}

/// What is kept of a turn after its row is written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the meanings stand in the schema")]
pub struct Remembered {
    pub turn_id: String,
    pub session_id: String,
    pub turn: u32,
    pub branch: String,
    pub client: Option<String>,
    pub finished_at: i64,
    pub lineage: Lineage,
}

impl Entry {
    /// Returns what is kept after the row is written.
    pub fn remembered(&self) -> Remembered {
        Remembered {
            turn_id: self.turn_id.clone(),
            session_id: self.session_id.clone(),
            turn: self.turn,
            branch: self.branch.clone(),
            client: self.client.clone(),
            finished_at: self.finished_at,
            lineage: self.lineage.clone(),
        }
    }

    /// Returns about how many bytes the row takes in memory.
    pub fn weight(&self) -> usize {
        let text = |text: &Option<String>| text.as_ref().map_or(0, String::len);
        let ids = |ids: &Option<Vec<i32>>| ids.as_ref().map_or(0, |ids| 4 * ids.len());
        256 + self.messages.len()
            + self.response.len()
            + text(&self.tools)
            + text(&self.next_state)
            + ids(&self.prompt_ids)
            + 3 * ids(&self.response_ids)
    }

    /// Returns the row.
    pub(super) fn row(&self) -> Turn {
        let entry = self.clone();
        Turn {
            session_id: entry.session_id,
            turn: entry.turn,
            turn_id: entry.turn_id,
            parent_turn_id: entry.parent_turn_id,
            branch: entry.branch,
            request_id: entry.request_id,
            choice: entry.choice,
            client: entry.client,
            session_source: entry.session_source,
            session_confidence: entry.session_confidence,
            created_at: Micros(entry.created_at),
            finished_at: Micros(entry.finished_at),
            model: entry.model,
            weight_version: entry.weight_version,
            weight_version_end: entry.weight_version_end,
            weight_version_source: entry.weight_version_source,
            sampling: entry.sampling.into(),
            messages: entry.messages,
            tools: entry.tools,
            response: entry.response,
            finish_reason: entry.finish_reason,
            matched_stop: entry.matched_stop,
            ends_with_stop_token: entry.ends_with_stop_token,
            status: entry.status,
            usage_completion_tokens: entry.usage_completion_tokens,
            prompt_ids: entry.prompt_ids,
            response_ids: entry.response_ids,
            rollout_log_probs: entry.rollout_log_probs,
            token_source: entry.token_source,
            untrainable_reason: entry.untrainable_reason,
            next_state: entry.next_state,
            next_state_kind: entry.next_state_kind,
            session_end: entry.session_end,
            reward_explicit: entry.reward_explicit,
            feedback_text: entry.feedback_text,
            score: None,
            votes: None,
            judge_text: None,
            judge_error: None,
            hints: None,
            hint_votes: None,
            hint_error: None,
            teacher: None,
            teacher_temperature: None,
            student_version: None,
            topk: None,
            teacher_log_probs: None,
            teacher_topk_ids: None,
            teacher_topk_log_probs: None,
            teacher_at_student: None,
            student_topk_ids: None,
            student_topk_log_probs: None,
            teacher_error: None,
            reward: None,
            reward_source: None,
            sample_kind: None,
            sample_reason: None,
            promoted: None,
            loss_mask: None,
            rl_advantages: None,
            advantages: None,
            advantage_error: None,
        }
    }
}

impl From<Settings> for Sampling {
    fn from(settings: Settings) -> Self {
        Self {
            temperature: settings.temperature,
            top_p: settings.top_p,
            top_k: settings.top_k,
            min_p: settings.min_p,
            seed: settings.seed,
            max_tokens: settings.max_tokens,
            log_prob_kind: settings.log_prob_kind,
        }
    }
}

/// Words of the schema as text.
pub(super) mod word {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    use crate::trajectory::words::Word;

    pub(in crate::journal) fn serialize<W: Word, S: Serializer>(
        word: &W,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.serialize_str(word.as_str())
    }

    pub(in crate::journal) fn deserialize<'de, W: Word, D: Deserializer<'de>>(
        from: D,
    ) -> Result<W, D::Error> {
        let text = String::deserialize(from)?;
        W::parse(&text).ok_or_else(|| D::Error::custom(format!("unknown word `{text}`")))
    }
}

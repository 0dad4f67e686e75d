//! What is logged of an answer.

use crate::capture::{Captured, Outcome};
use crate::journal::{self, Entry, Lineage};
use crate::session::{Known, Source};
use crate::trajectory::words::{
    LogProbKind, NextStateKind, SessionSource, Status, TokenSource, WeightVersionSource,
};

use super::exchange::{Asked, Exchange};

/// What is known of a turn besides its answer.
pub(super) struct Turn {
    pub(super) turn_id: String,
    /// None if nobody can extend it.
    pub(super) known: Option<Known>,
    pub(super) finished_at: i64,
}

/// Makes what is logged of one choice.
pub(super) fn entry(
    exchange: &Exchange,
    choice: Captured,
    (turn, asked): (Turn, Asked),
    polled: &(Option<String>, Option<String>),
) -> Entry {
    let Turn { turn_id, known, finished_at } = turn;
    let arrival = &exchange.arrival;
    let engine = exchange.engine.as_deref();
    let Asked { model, messages, tools, settings, client, address, system, created_at } = asked;
    let (weight_version, weight_version_end, weight_version_source) = match choice.weight_version {
        Some(start) => (Some(start), choice.weight_version_end, WeightVersionSource::Answer),
        None if polled.0.is_some() => {
            (polled.0.clone(), polled.1.clone(), WeightVersionSource::Polled)
        }
        None => (None, None, WeightVersionSource::None),
    };
    Entry {
        session_id: arrival.session_id.clone(),
        turn: arrival.turn,
        turn_id,
        parent_turn_id: arrival.parent.clone(),
        branch: known.as_ref().map_or_else(|| arrival.branch.clone(), |known| known.branch.clone()),
        request_id: arrival.id.clone(),
        choice: choice.choice,
        client,
        session_source: match arrival.source {
            Source::Header => SessionSource::Header,
            Source::Affinity => SessionSource::Affinity,
            Source::Body => SessionSource::Body,
            Source::Inferred => SessionSource::Inferred,
            Source::None => SessionSource::None,
        },
        session_confidence: arrival.confidence,
        created_at,
        finished_at,
        model,
        weight_version,
        weight_version_end,
        weight_version_source,
        sampling: journal::Settings {
            temperature: settings.temperature.or(engine.and_then(|engine| engine.temperature)),
            top_p: settings.top_p,
            top_k: settings.top_k,
            min_p: settings.min_p,
            seed: settings.seed,
            max_tokens: settings.max_tokens,
            log_prob_kind: engine.map_or(LogProbKind::Unknown, |engine| engine.log_prob_kind),
        },
        messages,
        tools,
        response: choice.response.to_string(),
        finish_reason: choice.finish_reason,
        matched_stop: choice.matched_stop,
        ends_with_stop_token: choice.ends_with_stop_token,
        status: match choice.outcome {
            Outcome::Complete => Status::Complete,
            Outcome::Truncated => Status::Truncated,
            Outcome::Aborted => Status::Aborted,
            Outcome::Failed => Status::Failed,
        },
        usage_completion_tokens: choice.completion_tokens,
        token_source: match choice.response_ids {
            Some(_) => TokenSource::Engine,
            None => TokenSource::None,
        },
        prompt_ids: choice.prompt_ids,
        response_ids: choice.response_ids,
        rollout_log_probs: choice.log_probs,
        untrainable_reason: choice.untrainable_reason.map(str::to_owned),
        next_state: None,
        next_state_kind: NextStateKind::None,
        session_end: false,
        reward_explicit: None,
        feedback_text: None,
        origin: engine.map(|engine| engine.origin.clone()).unwrap_or_default(),
        lineage: Lineage {
            stated: !matches!(arrival.source, Source::Inferred | Source::None),
            key: known.map(|known| known.key.to_string()),
            system: system.to_string(),
            address,
        },
    }
}

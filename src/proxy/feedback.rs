//! `/v1/feedback`: what somebody says about a turn.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::journal::Feedback;

use super::error::Refusal;
use super::recorder::now;
use super::{Shared, body};

/// Takes feedback for a turn: by its id, by session and number, or for the
/// latest of a session.
pub(super) async fn feedback(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let given = match body::read(&shared, request.into_body()).await {
        Ok((body, _waiting)) => read(&body),
        Err(refusal) => Err(refusal),
    };
    let kept = match given {
        Ok(feedback) => shared.recorder.feedback(feedback).await,
        Err(refusal) => {
            shared.metrics.refuse(refusal.code);
            return refusal.into_response();
        }
    };
    match kept {
        Some((turn_id, in_row)) => {
            let status = if in_row { StatusCode::OK } else { StatusCode::ACCEPTED };
            (status, Json(json!({ "turn_id": turn_id, "in_row": in_row }))).into_response()
        }
        None => {
            let message = "the feedback could not be kept";
            let code = "feedback_not_kept";
            Refusal::new(StatusCode::SERVICE_UNAVAILABLE, code, message)
                .retry_after(5)
                .into_response()
        }
    }
}

fn read(body: &[u8]) -> Result<Feedback, Refusal> {
    let refuse = |message: &str| Refusal::bad_request("bad_feedback", message);
    let given: Value =
        serde_json::from_slice(body).map_err(|error| refuse(&format!("not JSON: {error}")))?;
    let text = |name: &str| match given.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) if text.trim().is_empty() => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(refuse(&format!("`{name}` is no text"))),
    };
    let reward = match given.get("reward") {
        None | Some(Value::Null) => None,
        Some(reward) => match reward.as_f64().filter(|reward| (-1.0..=1.0).contains(reward)) {
            Some(reward) => Some(reward as f32),
            None => return Err(refuse("`reward` is no number from -1 to 1")),
        },
    };
    let turn = match given.get("turn") {
        None | Some(Value::Null) => None,
        Some(turn) => match turn.as_u64().and_then(|turn| u32::try_from(turn).ok()) {
            Some(turn) => Some(turn),
            None => return Err(refuse("`turn` is no turn's number")),
        },
    };
    let feedback = Feedback {
        turn_id: text("turn_id")?,
        session_id: text("session_id")?,
        turn,
        reward,
        text: text("text")?.or(text("feedback")?),
        at: now(),
    };
    if feedback.turn_id.is_none() && feedback.session_id.is_none() {
        return Err(refuse("neither `turn_id` nor `session_id` is given"));
    }
    if feedback.reward.is_none() && feedback.text.is_none() {
        return Err(refuse("neither `reward` nor `text` is given"));
    }
    Ok(feedback)
}

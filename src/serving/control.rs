//! The control routes: weights, pause, abort; and the tokenizer's.

use std::path::PathBuf;

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tokio::sync::oneshot;

use crate::template::{Rendering, Tokenizer};
use crate::wire::sglang::{
    AbortBody, DetokenizeBody, LoadAdapterBody, PauseBody, TokenizeBody, UnloadAdapterBody,
    UpdateBody, VersionBody,
};

use super::adapters::{Load, Unload};
use super::chat::check_messages;
use super::compute::{Command, Update};
use super::failure::{Failure, parse};
use super::request::check_name;
use super::routes::Served;

/// Loads the weights of a folder; a folder that cannot be loaded changes nothing.
pub(super) async fn update(served: &Served, body: &[u8]) -> Result<Response, Failure> {
    let body: UpdateBody = parse(body)?;
    check_name("weight_version", body.weight_version.as_deref())?;
    let folder = PathBuf::from(&body.model_path);
    let carried = match same_tokenizer(&folder, &served.chat.tokenizer) {
        Ok(()) => {
            let (reply, answer) = oneshot::channel();
            let abort = body.abort_all_requests;
            let version = body.weight_version;
            let update = Update { folder, version, abort, reply };
            served.compute.send(Command::Update(update))?;
            answer.await.map_err(|_| Failure::stopped())?
        }
        Err(message) => Err(message),
    };
    let (status, success, message, carried) = match carried {
        Ok(carried) => {
            (StatusCode::OK, true, "Succeeded to update model weights.".to_owned(), carried)
        }
        Err(message) => (StatusCode::BAD_REQUEST, false, message, 0),
    };
    let body = json!({"success": success, "message": message, "num_paused_requests": carried});
    Ok((status, Json(body)).into_response())
}

/// Refuses a folder whose ids mean something else. One without a tokenizer is
/// taken at its word.
pub(super) fn same_tokenizer(folder: &std::path::Path, served: &Tokenizer) -> Result<(), String> {
    if !folder.join("tokenizer.json").is_file() {
        return Ok(());
    }
    let found = Tokenizer::load(folder).map_err(|error| error.to_string())?;
    match found.hash() == served.hash() {
        true => Ok(()),
        false => Err(format!("`{}` has another tokenizer than the served model", folder.display())),
    }
}

/// Sets the version that answers carry, and nothing else.
pub(super) async fn name_version(served: &Served, body: &[u8]) -> Result<Response, Failure> {
    let VersionBody { new_version, abort_all_requests } = parse(body)?;
    check_name("new_version", Some(&new_version))?;
    if abort_all_requests {
        served.compute.send(Command::Abort(None))?;
    }
    let (reply, answer) = oneshot::channel();
    served.compute.send(Command::NameVersion(new_version.clone(), reply))?;
    answer.await.map_err(|_| Failure::stopped())?;
    let message = format!("Weight version updated to {new_version}");
    Ok(Json(json!({"success": true, "message": message, "new_version": new_version}))
        .into_response())
}

/// Loads an adapter beside the model; one that cannot be loaded changes nothing.
pub(super) async fn load_adapter(served: &Served, body: &[u8]) -> Result<Response, Failure> {
    let LoadAdapterBody { lora_name: name, lora_path } = parse(body)?;
    check_name("lora_name", Some(&name))?;
    let loaded = match name.as_str() {
        "" => Err("`lora_name` is empty".to_owned()),
        name if name == served.name => Err(format!("`{name}` is the name of the model itself")),
        _ => {
            let (reply, answer) = oneshot::channel();
            let folder = PathBuf::from(lora_path);
            served.compute.send(Command::Load(Load { name, folder, reply }))?;
            answer.await.map_err(|_| Failure::stopped())?
        }
    };
    Ok(adapters(served, loaded))
}

/// Lets go of an adapter. Running answers keep it to their end.
pub(super) async fn unload_adapter(served: &Served, body: &[u8]) -> Result<Response, Failure> {
    let UnloadAdapterBody { lora_name: name } = parse(body)?;
    let (reply, answer) = oneshot::channel();
    served.compute.send(Command::Unload(Unload { name, reply }))?;
    let gone = answer.await.map_err(|_| Failure::stopped())?;
    Ok(adapters(served, gone))
}

/// Returns SGLang's answer about adapters. `message` says the same as `error_message`,
/// for clients that know the other routes.
fn adapters(served: &Served, done: Result<(), String>) -> Response {
    let loaded = served.compute.status().adapters.object();
    let (status, error) = match done {
        Ok(()) => (StatusCode::OK, Value::Null),
        Err(error) => (StatusCode::BAD_REQUEST, Value::from(error)),
    };
    let success = error.is_null();
    let body = json!({
        "success": success, "error_message": error, "message": error, "loaded_adapters": loaded,
    });
    (status, Json(body)).into_response()
}

/// Stops generating.
pub(super) async fn pause(served: &Served, body: &[u8]) -> Result<Response, Failure> {
    let body: PauseBody = if body.is_empty() { PauseBody::default() } else { parse(body)? };
    let (reply, answer) = oneshot::channel();
    served.compute.send(Command::Pause(body.mode, reply))?;
    answer.await.map_err(|_| Failure::stopped())?;
    Ok(Json(json!({"message": "Generation paused successfully.", "status": "ok"})).into_response())
}

/// Goes on generating. Answers once it does: who asks `/ready` next hears so.
pub(super) async fn resume(served: &Served) -> Result<Response, Failure> {
    let (reply, answer) = oneshot::channel();
    served.compute.send(Command::Continue(reply))?;
    answer.await.map_err(|_| Failure::stopped())?;
    Ok(Json(json!({"message": "Generation continued successfully.", "status": "ok"}))
        .into_response())
}

/// Drops the keys and values that have outlived their answers.
pub(super) async fn flush(served: &Served) -> Result<Response, Failure> {
    let (reply, answer) = oneshot::channel();
    served.compute.send(Command::Flush(reply))?;
    answer.await.map_err(|_| Failure::stopped())?;
    Ok("Cache flushed.\n".into_response())
}

/// Ends a request, or all.
pub(super) fn abort(served: &Served, body: &[u8]) -> Result<Response, Failure> {
    let body: AbortBody = parse(body)?;
    let rid = body.rid.filter(|rid| !body.abort_all && !rid.is_empty());
    if rid.is_none() && !body.abort_all {
        return Err(Failure::bad("give a `rid`, or `abort_all`"));
    }
    served.compute.send(Command::Abort(rid))?;
    Ok(StatusCode::OK.into_response())
}

/// Returns the ids of a text, or of messages as the chat route renders them.
pub(super) fn tokenize(served: &Served, body: &[u8]) -> Result<Json<Value>, Failure> {
    let body: TokenizeBody = parse(body)?;
    let bad = |error: crate::template::Error| Failure::bad(error.to_string());
    let ids = match (&body.prompt, &body.messages) {
        (Some(prompt), None) => served.chat.tokenizer.encode(prompt).map_err(bad)?,
        (None, Some(messages)) => {
            check_messages(messages)?;
            let none = serde_json::Map::new();
            let rendering = Rendering {
                messages,
                tools: body.tools.as_deref().filter(|tools| !tools.is_empty()),
                add_generation_prompt: body.add_generation_prompt != Some(false),
                extra: body.chat_template_kwargs.as_ref().unwrap_or(&none),
            };
            served.chat.prompt_ids(&rendering).map_err(bad)?
        }
        _ => return Err(Failure::bad("give exactly one of `prompt` and `messages`")),
    };
    let longest = served.config.max_position_embeddings;
    Ok(Json(json!({"count": ids.len(), "max_model_len": longest, "tokens": ids})))
}

/// Returns the text of ids.
pub(super) fn detokenize(served: &Served, body: &[u8]) -> Result<Json<Value>, Failure> {
    let body: DetokenizeBody = parse(body)?;
    let ids: Vec<i32> = body
        .tokens
        .iter()
        .map(|id| i32::try_from(*id))
        .collect::<Result<_, _>>()
        .map_err(|_| Failure::bad("an id is no 32-bit number"))?;
    let unknown = ids.iter().find(|id| served.chat.tokenizer.token_of(**id).is_none());
    if let Some(id) = unknown {
        return Err(Failure::of("tokens", format!("id {id} is not in the vocabulary")));
    }
    let skip = body.skip_special_tokens != Some(false);
    let text = served
        .chat
        .tokenizer
        .decode(&ids, skip)
        .map_err(|error| Failure::bad(error.to_string()))?;
    Ok(Json(json!({"text": text})))
}

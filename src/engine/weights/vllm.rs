//! The same for vLLM, whose routes for this exist only in its developer mode. Weights
//! are read again by its workers, and what it calls them is set apart from that.

use reqwest::Method;
use serde_json::json;

use super::{Carried, Pushed, did};
use crate::engine::{Engine, Error, NativeCall};
use crate::wire::sglang::{ModelInfo, PauseMode};

const MODE: &str = "hold and load weights unless it was started with `VLLM_SERVER_DEV_MODE=1`";

pub(super) async fn carried(engine: &Engine) -> Result<Carried, Error> {
    match engine.quick(Method::GET, "/weight_info", None).await {
        Ok(answer) => {
            let version = answer.json::<ModelInfo>()?.weight_version;
            Ok(Carried { version, tells: true, folder: None })
        }
        Err(error) if error.is_wrong_path() => Ok(Carried::default()),
        Err(error) => Err(error),
    }
}

/// New requests wait in the queue; in the other modes they would be refused.
pub(super) async fn pause(engine: &Engine, mode: PauseMode) -> Result<(), Error> {
    let path = match mode {
        PauseMode::Abort => "/pause?mode=abort&clear_cache=false",
        PauseMode::InPlace | PauseMode::Retract => "/pause?mode=keep&clear_cache=false",
    };
    let answer = engine.control(path, &json!({})).await;
    did(&answer.map_err(|error| developer(engine, error))?, false)
}

pub(super) async fn resume(engine: &Engine) -> Result<(), Error> {
    did(&engine.control("/resume", &json!({})).await?, false)
}

/// Lets every worker read the folder, and then sets the version where there is a
/// route for that.
pub(super) async fn update(engine: &Engine, pushed: Pushed<'_>) -> Result<(), Error> {
    let folder = pushed.folder.display().to_string();
    let body = json!({"method": "reload_weights", "kwargs": {"weights_path": folder}});
    let call = NativeCall {
        method: Method::POST,
        path: "/collective_rpc",
        body: Some(&body),
        timeout: None,
        retries: None,
    };
    let answer = engine.native(call).await.map_err(|error| developer(engine, error))?;
    did(&answer, false)?;
    let body = json!({"new_version": pushed.version});
    match engine.control("/update_weight_version", &body).await {
        Ok(answer) => did(&answer, false),
        Err(error) if error.is_wrong_path() => Ok(()),
        Err(error) => Err(error),
    }
}

/// Held requests are computed anew, too: their caches are of the weights before.
pub(super) async fn flush(engine: &Engine) -> Result<(), Error> {
    let path = "/reset_prefix_cache?reset_running_requests=true";
    let answer = engine.control(path, &json!({})).await;
    did(&answer.map_err(|error| developer(engine, error))?, true)
}

fn developer(engine: &Engine, error: Error) -> Error {
    match error.is_wrong_path() {
        true => Error::Unsupported { url: engine.url(), dialect: engine.dialect(), what: MODE },
        false => error,
    }
}

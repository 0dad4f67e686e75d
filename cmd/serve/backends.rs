//! The engines that `serve` passes chats to, and what it finds out about them.

use std::path::{Path, PathBuf};

use oclaw::engine::{self, Dialect, Engine, EngineOptions};
use oclaw::proxy::{Backend, Names, Origin};
use oclaw::template::{Template, Tokenizer};

use super::Args;
use crate::common::Context;
use crate::embedded::{self, Embedded};
use crate::report::Failure;

/// Returns the engines to serve, and the one that runs inside this process.
pub(super) async fn all(
    args: &Args,
    context: &Context,
) -> anyhow::Result<(Vec<Backend>, Option<Embedded>)> {
    if let Some(model) = &args.model {
        let inside = Embedded::start(context, model, args.engine_listen, &args.dtype).await?;
        let backend = attach(args, EngineOptions::new(inside.url())).await?;
        return Ok((vec![backend], Some(inside)));
    }
    if args.engine.is_empty() {
        let failure = Failure::usage("nobody to answer the chats");
        return Err(failure.hint("give `--engine URL` or `--model DIR`").into());
    }
    let key = embedded::key("serve", args.engine_key_file.as_deref())?;
    let mut backends: Vec<Backend> = Vec::new();
    for url in &args.engine {
        let mut options = EngineOptions::new(url);
        options.key = key.clone();
        let mut backend = attach(args, options).await?;
        backend.key = key.clone();
        // The same one twice would only look like two.
        if backends.iter().all(|known| known.engine.url() != backend.engine.url()) {
            backends.push(backend);
        }
    }
    Ok((backends, None))
}

/// Says who the engines are.
pub(super) fn told(backends: &[Backend]) -> String {
    let one = |backend: &Backend| {
        let engine = &backend.engine;
        format!("{} ({})", engine.url(), engine.dialect())
    };
    backends.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// Finds out what an engine speaks, where its routes are, and what it calls the
/// model if clients call it otherwise.
async fn attach(args: &Args, mut options: EngineOptions) -> anyhow::Result<Backend> {
    let (engine, names) = match &args.model_name {
        Some(public) => {
            options.model = args.engine_model.clone();
            let engine = Engine::connect(options).await?;
            let name = engine.model().unwrap_or_default().to_owned();
            let names = Names { public: public.clone(), engine: name };
            (engine, Some(names))
        }
        None => (listed(Engine::attach(options).await?).await?, None),
    };
    Ok(Backend {
        names,
        temperature: default_temperature(&engine).await,
        origin: origin(args.model.as_deref(), &engine).await,
        ..Backend::new(engine)
    })
}

/// Makes sure that an engine is there.
async fn listed(engine: Engine) -> anyhow::Result<Engine> {
    match engine.models().await {
        Ok(_) => {}
        Err(
            error @ (engine::Error::Unreachable { .. }
            | engine::Error::Timeout { .. }
            | engine::Error::Unauthorized { .. }),
        ) => return Err(error.into()),
        // Not every server lists its models.
        Err(error) => tracing::warn!(%error, "cannot list the engine's models"),
    }
    Ok(engine)
}

/// Finds the temperature that SGLang takes where a request states none: that of
/// the model's `generation_config.json`, if the folder is on this machine.
async fn default_temperature(engine: &Engine) -> Option<f32> {
    if engine.dialect() != Dialect::Sglang {
        return None;
    }
    let folder = PathBuf::from(engine.model_info().await.ok()?.model_path?);
    if !folder.join("config.json").is_file() {
        return None;
    }
    let Ok(text) = std::fs::read_to_string(folder.join("generation_config.json")) else {
        return Some(1.0);
    };
    let config: serde_json::Value = serde_json::from_str(&text).ok()?;
    match config.get("temperature") {
        None | Some(serde_json::Value::Null) => Some(1.0),
        Some(temperature) => temperature.as_f64().map(|temperature| temperature as f32),
    }
}

/// Finds the tokenizer and the chat template that make the ids: in the model's
/// folder, or in the one that SGLang names, if that is on this machine. Another
/// server's ids are nobody's that we know.
async fn origin(model: Option<&Path>, engine: &Engine) -> Origin {
    let folder = match model {
        Some(model) => Some(model.to_owned()),
        None if engine.dialect() == Dialect::Sglang => {
            let info = engine.model_info().await.unwrap_or_default();
            // A relative path, or a hub name, is relative to the server.
            let named = info.tokenizer_path.or(info.model_path).map(PathBuf::from);
            named.filter(|folder| folder.is_absolute())
        }
        None => None,
    };
    let Some(folder) = folder else { return Origin::default() };
    Origin {
        tokenizer_hash: Tokenizer::hash_of(&folder).ok(),
        chat_template_hash: Template::load(&folder).ok().map(|template| template.hash()),
    }
}

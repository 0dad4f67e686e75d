//! Which path leads where, who may go there, and what the engine says of itself.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::Router;
use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE};
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::model::Config;
use crate::template::Chat;
use crate::wire::prometheus;
use crate::wire::secret::equal_in_constant_time;
use crate::wire::sglang::ChatBody;

use super::adapters::AdapterId;
use super::admission::Gate;
use super::body::{Unwanted, Whole, drop_body};
use super::compute::{Compute, Plan};
use super::failure::Failure;
use super::generation::{Generation, Order};
use super::request::{Defaults, MOST_ANSWERS};
use super::text::{Form, Stops, Tools};
use super::{chat, completion, control, generate};

/// What may be asked without a key, as of SGLang: whether all is well, and figures.
const OPEN: [&str; 4] = ["/health", "/health_generate", "/ready", "/metrics"];
/// Limit of the generation behind `/health_generate`, as in SGLang.
const HEALTH: Duration = Duration::from_secs(20);

/// What every request sees.
#[derive(Debug)]
pub(super) struct Served {
    pub(super) chat: Chat,
    pub(super) config: Config,
    pub(super) name: String,
    pub(super) compute: Compute,
    /// SHA-256 of the key.
    pub(super) key: Option<[u8; 32]>,
    /// Lets requests in, up to a number.
    pub(super) gate: Gate,
    pub(super) max_running: usize,
    pub(super) max_waiting: usize,
    /// Bytes of keys and values of all answers together.
    pub(super) kv_memory: usize,
    pub(super) prefill_chunk: usize,
    /// Bytes of keys and values that may outlive their answers.
    pub(super) prefix_cache: usize,
    pub(super) dtype: &'static str,
    pub(super) seeds: AtomicU64,
}

type Shared = State<Arc<Served>>;

impl Served {
    /// Returns the seed of a request that names none. The answers of one request
    /// count on from it, so requests lie that far apart.
    pub(super) fn seed(&self) -> u64 {
        self.seeds.fetch_add(MOST_ANSWERS as u64, Ordering::Relaxed)
    }

    /// Returns the adapter that a request of the `/v1` routes names. The one in its
    /// `model` wins, as in SGLang.
    pub(super) fn adapter(&self, body: &ChatBody) -> Result<Option<AdapterId>, Failure> {
        let names = self.compute.status().adapters;
        let model = body.model.as_deref().unwrap_or_default();
        match names.of_model(model, &self.name)? {
            Some(id) => Ok(Some(id)),
            None => names.of_path(body.lora_path.as_deref()),
        }
    }

    /// Returns the handle of a request.
    pub(super) fn rid(&self, given: Option<&str>) -> Arc<str> {
        let given = given.filter(|rid| !rid.is_empty());
        given.map_or_else(|| uuid::Uuid::now_v7().simple().to_string().into(), Arc::from)
    }

    /// Returns seconds since 1970.
    pub(super) fn now(&self) -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
    }
}

/// Returns the routes.
pub(super) fn router(served: Arc<Served>) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/health_generate", get(health_generate))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics))
        .route("/model_info", get(model_info))
        .route("/get_model_info", get(model_info))
        .route("/server_info", get(server_info))
        .route("/get_server_info", get(server_info))
        .route("/v1/models", get(models))
        .route("/v1/chat/completions", post(complete))
        .route("/v1/completions", post(complete_text))
        .route("/v1/embeddings", post(embed))
        .route("/generate", post(generate).put(generate))
        .route("/tokenize", post(tokenize))
        .route("/v1/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/v1/detokenize", post(detokenize))
        .route("/update_weights_from_disk", post(update))
        .route("/update_weight_version", post(name_version))
        .route("/load_lora_adapter", post(load_adapter))
        .route("/unload_lora_adapter", post(unload_adapter))
        .route("/pause_generation", post(pause))
        .route("/continue_generation", post(resume))
        .route("/flush_cache", post(flush).get(flush))
        .route("/abort_request", post(abort))
        .method_not_allowed_fallback(wrong_method)
        .fallback(unknown)
        .layer(from_fn_with_state(served.clone(), guard))
        .with_state(served)
}

/// Returns what a key is remembered by.
pub(super) fn digest(key: &str) -> [u8; 32] {
    Sha256::digest(key.as_bytes()).into()
}

/// Lets a request in if it carries the key. Comparing digests tells nobody how
/// much of a wrong key was right.
async fn guard(State(served): Shared, request: Request, next: Next) -> Response {
    if let Some(key) = &served.key
        && !OPEN.contains(&request.uri().path())
    {
        let header = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        let given = header.and_then(|value| value.split_once(' '));
        let given = given.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
        let given = given.map(|(_, key)| key.trim());
        if !given.is_some_and(|given| equal_in_constant_time(key, &digest(given))) {
            drop_body(request).await;
            let refused = Failure::new(StatusCode::UNAUTHORIZED, "wrong or missing key");
            return refused.into_response();
        }
    }
    next.run(request).await
}

/// Gives what the router would refuse without a word the form of all other errors.
async fn wrong_method(method: Method, uri: Uri, _: Unwanted) -> Failure {
    Failure::new(StatusCode::METHOD_NOT_ALLOWED, no_route(&method, &uri))
}

async fn unknown(method: Method, uri: Uri, _: Unwanted) -> Failure {
    Failure::new(StatusCode::NOT_FOUND, no_route(&method, &uri))
}

fn no_route(method: &Method, uri: &Uri) -> String {
    format!("no route {method} {}", uri.path())
}

async fn health(State(served): Shared) -> StatusCode {
    match served.compute.status().alive {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    }
}

async fn ready(State(served): Shared) -> StatusCode {
    let status = served.compute.status();
    match status.alive && !status.paused {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    }
}

async fn health_generate(State(served): Shared) -> StatusCode {
    let order = Order {
        rid: served.rid(None),
        prompt: Arc::from([0]),
        adapter: None,
        plan: Plan {
            sampling: crate::model::SamplingParams { temperature: 0.0, ..Default::default() },
            max_new: 1,
            stop_ids: Vec::new(),
            top: 0,
            chosen: Vec::new(),
        },
        answers: 1,
        stops: Stops::default(),
        keep_stop: false,
        skip_special: true,
        think: None,
        tools: Tools::None,
        ticket: None,
    };
    let one = async {
        let mut generation = Generation::start(order, &served.compute, &served.chat.tokenizer)?;
        while generation.next().await?.is_some() {}
        Ok::<_, Failure>(())
    };
    match tokio::time::timeout(HEALTH, one).await {
        Ok(Ok(())) => StatusCode::OK,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    }
}

async fn metrics(State(served): Shared) -> Response {
    let text = served.compute.metrics.text(&served.compute.status(), &served.name);
    ([(CONTENT_TYPE, prometheus::CONTENT_TYPE)], text).into_response()
}

async fn model_info(State(served): Shared) -> Json<Value> {
    let status = served.compute.status();
    let folder = status.folder.display().to_string();
    Json(json!({
        "model_path": folder,
        "served_model_name": served.name,
        "tokenizer_path": folder,
        "is_generation": true,
        "preferred_sampling_params": Defaults::of(&served.config),
        "weight_version": &*status.version,
        "load_format": "auto",
        "reasoning_parser": chat::thinks(&served.chat.tokenizer).then_some("qwen3"),
        "tool_call_parser": match Form::of(&served.chat.tokenizer) {
            Form::Hermes => "qwen25",
            Form::Llama => "llama3",
        },
        "model_type": format!("{:?}", served.config.family).to_lowercase(),
        "max_model_len": served.config.max_position_embeddings,
    }))
}

async fn server_info(State(served): Shared) -> Json<Value> {
    let status = served.compute.status();
    Json(json!({
        "version": concat!("oclaw ", env!("CARGO_PKG_VERSION")),
        "model_path": status.folder.display().to_string(),
        "served_model_name": served.name,
        "dtype": served.dtype,
        "max_running_requests": served.max_running,
        "max_queued_requests": served.max_waiting,
        "kv_memory": served.kv_memory,
        "prefix_cache": served.prefix_cache,
        "chunked_prefill_size": served.prefill_chunk,
        "context_length": served.config.max_position_embeddings,
        "weight_version": &*status.version,
        "internal_states": [{
            "running": status.running,
            "waiting": status.waiting,
            "prefix_bytes": status.prefix_bytes,
            "paused": status.paused,
        }],
    }))
}

async fn models(State(served): Shared) -> Json<Value> {
    let status = served.compute.status();
    let entry = |id: &str, root: String, parent: Option<&str>| {
        json!({
            "id": id,
            "object": "model",
            "created": served.now(),
            "owned_by": "oclaw",
            "root": root,
            "parent": parent,
            "max_model_len": served.config.max_position_embeddings,
        })
    };
    let base = entry(&served.name, status.folder.display().to_string(), None);
    let adapters = status.adapters.list();
    let adapters = adapters.map(|(name, folder)| entry(name, folder, Some(&served.name)));
    let data: Vec<_> = std::iter::once(base).chain(adapters).collect();
    Json(json!({"object": "list", "data": data}))
}

async fn complete(State(served): Shared, headers: HeaderMap, Whole(body): Whole) -> Response {
    chat::complete(&served, &headers, &body).await.unwrap_or_else(IntoResponse::into_response)
}

async fn complete_text(State(served): Shared, headers: HeaderMap, Whole(body): Whole) -> Response {
    let answer = completion::complete(&served, &headers, &body).await;
    answer.unwrap_or_else(IntoResponse::into_response)
}

/// Refuses, as SGLang does for a model that generates.
async fn embed(State(served): Shared, _: Unwanted) -> Failure {
    Failure::bad(format!(
        "`{}` generates text and makes no embeddings: ask a server of an embedding model",
        served.name
    ))
}

async fn generate(State(served): Shared, Whole(body): Whole) -> Response {
    generate::generate(&served, &body).await.unwrap_or_else(|failure| failure.native())
}

async fn tokenize(State(served): Shared, Whole(body): Whole) -> Result<Json<Value>, Failure> {
    control::tokenize(&served, &body)
}

async fn detokenize(State(served): Shared, Whole(body): Whole) -> Result<Json<Value>, Failure> {
    control::detokenize(&served, &body)
}

async fn update(State(served): Shared, Whole(body): Whole) -> Result<Response, Failure> {
    control::update(&served, &body).await
}

async fn name_version(State(served): Shared, Whole(body): Whole) -> Result<Response, Failure> {
    control::name_version(&served, &body).await
}

async fn load_adapter(State(served): Shared, Whole(body): Whole) -> Result<Response, Failure> {
    control::load_adapter(&served, &body).await
}

async fn unload_adapter(State(served): Shared, Whole(body): Whole) -> Result<Response, Failure> {
    control::unload_adapter(&served, &body).await
}

async fn pause(State(served): Shared, Whole(body): Whole) -> Result<Response, Failure> {
    control::pause(&served, &body).await
}

async fn resume(State(served): Shared, _: Unwanted) -> Result<Response, Failure> {
    control::resume(&served).await
}

async fn flush(State(served): Shared, _: Unwanted) -> Result<Response, Failure> {
    control::flush(&served).await
}

async fn abort(State(served): Shared, Whole(body): Whole) -> Result<Response, Failure> {
    control::abort(&served, &body)
}

/// Returns the name under which a folder is served: its own.
pub(super) fn name_of(folder: &Path) -> String {
    let whole = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    whole.file_name().map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

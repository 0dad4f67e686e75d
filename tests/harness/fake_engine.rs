//! A scripted inference server on a port of its own. It answers from a script,
//! logs what it was asked, and can hold requests at a gate, so that a test waits
//! for events and never for time.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, Method, Uri};
use axum::response::Response;
use serde_json::{Value, json};
use tokio::sync::watch;

/// Longest that a test waits for an event.
const PATIENCE: Duration = Duration::from_secs(30);

/// One answer.
#[derive(Debug, Clone)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) body: String,
}

impl Reply {
    pub(crate) fn json(status: u16, body: Value) -> Self {
        let headers = vec![("content-type", "application/json".to_owned())];
        Self { status, headers, body: body.to_string() }
    }

    pub(crate) fn text(status: u16, body: &str) -> Self {
        let headers = vec![("content-type", "text/plain".to_owned())];
        Self { status, headers, body: body.to_owned() }
    }

    /// An answer whose connection breaks before its end.
    pub(crate) fn broken() -> Self {
        Self { status: 0, headers: Vec::new(), body: String::new() }
    }

    pub(crate) fn page() -> Self {
        Self::page_with(200)
    }

    pub(crate) fn page_with(status: u16) -> Self {
        let headers = vec![("content-type", "text/html; charset=utf-8".to_owned())];
        Self { status, headers, body: "<html>a web page</html>".to_owned() }
    }

    pub(crate) fn with(mut self, name: &'static str, value: &str) -> Self {
        self.headers.push((name, value.to_owned()));
        self
    }
}

/// A request as it arrived.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) path: String,
    pub(crate) query: String,
    pub(crate) authorization: Option<String>,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Value,
    pub(crate) at: Instant,
}

#[derive(Default)]
struct Inside {
    script: HashMap<String, VecDeque<Reply>>,
    /// The answer of every path without a script.
    otherwise: Option<Reply>,
    seen: Vec<Seen>,
    version: Option<String>,
    /// Path, and how many of its requests still pass.
    held: Option<(String, usize)>,
    /// Path of which one request is held.
    first: Option<String>,
    /// Path, and how many of its requests are answered until none is any more.
    deadly: Option<(String, usize)>,
    is_dead: bool,
    /// Whether the routes are vLLM's.
    is_vllm: bool,
    /// Adapters by name, with their folders.
    adapters: Vec<(String, String)>,
}

struct Shared {
    inside: Mutex<Inside>,
    arrival: Condvar,
    open: watch::Sender<bool>,
}

/// The server. Ends with the test.
pub(crate) struct FakeEngine {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
    _stop: tokio::sync::oneshot::Sender<()>,
}

impl FakeEngine {
    /// Starts a server that knows no path.
    pub(crate) fn start() -> Self {
        let open = watch::channel(true).0;
        let shared = Arc::new(Shared { inside: Mutex::default(), arrival: Condvar::new(), open });
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let (told, address) = std::sync::mpsc::channel();
        let inside = shared.clone();
        std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
                told.send(listener.local_addr().unwrap()).unwrap();
                let router = Router::new().fallback(answer).with_state(inside);
                tokio::select! {
                    result = std::future::IntoFuture::into_future(axum::serve(listener, router)) => result.unwrap(),
                    _ = stopped => {}
                }
            });
        });
        Self { address: address.recv().unwrap(), shared, _stop: stop }
    }

    /// Starts a server with SGLang's control routes at version `default`.
    pub(crate) fn sglang() -> Self {
        let fake = Self::start();
        fake.inside(|inside| inside.version = Some("default".to_owned()));
        fake
    }

    /// Starts a server with vLLM's control routes at version `default`.
    pub(crate) fn vllm() -> Self {
        let fake = Self::sglang();
        fake.inside(|inside| inside.is_vllm = true);
        fake
    }

    /// Dies when a path is asked for after so many more: nothing is answered then.
    pub(crate) fn die_after(&self, path: &str, pass: usize) {
        self.inside(|inside| inside.deadly = Some((path.to_owned(), pass)));
    }

    /// Answers everything again as it should.
    pub(crate) fn heal(&self) {
        self.release();
        self.inside(|inside| {
            (inside.is_dead, inside.deadly) = (false, None);
            inside.script.clear();
        });
    }

    /// Returns the names of its adapters.
    pub(crate) fn adapters(&self) -> Vec<String> {
        self.inside(|inside| inside.adapters.iter().map(|(name, _)| name.clone()).collect())
    }

    fn inside<T>(&self, change: impl FnOnce(&mut Inside) -> T) -> T {
        change(&mut self.shared.inside.lock().unwrap())
    }

    /// Scripts a path: the replies in order, the last one for ever.
    pub(crate) fn on(&self, path: &str, replies: impl IntoIterator<Item = Reply>) -> &Self {
        let replies = replies.into_iter().collect();
        self.inside(|inside| inside.script.insert(path.to_owned(), replies));
        self
    }

    /// Answers alike wherever no script is.
    pub(crate) fn otherwise(&self, reply: Reply) -> &Self {
        self.inside(|inside| inside.otherwise = Some(reply));
        self
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns every request so far.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.inside(|inside| inside.seen.clone())
    }

    /// Returns the paths of every request so far.
    pub(crate) fn paths(&self) -> Vec<String> {
        self.seen().into_iter().map(|seen| seen.path).collect()
    }

    /// Returns the version that the server would tell.
    pub(crate) fn version(&self) -> Option<String> {
        self.inside(|inside| inside.version.clone())
    }

    /// Carries the version of a fresh start again.
    pub(crate) fn restart(&self) {
        self.inside(|inside| inside.version = Some("default".to_owned()));
    }

    /// Forgets the requests so far.
    pub(crate) fn forget(&self) {
        self.inside(|inside| inside.seen.clear());
    }

    /// Holds requests of a path from now on.
    pub(crate) fn hold(&self, path: &str) {
        self.hold_after(path, 0);
    }

    /// Holds requests of a path after so many more.
    pub(crate) fn hold_after(&self, path: &str, pass: usize) {
        self.shared.open.send_replace(false);
        self.inside(|inside| inside.held = Some((path.to_owned(), pass)));
    }

    /// Holds the next request of a path, and none after it.
    pub(crate) fn hold_first(&self, path: &str) {
        self.shared.open.send_replace(false);
        self.inside(|inside| inside.first = Some(path.to_owned()));
    }

    /// Waits until a path was asked for so many times.
    pub(crate) fn arrived(&self, path: &str, times: usize) {
        let count = |inside: &Inside| inside.seen.iter().filter(|seen| seen.path == path).count();
        let guard = self.shared.inside.lock().unwrap();
        let waited =
            self.shared.arrival.wait_timeout_while(guard, PATIENCE, |inside| count(inside) < times);
        assert!(!waited.unwrap().1.timed_out(), "`{path}` was not asked for {times} times");
    }

    /// Lets held requests go.
    pub(crate) fn release(&self) {
        self.inside(|inside| inside.held = None);
        self.shared.open.send_replace(true);
    }
}

async fn answer(
    State(shared): State<Arc<Shared>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let path = uri.path().to_owned();
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let authorization =
        headers.get("authorization").map(|value| value.to_str().unwrap().to_owned());
    let held = {
        let mut inside = shared.inside.lock().unwrap();
        let seen = Seen {
            path: path.clone(),
            query: uri.query().unwrap_or_default().to_owned(),
            authorization,
            headers,
            body: body.clone(),
            at: Instant::now(),
        };
        inside.seen.push(seen);
        shared.arrival.notify_all();
        let is_first = inside.first.take_if(|first| *first == path).is_some();
        match &mut inside.held {
            _ if is_first => true,
            Some((held, 0)) => *held == path,
            Some((held, pass)) => {
                *pass -= usize::from(*held == path);
                false
            }
            None => false,
        }
    };
    if held {
        let mut open = shared.open.subscribe();
        open.wait_for(|open| *open).await.unwrap();
    }
    let reply = {
        let mut inside = shared.inside.lock().unwrap();
        dying(&mut inside, &path)
            .or_else(|| scripted(&mut inside, &path))
            .unwrap_or_else(|| control(&mut inside, &method, &path, &body))
    };
    if reply.status == 0 {
        let gone = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        let body = futures_util::stream::once(std::future::ready(Err::<Bytes, _>(gone)));
        return Response::new(Body::from_stream(body));
    }
    let mut response = Response::builder().status(reply.status);
    for (name, value) in reply.headers {
        response = response.header(name, value);
    }
    response.body(Body::from(reply.body)).unwrap()
}

fn dying(inside: &mut Inside, path: &str) -> Option<Reply> {
    match &mut inside.deadly {
        Some((deadly, 0)) if deadly == path => inside.is_dead = true,
        Some((deadly, pass)) if deadly == path => *pass -= 1,
        _ => {}
    }
    inside.is_dead.then(Reply::broken)
}

fn scripted(inside: &mut Inside, path: &str) -> Option<Reply> {
    let replies = inside.script.get_mut(path)?;
    match replies.len() {
        0 => None,
        1 => replies.front().cloned(),
        _ => replies.pop_front(),
    }
}

/// Answers as SGLang's control routes do, if this server has a version.
fn control(inside: &mut Inside, method: &Method, path: &str, body: &Value) -> Reply {
    if let Some(reply) = &inside.otherwise {
        return reply.clone();
    }
    let Some(version) = inside.version.clone() else {
        return Reply::json(404, json!({"detail": "Not Found"}));
    };
    if inside.is_vllm {
        return vllm(inside, path, body, version);
    }
    match (method.as_str(), path) {
        ("GET", "/v1/models") => listed(inside),
        ("POST", "/load_lora_adapter") => match load(inside, body) {
            true => Reply::json(200, json!({"success": true, "loaded_adapters": {}})),
            false => Reply::json(400, json!({"success": false, "error_message": "loaded already"})),
        },
        ("POST", "/unload_lora_adapter") => {
            inside.adapters.retain(|(name, _)| body["lora_name"] != *name);
            Reply::json(200, json!({"success": true}))
        }
        ("POST", "/update_weight_version") => {
            inside.version = body["new_version"].as_str().map(str::to_owned);
            Reply::json(200, json!({"success": true, "message": "ok"}))
        }
        ("GET", "/model_info") => {
            Reply::json(200, json!({"model_path": "/m", "weight_version": version}))
        }
        ("POST", "/pause_generation" | "/continue_generation") => {
            Reply::json(200, json!({"message": "ok", "status": "ok"}))
        }
        ("POST", "/update_weights_from_disk") => {
            inside.version = body["weight_version"].as_str().map(str::to_owned);
            Reply::json(200, json!({"success": true, "message": "ok", "num_paused_requests": 0}))
        }
        ("POST", "/flush_cache") => Reply::text(200, "Cache flushed.\n"),
        ("GET", "/ready") => Reply::text(200, ""),
        _ => Reply::json(404, json!({"detail": "Not Found"})),
    }
}

/// Answers as vLLM does in developer mode, with adapters at run time.
fn vllm(inside: &mut Inside, path: &str, body: &Value, version: String) -> Reply {
    match path {
        "/version" => Reply::json(200, json!({"version": "0.21"})),
        "/v1/models" => listed(inside),
        "/weight_info" => Reply::json(200, json!({"weight_version": version})),
        "/pause" | "/resume" => Reply::json(200, json!({"status": "ok"})),
        "/collective_rpc" => Reply::json(200, json!({"results": [null]})),
        "/update_weight_version" => {
            inside.version = body["new_version"].as_str().map(str::to_owned);
            Reply::json(200, json!({"success": true, "new_version": body["new_version"]}))
        }
        "/reset_prefix_cache" => Reply::json(200, json!({"success": true})),
        "/v1/load_lora_adapter" => match load(inside, body) {
            true => Reply::text(200, "Success: LoRA adapter added successfully."),
            false => Reply::json(400, json!({"error": {"message": "loaded already"}})),
        },
        "/v1/unload_lora_adapter" => {
            inside.adapters.retain(|(name, _)| body["lora_name"] != *name);
            Reply::text(200, "Success: LoRA adapter removed successfully.")
        }
        "/health" => Reply::text(200, ""),
        _ => Reply::json(404, json!({"detail": "Not Found"})),
    }
}

/// Returns false if the name is taken.
fn load(inside: &mut Inside, body: &Value) -> bool {
    let text = |name: &str| body[name].as_str().unwrap().to_owned();
    let is_new = !inside.adapters.iter().any(|(name, _)| *name == text("lora_name"));
    if is_new {
        inside.adapters.push((text("lora_name"), text("lora_path")));
    }
    is_new
}

fn listed(inside: &Inside) -> Reply {
    let adapters = inside.adapters.iter();
    let adapters = adapters.map(|(name, folder)| json!({"id": name, "root": folder}));
    let data: Vec<_> = std::iter::once(json!({"id": "m"})).chain(adapters).collect();
    Reply::json(200, json!({"object": "list", "data": data}))
}

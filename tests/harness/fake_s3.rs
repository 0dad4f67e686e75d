//! A store that speaks as much of S3 as `object_store` needs, and can be away, say
//! no, or lose its answers.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, Method, Response, StatusCode, Uri};

/// The store, and what was asked of it. It ends with this.
pub(crate) struct FakeS3 {
    pub(crate) endpoint: String,
    shared: Arc<Shared>,
    runtime: Option<tokio::runtime::Runtime>,
}

#[derive(Default)]
struct Shared {
    objects: Mutex<BTreeMap<String, Object>>,
    asked: Mutex<Vec<String>>,
    count: AtomicU64,
    /// Status of every answer, unless it is 0.
    status: AtomicU32,
    /// So many further writes are done, and said to have failed.
    lost: AtomicU32,
    /// So many further writes are taken, if not all.
    left: Mutex<Option<u32>>,
    /// Whether the next write conflicts with another one.
    conflict: AtomicBool,
    /// Whether nothing is answered any more.
    hangs: AtomicBool,
    /// Writes below this name fail for now, unless it is empty.
    #[cfg(feature = "torch")]
    away_below: Mutex<String>,
}

#[derive(Clone)]
struct Object {
    bytes: Bytes,
    tag: String,
    /// Whether it was written a day before the others.
    old: bool,
}

impl FakeS3 {
    pub(crate) fn start() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let shared = Arc::new(Shared::default());
        let router = Router::new().fallback(answer).with_state(shared.clone());
        runtime.spawn(async {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            axum::serve(listener, router).await
        });
        Self { endpoint, shared, runtime: Some(runtime) }
    }

    /// Answers everything with a status; 0 ends that.
    pub(crate) fn say(&self, status: u32) {
        self.shared.status.store(status, Ordering::SeqCst);
    }

    /// Does so many writes more whose answers are lost.
    pub(crate) fn lose(&self, writes: u32) {
        self.shared.lost.store(writes, Ordering::SeqCst);
    }

    /// Takes so many writes more, and refuses the rest: whoever writes is cut off there.
    pub(crate) fn stop_after(&self, writes: Option<u32>) {
        *self.shared.left.lock().unwrap() = writes;
    }

    /// Answers nothing any more, and waits until somebody has been left without an answer.
    pub(crate) fn hang(&self) {
        self.shared.hangs.store(true, Ordering::SeqCst);
        let before = self.asked().len();
        super::until("the store is asked", || self.asked().len() > before);
    }

    /// Fails the writes below a name for now; an empty one ends that.
    #[cfg(feature = "torch")]
    pub(crate) fn be_away_below(&self, name: &str) {
        name.clone_into(&mut self.shared.away_below.lock().unwrap());
    }

    /// Answers the next write as if another one of its name was under way.
    pub(crate) fn conflict(&self) {
        self.shared.conflict.store(true, Ordering::SeqCst);
    }

    /// Returns the names of what is there.
    pub(crate) fn names(&self) -> Vec<String> {
        self.shared.objects.lock().unwrap().keys().cloned().collect()
    }

    pub(crate) fn get(&self, name: &str) -> Option<Bytes> {
        self.shared.objects.lock().unwrap().get(name).map(|object| object.bytes.clone())
    }

    pub(crate) fn put(&self, name: &str, bytes: impl Into<Bytes>) {
        self.shared.put(name.to_owned(), bytes.into());
    }

    pub(crate) fn remove(&self, name: &str) {
        self.shared.objects.lock().unwrap().remove(name);
    }

    /// Makes an object a day older than one that is put now.
    pub(crate) fn make_old(&self, name: &str) {
        self.shared.objects.lock().unwrap().get_mut(name).unwrap().old = true;
    }

    /// Returns what was asked, method and target.
    pub(crate) fn asked(&self) -> Vec<String> {
        self.shared.asked.lock().unwrap().clone()
    }
}

impl Drop for FakeS3 {
    /// A test may be inside another runtime, where none may be waited for.
    fn drop(&mut self) {
        self.runtime.take().unwrap().shutdown_background();
    }
}

impl Shared {
    fn put(&self, name: String, bytes: Bytes) -> String {
        let tag = format!("\"{}\"", self.count.fetch_add(1, Ordering::SeqCst));
        let object = Object { bytes, tag: tag.clone(), old: false };
        self.objects.lock().unwrap().insert(name, object);
        tag
    }

    fn list(&self, query: &BTreeMap<String, String>) -> String {
        let prefix = query.get("prefix").cloned().unwrap_or_default();
        let (mut contents, mut folders) = (String::new(), Vec::new());
        for (name, object) in self.objects.lock().unwrap().iter() {
            let Some(rest) = name.strip_prefix(&prefix) else { continue };
            if let (Some(_), Some((folder, _))) = (query.get("delimiter"), rest.split_once('/')) {
                folders.push(format!("{prefix}{folder}/"));
                continue;
            }
            contents.push_str(&format!(
                "<Contents><Key>{name}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>\
                 <ETag>{}</ETag><Size>{}</Size></Contents>",
                object.tag.replace('"', "&quot;"),
                object.bytes.len()
            ));
        }
        folders.dedup();
        for folder in folders {
            contents
                .push_str(&format!("<CommonPrefixes><Prefix>{folder}</Prefix></CommonPrefixes>"));
        }
        format!("<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>")
    }

    /// Removes what a list in XML names.
    fn delete(&self, list: &str) -> String {
        let mut deleted = String::new();
        for part in list.split("<Key>").skip(1) {
            let name = part.split("</Key>").next().unwrap_or_default();
            self.objects.lock().unwrap().remove(name);
            deleted.push_str(&format!("<Deleted><Key>{name}</Key></Deleted>"));
        }
        format!("<DeleteResult>{deleted}</DeleteResult>")
    }
}

fn reply(status: u16, headers: &[(&str, String)], body: impl Into<Body>) -> Response<Body> {
    let mut response = Response::builder().status(status);
    for (name, value) in headers {
        response = response.header(*name, value);
    }
    response.body(body.into()).unwrap()
}

fn fault(status: u16, code: &str) -> Response<Body> {
    reply(status, &[], format!("<Error><Code>{code}</Code><Message>{code}</Message></Error>"))
}

async fn answer(
    State(shared): State<Arc<Shared>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response<Body> {
    shared.asked.lock().unwrap().push(format!("{method} {uri}"));
    if shared.hangs.load(Ordering::SeqCst) {
        return std::future::pending().await;
    }
    let status = shared.status.load(Ordering::SeqCst);
    if status != 0 {
        return fault(status as u16, "Scripted");
    }
    let query: BTreeMap<String, String> = pairs_of(uri.query().unwrap_or_default());
    let path = uri.path().trim_start_matches('/').replace("%3D", "=");
    let Some((_, name)) = path.split_once('/').filter(|(_, name)| !name.is_empty()) else {
        return match method {
            Method::POST => reply(200, &[], shared.delete(&String::from_utf8_lossy(&body))),
            _ => reply(200, &[], shared.list(&query)),
        };
    };
    let there = shared.objects.lock().unwrap().get(name).cloned();
    let wants = |header: &str| headers.get(header).map(|it| it.to_str().unwrap().to_owned());
    match method {
        Method::PUT => {
            if let Some(left) = shared.left.lock().unwrap().as_mut() {
                match left.checked_sub(1) {
                    Some(fewer) => *left = fewer,
                    None => return fault(403, "AccessDenied"),
                }
            }
            #[cfg(feature = "torch")]
            {
                let away = shared.away_below.lock().unwrap();
                if !away.is_empty() && name.starts_with(&*away) {
                    return fault(503, "Away");
                }
            }
            if shared.conflict.swap(false, Ordering::SeqCst) {
                return fault(409, "ConditionalRequestConflict");
            }
            if wants("if-none-match").as_deref() == Some("*") && there.is_some() {
                return fault(412, "PreconditionFailed");
            }
            if let Some(tag) = wants("if-match") {
                match &there {
                    None => return fault(404, "NoSuchKey"),
                    Some(there) if there.tag != tag => return fault(412, "PreconditionFailed"),
                    Some(_) => {}
                }
            }
            let tag = shared.put(name.to_owned(), body);
            if shared.lost.load(Ordering::SeqCst) > 0 {
                shared.lost.fetch_sub(1, Ordering::SeqCst);
                return fault(503, "Lost");
            }
            reply(200, &[("etag", tag)], "")
        }
        Method::DELETE => {
            shared.objects.lock().unwrap().remove(name);
            reply(204, &[], "")
        }
        _ => match there {
            None => fault(404, "NoSuchKey"),
            Some(object) if wants("if-match").is_some_and(|tag| tag != object.tag) => {
                fault(412, "PreconditionFailed")
            }
            Some(object) => read(&object, wants("range"), method == Method::HEAD),
        },
    }
}

fn read(object: &Object, range: Option<String>, head: bool) -> Response<Body> {
    let size = object.bytes.len();
    let modified = match object.old {
        true => "Wed, 31 Dec 2025 00:00:00 GMT",
        false => "Thu, 01 Jan 2026 00:00:00 GMT",
    };
    let mut headers = vec![("etag", object.tag.clone()), ("last-modified", modified.to_owned())];
    let part = range.as_deref().and_then(|range| {
        let (from, to) = range.strip_prefix("bytes=")?.split_once('-')?;
        Some((from.parse::<usize>().ok()?, to.parse::<usize>().ok()?.min(size - 1)))
    });
    if head {
        headers.push(("content-length", size.to_string()));
        return reply(200, &headers, "");
    }
    match part {
        Some((from, to)) => {
            headers.push(("content-range", format!("bytes {from}-{to}/{size}")));
            reply(206, &headers, object.bytes.slice(from..=to))
        }
        None => reply(StatusCode::OK.as_u16(), &headers, object.bytes.clone()),
    }
}

/// Reads a query as object_store writes it.
fn pairs_of(query: &str) -> BTreeMap<String, String> {
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            (name.to_owned(), value.replace("%2F", "/"))
        })
        .collect()
}

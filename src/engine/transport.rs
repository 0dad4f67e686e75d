//! One HTTP call with its limits and tries.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use reqwest::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue, RETRY_AFTER,
};
use reqwest::{Client, Method, Response, StatusCode};
use secrecy::ExposeSecret;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::EngineOptions;
use super::address::{Address, hide};
use super::error::{Error, shorten, told};
use super::retry::{self, Retries};

/// The HTTP client of one server.
#[derive(Debug)]
pub(super) struct Transport {
    client: Client,
}

/// One call.
pub(super) struct Call {
    pub(super) method: Method,
    pub(super) url: String,
    /// JSON, written once for all tries.
    pub(super) body: Option<Bytes>,
    pub(super) headers: Vec<(&'static str, String)>,
    pub(super) timeout: Duration,
}

/// The body of an answer with a good status.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) url: String,
    pub(super) body: Bytes,
}

impl Answer {
    /// Reads the body as JSON.
    pub(super) fn json<T: DeserializeOwned>(&self) -> Result<T, Error> {
        serde_json::from_slice(&self.body).map_err(|error| {
            let start = shorten(&String::from_utf8_lossy(&self.body));
            self.malformed(format!("{error}: {start}"))
        })
    }

    /// Returns the error of an answer that cannot be used.
    pub(super) fn malformed(&self, reason: impl Into<String>) -> Error {
        Error::Malformed { url: self.url.clone(), reason: reason.into(), tokens: self.tokens() }
    }

    /// Returns the tokens of the prompt and of the answer, if both are told. For an
    /// answer that is no use otherwise: it was paid for like any other.
    pub(super) fn tokens(&self) -> Option<(u64, u64)> {
        let value: Value = serde_json::from_slice(&self.body).ok()?;
        let usage = value.get("usage").or_else(|| value.get("meta_info"))?;
        let count = |name: &str| usage.get(name)?.as_u64();
        count("prompt_tokens").zip(count("completion_tokens"))
    }
}

/// Most bytes of an answer that are read.
const LARGEST_ANSWER: usize = 256 << 20;
/// Most bytes of what a server tells about itself.
const LARGEST_ACCOUNT: usize = 16 << 20;
/// Most bytes of what a server tells about an error: its start says what it is.
const LARGEST_ERROR: usize = 1 << 20;

impl Transport {
    /// Makes the client of a server.
    pub(super) fn new(options: &EngineOptions, address: &Address) -> Result<Self, Error> {
        let refuse = |reason: String| Error::Client { url: address.to_string(), reason };
        // A second installation is an error that says that there is one.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        if let Some(key) = &options.key {
            let value = format!("Bearer {}", key.expose_secret().trim());
            let mut value = HeaderValue::from_str(&value).map_err(|_| {
                refuse("the key holds a character that no header can carry".to_owned())
            })?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        let mut builder = Client::builder()
            // What the dialects were tested with; the stores' client brings HTTP/2.
            .http1_only()
            .default_headers(headers)
            .connect_timeout(options.connect_timeout)
            // A followed redirect would turn a POST into a GET in silence.
            .redirect(reqwest::redirect::Policy::none())
            .user_agent(concat!("oclaw/", env!("CARGO_PKG_VERSION")));
        if address.is_loopback() {
            builder = builder.no_proxy();
        }
        let client = builder.build().map_err(|error| refuse(causes(&error)))?;
        Ok(Self { client })
    }

    /// Makes a call, again and again as far as `retries` goes.
    pub(super) async fn send(&self, call: &Call, retries: &Retries) -> Result<Answer, Error> {
        let mut tried = 0;
        loop {
            let error = match self.once(call).await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            tried += 1;
            if !error.is_transient() {
                return Err(error);
            }
            let Some(wait) = retries.wait(tried, error.retry_after(), retry::share()) else {
                return Err(error);
            };
            tracing::info!(%error, tried, wait = wait.as_secs_f64(), "trying again");
            tokio::time::sleep(wait).await;
        }
    }

    /// Makes a call once, and returns the answer before its body has come. The call's
    /// time limits the wait for its beginning.
    pub(super) async fn open(&self, call: &Call) -> Result<Response, Error> {
        let url = hide(&call.url);
        let begun = async {
            let sent = self.request(call).send().await;
            let response = sent.map_err(|error| failed(&url, call, error))?;
            let head = Head::of(&response);
            if head.status.is_success() && !head.web_page {
                return Ok(response);
            }
            let body = read(response, LARGEST_ERROR).await;
            let (body, _) = body.map_err(|error| failed(&url, call, error))?;
            match head.status.is_success() {
                true => Err(Error::WebPage { url: url.clone() }),
                false => Err(head.refusal(url.clone(), &body)),
            }
        };
        let late = Error::Timeout { url: url.clone(), after: call.timeout };
        tokio::time::timeout(call.timeout, begun).await.unwrap_or(Err(late))
    }

    fn request(&self, call: &Call) -> reqwest::RequestBuilder {
        let mut request = self.client.request(call.method.clone(), &call.url);
        if let Some(body) = &call.body {
            request = request.header(CONTENT_TYPE, "application/json").body(body.clone());
        }
        for (name, value) in &call.headers {
            request = request.header(*name, value);
        }
        request
    }

    async fn once(&self, call: &Call) -> Result<Answer, Error> {
        let url = hide(&call.url);
        let sent = self.request(call).timeout(call.timeout).send().await;
        let response = sent.map_err(|error| failed(&url, call, error))?;
        let head = Head::of(&response);
        let most = match head.status.is_success() {
            true if call.method == Method::GET => LARGEST_ACCOUNT,
            true => LARGEST_ANSWER,
            false => LARGEST_ERROR,
        };
        let body = read(response, most).await;
        let (body, whole) = body.map_err(|error| failed(&url, call, error))?;
        if !head.status.is_success() {
            return Err(head.refusal(url, &body));
        }
        if !whole {
            let reason = format!("it is longer than {most} bytes");
            return Err(Error::Malformed { url, reason, tokens: None });
        }
        match head.web_page {
            true => Err(Error::WebPage { url }),
            false => Ok(Answer { url, body: body.into() }),
        }
    }
}

/// What an answer begins with.
struct Head {
    status: StatusCode,
    web_page: bool,
    retry_after: Option<Duration>,
}

impl Head {
    fn of(response: &Response) -> Self {
        let header = |name| response.headers().get(name).and_then(|value| value.to_str().ok());
        let asked = header(RETRY_AFTER);
        Self {
            status: response.status(),
            web_page: header(CONTENT_TYPE).is_some_and(|kind| kind.starts_with("text/html")),
            retry_after: asked.and_then(|text| retry::retry_after(text, SystemTime::now())),
        }
    }

    /// Returns the error that an answer with no good status is.
    fn refusal(self, url: String, body: &[u8]) -> Error {
        let told = told(body);
        match self.status.as_u16() {
            status @ (401 | 403) => Error::Unauthorized { url, status, body: told.message },
            status => Error::Status {
                url,
                status,
                body: told.message,
                code: told.code,
                retry_after: self.retry_after,
            },
        }
    }
}

/// Reads a body, but no further than `most` bytes; tells whether that was all.
async fn read(mut response: Response, most: usize) -> Result<(Vec<u8>, bool), reqwest::Error> {
    let mut body = Vec::new();
    while let Some(piece) = response.chunk().await? {
        body.extend_from_slice(&piece);
        if body.len() > most {
            return Ok((body, false));
        }
    }
    Ok((body, true))
}

fn failed(url: &str, call: &Call, error: reqwest::Error) -> Error {
    let url = url.to_owned();
    match error.is_timeout() && !error.is_connect() {
        true => Error::Timeout { url, after: call.timeout },
        false => Error::Unreachable { url, reason: causes(&error.without_url()) },
    }
}

/// Returns the innermost cause, which is the one that tells something.
fn causes(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

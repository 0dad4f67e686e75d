//! Does a server answer, and which weights does it serve?

use std::time::Duration;

use reqwest::{Client, ClientBuilder, StatusCode, Url};
use secrecy::{ExposeSecret, SecretString};
use serde_json::Value;
use tokio::net::{TcpListener, TcpStream, lookup_host};

/// Longest wait for an answer: whoever is ready says so at once.
const PATIENCE: Duration = Duration::from_secs(2);

/// Asks servers how they are.
#[derive(Debug, Clone)]
pub(super) struct Probe {
    client: Client,
    /// For what is on this machine: a proxy would get the key, and not find the server.
    here: Client,
}

impl Probe {
    pub(super) fn new() -> Self {
        // Somebody else's will do as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let builder = || Client::builder().timeout(PATIENCE).pool_max_idle_per_host(1);
        let made = |builder: ClientBuilder| builder.build().unwrap_or_default();
        Self { client: made(builder()), here: made(builder().no_proxy()) }
    }

    fn client(&self, url: &str) -> &Client {
        let url = Url::parse(url).ok();
        match url.as_ref().and_then(Url::host_str) {
            Some("127.0.0.1" | "localhost" | "[::1]") => &self.here,
            _ => &self.client,
        }
    }

    /// Whether a server is ready. A path says where to ask; without one it is an
    /// inference server, of which each has one of two routes.
    pub(super) async fn is_ready(&self, url: &str) -> bool {
        let url = plain(url);
        let has_path = url.split_once("://").is_some_and(|(_, rest)| rest.contains('/'));
        if has_path && !url.ends_with("/v1") {
            return self.status(url.to_owned()).await.is_some_and(is_well);
        }
        let root = url.trim_end_matches("/v1");
        match self.status(format!("{root}/health")).await {
            Some(StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED) => {
                self.status(format!("{root}/v1/models")).await.is_some_and(is_well)
            }
            status => status.is_some_and(is_well),
        }
    }

    /// Returns the place of an address of this machine where something listens already.
    pub(super) async fn taken(&self, url: &str) -> Option<String> {
        let url = Url::parse(plain(url)).ok()?;
        let (host, port) = (url.host_str()?, url.port_or_known_default()?);
        // The brackets of an IPv6 address are no part of it.
        let look = is_listened_at(host.trim_matches(['[', ']']), port);
        let taken = tokio::time::timeout(PATIENCE, look).await.unwrap_or(false);
        taken.then(|| format!("{host}:{port}"))
    }

    /// Returns the version of the weights that an engine says it serves.
    pub(super) async fn weight_version(
        &self,
        url: &str,
        key: Option<&SecretString>,
    ) -> Option<String> {
        let root = plain(url).trim_end_matches("/v1");
        let text = self.text(&format!("{root}/model_info"), key).await.ok()?;
        let told: Value = serde_json::from_str(&text).ok()?;
        Some(told.get("weight_version")?.as_str()?.to_owned())
    }

    /// Returns a text that is served to everybody, or to who has a key. Errors with
    /// why there is none.
    pub(super) async fn text(
        &self,
        url: &str,
        key: Option<&SecretString>,
    ) -> Result<String, String> {
        let mut request = self.client(url).get(url);
        if let Some(key) = key {
            request = request.bearer_auth(key.expose_secret());
        }
        let answer = request.send().await.map_err(|_| "it does not answer".to_owned())?;
        match answer.status() {
            status if status.is_success() => {
                answer.text().await.map_err(|_| "its answer breaks off".to_owned())
            }
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN if key.is_none() => {
                Err("it wants a key, and the file names none".to_owned())
            }
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                Err("it refuses the key that the file names".to_owned())
            }
            status => Err(format!("it answers with status {}", status.as_u16())),
        }
    }

    async fn status(&self, url: String) -> Option<StatusCode> {
        Some(self.client(&url).get(&url).send().await.ok()?.status())
    }
}

async fn is_listened_at(host: &str, port: u16) -> bool {
    let Ok(addresses) = lookup_host((host, port)).await else { return false };
    for address in addresses {
        // Only an address of this machine can be listened at: another's is not ours to judge.
        if TcpListener::bind((address.ip(), 0)).await.is_err() {
            continue;
        }
        if let Ok(stream) = TcpStream::connect(address).await {
            // Where nobody listens, a connection may by chance be one to itself.
            return stream.local_addr().ok() != stream.peer_addr().ok();
        }
    }
    false
}

/// Leaves out the dialect before an address.
fn plain(url: &str) -> &str {
    match url.split_once("://") {
        Some((scheme, _)) if scheme.contains('+') => &url[scheme.find('+').unwrap_or(0) + 1..],
        _ => url,
    }
}

/// A server that wants a key is there.
fn is_well(status: StatusCode) -> bool {
    status.is_success() || matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN)
}

#[cfg(test)]
mod tests {
    use super::{Probe, TcpListener, plain};

    #[tokio::test]
    async fn a_place_is_taken_while_somebody_listens_there() {
        let (probe, listener) = (Probe::new(), TcpListener::bind("127.0.0.1:0").await.unwrap());
        let place = listener.local_addr().unwrap().to_string();
        let url = format!("sglang+http://{place}/v1");
        assert_eq!(probe.taken(&url).await, Some(place));
        drop(listener);
        assert_eq!(probe.taken(&url).await, None);
        // An address of documentation, which no machine has.
        assert_eq!(probe.taken("http://192.0.2.1:1").await, None);
    }

    #[test]
    fn a_dialect_is_no_part_of_the_address() {
        assert_eq!(plain("sglang+http://a:1/v1"), "http://a:1/v1");
        assert_eq!(plain("https://a+b/"), "https://a+b/");
    }
}

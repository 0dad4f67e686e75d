//! Does a server answer, and which weights does it serve?

use std::time::Duration;

use reqwest::{Client, ClientBuilder, StatusCode, Url};
use secrecy::{ExposeSecret, SecretString};
use serde_json::Value;

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
    use super::plain;

    #[test]
    fn a_dialect_is_no_part_of_the_address() {
        assert_eq!(plain("sglang+http://a:1/v1"), "http://a:1/v1");
        assert_eq!(plain("https://a+b/"), "https://a+b/");
    }
}

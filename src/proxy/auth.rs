//! Who may come in. Every route goes through [`Keys::owner`].

use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use secrecy::{ExposeSecret, SecretString};
use sha2::{Digest, Sha256};

use crate::wire::secret::equal_in_constant_time;

/// Named keys. Only their digests are kept.
#[derive(Debug, Clone, Default)]
pub struct Keys {
    named: Vec<(String, [u8; 32])>,
}

impl Keys {
    /// Takes named keys. Empty ones are dropped: nothing may match them.
    pub fn new(named: impl IntoIterator<Item = (String, SecretString)>) -> Self {
        let named = named.into_iter().filter(|(_, key)| !key.expose_secret().trim().is_empty());
        let named = named.map(|(name, key)| (name, digest(key.expose_secret().trim().as_bytes())));
        Self { named: named.collect() }
    }

    /// Returns whether there is no key, and so no lock.
    pub fn is_empty(&self) -> bool {
        self.named.is_empty()
    }

    /// Returns the name of the key that a request carries.
    pub fn owner(&self, headers: &HeaderMap) -> Option<&str> {
        let given = digest(given(headers)?);
        let mut owner = None;
        // Every key is compared, so that the time tells nothing.
        for (name, known) in &self.named {
            if equal_in_constant_time(known, &given) {
                owner = Some(name.as_str());
            }
        }
        owner
    }
}

fn digest(key: &[u8]) -> [u8; 32] {
    Sha256::digest(key).into()
}

/// Returns the key of `Authorization: Bearer KEY` or `X-API-Key: KEY`.
fn given(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get(AUTHORIZATION).and_then(|value| {
        let (scheme, key) = value.as_bytes().split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then_some(key)
    });
    let key = bearer.or_else(|| headers.get("x-api-key").map(|value| value.as_bytes()))?;
    let key = key.trim_ascii();
    (!key.is_empty()).then_some(key)
}

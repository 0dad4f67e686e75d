//! Addresses of objects: `s3://bucket/a/b`.

use std::fmt;
use std::path::Path;

use object_store::path::Path as Key;

use super::Error;

/// The schemes that are known.
const SCHEMES: [&str; 3] = ["s3", "gs", "az"];

/// The address of an object, or of what would be a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    scheme: &'static str,
    /// The bucket or container.
    pub(super) bucket: String,
    pub(super) key: Key,
}

impl Address {
    /// Reads what stands on a command line. Nothing if it is a path.
    pub fn of(given: &Path) -> Result<Option<Self>, Error> {
        let Some(text) = given.to_str() else { return Ok(None) };
        let Some((scheme, rest)) = text.split_once("://") else { return Ok(None) };
        let Some(scheme) = SCHEMES.into_iter().find(|known| *known == scheme) else {
            return Ok(None);
        };
        Self::parse(scheme, rest).map(Some)
    }

    /// Returns whether a path is an address.
    pub fn is(given: &Path) -> bool {
        !matches!(Self::of(given), Ok(None))
    }

    fn parse(scheme: &'static str, rest: &str) -> Result<Self, Error> {
        let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
        // What stands before an @ may be a password, and what follows a ? a signature:
        // they are not shown.
        let plain = rest.split(['?', '#']).next().unwrap_or_default();
        let signed = if plain.len() < rest.len() { "…" } else { "" };
        let shown = match bucket.rsplit_once('@') {
            Some((_, host)) => {
                let key = key.split(['?', '#']).next().unwrap_or_default();
                let host = host.split(['?', '#']).next().unwrap_or_default();
                format!("{scheme}://…@{host}/{key}{signed}")
            }
            None => format!("{scheme}://{plain}{signed}"),
        };
        let refuse =
            |problem: &str| Err(Error::Address { url: shown.clone(), problem: problem.to_owned() });
        if bucket.contains('@') {
            return refuse("keys are no part of an address: they come from the environment");
        }
        if plain.len() < rest.len() {
            return refuse("it ends before `?` or `#`: signatures are no part of an address");
        }
        if bucket.is_empty() {
            return refuse("it names no bucket");
        }
        match Key::parse(key) {
            Ok(key) => Ok(Self { scheme, bucket: bucket.to_owned(), key }),
            Err(error) => Err(Error::Address { url: shown, problem: error.to_string() }),
        }
    }

    /// Returns the scheme.
    pub fn scheme(&self) -> &'static str {
        self.scheme
    }

    /// Returns the address of something inside; slashes part the names.
    pub fn join(&self, name: &str) -> Self {
        let parts = name.split('/').filter(|part| !part.is_empty());
        let key = parts.fold(self.key.clone(), |key, part| key.join(part));
        Self { key, ..self.clone() }
    }

    /// Returns the last name, and the address of the folder it is in. Nothing at
    /// the top.
    pub fn split(&self) -> Option<(Self, String)> {
        let name = self.key.filename()?.to_owned();
        let mut parts: Vec<_> = self.key.parts().collect();
        parts.pop();
        let folder = Self { key: parts.into_iter().collect(), ..self.clone() };
        Some((folder, name))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}://{}/{}", self.scheme, self.bucket, self.key)
    }
}

//! The address of a server in the forms people write it.

use std::fmt;
use std::net::IpAddr;

use reqwest::Url;

use super::{Dialect, Error};

/// An address: where the native routes are, and where the OpenAI ones may be.
#[derive(Debug, Clone)]
pub(super) struct Address {
    /// Said by a scheme such as `sglang+http`.
    pub(super) dialect: Option<Dialect>,
    /// Everything before the version segment, no slash at the end.
    root: String,
    bases: Vec<String>,
    shown: String,
    loopback: bool,
}

impl Address {
    /// Reads an address: with or without `/v1`, slashes at the end,
    /// `/chat/completions`, some other prefix, or a dialect in front.
    pub(super) fn parse(text: &str) -> Result<Self, Error> {
        let (dialect, rest) = split_dialect(text)?;
        let refuse =
            |reason: &str| Error::Address { address: hide(text), reason: reason.to_owned() };
        let mut url = Url::parse(rest).map_err(|error| refuse(&error.to_string()))?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(refuse("it does not begin with `http://` or `https://`"));
        }
        url.set_query(None);
        url.set_fragment(None);
        let path = url.path().trim_end_matches('/').to_owned();
        let path = path.strip_suffix("/chat/completions").unwrap_or(&path).trim_end_matches('/');
        let (before, last) = path.rsplit_once('/').unwrap_or(("", path));
        let versioned = is_version(last);
        let root = if versioned { before } else { path };
        let at = |url: &mut Url, path: &str| {
            url.set_path(path);
            url.as_str().trim_end_matches('/').to_owned()
        };
        let bases = match versioned {
            true => vec![at(&mut url, path)],
            false => vec![at(&mut url, &format!("{path}/v1")), at(&mut url, path)],
        };
        let root = at(&mut url, root);
        let host = url.host_str().filter(|host| !host.is_empty());
        let loopback = is_loopback(host.ok_or_else(|| refuse("it names no host"))?);
        Ok(Self { dialect, shown: hide(&root), root, bases, loopback })
    }

    /// Returns the bases of the OpenAI routes, likeliest first.
    pub(super) fn bases(&self) -> &[String] {
        &self.bases
    }

    /// Returns the address of a native route.
    pub(super) fn native(&self, path: &str) -> String {
        format!("{}{path}", self.root)
    }

    /// Returns whether the server is on this machine.
    pub(super) fn is_loopback(&self) -> bool {
        self.loopback
    }
}

impl fmt::Display for Address {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.shown)
    }
}

/// Returns an address as it may be shown: without user and password.
pub(super) fn hide(text: &str) -> String {
    match text.split_once("://") {
        Some((scheme, rest)) => {
            let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
            let (host, path) = rest.split_at(end);
            let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
            format!("{scheme}://{host}{path}")
        }
        None => text.to_owned(),
    }
}

fn split_dialect(text: &str) -> Result<(Option<Dialect>, &str), Error> {
    let text = text.trim();
    let Some((scheme, _)) = text.split_once("://") else {
        let reason = "it does not begin with `http://` or `https://`".to_owned();
        return Err(Error::Address { address: text.to_owned(), reason });
    };
    let Some((name, _)) = scheme.split_once('+') else {
        return Ok((None, text));
    };
    match Dialect::ALL.into_iter().find(|dialect| dialect.as_str() == name) {
        Some(dialect) => Ok((Some(dialect), &text[name.len() + 1..])),
        None => {
            let known: Vec<_> = Dialect::ALL.iter().map(|dialect| format!("`{dialect}`")).collect();
            let reason = format!("no dialect `{name}`; there are {}", known.join(", "));
            Err(Error::Address { address: hide(text), reason })
        }
    }
}

fn is_loopback(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || bare.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
}

fn is_version(segment: &str) -> bool {
    segment
        .strip_prefix('v')
        .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_leads_to_the_same_routes() {
        let versioned = [
            "http://h:1/v1",
            "http://h:1/v1/",
            "http://h:1/v1/chat/completions",
            "http://h:1/v1/chat/completions/",
        ];
        for text in versioned {
            let address = Address::parse(text).unwrap();
            assert_eq!(address.bases(), ["http://h:1/v1"], "{text}");
            assert_eq!(address.native("/generate"), "http://h:1/generate", "{text}");
        }
        for text in ["http://h:1", "http://h:1/", "http://h:1/chat/completions", "http://h:1//"] {
            let address = Address::parse(text).unwrap();
            assert_eq!(address.bases(), ["http://h:1/v1", "http://h:1"], "{text}");
            assert_eq!(address.native("/generate"), "http://h:1/generate", "{text}");
        }
    }

    #[test]
    fn other_prefixes_are_kept() {
        let address = Address::parse("https://gate.example/api/v1/").unwrap();
        assert_eq!(address.bases(), ["https://gate.example/api/v1"]);
        assert_eq!(address.native("/version"), "https://gate.example/api/version");
        let address = Address::parse("https://gate.example/openai").unwrap();
        let expected = ["https://gate.example/openai/v1", "https://gate.example/openai"];
        assert_eq!(address.bases(), expected);
        assert_eq!(Address::parse("http://h/v1beta").unwrap().bases().len(), 2);
    }

    #[test]
    fn a_dialect_may_stand_in_front() {
        let address = Address::parse("sglang+http://h:1/v1").unwrap();
        assert_eq!(address.dialect, Some(Dialect::Sglang));
        assert_eq!(address.bases(), ["http://h:1/v1"]);
        let error = Address::parse("tgi+http://h:1").unwrap_err().to_string();
        assert!(error.contains("no dialect `tgi`"), "{error}");
    }

    #[test]
    fn what_is_no_address_is_refused_by_name() {
        for text in ["", "localhost:30000", "ftp://h", "http://", "/v1"] {
            assert!(matches!(Address::parse(text), Err(Error::Address { .. })), "{text}");
        }
    }

    #[test]
    fn credentials_are_never_shown() {
        let address = Address::parse("http://me:secret@h:1/v1").unwrap();
        assert_eq!(address.to_string(), "http://h:1");
        let error = Address::parse("ftp://me:secret@h:1/v1").unwrap_err();
        assert!(!format!("{error} {error:?}").contains("secret"));
    }
}

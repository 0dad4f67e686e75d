//! The servers behind SGLang's router, which hands on chats and no weights.

use reqwest::Method;
use serde::Deserialize;

use super::{Dialect, Engine, Error};

#[derive(Deserialize)]
struct Workers {
    /// The newer form.
    workers: Option<Vec<Worker>>,
    /// The older one.
    urls: Option<Vec<String>>,
}

#[derive(Deserialize)]
struct Worker {
    url: String,
}

impl Engine {
    /// Lists the addresses of the workers if this is a router.
    pub async fn workers(&self) -> Result<Option<Vec<String>>, Error> {
        if !matches!(self.dialect(), Dialect::Sglang | Dialect::Generic) {
            return Ok(None);
        }
        for path in ["/workers", "/list_workers"] {
            let answer = match self.quick(Method::GET, path, None).await {
                Ok(answer) => answer,
                Err(error) if error.is_transient() => return Err(error),
                // Not a path that it knows; servers say so in many ways.
                Err(_) => continue,
            };
            let Ok(Workers { workers, urls }) = answer.json() else { continue };
            let told = workers.map(|all| all.into_iter().map(|worker| worker.url).collect());
            let Some(told) = told.or(urls) else { continue };
            let mut each: Vec<String> = Vec::new();
            for url in told {
                // One server whose data-parallel ranks are listed one by one.
                let url = match url.rsplit_once('@') {
                    Some((server, rank)) if rank.parse::<u32>().is_ok() => server.to_owned(),
                    _ => url,
                };
                if !each.contains(&url) {
                    each.push(url);
                }
            }
            return Ok(Some(each));
        }
        Ok(None)
    }
}

//! The flags that name servers, and what they come to.

use std::path::PathBuf;

use comfy_table::Table;
use oclaw::engine::{Account, EngineOptions, News, Tell};

use crate::common::Context;
use crate::embedded;
use crate::visible::visible;

/// Servers of one model.
#[derive(clap::Args, Debug)]
pub(crate) struct Servers {
    /// Address of the server to ask; several (given again, or with commas) share the calls
    #[arg(long, value_name = "URL", value_delimiter = ',')]
    pub(crate) engine: Vec<String>,
    /// Name of the model there, if it has several
    #[arg(long, value_name = "NAME", requires = "engine")]
    pub(crate) engine_model: Option<String>,
    /// File with the key of the server, or of all of them
    #[arg(long, value_name = "FILE", requires = "engine")]
    pub(crate) engine_key_file: Option<PathBuf>,
}

impl Servers {
    /// Tells whether there is one.
    pub(crate) fn any(&self) -> bool {
        !self.engine.is_empty()
    }

    /// Returns how the user named each: its address, and its model's name.
    pub(crate) fn typed(&self) -> impl Iterator<Item = (&str, Option<&str>)> {
        self.engine.iter().map(|url| (url.as_str(), self.engine_model.as_deref()))
    }

    /// Returns how to reach each; `with` says how patiently.
    pub(crate) fn options(
        &self,
        context: &Context,
        with: impl Fn(String) -> EngineOptions,
    ) -> anyhow::Result<Vec<EngineOptions>> {
        let key = embedded::key(&context.command, self.engine_key_file.as_deref())?;
        let mut seen: Vec<&String> = Vec::new();
        for url in &self.engine {
            // The same one twice would only look like two.
            if !seen.contains(&url) {
                seen.push(url);
            }
        }
        let options = |url: &&String| EngineOptions {
            key: key.clone(),
            model: self.engine_model.clone(),
            ..with((*url).clone())
        };
        Ok(seen.iter().map(options).collect())
    }
}

/// Adds what each of several servers did to a closing table.
pub(crate) fn rows(accounts: &[Account], table: &mut Table) {
    if accounts.len() < 2 {
        return;
    }
    for Account { url, calls, failed, gone } in accounts {
        let gone = if *gone { ", gone at the end" } else { "" };
        let what = format!("{calls}, {failed} of them failed{gone}");
        table.add_row([format!("calls of {}", visible(url)), what]);
    }
}

/// Returns what says on stderr which server comes and goes.
pub(crate) fn teller(context: &Context) -> Tell {
    let say = context.sayer();
    Box::new(move |news| match news {
        News::Gone { reason } => say(format!("{reason}: left out until it is there again")),
        News::Back { url } => say(format!("`{url}` is there again")),
    })
}

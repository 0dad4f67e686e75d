//! `serve --ship`: finished shards go to an object store. The journal and the
//! spool stay on this machine, and a store that is away never holds up a chat.

use std::collections::HashSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use oclaw::store::{Error, Store};
use oclaw::table::shard_names;

use crate::common::Context;
use crate::follow::longer;
use crate::report;
use crate::stores;

/// How often to look for new shards.
const POLL: Duration = Duration::from_secs(1);

/// What goes to the store, and how far it is.
pub(super) struct Shipping<'a> {
    store: Store,
    spool: PathBuf,
    context: &'a Context,
    /// Shards that are there; unknown until the store was asked.
    there: Option<HashSet<OsString>>,
    /// Whether it was said that something is wrong.
    said: bool,
}

impl<'a> Shipping<'a> {
    /// Prepares to ship, if anything is to be. Nobody is asked yet.
    pub(super) fn open(
        ship: Option<&Path>,
        spool: &Path,
        context: &'a Context,
    ) -> anyhow::Result<Option<Self>> {
        let Some(path) = ship else { return Ok(None) };
        let Some(store) = stores::open(path)? else {
            let problem = format!("`--ship {}` is no object store", path.display());
            return Err(report::Failure::usage(problem)
                .hint("give it as `s3://BUCKET/FOLDER`; a folder is `--spool` itself")
                .into());
        };
        let spool = spool.to_owned();
        Ok(Some(Self { store, spool, context, there: None, said: false }))
    }

    /// Ships shards as they are finished, for ever.
    pub(super) async fn run(&mut self) {
        let mut pause = POLL;
        loop {
            match self.pass().await {
                Ok(()) => pause = POLL,
                Err(error) => {
                    if !self.said {
                        let told = report::told(&error);
                        self.context.say(format!("{told}: shards wait in the spool"));
                    }
                    self.said = true;
                    pause = longer(pause);
                }
            }
            tokio::time::sleep(pause).await;
        }
    }

    /// Ships what is left, once.
    pub(super) async fn finish(mut self) {
        if let Err(error) = self.pass().await {
            let told = report::told(&error);
            self.context.say(format!("{told}: the next start ships what is left"));
        }
    }

    async fn pass(&mut self) -> anyhow::Result<()> {
        let there = match &mut self.there {
            Some(there) => there,
            unknown => {
                let (objects, _) = self.store.list().await?;
                unknown.insert(objects.into_iter().map(|it| OsString::from(it.name)).collect())
            }
        };
        let mut due: Vec<_> = shard_names(&self.spool)?.into_iter().collect();
        due.retain(|name| !there.contains(name));
        // Their names tell when they were made.
        due.sort();
        for name in due {
            let path = self.spool.join(&name);
            match self.store.publish(&name.to_string_lossy(), &path).await {
                Ok(()) => tracing::info!(shard = %path.display(), "shipped"),
                Err(Error::Exists { .. }) => {}
                // Somebody has taken it away.
                Err(Error::File { .. }) if !path.exists() => continue,
                Err(error) => return Err(error.into()),
            }
            there.insert(name);
        }
        if std::mem::take(&mut self.said) {
            self.context.say(format!("`{}` is there again", self.store.address()));
        }
        Ok(())
    }
}

//! What is followed: a folder of this machine, or of an object store.

use std::ffi::OsStr;
use std::path::Path;

use oclaw::store::{Cache, Feed, Fetched};
use oclaw::table::{Follow, Input, Shard, Source};

use crate::common::Context;
use crate::stores;

/// The shards to come.
pub(crate) enum Incoming {
    /// Of a folder.
    Folder(Follow),
    /// Of a store, copied one by one.
    Store(Box<Feed>, Cache),
}

impl Incoming {
    /// Prepares to follow. Nobody is asked yet.
    pub(crate) fn open(context: &Context, folder: &Path) -> anyhow::Result<Self> {
        Ok(match stores::open(folder)? {
            None => Self::Folder(Follow::new(folder)),
            Some(store) => Self::Store(Box::new(Feed::new(store)), context.stores.cache()?),
        })
    }

    /// Looks which shards are due.
    pub(crate) async fn due(
        &mut self,
        done: &dyn Fn(&OsStr) -> bool,
        given_up: &dyn Fn(&Shard) -> bool,
    ) -> anyhow::Result<Vec<Shard>> {
        Ok(match self {
            Self::Folder(follow) => follow.due(done, given_up)?,
            Self::Store(feed, _) => feed.due(done, given_up).await?,
        })
    }

    /// Opens a shard, and holds its copy if it has to be one.
    pub(crate) async fn source(&self, shard: &Shard) -> anyhow::Result<(Source, Option<Fetched>)> {
        let copy = match self {
            Self::Store(feed, cache) => match feed.object(shard) {
                Some(object) => Some(cache.fetch(feed.store(), object).await?),
                None => None,
            },
            Self::Folder(_) => None,
        };
        let input = match &copy {
            Some(copy) => Input::Copy { path: copy.path.clone(), name: copy.url.clone() },
            None => Input::Named(shard.path.clone()),
        };
        Ok((Source::open_inputs(&[input])?, copy))
    }

    /// Returns whether a shard is still where it was.
    pub(crate) async fn has(&self, shard: &Shard) -> bool {
        match self {
            Self::Folder(_) => !shard.is_gone(),
            Self::Store(feed, _) => match feed.object(shard) {
                Some(object) => !matches!(feed.store().look(&object.name).await, Ok(None)),
                None => false,
            },
        }
    }
}

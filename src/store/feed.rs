//! A folder of shards in a store, looked at again and again, like
//! [`table::Follow`](crate::table::Follow) looks at one of this machine.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use futures_util::stream::{self, StreamExt};

use super::footer::end_of;
use super::{Error, Object, Store};
use crate::table::{Shard, Stamp, first_created_at, is_shard};

/// So many footers are read at once.
const AT_ONCE: usize = 16;

/// A folder that is followed.
#[derive(Debug)]
pub struct Feed {
    store: Store,
    /// The shards of the last look, and their first `created_at`.
    known: HashMap<String, (Object, Option<i64>)>,
}

impl Feed {
    /// Starts to follow a folder.
    pub fn new(store: Store) -> Self {
        Self { store, known: HashMap::new() }
    }

    /// Returns the folder.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Returns the shards that are neither done, by their names, nor `given_up` as
    /// they are, ordered by their first `created_at` and name. Those that tell no
    /// time, for they are empty or broken, come last. The path of a shard is its
    /// address.
    pub async fn due(
        &mut self,
        done: &dyn Fn(&OsStr) -> bool,
        given_up: &dyn Fn(&Shard) -> bool,
    ) -> Result<Vec<Shard>, Error> {
        let (mut objects, _) = self.store.list().await?;
        objects.retain(|object| {
            let name = OsStr::new(&object.name);
            is_shard(name) && !done(name) && !given_up(&self.shard(object))
        });
        let known = std::mem::take(&mut self.known);
        let store = &self.store;
        let first = stream::iter(objects).map(async |object| {
            let first = match known.get(&object.name) {
                Some((of, first @ Some(_))) if *of == object => *first,
                _ => first_of(store, &object).await?,
            };
            Ok::<_, Error>((object, first))
        });
        let first: Vec<_> = first.buffer_unordered(AT_ONCE).collect().await;
        let mut found = first.into_iter().collect::<Result<Vec<_>, _>>()?;
        found.sort_by(|(one, at), (other, then)| {
            (at.is_none(), at, &one.name).cmp(&(then.is_none(), then, &other.name))
        });
        let shards = found.iter().map(|(object, _)| self.shard(object)).collect();
        self.known =
            found.into_iter().map(|(object, at)| (object.name.clone(), (object, at))).collect();
        Ok(shards)
    }

    /// Returns the object that a shard of the last look is.
    pub fn object(&self, shard: &Shard) -> Option<&Object> {
        self.known.get(shard.name.to_str()?).map(|(object, _)| object)
    }

    fn shard(&self, object: &Object) -> Shard {
        Shard {
            path: PathBuf::from(self.store.url(&object.name)),
            name: OsString::from(&object.name),
            stamp: Stamp::Object {
                size: object.size,
                tag: object.tag.clone(),
                modified: object.modified,
            },
        }
    }
}

/// Reads the first time out of a shard's footer. What cannot be read tells none;
/// whoever does the shard says what is wrong.
async fn first_of(store: &Store, object: &Object) -> Result<Option<i64>, Error> {
    Ok(end_of(store, object).await?.and_then(first_created_at))
}

//! The folders of a store as they were at its last look: each is listed anew, a
//! shard is asked once.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use futures_util::stream::{self, StreamExt};

use super::shards::{COLUMNS, Folder, Ledger, Mark};
use super::{Known, Shared, WINDOW, lock};
use crate::pipeline::{Error, Hop};
use crate::store::{Object, Policies, Store, count};
use crate::table::is_shard;

/// So many shards are asked at once.
const AT_ONCE: usize = 16;
/// What a whole policy has.
const MANIFEST: &str = "oclaw/files.json";

/// What a store told last.
#[derive(Debug, Default)]
pub(super) struct Cloud {
    folders: HashMap<PathBuf, Seen>,
    latest: Option<u64>,
    /// The policies, with when each was made, by their names.
    made: BTreeMap<String, Option<SystemTime>>,
    /// When the look began that told it.
    told_at: Option<SystemTime>,
}

/// A folder of shards.
#[derive(Debug, Default)]
struct Seen {
    shards: Folder,
    given_up: HashSet<OsString>,
}

/// A shard to be asked.
struct Asked {
    path: PathBuf,
    folder: Store,
    object: Object,
    /// Whether its turns are wanted too.
    turns: bool,
}

impl Cloud {
    pub(super) fn told_at(&self) -> Option<SystemTime> {
        self.told_at
    }

    pub(super) fn folder(&self, folder: &Path) -> Folder {
        self.folders.get(folder).map(|seen| seen.shards.clone()).unwrap_or_default()
    }

    pub(super) fn given_up(&self, folder: &Path) -> HashSet<OsString> {
        self.folders.get(folder).map(|seen| seen.given_up.clone()).unwrap_or_default()
    }

    pub(super) fn published(&self) -> Option<u64> {
        self.latest
    }

    pub(super) fn steps_made(&self) -> Vec<(u64, SystemTime)> {
        self.made.iter().filter_map(|(name, at)| Some((step(name)?, (*at)?))).collect()
    }
}

/// A look at a store.
pub(super) struct Look {
    pub(super) store: Store,
    pub(super) hops: Vec<Hop>,
    pub(super) known: Shared,
}

impl Look {
    /// Looks at every folder, each before those that it flows into, and at the newest
    /// policy last. What was seen before stays as it is until all of it has told.
    pub(super) async fn look(self) -> Result<(), Error> {
        let begun = SystemTime::now();
        let mut folders = HashMap::new();
        let mut listed = HashMap::new();
        let mut asked: Vec<Asked> = Vec::new();
        for hop in self.hops.iter().filter(|hop| hop.stage != "train") {
            let folder = self.inside(&hop.into);
            let (mut objects, inside) = folder.list().await?;
            objects.retain(|object| is_shard(object.name.as_ref()));
            let given_up = given_up(&folder, &inside).await?;
            // What has gone on is counted there.
            let fresh = |one: &Asked| written(&one.object) >= SystemTime::now().checked_sub(WINDOW);
            let gone: HashSet<&str> = objects.iter().map(|object| object.name.as_str()).collect();
            asked.retain(|one| !gone.contains(one.object.name.as_str()) || fresh(one));
            let names = objects.iter().map(|it| (OsString::from(&it.name), written(it)));
            let seen = Seen { shards: Folder::of(names), given_up };
            listed.extend(objects.iter().map(|it| (hop.into.join(&it.name), mark(it))));
            asked.extend(self.unknown(hop, &folder, objects));
            folders.insert(hop.into.clone(), seen);
        }
        ask(asked, &self.known).await?;
        if let Some(hop) = self.hops.iter().find(|hop| hop.stage == "train") {
            folders.insert(hop.into.clone(), self.look_at_policies(hop).await?);
        }
        let mut known = lock(&self.known);
        known.shards.list(listed);
        (known.cloud.folders, known.cloud.told_at) = (folders, Some(begun));
        Ok(())
    }

    /// Lists the shards of a folder that are still to be asked.
    fn unknown(&self, hop: &Hop, folder: &Store, objects: Vec<Object>) -> Vec<Asked> {
        let turns = self.hops.iter().any(|next| next.stage == "train" && next.from == hop.into);
        let known = lock(&self.known);
        let asked = objects.into_iter().filter_map(|object| {
            let path = hop.into.join(&object.name);
            let is_known = known.shards.knows(&path, mark(&object), turns);
            (!is_known).then(|| Asked { path, folder: folder.clone(), object, turns })
        });
        asked.collect()
    }

    async fn look_at_policies(&self, hop: &Hop) -> Result<Seen, Error> {
        let folder = self.inside(&hop.into);
        let (_, inside) = folder.list().await?;
        let given_up = given_up(&folder, &inside).await?;
        let mut made = lock(&self.known).cloud.made.clone();
        made.retain(|name, _| inside.contains(name));
        for name in inside.iter().filter(|name| step(name).is_some()) {
            // One that is not whole yet is asked again.
            if made.get(name).is_none_or(Option::is_none) {
                let whole = folder.inside(name).look(MANIFEST).await?;
                made.insert(name.clone(), whole.as_ref().and_then(written));
            }
        }
        lock(&self.known).cloud.made = made;
        let policies = Policies::new(folder);
        if let Some(name) = policies.latest().await? {
            let policy = hop.into.join(&name);
            let is_known = lock(&self.known).ledger.is_of(&policy);
            if !is_known {
                let told = policies.read(&name, "oclaw/ledger.parquet").await?;
                let bytes = told.ok_or_else(|| {
                    Error::file(policy.join("oclaw/ledger.parquet"), io::ErrorKind::NotFound.into())
                })?;
                let ledger = Ledger::read(bytes, policy)?;
                lock(&self.known).ledger = ledger;
            }
            lock(&self.known).cloud.latest = step(&name);
        }
        Ok(Seen { given_up, ..Seen::default() })
    }

    fn inside(&self, folder: &Path) -> Store {
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        self.store.inside(&name)
    }
}

/// Asks shards for their rows, and notes each as soon as it has told.
async fn ask(asked: Vec<Asked>, known: &Mutex<Known>) -> Result<(), Error> {
    let told = stream::iter(asked).map(async |one| {
        let columns = one.turns.then_some(COLUMNS);
        let counted = count(&one.folder, &one.object, columns).await?;
        Ok::<_, Error>((one.path, mark(&one.object), counted))
    });
    let mut told = std::pin::pin!(told.buffer_unordered(AT_ONCE));
    while let Some(told) = told.next().await {
        // What cannot be read is counted as that.
        if let (path, mark, Some(counted)) = told? {
            lock(known).shards.note(path, mark, counted);
        }
    }
    Ok(())
}

/// Lists the shards that a stage has given up.
async fn given_up(folder: &Store, inside: &[String]) -> Result<HashSet<OsString>, Error> {
    if !inside.iter().any(|name| name == "failed") {
        return Ok(HashSet::new());
    }
    let (objects, _) = folder.inside("failed").list().await?;
    let names = objects.iter().filter_map(|object| object.name.strip_suffix(".json"));
    Ok(names.map(|name| OsString::from(format!("{name}.parquet"))).collect())
}

fn mark(object: &Object) -> Mark {
    (object.size, written(object))
}

fn written(object: &Object) -> Option<SystemTime> {
    let since = Duration::from_millis(u64::try_from(object.modified).ok()?);
    SystemTime::UNIX_EPOCH.checked_add(since)
}

/// Returns the number of a policy.
fn step(name: &str) -> Option<u64> {
    name.strip_prefix("step-")?.parse().ok()
}

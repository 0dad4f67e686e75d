//! A claim on a folder of a store: an object that says who works there. It is put if
//! nothing is there, renewed as long as its holder lives, and taken over once it has
//! not been renewed for [`STALE`]. Every write is on condition of the version that was
//! read, so that of two who want it one gets it. Ages are told by the store's own
//! clock alone: those of two machines may differ.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use object_store::UpdateVersion;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{Error, Store};

/// A claim that was not renewed for so long is anybody's.
pub const STALE: Duration = Duration::from_secs(300);
/// How often a holder renews its claim.
pub const RENEW: Duration = Duration::from_secs(60);
/// So often it is tried again when others have written meanwhile.
const ROUNDS: usize = 10;

/// Who has a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// The name of its machine.
    pub host: String,
    /// Its process there.
    pub pid: u32,
    /// What it is known by, also after it was killed and started again: whoever comes
    /// with the same id gets the claim at once. Kept where only one process can have
    /// it, such as in a folder of this machine that is locked.
    pub id: String,
    /// When it took the claim by its own clock, in milliseconds since 1970. For
    /// people; nothing is decided by it.
    pub since: i64,
}

/// What trying to take a claim came to.
#[derive(Debug)]
pub enum Take {
    /// It is ours.
    Taken {
        /// The claim, to be renewed and released.
        claim: Claim,
        /// Who had it and did not renew it, if it was taken over.
        from: Option<Holder>,
    },
    /// Somebody else has it.
    Held {
        /// Who that is.
        by: Holder,
        /// How long ago it was renewed.
        renewed: Duration,
    },
}

/// What renewing a claim came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Renewed {
    /// It is still ours.
    Kept,
    /// It was not renewed in time, and somebody else has taken it over.
    Lost {
        /// Who that is.
        to: Holder,
    },
}

/// A claim that is held. One that is not released goes stale.
#[derive(Debug)]
pub struct Claim {
    store: Store,
    name: String,
    holder: Holder,
}

/// What the object says.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Record {
    holder: Holder,
    /// What tells one write from all others, so that one whose answer was lost is
    /// known for one's own.
    write: String,
    /// Whether nobody has it any more. The object stays: it could not be removed on
    /// condition that nobody else has taken it meanwhile.
    released: bool,
}

/// A record that is there.
struct There {
    record: Record,
    version: UpdateVersion,
    /// When it was written by the store's clock, in milliseconds.
    at: i64,
}

impl Holder {
    /// Returns this process, known by an id.
    pub fn here(id: &str) -> Self {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let host = match host.trim() {
            "" => "an unnamed machine",
            host => host,
        };
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let since = i64::try_from(since.as_millis()).unwrap_or(i64::MAX);
        Self { host: host.to_owned(), pid: std::process::id(), id: id.to_owned(), since }
    }
}

impl Claim {
    /// Tries to take the claim of a name in a folder, such as `loop.claim`. One that
    /// was not renewed for `stale`, usually [`STALE`], is taken over.
    pub async fn take(
        store: &Store,
        name: &str,
        holder: Holder,
        stale: Duration,
    ) -> Result<Take, Error> {
        let ours = Record::of(&holder, false);
        let claim = Self { store: store.clone(), name: name.to_owned(), holder };
        let mut from = None;
        for _ in 0..ROUNDS {
            let Some(There { record: there, version, at }) = claim.read().await? else {
                match store.put_new(name, ours.bytes()).await {
                    Ok(()) => return Ok(Take::Taken { claim, from }),
                    Err(Error::Exists { .. }) => continue,
                    Err(error) => return Err(error),
                }
            };
            if there.write == ours.write {
                // An earlier write of ours, whose answer was lost.
                return Ok(Take::Taken { claim, from });
            }
            from = None;
            if !there.released && there.holder.id != ours.holder.id {
                let renewed = claim.age(at).await?;
                if renewed < stale {
                    return Ok(Take::Held { by: there.holder, renewed });
                }
                from = Some(there.holder);
            }
            if claim.put_over(&ours, version).await? {
                return Ok(Take::Taken { claim, from });
            }
        }
        Err(claim.contended())
    }

    /// Returns who has it: this process.
    pub fn holder(&self) -> &Holder {
        &self.holder
    }

    /// Says that its holder is alive; to be done every [`RENEW`]. An error of a store
    /// that is away loses nothing by itself: it is tried again. Who has lost the claim
    /// must stop.
    pub async fn renew(&mut self) -> Result<Renewed, Error> {
        self.write(Record::of(&self.holder, false)).await
    }

    /// Gives it up, so that the next one need not wait.
    pub async fn release(self) -> Result<(), Error> {
        self.write(Record::of(&self.holder, true)).await.map(drop)
    }

    async fn write(&self, ours: Record) -> Result<Renewed, Error> {
        for _ in 0..ROUNDS {
            let Some(There { record: there, version, .. }) = self.read().await? else {
                if ours.released {
                    return Ok(Renewed::Kept);
                }
                // Somebody has removed it by hand.
                match self.store.put_new(&self.name, ours.bytes()).await {
                    Ok(()) => return Ok(Renewed::Kept),
                    Err(Error::Exists { .. }) => continue,
                    Err(error) => return Err(error),
                }
            };
            if there.write == ours.write {
                return Ok(Renewed::Kept);
            }
            if there.holder.id != self.holder.id {
                return Ok(Renewed::Lost { to: there.holder });
            }
            if self.put_over(&ours, version).await? {
                return Ok(Renewed::Kept);
            }
        }
        Err(self.contended())
    }

    fn contended(&self) -> Error {
        let problem = "it is replaced again and again".to_owned();
        Error::Changed { url: self.store.url(&self.name), problem }
    }

    /// Puts a record over the version that was read; not if that is there no more.
    async fn put_over(&self, ours: &Record, version: UpdateVersion) -> Result<bool, Error> {
        match self.store.update(&self.name, ours.bytes(), version).await {
            Ok(()) => Ok(true),
            Err(Error::Changed { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn read(&self) -> Result<Option<There>, Error> {
        let Some((bytes, version, at)) = self.store.read_version(&self.name).await? else {
            return Ok(None);
        };
        match serde_json::from_slice(&bytes) {
            Ok(record) => Ok(Some(There { record, version, at })),
            Err(_) => Err(Error::Policy {
                url: self.store.url(&self.name),
                problem: "it is no claim: remove it if nobody else uses this folder".to_owned(),
            }),
        }
    }

    /// Returns how old a write is. An object that is put now tells the store's time; it
    /// stays, for another one may look at it.
    async fn age(&self, at: i64) -> Result<Duration, Error> {
        let clock = format!("{}.clock", self.name);
        self.store.replace(&clock, Bytes::from_static(b"now")).await?;
        let now = self.store.look(&clock).await?.map_or(at, |object| object.modified);
        Ok(Duration::from_millis(u64::try_from(now.saturating_sub(at)).unwrap_or_default()))
    }
}

impl Record {
    fn of(holder: &Holder, released: bool) -> Self {
        Self { holder: holder.clone(), write: Uuid::now_v7().to_string(), released }
    }

    fn bytes(&self) -> Bytes {
        serde_json::to_vec(self).unwrap_or_default().into()
    }
}

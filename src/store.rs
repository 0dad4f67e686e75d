//! Object stores: folders of shards and of policies that are no folders of this
//! machine, but prefixes of a bucket.
//!
//! A [`Store`] is such a folder. What it publishes is put under its final name if
//! nothing has that name, so that two writers cannot overwrite each other and no
//! half shard is ever seen. What is read goes through a [`Cache`], a bounded folder
//! of this machine in which size and entity tag of every object are checked. Absent
//! on purpose: waiting. An error says whether waiting may help, the caller waits.

mod address;
mod cache;
mod claim;
mod client;
mod error;
mod feed;
mod footer;
mod manifest;
mod policies;

use std::io;
use std::path::PathBuf;

pub use address::Address;
pub use cache::{Cache, Fetched};
pub use claim::{Claim, Holder, RENEW, Renewed, STALE, Take};
pub use client::{Object, Store};
pub use feed::Feed;
pub use footer::{Counted, count};
pub use policies::{Policies, Published};

/// What can go wrong with a store.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The address is none.
    #[error("`{url}`: {problem}")]
    Address {
        /// The address, as it was given.
        url: String,
        /// What is wrong with it.
        problem: String,
    },
    /// No client can be made of the address and the environment.
    #[error("`{url}`: no client for it: {problem}")]
    Client {
        /// The address.
        url: String,
        /// What is wrong.
        problem: String,
    },
    /// The store does not answer, or not now.
    #[error("`{url}`: the store is away: {problem}")]
    Away {
        /// The object or folder.
        url: String,
        /// The last of what it said.
        problem: String,
    },
    /// The store will not let us.
    #[error("`{url}`: the store refuses it: {problem}")]
    Refused {
        /// The object or folder.
        url: String,
        /// Its reason.
        problem: String,
    },
    /// Nothing is there.
    #[error("`{url}`: nothing is there")]
    NotThere {
        /// The object, or the bucket.
        url: String,
    },
    /// Something has the name already.
    #[error("`{url}`: it is there already")]
    Exists {
        /// The object.
        url: String,
    },
    /// The bytes are not those that were listed.
    #[error("`{url}`: {problem}")]
    Changed {
        /// The object.
        url: String,
        /// What is different.
        problem: String,
    },
    /// A file of this machine cannot be read or written.
    #[error("`{}`: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A policy is not as its manifest says, or another one has its number; or an
    /// object is not what its name says.
    #[error("`{url}`: {problem}")]
    Policy {
        /// The policy or object.
        url: String,
        /// What is wrong.
        problem: String,
    },
}

impl Error {
    /// Returns whether the same may work later without anybody's doing.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Away { .. } | Self::Changed { .. })
    }
}

//! One server among several: how to reach it, what it did, whether it rests.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::super::address::hide;
use super::super::{Engine, EngineOptions};
use super::Account;

/// One server.
pub(super) struct Member {
    pub(super) options: EngineOptions,
    pub(super) under_way: AtomicUsize,
    pub(super) calls: AtomicU64,
    pub(super) failed: AtomicU64,
    state: Mutex<State>,
}

/// What is known of it.
#[derive(Default)]
pub(super) struct State {
    pub(super) engine: Option<Engine>,
    /// Left out until then.
    pub(super) rest: Option<Instant>,
    pub(super) pause: Option<Duration>,
    pub(super) in_a_row: u32,
    pub(super) gone: bool,
    pub(super) told_gone: bool,
    pub(super) told_back: bool,
}

impl Member {
    pub(super) fn new(options: EngineOptions) -> Self {
        Self {
            options,
            under_way: AtomicUsize::new(0),
            calls: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            state: Mutex::default(),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn url(&self) -> String {
        hide(&self.options.url)
    }

    pub(super) fn account(&self) -> Account {
        Account {
            url: self.url(),
            calls: self.calls.load(Ordering::Relaxed),
            failed: self.failed.load(Ordering::Relaxed),
            gone: self.state().gone,
        }
    }
}

/// A call under way, until it is dropped.
pub(super) struct UnderWay<'a>(&'a AtomicUsize);

impl<'a> UnderWay<'a> {
    pub(super) fn of(member: &'a Member) -> Self {
        member.under_way.fetch_add(1, Ordering::Relaxed);
        Self(&member.under_way)
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

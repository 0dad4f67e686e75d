//! The engines behind the proxy, and which of them answers a request.
//!
//! A session stays with the engine that has its prefix in the cache; a new one
//! goes to the engine with the fewest requests. An engine that is away or on hold
//! is left out as long as there is another.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use super::Error;
use super::metrics::count;
use super::upstream::{Busy, Kind, Upstream};
use super::{Backend, upstream};

/// Sessions whose engine is remembered, at most.
const HOMES: usize = 65_536;
/// Longest wait for an engine's word about its health. A check of SGLang may wait
/// 20 s for a generation.
const PATIENCE: Duration = Duration::from_secs(25);

/// The engines behind the proxy.
#[derive(Debug)]
pub(super) struct Fleet {
    engines: Vec<Arc<Upstream>>,
    homes: Mutex<Homes>,
    /// Changes when an engine is held or released, or goes or comes back.
    changed: watch::Sender<()>,
}

/// The engine of each session, in two generations: when the young one is full,
/// the old one is forgotten.
#[derive(Debug, Default)]
struct Homes {
    young: HashMap<u64, usize>,
    old: HashMap<u64, usize>,
}

impl Homes {
    fn settle(&mut self, session: u64, engine: usize) {
        if self.young.len() >= HOMES / 2 {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(session, engine);
    }
}

impl Fleet {
    pub(super) fn new(backends: Vec<Backend>) -> Result<Self, Error> {
        let mut engines = Vec::with_capacity(backends.len());
        let client = upstream::client()?;
        for backend in backends {
            engines.push(Arc::new(Upstream::new(client.clone(), backend)?));
        }
        if engines.is_empty() {
            return Err(Error::NoEngine);
        }
        Ok(Self { engines, homes: Mutex::default(), changed: watch::Sender::new(()) })
    }

    /// Returns the engines in the order of the options.
    pub(super) fn engines(&self) -> &[Arc<Upstream>] {
        &self.engines
    }

    /// Returns what the engines' requests look like, each kind once.
    pub(super) fn kinds(&self) -> Vec<Kind> {
        let mut kinds: Vec<Kind> = Vec::with_capacity(1);
        for kind in self.engines.iter().map(|engine| engine.kind()) {
            if !kinds.contains(&kind) {
                kinds.push(kind);
            }
        }
        kinds
    }

    /// Chooses who answers a request of a session, if there is anybody left who
    /// was not tried yet.
    pub(super) fn choose(&self, session: Option<&str>, tried: &[Arc<Upstream>]) -> Option<Busy> {
        if let ([only], []) = (self.engines.as_slice(), tried) {
            return Some(only.clone().begin());
        }
        let left = |number: &usize| {
            let engine = &self.engines[*number];
            !tried.iter().any(|tried| Arc::ptr_eq(tried, engine))
        };
        let all: Vec<usize> = (0..self.engines.len()).filter(left).collect();
        let among = |fits: &dyn Fn(&Upstream) -> bool| {
            all.iter().copied().filter(|number| fits(&self.engines[*number])).collect::<Vec<_>>()
        };
        let usable = among(&|engine| !engine.is_away() && !engine.is_held());
        let unheld = || among(&|engine| !engine.is_held());
        // Who was away may be back; better than to refuse. Who is on hold gets nothing that
        // another was tried with: held as all are, the request would have waited.
        let held = || if tried.is_empty() { all.clone() } else { Vec::new() };
        let candidates = [usable, unheld(), held()].into_iter().find(|some| !some.is_empty())?;
        let session = session.map(hash);
        let home = session.and_then(|session| self.home(session));
        let chosen = home.filter(|home| candidates.contains(home)).or_else(|| {
            let load = |number: &usize| {
                let engine = &self.engines[*number];
                (engine.busy.load(Ordering::Relaxed), engine.requests.load(Ordering::Relaxed))
            };
            candidates.into_iter().min_by_key(load)
        })?;
        if let Some(session) = session
            && home.is_none_or(|home| self.engines[home].is_away())
        {
            self.settle(session, chosen);
        }
        Some(self.engines[chosen].clone().begin())
    }

    fn home(&self, session: u64) -> Option<usize> {
        let mut homes = self.homes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(home) = homes.young.get(&session) {
            return Some(*home);
        }
        // Whoever chats is young again.
        let home = homes.old.remove(&session)?;
        homes.settle(session, home);
        Some(home)
    }

    fn settle(&self, session: u64, engine: usize) {
        let mut homes = self.homes.lock().unwrap_or_else(PoisonError::into_inner);
        homes.settle(session, engine);
    }

    /// Finds the engines that a control request is about: the one at an address,
    /// or all.
    pub(super) fn named(&self, address: Option<&str>) -> Vec<&Arc<Upstream>> {
        let meant = |engine: &&Arc<Upstream>| {
            address.is_none_or(|address| bare(address) == bare(&engine.url))
        };
        self.engines.iter().filter(meant).collect()
    }

    /// Holds engines, or releases them.
    pub(super) fn hold(&self, address: Option<&str>, held: bool) -> usize {
        let named = self.named(address);
        for engine in &named {
            engine.held.store(held, Ordering::SeqCst);
        }
        self.changed.send_replace(());
        named.len()
    }

    /// Returns whether every engine that is there is on hold.
    pub(super) fn is_held(&self) -> bool {
        self.engines.iter().any(|engine| engine.is_held())
            && self.engines.iter().all(|engine| engine.is_held() || engine.is_away())
    }

    /// Waits while every engine that is there is on hold.
    pub(super) async fn released(&self) {
        if !self.is_held() {
            return;
        }
        let mut changed = self.changed.subscribe();
        while self.is_held() {
            // The sender lives as long as the fleet.
            if changed.changed().await.is_err() {
                return;
            }
        }
    }

    /// Asks the engines how they are, again and again. A single one is asked by
    /// `/readyz` only: there is no other to go to.
    pub(super) async fn watch(self: Arc<Self>, interval: Duration) {
        if self.engines.len() > 1 {
            let watched = self.engines.iter().map(|engine| self.look_after(engine, interval));
            futures_util::future::join_all(watched).await;
        }
    }

    /// Asks one engine; one that hangs delays no word of the others.
    async fn look_after(&self, engine: &Upstream, interval: Duration) {
        loop {
            tokio::time::sleep(interval).await;
            let asked = tokio::time::timeout(PATIENCE, engine.engine.health()).await;
            let well = matches!(asked, Ok(Ok(_)));
            if well == engine.is_away() {
                tracing::warn!(engine = engine.url, well, "the health of an engine changed");
                engine.away.store(!well, Ordering::Relaxed);
                self.changed.send_replace(());
            }
        }
    }

    /// Leaves an engine out that could not be reached.
    pub(super) fn lost(&self, engine: &Upstream) {
        count(&engine.failures);
        if self.engines.len() > 1 {
            engine.away.store(true, Ordering::Relaxed);
            self.changed.send_replace(());
        }
    }
}

fn hash(session: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    session.hash(&mut hasher);
    hasher.finish()
}

/// Returns an address without what people write in different ways.
fn bare(address: &str) -> &str {
    let (scheme, _) = address.split_once("://").unwrap_or_default();
    let dialect = scheme.split_once('+').map_or(0, |(dialect, _)| dialect.len() + 1);
    let address = address[dialect..].trim_end_matches('/');
    address.strip_suffix("/v1").unwrap_or(address)
}

//! One server that gets a policy.

use std::time::{Duration, Instant};

use crate::engine::Error as EngineError;
use crate::engine::{Carried, Dialect, Engine, Listed};
use crate::wire::sglang::PauseMode;

use super::policy::PREFIX;
use super::{Error, Options, Policy, Step, Tried, shown};

pub(super) struct Server<'a> {
    pub(super) engine: &'a Engine,
    pub(super) policy: &'a Policy,
    pub(super) watch: &'a dyn Fn(Tried),
}

/// Returns what a server carries, of the kind that a policy is: weights, or adapters.
pub async fn carried(engine: &Engine, policy: &Policy) -> Result<Carried, EngineError> {
    let Some(name) = policy.adapter_name() else { return engine.carried().await };
    let listed = engine.listed().await?;
    let versions = listed.iter().filter_map(|listed| listed.name.strip_prefix(PREFIX));
    let newest = versions.max_by_key(|version| version.parse::<u64>().ok()).map(str::to_owned);
    let there = listed.iter().find(|listed| listed.name == name);
    let folder = there.and_then(|there| there.root.clone());
    let version = there.map(|_| policy.version.clone()).or(newest);
    Ok(Carried { version, tells: true, folder })
}

impl Server<'_> {
    pub(super) async fn push(&self, options: Options) -> Result<bool, Error> {
        let version = &self.policy.version;
        let found = carried(self.engine, self.policy);
        let found = self
            .step(Step::Ask, found, |found| match found.tells {
                true => format!("serves version {}", shown(&found.version)),
                false => "this server tells no version".to_owned(),
            })
            .await?;
        let has = found.version.as_ref() == Some(version);
        if let Some(name) = self.policy.adapter_name() {
            return self.push_adapter(&name, has.then_some(found), options).await;
        }
        if has && !options.force {
            let folder = found.folder.unwrap_or_default();
            let outcome = format!("already at version `{version}` (from `{folder}`)");
            self.tell(Step::Update, Duration::ZERO, outcome, true);
            // A push that was killed may have left it held.
            self.go_on().await?;
            return Ok(false);
        }
        let pause = self.engine.pause(PauseMode::Retract);
        let paused = self.step(Step::Pause, pause, |()| "held".to_owned()).await;
        let loaded = match paused {
            Ok(()) => self.load().await,
            Err(error) => Err(error),
        };
        // Also after a failed pause: it may have arrived all the same.
        let resumed = self.go_on().await;
        loaded.and(resumed)?;
        self.is_well().await.map(|()| true)
    }

    async fn go_on(&self) -> Result<(), Error> {
        self.step(Step::Continue, self.engine.resume(), |()| "goes on".to_owned()).await
    }

    async fn load(&self) -> Result<(), Error> {
        let version = &self.policy.version;
        let update = self.engine.update_weights_from_disk(self.policy.pushed());
        self.step(Step::Update, update, |()| format!("loaded version `{version}`")).await?;
        let found = self.verified(self.engine.carried()).await?;
        if found.tells && found.version.as_ref() != Some(version) {
            return Err(self.other_version(found));
        }
        self.step(Step::Flush, self.engine.flush(), |()| "emptied".to_owned()).await
    }

    /// Loads an adapter beside the others; nothing has to be held for that.
    async fn push_adapter(
        &self,
        name: &str,
        found: Option<Carried>,
        options: Options,
    ) -> Result<bool, Error> {
        let Policy { version, .. } = self.policy;
        let folder = self.policy.pushed().folder;
        let there = found.and_then(|found| found.folder);
        match there {
            Some(there) if options.force => {
                let gone = self.engine.unload_adapter(name);
                self.step(Step::Unload, gone, |()| format!("`{name}` from `{there}`")).await?;
            }
            Some(there) if folder.to_string_lossy() != there => {
                let (url, name) = (self.engine.url(), name.to_owned());
                return Err(Error::OtherAdapter { url, name, folder: there });
            }
            Some(there) if self.is_named().await? => {
                let outcome = format!("already serves `{name}` (from `{there}`)");
                self.tell(Step::Update, Duration::ZERO, outcome, true);
                return Ok(false);
            }
            _ => {}
        }
        let load = async {
            self.engine.load_adapter(name, folder).await?;
            match self.engine.dialect() {
                // Loading an adapter leaves the version of the answers as it was.
                Dialect::Sglang => self.engine.name_version(version).await,
                _ => Ok(()),
            }
        };
        self.step(Step::Update, load, |()| format!("loaded `{name}`")).await?;
        let found = self.verified(carried(self.engine, self.policy)).await?;
        if found.version.as_ref() != Some(version) || !self.is_named().await? {
            return Err(self.other_version(found));
        }
        self.is_well().await.map(|()| true)
    }

    /// Returns whether answers carry the policy's version, as far as servers of this
    /// kind have one beside the name of the adapter.
    async fn is_named(&self) -> Result<bool, Error> {
        if self.engine.dialect() != Dialect::Sglang {
            return Ok(true);
        }
        let found = self.engine.carried().await;
        let found = found.map_err(|source| Error::Engine { step: Step::Verify, source })?;
        Ok(found.version.as_ref() == Some(&self.policy.version))
    }

    /// Lets go of adapters of other versions but for the newest few. One that cannot
    /// be let go of only takes room.
    pub(super) async fn unload_old(&self, spare: usize) {
        let Ok(listed) = self.engine.listed().await else { return };
        let version = |listed: &Listed| listed.name.strip_prefix(PREFIX)?.parse::<u64>().ok();
        let mut old: Vec<_> = listed
            .iter()
            .filter(|listed| Some(&listed.name) != self.policy.adapter_name().as_ref())
            .filter_map(|listed| Some((version(listed)?, &listed.name)))
            .collect();
        old.sort();
        old.truncate(old.len().saturating_sub(spare));
        for (_, name) in old {
            let gone = self.engine.unload_adapter(name);
            // It is told, and nothing hangs on it.
            let _ = self.step(Step::Unload, gone, |()| format!("`{name}`")).await;
        }
    }

    async fn verified(
        &self,
        asked: impl Future<Output = Result<Carried, EngineError>>,
    ) -> Result<Carried, Error> {
        self.step(Step::Verify, asked, |found| match found.tells {
            true => format!("carries {}", shown(&found.version)),
            false => "this server tells no version: taken on its word".to_owned(),
        })
        .await
    }

    fn other_version(&self, found: Carried) -> Error {
        let wanted = self.policy.version.clone();
        Error::OtherVersion { url: self.engine.url(), wanted, found: found.version }
    }

    async fn is_well(&self) -> Result<(), Error> {
        let health = self.engine.health();
        self.step(Step::Health, health, |found| format!("{found:?}").to_lowercase()).await?;
        Ok(())
    }

    pub(super) async fn step<T>(
        &self,
        step: Step,
        call: impl Future<Output = Result<T, EngineError>>,
        outcome: impl FnOnce(&T) -> String,
    ) -> Result<T, Error> {
        let start = Instant::now();
        match call.await {
            Ok(value) => {
                self.tell(step, start.elapsed(), outcome(&value), true);
                Ok(value)
            }
            Err(source) => {
                self.tell(step, start.elapsed(), source.to_string(), false);
                Err(Error::Engine { step, source })
            }
        }
    }

    fn tell(&self, step: Step, took: Duration, outcome: String, good: bool) {
        (self.watch)(Tried { url: self.engine.url(), step, took, outcome, good });
    }
}

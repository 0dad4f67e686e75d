//! `--out s3://…`: policies are made in a folder of this machine and published from
//! there. The store says which one is the newest; what this machine has beyond that
//! is published first.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use oclaw::store::{Policies, Published};
use oclaw::table::Claim;

use super::Args;
use crate::common::Context;
use crate::follow::{Failures, longer, sleep, unless_signalled};
use crate::report;
use crate::stores;

const LATEST: &str = "latest";
/// What tells one policy of a number from another.
const RECORD: &str = "oclaw/train.json";
/// First wait for a store that is away.
const PAUSE: Duration = Duration::from_secs(1);

/// Where policies go.
pub(super) struct Shelf {
    /// The folder that they are made in.
    folder: PathBuf,
    remote: Option<Remote>,
}

struct Remote {
    policies: Policies,
    keep: u64,
    /// A policy that could not be published yet.
    waiting: Option<PathBuf>,
    /// When to try that again, and how long to wait then.
    again: Option<(Instant, Duration)>,
    _claim: Claim,
}

impl Shelf {
    /// Finds the folder to train in. For a store it is brought to the newest policy
    /// there; `--follow` waits for a store that is away. Returns nothing if a signal
    /// ended the wait.
    pub(super) fn open(args: &Args, context: &Context) -> anyhow::Result<Option<Self>> {
        let Some(store) = stores::open(&args.out)? else {
            return Ok(Some(Self { folder: args.out.clone(), remote: None }));
        };
        let beside = context.stores.beside("policies", store.address())?;
        let claim = Claim::take(&beside)?;
        let policies = Policies::new(store);
        let folder = beside.join("work");
        let waits = args.following.follow.is_some() && !args.following.once;
        // Who waits ends well on a signal, which else ends the process.
        let signal = waits.then(|| context.drain_on_signal());
        let (mut pause, mut said) = (PAUSE, false);
        loop {
            let restoring = restore(&policies, &folder, context);
            let restored = context.block_on(async {
                match &signal {
                    Some(signal) => unless_signalled(signal, restoring).await,
                    None => Some(restoring.await),
                }
            });
            let Some(restored) = restored else { return Ok(None) };
            match restored {
                Err(error) if waits && report::is_store_away(&error) => {
                    if !said {
                        context.say(format!("{}: waiting for it", report::told(&error)));
                    }
                    said = true;
                }
                restored => {
                    restored?;
                    break;
                }
            }
            if let Some(signal) = &signal
                && !context.block_on(sleep(signal, pause))
            {
                return Ok(None);
            }
            pause = longer(pause);
        }
        let remote =
            Remote { policies, keep: args.keep, waiting: None, again: None, _claim: claim };
        Ok(Some(Self { folder, remote: Some(remote) }))
    }

    /// Returns the folder to train in.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the list of shards that are given up.
    pub(super) fn failures(&self) -> Failures {
        match &self.remote {
            None => Failures::of(&self.folder),
            Some(remote) => Failures::in_store(remote.policies.store().clone()),
        }
    }

    /// Publishes a policy. If the store is away, it waits for [`Shelf::publish_waiting`].
    pub(super) fn publish(&mut self, policy: &Path, context: &Context) -> anyhow::Result<()> {
        if let Some(remote) = &mut self.remote {
            let away = remote.waiting.replace(policy.to_owned()).is_some();
            remote.publish_waiting(context, !away)?;
        }
        Ok(())
    }

    /// Tries again to publish the policy that waits, if one does.
    pub(super) fn publish_waiting(&mut self, context: &Context) -> anyhow::Result<()> {
        match &mut self.remote {
            Some(remote) => remote.publish_waiting(context, false),
            None => Ok(()),
        }
    }

    /// Publishes what waits, or says that it could not be.
    pub(super) fn close(&mut self, context: &Context) -> anyhow::Result<()> {
        let Some(Remote { policies, waiting: Some(policy), .. }) = &mut self.remote else {
            return Ok(());
        };
        let published = context.block_on(policies.publish(policy));
        published.map(drop).with_context(|| {
            format!("`{}` is not published; the next start does that", policy.display())
        })
    }
}

impl Remote {
    fn publish_waiting(&mut self, context: &Context, says: bool) -> anyhow::Result<()> {
        let Some(policy) = &self.waiting else { return Ok(()) };
        if self.again.is_some_and(|(at, _)| Instant::now() < at) {
            return Ok(());
        }
        let name = policy.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let published = context.block_on(async {
            self.policies.publish(policy).await?;
            self.policies.prune(&name, self.keep).await
        });
        match published.map_err(anyhow::Error::from) {
            Ok(()) => {
                context.say(format!("published {}", self.policies.store().url(&name)));
                (self.waiting, self.again) = (None, None);
                Ok(())
            }
            Err(error) if report::is_store_away(&error) => {
                if says {
                    let told = report::told(&error);
                    context.say(format!("{told}: {name} is published when it is there again"));
                }
                let pause = self.again.map_or(PAUSE, |(_, pause)| longer(pause));
                self.again = Some((Instant::now() + pause, pause));
                Ok(())
            }
            Err(error) => Err(error),
        }
    }
}

/// Brings the folder to the newest policy of the store.
async fn restore(policies: &Policies, folder: &Path, context: &Context) -> anyhow::Result<()> {
    let here = fs::read_link(folder.join(LATEST)).ok();
    let here = here.and_then(|name| Some(name.to_str()?.to_owned()));
    let Some(there) = policies.latest().await? else {
        return match here {
            Some(name) => publish(policies, folder, &name, context).await,
            None => Ok(()),
        };
    };
    if let Some(here) = here
        && policies.has(&there, RECORD, &folder.join(&there)).await?
        && here >= there
    {
        return match here == there {
            true => Ok(()),
            false => publish(policies, folder, &here, context).await,
        };
    }
    context.say(format!("going on from {}", policies.store().url(&there)));
    if folder.exists() {
        // Other policies than the store's.
        fs::remove_dir_all(folder)
            .with_context(|| format!("cannot remove `{}`", folder.display()))?;
    }
    policies.fetch(&there, folder, true).await?;
    let link = folder.join(LATEST);
    std::os::unix::fs::symlink(&there, &link)
        .with_context(|| format!("cannot write `{}`", link.display()))
}

async fn publish(
    policies: &Policies,
    folder: &Path,
    name: &str,
    context: &Context,
) -> anyhow::Result<()> {
    if policies.publish(&folder.join(name)).await? == Published::Now {
        let url = policies.store().url(name);
        context.say(format!("published {url}, which an earlier run had made"));
    }
    Ok(())
}

//! `oclaw sync-weights --follow`: each policy as `latest` moves to it.

use std::cell::RefCell;
use std::path::Path;
use std::time::Duration;

use oclaw::sync::{self, Lock, Policy};
use tokio::sync::watch;

use super::shelf::{self, Shelf};
use super::{Args, Servers, push, table};
use crate::common::Context;
use crate::follow::{longer, signalled, sleep};
use crate::report::{self, Exit, Failure};

/// So many times a policy is refused until nobody offers it any more.
const REFUSALS: u32 = 2;

pub(super) async fn follow(args: &Args, context: &Context, folder: &Path) -> anyhow::Result<Exit> {
    let shelf = Shelf::open(folder, context)?;
    if shelf.is_none() && !folder.is_dir() {
        let problem = format!("there is no folder `{}` to follow", folder.display());
        return Err(Failure::usage(problem)
            .hint("make it, if its policies are still to come")
            .into());
    }
    // The first signal ends the run between two pushes: no server stays held.
    let signal = context.drain_on_signal();
    let mut run = Run {
        args,
        context,
        folder,
        shelf,
        signal,
        servers: None,
        served: None,
        unfinished: false,
        refused: None,
        said: None,
        pause: args.poll,
    };
    let told = run.signal.clone();
    loop {
        // Nobody is waited for then, a store or a server that hangs neither.
        let due = tokio::select! {
            biased;
            () = signalled(&told) => break,
            due = run.due() => due,
        };
        let looked = match due {
            Ok(Some((policy, lock))) => run.push(policy, lock).await,
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        let time = match looked {
            Ok(()) => {
                (run.pause, run.said) = (args.poll, None);
                args.poll
            }
            Err(error) => run.weigh(error)?,
        };
        if !sleep(&run.signal, time).await {
            break;
        }
    }
    Ok(Exit::Done)
}

/// A run under way.
struct Run<'a> {
    args: &'a Args,
    context: &'a Context,
    folder: &'a Path,
    /// The store that it is, if it is one.
    shelf: Option<Shelf>,
    signal: watch::Receiver<bool>,
    /// The servers, once all of them have been found.
    servers: Option<Servers>,
    /// The version that all of them, and the proxies, were told of last.
    served: Option<String>,
    /// Whether the last push failed.
    unfinished: bool,
    /// The version that was refused last, and how often.
    refused: Option<(String, u32)>,
    /// What is wrong, as it was said.
    said: Option<String>,
    pause: Duration,
}

impl Run<'_> {
    /// Finds the policy that `latest` names, if a server lacks it, and takes its lock.
    async fn due(&mut self) -> anyhow::Result<Option<(Policy, Lock)>> {
        let newest = shelf::newest(self.folder, self.shelf.as_ref()).await?;
        let Some(policy) = newest else { return Ok(None) };
        let policy = if self.args.adapter { policy.as_adapter()? } else { policy };
        if self.is_skipped(&policy.version) {
            return Ok(None);
        }
        // The workers of a router may be others by now.
        let servers = match self.servers.take().filter(|servers| !servers.routed) {
            Some(servers) => servers,
            None => super::connect(self.args, self.context).await?,
        };
        let servers = self.servers.insert(servers);
        let served = self.served.as_ref();
        if !servers.lack(&policy, self.args.every, served).await? {
            // All have it, but those behind them may not have been told.
            let all_told = served == Some(&policy.version);
            if all_told || servers.lack(&policy, 1, served).await? {
                return Ok(None);
            }
        }
        if self.args.require_gate {
            sync::require_gate(&policy, None)?;
        }
        // Another push is waited for like a server.
        let lock = Lock::take(&policy, Duration::ZERO).await?;
        let wanted = shelf::newest(self.folder, self.shelf.as_ref()).await?;
        // It may have moved while others pushed, perhaps back: what was looked at is not
        // what is wanted now.
        let is_wanted = wanted.is_some_and(|wanted| wanted.folder == policy.folder);
        Ok(is_wanted.then_some((policy, lock)))
    }

    /// Pushes a policy to its end: no server stays held.
    async fn push(&mut self, policy: Policy, _lock: Lock) -> anyhow::Result<()> {
        let Some(servers) = &self.servers else { return Ok(()) };
        let tried = RefCell::new(Vec::new());
        let watch = |part| tried.borrow_mut().push(part);
        // What failed may have come to its version all the same, and no further. An adapter
        // is there or not: to let go of it would end the chats that ask for it.
        let force = self.unfinished && policy.adapter.is_none();
        let pushed = push(force, &policy, servers, &watch).await;
        self.unfinished = pushed.is_err();
        let version = policy.version;
        match pushed {
            Ok(count) => {
                match (count, servers.engines.len()) {
                    (_, 0) => self.context.say(format!("version {version} published")),
                    (0, _) => self.context.say(format!("version {version} is served already")),
                    (_, all) => {
                        self.context.conclude(table(&tried.into_inner()));
                        self.context.say(format!("version {version} pushed to {count} of {all}"));
                    }
                }
                self.served = Some(version);
                self.refused = None;
                Ok(())
            }
            Err(error) => {
                if is_refusal(&error) {
                    self.context.conclude(table(&tried.into_inner()));
                    self.refuse(version);
                }
                Err(error)
            }
        }
    }

    /// Returns whether a version has been refused often enough; any other starts anew.
    fn is_skipped(&mut self, version: &str) -> bool {
        if self.refused.as_ref().is_some_and(|(refused, _)| refused != version) {
            self.refused = None;
        }
        matches!(self.refused, Some((_, REFUSALS..)))
    }

    fn refuse(&mut self, version: String) {
        let times = self.refused.as_ref().map_or(0, |(_, times)| *times) + 1;
        self.refused = Some((version, times));
    }

    /// Says what is wrong, once, and returns how long to wait. Errors with what
    /// only the user can put right.
    fn weigh(&mut self, error: anyhow::Error) -> anyhow::Result<Duration> {
        // A receipt may still come.
        let gate = matches!(error.downcast_ref(), Some(sync::Error::Gate { .. }));
        if report::is_usage(&error) && !gate {
            return Err(error);
        }
        let told = report::told(&error);
        match &self.refused {
            _ if !is_refusal(&error) => {
                if self.said.as_ref() != Some(&told) {
                    self.context.say(format!("{told}: waiting for it"));
                    self.said = Some(told);
                }
            }
            Some((version, times @ REFUSALS..)) => self.context.say(format!(
                "{told}: version {version} was refused {times} times and is skipped until `latest` moves"
            )),
            _ => self.context.say(format!("{told}: trying again")),
        }
        let pause = self.pause;
        self.pause = longer(pause);
        Ok(pause)
    }
}

/// Returns whether a server would not have the policy.
fn is_refusal(error: &anyhow::Error) -> bool {
    let said = error.downcast_ref();
    matches!(
        said,
        Some(
            sync::Error::Engine { .. }
                | sync::Error::OtherVersion { .. }
                | sync::Error::OtherAdapter { .. }
        )
    ) && !report::is_away(error)
        && !report::is_usage(error)
}

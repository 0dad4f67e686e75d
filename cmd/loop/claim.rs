//! One loop in a folder, and over a store: both are claimed for as long as the loop runs.

use std::fs;
use std::path::Path;
use std::pin::Pin;
use std::time::Duration;

use anyhow::Context as _;
use oclaw::pipeline::{Identity, Run, Status};
use oclaw::store::{Claim, Holder, RENEW, Renewed, STALE, Store, Take};
use oclaw::table::{self, row_json::instant};

use super::show::STORE_PATIENCE;
use crate::common::Context;
use crate::report::{Failure, is_store_away, told};
use crate::stores;

/// Name of the claim in the folder of the store.
const NAME: &str = "loop.claim";
/// What this run folder is known by there, in the folder of its state: a loop that was
/// killed has its claim again at once.
const ID: &str = "claim.id";
/// How soon a store that was away is asked again.
const AGAIN: Duration = Duration::from_secs(10);

/// Keeps a claim. Ends with who has it instead.
type Keeping = Pin<Box<dyn Future<Output = Holder>>>;

/// Claims the folder of a run. Errors with who has it.
pub(super) fn take_folder(run: &Run) -> anyhow::Result<table::Claim> {
    let folder = run.folder.display();
    table::Claim::take(&run.state()).map_err(|error| match error {
        table::Error::InUse { .. } => {
            let known = Status::kept(run).and_then(|status| status.supervisor);
            let process = known.filter(Identity::lives).map(|it| format!(" (process {})", it.pid));
            let process = process.unwrap_or_default();
            Failure::failed(format!("another loop works in `{folder}`{process}"))
                .hint(format!(
                    "`oclaw loop --status {folder}` says how it is; `--run` gives this one a \
                     folder of its own"
                ))
                .into()
        }
        error => error.into(),
    })
}

/// The claim of a loop, if its stages meet in a store.
pub(super) struct Claimed {
    held: Option<(Store, Holder, Keeping)>,
}

impl Claimed {
    /// Claims the folder of the store. Errors if another loop has it. Where the store is
    /// away, chats are served all the same, and it is claimed when it is there again.
    pub(super) async fn take(run: &Run, context: &Context) -> anyhow::Result<Self> {
        let url = run.store.as_deref().unwrap_or_default();
        let Some(store) = stores::open(Path::new(url))? else { return Ok(Self { held: None }) };
        let holder = Holder::here(&id(&run.state())?);
        let taking = Claim::take(&store, NAME, holder.clone(), STALE);
        let claim = match tokio::time::timeout(STORE_PATIENCE, taking).await {
            Ok(Ok(Take::Held { by, renewed })) => return Err(refusal(url, &by, renewed).into()),
            Ok(Ok(Take::Taken { claim, from })) => {
                if let Some(from) = from {
                    let who = person(&from);
                    context.say(format!("taken over from a loop that is gone: {who}"));
                }
                Some(claim)
            }
            Ok(Err(error)) => {
                let error = anyhow::Error::from(error);
                if !is_store_away(&error) {
                    let told = told(&error);
                    let without = "another loop over this store would not be noticed";
                    context.say(format!("warning: no claim on `{url}`: {told}: {without}"));
                }
                None
            }
            // It is asked again.
            Err(_) => None,
        };
        let keeping: Keeping = Box::pin(keep(store.clone(), holder.clone(), claim));
        Ok(Self { held: Some((store, holder, keeping)) })
    }

    /// Waits until another loop has the claim; for ever if none gets it. Whoever does not
    /// wait any more may wait again.
    pub(super) async fn lost(&mut self) -> Failure {
        let Some((store, _, keeping)) = &mut self.held else {
            return std::future::pending().await;
        };
        let by = keeping.await;
        let problem = format!("another loop works over `{}` now: {}", store.address(), person(&by));
        self.held = None;
        Failure::failed(problem).hint("let one of them have a store of its own")
    }

    /// Gives the claim up, so that the next loop need not wait.
    pub(super) async fn release(self) {
        let Some((store, holder, keeping)) = self.held else { return };
        drop(keeping);
        let release = async {
            // Who comes with the same id has it.
            if let Ok(Take::Taken { claim, .. }) = Claim::take(&store, NAME, holder, STALE).await {
                // One that cannot be given up goes stale.
                let _ = claim.release().await;
            }
        };
        let _ = tokio::time::timeout(STORE_PATIENCE, release).await;
    }
}

/// Takes the claim, unless it is held, and renews it, until somebody else has it.
async fn keep(store: Store, holder: Holder, mut claim: Option<Claim>) -> Holder {
    let mut pause = if claim.is_some() { RENEW } else { AGAIN };
    loop {
        tokio::time::sleep(pause).await;
        let kept = match claim.take() {
            Some(mut held) => {
                let renewed = held.renew().await;
                claim = Some(held);
                match renewed {
                    Ok(Renewed::Lost { to }) => return to,
                    Ok(Renewed::Kept) => true,
                    Err(_) => false,
                }
            }
            None => match Claim::take(&store, NAME, holder.clone(), STALE).await {
                Ok(Take::Held { by, .. }) => return by,
                Ok(Take::Taken { claim: taken, .. }) => {
                    claim = Some(taken);
                    true
                }
                Err(_) => false,
            },
        };
        pause = if kept { RENEW } else { AGAIN };
    }
}

/// Reads what a run folder is known by, or makes it.
fn id(state: &Path) -> anyhow::Result<String> {
    let path = state.join(ID);
    if let Ok(text) = fs::read_to_string(&path)
        && !text.trim().is_empty()
    {
        return Ok(text.trim().to_owned());
    }
    let id = uuid::Uuid::now_v7().to_string();
    fs::write(&path, format!("{id}\n"))
        .with_context(|| format!("cannot write `{}`", path.display()))?;
    Ok(id)
}

fn refusal(url: &str, by: &Holder, renewed: Duration) -> Failure {
    let who = person(by);
    let (renewed, stale) = (renewed.as_secs(), STALE.as_secs() / 60);
    let problem = format!("another loop works over `{url}`: {who}, heard of {renewed} s ago");
    Failure::failed(problem).hint(format!(
        "end that one first; if it was killed, this one gets the store {stale} minutes after it was heard of"
    ))
}

fn person(holder: &Holder) -> String {
    let Holder { host, pid, since, .. } = holder;
    format!("process {pid} on `{host}`, since {}", instant(since.saturating_mul(1000)))
}

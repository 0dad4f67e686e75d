//! Object stores, as the command line names them: their keys come from the
//! environment, what is read of them goes through a folder of this machine.

use std::future::Future;
use std::path::{Path, PathBuf};

use oclaw::store::{Address, Cache, Feed, Fetched, Store};
use oclaw::table::{Input, Source};
use sha2::{Digest, Sha256};

use crate::answers;
use crate::common::Context;
use crate::report::Failure;
use crate::units;

/// What the stores' own tools call their settings. `object_store` says which of
/// them it knows.
const PREFIXES: [&str; 5] = ["AWS_", "AZURE_", "GOOGLE_", "SERVICE_ACCOUNT", "IDENTITY_"];

/// Where copies of objects are kept.
#[derive(clap::Args, Debug, Clone)]
#[command(next_help_heading = "Object stores (s3://, gs://, az://)")]
pub(crate) struct StoreArgs {
    /// Folder for copies of objects [default: oclaw in the user's cache folder]
    #[arg(long, global = true, value_name = "DIR")]
    pub(crate) object_cache: Option<PathBuf>,
    /// Most bytes of copied shards there
    #[arg(long, global = true, value_name = "SIZE", default_value = "8GiB", value_parser = units::bytes)]
    pub(crate) object_cache_size: usize,
}

impl StoreArgs {
    /// Returns the folder of copies.
    pub(crate) fn cache(&self) -> Result<Cache, Failure> {
        let folder = self.object_cache.clone();
        let usual = || Some(answers::default_path()?.parent()?.to_owned());
        let folder = folder.or_else(usual).ok_or_else(|| {
            Failure::usage("no cache folder is known").hint("name one by `--object-cache DIR`")
        })?;
        Ok(Cache::new(&folder, self.object_cache_size as u64))
    }

    /// Returns a folder of this machine that belongs to one of a store.
    pub(crate) fn beside(&self, kind: &str, address: &Address) -> Result<PathBuf, Failure> {
        let digest = Sha256::digest(address.to_string());
        let name: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        Ok(self.cache()?.folder().join(kind).join(name))
    }
}

/// Opens the store that a path names, if it names one.
pub(crate) fn open(path: &Path) -> anyhow::Result<Option<Store>> {
    let Some(address) = Address::of(path)? else { return Ok(None) };
    let settings: Vec<_> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, _)| PREFIXES.iter().any(|prefix| name.starts_with(prefix)))
        .collect();
    Ok(Some(Store::open(address, &settings)?))
}

/// Errors where a store is named and cannot be used.
pub(crate) fn refuse(path: &Path, what: &str, hint: &str) -> Result<(), Failure> {
    match Address::is(path) {
        true => {
            let problem = format!("`{}` is an object store: {what}", path.display());
            Err(Failure::usage(problem).hint(hint))
        }
        false => Ok(()),
    }
}

/// Tables on this machine, as they are or as copies.
#[derive(Debug)]
pub(crate) struct Here {
    pub(crate) inputs: Vec<Input>,
    /// Copies stay as long as somebody reads them.
    copies: Vec<Fetched>,
}

impl Here {
    /// Copies the objects among the inputs, once, now. A folder of a store stands for
    /// its shards.
    pub(crate) fn bring(inputs: &[PathBuf], context: &Context) -> anyhow::Result<Self> {
        let mut here = Self { inputs: Vec::new(), copies: Vec::new() };
        for path in inputs {
            let Some(store) = open(path)? else {
                here.inputs.push(Input::Named(path.clone()));
                continue;
            };
            let cache = context.stores.cache()?;
            for copy in apart(context, || copies(store, cache))? {
                let name = copy.url.clone();
                here.inputs.push(Input::Copy { path: copy.path.clone(), name });
                here.copies.push(copy);
            }
        }
        Ok(here)
    }

    /// Opens the tables. The copies stay for as long as the process reads them.
    pub(crate) fn open(self, context: &Context) -> anyhow::Result<Source> {
        let source = Source::open_inputs(&self.inputs)?;
        context.hold(self.copies);
        Ok(source)
    }

    /// Returns where the tables are. The copies stay until the process ends.
    pub(crate) fn paths(self, context: &Context) -> Vec<PathBuf> {
        context.hold(self.copies);
        let path = |input| match input {
            Input::Named(path) | Input::Copy { path, .. } => path,
        };
        self.inputs.into_iter().map(path).collect()
    }
}

/// Copies an object, or the shards of a folder in their order.
async fn copies(store: Store, cache: Cache) -> anyhow::Result<Vec<Fetched>> {
    let whole = store.address().clone();
    if let Some((folder, name)) = whole.split() {
        let folder = store.at(folder);
        if let Some(object) = folder.look(&name).await? {
            return Ok(vec![cache.fetch(&folder, &object).await?]);
        }
    }
    let mut feed = Feed::new(store);
    let mut found = Vec::new();
    for shard in feed.due(&|_| false, &|_| false).await? {
        if let Some(object) = feed.object(&shard) {
            found.push(cache.fetch(feed.store(), object).await?);
        }
    }
    match found.is_empty() {
        true => {
            let problem = format!("`{whole}`: no such object, and no `*.parquet` below it");
            Err(Failure::failed(problem).into())
        }
        false => Ok(found),
    }
}

/// Waits for a future on a thread of its own: whoever asks may be inside another.
fn apart<T: Send, F: Future<Output = anyhow::Result<T>>>(
    context: &Context,
    begin: impl FnOnce() -> F + Send,
) -> anyhow::Result<T> {
    let waited = std::thread::scope(|scope| scope.spawn(|| context.block_on(begin())).join());
    waited.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

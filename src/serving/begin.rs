//! What an engine begins with: the newest policy, or the model itself.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use crate::model::{Config, LoadOptions, Model};
use crate::template::Chat;

use super::Error;
use super::control::same_tokenizer;
use super::shape::same_shape;

/// Loads what an engine begins with. Returns it with its folder and its version.
///
/// A policy that cannot be served would hold up every start, until somebody removes it:
/// the model answers then, as it did before there was a policy, and it is said.
pub(super) fn begin(
    folder: PathBuf,
    (policy, version): (Option<(PathBuf, String)>, String),
    like: (&Chat, &Config),
    load: &LoadOptions,
) -> Result<(Model, PathBuf, String), Error> {
    if let Some((policy, step)) = policy {
        match load_policy(&policy, like, load) {
            Ok(model) => return Ok((model, policy, step)),
            Err(problem) => tracing::warn!(
                policy = %policy.display(),
                %problem,
                "the newest policy cannot be served: beginning with the model instead"
            ),
        }
    }
    let model = Model::load(&folder, load)?;
    Ok((model, folder, version))
}

/// Loads the weights of a policy, under the same conditions as later ones.
fn load_policy(
    policy: &Path,
    (chat, config): (&Chat, &Config),
    load: &LoadOptions,
) -> Result<Model, String> {
    same_tokenizer(policy, &chat.tokenizer)?;
    let loaded = catch_unwind(AssertUnwindSafe(|| Model::load(policy, load)));
    let loaded = loaded.map_err(|_| "loading failed".to_owned())?;
    let model = loaded.map_err(|error| error.to_string())?;
    same_shape(policy, config, &model.config)?;
    Ok(model)
}

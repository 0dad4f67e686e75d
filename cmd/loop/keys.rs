//! The keys that the loop asks its own processes with: those that the file gives
//! them. Read anew each time, for a key may be changed while a loop runs.

use std::path::{Path, PathBuf};

use oclaw::pipeline::Plan;
use secrecy::SecretString;

use crate::embedded;
use crate::report::told;
use crate::serve::key_lines;

/// Stages that talk to the policy's engines, and the keys that they have for it.
const ASKING: [&str; 2] = ["sync-weights", "serve"];

/// Where the keys are.
#[derive(Debug, Default)]
pub(super) struct Keys {
    /// The clients' of `oclaw serve`.
    clients: Option<PathBuf>,
    /// The files of the engines' keys, by the stage that reads them.
    engines: Vec<(&'static str, PathBuf)>,
    /// The engines' keys that stand in the file itself.
    written: Vec<SecretString>,
}

impl Keys {
    /// Finds them. `given` is a setting of a stage, wherever it was given.
    pub(super) fn of(plan: &Plan, given: &dyn Fn(&str, &str) -> Option<String>) -> Self {
        let file = |stage: &str, key: &str| given(stage, key).map(PathBuf::from);
        let in_table = |stage: &str| {
            let variable = format!("OCLAW_{}_KEY", stage.replace('-', "_").to_uppercase());
            plan.processes.get(stage)?.env.get(&variable).cloned()
        };
        Self {
            clients: file("serve", "key-file"),
            engines: ASKING
                .into_iter()
                .filter_map(|stage| Some((stage, file(stage, "engine-key-file")?)))
                .collect(),
            written: ASKING.into_iter().filter_map(in_table).map(SecretString::from).collect(),
        }
    }

    /// Returns a key of `oclaw serve`, if it wants one. Errors with why there is none
    /// where there should be.
    pub(super) fn of_serve(&self) -> Result<Option<SecretString>, String> {
        let Some(file) = &self.clients else { return Ok(None) };
        let keys = key_lines(file, "client").map_err(|error| told(&error))?;
        Ok(keys.into_iter().next().map(|(_, key)| key))
    }

    /// Returns the key of the policy's engines, if there is one.
    pub(super) fn of_engines(&self) -> Option<SecretString> {
        let read = |stage: &str, file: Option<&Path>| embedded::key(stage, file).ok().flatten();
        let in_files = self.engines.iter().find_map(|(stage, file)| read(stage, Some(file)));
        in_files
            .or_else(|| self.written.first().cloned())
            .or_else(|| ASKING.into_iter().find_map(|stage| read(stage, None)))
    }
}

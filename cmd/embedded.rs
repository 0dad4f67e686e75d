//! How a subcommand gets an engine: the address and key that the user gave, or
//! an embedded engine inside this process.

use std::path::Path;

use secrecy::SecretString;

use crate::report::Failure;

/// Reads a key: from the file, else from `OCLAW_<COMMAND>_KEY`. An empty one is
/// a mistake, not the absence of a key.
pub(crate) fn key(command: &str, file: Option<&Path>) -> anyhow::Result<Option<SecretString>> {
    let variable = format!("OCLAW_{}_KEY", command.replace('-', "_").to_uppercase());
    let (place, text) = match (file, std::env::var(&variable)) {
        (Some(file), _) => {
            let text = std::fs::read_to_string(file).map_err(|error| {
                Failure::usage(format!("cannot read the key in `{}`: {error}", file.display()))
            })?;
            (file.display().to_string(), text)
        }
        (None, Ok(text)) => (variable, text),
        (None, Err(_)) => return Ok(None),
    };
    match text.trim() {
        "" => Err(Failure::usage(format!("the key in `{place}` is empty")).into()),
        key => Ok(Some(SecretString::from(key))),
    }
}

//! Where the configuration file is.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Command;

use crate::init::FILE;

/// Finds the configuration file, if there is any, before the command line is
/// understood.
pub(super) fn config(command: &Command, argv: &[OsString]) -> Option<PathBuf> {
    config_path(argv)
        .or_else(|| config_named(command, argv))
        .or_else(config_of_environment)
        .or_else(|| config_here(command, argv))
}

/// Finds `--config FILE` without understanding the rest of the command line.
fn config_path(argv: &[OsString]) -> Option<PathBuf> {
    let mut words = argv.iter().skip(1).take_while(|word| *word != "--");
    while let Some(word) = words.next() {
        if word == "--config" {
            return words.next().map(PathBuf::from);
        }
        if let Some(path) = word.to_str().and_then(|word| word.strip_prefix("--config=")) {
            return Some(PathBuf::from(path));
        }
    }
    None
}

/// Finds the file of the subcommand that takes it as its one argument.
fn config_named(command: &Command, argv: &[OsString]) -> Option<PathBuf> {
    let lenient = command.clone().ignore_errors(true);
    let matches = lenient.try_get_matches_from(argv).ok()?;
    match matches.subcommand()? {
        ("loop", inner) => inner.get_one::<PathBuf>("file").cloned(),
        _ => None,
    }
}

/// Finds the file that `oclaw init` writes, for a loop that was told no other.
fn config_here(command: &Command, argv: &[OsString]) -> Option<PathBuf> {
    let lenient = command.clone().ignore_errors(true);
    let matches = lenient.try_get_matches_from(argv).ok()?;
    let (_, inner) = matches.subcommand().filter(|(name, _)| *name == "loop")?;
    let file = PathBuf::from(FILE);
    // Whoever asks how a loop is needs none.
    (inner.get_one::<PathBuf>("status").is_none() && file.is_file()).then_some(file)
}

fn config_of_environment() -> Option<PathBuf> {
    std::env::var_os("OCLAW_CONFIG").filter(|path| !path.is_empty()).map(PathBuf::from)
}

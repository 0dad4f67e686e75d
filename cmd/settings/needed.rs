//! Flags that need others which stand in the configuration file: what a file gives is
//! a default to the parser, and a default satisfies nobody.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgMatches, Command};

use super::ConfigFile;

/// Parses a command line. What is missing there and stands in the file is added to
/// it. Also returns the names of those flags, whose values are the file's all the same.
pub(super) fn matches(
    command: &Command,
    argv: &[OsString],
    file: &ConfigFile,
) -> Result<(ArgMatches, Vec<String>), clap::Error> {
    let (mut argv, mut added) = (argv.to_vec(), Vec::new());
    loop {
        let error = match command.clone().try_get_matches_from(&argv) {
            Ok(matches) => return Ok((matches, added)),
            Err(error) => error,
        };
        let Some((at, section)) = chosen(command, &argv) else { return Err(error) };
        let mut more = Vec::new();
        let mut names = missing(&error);
        names.retain(|name| !added.contains(name));
        for name in names {
            let Some((values, _)) = file.keys.get(&(section.clone(), name.clone())) else {
                return Err(error);
            };
            more.extend(values.iter().map(|value| OsString::from(format!("--{name}={value}"))));
            added.push(name);
        }
        if more.is_empty() {
            return Err(error);
        }
        argv.splice(at..at, more);
    }
}

/// Returns the names of the flags that a command line lacks.
fn missing(error: &clap::Error) -> Vec<String> {
    match (error.kind(), error.get(ContextKind::InvalidArg)) {
        (ErrorKind::MissingRequiredArgument, Some(ContextValue::Strings(flags))) => {
            let name = |flag: &String| {
                let long = flag.trim_start_matches("--").split([' ', '=']).next();
                long.unwrap_or_default().to_owned()
            };
            flags.iter().map(name).collect()
        }
        _ => Vec::new(),
    }
}

/// Returns the place after the subcommand, and its name.
fn chosen(command: &Command, argv: &[OsString]) -> Option<(usize, String)> {
    let names = argv.iter().enumerate().skip(1);
    let mut known = names.filter_map(|(at, word)| {
        command.find_subcommand(word).map(|found| (at + 1, found.get_name().to_owned()))
    });
    known.next()
}

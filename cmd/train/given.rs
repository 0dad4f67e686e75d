//! Which flags somebody gave, and where: of a default nobody expects anything.

use std::collections::BTreeSet;

use clap::parser::ValueSource;
use clap::{ArgMatches, Command, FromArgMatches};

/// The flags that were given. It takes none itself, and must stand before those that
/// do: they take their values out of what was parsed.
#[derive(Debug, Default)]
pub(super) struct Given {
    /// By the command line or the environment.
    typed: BTreeSet<String>,
    /// By the configuration file, where it says something else than the default.
    filed: BTreeSet<String>,
}

impl Given {
    /// Returns whether somebody gave a flag.
    pub(super) fn has(&self, flag: &str) -> bool {
        self.is_typed(flag) || self.filed.contains(flag)
    }

    /// Returns whether it was given for this run, and not by a file for many.
    pub(super) fn is_typed(&self, flag: &str) -> bool {
        self.typed.contains(flag)
    }
}

impl FromArgMatches for Given {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut given = Self::default();
        let command = <super::Args as clap::Args>::augment_args(Command::new("train"));
        for arg in command.get_arguments().filter(|arg| arg.get_action().takes_values()) {
            let id = arg.get_id().as_str();
            let Some(flag) = arg.get_long() else { continue };
            match matches.value_source(id) {
                Some(ValueSource::CommandLine | ValueSource::EnvVariable) => {
                    given.typed.insert(flag.to_owned());
                }
                Some(_) => {
                    let found: Vec<_> = matches.get_raw(id).into_iter().flatten().collect();
                    let own: Vec<_> =
                        arg.get_default_values().iter().map(|value| value.as_os_str()).collect();
                    if found != own {
                        given.filed.insert(flag.to_owned());
                    }
                }
                None => {}
            }
        }
        Ok(given)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl clap::Args for Given {
    fn augment_args(command: Command) -> Command {
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        command
    }
}

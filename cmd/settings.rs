//! Settings: command line over environment over `--config` TOML over default,
//! resolved once, before a subcommand sees them.
//!
//! There is one parser and one rule. The environment variable of a flag is made
//! from its name; a key of the TOML file becomes the default of the flag with
//! the same name. What the subcommand gets is an ordinary clap struct.

mod environment;
mod needed;
mod place;
mod reference;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgAction, ArgMatches, Command, CommandFactory};
use oclaw::pipeline::{self, Plan};

use crate::units;

/// Where each setting of the chosen subcommand came from.
#[derive(Debug)]
pub(crate) struct Setting {
    pub(crate) name: String,
    pub(crate) value: String,
    pub(crate) origin: String,
}

/// The outcome of parsing.
#[derive(Debug)]
pub(crate) struct Parsed {
    pub(crate) matches: ArgMatches,
    pub(crate) settings: Vec<Setting>,
    /// What the reader should know of it.
    pub(crate) warnings: Vec<String>,
}

/// Parses the process's arguments and environment.
pub(crate) fn parse<C: CommandFactory>() -> Result<Parsed, clap::Error> {
    parse_from(C::command(), std::env::args_os().collect())
}

fn parse_from(command: Command, argv: Vec<OsString>) -> Result<Parsed, clap::Error> {
    let mut command = name_environment(command);
    let plain = |message: String| refuse(&mut Command::new("oclaw"), &message);
    let (argv, mut notes) = reference::arguments(&command, argv).map_err(plain)?;
    let argv = join_negative(argv);
    let config = place::config(&command, &argv);
    let mut file = ConfigFile::default();
    if let Some(path) = &config {
        file = ConfigFile::read(path).map_err(|message| refuse(&mut command, &message))?;
        file.translate(&command).map_err(plain)?;
    }
    let mut described = file.apply(command.clone()).map_err(plain)?;
    let (mut matches, mut added) = needed::matches(&described, &argv, &file)?;
    let overruled = file.overruled(&described, &matches);
    if !overruled.is_empty() {
        notes.extend(overruled.into_iter().map(|(key, note)| {
            file.keys.remove(&key);
            note
        }));
        described = file.apply(command).map_err(plain)?;
        (matches, added) = needed::matches(&described, &argv, &file)?;
    }
    let settings = settings(&described, &matches, (&file, &added));
    let chosen = matches.subcommand_name().unwrap_or_default();
    notes.extend(file.notes_of(chosen));
    notes.extend(disagreement(chosen, &settings, &file));
    let warnings = environment::unknown(&described).into_iter().chain(reference::variables(chosen));
    let warnings = warnings.map(|warning| format!("warning: {warning}"));
    let notes = notes.into_iter().map(|note| format!("note: {note}"));
    Ok(Parsed { warnings: warnings.chain(notes).collect(), matches, settings })
}

/// A configuration file, as the commands see it that are started with it.
pub(crate) struct Configured {
    command: Command,
    file: ConfigFile,
}

impl Configured {
    /// Reads a file. Errors if a section or a setting is unknown.
    pub(crate) fn read<C: CommandFactory>(path: &Path) -> Result<Self, String> {
        let command = name_environment(C::command());
        let mut file = ConfigFile::read(path)?;
        file.translate(&command)?;
        Ok(Self { command: file.apply(command)?, file })
    }

    /// Returns the settings of the file.
    pub(crate) fn keys(&self) -> &reference::Keys {
        &self.file.keys
    }

    /// Returns the values of a setting, if the environment or the file has it.
    pub(crate) fn all_given(&self, section: &str, key: &str) -> Vec<String> {
        let variable = format!("OCLAW_{section}_{key}").replace('-', "_").to_uppercase();
        match std::env::var(variable) {
            Ok(value) => vec![value],
            Err(_) => {
                let found = self.file.keys.get(&(section.to_owned(), key.to_owned()));
                found.map(|(values, _)| values.clone()).unwrap_or_default()
            }
        }
    }

    /// Returns the value of a setting, if the environment or the file has it.
    pub(crate) fn given(&self, section: &str, key: &str) -> Option<String> {
        // A switch that is off is not given.
        self.all_given(section, key).into_iter().next().filter(|value| value != "false")
    }

    /// Reads the command line of a subcommand, program and all. Errors with what
    /// the subcommand would say.
    pub(crate) fn parse(&self, argv: &[String]) -> Result<ArgMatches, String> {
        let argv = argv.iter().map(OsString::from).collect();
        let matches = needed::matches(&self.command, &join_negative(argv), &self.file);
        let (mut matches, _) = matches.map_err(|error| {
            let text = error.to_string();
            let lines = text.lines().map(str::trim).take_while(|line| !line.is_empty());
            let said = lines.collect::<Vec<_>>().join(" ");
            said.strip_prefix("error: ").unwrap_or(&said).to_owned()
        })?;
        matches.remove_subcommand().map(|(_, own)| own).ok_or_else(|| "no command".to_owned())
    }
}

/// Says that two estimators are given, of which the file's does not count.
fn disagreement(chosen: &str, settings: &[Setting], file: &ConfigFile) -> Option<String> {
    let (values, line) = file.keys.get(&(chosen.to_owned(), "estimator".to_owned()))?;
    let given = settings.iter().find(|setting| setting.name == "estimator")?;
    let differs = !given.origin.contains(':') && values.first() != Some(&given.value);
    differs.then(|| {
        format!(
            "the estimator is `{}` ({}), not the `{}` of `{}` line {line}",
            given.value,
            given.origin,
            values.join(" "),
            file.path.display()
        )
    })
}

/// Joins `--lr -1e-5` to `--lr=-1e-5`: what begins like a negative number is a
/// value, to be told what is wrong with it, and never a flag.
fn join_negative(argv: Vec<OsString>) -> Vec<OsString> {
    let negative = |word: &str| {
        let rest = word.strip_prefix('-').unwrap_or_default();
        rest.starts_with(|letter: char| letter.is_ascii_digit() || letter == '.')
            || ["inf", "infinity", "nan"].contains(&rest.to_lowercase().as_str())
    };
    let mut joined: Vec<OsString> = Vec::with_capacity(argv.len());
    let mut open = true;
    for word in argv {
        let value = word.to_str().filter(|word| open && negative(word));
        let flag = joined.last().and_then(|last| last.to_str());
        let flag =
            flag.filter(|flag| flag.len() > 2 && flag.starts_with("--") && !flag.contains('='));
        match (flag, value) {
            (Some(flag), Some(value)) => {
                let both = format!("{flag}={value}");
                joined.pop();
                joined.push(both.into());
            }
            _ => joined.push(word),
        }
        open &= joined.last().is_none_or(|word| word != "--");
    }
    joined
}

fn refuse(command: &mut Command, message: &str) -> clap::Error {
    command.error(ErrorKind::ValueValidation, message)
}

/// Gives every flag its environment variable: `OCLAW_<COMMAND>_<FLAG>`, and
/// `OCLAW_<FLAG>` for the flags that every subcommand has.
fn name_environment(command: Command) -> Command {
    let named = |prefix: String| {
        move |arg: clap::Arg| match arg.get_long() {
            // Two switches that end the program are no settings.
            Some("help" | "version" | "show-settings") | None => arg,
            Some(long) => {
                let name = format!("{prefix}_{}", long.replace('-', "_").to_uppercase());
                // `-n -5` is a wrong value, and is to be told so.
                let takes_values = arg.get_action().takes_values();
                arg.env(name).hide_env(true).allow_negative_numbers(takes_values)
            }
        }
    };
    command.mut_args(named("OCLAW".to_owned())).mut_subcommands(move |sub| {
        let prefix = format!("OCLAW_{}", sub.get_name().replace('-', "_").to_uppercase());
        sub.mut_args(named(prefix))
    })
}

/// A configuration file: one section per subcommand, shared flags on top. What only
/// `oclaw loop` reads is checked, and left to it.
#[derive(Debug, Default)]
struct ConfigFile {
    path: PathBuf,
    /// (section, key) -> (values, line). The section of shared flags is "".
    keys: BTreeMap<(String, String), (Vec<String>, usize)>,
    /// What is to be said of names that were others, by section.
    notes: Vec<(String, String)>,
}

impl ConfigFile {
    fn read(path: &Path) -> Result<Self, String> {
        let name = path.display();
        let text = std::fs::read_to_string(path)
            .map_err(|error| format!("cannot read config `{name}`: {error}"))?;
        let plan = Plan::parse(&text, units::duration).map_err(|error| match error {
            pipeline::Error::Plan { line, problem } => {
                format!("config `{name}` line {line}: {problem}")
            }
            error => format!("config `{name}`: {error}"),
        })?;
        Ok(Self { path: path.to_owned(), keys: plan.flags, notes: Vec::new() })
    }

    /// Takes the reference's names for ours.
    fn translate(&mut self, command: &Command) -> Result<(), String> {
        let place = |line: usize| format!("config `{}` line {line}", self.path.display());
        let (keys, notes) = reference::keys(command, &self.keys, &place)?;
        (self.keys, self.notes) = (keys, notes);
        Ok(())
    }

    /// Returns what is to be said to whom a section is for.
    fn notes_of(&self, chosen: &str) -> Vec<String> {
        let mine = self.notes.iter().filter(|(section, _)| {
            section.is_empty() || section == chosen || ["loop", "check"].contains(&chosen)
        });
        mine.map(|(_, note)| note.clone()).collect()
    }

    /// Makes each key the default of its flag. An unknown section or key is an
    /// error: a misspelt setting must not silently leave the default in force.
    fn apply(&self, mut command: Command) -> Result<Command, String> {
        for ((section, key), (values, line)) in &self.keys {
            let place = format!("config `{}` line {line}", self.path.display());
            let scope = match section.as_str() {
                "" => Some(&command),
                name => command.find_subcommand(name),
            };
            let Some(scope) = scope else {
                let known = names(command.get_subcommands().map(Command::get_name));
                return Err(format!("{place}: no section `[{section}]`; sections are {known}"));
            };
            let arg = scope.get_arguments().find(|arg| arg.get_long() == Some(key.as_str()));
            let Some(id) = arg.filter(|arg| settable(arg)).map(|arg| arg.get_id().clone()) else {
                let known = names(
                    scope
                        .get_arguments()
                        .filter(|arg| settable(arg))
                        .filter_map(|arg| arg.get_long()),
                );
                let scope = if section.is_empty() {
                    "at the top".to_owned()
                } else {
                    format!("in `[{section}]`")
                };
                let ours = format!("`{}`", key.replace('_', "-"));
                return Err(match known.contains(&ours) {
                    true => format!("{place}: no setting `{key}` {scope}; it is {ours}"),
                    false => format!("{place}: no setting `{key}` {scope}; settings are {known}"),
                });
            };
            let defaults = values.clone();
            let change = move |arg: clap::Arg| arg.required(false).default_values(defaults);
            command = match section.as_str() {
                "" => command.mut_arg(id, change),
                name => command.mut_subcommand(name, move |sub| sub.mut_arg(id, change)),
            };
        }
        Ok(command)
    }

    /// Finds the settings that cannot stand beside what the command line or the
    /// environment says, which goes first: their keys, and what to say.
    fn overruled(
        &self,
        command: &Command,
        matches: &ArgMatches,
    ) -> Vec<((String, String), String)> {
        let Some((name, inner)) = matches.subcommand() else { return Vec::new() };
        let Some(chosen) = command.find_subcommand(name) else { return Vec::new() };
        let given = |arg: &clap::Arg| {
            let source = inner.value_source(arg.get_id().as_str());
            matches!(source, Some(ValueSource::CommandLine | ValueSource::EnvVariable))
        };
        let names = |one: &clap::Arg, other: &clap::Arg| {
            let conflicts = chosen.get_arg_conflicts_with(one);
            conflicts.iter().any(|arg| arg.get_id() == other.get_id())
        };
        let mut found = Vec::new();
        for arg in chosen.get_arguments().filter(|arg| !given(arg)) {
            let Some(long) = arg.get_long() else { continue };
            let key = (name.to_owned(), long.to_owned());
            let Some((values, line)) = self.keys.get(&key) else { continue };
            let mut others = chosen.get_arguments().filter(|other| given(other));
            // Who names a file means it alone, and no folder to follow.
            let stronger = others.find(|other| {
                names(arg, other) || names(other, arg) || long == "follow" && other.is_positional()
            });
            // A switch that is off stands beside anything.
            let off = values.iter().all(|value| value == "false");
            if let Some(other) = stronger.filter(|_| !off) {
                let other = match other.get_long() {
                    Some(other) => format!("--{other}"),
                    None => other.get_value_names().map_or_else(String::new, |it| it.join(" ")),
                };
                let place = self.path.display();
                let note =
                    format!("`{other}` takes the place of `{long}` in `{place}` line {line}");
                found.push((key, note));
            }
        }
        found
    }

    fn has(&self, section: &str, key: &str) -> Option<usize> {
        let find = |section: &str| self.keys.get(&(section.to_owned(), key.to_owned()));
        find(section).or_else(|| find("")).map(|(_, line)| *line)
    }
}

fn settable(arg: &clap::Arg) -> bool {
    !matches!(arg.get_long(), None | Some("config" | "help" | "version" | "show-settings"))
}

fn names<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let mut names: Vec<_> =
        names.filter(|name| *name != "help").map(|name| format!("`{name}`")).collect();
    names.sort();
    names.join(", ")
}

/// Lists every setting of the chosen subcommand with its value and origin.
fn settings(
    command: &Command,
    matches: &ArgMatches,
    (file, added): (&ConfigFile, &[String]),
) -> Vec<Setting> {
    let mut found = Vec::new();
    let Some((name, inner)) = matches.subcommand() else {
        return found;
    };
    let chosen = command.find_subcommand(name);
    let shared = command.get_arguments().filter(|arg| arg.is_global_set());
    let own = chosen.into_iter().flat_map(Command::get_arguments);
    for arg in own.chain(shared) {
        if arg.get_long().is_some() && !settable(arg) {
            continue;
        }
        let id = arg.get_id().as_str();
        let label = arg.get_long().unwrap_or(id).to_owned();
        let origin = match inner.value_source(id) {
            Some(ValueSource::CommandLine) if !added.contains(&label) => "command line".to_owned(),
            Some(ValueSource::EnvVariable) => {
                arg.get_env().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
            }
            Some(_) => match file.has(name, &label) {
                Some(line) => format!("{}:{line}", file.path.display()),
                None => "default".to_owned(),
            },
            None => "default".to_owned(),
        };
        let value = match arg.get_action() {
            ArgAction::SetTrue | ArgAction::SetFalse => inner.get_flag(id).to_string(),
            ArgAction::Count => inner.get_count(id).to_string(),
            _ => inner.get_raw(id).map_or_else(
                || "(none)".to_owned(),
                |values| {
                    let values: Vec<_> =
                        values.map(|value| value.to_string_lossy().into_owned()).collect();
                    values.join(" ")
                },
            ),
        };
        found.push(Setting { name: label, value, origin });
    }
    found
}

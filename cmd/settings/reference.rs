//! Names that people bring from the reference's world: flags and variables of
//! slime and of OpenClaw-RL. One that means a setting of ours is taken for it,
//! which is said; one that does not is refused with what to do here instead.
//!
//! A name that is a flag of ours is ours, whatever it means elsewhere.

mod table;

use std::collections::BTreeMap;
use std::ffi::OsString;

use clap::Command;

use table::{BEGINNINGS, NAMES, VARIABLES};

/// A name, and what it is in a section.
struct Name {
    theirs: &'static str,
    section: &'static str,
    fate: Fate,
}

/// What becomes of a name.
enum Fate {
    /// It is this flag.
    Is(&'static str),
    /// It is this flag, nearly.
    But(&'static str, &'static str),
    /// It is this flag, whose words are others.
    Words(&'static str, &'static [(&'static str, &'static str)]),
    /// It is a switch that gives this flag this value.
    Sets(&'static str, &'static str),
    /// One of these values (none: a switch) is how it is anyway; why.
    Same(&'static [&'static str], &'static str),
    /// There is no such setting; what there is.
    Instead(&'static str),
}

/// A setting as it is here: flag and values, or nothing to set; and what to say.
struct Translated {
    setting: Option<(&'static str, Option<Vec<String>>)>,
    note: String,
}

/// The keys of a configuration file: (section, key) -> (values, line).
pub(super) type Keys = BTreeMap<(String, String), (Vec<String>, usize)>;

/// Puts our names into the place of theirs in a command line. Returns it with what
/// is to be said.
pub(super) fn arguments(
    command: &Command,
    argv: Vec<OsString>,
) -> Result<(Vec<OsString>, Vec<String>), String> {
    let Some((section, place)) = subcommand(command, &argv) else { return Ok((argv, Vec::new())) };
    let (mut mine, mut notes, mut refused) = (Vec::new(), Vec::new(), Vec::new());
    let mut words = argv.into_iter().enumerate().peekable();
    let mut open = true;
    while let Some((at, word)) = words.next() {
        open &= word != "--";
        let typed = word.to_str().and_then(|word| word.strip_prefix("--")).filter(|_| open);
        let Some(typed) = typed.filter(|_| at > place).map(str::to_owned) else {
            mine.push(word);
            continue;
        };
        let (theirs, joined) = match typed.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (typed.as_str(), None),
        };
        let Some(fate) = fate(command, &section, theirs) else {
            mine.push(word);
            continue;
        };
        let label = format!("--{theirs}");
        let value = match (&fate, joined) {
            (_, Some(value)) => Some(value),
            (Ok(fate), None) if fate.takes_value() => {
                let next = words.next_if(|(_, word)| !word.to_string_lossy().starts_with("--"));
                next.map(|(_, word)| word.to_string_lossy().into_owned())
            }
            _ => None,
        };
        let values = value.map(|value| vec![value]);
        match fate.and_then(|fate| translate(fate, &label, values.as_deref())) {
            Ok(Translated { setting, note }) => {
                if let Some((flag, value)) = setting {
                    let value = value
                        .and_then(|values| values.into_iter().next())
                        .or(values.and_then(|values| values.into_iter().next()));
                    let word = match value {
                        Some(value) => format!("--{flag}={value}"),
                        None => format!("--{flag}"),
                    };
                    if !mine.iter().any(|known| *known == *word) {
                        mine.push(word.into());
                    }
                }
                notes.push(note);
            }
            Err(problem) => refused.push(format!("`{label}`: {problem}")),
        }
    }
    match refused.is_empty() {
        true => Ok((mine, notes)),
        false => Err(refused.join("\n")),
    }
}

/// Puts our names into the place of theirs among the keys of a file. Returns them
/// with what is to be said, by section.
pub(super) fn keys(
    command: &Command,
    keys: &Keys,
    place: &dyn Fn(usize) -> String,
) -> Result<(Keys, Vec<(String, String)>), String> {
    let (mut mine, mut notes, mut refused) = (Keys::new(), Vec::new(), Vec::new());
    let mut others = Vec::new();
    for ((section, key), (values, line)) in keys {
        match fate(command, section, key) {
            None => {
                mine.insert((section.clone(), key.clone()), (values.clone(), *line));
            }
            Some(fate) => others.push((fate, section, key, values, *line)),
        }
    }
    for (fate, section, key, values, line) in others {
        let translated = fate.and_then(|fate| translate(fate, key, Some(values)));
        let Translated { setting, note } = match translated {
            Ok(translated) => translated,
            Err(problem) => {
                refused.push((line, format!("{}: `{key}`: {problem}", place(line))));
                continue;
            }
        };
        notes.push((section.clone(), format!("{}: {note}", place(line))));
        let Some((flag, value)) = setting else { continue };
        let values = value.unwrap_or_else(|| values.clone());
        match mine.get(&(section.clone(), flag.to_owned())) {
            Some((known, _)) if *known == values => {}
            Some((_, other)) => {
                let problem = format!("`{key}` is `{flag}` here, which line {other} sets too");
                refused.push((line, format!("{}: {problem}", place(line))));
            }
            None => {
                mine.insert((section.clone(), flag.to_owned()), (values, line));
            }
        }
    }
    refused.sort();
    match refused.is_empty() {
        true => Ok((mine, notes)),
        false => {
            let lines: Vec<String> = refused.into_iter().map(|(_, problem)| problem).collect();
            Err(lines.join("\n"))
        }
    }
}

/// Says of the reference's variables that are set and concern a subcommand what
/// they are here: they are not read.
pub(super) fn variables(section: &str) -> Vec<String> {
    let set = VARIABLES.iter().filter(|name| std::env::var_os(name).is_some());
    let told = set.filter_map(|variable| {
        let theirs = plain(variable);
        let known = NAMES.iter().find(|name| {
            name.theirs == theirs && (name.section == section || name.section.is_empty())
        })?;
        let ours = match known.fate {
            Fate::Is(flag) | Fate::But(flag, _) => {
                let own = format!("OCLAW_{section}_{flag}").replace('-', "_").to_uppercase();
                format!("the setting is `{own}`")
            }
            Fate::Instead(instead) if section == "serve" => instead.to_owned(),
            _ => return None,
        };
        Some(format!("`{variable}` is not read: {ours}"))
    });
    told.collect()
}

/// Finds the subcommand in a command line, and its place.
fn subcommand(command: &Command, argv: &[OsString]) -> Option<(String, usize)> {
    let mut words = argv.iter().enumerate().skip(1);
    while let Some((place, word)) = words.next() {
        if word == "--config" || word == "--seed" {
            words.next();
        } else if let Some(found) = word.to_str().and_then(|word| command.find_subcommand(word)) {
            return Some((found.get_name().to_owned(), place));
        }
    }
    None
}

/// Names are written with `-`, with `_` and in capitals.
fn plain(name: &str) -> String {
    name.to_lowercase().replace('_', "-")
}

/// Returns what becomes of a name in a section; none if it is not theirs. One that
/// is not accepted there is an error that tells what is.
fn fate(command: &Command, section: &str, typed: &str) -> Option<Result<&'static Fate, String>> {
    let scope = match section {
        "" => Some(command),
        section => command.find_subcommand(section),
    };
    let mut ours = scope.into_iter().chain([command]).flat_map(Command::get_arguments);
    if ours.any(|arg| arg.get_long() == Some(typed)) {
        return None;
    }
    let theirs = plain(typed);
    let known: Vec<&Name> = NAMES.iter().filter(|name| name.theirs == theirs).collect();
    if let Some(name) = known.iter().find(|name| name.section == section) {
        return Some(name.fate.accepted());
    }
    let elsewhere: Vec<String> = known.iter().map(|name| name.home()).collect();
    match (known.first(), elsewhere.is_empty()) {
        (Some(name), _) if name.section.is_empty() => Some(name.fate.accepted()),
        (Some(_), false) => Some(Err(format!("in oclaw this is {}", elsewhere.join(", ")))),
        _ => {
            let begins = |(beginning, _): &&(&str, &str)| theirs.starts_with(beginning);
            BEGINNINGS.iter().find(begins).map(|(_, instead)| Err((*instead).to_owned()))
        }
    }
}

impl Name {
    /// Says where the name is accepted, and as what.
    fn home(&self) -> String {
        let Self { theirs, section, fate } = self;
        match fate {
            Fate::Is(flag) | Fate::But(flag, _) | Fate::Words(flag, _) => {
                format!("`[{section}] {flag}` (`oclaw {section} --{flag}`)")
            }
            Fate::Sets(flag, value) => format!("`[{section}] {flag} = \"{value}\"`"),
            Fate::Same(_, why) => format!("`[{section}] {theirs}`: {why}"),
            Fate::Instead(instead) => (*instead).to_owned(),
        }
    }
}

impl Fate {
    fn accepted(&'static self) -> Result<&'static Self, String> {
        match self {
            Self::Instead(instead) => Err((*instead).to_owned()),
            fate => Ok(fate),
        }
    }

    fn takes_value(&self) -> bool {
        match self {
            Self::Is(_) | Self::But(..) | Self::Words(..) => true,
            Self::Same(values, _) => !values.is_empty(),
            Self::Sets(..) | Self::Instead(_) => false,
        }
    }
}

fn translate(fate: &Fate, label: &str, values: Option<&[String]>) -> Result<Translated, String> {
    let dashes = if label.starts_with("--") { "--" } else { "" };
    let is = |flag: &str| format!("`{label}` is `{dashes}{flag}` here");
    let value = values.and_then(<[String]>::first).map_or("", String::as_str);
    match fate {
        Fate::Is(flag) => Ok(Translated { setting: Some((flag, None)), note: is(flag) }),
        Fate::But(flag, but) => {
            Ok(Translated { setting: Some((flag, None)), note: format!("{}; {but}", is(flag)) })
        }
        Fate::Words(flag, words) => match words.iter().find(|(theirs, _)| *theirs == value) {
            Some((_, ours)) => {
                let note = format!("{}, `{value}` is `{ours}`", is(flag));
                Ok(Translated { setting: Some((flag, Some(vec![(*ours).to_owned()]))), note })
            }
            None => {
                let known: Vec<_> = words.iter().map(|(theirs, _)| format!("`{theirs}`")).collect();
                Err(format!("there is no `{value}`; there are {}", known.join(", ")))
            }
        },
        Fate::Sets(flag, set) => {
            let setting = (value != "false").then(|| (*flag, Some(vec![(*set).to_owned()])));
            Ok(Translated { setting, note: format!("{}, as `{set}`", is(flag)) })
        }
        Fate::Same([], why) if value != "false" => {
            Ok(Translated { setting: None, note: format!("`{label}` is not needed: {why}") })
        }
        Fate::Same(same, why) if same.contains(&value) => {
            Ok(Translated { setting: None, note: format!("`{label}` is not needed: {why}") })
        }
        Fate::Same(_, why) => Err(format!("`{value}` is not to be had: {why}")),
        Fate::Instead(instead) => Err((*instead).to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::{BEGINNINGS, Fate, NAMES, VARIABLES, plain};

    #[test]
    fn each_name_stands_for_a_flag_that_there_is() {
        let program = crate::Cli::command();
        for name in NAMES {
            let flag = match name.fate {
                Fate::Is(flag) | Fate::But(flag, _) | Fate::Words(flag, _) => flag,
                Fate::Sets(flag, _) => flag,
                Fate::Same(..) | Fate::Instead(_) => continue,
            };
            let command = program.find_subcommand(name.section);
            let mut flags = command.into_iter().flat_map(clap::Command::get_arguments);
            let there = flags.any(|arg| arg.get_long() == Some(flag));
            assert!(there, "{}: no `oclaw {} --{flag}`", name.theirs, name.section);
        }
    }

    #[test]
    fn the_page_has_every_name() {
        let page = include_str!("../../man/reference-names.md");
        let beginnings = BEGINNINGS.iter().map(|(beginning, _)| format!("`{beginning}…`"));
        let names =
            NAMES.iter().map(|name| match VARIABLES.iter().find(|it| plain(it) == name.theirs) {
                Some(variable) => format!("`{variable}`"),
                None => format!("`{}`", name.theirs),
            });
        let lacking: Vec<String> =
            names.chain(beginnings).filter(|name| !page.contains(name)).collect();
        assert!(lacking.is_empty(), "{lacking:?}");
    }
}

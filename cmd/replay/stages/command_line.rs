//! A stage's recorded command line, for another run.

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, CommandFactory};
use oclaw::table::StageLine;

/// Flags that say where a table comes from and goes to, and how much is said of it.
const NOT_TAKEN: [&str; 13] = [
    "output",
    "format",
    "replace",
    "fill",
    "follow",
    "poll",
    "once",
    "shard-tries",
    "quiet",
    "verbose",
    "seed",
    "show-settings",
    "no-provenance",
];

/// Returns the flags of a recorded command line without its inputs and outputs,
/// or says why it cannot be run again.
pub(super) fn words(line: &StageLine) -> Result<Vec<String>, String> {
    if line.argv.iter().any(|word| word.contains("://…@")) {
        return Err("its address held a password, which no file tells".to_owned());
    }
    let argv = std::iter::once("oclaw").chain(line.argv.iter().map(String::as_str));
    let mut command = crate::Cli::command();
    let matches = command.clone().try_get_matches_from(argv).map_err(|error| {
        let text = error.to_string();
        let first = text.lines().next().unwrap_or_default();
        format!("its command line means nothing to this version: {first}")
    })?;
    command.build();
    let stage = matches.subcommand().filter(|(name, _)| *name == line.command);
    let Some((name, given)) = stage else {
        return Err("its command line is another command's".to_owned());
    };
    let described = command.find_subcommand(name);
    let mut words = Vec::new();
    for arg in described.into_iter().flat_map(clap::Command::get_arguments) {
        let id = arg.get_id().as_str();
        let Some(long) = arg.get_long().filter(|long| !NOT_TAKEN.contains(long)) else { continue };
        let known = given.ids().any(|known| known.as_str() == id);
        if known && given.value_source(id) == Some(ValueSource::CommandLine) {
            words.extend(typed(arg, long, given.get_raw(id)));
        }
    }
    if let Some(seed) = line.seed {
        words.push(format!("--seed={seed}"));
    }
    Ok(words)
}

/// Writes a flag as it may have been typed.
fn typed<'a>(
    arg: &Arg,
    long: &str,
    values: Option<impl Iterator<Item = &'a std::ffi::OsStr>>,
) -> Vec<String> {
    let flag = match arg.get_action() {
        ArgAction::SetTrue | ArgAction::SetFalse | ArgAction::Count => true,
        _ => !arg.get_num_args().is_none_or(|range| range.takes_values()),
    };
    if flag {
        return vec![format!("--{long}")];
    }
    let values = values.into_iter().flatten().map(|value| value.to_string_lossy());
    let word = |value: std::borrow::Cow<'_, str>| match value.is_empty() {
        // `--rules` alone stands for a value of its own.
        true => format!("--{long}"),
        false => format!("--{long}={value}"),
    };
    values.map(word).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(command: &str, argv: &[&str]) -> StageLine {
        StageLine {
            command: command.to_owned(),
            argv: argv.iter().map(|word| (*word).to_owned()).collect(),
            seed: Some(7),
            ..StageLine::default()
        }
    }

    #[test]
    fn inputs_and_outputs_are_left_out() {
        let argv = ["judge", "run/turns", "--rules", "-o", "judged.parquet", "--seed", "7", "-v"];
        assert_eq!(words(&line("judge", &argv)).unwrap(), ["--rules", "--seed=7"]);
        let argv = ["judge", "-", "--rules=my.toml", "--fill", "--at-once=3"];
        let told = words(&line("judge", &argv)).unwrap();
        assert!(told.contains(&"--rules=my.toml".to_owned()), "{told:?}");
        assert!(told.contains(&"--at-once=3".to_owned()) && told.len() == 3, "{told:?}");
    }

    #[test]
    fn every_flag_left_out_is_one() {
        let mut command = crate::Cli::command();
        command.build();
        let judge = command.find_subcommand("judge").unwrap();
        for name in NOT_TAKEN {
            assert!(judge.get_arguments().any(|arg| arg.get_long() == Some(name)), "{name}");
        }
        let argv = ["judge", "--follow", "in", "-o", "out", "--rules", "--once", "--poll=3s"];
        assert_eq!(words(&line("judge", &argv)).unwrap(), ["--rules", "--seed=7"]);
    }

    #[test]
    fn what_cannot_be_run_again_is_said() {
        let why = |command, argv: &[&str]| words(&line(command, argv)).unwrap_err();
        assert!(why("judge", &["judge", "--engine", "http://…@host"]).contains("password"));
        assert!(why("judge", &["judge", "--no-such-flag"]).contains("means nothing"));
        assert!(why("judge", &["hint", "--from-feedback"]).contains("another command's"));
    }
}

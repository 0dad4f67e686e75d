//! `[engines.NAME]`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use toml::de::{DeTable, DeValue};

use super::read::Reader;
use super::{EnginePlan, Origin, Process, Serves};
use crate::pipeline::Error;

/// Where `oclaw engine` answers unless it is told.
const URL: &str = "http://127.0.0.1:30001";
/// Big models are read for many minutes.
const READY_TIMEOUT: Duration = Duration::from_secs(1800);
const KEYS: [&str; 7] = ["command", "env", "gpus", "model", "ready-timeout", "serves", "url"];

pub(super) fn read(
    reader: &Reader<'_>,
    engines: &DeTable<'_>,
) -> Result<BTreeMap<String, EnginePlan>, Error> {
    let mut found: BTreeMap<String, EnginePlan> = BTreeMap::new();
    for (key, value) in engines {
        let line = reader.line(key.span().start);
        let name = key.get_ref().to_string();
        let fault = |problem| Err(Error::Plan { line, problem });
        let DeValue::Table(section) = value.get_ref() else {
            return fault(format!("`engines.{name}` is to be a section `[engines.{name}]`"));
        };
        let fits = |letter: char| letter.is_ascii_alphanumeric() || letter == '-' || letter == '_';
        if name.is_empty() || !name.chars().all(fits) {
            return fault(format!("an engine's name has letters, digits, `-` and `_`: `{name}`"));
        }
        let engine = engine(reader, &name, section, line)?;
        let same = |(_, other): &(&String, &EnginePlan)| other.url == engine.url;
        if let Some((other, _)) = found.iter().find(same) {
            return fault(format!("`[engines.{name}]` has the `url` of `[engines.{other}]`"));
        }
        found.insert(name, engine);
    }
    Ok(found)
}

fn engine(
    reader: &Reader<'_>,
    name: &str,
    section: &DeTable<'_>,
    line: usize,
) -> Result<EnginePlan, Error> {
    let mut engine = EnginePlan {
        origin: Origin::Elsewhere,
        url: String::new(),
        serves: Serves::Policy,
        ready_timeout: READY_TIMEOUT,
        process: Process { line, ..Process::default() },
        line,
    };
    let (mut model, mut command) = (None, None);
    for (key, value) in section {
        let at = reader.line(key.span().start);
        let value = value.get_ref();
        match key.get_ref().as_ref() {
            "model" => model = Some(PathBuf::from(reader.text(value, "model", at)?)),
            "command" => command = Some((reader.texts(value, "command", at)?, at)),
            "url" => engine.url = url(reader.text(value, "url", at)?, at)?,
            "serves" => engine.serves = serves(&reader.text(value, "serves", at)?, at)?,
            "ready-timeout" => engine.ready_timeout = reader.time(value, "ready-timeout", at)?,
            "gpus" => {
                engine.process.gpus = reader.gpus(value, at)?;
                engine.process.line = at;
            }
            "env" => engine.process.env = reader.env(value, at)?,
            key => return Err(reader.unknown(key, &format!("engines.{name}"), &KEYS, at)),
        }
    }
    let fault = |line, problem: String| Err(Error::Plan { line, problem });
    engine.origin = match (model, command) {
        (Some(_), Some((_, at))) => {
            return fault(at, "an engine has a `model` or a `command`, not both".to_owned());
        }
        (Some(model), None) => Origin::Model(model),
        (None, Some((command, at))) => match command.first().is_some_and(|it| !it.is_empty()) {
            true => Origin::Command(command),
            false => return fault(at, "`command` is empty".to_owned()),
        },
        (None, None) => Origin::Elsewhere,
    };
    match (&engine.origin, engine.url.is_empty()) {
        (Origin::Model(_), true) => engine.url = URL.to_owned(),
        (_, true) => return fault(line, format!("`[engines.{name}]` needs a `url`")),
        _ => {}
    }
    let own = &engine.process;
    if engine.origin == Origin::Elsewhere && !(own.gpus.is_empty() && own.env.is_empty()) {
        let problem = "somebody else runs an engine without `model` and `command`: \
                       its devices and variables are not ours to give";
        return fault(own.line, problem.to_owned());
    }
    Ok(engine)
}

fn url(text: String, line: usize) -> Result<String, Error> {
    match text.contains("://") {
        true => Ok(text.trim().trim_end_matches('/').to_owned()),
        false => {
            // What stands before an @ may be a password.
            let host = text.rsplit_once('@').map(|(_, host)| format!("…@{host}"));
            let shown = host.unwrap_or(text);
            let problem = format!("`url` is to be `http://HOST:PORT`, not `{shown}`");
            Err(Error::Plan { line, problem })
        }
    }
}

fn serves(text: &str, line: usize) -> Result<Serves, Error> {
    match text {
        "policy" => Ok(Serves::Policy),
        "judge" => Ok(Serves::Judge),
        "teacher" => Ok(Serves::Teacher),
        other => {
            let problem = format!("an engine serves `policy`, `judge` or `teacher`, not `{other}`");
            Err(Error::Plan { line, problem })
        }
    }
}

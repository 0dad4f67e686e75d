//! The configuration file: a section per subcommand, whose keys are flags, and
//! what only the loop reads: `[engines.NAME]`, `[scheduler]`, and in the section of
//! a stage the keys `gpus` and `env` of its process.

mod engines;
mod read;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use toml::de::{DeTable, DeValue};

use super::Error;
use read::{Reader, flag_values};

/// Reads a time as people type it.
pub type ReadTime = fn(&str) -> Result<Duration, String>;

/// The subcommands that a loop runs, in the order of the loop.
pub const STAGES: [&str; 7] =
    ["serve", "judge", "hint", "teacher-lp", "advantage", "train", "sync-weights"];

/// What a configuration file asks for.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    /// The engines, by name.
    pub engines: BTreeMap<String, EnginePlan>,
    /// Who runs the processes.
    pub scheduler: Scheduler,
    /// What the processes of stages are given, by stage.
    pub processes: BTreeMap<String, Process>,
    /// (section, key) -> (values, line) of everything that is a flag. The section of
    /// shared flags is "".
    pub flags: BTreeMap<(String, String), (Vec<String>, usize)>,
}

/// An inference server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EnginePlan {
    /// Who runs it.
    pub origin: Origin,
    /// Where it answers.
    pub url: String,
    /// Who asks it.
    pub serves: Serves,
    /// How long it may take to answer after its start.
    pub ready_timeout: Duration,
    /// What its process is given.
    pub process: Process,
    /// The line of its section.
    pub line: usize,
}

/// Who runs an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The loop: `oclaw engine` with this model.
    Model(PathBuf),
    /// The loop: this program with its arguments.
    Command(Vec<String>),
    /// Somebody else.
    Elsewhere,
}

/// Who asks an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Serves {
    /// People: it samples the answers and gets the new weights.
    Policy,
    /// `judge` and `hint`.
    Judge,
    /// `teacher-lp`.
    Teacher,
}

/// What a process is given.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Process {
    /// Its devices.
    pub gpus: Vec<u32>,
    /// Its variables, beside those of the supervisor.
    pub env: BTreeMap<String, String>,
    /// The line of the devices, or of the variables.
    pub line: usize,
}

/// Who runs the processes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Scheduler {
    /// Whose it is.
    pub kind: Kind,
    /// Where it answers.
    pub address: Option<String>,
    /// Which of its parts to use.
    pub partition: Option<String>,
    /// Further arguments to its commands.
    pub args: Vec<String>,
    /// How often it is asked, unless as usual.
    pub poll: Option<Duration>,
    /// The line of the section; 0 if there is none.
    pub line: usize,
}

/// A kind of scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Kind {
    /// The supervisor itself, on this machine.
    #[default]
    Local,
    /// Ray, by its Jobs API.
    Ray,
    /// Slurm, by its commands.
    Slurm,
}

impl Plan {
    /// Reads a configuration. Flags are taken as they are: whether there are such
    /// flags is for the command line to say.
    pub fn parse(text: &str, time: ReadTime) -> Result<Self, Error> {
        let table = DeTable::parse(text)
            .map_err(|error| Error::Syntax { problem: error.to_string().trim_end().to_owned() })?;
        let reader = Reader { text, time };
        let mut plan = Self::default();
        for (key, value) in table.get_ref() {
            let line = reader.line(key.span().start);
            let name = key.get_ref().to_string();
            match (name.as_str(), value.get_ref()) {
                ("engines", DeValue::Table(engines)) => {
                    plan.engines = engines::read(&reader, engines)?;
                }
                ("scheduler", DeValue::Table(section)) => {
                    plan.scheduler = scheduler(&reader, section, line)?;
                }
                ("engines" | "scheduler", _) => {
                    return Err(Error::Plan { line, problem: format!("`{name}` is a section") });
                }
                (_, DeValue::Table(section)) => plan.section(&reader, &name, section)?,
                (_, value) => plan.flag(String::new(), name, (value, line))?,
            }
        }
        Ok(plan)
    }

    /// Returns the values of a flag of a stage, if the file has it.
    pub fn values(&self, section: &str, key: &str) -> Option<&[String]> {
        let find = |section: &str| self.flags.get(&(section.to_owned(), key.to_owned()));
        find(section).map(|(values, _)| values.as_slice())
    }

    /// Returns the one value of a flag of a stage, if the file has it.
    pub fn value(&self, section: &str, key: &str) -> Option<&str> {
        self.values(section, key)?.first().map(String::as_str)
    }

    /// Returns the engines that somebody asks.
    pub fn engines_for(&self, serves: Serves) -> impl Iterator<Item = (&str, &EnginePlan)> {
        let all = self.engines.iter().map(|(name, engine)| (name.as_str(), engine));
        all.filter(move |(_, engine)| engine.serves == serves)
    }

    /// Checks that no device is given twice, and that all of them are there. Stages
    /// that do not run take none. On a cluster devices have no numbers.
    pub fn check_devices(&self, present: &BTreeSet<u32>, without: &[String]) -> Result<(), Error> {
        if self.scheduler.kind != Kind::Local {
            return Ok(());
        }
        let engines =
            self.engines.iter().map(|(name, it)| (format!("engines.{name}"), &it.process));
        let stages = self.processes.iter().map(|(name, process)| (name.clone(), process));
        let mut taken: BTreeMap<u32, String> = BTreeMap::new();
        for (name, process) in engines.chain(stages.filter(|(name, _)| !without.contains(name))) {
            let fault = |problem| Err(Error::Plan { line: process.line, problem });
            for gpu in &process.gpus {
                if !present.contains(gpu) {
                    let there = match present.len() {
                        0 => "there is none".to_owned(),
                        _ => format!("there are {}", list(present)),
                    };
                    return fault(format!("`[{name}]` has no device {gpu}: {there}"));
                }
                if let Some(other) = taken.insert(*gpu, name.clone()) {
                    return fault(format!("`[{name}]` has device {gpu} of `[{other}]`"));
                }
            }
        }
        Ok(())
    }

    fn section(
        &mut self,
        reader: &Reader<'_>,
        name: &str,
        section: &DeTable<'_>,
    ) -> Result<(), Error> {
        let process = STAGES.contains(&name);
        for (key, value) in section {
            let line = reader.line(key.span().start);
            match (key.get_ref().as_ref(), value.get_ref()) {
                ("gpus", value) if process => {
                    let entry = self.processes.entry(name.to_owned()).or_default();
                    (entry.gpus, entry.line) = (reader.gpus(value, line)?, line);
                }
                ("env", value) if process => {
                    let entry = self.processes.entry(name.to_owned()).or_default();
                    entry.env = reader.env(value, line)?;
                    entry.line = entry.line.max(line);
                }
                (key, value) => self.flag(name.to_owned(), key.to_owned(), (value, line))?,
            }
        }
        Ok(())
    }

    fn flag(
        &mut self,
        section: String,
        key: String,
        (value, line): (&DeValue<'_>, usize),
    ) -> Result<(), Error> {
        let Some(values) = flag_values(value) else {
            let name = if section.is_empty() { key } else { format!("{section}.{key}") };
            let problem = format!("`{name}` has a type that no flag takes");
            return Err(Error::Plan { line, problem });
        };
        self.flags.insert((section, key), (values, line));
        Ok(())
    }
}

fn list(numbers: &BTreeSet<u32>) -> String {
    numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

fn scheduler(reader: &Reader<'_>, section: &DeTable<'_>, line: usize) -> Result<Scheduler, Error> {
    let mut found = Scheduler { line, ..Scheduler::default() };
    let mut used = BTreeMap::new();
    for (key, value) in section {
        let at = reader.line(key.span().start);
        let key = key.get_ref().as_ref();
        used.insert(key.to_owned(), at);
        match key {
            "kind" => {
                found.kind = match reader.text(value.get_ref(), key, at)?.as_str() {
                    "local" => Kind::Local,
                    "ray" => Kind::Ray,
                    "slurm" => Kind::Slurm,
                    other => {
                        let problem =
                            format!("no scheduler `{other}`; there are `local`, `ray`, `slurm`");
                        return Err(Error::Plan { line: at, problem });
                    }
                }
            }
            "address" => found.address = Some(reader.text(value.get_ref(), key, at)?),
            "partition" => found.partition = Some(reader.text(value.get_ref(), key, at)?),
            "args" => found.args = reader.texts(value.get_ref(), key, at)?,
            "poll" => found.poll = Some(reader.time(value.get_ref(), key, at)?),
            _ => {
                let known = ["address", "args", "kind", "partition", "poll"];
                return Err(reader.unknown(key, "scheduler", &known, at));
            }
        }
    }
    let useful: &[&str] = match found.kind {
        Kind::Local => &["kind"],
        Kind::Ray => &["kind", "address", "poll"],
        Kind::Slurm => &["kind", "partition", "args", "poll"],
    };
    match used.iter().find(|(key, _)| !useful.contains(&key.as_str())) {
        Some((key, line)) => {
            let problem = format!("this kind of scheduler has no `{key}`");
            Err(Error::Plan { line: *line, problem })
        }
        None => Ok(found),
    }
}

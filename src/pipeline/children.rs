//! Which processes a loop is made of: the commands that a person would type.

mod own;
mod serve;
mod weights;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::run::SHIP;
use super::{EnginePlan, Error, Kind, Origin, Plan, Process, Run, STAGES, Serves};
use crate::store::Address;

/// Where `oclaw serve` listens unless it is told.
const FRONT: &str = "127.0.0.1:30000";
/// Where the engine inside `oclaw serve` listens for new weights.
const INSIDE: &str = "127.0.0.1:30001";
/// How long `oclaw serve` may take; with a model inside, as long as an engine.
const SERVE_TIMEOUT: Duration = Duration::from_secs(1800);
/// Stages that a loop can do without.
const OPTIONAL: [&str; 6] = ["judge", "hint", "teacher-lp", "advantage", "train", "sync-weights"];

/// The estimator unless it is told, those that learn from a teacher, and those that
/// learn from its likeliest tokens.
const ESTIMATOR: &str = "hybrid";
const TAUGHT: [&str; 4] = ["opd", "combine", "hybrid", "topk-kl"];
const TAUGHT_LIKELIEST: [&str; 2] = ["hybrid", "topk-kl"];

/// What is wanted beside the plan.
#[derive(Debug, Clone)]
pub struct Wishes {
    /// The program.
    pub program: String,
    /// The configuration file, which every process reads too.
    pub config: String,
    /// The folder of the run.
    pub run: Run,
    /// Stages to do without.
    pub without: Vec<String>,
    /// Steps from one push of weights to the next.
    pub weight_sync_interval: u64,
    /// Train only when nobody has chatted for so long.
    pub train_when_idle: Option<String>,
    /// Train only in these hours.
    pub train_hours: Vec<String>,
}

/// A setting of a stage, wherever it was given: section and key in, value out.
pub type Given<'a> = &'a dyn Fn(&str, &str) -> Option<String>;

/// When a process is started: each waits for those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// First.
    Engine,
    /// When the engines that it stands before answer.
    Serve,
    /// When chats are served.
    Stage,
}

/// A process of the loop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Child {
    /// Its name.
    pub name: String,
    /// When it is started.
    pub tier: Tier,
    /// Program and arguments; nothing if somebody else runs it.
    pub argv: Vec<String>,
    /// What it is given.
    pub process: Process,
    /// What answers once it is ready, and how long that may take.
    pub ready: Option<(String, Duration)>,
    /// Whether chats depend on it.
    pub vital: bool,
    /// Changes when it has to be started anew to be as the plan wants it.
    pub digest: String,
}

/// Lists the processes of a loop, in the order of their start.
pub fn children(plan: &Plan, wishes: &Wishes, given: Given<'_>) -> Result<Vec<Child>, Error> {
    let cast = Cast { plan, wishes, given };
    cast.check_run()?;
    cast.check_without()?;
    cast.check_own()?;
    let mut found: Vec<Child> =
        plan.engines.iter().map(|(name, it)| cast.engine(name, it)).collect::<Result<_, _>>()?;
    found.push(cast.serve()?);
    for hop in wishes.run.hops(&wishes.without).into_iter().filter(|hop| hop.stage != SHIP) {
        let folders = [path(&hop.from)?, path(&hop.into)?];
        let mut argv = cast.command(hop.stage);
        let words: &[&str] = match hop.stage {
            "train" => &["--follow", &folders[0], "--out", &folders[1]],
            _ => &["--follow", &folders[0], "-o", &folders[1]],
        };
        argv.extend(words.iter().map(|word| (*word).to_owned()));
        argv.extend(cast.further(hop.stage)?);
        found.push(cast.child(hop.stage, Tier::Stage, argv));
    }
    if !wishes.without.iter().any(|stage| stage == "sync-weights") {
        found.push(cast.sync()?);
    }
    Ok(found)
}

/// Returns where clients reach `oclaw serve`, seen from this machine.
pub fn front(given: Given<'_>) -> Result<String, Error> {
    let listen = given("serve", "listen").unwrap_or_else(|| FRONT.to_owned());
    match listen.rsplit_once(':') {
        Some((_, "0")) | None => Err(Error::Wanting {
            problem: format!("`[serve] listen` needs a port that stays: `{listen}`"),
        }),
        Some(("0.0.0.0" | "[::]", port)) => Ok(format!("http://127.0.0.1:{port}")),
        Some(_) => Ok(format!("http://{listen}")),
    }
}

/// Returns the addresses of the engines that sample the answers.
pub fn policy_engines(plan: &Plan, given: Given<'_>) -> Vec<String> {
    let planned: Vec<String> =
        plan.engines_for(Serves::Policy).map(|(_, engine)| engine.url.clone()).collect();
    if !planned.is_empty() {
        return planned;
    }
    match (given("serve", "engine"), given("serve", "model")) {
        (Some(_), _) => plan
            .values("serve", "engine")
            .map_or_else(|| given("serve", "engine").into_iter().collect(), <[String]>::to_vec),
        (None, Some(_)) => {
            let inside = given("serve", "engine-listen").unwrap_or_else(|| INSIDE.to_owned());
            vec![format!("http://{inside}")]
        }
        (None, None) => Vec::new(),
    }
}

fn path(path: &Path) -> Result<String, Error> {
    path.to_str().map(str::to_owned).ok_or_else(|| Error::Wanting {
        problem: format!("`{}` is no name that can be passed on", path.display()),
    })
}

struct Cast<'a> {
    plan: &'a Plan,
    wishes: &'a Wishes,
    given: Given<'a>,
}

impl Cast<'_> {
    /// Chats are recorded on a disk, whose folder is the run's. Shards and policies
    /// may go to an object store from there.
    fn check_run(&self) -> Result<(), Error> {
        let wanting = |problem: &str| Err(Error::Wanting { problem: problem.to_owned() });
        let run = &self.wishes.run;
        if let Some((scheme, _)) = run.folder.to_str().and_then(|run| run.split_once("://")) {
            // What follows may hold a password.
            return wanting(&format!(
                "`run` is to be a folder of a file system, not of an object store \
                 (`{scheme}://`), which is `store`"
            ));
        }
        let Some(store) = &run.store else { return Ok(()) };
        match Address::of(Path::new(store)) {
            Ok(Some(_)) if self.given("serve", &["ship"]) => wanting(
                "`[serve] ship` and `[loop] store` both say where turns go: leave `ship` out",
            ),
            Ok(Some(_)) => Ok(()),
            Ok(None) => wanting(
                "`store` is to be of an object store, as in `s3://BUCKET/FOLDER`; a folder that \
                 machines share is `run` itself",
            ),
            Err(error) => wanting(&error.to_string()),
        }
    }

    fn check_without(&self) -> Result<(), Error> {
        let without = &self.wishes.without;
        let wanting = |problem: String| Err(Error::Wanting { problem });
        if let Some(odd) = without.iter().find(|stage| !OPTIONAL.contains(&stage.as_str())) {
            let known = OPTIONAL.map(|name| format!("`{name}`")).join(", ");
            return wanting(format!(
                "`without`: no stage `{odd}` to do without; there are {known}"
            ));
        }
        let lacks = |stage: &str| without.iter().any(|it| it == stage);
        if lacks("advantage") && !lacks("train") {
            return wanting("`train` needs `advantage`: do without both, or neither".to_owned());
        }
        // Told for one of both, it is told for both; else each has its own.
        let told = ["advantage", "train"].map(|stage| (self.given)(stage, "estimator"));
        let mut estimators: Vec<String> = told.into_iter().flatten().collect();
        if estimators.is_empty() {
            estimators.push(ESTIMATOR.to_owned());
        }
        let absent = ["hint", "teacher-lp"].into_iter().find(|stage| lacks(stage));
        let taught = estimators.iter().find(|name| TAUGHT.contains(&name.as_str()));
        match absent.zip(taught).filter(|_| !lacks("advantage")) {
            Some((stage, estimator)) => wanting(format!(
                "`estimator = \"{estimator}\"` needs `{stage}`: do not leave it out, or write \
                 another, as `grpo`, into `[advantage]` and `[train]`"
            )),
            None => Ok(()),
        }
    }

    fn given(&self, section: &str, keys: &[&str]) -> bool {
        keys.iter().any(|key| (self.given)(section, key).is_some())
    }

    /// Returns the command of a subcommand.
    fn command(&self, name: &str) -> Vec<String> {
        let Wishes { program, config, .. } = self.wishes;
        let mut argv = [program, name, "--config", config].map(str::to_owned).to_vec();
        if self.wishes.run.store.is_some() && !self.given("", &["object-cache"]) {
            let copies = self.wishes.run.copies().display().to_string();
            argv.extend(["--object-cache".to_owned(), copies]);
        }
        argv
    }

    fn child(&self, name: &str, tier: Tier, argv: Vec<String>) -> Child {
        let process = self.plan.processes.get(name).cloned().unwrap_or_default();
        self.dressed(Child {
            name: name.to_owned(),
            tier,
            argv,
            process,
            ready: None,
            vital: false,
            digest: String::new(),
        })
    }

    /// Hides the devices of others from a process that has none, and says what it
    /// was made of.
    fn dressed(&self, mut child: Child) -> Child {
        let processes = self.plan.processes.values();
        let all = processes.chain(self.plan.engines.values().map(|engine| &engine.process));
        let somebody = all.into_iter().any(|process| !process.gpus.is_empty());
        if somebody && child.process.gpus.is_empty() && self.plan.scheduler.kind == Kind::Local {
            child.process.env.insert("CUDA_VISIBLE_DEVICES".to_owned(), String::new());
        }
        let section = if STAGES.contains(&child.name.as_str()) { &child.name } else { "engine" };
        let flags: BTreeMap<_, _> = self
            .plan
            .flags
            .iter()
            .filter(|((of, _), _)| of == section || of.is_empty())
            .map(|((of, key), (values, _))| ((of, key), values))
            .collect();
        let made_of =
            format!("{:?} {:?} {:?} {flags:?}", child.argv, child.process.gpus, child.process.env);
        let digest = Sha256::digest(made_of.as_bytes());
        child.digest = digest[..4].iter().map(|byte| format!("{byte:02x}")).collect();
        child
    }

    fn engine(&self, name: &str, engine: &EnginePlan) -> Result<Child, Error> {
        let argv = match &engine.origin {
            Origin::Elsewhere => Vec::new(),
            Origin::Command(words) => words.clone(),
            Origin::Model(model) => {
                let mut argv = self.command("engine");
                let listen = engine.url.split_once("://").map_or("", |(_, rest)| rest);
                let listen = listen.split('/').next().unwrap_or_default();
                let model = model.display().to_string();
                argv.extend([
                    "--model".to_owned(),
                    model,
                    "--listen".to_owned(),
                    listen.to_owned(),
                ]);
                argv.extend(self.policies(engine)?);
                argv
            }
        };
        Ok(self.dressed(Child {
            name: format!("engine-{name}"),
            tier: Tier::Engine,
            argv,
            process: engine.process.clone(),
            ready: Some((engine.url.clone(), engine.ready_timeout)),
            vital: engine.serves == Serves::Policy,
            digest: String::new(),
        }))
    }

    /// Returns what else a stage has to be told.
    fn further(&self, stage: &str) -> Result<Vec<String>, Error> {
        let flag = |name: &str, value: String| vec![format!("--{name}"), value];
        match stage {
            "judge" => self.asked(stage, &["engine", "model", "rules"]),
            "hint" => self.asked(stage, &["engine", "model", "from-feedback"]),
            "teacher-lp" => self.teacher(),
            "advantage" => Ok(self.estimator("advantage", "train")),
            "train" => {
                let mut words = flag("metrics", path(&self.wishes.run.metrics())?);
                words.extend(self.estimator("train", "advantage"));
                if !self.given("train", &["model"]) {
                    words.extend(flag("model", self.base()?));
                }
                if let Some(idle) = &self.wishes.train_when_idle {
                    words.extend(flag("when-idle", idle.clone()));
                    words.extend(flag("spool", path(&self.wishes.run.turns())?));
                }
                let hours = self.wishes.train_hours.iter();
                words.extend(hours.flat_map(|range| flag("hours", range.clone())));
                Ok(words)
            }
            _ => Ok(Vec::new()),
        }
    }

    /// Returns whom a stage asks, unless its section says so.
    fn asked(&self, stage: &str, ways: &[&str]) -> Result<Vec<String>, Error> {
        if self.given(stage, ways) {
            return Ok(Vec::new());
        }
        let engines: Vec<String> = self
            .plan
            .engines_for(Serves::Judge)
            .flat_map(|(_, engine)| ["--engine".to_owned(), engine.url.clone()])
            .collect();
        if engines.is_empty() {
            let ways: Vec<_> = ways.iter().map(|way| format!("`{way}`")).collect();
            let problem = format!(
                "`{stage}` has nobody to ask: `[{stage}]` has none of {}, and no \
                 `[engines.NAME]` serves `judge`; or do without it (`[loop] without`)",
                ways.join(", ")
            );
            return Err(Error::Wanting { problem });
        }
        Ok(engines)
    }

    fn teacher(&self) -> Result<Vec<String>, Error> {
        let given = |key: &str| (self.given)("teacher-lp", key);
        let planned = || self.plan.engines_for(Serves::Teacher).next();
        let mut words = Vec::new();
        let mut flag = |name: &str, value: String| words.extend([format!("--{name}"), value]);
        let server = match (given("engine"), given("model")) {
            (Some(url), _) => Some(url),
            (None, Some(_)) => None,
            (None, None) => planned().map(|(_, engine)| engine.url.clone()),
        };
        let elsewhere = server.is_some() || self.wishes.run.store.is_some();
        match (server, given("model")) {
            (Some(url), _) => {
                flag("engine", url);
                // It has to stand beside the engine on the command line.
                flag("tokenizer", given("tokenizer").map_or_else(|| self.base(), Ok)?);
            }
            (None, Some(_)) => {}
            (None, None) => flag("model", self.base()?),
        }
        if given("policy").or_else(|| given("student")).is_some() {
            return Ok(words);
        }
        let wanted = given("topk").map_or_else(|| self.learns_from_likeliest(), |it| it != "0");
        match (wanted, given("topk")) {
            // The policies are not at hand where they are in a store, nor the models to
            // run them where a server is the teacher: the engine has the newest.
            (true, _) if elsewhere => flag("student", self.newest()?),
            (true, _) => flag("policy", path(&self.wishes.run.policy())?),
            (false, None) => flag("topk", "0".to_owned()),
            (false, Some(_)) => {}
        }
        Ok(words)
    }

    /// Tells whether the likeliest tokens of teacher and policy are of any use.
    fn learns_from_likeliest(&self) -> bool {
        let stages = ["train", "advantage"];
        let told = stages.into_iter().find_map(|stage| (self.given)(stage, "estimator"));
        TAUGHT_LIKELIEST.contains(&told.as_deref().unwrap_or(ESTIMATOR))
    }

    /// Finds an engine that serves the newest policy.
    fn newest(&self) -> Result<String, Error> {
        policy_engines(self.plan, self.given).into_iter().next().ok_or_else(|| Error::Wanting {
            problem: "`[teacher-lp] topk` asks the newest policy: name an engine that serves \
                      it, `[teacher-lp] student = URL`"
                .to_owned(),
        })
    }

    /// Returns the estimator of the other of two stages where only that is told.
    fn estimator(&self, stage: &str, other: &str) -> Vec<String> {
        match ((self.given)(stage, "estimator"), (self.given)(other, "estimator")) {
            (None, Some(name)) => vec!["--estimator".to_owned(), name],
            _ => Vec::new(),
        }
    }

    /// Finds the model that everything began from.
    fn base(&self) -> Result<String, Error> {
        let planned =
            self.plan.engines_for(Serves::Policy).find_map(|(_, engine)| match &engine.origin {
                Origin::Model(model) => Some(model.clone()),
                _ => None,
            });
        let told = (self.given)("train", "model").or_else(|| (self.given)("serve", "model"));
        let found = told.map(PathBuf::from).or(planned).ok_or_else(|| Error::Wanting {
            problem: "no start model is named: write `[train] model = DIR`".to_owned(),
        })?;
        path(&found)
    }
}

//! What is to run, resolved before anything does.

use std::fs;
use std::path::Path;

use oclaw::pipeline::{
    self, Child, Kind, Launcher, Local, Plan, Ray, Run, Scheduler, Slurm, Wishes, children, front,
    policy_engines,
};
use oclaw::store::Address;

use super::Args;
use super::keys::Keys;
use crate::common::Context;
use crate::devices;
use crate::embedded;
use crate::init::FILE;
use crate::report::Failure;
use crate::settings::Configured;
use crate::units;

/// How threads of libtorch wait that have nothing to do. Engine, teacher and trainer
/// share the processors of a machine: they are to sleep, not to spin. Who sets it
/// otherwise, for all or in the `env` of a section, is heard.
const WAITING: &str = "OMP_WAIT_POLICY";

/// What is to run.
pub(super) struct Wanted {
    pub(super) run: Run,
    pub(super) children: Vec<Child>,
    /// Who runs them.
    pub(super) scheduler: Scheduler,
    /// The engines that get the weights.
    pub(super) engines: Vec<String>,
    /// Where `oclaw serve` answers.
    pub(super) front: String,
    /// What both are asked with.
    pub(super) keys: Keys,
}

impl Wanted {
    pub(super) fn of(args: &Args, context: &Context) -> anyhow::Result<Self> {
        let here = Path::new(FILE);
        let named = args.file.as_deref().or(context.config.as_deref());
        let Some(config) = named.or_else(|| here.is_file().then_some(here)) else {
            let failure = Failure::usage(format!("a loop needs a configuration: no `{FILE}` here"));
            return Err(failure.hint("`oclaw init` writes one; or `oclaw loop FILE`").into());
        };
        let plan = plan(config)?;
        let name = |path: &Path| match path.to_str() {
            Some(text) => Ok(text.to_owned()),
            None => Err(Failure::usage(format!("no name to pass on: `{}`", path.display()))),
        };
        let wishes = wishes(args, name(&std::env::current_exe()?)?, name(config)?);
        let given = |section: &str, key: &str| given(&plan, section, key);
        let mut children = children(&plan, &wishes, &given).map_err(|error| match error {
            pipeline::Error::Plan { .. } => anyhow::Error::from(told(config, &error)),
            error => anyhow::Error::from(error),
        })?;
        if plan.scheduler.kind == Kind::Local && std::env::var_os(WAITING).is_none() {
            let ours =
                children.iter_mut().filter(|child| child.argv.first() == Some(&wishes.program));
            for child in ours {
                child.process.env.entry(WAITING.to_owned()).or_insert_with(|| "PASSIVE".to_owned());
            }
        }
        let taking = plan.engines.values().any(|engine| !engine.process.gpus.is_empty())
            || plan.processes.values().any(|process| !process.gpus.is_empty());
        if taking && plan.scheduler.kind == Kind::Local {
            plan.check_devices(&devices::present(args.devices), &args.without)
                .map_err(|error| told(config, &error))?;
        }
        let (engines, front) = (policy_engines(&plan, &given), front(&given)?);
        let keys = Keys::of(&plan, &given);
        let run = wishes.run;
        Ok(Self { run, children, scheduler: plan.scheduler, engines, front, keys })
    }

    /// Returns what tells this loop's jobs from another's on the same cluster.
    fn scope(&self) -> String {
        let state = self.run.state();
        state.canonicalize().unwrap_or(state).display().to_string()
    }

    /// Returns whoever runs the processes.
    pub(super) fn launcher(&self) -> anyhow::Result<Launcher> {
        match self.scheduler.kind {
            Kind::Local => Ok(Launcher::Local(Local::new(&self.run.state()))),
            Kind::Ray => {
                let Some(address) = &self.scheduler.address else {
                    let problem = "`[scheduler]` of kind `ray` has no `address`";
                    return Err(Failure::usage(problem).hint("give `http://HEAD:8265`").into());
                };
                let token = embedded::key("loop", None)?;
                Ok(Launcher::Ray(Ray::new(address, &self.scope(), token.as_ref())?))
            }
            Kind::Slurm => {
                let Scheduler { partition, args, .. } = self.scheduler.clone();
                Ok(Launcher::Slurm(Slurm::new(partition, args, &self.scope())))
            }
        }
    }

    /// Makes the folders of the run.
    pub(super) fn make_folders(&self, without: &[String]) -> anyhow::Result<()> {
        let hops = self.run.hops(without).into_iter().map(|hop| hop.into);
        let own = [self.run.turns(), self.run.policy(), self.run.logs(), self.run.state()];
        let here = own.into_iter().chain(hops).filter(|folder| !Address::is(folder));
        for folder in here {
            fs::create_dir_all(&folder).map_err(|error| {
                Failure::failed(format!("cannot make `{}`: {error}", folder.display()))
            })?;
        }
        Ok(())
    }
}

/// Returns what is wanted beside the file: flags, or what the file has of them.
pub(super) fn wishes(args: &Args, program: String, config: String) -> Wishes {
    Wishes {
        program,
        config,
        run: Run::new(&args.run).with_store(args.store.clone()),
        without: args.without.clone(),
        weight_sync_interval: args.weight_sync_interval,
        train_when_idle: args.train_when_idle.clone(),
        train_hours: args.train_hours.clone(),
    }
}

/// Reads the plan of a configuration.
fn plan(config: &Path) -> Result<Plan, Failure> {
    let text = fs::read_to_string(config).map_err(|error| {
        Failure::usage(format!("cannot read config `{}`: {error}", config.display()))
    })?;
    let mut plan = Plan::parse(&text, units::duration).map_err(|error| told(config, &error))?;
    // Names that are others elsewhere are ours by now.
    let configured = Configured::read::<crate::Cli>(config).map_err(Failure::usage)?;
    plan.flags = configured.keys().clone();
    Ok(plan)
}

fn told(config: &Path, error: &pipeline::Error) -> Failure {
    Failure::usage(format!("config `{}` {error}", config.display()))
}

/// Returns what a stage was told by the environment or the file.
fn given(plan: &Plan, section: &str, key: &str) -> Option<String> {
    let word = |text: &str| text.replace('-', "_").to_uppercase();
    // A flag that all have is in no section.
    let sections = [section, key].into_iter().filter(|part| !part.is_empty());
    let variable = format!("OCLAW_{}", sections.map(word).collect::<Vec<_>>().join("_"));
    let told = std::env::var(variable).ok().or_else(|| plan.value(section, key).map(str::to_owned));
    // A switch that is off is not given.
    told.filter(|value| value != "false")
}

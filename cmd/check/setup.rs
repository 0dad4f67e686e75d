//! The loop that a file asks for: its processes, and the settings of each as it
//! would see them.

use std::collections::BTreeMap;
use std::path::Path;

use clap::ArgMatches;
use oclaw::pipeline::{self, Child, Origin, Plan, Run, Serves, Wishes};

use super::finding::Finding;
use crate::settings::Configured;
use crate::units;

/// A loop, as far as its file tells.
pub(super) struct Setup {
    pub(super) plan: Plan,
    pub(super) run: Run,
    pub(super) without: Vec<String>,
    pub(super) children: Vec<Child>,
    /// Where the loop itself listens.
    pub(super) listen: Option<String>,
    /// Whether somebody has said how old the policies of trained turns may be.
    pub(super) tells_staleness: bool,
    /// The settings of each process of ours, by its name.
    settings: BTreeMap<String, ArgMatches>,
}

/// Reads a file. Nothing if no loop can be made of it; the findings say why. What a loop
/// was `told` beside the file, and where it listens, goes before that.
pub(super) fn read(
    path: &Path,
    told: Option<(Wishes, Option<String>)>,
    findings: &mut Vec<Finding>,
) -> Option<Setup> {
    let subject = path.display().to_string();
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) => {
            let missing = error.kind() == std::io::ErrorKind::NotFound;
            let finding = Finding::fail("settings", subject, format!("cannot be read: {error}"));
            findings.push(match missing {
                true => finding.remedy("`oclaw init` writes one"),
                false => finding,
            });
            return None;
        }
    };
    let known = Configured::read::<crate::Cli>(path);
    let configured = match known {
        Ok(configured) => configured,
        Err(problem) => {
            findings.push(Finding::fail("settings", subject, problem));
            return None;
        }
    };
    // It was read once already.
    let mut plan = Plan::parse(&text, units::duration).ok()?;
    plan.flags = configured.keys().clone();
    let given = |section: &str, key: &str| configured.given(section, key);
    let (mut wishes, listen) =
        told.unwrap_or_else(|| (wishes(path, &configured), configured.given("loop", "listen")));
    let mut wrong = Vec::new();
    // The loop's own, which no process of it reads. What is faulty there is told once, under
    // the name that it has there, and not passed on.
    let own = [wishes.program.clone(), "loop".to_owned(), wishes.config.clone()];
    if let Err(problem) = configured.parse(&own) {
        wrong.push(Finding::fail("settings", "[loop]".to_owned(), problem));
        (wishes.train_when_idle, wishes.train_hours) = (None, Vec::new());
    }
    let children = match pipeline::children(&plan, &wishes, &given) {
        Ok(children) => children,
        Err(error) => {
            findings.append(&mut wrong);
            findings.push(Finding::error("settings", subject, error));
            return None;
        }
    };
    let mut settings = BTreeMap::new();
    let ours = children.iter().filter(|child| child.argv.first() == Some(&wishes.program));
    for child in ours {
        match configured.parse(&child.argv) {
            Ok(matches) => {
                settings.insert(child.name.clone(), matches);
            }
            Err(problem) => {
                wrong.push(Finding::fail("settings", format!("[{}]", child.name), problem));
            }
        }
    }
    let (count, sections) = (plan.flags.len(), settings.len());
    match wrong.is_empty() {
        true => findings.push(Finding::ok(
            "settings",
            subject,
            format!("{count} settings, {sections} processes of ours"),
        )),
        false => findings.extend(wrong),
    }
    let Wishes { run, without, .. } = wishes;
    let tells_staleness = given("train", "max-staleness").is_some();
    Some(Setup { plan, run, without, children, listen, tells_staleness, settings })
}

fn wishes(path: &Path, configured: &Configured) -> Wishes {
    let given = |key: &str| configured.given("loop", key);
    Wishes {
        program: "oclaw".to_owned(),
        config: path.display().to_string(),
        run: Run::new(given("run").unwrap_or_else(|| "run".to_owned())).with_store(given("store")),
        without: configured.all_given("loop", "without"),
        weight_sync_interval: 1,
        train_when_idle: given("train-when-idle"),
        train_hours: configured.all_given("loop", "train-hours"),
    }
}

impl Setup {
    /// Whether a stage runs.
    pub(super) fn runs(&self, stage: &str) -> bool {
        self.children.iter().any(|child| child.name == stage)
    }

    /// Whether a process of ours runs whose settings are sound.
    pub(super) fn knows(&self, name: &str) -> bool {
        self.settings.contains_key(name)
    }

    /// Returns all values of a setting of a process, as that will see them.
    pub(super) fn values(&self, name: &str, key: &str) -> Vec<String> {
        let id = key.replace('-', "_");
        let found = self.settings.get(name).and_then(|it| it.try_get_raw(&id).ok().flatten());
        let words = found.into_iter().flatten().map(|word| word.to_string_lossy().into_owned());
        words.filter(|word| !word.is_empty()).collect()
    }

    /// Returns the value of a setting of a process.
    pub(super) fn value(&self, name: &str, key: &str) -> Option<String> {
        self.values(name, key).into_iter().next()
    }

    /// Returns the processes of ours that have a setting, with its value.
    pub(super) fn with(&self, key: &'static str) -> impl Iterator<Item = (&str, String)> {
        let names = self.settings.keys();
        names.filter_map(move |name| Some((name.as_str(), self.value(name, key)?)))
    }

    /// Returns the folder of the model that samples the answers, if the file tells.
    pub(super) fn policy(&self) -> Option<String> {
        let planned = self.plan.engines_for(Serves::Policy);
        let planned = planned.filter_map(|(_, engine)| match &engine.origin {
            Origin::Model(folder) => Some(folder.display().to_string()),
            Origin::Command(words) => model_in(words),
            Origin::Elsewhere => None,
        });
        planned.into_iter().next().or_else(|| self.value("serve", "model"))
    }

    /// Returns the address of an engine that the loop starts, if it is one.
    pub(super) fn starts(&self, url: &str) -> bool {
        let plain = |url: &str| {
            let host = url.split("://").last().unwrap_or(url);
            host.trim_end_matches('/').trim_end_matches("/v1").to_owned()
        };
        let own = self.plan.engines.values().filter(|engine| engine.origin != Origin::Elsewhere);
        own.into_iter().any(|engine| plain(&engine.url) == plain(url))
            || self
                .value("serve", "model")
                .and_then(|_| self.value("serve", "engine-listen"))
                .is_some_and(|listen| url.ends_with(&listen))
    }
}

/// Finds the folder of the model in the command line of a server.
fn model_in(words: &[String]) -> Option<String> {
    let flags = ["--model-path", "--model"];
    let pairs = words.iter().zip(words.iter().skip(1));
    let apart = pairs.filter(|(flag, _)| flags.contains(&flag.as_str())).map(|(_, value)| value);
    let joined = words.iter().filter_map(|word| {
        let (flag, value) = word.split_once('=')?;
        flags.contains(&flag).then_some(value)
    });
    apart.map(String::as_str).chain(joined).next().map(str::to_owned)
}

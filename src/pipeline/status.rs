//! How a loop is, in one piece.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{Account, ChildStatus, Error, Identity, Queue, Run, write_aside};
use crate::health::{self, Evidence, Step, Survey};

/// How a loop is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The folder of the run.
    pub run: String,
    /// The object store by which its stages meet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<String>,
    /// When this was, in seconds since 1970.
    pub at: u64,
    /// The supervisor's process, if there is one.
    pub supervisor: Option<Identity>,
    /// When it began, in seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub began: Option<u64>,
    /// Stages that the loop does without.
    pub without: Vec<String>,
    /// The processes.
    pub children: Vec<ChildStatus>,
    /// The stages.
    pub stages: Vec<Queue>,
    /// The policies.
    pub policy: PolicyStatus,
    /// When the store told what is shown of turns and policies, in seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub told_at: Option<u64>,
    /// What has become of the turns. Nothing as long as nobody knows.
    pub account: Option<Account>,
    /// Why nobody knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub untold: Option<String>,
}

/// How the policies are.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PolicyStatus {
    /// The step that `latest` names.
    pub published: Option<u64>,
    /// The version that each engine serves, by its address; `null` is not known.
    pub served: BTreeMap<String, Option<String>>,
    /// How many steps the engine that is furthest behind is behind.
    pub staleness: Option<u64>,
    /// The last step of which there are metrics.
    pub last_step: Option<u64>,
    /// What that step says to the three questions.
    pub health: BTreeMap<String, String>,
}

impl PolicyStatus {
    /// Looks at the policies of a run, of which this is the newest.
    pub fn of(run: &Run, published: Option<u64>, served: BTreeMap<String, Option<String>>) -> Self {
        let steps = steps(run);
        let behind = |version: &Option<String>| {
            let served: u64 = version.as_deref()?.parse().ok()?;
            Some(published.unwrap_or(0).saturating_sub(served))
        };
        let staleness = served.values().filter_map(behind).max();
        let evidence = Evidence { survey: &Survey::default(), steps: &steps };
        let health = health::answers(&evidence).into_iter().map(|answer| {
            (answer.question.as_str().to_owned(), answer.verdict.as_str().to_owned())
        });
        let health = if steps.is_empty() { BTreeMap::new() } else { health.collect() };
        Self { published, served, staleness, last_step: steps.last().map(|step| step.step), health }
    }

    /// Looks at the policies of a run of which nobody knows the newest: whoever has it has
    /// not told yet.
    pub fn untold(run: &Run, served: BTreeMap<String, Option<String>>) -> Self {
        Self { staleness: None, ..Self::of(run, None, served) }
    }
}

/// Reads the metrics of a run. A line that is still being written is left out.
pub(super) fn steps(run: &Run) -> Vec<Step> {
    let text = std::fs::read_to_string(run.metrics()).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

impl Status {
    /// Leaves it where `oclaw loop --status` finds it.
    pub fn keep(&self, run: &Run) -> Result<(), Error> {
        let text = serde_json::to_vec_pretty(self).unwrap_or_default();
        write_aside(&path(run), &text)
    }

    /// Reads what was kept last, if anything.
    pub fn kept(run: &Run) -> Option<Self> {
        serde_json::from_slice(&std::fs::read(path(run)).ok()?).ok()
    }

    /// Writes it in Prometheus' text format.
    pub fn prometheus(&self) -> String {
        let mut text = Text::default();
        // Nothing is not none: what nobody knows has no figure.
        if let Some(account) = &self.account {
            text.turns(account);
        }
        if let Some(told) = self.told_at {
            let age = self.at.saturating_sub(told);
            text.one("store_age_seconds", "Since the store told of it.", age as f64);
        }
        let queues: [Figure; 5] = [
            ("queue_shards", "Shards that wait.", |it| Some(it.shards as f64)),
            ("queue_rows", "Rows that wait.", |it| Some(it.rows as f64)),
            ("queue_oldest_seconds", "Age of the oldest shard.", |it| {
                it.oldest.map(|seconds| seconds as f64)
            }),
            ("stage_rows_per_minute", "Rows done in a minute.", |it| Some(it.rows_per_minute)),
            ("stage_failed_shards", "Shards given up.", |it| Some(it.failed as f64)),
        ];
        for (name, help, value) in queues {
            text.family(name, help);
            for queue in &self.stages {
                // Nobody waits: that has no age.
                if let Some(value) = value(queue) {
                    text.sample(name, &[("stage", &queue.stage)], value);
                }
            }
        }
        text.family("process_up", "Whether a process is at work.");
        for child in &self.children {
            let up = f64::from(u8::from(child.phase == "up"));
            text.sample("process_up", &[("process", &child.name), ("phase", &child.phase)], up);
        }
        text.family("process_restarts", "Starts of a process after its first.");
        for child in &self.children {
            text.sample("process_restarts", &[("process", &child.name)], child.restarts as f64);
        }
        text.family("process_failures", "Ends in a row, with no steady minute in between.");
        for child in &self.children {
            let failures = f64::from(child.failures);
            text.sample("process_failures", &[("process", &child.name)], failures);
        }
        if let Some(step) = self.policy.published {
            text.one("policy_published", "Newest policy.", step as f64);
        }
        if let Some(behind) = self.policy.staleness {
            text.one("policy_staleness", "Steps that the engines are behind.", behind as f64);
        }
        text.family("policy_served", "Version that an engine serves.");
        for (engine, version) in &self.policy.served {
            // A version that is no step has no figure.
            if let Some(step) = version.as_ref().and_then(|it| it.parse::<u64>().ok()) {
                text.sample("policy_served", &[("engine", engine)], step as f64);
            }
        }
        text.family("policy_health", "Verdict of the last step: 1 for the one that holds.");
        for (question, verdict) in &self.policy.health {
            text.sample("policy_health", &[("question", question), ("verdict", verdict)], 1.0);
        }
        text.text
    }
}

/// A figure of every stage: name, help, value if there is one.
type Figure = (&'static str, &'static str, fn(&Queue) -> Option<f64>);

fn path(run: &Run) -> std::path::PathBuf {
    let state: &Path = &run.state();
    state.join("status.json")
}

#[derive(Default)]
struct Text {
    text: String,
}

impl Text {
    fn family(&mut self, name: &str, help: &str) {
        // Writing to a string cannot fail.
        let _ =
            write!(self.text, "# HELP oclaw_loop_{name} {help}\n# TYPE oclaw_loop_{name} gauge\n");
    }

    fn one(&mut self, name: &str, help: &str, value: f64) {
        self.family(name, help);
        self.sample(name, &[], value);
    }

    fn turns(&mut self, account: &Account) {
        self.one("turns_captured", "Rows in the spool.", account.captured as f64);
        self.one("turns_trained", "Turns trained.", account.trained as f64);
        self.one("turns_lost", "Rows that are nowhere.", account.lost as f64);
        self.family("turns_refused", "Turns not trained, by reason.");
        for (reason, count) in &account.refused {
            self.sample("turns_refused", &[("reason", reason)], *count as f64);
        }
        self.family("turns_pending", "Turns on their way, by stage.");
        for (stage, count) in &account.pending {
            self.sample("turns_pending", &[("stage", stage)], *count as f64);
        }
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
        let escaped =
            |text: &str| text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        let labels: Vec<_> =
            labels.iter().map(|(key, value)| format!("{key}=\"{}\"", escaped(value))).collect();
        let labels =
            if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        let _ = writeln!(self.text, "oclaw_loop_{name}{labels} {value}");
    }
}
